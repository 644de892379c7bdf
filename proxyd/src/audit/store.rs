//! The audit's SQLite file: appends groups, reads pages, verifies the chain.

use std::path::Path;

use ipc::id::CallId;
use ipc::vault::{AuditKind, AuditPage, AuditRecord, ChainReport};
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, params};

use super::chain::{self, BEGINNING, Hash};
use super::{AuditError, BUSY_TIMEOUT, Filter, Line, PAGE_RECORDS_MAX};

/// Most problems that a report spells out.
const PROBLEMS_MAX: usize = 20;

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS record (
    seq INTEGER PRIMARY KEY,
    time TEXT NOT NULL,
    kind TEXT NOT NULL,
    request TEXT,
    lease TEXT,
    session TEXT,
    sandbox TEXT,
    calls TEXT NOT NULL,
    environment TEXT,
    generation INTEGER NOT NULL,
    entry TEXT,
    host TEXT,
    port INTEGER,
    address TEXT,
    method TEXT,
    path TEXT,
    rule TEXT,
    credential TEXT,
    reason TEXT,
    status INTEGER,
    bytes_up INTEGER,
    bytes_down INTEGER,
    duration_ms INTEGER,
    scrubbed INTEGER,
    hash BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS record_session ON record (session, seq) WHERE session IS NOT NULL;
CREATE INDEX IF NOT EXISTS record_lease ON record (lease, seq) WHERE lease IS NOT NULL;
-- Where a call's records are: found by it, never trusted; the record itself names its calls.
CREATE TABLE IF NOT EXISTS record_call (
    call TEXT NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (call, seq)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS record_is_never_changed BEFORE UPDATE ON record
    BEGIN SELECT RAISE (ABORT, 'audit records are never changed'); END;
CREATE TRIGGER IF NOT EXISTS record_is_never_deleted BEFORE DELETE ON record
    BEGIN SELECT RAISE (ABORT, 'audit records are never deleted'); END;
";

const INSERT: &str = "INSERT INTO record VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11,
    ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25)";

/// The only writer of the store.
pub(super) struct Writer {
    db: Connection,
    last: u64,
    head: Hash,
    /// Outcomes that could not be written since the last group that could.
    lost: usize,
}

fn cannot_write(error: impl std::fmt::Display) -> AuditError {
    AuditError::Write(error.to_string())
}

fn cannot_read(error: impl std::fmt::Display) -> AuditError {
    AuditError::Read(error.to_string())
}

impl Writer {
    pub(super) fn open(path: &Path) -> Result<Self, AuditError> {
        let db = Connection::open(path).map_err(cannot_write)?;
        db.busy_timeout(BUSY_TIMEOUT).map_err(cannot_write)?;
        // Pages of a log that is only ever appended to: FULL syncs it at each commit.
        db.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA trusted_schema = OFF;",
        )
        .map_err(cannot_write)?;
        db.execute_batch(SCHEMA).map_err(cannot_write)?;
        let newest = db
            .query_row("SELECT seq, hash FROM record ORDER BY seq DESC LIMIT 1", [], |row| {
                Ok((row.get::<_, u64>(0)?, row.get::<_, Hash>(1)?))
            })
            .optional()
            .map_err(cannot_write)?;
        let (last, head) = newest.unwrap_or((0, BEGINNING));
        Ok(Self { db, last, head, lost: 0 })
    }

    /// Numbers, chains and writes a group; all of it is on disk when this returns, or none of it.
    pub(super) fn append(&mut self, records: &mut [AuditRecord]) -> Result<(), AuditError> {
        if records.is_empty() {
            return Ok(());
        }
        let appended = self.try_append(records);
        match &appended {
            Ok((last, head)) => (self.last, self.head, self.lost) = (*last, *head, 0),
            Err(_) => {
                self.lost += records.iter().filter(|r| r.kind == AuditKind::Outcome).count();
            }
        }
        appended.map(drop)
    }

    fn try_append(&mut self, records: &mut [AuditRecord]) -> Result<(u64, Hash), AuditError> {
        let (mut last, mut head) = (self.last, self.head);
        let transaction = self.db.transaction().map_err(cannot_write)?;
        if self.lost > 0 {
            let reason = format!("{} outcomes could not be written before this", self.lost);
            let mut note =
                Line { reason: Some(reason), ..Line::default() }.into_record(AuditKind::Note);
            insert(&transaction, &mut note, &mut last, &mut head).map_err(cannot_write)?;
        }
        for record in records {
            insert(&transaction, record, &mut last, &mut head).map_err(cannot_write)?;
        }
        transaction.commit().map_err(cannot_write)?;
        Ok((last, head))
    }
}

