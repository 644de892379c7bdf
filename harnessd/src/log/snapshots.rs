//! Folded states of a session, kept so that its end can be read without its beginning.
//!
//! A snapshot is a convenience: it says nothing that the events before it do not. It is bound to
//! the hash of the event it was taken at, so that one of another history is never taken up, and
//! its kind carries a version, so that one of another program is not either.

use ipc::id::SessionId;
use rusqlite::{OptionalExtension, params};

use super::{Log, LogError};

/// Longer ones are not stored: they would cost more to write than they save to read.
const BYTES_MAX: usize = 256 * 1024;

impl Log {
    /// The newest snapshot of a kind at or before event `upto`, with its place.
    pub async fn snapshot(
        &self,
        session: &SessionId,
        kind: &'static str,
        upto: u64,
    ) -> Result<Option<(u64, String)>, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            let sql = "SELECT s.seq, s.body FROM snapshots s
                       JOIN events e ON e.session = s.session AND e.seq = s.seq AND e.hash = s.hash
                       WHERE s.session = ?1 AND s.kind = ?2 AND s.seq <= ?3
                       ORDER BY s.seq DESC LIMIT 1";
            let mut statement = connection.prepare_cached(sql)?;
            let upto = i64::try_from(upto).unwrap_or(i64::MAX);
            let row = statement.query_row(params![session.as_str(), kind, upto], |row| {
                Ok((row.get(0)?, row.get(1)?))
            });
            Ok(row.optional()?)
        })
        .await
    }

    /// Stores a snapshot taken at event `seq`; `only`: those before it are of no more use.
    pub async fn save_snapshot(
        &self,
        session: &SessionId,
        kind: &'static str,
        seq: u64,
        body: String,
        only: bool,
    ) -> Result<(), LogError> {
        if body.len() > BYTES_MAX {
            return Ok(());
        }
        let session = session.clone();
        let work = move |connection: &rusqlite::Connection| {
            let id = session.as_str();
            if only {
                let sql = "DELETE FROM snapshots WHERE session = ?1 AND kind = ?2 AND seq < ?3";
                connection.prepare_cached(sql)?.execute(params![id, kind, seq])?;
            }
            // Without its event, or a second time, nothing is stored.
            let sql = "INSERT OR IGNORE INTO snapshots (session, kind, seq, hash, body)
                       SELECT session, ?2, seq, hash, ?4 FROM events
                       WHERE session = ?1 AND seq = ?3";
            connection.prepare_cached(sql)?.execute(params![id, kind, seq, body])?;
            Ok(())
        };
        self.inner.writer.run(work).await
    }
}
