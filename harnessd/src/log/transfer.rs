//! A session as a file, and the whole log as a copy: out while everything runs, and in again.
//!
//! An import gathers events as they are, each checked against its hash and the one before it, in as
//! many steps as it needs and in a table of its own. The last step moves them to the log at once:
//! until then the session does not exist. A step that is repeated changes nothing, and what a file
//! that was refused has left goes, so an import that failed or broke off is simply begun again.
//! What was gathered does not stay for long: an owner has one import under way, a step for another
//! session ends the one before, and so does a start of the daemon.

use std::fs::File;
use std::time::Duration;

use ipc::id::SessionId;
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::{Body, Note, Status};
use super::objects::{self, NewObject};
use super::read::stored;
use super::{Chain, Log, LogError, TIME_FORM, chain, read, schema};

/// Said in the first line of a file.
pub const FORMAT: &str = "cleanhands session";
const VERSION: u32 = 1;
/// The events of one owner's import of one session.
const GATHERED: &str = "SELECT seq, id, time, kind, body, previous, hash FROM imports
                        WHERE owner = ?1 AND session = ?2";
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

    /// Forgets what imports have gathered that were under way, and have to be begun again.
    pub async fn break_imports_off(&self) -> Result<(), LogError> {
        let work = |connection: &Connection| Ok(connection.execute("DELETE FROM imports", [])?);
        self.inner.writer.run(work).await.map(drop)
    }

    /// Takes one step of an import, for `owner`. True: the session is here.
    pub async fn import(&self, owner: &str, step: Import) -> Result<bool, ImportError> {
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
        let outcome = self.take(owner, Import { header, events, last }).await;
        if outcome.is_err() {
            let place = (owner.to_owned(), session);
            let work = move |connection: &Connection| discard(connection, &place.0, &place.1, 1);
            self.inner.writer.run(work).await?;
        }
        outcome
    }

    async fn take(&self, owner: &str, step: Import) -> Result<bool, ImportError> {
        let Import { header, events, last } = step;
        if let Some(event) = events.iter().find(|event| event.seq > header.events) {
            let (end, seq) = (header.events, event.seq);
            let text = format!("the log ends at event {end}, and event {seq} follows");
            return Err(ImportError::Chain(text));
        }
        let (whose, id) = (owner.to_owned(), header.session.clone());
        // What an import that broke off had gathered may be longer than this file.
        let end = last.then(|| events.last().map_or(header.events, |event| event.seq));
        let work = move |connection: &Connection| {
            discard_others(connection, &whose, &id)?;
            let gathered = gather(connection, &whose, &id, &events)?;
            if let Some(end) = end {
                discard(connection, &whose, &id, end.saturating_add(1))?;
            }
            Ok(gathered)
        };
        self.inner.writer.run(work).await?.map_err(ImportError::Chain)?;
        if !last {
            return Ok(false);
        }
        let status = self.check_imported(owner, &header).await?;
        let owner = owner.to_owned();
        let time = self.now();
        let work = move |connection: &Connection| {
            establish(connection, &owner, &header, status.as_str(), &time)
        };
        self.inner.writer.run(work).await?;
        Ok(true)
    }

    /// Events that an import has gathered, behind `after`.
    async fn gathered(
        &self,
        owner: &str,
        session: &SessionId,
        after: u64,
    ) -> Result<Vec<(ipc::session::LogEvent, String)>, LogError> {
        let (owner, session) = (owner.to_owned(), session.clone());
        self.read(move |connection| {
            let sql = format!("{GATHERED} AND seq > ?3 ORDER BY seq LIMIT 1000");
            let mut statement = connection.prepare_cached(&sql)?;
            let rows = statement.query_map(params![owner, session.as_str(), after], stored)?;
            Ok(rows.collect::<rusqlite::Result<_>>()?)
        })
        .await
    }

    /// Reads what was gathered from its beginning, as it will be read from now on; gives the status
    /// in which it ends.
    async fn check_imported(&self, owner: &str, header: &Header) -> Result<Status, ImportError> {
        let mut check = chain::Check::new(header.session.as_str());
        let (mut last, mut status) = (0, Status::default());
        let mut misplaced = None;
        loop {
            let rows = self.gathered(owner, &header.session, last).await?;
            if rows.is_empty() {
                break;
            }
            for (event, body) in rows {
                check.event(&event, &body);
                let event = read::decode(&header.session, (event, body))
                    .map_err(|error| ImportError::Chain(error.to_string()))?;
                last = event.seq;
                // The loop finds there, and only there, what the session is.
                if (last == 1) != matches!(event.body, Body::SessionCreated(_)) {
                    misplaced.get_or_insert(last);
                }
                status = event.body.status().unwrap_or(status);
            }
        }
        let report = check.finish(header.events, &header.head);
        if let Some(problem) = report.problems.first() {
            return Err(ImportError::Chain(problem.clone()));
        }
        match misplaced {
            Some(1) => Err(ImportError::Chain("its first event makes no session".to_owned())),
            Some(seq) => Err(ImportError::Chain(format!("event {seq} makes the session again"))),
            None if last == 0 => Err(ImportError::Chain("it has no first event".to_owned())),
            None => Ok(status),
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

/// Puts events behind those that were gathered. The inner error says what is wrong with them.
fn gather(
    connection: &Connection,
    owner: &str,
    session: &SessionId,
    lines: &[Line],
) -> Result<Result<(), String>, LogError> {
    for line in lines {
        let (event, body) = unline(line.clone());
        let seq = event.seq;
        if chain::hash(session.as_str(), &event, &body) != event.hash {
            return Ok(Err(format!("event {seq} was rewritten")));
        }
        if !is_time(&event.time) {
            return Ok(Err(format!("the time of event {seq} is none")));
        }
        let before = match seq {
            0 => return Ok(Err("there is no event 0".to_owned())),
            1 => Some(chain::GENESIS.to_owned()),
            _ => hash_at(connection, owner, session, seq - 1)?,
        };
        if before.as_ref() != Some(&event.previous) {
            return Ok(Err(format!("event {seq} does not follow the one before it")));
        }
        match hash_at(connection, owner, session, seq)? {
            Some(hash) if hash == event.hash => continue,
            // Of another file, whose import broke off.
            Some(_) => discard(connection, owner, session, seq)?,
            None => {}
        }
        let sql = "INSERT INTO imports (owner, session, seq, id, time, kind, body, previous, hash)
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
        let (id, Line { time, kind, previous, hash, .. }) = (&event.id, line);
        let session = session.as_str();
        let values = params![owner, session, seq, id, time, kind, body, previous, hash];
        connection.prepare_cached(sql)?.execute(values)?;
    }
    Ok(Ok(()))
}

/// Whether a text is a time in the form of the log: only those compare as times do.
fn is_time(text: &str) -> bool {
    let time = text.parse::<jiff::Timestamp>();
    time.is_ok_and(|time| time.strftime(TIME_FORM).to_string() == text)
}

fn hash_at(
    connection: &Connection,
    owner: &str,
    session: &SessionId,
    seq: u64,
) -> Result<Option<String>, LogError> {
    let sql = format!("{GATHERED} AND seq = ?3");
    let mut statement = connection.prepare_cached(&sql)?;
    let row = statement.query_row(params![owner, session.as_str(), seq], stored).optional()?;
    Ok(row.map(|(event, _)| event.hash))
}

/// Forgets what was gathered from event `first` on.
fn discard(
    connection: &Connection,
    owner: &str,
    session: &SessionId,
    first: u64,
) -> Result<(), LogError> {
    let first = i64::try_from(first).unwrap_or(i64::MAX);
    let sql = "DELETE FROM imports WHERE owner = ?1 AND session = ?2 AND seq >= ?3";
    connection.execute(sql, params![owner, session.as_str(), first])?;
    Ok(())
}

/// Forgets what another import of the same owner has gathered.
fn discard_others(
    connection: &Connection,
    owner: &str,
    session: &SessionId,
) -> Result<(), LogError> {
    let sql = "DELETE FROM imports WHERE owner = ?1 AND session <> ?2";
    connection.execute(sql, [owner, session.as_str()])?;
    Ok(())
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
    let Header { session, events, head, archived_at, document, .. } = header;
    // Another import of the same session, at the same time, may have changed what was checked.
    if hash_at(connection, owner, session, *events)?.as_ref() != Some(head) {
        let text = format!("session {session} is being imported twice at once");
        return Err(LogError::Conflict(text));
    }
    let sql = "INSERT INTO events (session, seq, id, time, kind, body, previous, hash)
               SELECT session, seq, id, time, kind, body, previous, hash FROM imports
               WHERE owner = ?1 AND session = ?2 AND seq <= ?3 ORDER BY seq";
    connection.execute(sql, params![owner, session.as_str(), events])?;
    discard(connection, owner, session, 1)?;
    // What the first line says is under no hash; the first event is.
    let sql = "SELECT time FROM events WHERE session = ?1 AND seq = 1";
    let created_at: String = connection.query_row(sql, [session.as_str()], |row| row.get(0))?;
    // The clock may be behind that of the host it came from; a session's times go on in order.
    let sql = "SELECT max(time) FROM events WHERE session = ?1";
    let latest: String = connection.query_row(sql, [session.as_str()], |row| row.get(0))?;
    let time = time.max(latest.as_str());
    let sql = "INSERT INTO chains (session, owner, status, events, head, fence,
               unsettled, created_at, updated_at) VALUES (?1, ?2, ?3, ?4, ?5, 0, 0, ?6, ?7)";
    let values = params![session.as_str(), owner, status, events, head, created_at, time];
    connection.execute(sql, values)?;
    let object = NewObject {
        kind: "session",
        id: session.as_str().to_owned(),
        owner: owner.to_owned(),
        unique_name: None,
        body: without_files(document),
    };
    objects::insert(connection, &object, time)?;
    let sql = "UPDATE objects SET created_at = ?2 WHERE kind = 'session' AND id = ?1";
    connection.execute(sql, params![session.as_str(), created_at])?;
    if archived_at.is_some() {
        let sql = "UPDATE objects SET archived_at = ?2 WHERE kind = 'session' AND id = ?1";
        connection.execute(sql, params![session.as_str(), archived_at])?;
    }
    let note = Note::Imported { events: *events, head: head.clone() };
    super::append::note(connection, session, Body::Note(note), time)
}

/// A session's document without the files that it was given elsewhere: they do not come along.
fn without_files(document: &serde_json::Value) -> serde_json::Value {
    let mut document = document.clone();
    if let Some(fields) = document.as_object_mut() {
        fields.shift_remove("resources");
        fields.shift_remove("given");
    }
    document
}
