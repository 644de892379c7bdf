//! sandboxd's hold on its zygote: starts it, asks it for cells.

use std::path::Path;

use ipc::daemon::SelfExec;

use crate::cell::{Cell, CellError};
use crate::plan::SandboxPlan;

/// The running zygote. Dropping it ends the zygote and every cell.
#[derive(Debug)]
pub struct Zygote {}

/// Which ids of the host the cells run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identities {
    /// All as this process's own user: what an unprivileged user can do.
    Own,
    /// Each as one of its own, uid and gid alike, from this range.
    Range { first: u32, count: u32 },
}

/// Why there is no zygote.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    #[error("cannot start the zygote: {0}")]
    Start(std::io::Error),
}

impl Identities {
    /// A range where this process may map one, else its own user.
    pub fn detect(first: u32, count: u32) -> Self {
        let _ = (first, count);
        todo!()
    }
}

impl Zygote {
    /// Starts this same executable in the role `zygote`. Blocking; call it before any thread or
    /// runtime exists, on the thread that lives as long as the process.
    pub fn start(exec: &SelfExec, identities: Identities) -> Result<Self, ZygoteError> {
        let _ = (exec, identities);
        todo!()
    }

    /// Starts `program` with the arguments `prefix` and `zygote`: for tests, whose own executable
    /// is no sandboxd.
    pub fn start_program(
        program: &Path,
        prefix: &[&str],
        identities: Identities,
    ) -> Result<Self, ZygoteError> {
        let _ = (program, prefix, identities);
        todo!()
    }

    /// Makes a cell: ready to run commands when this returns. Needs a tokio runtime.
    pub async fn make_cell(&self, plan: &SandboxPlan) -> Result<Cell, CellError> {
        let _ = plan;
        todo!()
    }
}
