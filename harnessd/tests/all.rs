//! The tests of the daemon as a whole: one program, since each more costs a link of all that the
//! daemon is made of.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say so")]

mod api;
mod imports;
mod log;
mod mcp;
mod models;
mod powercut;
mod recovery;
mod rig;
mod simulation;
mod transfer;
mod turns;
