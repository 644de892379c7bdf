//! A session as a file, and the whole log as a copy: out while everything runs, and in again.
//!
//! An import stores events as they are, each checked against its hash and the one before it, in as
//! many steps as it needs. Until the last step the session does not exist; a step that is repeated
//! changes nothing, so an import that broke off is simply begun again.

use std::fs::File;
use std::time::Duration;

use ipc::id::SessionId;
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::{Body, Note};
use super::objects::{self, NewObject};
use super::read::{COLUMNS, stored};
use super::{Chain, Log, LogError, chain, read, schema};
use crate::state::State;

/// Said in the first line of a file.
pub const FORMAT: &str = "cleanhands session";
const VERSION: u32 = 1;
/// No copy takes so long.
const COPY_TIME_MAX: Duration = Duration::from_secs(6 * 3600);

/// A consistent copy of the whole log, already without a name.
#[derive(Debug)]
pub struct Backup {
    pub file: File,
    pub bytes: u64,
}

/// What a file says about its session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    pub format: String,
    pub version: u32,
    pub session: SessionId,
    /// The principal it belonged to.
    pub owner: String,
    pub events: u64,
    /// Hash of the last event.
    pub head: String,
    pub created_at: String,
    pub archived_at: Option<String>,
    /// The session's document.
    pub document: Value,
}

/// An event in a file: its body as the text that was hashed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    pub seq: u64,
    pub id: String,
    pub time: String,
    pub kind: String,
    pub body: String,
    pub previous: String,
    pub hash: String,
}

/// One step of an import.
#[derive(Clone, Debug)]
pub struct Import {
    pub header: Header,
    /// Events that follow those of the step before.
    pub events: Vec<Line>,
    /// Nothing follows.
    pub last: bool,
}

/// Why a session cannot be taken in.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("this is no file of a session, or of a later version: {0}")]
    Form(String),
    #[error("session {0} is here already")]
    Exists(SessionId),
    #[error("session {0} was deleted here, and its id is never used again")]
    Deleted(SessionId),
    #[error("the file was changed or is not whole: {0}")]
    Chain(String),
    #[error(transparent)]
    Log(#[from] LogError),
}

impl Log {
    /// Copies the log as it is at one moment; whoever writes goes on meanwhile.
    pub async fn backup(&self) -> Result<Backup, LogError> {
        let name = format!("backup-{}.db", ipc::id::random_text(12));
        let target = self.inner.path.with_file_name(name);
        let source = self.inner.path.clone();
        let work = move |_: &Connection| {
            let copied = copy(&source, &target);
            // With or without a copy, no name is left behind.
            let removed = std::fs::remove_file(&target);
            let file = copied?;
            removed.map_err(|e| LogError::Conflict(format!("{}: {e}", target.display())))?;
            let bytes = file.metadata().map(|m| m.len()).unwrap_or(0);
            Ok(Backup { file, bytes })
        };
        self.read(work).await
    }

    /// What the file of a session begins with.
    pub async fn export_header(
        &self,
        session: &SessionId,
        object: &objects::Object,
    ) -> Result<Header, LogError> {
        let Chain { owner, events, head, created_at, .. } = self.chain(session).await?;
        Ok(Header {
            format: FORMAT.to_owned(),
            version: VERSION,
            session: session.clone(),
            owner,
            events,
            head,
            created_at,
            archived_at: object.archived_at.clone(),
            document: object.body.clone(),
        })
    }

