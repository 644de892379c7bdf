//! The protocol of Cleanhands: who connects to whom, over which socket, saying what.
//!
//! | socket | kind | served by | called by | carries |
//! |---|---|---|---|---|
//! | `proxyd.sock` | HTTP/1.1 + JSON | proxyd | operator, harnessd | secrets in, audit out, scrub ([`vault`]) |
//! | `proxyd-lease.sock` | SEQPACKET | proxyd | sandboxd, harnessd | [`lease`] messages with listeners attached |
//! | `proxyd-egress.sock` | HTTP/1.1 proxy | proxyd | harnessd, explicit clients | CONNECT and absolute-form, with a lease token |
//! | `sandboxd.sock` | HTTP/1.1 + JSON | sandboxd | harnessd, operator | [`sandbox`] messages: execute, calls, sandboxes |
//! | `sandboxd-exec.sock` | SEQPACKET | sandboxd | operator | [`sandbox::ExecRequest`] with stdio attached; workspaces |
//! | `harnessd.sock` | HTTP/1.1 + JSON | harnessd | agents' clients, operator | the Managed Agents wire API, [`session`] |
//!
//! Callers are known by `SO_PEERCRED` ([`peer`]), never by what they say. The HTTP sockets carry no
//! descriptors; the SEQPACKET sockets carry nothing else but one JSON object a message, of at most
//! [`fd::MESSAGE_BYTES_MAX`] bytes. This crate holds messages and plumbing: no policy, no
//! configuration, no logging set-up.
#![deny(unsafe_code)]

pub mod daemon;
pub mod fault;
pub mod fd;
pub mod http;
pub mod id;
pub mod layout;
pub mod lease;
pub mod peer;
pub mod sandbox;
pub mod session;
mod sys;
pub mod vault;
