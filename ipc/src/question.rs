//! What proxyd asks operators about requests that it holds: calls of `proxyd.sock` (see
//! [`crate::vault`]).
//!
//! A question is open until it is answered, its time is over, or whoever waits for it has gone. It
//! shows more of a request than the audit keeps, its query too, since somebody has to judge it. No
//! credential has been put into it by then.

use serde::{Deserialize, Serialize};

use crate::id::{CallId, LeaseId, QuestionId, RequestId, SandboxId, SessionId};

/// Longest time for which one answer can serve what comes after it.
pub const ANSWER_SECONDS_MAX: u64 = 24 * 3600;

/// One request, or connection, that waits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Question {
    pub question: QuestionId,
    pub request: RequestId,
    /// RFC 3339, milliseconds.
    pub asked_at: String,
    /// Until it is denied for want of an answer.
    pub seconds_left: u64,
    pub environment: String,
    pub lease: LeaseId,
    /// On whose behalf the lease is.
    pub owner: String,
    pub session: Option<SessionId>,
    pub sandbox: Option<SandboxId>,
    pub calls: Vec<CallId>,
    /// Which rule asks: `egress.allow[2]`.
    pub rule: String,
    /// What would be put in.
    pub credential: Option<String>,
    pub host: String,
    pub port: u16,
    /// None for a connection that is passed on unread.
    pub method: Option<String>,
    pub path: Option<String>,
    pub query: Option<String>,
    /// What else the upstream may take it for, in words.
    pub taken: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuestionPage {
    /// In the order in which they came.
    pub questions: Vec<Question>,
    /// Pass as `after` to be answered when something has changed.
    pub last: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Allow,
    Deny,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reply {
    pub answer: Verdict,
    /// For how long it counts for whatever the same rule asks about the same lease; absent: for
    /// this one request.
    #[serde(default)]
    pub for_seconds: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answered {
    pub question: QuestionId,
    pub answer: Verdict,
    /// How many others that were held have had the same answer.
    pub others: u64,
}
