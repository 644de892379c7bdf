//! sandboxd: disposable sandboxes for commands that a model wrote.
//!
//! Read [`execute`] first: one tool call from request to receipt. [`sandbox`] is the life of what
//! it runs in; [`plan`] says what a sandbox will be, [`zygote`] makes it, [`init`] is its first
//! process. [`journal`] is why one call id never runs twice. This daemon holds no secret, keeps no
//! session log and has no network: its sandboxes' only way out is the lease ([`lease`]) that hands
//! their listening sockets to proxyd.
// It panics where nobody can hear: `ipc::say` does not.
#![deny(clippy::print_stderr)]

use std::ffi::OsString;
use std::process::ExitCode;

// The service: sockets, calls, receipts.
pub mod apart;
pub mod config;
pub mod control;
pub mod environments;
pub mod exec;
pub mod execute;
pub mod exhausted;
pub mod journal;
pub mod lease;
pub mod output;
pub mod owner;
pub mod pool;
pub mod receipt;
mod run;
pub mod sandbox;
pub mod templates;
pub mod tools;
pub mod trust;
pub mod uploads;
pub mod workspace;
// The cells: what confines a command.
pub mod cell;
pub mod init;
pub mod plan;
pub mod preview;
pub mod probe;
pub mod source;
pub mod sys;
pub mod zygote;

/// Runs the daemon, or the role that `args` begins with, until it ends. `prefix` is what this
/// executable needs before a role when it is started again.
pub fn main(prefix: &[&str], mut args: Vec<OsString>) -> ExitCode {
    if args.first().is_some_and(|role| role == "zygote") {
        args.remove(0);
        return zygote::main(args);
    }
    run::main(prefix, args)
}
