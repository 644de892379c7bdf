//! Started and finished calls, so that one id never runs twice.
//!
//! A call is *started* here, durably, before its command is executed, and its receipt is stored
//! before anybody is told. One thread owns the database and commits what waits in one transaction,
//! so that many calls share one sync. The journal also keeps what else must survive this daemon:
//! the highest fencing number and the owner of each session, and the directories that callers have
//! shown to be theirs. A journal has an identity: a call that was first sent to another one is
//! never executed on this one's word that it is unknown.

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use ipc::id::{CallId, SessionId, WorkspaceId};
use ipc::sandbox::Receipt;
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use tokio::sync::oneshot;

use crate::workspace::Registered;

/// Most operations in one transaction: bounds how long the first of them waits.
const BATCH_MAX: usize = 128;

/// Why the journal does not answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JournalError {
    #[error("journal {path}: {why}")]
    Database { path: PathBuf, why: String },
    #[error("journal {path} has version {found}, this program knows {SCHEMA_VERSION}")]
    Version { path: PathBuf, found: u32 },
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
}

/// What an asker wants done in a transaction; or why there is none.
type Request = Box<dyn FnOnce(Result<&Transaction<'_>, JournalError>) -> Done + Send>;
/// Tells the asker, once the transaction is on disk.
type Answer = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

struct Done {
    /// Whether what it did is to be kept.
    keep: bool,
    answer: Answer,
}

/// The journal, shared by all calls.
#[derive(Clone, Debug)]
pub struct Journal {
    path: Arc<Path>,
    identity: Arc<str>,
    requests: mpsc::Sender<Request>,
}

/// Changes with the tables.
const SCHEMA_VERSION: u32 = 1;
const SCHEMA: &str = "
CREATE TABLE identity (text TEXT NOT NULL) STRICT;
CREATE TABLE calls (
  call TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, digest TEXT NOT NULL,
  tool TEXT NOT NULL, started_at TEXT NOT NULL, fence INTEGER NOT NULL, receipt TEXT)
  STRICT, WITHOUT ROWID;
CREATE INDEX unfinished ON calls (call) WHERE receipt IS NULL;
CREATE TABLE sessions (
  session TEXT PRIMARY KEY, owner TEXT NOT NULL, fence INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE workspaces (
  workspace TEXT PRIMARY KEY, owner TEXT NOT NULL, path TEXT NOT NULL,
  device INTEGER NOT NULL, inode INTEGER NOT NULL) STRICT, WITHOUT ROWID;
";

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
        let mut connection = Connection::open(&path).map_err(fail)?;
        let identity = prepare(&mut connection, &path)?;
        let tx = connection.transaction().map_err(fail)?;
        let ended = recover(&tx, &identity, recovered).map_err(fail)?;
        tx.commit().map_err(fail)?;
        if ended > 0 {
            tracing::warn!(calls = ended, "calls of an earlier process have an unknown outcome");
        }
        let (requests, received) = mpsc::channel();
        let thread = std::thread::Builder::new().name("journal".into());
        let (of_thread, why) = (Arc::clone(&path), |e| format!("cannot start its thread: {e}"));
        thread
            .spawn(move || serve(connection, &of_thread, &received))
            .map_err(|e| JournalError::Database { path: path.to_path_buf(), why: why(e) })?;
        Ok(Self { path, identity: identity.into(), requests })
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
            None => Ok(Admitted::New(fence_in(tx, &session, &owner, fence)?)),
        })
        .await
    }

    /// Stores, durably, that a call begins, unless a later holder came meanwhile. Call before
    /// anything of it is executed.
    pub async fn start(&self, start: Start) -> Result<Fenced, JournalError> {
        self.ask(move |tx| {
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
        let call = receipt.call.clone();
        let text = encode(receipt);
        self.ask(move |tx| {
            tx.prepare_cached("UPDATE calls SET receipt = ?2 WHERE call = ?1")?
                .execute(params![call.as_str(), text])
        })
        .await?;
        Ok(())
    }

    /// The owner of a session that has been here.
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
        let (answer, asked) = oneshot::channel();
        let path = Arc::clone(&self.path);
        let request: Request = Box::new(move |tx| {
            let outcome = tx.and_then(|tx| {
                work(tx).map_err(|e| JournalError::Database {
                    path: path.to_path_buf(),
                    why: e.to_string(),
                })
            });
            let keep = outcome.is_ok();
            // Whoever asked may have gone; what was stored stays stored.
            let tell = move |committed: Result<(), JournalError>| {
                let _ = answer.send(outcome.and_then(|value| committed.map(|()| value)));
            };
            Done { keep, answer: Box::new(tell) }
        });
        self.requests.send(request).map_err(|_| JournalError::Ended)?;
        asked.await.map_err(|_| JournalError::Ended)?
    }
}

