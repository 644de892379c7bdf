//! The one thread that writes: takes what has queued up, does it in one transaction, syncs once.
//!
//! A job that may fail half-way runs in a savepoint, so that it leaves no trace and the others
//! stand; an append checks before it writes and needs none. An answer goes out only after the
//! commit, with the commit's own outcome.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use ipc::id::SessionId;
use rusqlite::{Connection, TransactionBehavior};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::{Chain, LogError};

/// Most jobs in one transaction: bounds how long other processes wait for theirs.
const GROUP_MAX: usize = 128;
/// How long the writer waits for as many jobs as last time: those that waited for the last sync
/// come back at about the same moment, and would else need two more.
const GATHER_MAX: Duration = Duration::from_micros(300);
/// Chains that are remembered between two jobs.
const CHAINS_MAX: usize = 4096;

type Finish = Box<dyn FnOnce(Result<(), LogError>) + Send>;
type Work = Box<dyn FnOnce(Result<Desk<'_>, LogError>) -> (Verdict, Finish) + Send>;

/// One piece of work for the writer.
pub(super) struct Job {
    work: Work,
    /// It may fail half-way: what it did is then undone alone.
    careful: bool,
    /// Where those that wait for it run.
    runtime: Option<Handle>,
}

/// What a job works with.
pub(super) struct Desk<'a> {
    pub connection: &'a Connection,
    pub chains: &'a mut Chains,
}

/// Summaries as they stand in the database, while nobody else writes.
#[derive(Default)]
pub(super) struct Chains {
    known: HashMap<SessionId, Chain>,
    /// SQLite's count of the commits of others.
    version: i64,
}

impl Chains {
    pub fn take(&mut self, session: &SessionId) -> Option<Chain> {
        self.known.remove(session)
    }

    pub fn put(&mut self, chain: Chain) {
        if self.known.len() >= CHAINS_MAX {
            self.known.clear();
        }
        self.known.insert(chain.session.clone(), chain);
    }

    fn check(&mut self, connection: &Connection) -> Result<(), LogError> {
        let version = connection.query_row("PRAGMA data_version", [], |row| row.get(0))?;
        if version != self.version {
            self.known.clear();
            self.version = version;
        }
        Ok(())
    }
}

/// What becomes of what a job wrote.
enum Verdict {
    Keep,
    Undo,
    /// It stopped half-way and cannot be undone alone.
    Ruined(LogError),
}

/// Where a simulation takes hold of a log: it says when a write happens, whether the process lives
/// to see it, and what the clock says.
pub trait Seam: Send + Sync {
    /// Completes when the write may happen; never, if the process dies before.
    fn before_write(&self) -> BoxFuture<'static, ()>;
    /// Completes when the writer hears of it; never, if the process dies with the write done.
    fn after_write(&self) -> BoxFuture<'static, ()>;
    fn now(&self) -> String;
}

/// Hands work to whoever writes: a thread, which ends with the last of these, or the caller.
pub(super) enum Writer {
    Thread(Sender<Job>),
    Inline(Arc<Mutex<(Connection, Chains)>>, Arc<dyn Seam>),
}

impl Writer {
    pub(super) fn start(connection: Connection) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        std::thread::Builder::new()
            .name("log-writer".to_owned())
            .spawn(move || write_groups(connection, &queue))?;
        Ok(Self::Thread(jobs))
    }

    pub(super) fn inline(connection: Connection, seam: Arc<dyn Seam>) -> Self {
        Self::Inline(Arc::new(Mutex::new((connection, Chains::default()))), seam)
    }

    /// The time, where it is not the kernel's.
    pub(super) fn now(&self) -> Option<String> {
        match self {
            Self::Thread(_) => None,
            Self::Inline(_, seam) => Some(seam.now()),
        }
    }

    /// Runs `work` in a transaction and returns its value once that is on disk.
    pub(super) async fn run<T, F>(&self, work: F) -> Result<T, LogError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, LogError> + Send + 'static,
    {
        let work = move |desk: Desk<'_>| {
            // It may change any summary.
            desk.chains.known.clear();
            work(desk.connection)
        };
        self.submit(true, work).await
    }

    /// The same for work that fails only before its first write, or because of the database.
    pub(super) async fn run_simple<T, F>(&self, work: F) -> Result<T, LogError>
    where
        T: Send + 'static,
        F: FnOnce(Desk<'_>) -> Result<T, LogError> + Send + 'static,
    {
        self.submit(false, work).await
    }

    async fn submit<T, F>(&self, careful: bool, work: F) -> Result<T, LogError>
    where
        T: Send + 'static,
        F: FnOnce(Desk<'_>) -> Result<T, LogError> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let work: Work = Box::new(move |desk| {
            let outcome = desk.and_then(work);
            let verdict = match &outcome {
                Ok(_) => Verdict::Keep,
                Err(error @ LogError::Database(_)) if !careful => Verdict::Ruined(error.clone()),
                Err(_) => Verdict::Undo,
            };
            let finish: Finish = Box::new(move |commit: Result<(), LogError>| {
                // Whoever asked may have gone; the work stands all the same.
                let _ = answer.send(commit.and(outcome));
            });
            (verdict, finish)
        });
        let job = Job { work, careful, runtime: Handle::try_current().ok() };
        match self {
            Self::Thread(jobs) => jobs.send(job).map_err(|_| LogError::Closed)?,
            Self::Inline(desk, seam) => {
                seam.before_write().await;
                write_now(desk, job);
                seam.after_write().await;
            }
        }
        answered.await.map_err(|_| LogError::Closed)?
    }
}

