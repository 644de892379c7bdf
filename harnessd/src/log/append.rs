//! Appending: the one way events come into the log, and the one way a session goes out of it.

use ipc::id::SessionId;
use ipc::session::LogEvent;
use rusqlite::{Connection, params};

use super::event::{Body, Event, NewEvent, Status};
use super::objects::{self, Change, NewObject, Object};
use super::writer::{Chains, Desk};
use super::{Chain, Guard, Log, LogError, Tombstone, chain, read};

impl Log {
    /// Creates a session with its object (kind `session`, id = session id) and first events.
    pub async fn create_session(
        &self,
        session: &SessionId,
        object: NewObject,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        let (session, time) = (session.clone(), self.now());
        self.inner
            .writer
            .run(move |connection| {
                let sql = "INSERT INTO chains (session, owner, status, events, head, fence,
                           unsettled, created_at, updated_at)
                           VALUES (?1, ?2, 'idle', 0, ?3, 0, 0, ?4, ?4)";
                let values = params![session.as_str(), object.owner, chain::GENESIS, time];
                connection.execute(sql, values)?;
                objects::insert(connection, &object, &time)?;
                let prepared = prepare(&session, events)?;
                let desk = Desk { connection, chains: &mut Chains::default() };
                append(desk, &session, Guard::default(), prepared, &time)
            })
            .await
    }

    /// Appends events, all or none. When this returns, they are on disk.
    pub async fn append(
        &self,
        session: &SessionId,
        guard: Guard,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        let (id, time) = (session.clone(), self.now());
        // Made here, where many can, and not on the one thread that writes.
        let prepared = prepare(session, events)?;
        let work = move |desk: Desk<'_>| append(desk, &id, guard, prepared, &time);
        let appended = self.inner.writer.run_simple(work).await?;
        self.inner.signals.grown(session);
        Ok(appended)
    }

    /// Appends what changes a session and changes its object, both or neither.
    pub async fn change_session(
        &self,
        session: &SessionId,
        guard: Guard,
        event: NewEvent,
        change: Change,
    ) -> Result<Object, LogError> {
        let (id, time) = (session.clone(), self.now());
        let prepared = prepare(session, vec![event])?;
        let work = move |connection: &Connection| {
            let object = objects::replace(connection, &change, &time)?;
            let desk = Desk { connection, chains: &mut Chains::default() };
            append(desk, &id, guard, prepared, &time)?;
            Ok(object)
        };
        let object = self.inner.writer.run(work).await?;
        self.inner.signals.grown(session);
        Ok(object)
    }

    /// Removes a whole session and leaves a tombstone.
    pub async fn delete(&self, session: &SessionId, by: &str) -> Result<Tombstone, LogError> {
        let (id, by, time) = (session.clone(), by.to_owned(), self.now());
        let work = move |connection: &Connection| delete(connection, id, by, time);
        let tombstone = self.inner.writer.run(work).await?;
        self.inner.signals.grown(session);
        Ok(tombstone)
    }
}

/// An event as its row holds it, but for its place.
struct Prepared {
    kind: String,
    text: String,
    event: NewEvent,
}

fn prepare(session: &SessionId, events: Vec<NewEvent>) -> Result<Vec<Prepared>, LogError> {
    let prepare = |event: NewEvent| {
        let (kind, text) = event.body.to_columns().map_err(|e| LogError::Unreadable {
            session: session.clone(),
            seq: 0,
            why: e.to_string(),
        })?;
        Ok(Prepared { kind, text, event })
    };
    events.into_iter().map(prepare).collect()
}