    /// Events for a file, behind `after`.
    pub async fn export(
        &self,
        session: &SessionId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Line>, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            let rows = read::rows(connection, &session, after, limit)?;
            Ok(rows.into_iter().map(|(event, body)| line(event, body)).collect())
        })
        .await
    }

    /// Takes one step of an import, for `owner`.
    pub async fn import(&self, owner: &str, step: Import) -> Result<Option<State>, ImportError> {
        let Import { header, events, last } = step;
        if header.format != FORMAT || header.version != VERSION {
            return Err(ImportError::Form(format!("{} {}", header.format, header.version)));
        }
        let session = header.session.clone();
        if self.tombstone(&session).await?.is_some() {
            return Err(ImportError::Deleted(session));
        }
        match self.chain(&session).await {
            Ok(_) => return Err(ImportError::Exists(session)),
            Err(LogError::NoSession(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let id = session.clone();
        let work = move |connection: &Connection| insert(connection, &id, &events);
        self.inner.writer.run(work).await?.map_err(ImportError::Chain)?;
        if !last {
            return Ok(None);
        }
        let state = self.check_imported(&header).await?;
        let (owner, status) = (owner.to_owned(), state.status());
        let time = self.now();
        let work = move |connection: &Connection| {
            establish(connection, &owner, &header, status.as_str(), &time)
        };
        self.inner.writer.run(work).await?;
        Ok(Some(state))
    }

    /// Reads what was taken in from its beginning, as it will be read from now on.
    async fn check_imported(&self, header: &Header) -> Result<State, ImportError> {
        let mut state = State::default();
        let mut check = chain::Check::new(header.session.as_str());
        loop {
            let lines = self.export(&header.session, state.seq, 1_000).await?;
            if lines.is_empty() {
                break;
            }
            for line in lines {
                let (event, body) = unline(line);
                check.event(&event, &body);
                let event = read::decode(&header.session, (event, body))?;
                state.take(&event);
            }
        }
        let report = check.finish(header.events, &header.head);
        match report.problems.first() {
            Some(problem) => Err(ImportError::Chain(problem.clone())),
            None if !state.created => Err(ImportError::Chain("it has no first event".to_owned())),
            None => Ok(state),
        }
    }
}

/// Removes copies that a process was making when it died. One that is being made now by another
/// process is younger.
pub(super) fn clear_left_behind(dir: &std::path::Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let modified = entry.metadata().and_then(|facts| facts.modified()).ok();
        let age = modified.and_then(|time| time.elapsed().ok()).unwrap_or_default();
        if name.starts_with("backup-") && name.ends_with(".db") && age > COPY_TIME_MAX {
            // If it stays, the next start finds it again.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn copy(source: &std::path::Path, target: &std::path::Path) -> Result<File, LogError> {
    let path = target.to_string_lossy();
    schema::open_copier(source)?.execute("VACUUM INTO ?1", [&path])?;
    File::open(target).map_err(|e| LogError::Conflict(format!("{}: {e}", target.display())))
}

fn line(event: ipc::session::LogEvent, body: String) -> Line {
    let ipc::session::LogEvent { seq, id, time, kind, previous, hash, .. } = event;
    Line { seq, id, time, kind, body, previous, hash }
}

fn unline(line: Line) -> (ipc::session::LogEvent, String) {
    let Line { seq, id, time, kind, body, previous, hash } = line;
    let body_value = Value::Null;
    (ipc::session::LogEvent { seq, id, time, kind, body: body_value, previous, hash }, body)
}

/// Stores events behind those that are there. The inner error says what is wrong with them.
fn insert(
    connection: &Connection,
    session: &SessionId,
    lines: &[Line],
) -> Result<Result<(), String>, LogError> {
    for line in lines {
        let (event, body) = unline(line.clone());
        let seq = event.seq;
        if chain::hash(session.as_str(), &event, &body) != event.hash {
            return Ok(Err(format!("event {seq} was rewritten")));
        }
        let before = match seq {
            0 => return Ok(Err("there is no event 0".to_owned())),
            1 => Some(chain::GENESIS.to_owned()),
            _ => hash_at(connection, session, seq - 1)?,
        };
        if before.as_ref() != Some(&event.previous) {
            return Ok(Err(format!("event {seq} does not follow the one before it")));
        }
        match hash_at(connection, session, seq)? {
            Some(hash) if hash == event.hash => continue,
            Some(_) => return Ok(Err(format!("another event {seq} is here already"))),
            None => {}
        }
        let sql = "INSERT INTO events (session, seq, id, time, kind, body, previous, hash)
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
        let (id, Line { time, kind, previous, hash, .. }) = (&event.id, line);
        let values = params![session.as_str(), seq, id, time, kind, body, previous, hash];
        connection.prepare_cached(sql)?.execute(values)?;
    }
    Ok(Ok(()))
}

fn hash_at(
    connection: &Connection,
    session: &SessionId,
    seq: u64,
) -> Result<Option<String>, LogError> {
    let sql = format!("{COLUMNS} WHERE session = ?1 AND seq = ?2");
    let mut statement = connection.prepare_cached(&sql)?;
    let row = statement.query_row(params![session.as_str(), seq], stored).optional()?;
    Ok(row.map(|(event, _)| event.hash))
}

/// Makes the session exist. It rests until its client says something, whatever it was doing where
/// it came from: there it may go on.
fn establish(
    connection: &Connection,
    owner: &str,
    header: &Header,
    status: &str,
    time: &str,
) -> Result<(), LogError> {
    let Header { session, events, head, created_at, archived_at, document, .. } = header;
    let sql = "INSERT INTO chains (session, owner, status, events, head, fence,
               unsettled, created_at, updated_at) VALUES (?1, ?2, ?3, ?4, ?5, 0, 0, ?6, ?7)";
    let values = params![session.as_str(), owner, status, events, head, created_at, time];
    connection.execute(sql, values)?;
    let object = NewObject {
        kind: "session",
        id: session.as_str().to_owned(),
        owner: owner.to_owned(),
        unique_name: None,
        body: document.clone(),
    };
    objects::insert(connection, &object, time)?;
    if archived_at.is_some() {
        let sql = "UPDATE objects SET archived_at = ?2 WHERE kind = 'session' AND id = ?1";
        connection.execute(sql, params![session.as_str(), archived_at])?;
    }
    let note = Note::Imported { events: *events, head: head.clone() };
    super::append::note(connection, session, Body::Note(note), time)
}
