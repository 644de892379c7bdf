//! The audit: one record for each decision and one for how it ended, in order, chained, on disk.
//!
//! A thread of its own writes. It takes everything that waits, writes it in one transaction, syncs
//! once, and only then lets the waiting requests go on: nothing leaves before its decision is on
//! disk, and many requests share one sync. When the disk refuses, or too much waits, decisions
//! fail and nothing leaves.
//!
//! Each record carries the hash of itself and of the one before ([`chain`]). `verify` finds a
//! record that was changed or is missing from the middle. It cannot see that the newest records
//! were cut off, nor a chain that was rewritten as a whole: for that a head must have been noted
//! elsewhere. A record holds names and paths, never a query, a header, a body or an injected value.

mod chain;
mod store;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipc::id::{CallId, LeaseId, RequestId, SandboxId, SessionId};
use ipc::vault::{AuditKind, AuditPage, AuditRecord, ChainReport};
use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use store::Writer;

/// Most records in one page.
pub const PAGE_RECORDS_MAX: usize = 1000;
/// Records that may wait for the disk: some tens of milliseconds of the fastest traffic.
const WAITING_MAX: usize = 4096;
/// Records in one transaction.
const GROUP_MAX: usize = 512;
/// How long a write waits for somebody who reads the store with another program.
const BUSY_TIMEOUT: Duration = Duration::from_millis(1000);

/// Why nothing may leave, or why the audit cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    #[error("the audit takes no more records: {0} are waiting for the disk")]
    Full(usize),
    #[error("cannot write the audit: {0}")]
    Write(String),
    #[error("cannot read the audit: {0}")]
    Read(String),
    #[error("the audit is closed")]
    Gone,
}

/// What a record says; the audit adds number, time and hash. Fields as in [`AuditRecord`]. A query
/// in `path` is cut off, and texts are cut to the lengths in [`Line::into_record`].
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

impl Line {
    fn into_record(self, kind: AuditKind) -> AuditRecord {
        let query = |byte: char| byte == '?' || byte == '#';
        AuditRecord {
            seq: 0,
            time: format!("{:.3}", jiff::Timestamp::now()),
            kind,
            request: self.request,
            lease: self.lease,
            session: self.session,
            sandbox: self.sandbox,
            calls: self.calls,
            environment: cut(self.environment, 128),
            generation: self.generation,
            entry: cut(self.entry, 32),
            host: cut(self.host, 255),
            port: self.port,
            address: cut(self.address, 64),
            method: cut(self.method, 64),
            path: cut(self.path.map(|path| path.split(query).next().unwrap_or("").into()), 2048),
            rule: cut(self.rule, 128),
            credential: cut(self.credential, 128),
            reason: cut(self.reason, 1024),
            status: self.status,
            bytes_up: self.bytes_up,
            bytes_down: self.bytes_down,
            duration_ms: self.duration_ms,
            scrubbed: self.scrubbed,
            hash: String::new(),
        }
    }
}

