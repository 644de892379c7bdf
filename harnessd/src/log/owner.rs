//! Who owns a session: a kernel lock that falls with its process, and a fencing number.
//!
//! The lock says that the former owner is gone or has let go; the number, raised with each
//! acquisition and checked with each append, stops one that is neither but believes it still owns
//! the session. No wall clock takes part (design, decision 16).

use ipc::id::SessionId;
use rusqlite::OptionalExtension;

use super::{Log, LogError};
use crate::sys::lock::RangeLock;

/// Ownership of a session by this process, until it is dropped.
#[derive(Debug)]
pub struct Ownership {
    session: SessionId,
    /// Goes with every append and to every hand.
    pub fence: u64,
    _lock: RangeLock,
}

impl Ownership {
    pub fn session(&self) -> &SessionId {
        &self.session
    }
}

impl Log {
    /// Takes the session for this process; `None` when another process or task has it.
    pub async fn acquire(&self, session: &SessionId) -> Result<Option<Ownership>, LogError> {
        let id = session.clone();
        let number: Option<i64> = self
            .read(move |connection| {
                let sql = "SELECT number FROM chains WHERE session = ?1";
                Ok(connection.query_row(sql, [id.as_str()], |row| row.get(0)).optional()?)
            })
            .await?;
        let number = number.ok_or_else(|| LogError::NoSession(session.clone()))?;
        let lock = RangeLock::try_take(&self.inner.lock_file, number.unsigned_abs())
            .map_err(|e| LogError::Lock(e.to_string()))?;
        let Some(lock) = lock else { return Ok(None) };
        let id = session.clone();
        let fence: i64 = self
            .inner
            .writer
            .run(move |connection| {
                let sql = "UPDATE chains SET fence = fence + 1 WHERE session = ?1 RETURNING fence";
                let fence =
                    connection.query_row(sql, [id.as_str()], |row| row.get(0)).optional()?;
                fence.ok_or(LogError::NoSession(id))
            })
            .await?;
        let fence = fence.unsigned_abs();
        Ok(Some(Ownership { session: session.clone(), fence, _lock: lock }))
    }
}