/// Checks, then writes: what fails before the first write has changed nothing.
fn append(
    desk: Desk<'_>,
    session: &SessionId,
    guard: Guard,
    events: Vec<Prepared>,
    time: &str,
) -> Result<Vec<Event>, LogError> {
    let Desk { connection, chains } = desk;
    let mut chain = match chains.take(session) {
        Some(chain) => chain,
        None => {
            read::chain(connection, session)?.ok_or_else(|| LogError::NoSession(session.clone()))?
        }
    };
    if let Err(error) = check(&chain, guard) {
        chains.put(chain);
        return Err(error);
    }
    // The clock may step back; the order of a session's times may not.
    if time > chain.updated_at.as_str() {
        time.clone_into(&mut chain.updated_at);
    }
    let mut appended = Vec::with_capacity(events.len());
    for prepared in events {
        let body = &prepared.event.body;
        if let Some(status) = body.status() {
            chain.status = status;
        }
        chain.unsettled |= body.calls_for_the_loop();
        appended.push(insert(connection, &mut chain, prepared)?);
    }
    chain.unsettled |= guard.wakes;
    if guard.settles {
        chain.unsettled = false;
    }
    let sql = "UPDATE chains SET status = ?2, events = ?3, head = ?4, unsettled = ?5,
               updated_at = ?6 WHERE session = ?1";
    let (status, time) = (chain.status.as_str(), &chain.updated_at);
    let summary =
        params![session.as_str(), status, chain.events, chain.head, chain.unsettled, time];
    connection.prepare_cached(sql)?.execute(summary)?;
    chains.put(chain);
    Ok(appended)
}

/// Appends a remark within somebody's transaction.
pub(super) fn note(
    connection: &Connection,
    session: &SessionId,
    body: Body,
    time: &str,
) -> Result<(), LogError> {
    // The loop's own guard: an archived session may be remarked upon.
    let fence = read::chain(connection, session)?.map(|chain| chain.fence);
    let guard = Guard { fence, ..Guard::default() };
    let prepared = prepare(session, vec![body.into()])?;
    let desk = Desk { connection, chains: &mut Chains::default() };
    append(desk, session, guard, prepared, time).map(drop)
}

fn check(chain: &Chain, guard: Guard) -> Result<(), LogError> {
    let session = || chain.session.clone();
    if let Some(ours) = guard.fence
        && ours != chain.fence
    {
        return Err(LogError::Fenced { session: session(), ours });
    }
    if guard.last.is_some_and(|last| last != chain.events) {
        return Err(LogError::Moved(session()));
    }
    if guard.fence.is_none() && chain.status == Status::Terminated {
        return Err(LogError::Conflict(format!("session {} is archived", chain.session)));
    }
    Ok(())
}

fn insert(
    connection: &Connection,
    chain: &mut Chain,
    prepared: Prepared,
) -> Result<Event, LogError> {
    let Prepared { kind, text, event } = prepared;
    let seq = chain.events + 1;
    let mut row = LogEvent {
        seq,
        id: event.id,
        time: chain.updated_at.clone(),
        kind,
        body: serde_json::Value::Null,
        previous: std::mem::take(&mut chain.head),
        hash: String::new(),
    };
    row.hash = chain::hash(chain.session.as_str(), &row, &text);
    let sql = "INSERT INTO events (session, seq, id, time, kind, body, previous, hash)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    connection.prepare_cached(sql)?.execute(params![
        chain.session.as_str(),
        seq,
        row.id,
        row.time,
        row.kind,
        text,
        row.previous,
        row.hash
    ])?;
    chain.events = seq;
    chain.head = row.hash;
    Ok(Event { seq, id: row.id, time: row.time, body: event.body })
}

fn delete(
    connection: &Connection,
    session: SessionId,
    by: String,
    time: String,
) -> Result<Tombstone, LogError> {
    let chain =
        read::chain(connection, &session)?.ok_or_else(|| LogError::NoSession(session.clone()))?;
    let stone = Tombstone {
        session,
        owner: chain.owner,
        deleted_at: time,
        deleted_by: by,
        events: chain.events,
        head: chain.head,
    };
    let id = stone.session.as_str();
    let sql = "INSERT INTO tombstones (session, owner, deleted_at, deleted_by, events, head)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
    let values =
        params![id, stone.owner, stone.deleted_at, stone.deleted_by, stone.events, stone.head];
    connection.execute(sql, values)?;
    for table in ["events", "snapshots", "chains"] {
        connection.execute(&format!("DELETE FROM {table} WHERE session = ?1"), [id])?;
    }
    connection.execute("DELETE FROM objects WHERE kind = 'session' AND id = ?1", [id])?;
    Ok(stone)
}
