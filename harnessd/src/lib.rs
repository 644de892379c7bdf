//! harnessd: the session log, the agent loop and the HTTP API. No key, no network, no commands.
//!
//! Read in this order: [`wake`] (one session from event to event), [`state`] (what a log says,
//! folded) with [`spending`], and [`step`] (the decision what comes next), all pure, [`engine`]
//! (who runs which session, and who listens), [`log`] (what is stored), [`context`] (events to
//! model messages), [`model`] and [`hands`] (what it talks to), [`api`] (what clients see).
#![deny(unsafe_code)]
// It panics where nobody can hear: `ipc::say` does not.
#![deny(clippy::print_stderr)]

pub mod api;
pub mod config;
pub mod context;
pub mod engine;
pub mod fold;
pub mod hands;
pub mod log;
pub mod model;
mod run;
mod spending;
pub mod state;
pub mod step;
mod sys;
pub mod wake;

pub use run::main;
