//! A living sandbox, as sandboxd holds it: its first process, its egress sockets, its commands.
//!
//! Dropping a [`Cell`] kills everything in it; dropping a [`Running`] kills that command and all
//! that descends from it. What happens on the other side of the socket stands in [`crate::init`].

mod running;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ipc::fd::{Channel, MessageError};
use ipc::lease::Descriptor;
use ipc::sandbox::{Layer, Usage};
use rustix::process::Signal;
use tokio::io::unix::AsyncFd;

use crate::plan::Mount;
use crate::zygote::OwnId;
use crate::zygote::cgroup::{oom_kills, processes_refused};
use crate::zygote::memory;
use crate::zygote::message::{Failure, Order, Program, Progress, Report};

pub use running::{ExitOf, Peak, Running};

/// Largest request or answer of a file call: an image to be shown to a model has a fifth of this.
pub const CALL_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Descriptors a command may be given: a message carries 16, three of which are ours.
pub const COMMAND_FDS_MAX: usize = 13;

/// A living sandbox.
#[derive(Debug)]
pub struct Cell {
    channel: Channel,
    pidfd: AsyncFd<OwnedFd>,
    pid: u32,
    uid: u32,
    /// `memory.events` of its control group, where it has one.
    memory: Option<OwnedFd>,
    /// And its `pids.events`.
    processes: Option<OwnedFd>,
    egress: Vec<(Descriptor, OwnedFd)>,
    layers: Vec<Layer>,
    bundle: Option<OwnedFd>,
    /// Given back when everything inside has been killed.
    _id: OwnId,
}

/// What the zygote says of a cell it cloned.
#[derive(Debug)]
pub(crate) struct FirstProcess {
    pub pid: u32,
    pub uid: u32,
    pub pidfd: OwnedFd,
    pub memory: Option<OwnedFd>,
    pub processes: Option<OwnedFd>,
}

/// A cell that was asked to enter its workspace.
#[derive(Debug)]
pub struct Entering(Channel);

impl Entering {
    /// Waits until commands can run.
    pub async fn done(self) -> Result<(), CellError> {
        match self.0.receive().await.map_err(CellError::of_cell)?.0 {
            Report::Entered => Ok(()),
            Report::Failed(failure) => Err(CellError::Setup(failure)),
            _ => Err(CellError::Lost),
        }
    }
}

/// A program to run in a cell. The environment is exactly `env`: see `SandboxPlan::env`.
#[derive(Clone, Debug)]
pub struct CellCommand {
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Absolute, as the sandbox sees it.
    pub cwd: String,
}

/// Why a cell did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    #[error("the zygote is gone")]
    Zygote,
    /// The cell could not be made.
    #[error("cannot make a sandbox: {}: {}", .0.step, .0.text)]
    Setup(Failure),
    #[error("cannot make a sandbox: every uid of the configured range is in use")]
    NoIds,
    /// The command could not be started; the cell is as before. `exec` with `ENOENT` or `EACCES`
    /// is the command's own fault: see [`CellError::not_runnable`].
    #[error("cannot start the command: {}: {}", .0.step, .0.text)]
    Start(Failure),
    /// The cell, or the guard of the command, ended first.
    #[error("the sandbox ended before the command finished")]
    Lost,
    #[error("the sandbox was not ready within {seconds} s")]
    Late { seconds: u64 },
    #[error("the request or the answer is longer than {CALL_BYTES_MAX} bytes")]
    TooLong,
    #[error("socket of the sandbox: {0}")]
    Io(#[from] std::io::Error),
}

impl CellError {
    /// The exit status a shell would give for a program that cannot be run: 127 for one that is
    /// not there, 126 for one that may not be executed.
    pub fn not_runnable(&self) -> Option<i32> {
        const NO_SUCH_FILE: i32 = rustix::io::Errno::NOENT.raw_os_error();
        match self {
            Self::Start(failure) if failure.step == "exec" => {
                Some(if failure.errno == Some(NO_SUCH_FILE) { 127 } else { 126 })
            }
            _ => None,
        }
    }

    pub(crate) fn of_zygote(error: MessageError) -> Self {
        match error {
            MessageError::Closed => Self::Zygote,
            other => Self::of_cell(other),
        }
    }

