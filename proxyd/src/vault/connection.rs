//! The socket to the vault child: numbered questions, bounded, until the child ends.
//!
//! Questions go out in turn; an answer that waits for somebody else's server comes when it comes,
//! and those behind it need not wait.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};
use zeroize::Zeroizing;

use super::VaultError;
use super::secret::Secret;
use super::wire::{self, Reply, Request};
use crate::config::{CREDENTIALS, credentials};

/// How long the child may take to open its store; Argon2id and a slow disk are far below it.
pub(super) const START_SECONDS: u64 = 60;
/// How long one answer may take. It may wait for several questions of the workers', one after the
/// other (a login, a value, a token for it, each a second time), of which each has its own limit
/// ([`super::mint`]); the rest is for a machine that is busy. A child that is stuck is as good as
/// gone.
pub(super) const ANSWER_SECONDS: u64 = 7 * super::FETCH_SECONDS + 20;
/// Questions that may wait for their turn; more wait in their own tasks.
const QUESTIONS: usize = 256;

type Frame = Zeroizing<Vec<u8>>;

struct Question {
    /// Its number is put in when it is sent.
    frame: Frame,
    answer: oneshot::Sender<Frame>,
}

/// Who waits for which answer.
type Waiting = Arc<Mutex<HashMap<u32, oneshot::Sender<Frame>>>>;

pub(super) struct Connection {
    questions: mpsc::Sender<Question>,
    /// Until [`Connection::attach`] takes it.
    parts: Mutex<Option<Parts>>,
    gone: watch::Sender<bool>,
}

struct Parts {
    socket: StdUnixStream,
    /// The child and its workers; none in tests, where a thread stands for them.
    children: Vec<Child>,
    questions: mpsc::Receiver<Question>,
}

/// No environment but the name of the place of systemd's credentials: keys lie there that the
/// workers show, or keep from commands. What else they need stands in their arguments.
fn bare(command: &mut Command) -> &mut Command {
    command.env_clear().envs(credentials().map(|place| (CREDENTIALS, place)))
}

impl Connection {
    /// Starts the child and its workers: a socket to us is the child's standard input, one to the
    /// network's worker its standard output; `command` is told the number of that to the other.
    /// Reads the child's first message.
    pub(super) fn start(
        mut command: impl FnMut(Option<i32>) -> Command,
        mut fetch: Command,
        run: Option<Command>,
    ) -> Result<(Self, Reply), VaultError> {
        let cannot = |error: std::io::Error| {
            VaultError::Failed(format!("cannot start the vault process: {error}"))
        };
        let (ours, theirs) = StdUnixStream::pair().map_err(cannot)?;
        let (near, far) = StdUnixStream::pair().map_err(cannot)?;
        bare(&mut fetch).stdin(OwnedFd::from(far)).stdout(Stdio::null());
        let mut children = vec![fetch.spawn().map_err(cannot)?];
        let mut commands = None;
        if let Some(mut run) = run {
            let (near, far) = StdUnixStream::pair().map_err(cannot)?;
            bare(&mut run).stdin(OwnedFd::from(far)).stdout(Stdio::null());
            children.push(run.spawn().map_err(cannot)?);
            // The next process that is started inherits it by its number.
            rustix::io::fcntl_setfd(&near, rustix::io::FdFlags::empty())
                .map_err(|errno| cannot(errno.into()))?;
            commands = Some(near);
        }
        let mut command = command(commands.as_ref().map(AsRawFd::as_raw_fd));
        bare(&mut command).stdin(OwnedFd::from(theirs)).stdout(OwnedFd::from(near));
        children.push(command.spawn().map_err(cannot)?);
        // The commands still hold ends that are not ours; whoever dies must be an end of file to
        // the others.
        drop((command, fetch, commands));
        ours.set_read_timeout(Some(Duration::from_secs(START_SECONDS))).map_err(cannot)?;
        let first = read_first(&ours).and_then(|reply| match reply {
            Reply::Failed { why, text } => Err(VaultError::from_wire(why, text)),
            other => Ok(other),
        });
        if let Err(error) = first {
            for mut child in children {
                let _ = child.kill();
                let _ = child.wait();
            }
            return Err(error);
        }
        first.and_then(|reply| Ok((Self::over(ours, children)?, reply)))
    }

    /// For tests: the other end is already served, by a thread.
    #[cfg(test)]
    pub(super) fn served(socket: StdUnixStream) -> (Self, Reply) {
        let first = read_first(&socket).unwrap();
        (Self::over(socket, Vec::new()).unwrap(), first)
    }

    pub(super) fn over(socket: StdUnixStream, children: Vec<Child>) -> Result<Self, VaultError> {
        socket.set_read_timeout(None).and_then(|()| socket.set_nonblocking(true)).map_err(
            |error| VaultError::Failed(format!("cannot use the vault's socket: {error}")),
        )?;
        let (sender, questions) = mpsc::channel(QUESTIONS);
        let parts = Mutex::new(Some(Parts { socket, children, questions }));
        Ok(Self { questions: sender, parts, gone: watch::Sender::new(false) })
    }

