//! proxyd: the only way out of a sandbox, and the keeper of credentials.
//!
//! Read [`request`] first: one request's life in order. Then `entry` (how connections come in),
//! `relay` (how bytes go on), `upstream` (whom they reach), `inject` and `scrub` (where a secret
//! meets an exchange), `vault` (the child process that holds secrets).

mod audit;
mod config;
mod control;
mod dns;
mod entry;
mod head;
mod inject;
mod lease;
mod relay;
mod reply;
mod request;
mod scrub;
mod sys;
mod tls;
mod upstream;
mod vault;

use std::ffi::OsString;
use std::process::ExitCode;

/// Runs proxyd, or its vault child when the first argument is the hidden role `vault`. `prefix`
/// is what to put before the role when this program starts itself again.
pub fn main(prefix: &[&str], args: Vec<OsString>) -> ExitCode {
    let _ = (prefix, args);
    ExitCode::from(1)
}
