//! The messages of `proxyd-lease.sock`: a principal's right to use proxyd.
//!
//! The connection is the lease. A holder connects, sends [`LeaseRequest::Open`] (a sandbox's with
//! its listening sockets attached, in the order of `descriptors`), and reads one [`LeaseReply`].
//! Afterwards it may say which tool calls run, ask what was refused to one, and ends with
//! [`LeaseRequest::Close`]: proxyd drops the listeners, ends the flows and forgets the
//! placeholders at once. A connection that ends without `Close` is a holder that died or that
//! proxyd lost: its listeners go at once, what it was told (placeholders, name bindings) is kept
//! for [`GRACE_SECONDS`], so that the same lease id can be opened again. When proxyd restarts, the
//! holder opens the lease again by its id.

use serde::{Deserialize, Serialize};

use crate::fault::Fault;
use crate::id::{CallId, LeaseId, SandboxId, SessionId};
use crate::vault::LeaseInfo;

/// Version of these messages; a peer with another is refused.
pub const VERSION: u32 = 1;

/// How long a lease whose connection broke can be taken up again.
pub const GRACE_SECONDS: u64 = 60;

/// From the holder to proxyd.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum LeaseRequest {
    Open(Open),
    /// Opens a lease for clients that are no sandbox of ours, on terms of its own.
    OpenFor {
        open: Open,
        terms: Terms,
    },
    /// Instead of an opening: the peer's own leases after this one, [`LISTED_MAX`] at a time, in
    /// the order of their ids; all leases where the peer is root or one of the daemons.
    List {
        after: Option<LeaseId>,
    },
    /// Instead of an opening: ends a lease that the peer would be shown.
    End {
        lease: LeaseId,
    },
    /// Once, on a sandbox's lease that was opened before its session was known: whose it is.
    Assign {
        session: SessionId,
    },
    /// A tool call begins on this lease: requests from now on may carry its id in the audit.
    CallStarted {
        call: CallId,
    },
    CallFinished {
        call: CallId,
    },
    /// What was refused to a call that runs. Answered with [`LeaseReply::Refusals`], once the
    /// connections that were being opened when this came have been decided.
    Refusals {
        call: CallId,
    },
    Close,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Open {
    pub version: u32,
    /// Chosen by the holder, so that it can open the same lease again.
    pub lease: LeaseId,
    pub holder: Holder,
    /// The name of the policy file that rules this lease, without `.toml`.
    pub environment: String,
    /// On whose behalf: the owner of the session (`uid:1000`). proxyd checks that the policy lets
    /// this owner in; it believes the statement only from a daemon's uid or from that owner.
    pub owner: String,
    pub sandbox: Option<SandboxId>,
    pub session: Option<SessionId>,
    /// What the attached descriptors are, in order.
    pub descriptors: Vec<Descriptor>,
}

/// What may be said about a lease for others.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The lease ends by itself after this time.
    pub ttl_seconds: Option<u64>,
    /// SHA-256, hex, of the token that the lease had before proxyd or the connection went away:
    /// it shall have that one again, so that clients which know it go on. The token itself is not
    /// told to anybody a second time.
    pub token_sha256: Option<String>,
}

/// Leases in one answer to [`LeaseRequest::List`].
pub const LISTED_MAX: usize = 64;

/// Who holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holder {
    /// sandboxd, for one sandbox: traffic comes over the attached sockets.
    Sandbox,
    /// harnessd: traffic comes over `proxyd-egress.sock` with the token of the reply.
    Harness,
    /// Somebody else on this host, over `proxyd-egress.sock` with the token of the reply.
    Explicit,
}

/// One attached socket, living in the sandbox's network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Descriptor {
    /// A listening TCP socket; `getsockname` of what it accepts is the address asked for.
    /// Connections to port 53 arrive here too and are DNS over TCP.
    Tcp,
    /// A listening stream socket for clients that know of the proxy: TCP, where every request must
    /// bring the token of this very lease, or a Unix socket, where those of the lease's owner need
    /// none.
    Proxy,
    /// A bound UDP socket on port 53, with `IPV6_RECVPKTINFO` set: DNS; answers go out from the
    /// address that was asked.
    DnsUdp,
}

/// From proxyd to the holder.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LeaseReply {
    Opened(Opened),
    /// To [`LeaseRequest::List`]; empty at the end.
    Leases {
        leases: Vec<LeaseInfo>,
    },
    /// To [`LeaseRequest::End`].
    Ended {
        lease: LeaseId,
    },
    Refused {
        fault: Fault,
    },
    /// One line for each kind of refusal, the first ones of many, for whoever reads the result of
    /// the call: not every client prints what it was answered.
    Refusals {
        call: CallId,
        lines: Vec<String>,
    },
    /// proxyd ended the lease; the reason is for the log.
    Revoked {
        reason: String,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opened {
    pub lease: LeaseId,
    /// For `Harness` and `Explicit`, unless a former one goes on: goes into
    /// `Proxy-Authorization: Bearer TOKEN`.
    pub token: Option<String>,
    /// The CA certificate that this lease's leaf certificates are issued from, PEM: the same for as
    /// long as it is open, and when it is opened again, whatever was rotated since. The holder
    /// merges it with the trust store of the sandbox's root.
    pub ca_pem: String,
    /// Variables for the sandbox: names from the policy, values are placeholders.
    pub env: Vec<(String, String)>,
    /// The policy generation in force.
    pub generation: u64,
}
