//! Whole-daemon tests: three real daemons, real upstreams, waiting without sleep.
//!
//! Each test has an [`installation::Installation`] of its own below one temporary directory, and
//! upstreams that it started. Processes are ended by the handle that started them.
#![allow(clippy::unwrap_used, reason = "a failed set-up must fail loudly")]

pub mod api;
pub mod installation;
pub mod origin;
pub mod upstream;
pub mod wait;
