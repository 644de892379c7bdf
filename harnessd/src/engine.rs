//! Who runs which session, and who listens to it.
//!
//! The engine starts one task for a session that has something to do, lets it own the session
//! (kernel lock and fencing number), and takes up what another process left behind. It carries
//! previews of answers to live subscribers; those are never stored.

mod live;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::id::SessionId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::fold;
use crate::hands::{Hand, Proxyd, Scrub};
use crate::log::objects::{Change, NewObject, Object};
use crate::log::{Body, Event, Guard, Log, LogError, NewEvent, Ownership, Status, Tombstone};
use crate::model::Models;
use crate::wake::{WakeError, wake};

pub use live::{Live, LiveStream, Part, Preview};

/// How often sessions are looked for that a process left behind when it died.
const SWEEP_PERIOD: Duration = Duration::from_secs(2);
/// How often a session is tried that another process owns.
const OWNED_PERIOD: Duration = Duration::from_millis(100);
/// How long the end of a session waits for a loop that has just gone idle to let go.
const LET_GO_MAX: Duration = Duration::from_secs(2);

/// What a run needs beside its session.
pub(crate) struct Parts {
    pub log: Log,
    pub models: Models,
    pub hand: Box<dyn Hand>,
    pub scrub: Scrub,
    pub proxyd: Arc<dyn Proxyd>,
    pub previews: live::Previews,
    pub stop: CancellationToken,
}

/// The engine of this process. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    parts: Arc<Parts>,
    runs: Arc<Runs>,
}

#[derive(Default)]
struct Runs {
    /// Sessions with a task; true: look again before it ends.
    table: Mutex<HashMap<SessionId, bool>>,
    tasks: TaskTracker,
    /// Ends every task where it is.
    abandoned: CancellationToken,
}

impl Engine {
    /// `stop` ends all runs; their sessions go on with whoever starts next.
    pub fn new(
        log: Log,
        models: Models,
        hand: Box<dyn Hand>,
        proxyd: Arc<dyn Proxyd>,
        stop: CancellationToken,
    ) -> Self {
        let scrub = Scrub::new(Arc::clone(&proxyd));
        let previews = live::Previews::default();
        let parts = Parts { log, models, hand, scrub, proxyd, previews, stop };
        Self { parts: Arc::new(parts), runs: Arc::default() }
    }

    pub fn log(&self) -> &Log {
        &self.parts.log
    }

    /// Names of the configured models.
    pub fn models(&self) -> Vec<String> {
        self.parts.models.names()
    }

    /// Whether the table of models has (or its `*` covers) this name.
    pub fn knows_model(&self, name: &str) -> bool {
        self.parts.models.find(name).is_some()
    }

    /// Whether what this model's requests cost is known.
    pub fn has_price(&self, name: &str) -> bool {
        self.parts.models.price(name).is_some()
    }

    /// Creates a session; its first event must be `SessionCreated`. Wakes it when there is more.
    pub async fn create_session(
        &self,
        session: &SessionId,
        object: NewObject,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        let wanted = events.iter().any(|event| event.body.calls_for_the_loop());
        let appended = self.parts.log.create_session(session, object, events).await?;
        if wanted {
            self.poke(session);
        }
        Ok(appended)
    }

    /// Appends client events and wakes the session.
    pub async fn send(
        &self,
        session: &SessionId,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        let wanted = events.iter().any(|event| event.body.calls_for_the_loop());
        let appended = self.parts.log.append(session, Guard::default(), events).await?;
        if wanted {
            self.poke(session);
        }
        Ok(appended)
    }

    /// Changes a session, in its log and its object, and wakes it if the guard says so.
    pub async fn update(
        &self,
        session: &SessionId,
        guard: Guard,
        event: NewEvent,
        change: Change,
    ) -> Result<Object, LogError> {
        let object = self.parts.log.change_session(session, guard, event, change).await?;
        if guard.wakes {
            self.poke(session);
        }
        Ok(object)
    }

    /// Follows a session from now on, with previews.
    pub async fn subscribe(&self, session: &SessionId) -> Result<LiveStream, LogError> {
        LiveStream::open(&self.parts, session).await
    }

    /// Ends a session for good: appends `StatusTerminated`. Refused while it runs.
    pub async fn archive(&self, session: &SessionId) -> Result<(), Fault> {
        let Some(ownership) = self.take_idle(session).await? else { return Ok(()) };
        let chain = self.parts.log.chain(session).await?;
        let (fence, last) = (Some(ownership.fence), Some(chain.events));
        let guard = Guard { fence, last, settles: true, ..Guard::default() };
        let end = vec![Body::StatusTerminated {}.into()];
        self.parts.log.append(session, guard, end).await?;
        Ok(())
    }

