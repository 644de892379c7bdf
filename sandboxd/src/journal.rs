//! Started and finished calls, so that one id never runs twice.
//!
//! A call is *started* here, durably, before its command is executed, and its receipt is stored
//! before anybody is told. One thread owns the database and commits what waits in one transaction,
//! so that many calls share one sync. The journal also keeps what else must survive this daemon:
//! the highest fencing number and the owner of each session, and the directories that callers have
//! shown to be theirs. A journal has an identity: a call that was first sent to another one is
//! never executed on this one's word that it is unknown.
//!
//! When a session is deleted its receipts are, because they hold what its commands printed. Two
//! things stay for good, some fifty bytes a call: the ids of its calls, so that a late request for
//! one of them is never taken for a new call, and the id of the session, which takes no call any
//! more.

mod reserve;
mod tables;
mod thread;

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use ipc::id::{CallId, SessionId, WorkspaceId};
use ipc::sandbox::Receipt;
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use tokio::sync::oneshot;

use self::reserve::Reserve;
use self::tables::{broken, encode, fence_in, full, is_spent, lookup_in};
use self::thread::{Done, Request};
use crate::workspace::Registered;

/// Why the journal does not answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JournalError {
    #[error("journal {path}: {why}")]
    Database { path: PathBuf, why: String },
    #[error("journal {path} has version {found}, this program knows {known}")]
    Version { path: PathBuf, found: usize, known: usize },
    #[error("the journal has ended")]
    Ended,
}

/// What the journal says of a call.
#[derive(Clone, Debug)]
pub struct Record {
    pub owner: String,
    /// Of everything that was asked: the same id with another digest is another call.
    pub digest: String,
    /// None while it is started and not finished.
    pub receipt: Option<Receipt>,
}

/// A call about to be executed.
#[derive(Clone, Debug)]
pub struct Start {
    pub call: CallId,
    pub session: SessionId,
    pub owner: String,
    pub digest: String,
    pub tool: String,
    pub started_at: String,
    /// Of the holder that sent it.
    pub fence: u64,
}

/// Whether a call is new here.
#[derive(Clone, Debug)]
pub enum Admitted {
    Known(Box<Record>),
    New(Fenced),
    /// Its session was deleted, and what became of it with that.
    Spent,
}

/// Whether a session's holder may go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fenced {
    /// The number is the highest seen, now kept.
    Current,
    /// A later holder was here.
    Stale { highest: u64 },
    /// The session is somebody else's.
    Foreign,
    /// The session was deleted.
    Deleted,
}

/// The journal, shared by all calls.
#[derive(Clone, Debug)]
pub struct Journal {
    path: Arc<Path>,
    identity: Arc<str>,
    reserve: Reserve,
    requests: mpsc::Sender<Request>,
}

impl Journal {
    /// Opens or makes the journal in `directory` and starts its thread. `recovered` makes the
    /// receipt of a call that an earlier process started and did not finish.
    pub fn open(
        directory: &Path,
        recovered: impl Fn(&Start, &str) -> Receipt,
    ) -> Result<Self, JournalError> {
        let path: Arc<Path> = directory.join("journal.db").into();
        let fail = |e: rusqlite::Error| JournalError::Database {
            path: path.to_path_buf(),
            why: e.to_string(),
        };
        let reserve = Reserve::new(directory);
        // Taking up what an earlier process left must be possible on a full disk. It is held again
        // before the first call.
        reserve.give_up();
        let mut connection = Connection::open(&path).map_err(fail)?;
        let identity = tables::prepare(&mut connection, &path)?;
        let tx = connection.transaction().map_err(fail)?;
        let ended = tables::recover(&tx, &identity, recovered).map_err(fail)?;
        tx.commit().map_err(fail)?;
        if ended > 0 {
            tracing::warn!(calls = ended, "calls of an earlier process have an unknown outcome");
        }
        let (requests, received) = mpsc::channel();
        let thread = std::thread::Builder::new().name("journal".into());
        let (of_thread, why) = (Arc::clone(&path), |e| format!("cannot start its thread: {e}"));
        thread
            .spawn(move || thread::serve(connection, &of_thread, &received))
            .map_err(|e| JournalError::Database { path: path.to_path_buf(), why: why(e) })?;
        Ok(Self { path, identity: identity.into(), reserve, requests })
    }

