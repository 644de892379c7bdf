//! The command, as it is called.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say so")]

mod arguments;
mod demo;
mod leases;
mod policies;
mod trouble;
