//! Reading: slices of a session, its chain, what is unsettled; on connections of their own.
//!
//! WAL readers never wait for the writer and never hold it up.

use ipc::id::SessionId;
use ipc::session::LogEvent;
use ipc::vault::ChainReport;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::chain::Check;
use super::event::{Body, Event, Status};
use super::{Chain, Log, LogError, Tombstone, schema};

/// Idle connections kept; more are opened when needed and closed afterwards.
const POOL_MAX: usize = 8;
/// No single read returns more events than this.
const SLICE_MAX: usize = 10_000;

impl Log {
    /// Runs `work` on a reading connection, off the runtime's threads.
    pub(super) async fn read<T, F>(&self, work: F) -> Result<T, LogError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, LogError> + Send + 'static,
    {
        let inner = std::sync::Arc::clone(&self.inner);
        let read = move || {
            let pooled = inner.readers.lock().ok().and_then(|mut pool| pool.pop());
            let connection = match pooled {
                Some(connection) => connection,
                None => schema::open_reader(&inner.path)?,
            };
            let outcome = work(&connection);
            if let Ok(mut pool) = inner.readers.lock()
                && pool.len() < POOL_MAX
            {
                pool.push(connection);
            }
            outcome
        };
        if self.inner.simulated {
            return read();
        }
        tokio::task::spawn_blocking(read).await.map_err(|_| LogError::Closed)?
    }

    /// The events after `after`, oldest first, at most `limit`.
    pub async fn slice(
        &self,
        session: &SessionId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            let rows = rows(connection, &session, after, limit)?;
            rows.into_iter().map(|row| decode(&session, row)).collect()
        })
        .await
    }

    /// All events after `after`, oldest first.
    pub async fn since(&self, session: &SessionId, after: u64) -> Result<Vec<Event>, LogError> {
        let mut events = self.slice(session, after, SLICE_MAX).await?;
        let mut full = events.len() == SLICE_MAX;
        while full {
            let last = events.last().map_or(after, |e| e.seq);
            let more = self.slice(session, last, SLICE_MAX).await?;
            full = more.len() == SLICE_MAX;
            events.extend(more);
        }
        Ok(events)
    }

    /// The events of some kinds only, as their column names them, behind `after` and up to `last`,
    /// oldest first.
    pub async fn of_kinds(
        &self,
        session: &SessionId,
        kinds: &'static [&'static str],
        after: u64,
        last: u64,
    ) -> Result<Vec<Event>, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            let marks = vec!["?"; kinds.len()].join(", ");
            let sql = format!(
                "{COLUMNS} WHERE session = ? AND seq > ? AND seq <= ? AND kind IN ({marks})
                 ORDER BY seq"
            );
            let mut statement = connection.prepare_cached(&sql)?;
            let [after, last] = [after, last].map(|seq| i64::try_from(seq).unwrap_or(i64::MAX));
            let mut values: Vec<&dyn rusqlite::ToSql> = Vec::with_capacity(kinds.len() + 3);
            let id = session.as_str();
            values.push(&id);
            values.push(&after);
            values.push(&last);
            values.extend(kinds.iter().map(|kind| kind as &dyn rusqlite::ToSql));
            let rows = statement.query_map(values.as_slice(), stored)?;
            rows.map(|row| decode(&session, row?)).collect()
        })
        .await
    }

    /// One event by its place; `None` when the log is shorter.
    pub async fn event(&self, session: &SessionId, seq: u64) -> Result<Option<Event>, LogError> {
        let before = seq.saturating_sub(1);
        Ok(self.slice(session, before, 1).await?.pop().filter(|event| event.seq == seq))
    }

    /// One event by its id.
    pub async fn event_of_id(
        &self,
        session: &SessionId,
        id: &str,
    ) -> Result<Option<Event>, LogError> {
        let (session, id) = (session.clone(), id.to_owned());
        self.read(move |connection| {
            let sql = format!("{COLUMNS} WHERE id = ?1 AND session = ?2");
            let mut statement = connection.prepare_cached(&sql)?;
            let found = statement.query_row([&id, session.as_str()], stored).optional()?;
            found.map(|row| decode(&session, row)).transpose()
        })
        .await
    }

    /// All events of a session, oldest first.
    pub async fn all(&self, session: &SessionId) -> Result<Vec<Event>, LogError> {
        self.since(session, 0).await
    }

    /// Events as they are stored, with their hashes, for the operator.
    pub async fn stored(
        &self,
        session: &SessionId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<LogEvent>, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            let mut events = Vec::new();
            for (mut event, body) in rows(connection, &session, after, limit)? {
                event.body = serde_json::from_str(&body).map_err(|e| LogError::Unreadable {
                    session: session.clone(),
                    seq: event.seq,
                    why: e.to_string(),
                })?;
                events.push(event);
            }
            Ok(events)
        })
        .await
    }

    /// The summary of a session.
    pub async fn chain(&self, session: &SessionId) -> Result<Chain, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            chain(connection, &session)?.ok_or(LogError::NoSession(session))
        })
        .await
    }

    /// Recomputes the chain and says what is wrong: a gap, a rewrite, a truncation.
    pub async fn verify(&self, session: &SessionId) -> Result<ChainReport, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            // One transaction, so that the summary and the events are of the same moment.
            let view = connection.unchecked_transaction()?;
            let summary =
                chain(&view, &session)?.ok_or_else(|| LogError::NoSession(session.clone()))?;
            let mut check = Check::new(session.as_str());
            let sql = format!("{COLUMNS} WHERE session = ?1 ORDER BY seq");
            let mut statement = view.prepare_cached(&sql)?;
            let mut rows = statement.query([session.as_str()])?;
            while let Some(row) = rows.next()? {
                let (event, body) = stored(row)?;
                check.event(&event, &body);
            }
            Ok(check.finish(summary.events, &summary.head))
        })
        .await
    }

    /// What is left of a deleted session.
    pub async fn tombstone(&self, session: &SessionId) -> Result<Option<Tombstone>, LogError> {
        let session = session.clone();
        self.read(move |connection| {
            let sql = "SELECT owner, deleted_at, deleted_by, events, head
                       FROM tombstones WHERE session = ?1";
            let found = connection.query_row(sql, [session.as_str()], |row| {
                Ok(Tombstone {
                    session: session.clone(),
                    owner: row.get(0)?,
                    deleted_at: row.get(1)?,
                    deleted_by: row.get(2)?,
                    events: row.get(3)?,
                    head: row.get(4)?,
                })
            });
            Ok(found.optional()?)
        })
        .await
    }

    /// Sessions whose loop has something to do.
    pub async fn unsettled(&self) -> Result<Vec<SessionId>, LogError> {
        self.read(|connection| {
            let sql = "SELECT session FROM chains WHERE unsettled = 1";
            let mut statement = connection.prepare_cached(sql)?;
            let ids = statement.query_map([], |row| row.get::<_, String>(0))?;
            let mut sessions = Vec::new();
            for id in ids {
                // The column holds only ids that were parsed before they were stored.
                sessions.extend(SessionId::parse(&id?));
            }
            Ok(sessions)
        })
        .await
    }
}

