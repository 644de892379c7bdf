//! The thread that owns the database: takes requests in batches, one transaction and one sync each.

use std::path::Path;
use std::sync::mpsc;

use rusqlite::{Connection, Transaction};

use super::JournalError;

/// Most operations in one transaction: bounds how long the first of them waits.
const BATCH_MAX: usize = 128;

/// What an asker wants done in a transaction; or why there is none.
pub type Request = Box<dyn FnOnce(Result<&Transaction<'_>, JournalError>) -> Done + Send>;
/// Tells the asker, once the transaction is on disk.
pub type Answer = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

/// A request carried out.
pub struct Done {
    /// Whether what it did is to be kept, or why not.
    pub done: Result<(), JournalError>,
    /// Whether what it deleted must be gone from the disk when it is answered.
    pub erases: bool,
    pub answer: Answer,
}

/// Runs requests until every journal's handle is gone.
pub fn serve(mut connection: Connection, path: &Path, requests: &mpsc::Receiver<Request>) {
    while let Ok(first) = requests.recv() {
        let others = requests.try_iter().take(BATCH_MAX - 1);
        commit(&mut connection, path, std::iter::once(first).chain(others));
    }
}

/// One transaction for a batch; an operation that fails undoes itself alone, by its savepoint.
fn commit(connection: &mut Connection, path: &Path, batch: impl Iterator<Item = Request>) {
    let fail =
        |e: rusqlite::Error| JournalError::Database { path: path.to_owned(), why: e.to_string() };
    let tx = match connection.transaction().map_err(fail) {
        Ok(tx) => tx,
        Err(error) => {
            for request in batch {
                (request(Err(error.clone())).answer)(Ok(()));
            }
            return;
        }
    };
    let mut answers = Vec::new();
    let mut lost = None;
    let mut erases = false;
    for request in batch {
        // Outside of a transaction a savepoint would be one of its own, and kept.
        let begun = match &lost {
            Some(lost) => Err(JournalError::clone(lost)),
            None => tx.execute_batch("SAVEPOINT one").map_err(fail),
        };
        let Done { mut done, answer, erases: erased } = match begun {
            Ok(()) => request(Ok(&tx)),
            Err(error) => request(Err(error)),
        };
        answers.push(answer);
        erases |= erased;
        if !tx.is_autocommit() {
            let close = if done.is_ok() { "RELEASE one" } else { "ROLLBACK TO one; RELEASE one" };
            if let Err(error) = tx.execute_batch(close).map_err(fail) {
                done = Err(error);
                lost = done.clone().err();
            }
        }
        // A full disk, for one, ends the whole transaction and not the operation alone.
        if tx.is_autocommit() && lost.is_none() {
            lost = done.err().or(Some(JournalError::Ended));
        }
    }
    let committed = match lost {
        Some(lost) => {
            drop(tx);
            Err(lost)
        }
        None => tx.commit().map_err(fail),
    };
    if let Err(error) = &committed {
        tracing::error!(%error, "cannot write the journal");
    }
    if erases && committed.is_ok() {
        erase(connection);
    }
    for answer in answers {
        answer(committed.clone());
    }
}

/// The write-ahead log holds the pages as they were until it is cut.
fn erase(connection: &Connection) {
    let cut = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
    if let Err(error) = cut {
        tracing::warn!(%error, "what was deleted stays in the journal's log for a while");
    }
}
