//! The session log: append, read by slice, verify, own, delete. Nothing else touches the database.
//!
//! One SQLite file for all sessions of a host: WAL, `synchronous=FULL`, group commit on one writer
//! thread. What is acknowledged is on disk. Events can neither be changed nor removed: triggers
//! refuse it, except for the one path that removes a whole session and leaves a tombstone. Each
//! event carries the hash of the one before ([`chain`]). The API's other objects live in the same
//! file ([`objects`]), so that a session and its first event appear together or not at all.

pub mod chain;
pub mod event;
pub mod objects;
mod owner;
mod read;
mod schema;
mod subscribe;
mod writer;

use std::path::Path;
use std::sync::Arc;

use ipc::fault::{Code, Fault};
use ipc::id::SessionId;
use ipc::session::LogEvent;
use ipc::vault::ChainReport;

use event::{Event, NewEvent, Status};
use objects::NewObject;

pub use owner::Ownership;
pub use subscribe::Subscription;

/// Why the log did not do as asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LogError {
    #[error("no session {0}")]
    NoSession(SessionId),
    #[error("no {kind} {id}")]
    NoObject { kind: String, id: String },
    #[error("session {session}: fencing number {ours} is out of date: another process owns it")]
    Fenced { session: SessionId, ours: u64 },
    /// The log has grown since it was read: read again and decide again.
    #[error("session {0}: the log has grown")]
    Moved(SessionId),
    #[error("{0}")]
    Conflict(String),
    #[error("session {session}: event {seq} is not readable: {why}")]
    Unreadable { session: SessionId, seq: u64, why: String },
    #[error("session log: {0}")]
    Database(Arc<rusqlite::Error>),
    #[error("session log: the writer has ended")]
    Closed,
}

impl From<rusqlite::Error> for LogError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(Arc::new(error))
    }
}

impl From<LogError> for Fault {
    fn from(error: LogError) -> Self {
        let code = match &error {
            LogError::NoSession(_) | LogError::NoObject { .. } => Code::NotFound,
            LogError::Fenced { .. } | LogError::Moved(_) | LogError::Conflict(_) => Code::Conflict,
            LogError::Unreadable { .. } => Code::Internal,
            LogError::Database(_) | LogError::Closed => Code::Unavailable,
        };
        let fault = Fault::new(code, error.to_string());
        match code {
            Code::Unavailable => fault.with_hint("is the disk of the state directory full?"),
            _ => fault,
        }
    }
}

/// What must hold for an append; checked in the append's own transaction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Guard {
    /// The appender owns the session under this fencing number. Client events need none.
    pub fence: Option<u64>,
    /// The log still ends with this event.
    pub last: Option<u64>,
}

/// The summary of a session's chain, kept with each append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub session: SessionId,
    pub owner: String,
    pub status: Status,
    pub events: u64,
    /// Hash of the last event, hex.
    pub head: String,
    pub fence: u64,
    /// Client events wait for the loop, or a turn is under way.
    pub unsettled: bool,
    pub created_at: String,
    pub updated_at: String,
}

/// What is left of a deleted session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tombstone {
    pub session: SessionId,
    pub owner: String,
    pub deleted_at: String,
    /// The principal that deleted it.
    pub deleted_by: String,
    pub events: u64,
    pub head: String,
}

/// The log of this host. Cheap to clone.
#[derive(Clone)]
pub struct Log {
    inner: Arc<Inner>,
}

struct Inner {}

impl Log {
    /// Opens or creates `sessions.db` in `dir`, which must be private. Blocking.
    pub fn open(dir: &Path) -> Result<Self, LogError> {
        todo!()
    }

    /// Creates a session with its object (kind `session`, id = session id) and first events.
    pub async fn create_session(
        &self,
        session: &SessionId,
        object: NewObject,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        todo!()
    }

    /// Appends events, all or none. When this returns, they are on disk.
    pub async fn append(
        &self,
        session: &SessionId,
        guard: Guard,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        todo!()
    }

    /// The events after `after`, oldest first, at most `limit`.
    pub async fn slice(
        &self,
        session: &SessionId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, LogError> {
        todo!()
    }

    /// All events of a session, oldest first.
    pub async fn all(&self, session: &SessionId) -> Result<Vec<Event>, LogError> {
        todo!()
    }

    /// Events as they are stored, with their hashes, for the operator.
    pub async fn stored(
        &self,
        session: &SessionId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<LogEvent>, LogError> {
        todo!()
    }

    pub async fn chain(&self, session: &SessionId) -> Result<Chain, LogError> {
        todo!()
    }

    /// Recomputes the chain and says what is wrong: a gap, a rewrite, a truncation.
    pub async fn verify(&self, session: &SessionId) -> Result<ChainReport, LogError> {
        todo!()
    }

    /// Removes a whole session and leaves a tombstone.
    pub async fn delete(&self, session: &SessionId, by: &str) -> Result<Tombstone, LogError> {
        todo!()
    }

    pub async fn tombstone(&self, session: &SessionId) -> Result<Option<Tombstone>, LogError> {
        todo!()
    }

    /// Sessions whose loop has something to do.
    pub async fn unsettled(&self) -> Result<Vec<SessionId>, LogError> {
        todo!()
    }

    /// Takes the session for this process, or says that another process has it.
    pub async fn acquire(&self, session: &SessionId) -> Result<Option<Ownership>, LogError> {
        todo!()
    }

    /// Follows a session from `after` on.
    pub fn subscribe(&self, session: &SessionId, after: u64) -> Subscription {
        todo!()
    }
}