fn write_now(desk: &Mutex<(Connection, Chains)>, job: Job) {
    let mut desk = desk.lock().unwrap_or_else(PoisonError::into_inner);
    let (connection, chains) = &mut *desk;
    for finish in write_group(connection, chains, vec![job]) {
        finish();
    }
}

fn write_groups(mut connection: Connection, queue: &Receiver<Job>) {
    let mut chains = Chains::default();
    let mut last = 1;
    while let Ok(first) = queue.recv() {
        let runtime = first.runtime.clone();
        let group = gather(first, queue, last);
        last = group.len();
        let finishes = write_group(&mut connection, &mut chains, group);
        let finish = move || finishes.into_iter().for_each(|finish| finish());
        match runtime {
            // One wake-up instead of one for each that waits.
            Some(runtime) if last > 1 => drop(runtime.spawn(async move { finish() })),
            _ => finish(),
        }
    }
}

/// The first job and those behind it. A lone writer never waits here.
fn gather(first: Job, queue: &Receiver<Job>, last: usize) -> Vec<Job> {
    let mut group = vec![first];
    group.extend(queue.try_iter().take(GROUP_MAX - 1));
    let deadline = Instant::now() + GATHER_MAX;
    while group.len() < last.min(GROUP_MAX) {
        let left = deadline.saturating_duration_since(Instant::now());
        match queue.recv_timeout(left) {
            Ok(job) => group.push(job),
            Err(_) => break,
        }
    }
    group
}

/// Does the group's work; what is returned tells those who wait.
fn write_group(
    connection: &mut Connection,
    chains: &mut Chains,
    group: Vec<Job>,
) -> Vec<Box<dyn FnOnce() + Send>> {
    let mut finishes: Vec<Finish> = Vec::with_capacity(group.len());
    let mut group = group.into_iter();
    let outcome = commit_group(connection, chains, &mut group, &mut finishes);
    if outcome.is_err() {
        chains.known.clear();
    }
    for job in group {
        let error = outcome.clone().err().unwrap_or(LogError::Closed);
        finishes.push((job.work)(Err(error)).1);
    }
    let tell = |finish: Finish| -> Box<dyn FnOnce() + Send> {
        let outcome = outcome.clone();
        Box::new(move || finish(outcome))
    };
    finishes.into_iter().map(tell).collect()
}

fn commit_group(
    connection: &mut Connection,
    chains: &mut Chains,
    group: &mut std::vec::IntoIter<Job>,
    finishes: &mut Vec<Finish>,
) -> Result<(), LogError> {
    let mut transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    chains.check(&transaction)?;
    for job in group {
        if !job.careful {
            let (verdict, finish) = (job.work)(Ok(Desk { connection: &transaction, chains }));
            finishes.push(finish);
            if let Verdict::Ruined(error) = verdict {
                return Err(error);
            }
            continue;
        }
        let savepoint = transaction.savepoint()?;
        let (verdict, finish) = (job.work)(Ok(Desk { connection: &savepoint, chains }));
        finishes.push(finish);
        if matches!(verdict, Verdict::Keep) {
            savepoint.commit()?;
        } else {
            // Dropping a savepoint rolls it back; `finish` does it with an error to look at.
            savepoint.finish()?;
        }
    }
    transaction.commit()?;
    Ok(())
}
