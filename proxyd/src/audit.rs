//! The audit: one record for each decision and one for how it ended, in order, chained, on disk.
//!
//! A decision is handed to the kernel before its request leaves, so that nothing that leaves is
//! forgotten when this process is killed. A thread syncs what was handed over, in groups, within
//! [`GROUP`]: only a machine that loses power can lose records, those of the last group. When the
//! disk refuses, decisions fail and nothing leaves; when syncing falls behind by more than
//! [`UNSYNCED_MAX`] records, decisions wait, and fail in the end. Outcomes and counted denials are
//! handed over with the next decision or with the group.
//!
//! The records stand in segment files ([`journal`]), each record with the hash of itself and of
//! the one before ([`record`]). `verify` ([`chain`]) finds a record that was changed or is missing
//! from the middle, or from the end while this process lives. It cannot see a chain that was
//! rewritten as a whole: for that a head must have been noted elsewhere. A record holds names and
//! paths, never a query, a header, a body or an injected value. Denials that repeat are written
//! singly at first and then counted ([`flood`]). Nothing is removed but by [`retain`].

mod chain;
mod counts;
mod flood;
mod index;
mod journal;
mod query;
mod read;
mod record;
mod retain;

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipc::id::{CallId, LeaseId, RequestId, SandboxId, SessionId};
use ipc::vault::{AuditKind, AuditPage, ChainReport};
use tokio::sync::watch;

pub use counts::{Counts, DURATIONS_MS};
use flood::{Floods, Verdict};
use journal::Journal;
pub use query::Filter;
use read::Reader;
pub use retain::{Retention, keep};

/// Most records in one page.
pub const PAGE_RECORDS_MAX: usize = 1000;
/// How long a record may wait for its sync: what a power cut can cost.
const GROUP: Duration = Duration::from_millis(20);
/// Records that may be with the kernel and not on disk: more than any group at full speed.
const UNSYNCED_MAX: u64 = 32 * 1024;
/// How long a decision waits for the disk to catch up.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often counted denials are looked at when nothing else happens.
const FLOOD_LOOK: Duration = Duration::from_secs(1);

/// Why nothing may leave, or why the audit cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    #[error("the audit takes no more records: {0} are waiting for the disk")]
    Full(u64),
    #[error("cannot write the audit: {0}")]
    Write(String),
    #[error("cannot read the audit: {0}")]
    Read(String),
    #[error("the audit is closed")]
    Gone,
}

/// What a record says; the audit adds number, time and hash. Fields as in
/// [`ipc::vault::AuditRecord`]. A query in `path` is cut off, and texts are cut to the lengths in
/// [`record`].
#[derive(Clone, Default)]
pub struct Line {
    pub request: Option<RequestId>,
    pub lease: Option<LeaseId>,
    pub session: Option<SessionId>,
    pub sandbox: Option<SandboxId>,
    pub calls: Vec<CallId>,
    pub environment: Option<String>,
    pub generation: u64,
    pub entry: Option<String>,
    pub host: Option<String>,
    pub port: Option<u16>,
    pub address: Option<String>,
    pub method: Option<String>,
    pub path: Option<String>,
    pub rule: Option<String>,
    pub credential: Option<String>,
    pub reason: Option<String>,
    pub status: Option<u16>,
    pub bytes_up: Option<u64>,
    pub bytes_down: Option<u64>,
    pub duration_ms: Option<u64>,
    pub scrubbed: Option<u64>,
    /// For how many denials beyond this one the record stands.
    pub repeated: Option<u64>,
    /// No part of the record: it was held for a question that stands in the audit, so how it ended
    /// does too, however many end alike. Questions have bounds of their own.
    pub held: bool,
}

/// The audit. Clones share one journal.
#[derive(Clone)]
pub struct Audit(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Tells the syncing thread that there is something to do, where it waits for that.
    work: Condvar,
    /// Has it close its group before the time.
    hurry: Condvar,
    /// The last record on disk, and whether the thread has ended.
    synced: watch::Sender<Synced>,
    reader: Mutex<Reader>,
}

#[derive(Clone, Copy, Default)]
struct Synced {
    last: u64,
    ended: bool,
}

/// Where the audit stands.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// The last record that is with the kernel, and the last one on disk.
    pub last: u64,
    pub synced: u64,
    /// The disk refuses, and nothing leaves.
    pub failed: bool,
}

struct State {
    journal: Journal,
    floods: Floods,
    counts: Counts,
    /// Decisions that could not be written since the last one that could: of what they are about
    /// nothing has left.
    unrecorded: u64,
    /// The thread waits for work: waking it for every record would cost more than the record.
    idle: bool,
    /// Somebody waits for the disk: the group is closed at once.
    urgent: bool,
    closed: bool,
    /// The disk failed to sync: decisions fail until it succeeds.
    failed: Option<AuditError>,
    synced: u64,
}

