//! What sandboxd does, from outside: one program, since each more costs a link of all that the
//! daemon is made of.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say so")]

mod cells;
mod exec;
mod execute;
mod faults;
#[path = "support/image.rs"]
mod image;
mod limits;
mod mounts;
mod pool;
mod support;
mod templates;
