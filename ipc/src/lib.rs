//! The protocol of Cleanhands: who connects to whom, over which socket, saying what.
//!
//! | socket | kind | called by | carries |
//! |---|---|---|---|
//! | `proxyd.sock` | HTTP | operator, harnessd | secrets in, audit out, scrub ([`vault`]) |
//! | `proxyd-lease.sock` | SEQPACKET | sandboxd, harnessd, others | [`lease`]s, with listeners |
//! | `proxyd-egress.sock` | HTTP proxy | harnessd, others | CONNECT, absolute-form, a token |
//! | `sandboxd.sock` | HTTP | harnessd, operator | calls and sandboxes ([`sandbox`]) |
//! | `sandboxd-exec.sock` | SEQPACKET | operator | commands with their stdio; workspaces |
//! | `harnessd.sock` | HTTP | clients, operator | the Managed Agents API; [`session`] |
//!
//! HTTP is version 1.1 with JSON bodies. A socket is served by the daemon that it is named after.
//! Callers are known by `SO_PEERCRED` ([`peer`]), never by what they say. The HTTP sockets carry no
//! descriptors; the SEQPACKET sockets carry nothing else but one JSON object a message, of at most
//! [`fd::MESSAGE_BYTES_MAX`] bytes. This crate holds messages and plumbing, and what the daemons
//! that start programs know of system calls ([`calls`]): no policy, no configuration, no logging
//! set-up.
#![deny(unsafe_code)]

pub mod account;
pub mod calls;
pub mod daemon;
pub mod fault;
pub mod fd;
pub mod http;
pub mod id;
pub mod in_force;
pub mod layout;
pub mod lease;
pub mod peer;
pub mod question;
pub mod reach;
pub mod sandbox;
pub mod say;
pub mod session;
mod sys;
pub mod vault;