impl Audit {
    /// Opens or makes the journal in the directory `dir` and starts the thread that syncs it.
    pub fn open(dir: &Path) -> Result<Audit, AuditError> {
        let journal = Journal::open(dir)?;
        let last = journal.last();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                journal,
                floods: Floods::default(),
                counts: Counts::default(),
                unrecorded: 0,
                idle: false,
                urgent: false,
                closed: false,
                failed: None,
                synced: last,
            }),
            work: Condvar::new(),
            hurry: Condvar::new(),
            synced: watch::Sender::new(Synced { last, ended: false }),
            reader: Mutex::new(Reader::new(dir)),
        });
        let syncing = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("audit".into())
            .spawn(move || sync_groups(&syncing))
            .map_err(|error| AuditError::Write(error.to_string()))?;
        Ok(Audit(shared))
    }

    /// Records that something may leave; resolves when that is with the kernel. On an error
    /// nothing may leave.
    pub async fn allow(&self, line: &Line) -> Result<u64, AuditError> {
        let write = |state: &mut State| {
            let written = state.decide(AuditKind::Allowed, line);
            match &written {
                Ok(_) => state.counts.allowed(line),
                Err(_) => state.counts.stopped += 1,
            }
            written
        };
        let recorded = self.once_synced(write).await;
        if let Err(AuditError::Full(_)) = recorded {
            let mut state = self.0.state();
            state.counts.stopped += 1;
            state.unrecorded += 1;
        }
        recorded
    }

    /// Records a denial, or counts it; whether it has a record of its own.
    pub async fn deny(&self, line: &Line) -> Result<bool, AuditError> {
        self.once_synced(|state| state.deny(line)).await
    }

    /// The same where nobody can wait for a disk that is behind.
    pub fn deny_at_once(&self, line: &Line) -> Result<bool, AuditError> {
        let mut state = self.0.state();
        let written = state.deny(line);
        self.0.wake(&mut state);
        written
    }

    /// Does `write` as soon as the disk is not too far behind.
    async fn once_synced<T>(
        &self,
        write: impl Fn(&mut State) -> Result<T, AuditError>,
    ) -> Result<T, AuditError> {
        let mut deadline = None;
        loop {
            let (synced, behind) = {
                let mut state = self.0.state();
                let behind = state.journal.last() - state.synced;
                if behind < UNSYNCED_MAX {
                    let written = write(&mut state);
                    self.0.wake(&mut state);
                    return written;
                }
                (self.0.synced.subscribe(), behind)
            };
            let now = Instant::now();
            let deadline = *deadline.get_or_insert(now + PATIENCE);
            if now >= deadline {
                return Err(AuditError::Full(behind));
            }
            // Whatever ends the wait, the state is looked at again.
            let _ = tokio::time::timeout_at(deadline.into(), self.0.caught_up(synced)).await;
        }
    }

    /// Records how an allowed exchange ended. What happened is no longer to be stopped, so this
    /// does not wait: the record is handed over with the next decision or group.
    pub fn outcome(&self, line: &Line) -> Result<(), AuditError> {
        let mut state = self.0.state();
        if state.closed {
            return Err(AuditError::Gone);
        }
        state.counts.ended(line);
        state.journal.add(AuditKind::Outcome, line);
        self.0.wake(&mut state);
        Ok(())
    }

    /// Records something else worth a line; resolves when it is on disk.
    pub async fn note(&self, line: &Line) -> Result<u64, AuditError> {
        let mut synced = self.0.synced.subscribe();
        let number = {
            let mut state = self.0.state();
            let number = state.write(AuditKind::Note, line)?;
            state.urgent = true;
            self.0.wake(&mut state);
            self.0.hurry.notify_one();
            number
        };
        loop {
            let seen = *synced.borrow_and_update();
            if seen.last >= number {
                return Ok(number);
            }
            if seen.ended {
                return Err(AuditError::Gone);
            }
            if let Some(error) = self.0.state().failed.clone() {
                return Err(error);
            }
            synced.changed().await.map_err(|_| AuditError::Gone)?;
        }
    }

    /// What was decided and has ended since the start.
    pub fn counts(&self) -> Counts {
        self.0.state().counts.clone()
    }

    pub fn standing(&self) -> Standing {
        let state = self.0.state();
        Standing {
            last: state.journal.last(),
            synced: state.synced,
            failed: state.failed.is_some(),
        }
    }

    /// The records that the filter names, in order.
    pub async fn page(&self, filter: Filter) -> Result<AuditPage, AuditError> {
        self.read(move |reader, newest| reader.page(&filter, newest)).await
    }

    /// Recomputes the whole chain.
    pub async fn verify(&self) -> Result<ChainReport, AuditError> {
        self.read(|reader, last| reader.verify(last)).await
    }

    /// Reads what is in the journal up to now; `work` is told the number of its last record.
    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Reader, u64) -> Result<T, AuditError> + Send + 'static,
    ) -> Result<T, AuditError> {
        let shared = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || {
            let last = {
                let mut state = shared.state();
                // What cannot be written now is not to be read either; its writer is told.
                let _ = state.journal.hand_over();
                state.journal.last()
            };
            work(&mut shared.reader.lock().unwrap_or_else(PoisonError::into_inner), last)
        })
        .await
        .unwrap_or_else(|error| Err(AuditError::Read(error.to_string())))
    }

    /// Writes and syncs what is there and ends the thread; later records are refused.
    pub async fn close(&self) {
        {
            let mut state = self.0.state();
            state.closed = true;
            self.0.wake(&mut state);
            self.0.hurry.notify_one();
        }
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.0.synced.subscribe().wait_for(|synced| synced.ended).await;
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked held it between two whole records.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, state: &mut State) {
        if std::mem::take(&mut state.idle) {
            self.work.notify_one();
        }
    }

    /// Resolves after one more sync.
    async fn caught_up(&self, mut synced: watch::Receiver<Synced>) {
        synced.borrow_and_update();
        let last = self.state().synced;
        // An end of the thread shows in the state.
        let _ = synced.wait_for(|now| now.ended || now.last > last).await;
    }
}

