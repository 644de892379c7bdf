//! The single-threaded process that makes cells.
//!
//! sandboxd executes itself again in the role `zygote` before it has a thread or a runtime: forking
//! from a process with threads may run almost no code in the child, and the parent-death signal
//! follows the forking thread, not the process. The zygote does nothing but read one [`Make`] a
//! message from its standard input (a SEQPACKET socket) and clone; it ends when that socket does,
//! and every cell ends with it. Read [`crate::init`] next.

mod start;

pub mod message;

use std::ffi::OsString;
use std::process::ExitCode;

pub use start::{Identities, Zygote, ZygoteError};

/// Runs the role `zygote`.
pub fn main(_args: Vec<OsString>) -> ExitCode {
    todo!()
}
