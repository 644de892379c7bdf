//! The promises, on whole installations: one program, since each more costs a link of all that the
//! clients and servers of the tests are made of.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say so")]

mod answers;
mod authorities;
mod changes;
mod credentials;
mod denials;
mod egress;
mod entries;
mod escapes;
mod fetch;
mod fields;
mod http_faults;
mod in_force;
mod isolation;
mod leases;
mod names;
mod questions;
mod recovery;
mod refusals;
mod runs;
mod secrecy;
mod transfers;
mod unheard;