impl State {
    /// Writes a decision, and counts one that cannot be.
    fn decide(&mut self, kind: AuditKind, line: &Line) -> Result<u64, AuditError> {
        let written = self.write(kind, line);
        self.unrecorded += u64::from(written.is_err());
        written
    }

    fn deny(&mut self, line: &Line) -> Result<bool, AuditError> {
        self.counts.denied(line);
        if !line.held && self.floods.look(line, Instant::now()) == Verdict::Counted {
            return Ok(false);
        }
        self.decide(AuditKind::Denied, line).map(|_| true)
    }

    /// Writes one record, and what waited before it.
    fn write(&mut self, kind: AuditKind, line: &Line) -> Result<u64, AuditError> {
        if self.closed {
            return Err(AuditError::Gone);
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.unrecorded > 0 {
            let count = self.unrecorded;
            self.journal.note(format!(
                "{count} refused requests could not be recorded before this; nothing of them left"
            ));
        }
        self.journal.add(kind, line);
        self.journal.hand_over().inspect_err(|error| {
            tracing::error!(%error, "audit records not written");
        })?;
        self.unrecorded = 0;
        Ok(self.journal.last())
    }

    /// Closes a group: everything goes to the kernel. Gives what is to be synced.
    fn group(&mut self) -> (u64, Vec<Arc<File>>) {
        self.urgent = false;
        let expired = self.floods.expired(Instant::now(), self.closed);
        for line in expired {
            self.journal.add(AuditKind::Denied, &line);
        }
        if let Err(error) = self.journal.hand_over() {
            tracing::error!(%error, "audit records not written");
        }
        (self.journal.last(), self.journal.take_unsynced())
    }

    fn is_idle(&self) -> bool {
        !self.closed && self.journal.last() == self.synced && !self.journal.has_waiting()
    }
}

/// The syncing thread's life.
fn sync_groups(shared: &Shared) {
    loop {
        let mut state = shared.state();
        while state.is_idle() && !state.floods.is_due(Instant::now()) {
            state.idle = true;
            let waited = shared.work.wait_timeout(state, FLOOD_LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.idle = false;
        let end = Instant::now() + GROUP;
        while !state.urgent && !state.closed {
            let Some(left) = end.checked_duration_since(Instant::now()) else { break };
            let waited = shared.hurry.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let closed = state.closed;
        let (last, files) = state.group();
        drop(state);
        let outcome = files.iter().try_for_each(|file| file.sync_data());
        settle(shared, last, files, outcome);
        if closed {
            shared.state().journal.release();
            shared.synced.send_modify(|synced| synced.ended = true);
            return;
        }
    }
}

/// Tells everybody how far the disk is.
fn settle(shared: &Shared, last: u64, files: Vec<Arc<File>>, outcome: std::io::Result<()>) {
    let mut state = shared.state();
    match outcome {
        Ok(()) => {
            state.synced = last;
            state.failed = None;
            drop(state);
            shared.synced.send_modify(|synced| synced.last = last);
        }
        Err(error) => {
            tracing::error!(%error, "audit records not synced: nothing leaves until they are");
            state.failed = Some(AuditError::Write(format!("cannot sync: {error}")));
            // The kernel reports a failed write-back once, and then calls the pages clean: what
            // this file holds may be lost, so a new one is begun, which says so.
            state.journal.give_up_segment(files, &error);
            drop(state);
            shared.synced.send_modify(|_| {});
            std::thread::sleep(FLOOD_LOOK);
        }
    }
}

#[cfg(test)]
mod retain_tests;
#[cfg(test)]
mod tests;
