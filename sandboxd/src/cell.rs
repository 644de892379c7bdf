//! A living sandbox, as sandboxd holds it: its first process, its egress sockets, its commands.
//!
//! Dropping a [`Cell`] kills everything in it; dropping a [`Running`] kills that command and all
//! that descends from it. What happens on the other side of the socket stands in [`crate::init`].

use std::os::fd::{BorrowedFd, OwnedFd};

use ipc::lease::Descriptor;
use ipc::sandbox::Layer;

use crate::plan::Limits;
use crate::zygote::message::Failure;

/// Largest answer of a file call: an image to be shown to a model has a fifth of this.
pub const CALL_BYTES_MAX: usize = 32 * 1024 * 1024;

/// A living sandbox.
#[derive(Debug)]
pub struct Cell {}

/// A program to run in a cell. The environment is exactly `env`: see `SandboxPlan::env`.
#[derive(Clone, Debug)]
pub struct CellCommand {
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    /// Absolute, as the sandbox sees it.
    pub cwd: String,
    /// Other than the plan's.
    pub limits: Option<Limits>,
}

/// A command that was started.
#[derive(Debug)]
pub struct Running {}

/// How a command ended: exactly one of code and signal is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitOf {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    /// Largest resident size of any process waited for.
    pub maxrss_bytes: u64,
    pub cpu_us: u64,
}

/// Why a cell did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    #[error("the zygote is gone")]
    Zygote,
    /// The cell could not be made.
    #[error("cannot make a sandbox: {}: {}", .0.step, .0.text)]
    Setup(Failure),
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
        match self {
            Self::Start(failure) if failure.step == "exec" => {
                Some(if failure.errno == Some(2) { 127 } else { 126 })
            }
            _ => None,
        }
    }
}

impl Cell {
    /// Process id, on the host, of the first process.
    pub fn pid(&self) -> u32 {
        todo!()
    }

    /// Host uid of everything inside.
    pub fn uid(&self) -> u32 {
        todo!()
    }

    /// The sockets that are the sandbox's only way out, living in its network namespace.
    pub fn egress(&self) -> &[(Descriptor, OwnedFd)] {
        todo!()
    }

    /// What confines the commands of this cell.
    pub fn layers(&self) -> &[Layer] {
        todo!()
    }

    /// From the request to ready, in microseconds.
    pub fn provision_us(&self) -> u64 {
        todo!()
    }

    /// Starts a command with `fds` as its descriptors 0, 1, 2, and so on (at most 13).
    pub async fn spawn(
        &self,
        command: &CellCommand,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Running, CellError> {
        let _ = (command, fds);
        todo!()
    }

    /// Runs `crate::tools::files::perform` on `payload` in a confined process of the cell.
    /// Dropping the future kills that process.
    pub async fn file_call(&self, payload: &[u8]) -> Result<Vec<u8>, CellError> {
        let _ = payload;
        todo!()
    }

    /// Puts files into the private root, replacing what is there: absolute paths below `/etc`, or
    /// of existing files anywhere read-only. Commands see them at once and cannot change them.
    pub async fn install(&self, files: &[(String, Vec<u8>)]) -> Result<(), CellError> {
        let _ = files;
        todo!()
    }

    /// Returns when the first process has ended, and with it everything inside.
    pub async fn ended(&self) {
        todo!()
    }

    /// Kills everything inside. Returns at once; [`Cell::ended`] tells when it is done.
    pub fn kill(&self) {
        todo!()
    }
}

impl Running {
    /// Waits for the command itself; what it left in the background lives on until
    /// [`Running::kill_tree`] or the drop. May be called again.
    pub async fn wait(&self) -> Result<ExitOf, CellError> {
        todo!()
    }

    /// Signals the command's process group.
    pub async fn signal_group(&self, signal: i32) -> Result<(), CellError> {
        let _ = signal;
        todo!()
    }

    /// Kills the command and all that descends from it, also what made itself a session of its
    /// own. When it returns `Ok`, none of them is left.
    pub async fn kill_tree(&self) -> Result<(), CellError> {
        todo!()
    }
}
