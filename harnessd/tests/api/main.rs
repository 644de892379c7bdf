//! The HTTP API of a running harnessd: what clients of the wire API rely on.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod bodies;
mod budgets;
mod daemon;
mod description;
mod loopback;
mod objects;
mod together;
mod turns;
