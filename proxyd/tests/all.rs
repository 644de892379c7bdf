//! What proxyd does, from outside: one program, since each more costs a link of all that the
//! daemon is made of. Tests that change their own process (its network, its limits) stay programs
//! of their own.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say so")]

mod aws;
mod budgets;
mod client_certificates;
mod combinations;
mod commands;
#[path = "support/corporate.rs"]
mod corporate;
mod corpus;
mod departures;
mod egress;
mod files;
mod first_word;
mod h2_upstream;
mod handshakes;
mod journal;
mod lease;
mod lease_bounds;
mod metrics;
#[path = "support/nameserver.rs"]
mod nameserver;
mod openbao;
mod outputs;
mod overrides;
mod own_key;
mod questions;
mod registries;
mod relay;
mod reload;
mod resolving;
mod rotation;
mod secrecy;
mod signing;
mod silence;
mod spellings;
mod support;
mod tokens;
mod tunnels;
mod upstream_ends;
mod vault;
mod way_out;
mod websocket;
mod windows;
mod wrapping_key;
