//! The policy file and its decisions, by what others can call.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say so")]

mod asks;
mod budgets;
mod connect;
mod decide;
mod diagnostics;
mod effects;
mod mutations;
mod orders;
mod shipped;
mod spellings;
