//! One record per decision and one per outcome, chained, on disk before the first byte leaves.

use std::path::Path;

use ipc::id::{CallId, LeaseId, RequestId, SandboxId, SessionId};
use ipc::vault::{AuditPage, ChainReport};

/// Why nothing may leave: the audit could not be written, or could not be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AuditError {
    #[error("the audit takes no more records: {0} are waiting for the disk")]
    Full(usize),
    #[error("cannot write the audit: {0}")]
    Write(String),
    #[error("cannot read the audit: {0}")]
    Read(String),
    #[error("the audit has ended")]
    Gone,
}

/// What a record says; the audit adds number, time and hash. Fields as in
/// [`ipc::vault::AuditRecord`]. A query in `path` is cut off.
#[derive(Clone, Default)]
pub struct Line {
    pub request: Option<RequestId>,
    pub lease: Option<LeaseId>,
    pub session: Option<SessionId>,
    pub sandbox: Option<SandboxId>,
    pub calls: Vec<CallId>,
    pub environment: Option<String>,
    pub generation: u64,
    pub entry: Option<String>,
    pub host: Option<String>,
    pub port: Option<u16>,
    pub address: Option<String>,
    pub method: Option<String>,
    pub path: Option<String>,
    pub rule: Option<String>,
    pub credential: Option<String>,
    pub reason: Option<String>,
    pub status: Option<u16>,
    pub bytes_up: Option<u64>,
    pub bytes_down: Option<u64>,
    pub duration_ms: Option<u64>,
    pub scrubbed: Option<u64>,
}

/// Which records a page holds.
#[derive(Clone, Default)]
pub struct Filter {
    /// Records after this number.
    pub after: u64,
    /// At most so many, and never more than [`PAGE_RECORDS_MAX`].
    pub limit: usize,
    pub session: Option<SessionId>,
    pub lease: Option<LeaseId>,
    pub call: Option<CallId>,
}

/// Most records in one page.
pub const PAGE_RECORDS_MAX: usize = 1000;

/// The audit. Clones share one writer.
#[derive(Clone)]
pub struct Audit {}

impl Audit {
    /// Opens or makes the store at `path` and starts its writer thread. The directory must hold
    /// nothing else that this process needs confined away: SQLite keeps its log beside the file.
    pub fn open(path: &Path) -> Result<Audit, AuditError> {
        let _ = path;
        todo!()
    }

    /// Records a decision; resolves when it is on disk. On an error nothing may leave.
    pub async fn decide(&self, allowed: bool, line: Line) -> Result<u64, AuditError> {
        let _ = (allowed, line);
        todo!()
    }

    /// Records how an allowed exchange ended. Resolves when it is queued.
    pub async fn outcome(&self, line: Line) -> Result<(), AuditError> {
        let _ = line;
        todo!()
    }

    /// Records something else worth a line; resolves when it is on disk.
    pub async fn note(&self, line: Line) -> Result<u64, AuditError> {
        let _ = line;
        todo!()
    }

    pub async fn page(&self, filter: Filter) -> Result<AuditPage, AuditError> {
        let _ = filter;
        todo!()
    }

    /// Recomputes the whole chain.
    pub async fn verify(&self) -> Result<ChainReport, AuditError> {
        todo!()
    }

    /// Writes what is queued and ends the writer; later records are refused.
    pub async fn close(&self) {
        todo!()
    }
}