    /// Stands for this journal, drawn when it was made.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    pub async fn lookup(&self, call: &CallId) -> Result<Option<Record>, JournalError> {
        let call = call.clone();
        self.ask(move |tx| lookup_in(tx, &call)).await
    }

    /// What is known of a call; for a new one, whether its session's holder may go on. The first
    /// owner of a session stays its owner, the highest fencing number is kept.
    pub async fn admit(
        &self,
        call: &CallId,
        session: &SessionId,
        owner: &str,
        fence: u64,
    ) -> Result<Admitted, JournalError> {
        let (call, session, owner) = (call.clone(), session.clone(), owner.to_owned());
        self.ask(move |tx| match lookup_in(tx, &call)? {
            Some(record) => Ok(Admitted::Known(Box::new(record))),
            None if is_spent(tx, &call)? => Ok(Admitted::Spent),
            None => Ok(Admitted::New(fence_in(tx, &session, &owner, fence)?)),
        })
        .await
    }

    /// Stores, durably, that a call begins, unless a later holder came meanwhile. Call before
    /// anything of it is executed. No call begins without room for its receipt.
    pub async fn start(&self, start: Start) -> Result<Fenced, JournalError> {
        let reserve = self.reserve.clone();
        self.ask(move |tx| {
            reserve.hold().map_err(full)?;
            let fenced = fence_in(tx, &start.session, &start.owner, start.fence)?;
            if fenced == Fenced::Current {
                tx.prepare_cached(
                    "INSERT INTO calls (call, session, owner, digest, tool, started_at, fence)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                )?
                .execute(params![
                    start.call.as_str(),
                    start.session.as_str(),
                    start.owner,
                    start.digest,
                    start.tool,
                    start.started_at,
                    start.fence.cast_signed()
                ])?;
            }
            Ok(fenced)
        })
        .await
    }

    /// Stores, durably, what became of a call. Call before anybody is told.
    pub async fn finish(&self, receipt: &Receipt) -> Result<(), JournalError> {
        match self.store(receipt).await {
            Err(JournalError::Database { .. }) => {
                self.reserve.give_up();
                self.store(receipt).await
            }
            other => other,
        }
    }

    async fn store(&self, receipt: &Receipt) -> Result<(), JournalError> {
        let call = receipt.call.clone();
        let text = encode(receipt);
        self.ask(move |tx| {
            tx.prepare_cached("UPDATE calls SET receipt = ?2 WHERE call = ?1")?
                .execute(params![call.as_str(), text])
        })
        .await?;
        Ok(())
    }

    /// Forgets, for good, everything about a session but that it and its calls were here. A call
    /// of it that still runs leaves no receipt.
    pub async fn delete_session(&self, session: &SessionId) -> Result<(), JournalError> {
        let session = session.clone();
        self.ask_to(true, move |tx| tables::delete_session(tx, &session)).await
    }

    /// Makes a session that nobody has had here this owner's, before its first call; says whose it
    /// is otherwise. It does not matter who holds it.
    pub async fn own_session(
        &self,
        session: &SessionId,
        owner: &str,
    ) -> Result<Fenced, JournalError> {
        let (session, owner) = (session.clone(), owner.to_owned());
        self.ask(move |tx| fence_in(tx, &session, &owner, 0)).await
    }

    /// The owner of a session that has been here, also of one that was deleted.
    pub async fn session_owner(&self, session: &SessionId) -> Result<Option<String>, JournalError> {
        let session = session.clone();
        self.ask(move |tx| {
            tx.prepare_cached("SELECT owner FROM sessions WHERE session = ?1")?
                .query_row([session.as_str()], |row| row.get(0))
                .optional()
        })
        .await
    }

    /// Keeps a caller's directory; the same one again has the same id.
    pub async fn keep_workspace(&self, new: Registered) -> Result<WorkspaceId, JournalError> {
        self.ask(move |tx| {
            let known: Option<String> = tx
                .prepare_cached(
                    "SELECT workspace FROM workspaces
                     WHERE owner = ?1 AND path = ?2 AND device = ?3 AND inode = ?4",
                )?
                .query_row(
                    params![new.owner, new.path, new.device.cast_signed(), new.inode.cast_signed()],
                    |row| row.get(0),
                )
                .optional()?;
            if let Some(known) = known {
                return WorkspaceId::parse(&known).map_err(broken);
            }
            let id = WorkspaceId::random();
            tx.prepare_cached("INSERT INTO workspaces VALUES (?1, ?2, ?3, ?4, ?5)")?.execute(
                params![
                    id.as_str(),
                    new.owner,
                    new.path,
                    new.device.cast_signed(),
                    new.inode.cast_signed()
                ],
            )?;
            Ok(id)
        })
        .await
    }

    pub async fn workspace(&self, id: &WorkspaceId) -> Result<Option<Registered>, JournalError> {
        let id = id.clone();
        self.ask(move |tx| {
            tx.prepare_cached(
                "SELECT owner, path, device, inode FROM workspaces WHERE workspace = ?1",
            )?
            .query_row([id.as_str()], |row| {
                Ok(Registered {
                    owner: row.get(0)?,
                    path: row.get(1)?,
                    device: row.get::<_, i64>(2)?.cast_unsigned(),
                    inode: row.get::<_, i64>(3)?.cast_unsigned(),
                })
            })
            .optional()
        })
        .await
    }

    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, JournalError> {
        self.ask_to(false, work).await
    }

    async fn ask_to<T: Send + 'static>(
        &self,
        erases: bool,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, JournalError> {
        let (answer, asked) = oneshot::channel();
        let path = Arc::clone(&self.path);
        let request: Request = Box::new(move |tx| {
            let outcome = tx.and_then(|tx| {
                work(tx).map_err(|e| JournalError::Database {
                    path: path.to_path_buf(),
                    why: e.to_string(),
                })
            });
            let done = outcome.as_ref().map(|_| ()).map_err(Clone::clone);
            // Whoever asked may have gone; what was stored stays stored.
            let tell = move |committed: Result<(), JournalError>| {
                let _ = answer.send(outcome.and_then(|value| committed.map(|()| value)));
            };
            Done { done, erases, answer: Box::new(tell) }
        });
        self.requests.send(request).map_err(|_| JournalError::Ended)?;
        asked.await.map_err(|_| JournalError::Ended)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receipt::unknown_outcome;

    fn open(dir: &Path) -> Journal {
        Journal::open(dir, unknown_outcome).unwrap()
    }

    fn start(call: &CallId) -> Start {
        Start {
            call: call.clone(),
            session: SessionId::parse("s1").unwrap(),
            owner: "uid:1".into(),
            digest: "d".into(),
            tool: "bash".into(),
            started_at: "2026-01-01T00:00:00.000Z".into(),
            fence: 1,
        }
    }

    #[tokio::test]
    async fn a_receipt_survives_the_process_and_the_identity_stays() {
        let dir = tempfile::tempdir().unwrap();
        let call = CallId::random();
        let journal = open(dir.path());
        let identity = journal.identity().to_owned();

        journal.start(start(&call)).await.unwrap();
        assert!(journal.lookup(&call).await.unwrap().unwrap().receipt.is_none());
        let receipt = unknown_outcome(&start(&call), &identity);
        journal.finish(&receipt).await.unwrap();
        drop(journal);
        let again = open(dir.path());

        assert_eq!(again.identity(), identity);
        assert_eq!(again.lookup(&call).await.unwrap().unwrap().receipt, Some(receipt));
        assert!(again.lookup(&CallId::random()).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_deleted_session_leaves_its_ids_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (session, call) = (SessionId::parse("s1").unwrap(), CallId::random());
        let journal = open(dir.path());
        journal.start(start(&call)).await.unwrap();
        let mut receipt = unknown_outcome(&start(&call), journal.identity());
        receipt.content = vec![crate::tools::files::text("SECRET-CANARY-receipt")];
        journal.finish(&receipt).await.unwrap();

        journal.delete_session(&session).await.unwrap();
        journal.finish(&receipt).await.unwrap();

        let again = journal.admit(&call, &session, "uid:1", 9).await.unwrap();
        assert!(matches!(again, Admitted::Spent), "{again:?}");
        assert!(journal.lookup(&call).await.unwrap().is_none());
        let new = journal.admit(&CallId::random(), &session, "uid:1", 9).await.unwrap();
        assert!(matches!(new, Admitted::New(Fenced::Deleted)), "{new:?}");
        let late = journal.start(start(&CallId::random())).await.unwrap();
        assert_eq!(late, Fenced::Deleted);
        let owner = journal.session_owner(&session).await.unwrap();
        assert_eq!(owner.as_deref(), Some("uid:1"));
        for file in ["journal.db", "journal.db-wal"] {
            let bytes = std::fs::read(dir.path().join(file)).unwrap();
            let found = bytes.windows(13).any(|window| window == b"SECRET-CANARY");
            assert!(!found, "what was printed is still in {file}");
        }
    }

    #[tokio::test]
    async fn a_journal_of_the_first_version_is_taken_up() {
        let dir = tempfile::tempdir().unwrap();
        let call = CallId::random();
        let old = Connection::open(dir.path().join("journal.db")).unwrap();
        old.execute_batch(tables::MIGRATIONS[0]).unwrap();
        let values = format!("'{call}', 's1', 'uid:1', 'd', 'bash', 't', 1, NULL");
        old.execute_batch(&format!(
            "INSERT INTO identity VALUES ('journal_old'); INSERT INTO calls VALUES ({values});
             INSERT INTO sessions VALUES ('s1', 'uid:1', 7); PRAGMA user_version = 1;"
        ))
        .unwrap();
        drop(old);

        let journal = open(dir.path());

        assert_eq!(journal.identity(), "journal_old");
        assert!(journal.lookup(&call).await.unwrap().unwrap().receipt.is_some());
        let stale = journal.start(start(&CallId::random())).await.unwrap();
        assert_eq!(stale, Fenced::Stale { highest: 7 });
    }

    #[tokio::test]
    async fn a_started_call_is_outcome_unknown_after_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let call = CallId::random();
        let journal = open(dir.path());
        journal.start(start(&call)).await.unwrap();
        drop(journal);

        let record = open(dir.path()).lookup(&call).await.unwrap().unwrap();

        let outcome = record.receipt.unwrap().outcome;
        assert_eq!(outcome, ipc::sandbox::Outcome::OutcomeUnknown);
    }

    #[tokio::test]
    async fn an_id_starts_once_and_a_failed_start_spoils_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let journal = open(dir.path());
        let (a, b) = (CallId::random(), CallId::random());

        let (first, second, other) = tokio::join!(
            journal.start(start(&a)),
            journal.start(start(&a)),
            journal.start(start(&b))
        );

        assert!(first.is_ok() && second.is_err() && other.is_ok());
    }

    #[tokio::test]
    async fn an_older_holder_and_another_owner_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let journal = open(dir.path());
        let session = SessionId::random();

        let table = [
            ("uid:1", 3, Fenced::Current),
            ("uid:1", 3, Fenced::Current),
            ("uid:1", 2, Fenced::Stale { highest: 3 }),
            ("uid:2", 9, Fenced::Foreign),
            ("uid:1", 4, Fenced::Current),
            ("uid:1", 3, Fenced::Stale { highest: 4 }),
        ];
        for (owner, fence, expected) in table {
            let admitted = journal.admit(&CallId::random(), &session, owner, fence).await.unwrap();
            let Admitted::New(fenced) = admitted else { panic!("{admitted:?}") };
            assert_eq!(fenced, expected, "{owner} {fence}");
        }
    }
}