/// What a sandbox chose must not fill the disk.
fn cut(text: Option<String>, bytes_max: usize) -> Option<String> {
    text.map(|mut text| {
        if text.len() > bytes_max {
            let end = (0..=bytes_max).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(end);
            text.push('…');
        }
        text
    })
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

/// The audit. Clones share one writer.
#[derive(Clone)]
pub struct Audit {
    jobs: mpsc::Sender<Job>,
    reader: Arc<Mutex<Connection>>,
}

enum Job {
    Record(Box<AuditRecord>, Option<oneshot::Sender<Result<u64, AuditError>>>),
    Close(oneshot::Sender<()>),
}

impl Audit {
    /// Opens or makes the store at `path` and starts its writer. SQLite keeps its log beside the
    /// file, so the directory must be writable, also for a process that confines itself later.
    pub fn open(path: &Path) -> Result<Audit, AuditError> {
        let writer = Writer::open(path)?;
        let reader = Arc::new(Mutex::new(store::open_reader(path)?));
        let (jobs, waiting) = mpsc::channel(WAITING_MAX);
        std::thread::Builder::new()
            .name("audit".into())
            .spawn(move || write_groups(writer, waiting))
            .map_err(|error| AuditError::Write(error.to_string()))?;
        Ok(Audit { jobs, reader })
    }

    /// Records a decision; resolves when it is on disk. On an error nothing may leave.
    pub async fn decide(&self, allowed: bool, line: Line) -> Result<u64, AuditError> {
        let kind = if allowed { AuditKind::Allowed } else { AuditKind::Denied };
        self.written(kind, line).await
    }

    /// Records how an allowed exchange ended. Resolves when the record is queued: what happened is
    /// no longer to be stopped, so this waits for room where a decision would fail.
    pub async fn outcome(&self, line: Line) -> Result<(), AuditError> {
        let record = Box::new(line.into_record(AuditKind::Outcome));
        self.jobs.send(Job::Record(record, None)).await.map_err(|_| AuditError::Gone)
    }

    /// Records something else worth a line; resolves when it is on disk.
    pub async fn note(&self, line: Line) -> Result<u64, AuditError> {
        self.written(AuditKind::Note, line).await
    }

    async fn written(&self, kind: AuditKind, line: Line) -> Result<u64, AuditError> {
        let (done, written) = oneshot::channel();
        let job = Job::Record(Box::new(line.into_record(kind)), Some(done));
        self.jobs.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => AuditError::Full(WAITING_MAX),
            mpsc::error::TrySendError::Closed(_) => AuditError::Gone,
        })?;
        written.await.unwrap_or(Err(AuditError::Gone))
    }

    /// The records that the filter names, in order.
    pub async fn page(&self, filter: Filter) -> Result<AuditPage, AuditError> {
        self.read(move |db| store::page(db, &filter)).await
    }

    /// Recomputes the whole chain.
    pub async fn verify(&self) -> Result<ChainReport, AuditError> {
        self.read(store::verify).await
    }

    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, AuditError> + Send + 'static,
    ) -> Result<T, AuditError> {
        let reader = self.reader.clone();
        tokio::task::spawn_blocking(move || {
            work(&reader.lock().unwrap_or_else(PoisonError::into_inner))
        })
        .await
        .unwrap_or_else(|error| Err(AuditError::Read(error.to_string())))
    }

    /// Writes what is queued and ends the writer; later records are refused.
    pub async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.jobs.send(Job::Close(done)).await.is_ok() {
            // An error means that the writer has ended, which is what was asked for.
            let _ = closed.await;
        }
    }
}

/// The writer's life: everything that waits becomes one group.
fn write_groups(mut writer: Writer, mut waiting: mpsc::Receiver<Job>) {
    let mut closing = Vec::new();
    while let Some(first) = waiting.blocking_recv() {
        let mut records = Vec::new();
        let mut waiters = Vec::new();
        let mut next = Some(first);
        while let Some(job) = next {
            match job {
                Job::Record(record, waiter) => {
                    records.push(*record);
                    waiters.push(waiter);
                }
                Job::Close(done) => {
                    waiting.close();
                    closing.push(done);
                }
            }
            next = if records.len() < GROUP_MAX { waiting.try_recv().ok() } else { None };
        }
        let outcome = writer.append(&mut records);
        if let Err(error) = &outcome {
            tracing::error!(%error, records = records.len(), "audit records not written");
        }
        for (record, waiter) in records.iter().zip(waiters) {
            // Whoever waited may have gone away.
            let _ = waiter.map(|waiter| waiter.send(outcome.clone().map(|()| record.seq)));
        }
    }
    // The channel is closed and empty: everything that was taken is written.
    for done in closing {
        // Whoever closed may have stopped waiting.
        let _ = done.send(());
    }
}

#[cfg(test)]
mod tests;
