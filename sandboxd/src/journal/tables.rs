//! The journal's tables, and what is asked of them inside one transaction.

use std::path::Path;

use ipc::id::{CallId, SessionId};
use ipc::sandbox::Receipt;
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::{Fenced, JournalError, Record, Start};

/// Each makes the tables one version newer; the version is how many were run. Only ever appended
/// to.
pub const MIGRATIONS: &[&str] = &[
    "
CREATE TABLE identity (text TEXT NOT NULL) STRICT;
CREATE TABLE calls (
  call TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, digest TEXT NOT NULL,
  tool TEXT NOT NULL, started_at TEXT NOT NULL, fence INTEGER NOT NULL, receipt TEXT)
  STRICT, WITHOUT ROWID;
CREATE INDEX unfinished ON calls (call) WHERE receipt IS NULL;
CREATE TABLE sessions (
  session TEXT PRIMARY KEY, owner TEXT NOT NULL, fence INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE workspaces (
  workspace TEXT PRIMARY KEY, owner TEXT NOT NULL, path TEXT NOT NULL,
  device INTEGER NOT NULL, inode INTEGER NOT NULL) STRICT, WITHOUT ROWID;
",
    "
ALTER TABLE sessions ADD COLUMN deleted INTEGER NOT NULL DEFAULT 0;
CREATE INDEX of_session ON calls (session);
CREATE TABLE spent (call TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
",
];

pub fn lookup_in(tx: &Transaction<'_>, call: &CallId) -> rusqlite::Result<Option<Record>> {
    tx.prepare_cached("SELECT owner, digest, receipt FROM calls WHERE call = ?1")?
        .query_row([call.as_str()], |row| {
            let receipt: Option<String> = row.get(2)?;
            let receipt = receipt.map(|text| decode(&text)).transpose()?;
            Ok(Record { owner: row.get(0)?, digest: row.get(1)?, receipt })
        })
        .optional()
}

pub fn prepare(connection: &mut Connection, path: &Path) -> Result<String, JournalError> {
    let fail =
        |e: rusqlite::Error| JournalError::Database { path: path.to_owned(), why: e.to_string() };
    connection.pragma_update(None, "journal_mode", "WAL").map_err(fail)?;
    connection.pragma_update(None, "synchronous", "FULL").map_err(fail)?;
    // What is deleted is overwritten, not merely no longer found.
    connection.pragma_update(None, "secure_delete", "ON").map_err(fail)?;
    let version: usize =
        connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(fail)?;
    let known = MIGRATIONS.len();
    let Some(missing) = MIGRATIONS.get(version..) else {
        return Err(JournalError::Version { path: path.to_owned(), found: version, known });
    };
    let tx = connection.transaction().map_err(fail)?;
    missing.iter().try_for_each(|step| tx.execute_batch(step)).map_err(fail)?;
    tx.pragma_update(None, "user_version", known).map_err(fail)?;
    if version == 0 {
        let identity = format!("journal_{}", ipc::id::random_text(24));
        tx.execute("INSERT INTO identity VALUES (?1)", [identity]).map_err(fail)?;
    }
    let identity = tx.query_row("SELECT text FROM identity", [], |row| row.get(0)).map_err(fail)?;
    tx.commit().map_err(fail)?;
    Ok(identity)
}

/// Gives every call that was started and not finished its receipt.
pub fn recover(
    tx: &Transaction<'_>,
    identity: &str,
    recovered: impl Fn(&Start, &str) -> Receipt,
) -> rusqlite::Result<usize> {
    let unfinished: Vec<Start> = tx
        .prepare(
            "SELECT call, session, owner, digest, tool, started_at, fence FROM calls
             WHERE receipt IS NULL",
        )?
        .query_map([], |row| {
            Ok(Start {
                call: CallId::parse(&row.get::<_, String>(0)?).map_err(broken)?,
                session: SessionId::parse(&row.get::<_, String>(1)?).map_err(broken)?,
                owner: row.get(2)?,
                digest: row.get(3)?,
                tool: row.get(4)?,
                started_at: row.get(5)?,
                fence: row.get::<_, i64>(6)?.cast_unsigned(),
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    for start in &unfinished {
        let text = encode(&recovered(start, identity));
        tx.execute("UPDATE calls SET receipt = ?2 WHERE call = ?1", [start.call.as_str(), &text])?;
    }
    Ok(unfinished.len())
}

pub fn fence_in(
    tx: &Transaction<'_>,
    session: &SessionId,
    owner: &str,
    fence: u64,
) -> rusqlite::Result<Fenced> {
    let known: Option<(String, i64, bool)> = tx
        .prepare_cached("SELECT owner, fence, deleted FROM sessions WHERE session = ?1")?
        .query_row([session.as_str()], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .optional()?;
    if let Some((known_owner, highest, deleted)) = known {
        let highest = highest.cast_unsigned();
        if known_owner != owner {
            return Ok(Fenced::Foreign);
        }
        if deleted {
            return Ok(Fenced::Deleted);
        }
        if fence < highest {
            return Ok(Fenced::Stale { highest });
        }
        if fence == highest {
            return Ok(Fenced::Current);
        }
    }
    tx.prepare_cached(
        "INSERT INTO sessions (session, owner, fence) VALUES (?1, ?2, ?3)
         ON CONFLICT (session) DO UPDATE SET fence = excluded.fence",
    )?
    .execute(params![session.as_str(), owner, fence.cast_signed()])?;
    Ok(Fenced::Current)
}

/// Whether a call was one of a session that is deleted.
pub fn is_spent(tx: &Transaction<'_>, call: &CallId) -> rusqlite::Result<bool> {
    tx.prepare_cached("SELECT 1 FROM spent WHERE call = ?1")?.exists([call.as_str()])
}

pub fn delete_session(tx: &Transaction<'_>, session: &SessionId) -> rusqlite::Result<()> {
    let session = [session.as_str()];
    tx.execute("INSERT OR IGNORE INTO spent SELECT call FROM calls WHERE session = ?1", session)?;
    tx.execute("DELETE FROM calls WHERE session = ?1", session)?;
    tx.execute("UPDATE sessions SET deleted = 1 WHERE session = ?1", session)?;
    Ok(())
}

pub fn encode(receipt: &Receipt) -> String {
    serde_json::to_string(receipt).expect("a receipt has string keys only and always encodes")
}

fn decode(text: &str) -> rusqlite::Result<Receipt> {
    serde_json::from_str(text).map_err(broken)
}

pub fn broken(error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
}

/// As SQLite says it itself, with the kernel's reason.
pub fn full(error: std::io::Error) -> rusqlite::Error {
    let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
    rusqlite::Error::SqliteFailure(code, Some(format!("no room for a receipt: {error}")))
}