/// Runs requests until every [`Journal`] is gone.
fn serve(mut connection: Connection, path: &Path, requests: &mpsc::Receiver<Request>) {
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
    for request in batch {
        let done = match tx.execute_batch("SAVEPOINT one").map_err(fail) {
            Ok(()) => request(Ok(&tx)),
            Err(error) => request(Err(error)),
        };
        let close = if done.keep { "RELEASE one" } else { "ROLLBACK TO one; RELEASE one" };
        // When even this fails the transaction is lost, which the commit below reports to all.
        let _ = tx.execute_batch(close);
        answers.push(done.answer);
    }
    let committed = tx.commit().map_err(fail);
    if let Err(error) = &committed {
        tracing::error!(%error, "cannot write the journal");
    }
    for answer in answers {
        answer(committed.clone());
    }
}

fn lookup_in(tx: &Transaction<'_>, call: &CallId) -> rusqlite::Result<Option<Record>> {
    tx.prepare_cached("SELECT owner, digest, receipt FROM calls WHERE call = ?1")?
        .query_row([call.as_str()], |row| {
            let receipt: Option<String> = row.get(2)?;
            let receipt = receipt.map(|text| decode(&text)).transpose()?;
            Ok(Record { owner: row.get(0)?, digest: row.get(1)?, receipt })
        })
        .optional()
}

fn prepare(connection: &mut Connection, path: &Path) -> Result<String, JournalError> {
    let fail =
        |e: rusqlite::Error| JournalError::Database { path: path.to_owned(), why: e.to_string() };
    connection.pragma_update(None, "journal_mode", "WAL").map_err(fail)?;
    connection.pragma_update(None, "synchronous", "FULL").map_err(fail)?;
    let version: u32 =
        connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(fail)?;
    if version > SCHEMA_VERSION {
        return Err(JournalError::Version { path: path.to_owned(), found: version });
    }
    let tx = connection.transaction().map_err(fail)?;
    if version == 0 {
        tx.execute_batch(SCHEMA).map_err(fail)?;
        let identity = format!("journal_{}", ipc::id::random_text(24));
        tx.execute("INSERT INTO identity VALUES (?1)", [identity]).map_err(fail)?;
        tx.pragma_update(None, "user_version", SCHEMA_VERSION).map_err(fail)?;
    }
    let identity = tx.query_row("SELECT text FROM identity", [], |row| row.get(0)).map_err(fail)?;
    tx.commit().map_err(fail)?;
    Ok(identity)
}

/// Gives every call that was started and not finished its receipt.
fn recover(
    tx: &Transaction<'_>,
    identity: &str,
    recovered: impl Fn(&Start, &str) -> Receipt,
) -> rusqlite::Result<usize> {
    let unfinished: Vec<Start> = tx
        .prepare(
            "SELECT call, session, owner, digest, tool, started_at, fence FROM calls
             WHERE receipt IS NULL",
        )?
        .query_map([], |row| {
            Ok(Start {
                call: CallId::parse(&row.get::<_, String>(0)?).map_err(broken)?,
                session: SessionId::parse(&row.get::<_, String>(1)?).map_err(broken)?,
                owner: row.get(2)?,
                digest: row.get(3)?,
                tool: row.get(4)?,
                started_at: row.get(5)?,
                fence: row.get::<_, i64>(6)?.cast_unsigned(),
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    for start in &unfinished {
        let text = encode(&recovered(start, identity));
        tx.execute("UPDATE calls SET receipt = ?2 WHERE call = ?1", [start.call.as_str(), &text])?;
    }
    Ok(unfinished.len())
}

fn fence_in(
    tx: &Transaction<'_>,
    session: &SessionId,
    owner: &str,
    fence: u64,
) -> rusqlite::Result<Fenced> {
    let known: Option<(String, i64)> = tx
        .prepare_cached("SELECT owner, fence FROM sessions WHERE session = ?1")?
        .query_row([session.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    if let Some((known_owner, highest)) = known {
        let highest = highest.cast_unsigned();
        if known_owner != owner {
            return Ok(Fenced::Foreign);
        }
        if fence < highest {
            return Ok(Fenced::Stale { highest });
        }
        if fence == highest {
            return Ok(Fenced::Current);
        }
    }
    tx.prepare_cached(
        "INSERT INTO sessions VALUES (?1, ?2, ?3)
         ON CONFLICT (session) DO UPDATE SET fence = excluded.fence",
    )?
    .execute(params![session.as_str(), owner, fence.cast_signed()])?;
    Ok(Fenced::Current)
}

fn encode(receipt: &Receipt) -> String {
    serde_json::to_string(receipt).expect("a receipt has string keys only and always encodes")
}

fn decode(text: &str) -> rusqlite::Result<Receipt> {
    serde_json::from_str(text).map_err(broken)
}

fn broken(error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
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
