//! The session log: append, read by slice, verify, own, delete. Nothing else touches the database.
//!
//! One SQLite file for all sessions of a host: WAL, `synchronous=FULL`, group commit on one writer
//! thread. What is acknowledged is on disk. Events can neither be changed nor removed: triggers
//! refuse it, except for the one path that removes a whole session and leaves a tombstone. Each
//! event carries the hash of the one before ([`chain`]). The API's other objects live in the same
//! file ([`objects`]), so that a session and its first event appear together or not at all.

mod append;
pub mod chain;
pub mod event;
mod files;
pub mod objects;
mod owner;
mod read;
mod schema;
mod snapshots;
mod subscribe;
mod transfer;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ipc::fault::{Code, Fault};
use ipc::id::SessionId;
use rusqlite::Connection;

pub use event::{
    Agent, Body, CallOutcome, Created, ErrorKind, Event, Failure, HandKind, McpServer, McpSetting,
    McpTarget, NewEvent, Note, Permission, ReceiptFacts, RequestEnded, Retry, Status, StopReason,
    Summary, Tool, ToolResult, ToolUse, Usage,
};
pub use files::FILE;
pub use owner::Ownership;
pub use subscribe::Subscription;
pub use transfer::{Backup, Header, Import, ImportError, Line};
pub use writer::Seam;

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
    /// Another change came between: read again and decide again.
    #[error("{kind} {id}: changed by others meanwhile")]
    Overtaken { kind: String, id: String },
    #[error("{0}")]
    Conflict(String),
    #[error("session {session}: event {seq} is not readable: {why}")]
    Unreadable { session: SessionId, seq: u64, why: String },
    #[error("session log: {0}")]
    Database(Arc<rusqlite::Error>),
    #[error("session lock: {0}")]
    Lock(String),
    #[error("session log: the writer has ended")]
    Closed,
}

impl From<rusqlite::Error> for LogError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(Arc::new(error))
    }
}

impl LogError {
    /// Why the log is not usable and what to do, in words of ours: a database's own may hold more.
    pub fn advice(&self) -> &'static str {
        use rusqlite::ErrorCode;
        let Self::Database(error) = self else { return "see harnessd's log" };
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => {
                "the disk of harnessd's state directory is full: free some space there and try \
                 again"
            }
            Some(ErrorCode::SystemIoFailure) => {
                "the disk of harnessd's state directory refuses: is it full, a quota used up, or \
                 is it broken? Free some space there; the kernel's log says more"
            }
            Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => {
                "harnessd cannot write in its state directory: is it mounted read-only, or not its \
                 own any more?"
            }
            _ => "see harnessd's log",
        }
    }
}

impl From<LogError> for Fault {
    fn from(error: LogError) -> Self {
        let code = match &error {
            LogError::NoSession(_) | LogError::NoObject { .. } => Code::NotFound,
            LogError::Fenced { .. }
            | LogError::Moved(_)
            | LogError::Overtaken { .. }
            | LogError::Conflict(_) => Code::Conflict,
            LogError::Unreadable { .. } => Code::Internal,
            LogError::Database(_) | LogError::Lock(_) | LogError::Closed => Code::Unavailable,
        };
        let fault = Fault::new(code, error.to_string());
        match code {
            Code::Unavailable => fault.with_hint(error.advice()),
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
    /// The loop has nothing left to do after this append. Only together with `last`, else an
    /// event that came in between would wait for ever.
    pub settles: bool,
    /// The loop has something to do after this append, which its events do not say.
    pub wakes: bool,
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

struct Inner {
    path: PathBuf,
    lock_file: PathBuf,
    writer: writer::Writer,
    readers: Mutex<Vec<Connection>>,
    /// Asked for `data_version` only.
    watcher: Mutex<Connection>,
    signals: subscribe::Signals,
    /// Reads happen on the caller's own thread too.
    simulated: bool,
}

impl Log {
    /// Opens or creates `sessions.db` in `dir`, which must be private. Blocking.
    pub fn open(dir: &Path) -> Result<Self, LogError> {
        let path = dir.join("sessions.db");
        transfer::clear_left_behind(dir);
        let connection = schema::open_writer(&path)?;
        let watcher = schema::open_reader(&path)?;
        let writer =
            writer::Writer::start(connection).map_err(|e| LogError::Conflict(e.to_string()))?;
        Ok(Self::of(path, dir.join("owners.lock"), writer, watcher, false))
    }

    /// A log in memory that does everything on the caller's thread, for simulations in which one
    /// seed decides all. Logs of one `name` share their content; ownership lies in `dir`.
    pub fn simulated(dir: &Path, name: &str, seam: Arc<dyn Seam>) -> Result<Self, LogError> {
        let path = PathBuf::from(format!("file:{name}?mode=memory&cache=shared"));
        let connection = schema::open_writer(&path)?;
        let watcher = schema::open_reader(&path)?;
        let writer = writer::Writer::inline(connection, seam);
        Ok(Self::of(path, dir.join("owners.lock"), writer, watcher, true))
    }

    fn of(
        path: PathBuf,
        lock_file: PathBuf,
        writer: writer::Writer,
        watcher: Connection,
        simulated: bool,
    ) -> Self {
        let inner = Inner {
            path,
            lock_file,
            writer,
            readers: Mutex::new(Vec::new()),
            watcher: Mutex::new(watcher),
            signals: subscribe::Signals::default(),
            simulated,
        };
        Self { inner: Arc::new(inner) }
    }

    /// The time by the clock of this log.
    fn now(&self) -> String {
        self.inner.writer.now().unwrap_or_else(now)
    }
}

/// The one form of times in the log: RFC 3339 in UTC, milliseconds; texts compare as times do.
const TIME_FORM: &str = "%Y-%m-%dT%H:%M:%S%.3fZ";

/// The time in that form.
pub fn now() -> String {
    time_text(jiff::Timestamp::now())
}

/// Any time in that form.
pub fn time_text(time: jiff::Timestamp) -> String {
    time.strftime(TIME_FORM).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_with_what_to_do_and_without_the_databases_own_words() {
        let full = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
        let full = rusqlite::Error::SqliteFailure(full, Some("somebody's text".into()));

        let advice = LogError::from(full).advice();

        assert!(advice.contains("is full: free some space"), "{advice}");
        assert!(!advice.contains("somebody"), "{advice}");
    }
}