    pub(super) fn attach(&self) -> Result<(), VaultError> {
        let parts = super::lock(&self.parts).take();
        let Parts { socket, children, questions } = parts.ok_or(VaultError::Gone)?;
        let socket = UnixStream::from_std(socket).map_err(|error| {
            VaultError::Failed(format!("cannot use the vault's socket: {error}"))
        })?;
        let gone = self.gone.clone();
        tokio::spawn(async move {
            let mut stuck = gone.subscribe();
            let stuck = tokio::select! {
                () = carry(socket, questions) => false,
                _ = stuck.wait_for(|gone| *gone) => true,
            };
            gone.send_replace(true);
            for child in children {
                reap(child, stuck).await;
            }
        });
        Ok(())
    }

    pub(super) async fn gone(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.gone.subscribe().wait_for(|gone| *gone).await;
    }

    /// Asks the child. Dropping the future does no harm: the answer finds nobody.
    pub(super) async fn ask(
        &self,
        request: &Request,
        parts: &[Secret],
    ) -> Result<(Reply, Vec<Secret>), VaultError> {
        let (answer, answered) = oneshot::channel();
        let question = Question { frame: wire::encode(0, request, parts), answer };
        self.questions.send(question).await.map_err(|_| VaultError::Gone)?;
        let patience = Duration::from_secs(ANSWER_SECONDS);
        let Ok(body) = tokio::time::timeout(patience, answered).await else {
            self.gone.send_replace(true);
            return Err(VaultError::Gone);
        };
        let body = body.map_err(|_| VaultError::Gone)?;
        match wire::decode(&body).map_err(|error| VaultError::Failed(error.to_string()))? {
            (Reply::Failed { why, text }, _) => Err(VaultError::from_wire(why, text)),
            answer => Ok(answer),
        }
    }
}

fn read_first(mut socket: &StdUnixStream) -> Result<Reply, VaultError> {
    use std::io::Read;
    let ended = |_| VaultError::Failed("the vault process ended while it started".into());
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix).map_err(ended)?;
    let malformed = |error: wire::Malformed| VaultError::Failed(error.to_string());
    let mut body = vec![0; wire::body_length(prefix).map_err(malformed)?];
    socket.read_exact(&mut body).map_err(ended)?;
    wire::decode(&body).map(|(reply, _)| reply).map_err(malformed)
}

/// Carries questions until the child, or everybody who could ask, is gone. Whoever still waits
/// then learns it by the end of their channel.
async fn carry(socket: UnixStream, questions: mpsc::Receiver<Question>) {
    let waiting = Waiting::default();
    let (reading, writing) = socket.into_split();
    tokio::select! {
        () = ask(writing, questions, &waiting) => {}
        () = take(reading, &waiting) => {}
    }
}

async fn ask(
    mut socket: OwnedWriteHalf,
    mut questions: mpsc::Receiver<Question>,
    waiting: &Waiting,
) {
    let mut number: u32 = 0;
    while let Some(Question { mut frame, answer }) = questions.recv().await {
        number = number.wrapping_add(1);
        frame[4..8].copy_from_slice(&number.to_le_bytes());
        super::lock(waiting).insert(number, answer);
        if socket.write_all(&frame).await.is_err() {
            return;
        }
    }
}

async fn take(mut socket: OwnedReadHalf, waiting: &Waiting) {
    loop {
        let Ok(body) = body(&mut socket).await else { return };
        if let Some(answer) = super::lock(waiting).remove(&wire::number(&body)) {
            // Whoever asked may have stopped waiting.
            drop(answer.send(body));
        }
    }
}

async fn body(socket: &mut OwnedReadHalf) -> std::io::Result<Frame> {
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix).await?;
    let length = wire::body_length(prefix).map_err(std::io::Error::other)?;
    let mut body = Zeroizing::new(vec![0; length]);
    socket.read_exact(&mut body).await?;
    Ok(body)
}

/// Takes the child's exit status, so that no zombie stays. It ends by itself when it has stored
/// what it still waits for ([`super::ending`]), unless it is stuck.
async fn reap(mut child: Child, stuck: bool) {
    let reaped = tokio::task::spawn_blocking(move || {
        if stuck {
            let _ = child.kill();
        }
        child.wait()
    });
    if let Ok(Ok(status)) = reaped.await {
        match status.signal() {
            Some(libc::SIGSYS) => tracing::error!(
                "a process of the vault's asked the kernel for what only an attack needs, and was \
                 ended"
            ),
            _ => tracing::debug!(%status, "vault process ended"),
        }
    }
}
