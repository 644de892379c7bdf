//! The tables, and how they came to be: one migration after another, counted in `user_version`.
//!
//! A migration that was released is never edited; the next change is a new entry.

use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;

use super::LogError;

/// How long a writer waits for another process's transaction. Ours take milliseconds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

const MIGRATIONS: &[&str] = &[
    // 1: events, their chains, what is left of deleted sessions, the API's objects.
    "CREATE TABLE events (
        session TEXT NOT NULL,
        seq INTEGER NOT NULL,
        id TEXT NOT NULL UNIQUE,
        time TEXT NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        previous TEXT NOT NULL,
        hash TEXT NOT NULL,
        UNIQUE (session, seq)
    ) STRICT;
    CREATE TABLE chains (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        session TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        status TEXT NOT NULL,
        events INTEGER NOT NULL,
        head TEXT NOT NULL,
        fence INTEGER NOT NULL,
        unsettled INTEGER NOT NULL,
        created_at TEXT NOT NULL,
        updated_at TEXT NOT NULL
    ) STRICT;
    CREATE INDEX chains_unsettled ON chains (session) WHERE unsettled = 1;
    CREATE TABLE tombstones (
        session TEXT PRIMARY KEY NOT NULL,
        owner TEXT NOT NULL,
        deleted_at TEXT NOT NULL,
        deleted_by TEXT NOT NULL,
        events INTEGER NOT NULL,
        head TEXT NOT NULL
    ) STRICT;
    CREATE TRIGGER events_are_not_changed BEFORE UPDATE ON events
        BEGIN SELECT RAISE(ABORT, 'events are never changed'); END;
    CREATE TRIGGER events_are_not_removed BEFORE DELETE ON events
        WHEN NOT EXISTS (SELECT 1 FROM tombstones WHERE session = OLD.session)
        BEGIN SELECT RAISE(ABORT, 'events go only with their whole session'); END;
    CREATE TRIGGER tombstones_are_not_changed BEFORE UPDATE ON tombstones
        BEGIN SELECT RAISE(ABORT, 'tombstones are never changed'); END;
    CREATE TRIGGER tombstones_are_not_removed BEFORE DELETE ON tombstones
        BEGIN SELECT RAISE(ABORT, 'tombstones are never removed'); END;
    CREATE TRIGGER deleted_sessions_stay_deleted BEFORE INSERT ON events
        WHEN EXISTS (SELECT 1 FROM tombstones WHERE session = NEW.session)
        BEGIN SELECT RAISE(ABORT, 'the session was deleted'); END;
    CREATE TABLE objects (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,
        owner TEXT NOT NULL,
        unique_name TEXT,
        body TEXT NOT NULL,
        created_at TEXT NOT NULL,
        updated_at TEXT NOT NULL,
        archived_at TEXT,
        UNIQUE (kind, id)
    ) STRICT;
    CREATE INDEX objects_by_owner ON objects (kind, owner, position);
    CREATE UNIQUE INDEX objects_by_name ON objects (kind, owner, unique_name)
        WHERE unique_name IS NOT NULL AND archived_at IS NULL;
    CREATE TABLE object_versions (
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,
        body TEXT NOT NULL,
        updated_at TEXT NOT NULL,
        PRIMARY KEY (kind, id, version)
    ) STRICT;",
    // 2: folded states, so that a long session need not be read from its beginning. They say
    // nothing that the events do not: whoever doubts them may delete them all.
    "CREATE TABLE snapshots (
        session TEXT NOT NULL,
        kind TEXT NOT NULL,
        seq INTEGER NOT NULL,
        hash TEXT NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (session, kind, seq)
    ) STRICT, WITHOUT ROWID;",
    // 3: events of imports that are under way, which no session may be kept from by. Until now
    // they were among the others, and stayed there when an import failed.
    "CREATE TABLE imports (
        owner TEXT NOT NULL,
        session TEXT NOT NULL,
        seq INTEGER NOT NULL,
        id TEXT NOT NULL,
        time TEXT NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        previous TEXT NOT NULL,
        hash TEXT NOT NULL,
        UNIQUE (owner, session, seq)
    ) STRICT;
    DROP TRIGGER events_are_not_removed;
    DELETE FROM events WHERE session NOT IN (SELECT session FROM chains);
    CREATE TRIGGER events_are_not_removed BEFORE DELETE ON events
        WHEN NOT EXISTS (SELECT 1 FROM tombstones WHERE session = OLD.session)
        BEGIN SELECT RAISE(ABORT, 'events go only with their whole session'); END;",
    // 4: the bytes of uploaded files.
    "CREATE TABLE file_parts (
        file TEXT NOT NULL,
        number INTEGER NOT NULL,
        bytes BLOB NOT NULL,
        UNIQUE (file, number)
    ) STRICT;",
];

/// A connection that writes: durable at each commit.
pub(super) fn open_writer(path: &Path) -> Result<Connection, LogError> {
    let mut connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    enter_wal(&connection)?;
    // FULL syncs the log at each commit: an acknowledged event survives a power cut.
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update(None, "journal_size_limit", 64 * 1024 * 1024)?;
    // Many sessions touch many pages: room for them in memory (16 MiB), and in the write-ahead log
    // before it is taken over (4,000 pages), which costs syncs of its own.
    connection.pragma_update(None, "cache_size", -16 * 1024)?;
    connection.pragma_update(None, "wal_autocheckpoint", 4_000)?;
    // Confined to its state directory, the daemon has no place for temporary files.
    connection.pragma_update(None, "temp_store", "memory")?;
    migrate(&mut connection)?;
    Ok(connection)
}

/// Switching to WAL does not wait for others by itself, so two processes that make the file at the
/// same time would get in each other's way.
fn enter_wal(connection: &Connection) -> Result<(), LogError> {
    let deadline = std::time::Instant::now() + BUSY_TIMEOUT;
    loop {
        match connection.pragma_update(None, "journal_mode", "wal") {
            Ok(()) => return Ok(()),
            Err(error)
                if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy)
                    && std::time::Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// A connection that only reads.
pub(super) fn open_reader(path: &Path) -> Result<Connection, LogError> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "temp_store", "memory")?;
    connection.pragma_update(None, "query_only", true)?;
    Ok(connection)
}

/// A connection that copies the whole: it writes to a new file only.
pub(super) fn open_copier(path: &Path) -> Result<Connection, LogError> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "temp_store", "memory")?;
    Ok(connection)
}

fn migrate(connection: &mut Connection) -> Result<(), LogError> {
    let tx = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let done: usize = tx.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if done > MIGRATIONS.len() {
        return Err(LogError::Conflict(format!(
            "sessions.db has format {done}, this harnessd knows up to {}: use a newer one",
            MIGRATIONS.len()
        )));
    }
    for migration in &MIGRATIONS[done..] {
        tx.execute_batch(migration)?;
    }
    tx.pragma_update(None, "user_version", MIGRATIONS.len())?;
    tx.commit()?;
    Ok(())
}
