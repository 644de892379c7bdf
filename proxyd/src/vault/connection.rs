//! The socket to the vault child: one question at a time, bounded, until the child ends.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use zeroize::Zeroizing;

use super::VaultError;
use super::secret::Secret;
use super::wire::{self, Reply, Request};

/// How long the child may take to open its store; Argon2id and a slow disk are far below it.
const START_SECONDS: u64 = 60;
/// How long one answer may take. A child that is stuck is as good as gone.
const ANSWER_SECONDS: u64 = 30;
/// Questions that may wait for their turn; more wait in their own tasks.
const QUESTIONS: usize = 256;

type Frame = Zeroizing<Vec<u8>>;

struct Question {
    frame: Frame,
    answer: oneshot::Sender<Frame>,
}

pub(super) struct Connection {
    questions: mpsc::Sender<Question>,
    /// Until [`Connection::attach`] takes it.
    parts: Mutex<Option<Parts>>,
    gone: watch::Sender<bool>,
}

struct Parts {
    socket: StdUnixStream,
    /// None in tests, where a thread stands for the child.
    child: Option<Child>,
    questions: mpsc::Receiver<Question>,
}

impl Connection {
    /// Starts the child with a socket as its standard input and reads its first message.
    pub(super) fn start(mut command: Command) -> Result<(Self, Reply), VaultError> {
        let cannot = |error: std::io::Error| {
            VaultError::Failed(format!("cannot start the vault process: {error}"))
        };
        let (ours, theirs) = StdUnixStream::pair().map_err(cannot)?;
        // No environment: what the child needs stands in its arguments.
        command.env_clear().stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let mut child = command.spawn().map_err(cannot)?;
        // The command still holds the child's end; a child that dies must be an end of file here.
        drop(command);
        ours.set_read_timeout(Some(Duration::from_secs(START_SECONDS))).map_err(cannot)?;
        let first = read_first(&ours).and_then(|reply| match reply {
            Reply::Failed { why, text } => Err(VaultError::from_wire(why, text)),
            other => Ok(other),
        });
        if let Err(error) = first {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        first.and_then(|reply| Ok((Self::over(ours, Some(child))?, reply)))
    }

    /// For tests: the other end is already served, by a thread.
    #[cfg(test)]
    pub(super) fn served(socket: StdUnixStream) -> (Self, Reply) {
        let first = read_first(&socket).unwrap();
        (Self::over(socket, None).unwrap(), first)
    }

    fn over(socket: StdUnixStream, child: Option<Child>) -> Result<Self, VaultError> {
        socket.set_read_timeout(None).and_then(|()| socket.set_nonblocking(true)).map_err(
            |error| VaultError::Failed(format!("cannot use the vault's socket: {error}")),
        )?;
        let (sender, questions) = mpsc::channel(QUESTIONS);
        let parts = Mutex::new(Some(Parts { socket, child, questions }));
        Ok(Self { questions: sender, parts, gone: watch::Sender::new(false) })
    }

    pub(super) fn attach(&self) -> Result<(), VaultError> {
        let parts = super::lock(&self.parts).take();
        let Parts { socket, child, questions } = parts.ok_or(VaultError::Gone)?;
        let socket = UnixStream::from_std(socket).map_err(|error| {
            VaultError::Failed(format!("cannot use the vault's socket: {error}"))
        })?;
        let gone = self.gone.clone();
        tokio::spawn(async move {
            carry(socket, questions).await;
            gone.send_replace(true);
            if let Some(child) = child {
                reap(child).await;
            }
        });
        Ok(())
    }

    pub(super) async fn gone(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.gone.subscribe().wait_for(|gone| *gone).await;
    }

    /// Asks the child. Dropping the future leaves the socket in step.
    pub(super) async fn ask(
        &self,
        request: &Request,
        parts: &[Secret],
    ) -> Result<(Reply, Vec<Secret>), VaultError> {
        let (answer, answered) = oneshot::channel();
        let question = Question { frame: wire::encode(request, parts), answer };
        self.questions.send(question).await.map_err(|_| VaultError::Gone)?;
        let body = answered.await.map_err(|_| VaultError::Gone)?;
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

/// Carries questions until the child, or everybody who could ask, is gone.
async fn carry(mut socket: UnixStream, mut questions: mpsc::Receiver<Question>) {
    loop {
        let question = tokio::select! {
            question = questions.recv() => question,
            () = ended(&socket) => None,
        };
        let Some(question) = question else { return };
        let exchanged = tokio::time::timeout(
            Duration::from_secs(ANSWER_SECONDS),
            exchange(&mut socket, &question.frame),
        );
        match exchanged.await {
            // Whoever asked may have stopped waiting.
            Ok(Ok(body)) => drop(question.answer.send(body)),
            _ => return,
        }
    }
}

/// Resolves when the child has ended: nothing comes from it unasked. That the socket counts as
/// readable may be left over from the answer before.
async fn ended(socket: &UnixStream) {
    while socket.readable().await.is_ok() {
        match socket.try_read(&mut [0u8; 1]) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

async fn exchange(socket: &mut UnixStream, frame: &[u8]) -> std::io::Result<Frame> {
    socket.write_all(frame).await?;
    let mut prefix = [0; 4];
    socket.read_exact(&mut prefix).await?;
    let length = wire::body_length(prefix).map_err(std::io::Error::other)?;
    let mut body = Zeroizing::new(vec![0; length]);
    socket.read_exact(&mut body).await?;
    Ok(body)
}

/// Ends the child if it has not ended, and takes its exit status so that no zombie stays.
async fn reap(mut child: Child) {
    let reaped = tokio::task::spawn_blocking(move || {
        let _ = child.kill();
        child.wait()
    });
    if let Ok(Ok(status)) = reaped.await {
        tracing::debug!(%status, "vault process ended");
    }
}