fn insert(
    db: &Connection,
    record: &mut AuditRecord,
    last: &mut u64,
    head: &mut Hash,
) -> rusqlite::Result<()> {
    *last += 1;
    record.seq = *last;
    *head = chain::hash(head, record);
    record.hash = hex::encode(*head);
    db.prepare_cached(INSERT)?.execute(params![
        record.seq,
        record.time,
        chain::word(record.kind),
        record.request.as_ref().map(|id| id.as_str()),
        record.lease.as_ref().map(|id| id.as_str()),
        record.session.as_ref().map(|id| id.as_str()),
        record.sandbox.as_ref().map(|id| id.as_str()),
        chain::calls(record),
        record.environment,
        record.generation,
        record.entry,
        record.host,
        record.port,
        record.address,
        record.method,
        record.path,
        record.rule,
        record.credential,
        record.reason,
        record.status,
        record.bytes_up,
        record.bytes_down,
        record.duration_ms,
        record.scrubbed,
        &head[..],
    ])?;
    let mut call = db.prepare_cached("INSERT OR IGNORE INTO record_call VALUES (?1, ?2)")?;
    for id in &record.calls {
        call.execute(params![id.as_str(), record.seq])?;
    }
    Ok(())
}

/// A connection that cannot write.
pub(super) fn open_reader(path: &Path) -> Result<Connection, AuditError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags(path, flags).map_err(cannot_read)?;
    db.busy_timeout(BUSY_TIMEOUT).map_err(cannot_read)?;
    Ok(db)
}

pub(super) fn page(db: &Connection, filter: &Filter) -> Result<AuditPage, AuditError> {
    let mut statement = db
        .prepare_cached(
            "SELECT * FROM record WHERE seq > ?1
             AND (?2 IS NULL OR session = ?2) AND (?3 IS NULL OR lease = ?3)
             AND (?4 IS NULL OR seq IN (SELECT seq FROM record_call WHERE call = ?4))
             ORDER BY seq LIMIT ?5",
        )
        .map_err(cannot_read)?;
    let limit = filter.limit.clamp(1, PAGE_RECORDS_MAX);
    let rows = statement
        .query_map(
            params![
                filter.after,
                filter.session.as_ref().map(|id| id.as_str()),
                filter.lease.as_ref().map(|id| id.as_str()),
                filter.call.as_ref().map(|id| id.as_str()),
                limit,
            ],
            record,
        )
        .map_err(cannot_read)?;
    let records: Vec<AuditRecord> = rows.collect::<Result<_, _>>().map_err(cannot_read)?;
    let last = records.last().map_or(filter.after, |record| record.seq);
    Ok(AuditPage { records, last })
}

pub(super) fn verify(db: &Connection) -> Result<ChainReport, AuditError> {
    let mut statement = db.prepare("SELECT * FROM record ORDER BY seq").map_err(cannot_read)?;
    let mut rows = statement.query([]).map_err(cannot_read)?;
    let (mut records, mut expected, mut head) = (0, 1, BEGINNING);
    let mut problems = Vec::new();
    while let Some(row) = rows.next().map_err(cannot_read)? {
        records += 1;
        let seq: u64 = row.get("seq").map_err(cannot_read)?;
        let stored: Hash = row.get("hash").map_err(cannot_read)?;
        let problem = match record(row) {
            _ if seq != expected => Some(match seq - 1 - expected {
                0 => format!("record {expected} is missing"),
                _ => format!("records {expected} to {} are missing", seq - 1),
            }),
            Ok(record) if chain::hash(&head, &record) == stored => None,
            Ok(_) => Some(format!("record {seq} was changed, or follows another one than it did")),
            Err(_) => Some(format!("record {seq} is not readable")),
        };
        if problems.len() < PROBLEMS_MAX {
            problems.extend(problem);
        }
        (expected, head) = (seq + 1, stored);
    }
    Ok(ChainReport { records, head: hex::encode(head), problems })
}

fn record(row: &Row<'_>) -> rusqlite::Result<AuditRecord> {
    let kind: String = row.get("kind")?;
    let kind = [AuditKind::Allowed, AuditKind::Denied, AuditKind::Outcome, AuditKind::Note]
        .into_iter()
        .find(|known| chain::word(*known) == kind)
        .ok_or_else(|| illegal("kind"))?;
    let calls: String = row.get("calls")?;
    let calls = calls.split(' ').filter(|call| !call.is_empty());
    Ok(AuditRecord {
        seq: row.get("seq")?,
        time: row.get("time")?,
        kind,
        request: id(row, "request")?,
        lease: id(row, "lease")?,
        session: id(row, "session")?,
        sandbox: id(row, "sandbox")?,
        calls: calls
            .map(|call| CallId::parse(call).map_err(|_| illegal("calls")))
            .collect::<Result<_, _>>()?,
        environment: row.get("environment")?,
        generation: row.get("generation")?,
        entry: row.get("entry")?,
        host: row.get("host")?,
        port: row.get("port")?,
        address: row.get("address")?,
        method: row.get("method")?,
        path: row.get("path")?,
        rule: row.get("rule")?,
        credential: row.get("credential")?,
        reason: row.get("reason")?,
        status: row.get("status")?,
        bytes_up: row.get("bytes_up")?,
        bytes_down: row.get("bytes_down")?,
        duration_ms: row.get("duration_ms")?,
        scrubbed: row.get("scrubbed")?,
        hash: hex::encode(row.get::<_, Hash>("hash")?),
    })
}

fn id<T: TryFrom<String>>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| T::try_from(text).map_err(|_| illegal(column))).transpose()
}

fn illegal(column: &str) -> rusqlite::Error {
    rusqlite::Error::InvalidColumnName(column.to_owned())
}
