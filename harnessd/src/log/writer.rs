//! The one thread that writes: takes what has queued up, does it in one transaction, syncs once.
//!
//! Each job runs in a savepoint, so that one that fails leaves no trace and the others stand. An
//! answer goes out only after the commit, with the commit's own outcome.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::oneshot;

use super::LogError;

/// Most jobs in one transaction: bounds how long other processes wait for theirs.
const GROUP_MAX: usize = 128;

type Finish = Box<dyn FnOnce(Result<(), LogError>) + Send>;
type Job = Box<dyn FnOnce(Result<&Connection, LogError>) -> (bool, Finish) + Send>;

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
    Inline(Arc<Mutex<Connection>>, Arc<dyn Seam>),
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
        Self::Inline(Arc::new(Mutex::new(connection)), seam)
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
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            let outcome = connection.and_then(work);
            let keep = outcome.is_ok();
            let finish: Finish = Box::new(move |commit: Result<(), LogError>| {
                // Whoever asked may have gone; the work stands all the same.
                let _ = answer.send(commit.and(outcome));
            });
            (keep, finish)
        });
        match self {
            Self::Thread(jobs) => jobs.send(job).map_err(|_| LogError::Closed)?,
            Self::Inline(connection, seam) => {
                seam.before_write().await;
                write_now(connection, job);
                seam.after_write().await;
            }
        }
        answered.await.map_err(|_| LogError::Closed)?
    }
}

fn write_now(connection: &Mutex<Connection>, job: Job) {
    let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
    write_group(&mut connection, vec![job]);
}

fn write_groups(mut connection: Connection, queue: &Receiver<Job>) {
    while let Ok(first) = queue.recv() {
        let mut group = vec![first];
        group.extend(queue.try_iter().take(GROUP_MAX - 1));
        write_group(&mut connection, group);
    }
}

fn write_group(connection: &mut Connection, group: Vec<Job>) {
    let mut finishes = Vec::with_capacity(group.len());
    let mut group = group.into_iter();
    let outcome = commit_group(connection, &mut group, &mut finishes);
    for job in group {
        let error = outcome.clone().err().unwrap_or(LogError::Closed);
        finishes.push(job(Err(error)).1);
    }
    for finish in finishes {
        finish(outcome.clone());
    }
}

fn commit_group(
    connection: &mut Connection,
    group: &mut std::vec::IntoIter<Job>,
    finishes: &mut Vec<Finish>,
) -> Result<(), LogError> {
    let mut transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for job in group {
        let savepoint = transaction.savepoint()?;
        let (keep, finish) = job(Ok(&savepoint));
        finishes.push(finish);
        if keep {
            savepoint.commit()?;
        } else {
            // Dropping a savepoint rolls it back; `finish` does it with an error to look at.
            savepoint.finish()?;
        }
    }
    transaction.commit()?;
    Ok(())
}