    fn of_cell(error: MessageError) -> Self {
        match error {
            MessageError::Closed => Self::Lost,
            MessageError::Socket(error) => Self::Io(error),
            MessageError::TooLong | MessageError::TooManyDescriptors => Self::TooLong,
            MessageError::Malformed(error) => Self::Io(error.into()),
        }
    }
}

impl Cell {
    pub(crate) fn new(channel: Channel, first: FirstProcess, id: OwnId) -> std::io::Result<Self> {
        let FirstProcess { pid, uid, pidfd, memory, processes } = first;
        let pidfd = watched(pidfd)?;
        let (egress, layers, bundle) = (Vec::new(), Vec::new(), None);
        Ok(Self { channel, pidfd, pid, uid, memory, processes, egress, layers, bundle, _id: id })
    }

    /// Waits for the sockets that are the way out, which are the first thing made.
    pub async fn take_egress(&mut self) -> Result<(), CellError> {
        let (progress, fds) = self.progress().await?;
        match progress {
            Progress::Egress { tcp_sockets } => {
                let kind = |at| if at < tcp_sockets { Descriptor::Tcp } else { Descriptor::DnsUdp };
                self.egress = fds.into_iter().enumerate().map(|(at, fd)| (kind(at), fd)).collect();
                Ok(())
            }
            Progress::Failed(failure) => Err(CellError::Setup(failure)),
            _ => Err(CellError::Lost),
        }
    }

    /// Waits until the first process has made everything but the workspace.
    pub async fn make_ready(&mut self) -> Result<(), CellError> {
        let (progress, mut fds) = self.progress().await?;
        match progress {
            Progress::Ready { bundle, layers } => {
                self.bundle = if bundle { fds.pop() } else { None };
                self.layers = layers;
                Ok(())
            }
            Progress::Failed(failure) => Err(CellError::Setup(failure)),
            _ => Err(CellError::Lost),
        }
    }

    async fn progress(&self) -> Result<(Progress, Vec<OwnedFd>), CellError> {
        match self.channel.receive().await {
            // One that ended with an order unread resets the connection; what it said before that
            // comes next.
            Err(MessageError::Closed) => self.channel.receive().await,
            other => other,
        }
        .map_err(CellError::of_cell)
    }

    /// Asks for the workspace; see `Zygote::enter`.
    pub(crate) async fn enter(
        &self,
        workspace: Option<&Mount>,
        uploads: Option<&Mount>,
        tree: Option<OwnedFd>,
    ) -> Result<Entering, CellError> {
        let tree: Vec<_> = tree.iter().map(AsFd::as_fd).collect();
        let (workspace, uploads) = (workspace.cloned(), uploads.cloned());
        let order = Order::Enter { workspace, uploads };
        Ok(Entering(self.order(&order, &tree).await?))
    }

