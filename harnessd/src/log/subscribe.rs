//! Following a session: wakes on our own appends at once, on another process's within 100 ms.
//!
//! A follower reads the log itself by its cursor; what it is told is only that there may be more,
//! so nothing can be lost or seen twice. SQLite's `data_version` tells of foreign commits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use ipc::id::SessionId;
use tokio::sync::watch;

use super::event::Event;
use super::{Inner, Log, LogError};

/// How often foreign commits are looked for, while anybody follows.
const FOREIGN_PERIOD: Duration = Duration::from_millis(100);
/// Events read at once.
const BATCH: usize = 256;

/// Who waits for which session.
#[derive(Default)]
pub(super) struct Signals {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    sessions: HashMap<SessionId, watch::Sender<u64>>,
    watching: bool,
}

impl Signals {
    /// Tells all who follow `session` that there may be more.
    pub(super) fn grown(&self, session: &SessionId) {
        if let Ok(table) = self.table.lock()
            && let Some(sender) = table.sessions.get(session)
        {
            sender.send_modify(|count| *count += 1);
        }
    }

    fn all_grown(&self) {
        if let Ok(table) = self.table.lock() {
            for sender in table.sessions.values() {
                sender.send_modify(|count| *count += 1);
            }
        }
    }

    /// Forgets sessions that nobody follows; false when none is left and the watch ends.
    fn still_needed(&self) -> bool {
        let Ok(mut table) = self.table.lock() else { return false };
        table.sessions.retain(|_, sender| sender.receiver_count() > 0);
        table.watching = !table.sessions.is_empty();
        table.watching
    }
}

/// A view of one session that goes on where it left off.
pub struct Subscription {
    log: Log,
    session: SessionId,
    after: u64,
    signal: watch::Receiver<u64>,
}

impl Log {
    /// Follows a session from `after` on. Must be called within the runtime.
    pub fn subscribe(&self, session: &SessionId, after: u64) -> Subscription {
        let mut table =
            self.inner.signals.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let sender = table.sessions.entry(session.clone()).or_insert_with(|| watch::Sender::new(0));
        let signal = sender.subscribe();
        if !table.watching {
            table.watching = true;
            tokio::spawn(watch_foreign_commits(Arc::downgrade(&self.inner)));
        }
        drop(table);
        Subscription { log: self.clone(), session: session.clone(), after, signal }
    }
}

impl Subscription {
    /// The next events; waits until there are some. `None` when the session is gone. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Vec<Event>>, LogError> {
        loop {
            self.signal.borrow_and_update();
            if let Some(events) = self.ready().await? {
                return Ok(Some(events));
            }
            match self.log.chain(&self.session).await {
                Ok(_) => {}
                Err(LogError::NoSession(_)) => return Ok(None),
                Err(error) => return Err(error),
            }
            if self.signal.changed().await.is_err() {
                return Err(LogError::Closed);
            }
        }
    }

    /// The next events, if there are some now.
    pub async fn ready(&mut self) -> Result<Option<Vec<Event>>, LogError> {
        let events = self.log.slice(&self.session, self.after, BATCH).await?;
        let Some(last) = events.last() else { return Ok(None) };
        self.after = last.seq;
        Ok(Some(events))
    }

    /// The last event that was given out.
    pub fn after(&self) -> u64 {
        self.after
    }
}

async fn watch_foreign_commits(inner: Weak<Inner>) {
    let mut seen = None;
    loop {
        tokio::time::sleep(FOREIGN_PERIOD).await;
        let Some(inner) = inner.upgrade() else { return };
        if !inner.signals.still_needed() {
            return;
        }
        let log = Log { inner };
        let version = log.data_version().await;
        // A version that cannot be read is taken as changed: followers then look themselves.
        if version.is_none() || version != seen {
            log.inner.signals.all_grown();
        }
        seen = version;
    }
}

impl Log {
    /// Changes whenever any other connection commits. Always asked on the same connection.
    async fn data_version(&self) -> Option<i64> {
        let inner = Arc::clone(&self.inner);
        let ask = move || {
            let watcher = inner.watcher.lock().ok()?;
            watcher.query_row("PRAGMA data_version", [], |row| row.get(0)).ok()
        };
        if self.inner.simulated {
            return ask();
        }
        tokio::task::spawn_blocking(ask).await.ok()?
    }
}