pub(super) const COLUMNS: &str = "SELECT seq, id, time, kind, body, previous, hash FROM events";

pub(super) fn stored(row: &Row<'_>) -> rusqlite::Result<(LogEvent, String)> {
    let event = LogEvent {
        seq: row.get(0)?,
        id: row.get(1)?,
        time: row.get(2)?,
        kind: row.get(3)?,
        body: serde_json::Value::Null,
        previous: row.get(5)?,
        hash: row.get(6)?,
    };
    Ok((event, row.get(4)?))
}

pub(super) fn rows(
    connection: &Connection,
    session: &SessionId,
    after: u64,
    limit: usize,
) -> Result<Vec<(LogEvent, String)>, LogError> {
    let sql = format!("{COLUMNS} WHERE session = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3");
    let mut statement = connection.prepare_cached(&sql)?;
    let limit = limit.min(SLICE_MAX);
    let rows = statement.query_map(params![session.as_str(), after, limit], stored)?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

pub(super) fn decode(
    session: &SessionId,
    (row, body): (LogEvent, String),
) -> Result<Event, LogError> {
    let body = Body::from_columns(&row.kind, &body).map_err(|e| LogError::Unreadable {
        session: session.clone(),
        seq: row.seq,
        why: e.to_string(),
    })?;
    Ok(Event { seq: row.seq, id: row.id, time: row.time, body })
}

/// The summary of a session, if there is one.
pub(super) fn chain(
    connection: &Connection,
    session: &SessionId,
) -> Result<Option<Chain>, LogError> {
    let sql = "SELECT owner, status, events, head, fence, unsettled, created_at, updated_at
               FROM chains WHERE session = ?1";
    let mut statement = connection.prepare_cached(sql)?;
    let found = statement.query_row([session.as_str()], |row| {
        let status: String = row.get(1)?;
        Ok(Chain {
            session: session.clone(),
            owner: row.get(0)?,
            status: Status::parse(&status).unwrap_or(Status::Terminated),
            events: row.get(2)?,
            head: row.get(3)?,
            fence: row.get(4)?,
            unsettled: row.get(5)?,
            created_at: row.get(6)?,
            updated_at: row.get(7)?,
        })
    });
    Ok(found.optional()?)
}