    /// Whether anything can still run in it.
    pub fn is_alive(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut ended = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        poll(&mut ended, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
    }

    /// Process id, on the host, of the first process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Host uid of everything inside.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The sockets that are the sandbox's only way out, living in its network namespace.
    pub fn egress(&self) -> &[(Descriptor, OwnedFd)] {
        &self.egress
    }

    /// What confines the commands of this cell.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The root's own bundle of certificates, once: nothing here needs it twice.
    pub fn take_bundle(&mut self) -> Option<OwnedFd> {
        self.bundle.take()
    }

    /// How often a process of this cell was killed because all together had reached the memory
    /// limit. Always 0 where there is no control group: then an allocation fails instead.
    pub fn oom_kills(&self) -> u64 {
        self.memory.as_ref().map_or(0, |events| oom_kills(&events_in(events)))
    }

    /// How often all together had so many processes that another could not be made. None where
    /// there is no control group to count it.
    pub fn processes_refused(&self) -> Option<u64> {
        self.processes.as_ref().map(|events| processes_refused(&events_in(events)))
    }

    /// Starts a command with `fds` as its descriptors 0, 1, 2, and so on (at most
    /// [`COMMAND_FDS_MAX`]; 0, 1 and 2 are `/dev/null` if not given).
    pub async fn spawn(
        &self,
        command: &CellCommand,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Running, CellError> {
        if fds.len() > COMMAND_FDS_MAX {
            return Err(CellError::TooLong);
        }
        let program = Program {
            argv: command.argv.clone(),
            env: command.env.clone(),
            cwd: command.cwd.clone(),
        };
        let text = serde_json::to_vec(&program).map_err(std::io::Error::from)?;
        let body = memory::holding(&text)?;
        let mut attached = vec![body.as_fd()];
        attached.extend_from_slice(fds);
        Running::started(self.order(&Order::Run, &attached).await?).await
    }

    /// Runs `crate::tools::files::perform` on `payload` in a confined process of the cell.
    /// Dropping the future kills that process.
    pub async fn file_call(&self, payload: &[u8]) -> Result<Vec<u8>, CellError> {
        self.counted_file_call(payload).await.map(|(answer, _)| answer)
    }

    /// The same, with what it used.
    pub async fn counted_file_call(&self, payload: &[u8]) -> Result<(Vec<u8>, Usage), CellError> {
        if payload.len() > CALL_BYTES_MAX {
            return Err(CellError::TooLong);
        }
        let request = memory::holding(payload)?;
        let answer = memory::empty()?;
        let attached = [request.as_fd(), answer.as_fd()];
        let running = Running::started(self.order(&Order::Call, &attached).await?).await?;
        let exit = running.wait().await?;
        if exit.code != Some(0) {
            let text = match (exit.code, exit.signal) {
                (_, Some(signal)) => format!("ended by signal {signal}"),
                (code, None) => format!("ended with status {}", code.unwrap_or(-1)),
            };
            return Err(CellError::Start(Failure { step: "file call".into(), errno: None, text }));
        }
        let answer = memory::read(&answer, CALL_BYTES_MAX).map_err(|error| match error.kind() {
            std::io::ErrorKind::FileTooLarge => CellError::TooLong,
            _ => CellError::Io(error),
        })?;
        let memory_peak_bytes = Some(exit.maxrss_bytes);
        Ok((answer, Usage { cpu_us: exit.cpu_us, memory_peak_bytes, ..Usage::default() }))
    }

    /// Has commands trust proxyd's certificates too, instead of those of the last time. They see
    /// them at once and cannot change them. `added` are those of the root's that runtimes with a
    /// list of their own lack.
    pub async fn trust(&self, ca_pem: &str, added: &str) -> Result<(), CellError> {
        let ours = memory::holding(ca_pem.as_bytes())?;
        let added = memory::holding(added.as_bytes())?;
        let channel = self.order(&Order::Trust, &[ours.as_fd(), added.as_fd()]).await?;
        match channel.receive().await.map_err(CellError::of_cell)?.0 {
            Report::Trusted => Ok(()),
            Report::Failed(failure) => Err(CellError::Start(failure)),
            _ => Err(CellError::Lost),
        }
    }

    /// Returns when the first process has ended, and with it everything inside.
    pub async fn ended(&self) {
        // An error means that the runtime is going down: then nobody waits for a cell any more.
        let _ = self.pidfd.readable().await;
    }

    /// Kills everything inside. Returns at once; [`Cell::ended`] tells when it is done.
    pub fn kill(&self) {
        // It has ended already if this fails: the pidfd names it and nothing else.
        let _ = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
    }

    /// Sends an order with a new socket for its answers.
    async fn order(
        &self,
        order: &Order,
        attached: &[BorrowedFd<'_>],
    ) -> Result<Channel, CellError> {
        let (ours, theirs) = ipc::fd::pair()?;
        let mut all = vec![theirs.as_fd()];
        all.extend_from_slice(attached);
        self.channel.send(order, &all).await.map_err(CellError::of_cell)?;
        drop(theirs);
        Ok(Channel::new(ours)?)
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        self.kill();
    }
}

fn events_in(file: &OwnedFd) -> String {
    let mut text = [0u8; 1024];
    let read = rustix::io::pread(file, &mut text, 0).unwrap_or(0);
    String::from_utf8_lossy(&text[..read]).into_owned()
}

/// Registers a pidfd with the runtime.
#[expect(deprecated, reason = "the replacement is unsafe, and OwnedFd meets what it asks")]
pub(crate) fn watched(pidfd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(pidfd, tokio::io::Interest::READABLE)
}