    /// Removes a session, its sandboxes and its workspace. Refused while it runs.
    /// `given`: the hand keeps something for it, whether it ran or not.
    pub async fn delete(
        &self,
        session: &SessionId,
        by: &str,
        given: bool,
    ) -> Result<Tombstone, Fault> {
        let _ownership = self.take_quiet(session).await?;
        if given || fold::load(&self.parts.log, session).await?.used_sandbox {
            self.parts.hand.forget(session).await?;
        }
        Ok(self.parts.log.delete(session, by).await?)
    }

    /// Wakes what was not idle when its process ended, now and from time to time, until the stop.
    pub async fn sweep(&self) {
        loop {
            match self.parts.log.unsettled().await {
                Ok(sessions) => sessions.iter().for_each(|session| self.poke(session)),
                Err(error) => tracing::error!(%error, "cannot look for sessions to wake"),
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(SWEEP_PERIOD) => {}
                () = self.parts.stop.cancelled() => return,
            }
        }
    }

    /// Waits until every run has seen the stop.
    pub async fn drained(&self) {
        self.runs.tasks.close();
        self.runs.tasks.wait().await;
    }

    /// Sees to it that a task looks at the session after this moment.
    fn poke(&self, session: &SessionId) {
        let mut table = self.runs.lock();
        if let Some(again) = table.get_mut(session) {
            *again = true;
            return;
        }
        table.insert(session.clone(), false);
        drop(table);
        let (engine, session) = (self.clone(), session.clone());
        let abandoned = self.runs.abandoned.clone();
        let run = async move {
            let mut entry = Entry { runs: Arc::clone(&engine.runs), session, listed: true };
            while entry.listed {
                engine.run(&entry.session).await;
                entry.listed = engine.runs.again(&entry.session);
            }
        };
        self.runs.tasks.spawn(async move { abandoned.run_until_cancelled(run).await });
    }

    /// Drops every run where it is, as the death of the process would: nothing is tidied up.
    pub fn abandon(&self) {
        self.runs.abandoned.cancel();
    }

    async fn run(&self, session: &SessionId) {
        let outcome = match self.take(session).await {
            Ok(Some(ownership)) => wake(Arc::clone(&self.parts), ownership).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        match outcome {
            Ok(()) | Err(WakeError::Stopped) => {}
            // Deleted between the poke and now.
            Err(WakeError::Log(LogError::NoSession(_))) => {}
            Err(WakeError::Log(error @ LogError::Fenced { .. })) => {
                tracing::warn!(%session, %error, "session taken over by another process");
            }
            Err(WakeError::Log(error)) => {
                tracing::error!(%session, %error, "session cannot go on");
            }
        }
    }

    /// Takes the session, waiting for another owner as long as there is something to do.
    async fn take(&self, session: &SessionId) -> Result<Option<Ownership>, WakeError> {
        loop {
            if !self.parts.log.chain(session).await?.unsettled {
                return Ok(None);
            }
            if let Some(ownership) = self.parts.log.acquire(session).await? {
                return Ok(Some(ownership));
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(OWNED_PERIOD) => {}
                () = self.parts.stop.cancelled() => return Err(WakeError::Stopped),
            }
        }
    }

    /// Takes a session that is to end; `None` when it has ended already.
    async fn take_idle(&self, session: &SessionId) -> Result<Option<Ownership>, Fault> {
        if self.parts.log.chain(session).await?.status == Status::Terminated {
            return Ok(None);
        }
        Ok(Some(self.take_quiet(session).await?))
    }

    /// Takes a session that does not run, or says that it does.
    async fn take_quiet(&self, session: &SessionId) -> Result<Ownership, Fault> {
        let deadline = Instant::now() + LET_GO_MAX;
        loop {
            let chain = self.parts.log.chain(session).await?;
            let quiet = matches!(chain.status, Status::Idle | Status::Terminated);
            if quiet && let Some(ownership) = self.parts.log.acquire(session).await? {
                return Ok(ownership);
            }
            if !quiet || Instant::now() > deadline {
                let text = format!("session {session} is running");
                return Err(Fault::new(Code::Conflict, text).with_hint("interrupt it first"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// A task's place in the table. A task that dies of a fault of ours leaves it too, so that the next
/// sweep tries again.
struct Entry {
    runs: Arc<Runs>,
    session: SessionId,
    listed: bool,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.listed {
            self.runs.lock().remove(&self.session);
        }
    }
}

impl Runs {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SessionId, bool>> {
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Whether the task must look again; if not, it is taken off the table in the same moment.
    fn again(&self, session: &SessionId) -> bool {
        let mut table = self.lock();
        match table.get_mut(session) {
            Some(again) if *again => {
                *again = false;
                true
            }
            _ => {
                table.remove(session);
                false
            }
        }
    }
}
