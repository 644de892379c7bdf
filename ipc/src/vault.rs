//! The messages of `proxyd.sock`: secrets in, names and audit out.
//!
//! | call | body → answer |
//! |---|---|
//! | `GET /v1/health` | → [`Health`] |
//! | `PUT /v1/secrets/NAME` | the raw value → [`SecretInfo`]; never shown again |
//! | `GET /v1/secrets` | → `{"secrets":[SecretInfo…]}` |
//! | `DELETE /v1/secrets/NAME` | → `{"name":NAME}` |
//! | `POST /v1/vault/rotate` | → `{"rows":N}`: a new data key, every value sealed anew |
//! | `POST /v1/vault/wrapping-key` | → `{}`: another key around the data key |
//! | `GET /v1/audit?after=SEQ&limit=N&FILTER=VALUE…` | → [`AuditPage`]; proxyd(8) has the filters |
//! | `GET /v1/audit/verify` | → [`ChainReport`] |
//! | `POST /v1/heads` | [`Head`] → `{}`: a session's chain head, kept in the audit |
//! | `POST /v1/scrub` | [`ScrubRequest`] → [`ScrubReply`] |
//! | `GET /v1/leases` | → `{"leases":[LeaseInfo…]}` |
//! | `GET /v1/metrics` | → counts and states, as text for Prometheus |
//! | `GET /v1/ca.pem` | → the CA certificates, PEM |
//! | `GET /v1/authorities` | → `{"authorities":[CertificateAuthority…]}`, the issuing one first |
//! | `POST /v1/authorities/rotate` | → the same, after a new one was made |
//! | `POST /v1/reload` | → `{"generation":N}`, or the fault of the file that does not parse |
//!
//! Errors are a [`crate::fault::Fault`] with its status. No answer holds a secret's value.

use serde::{Deserialize, Serialize};

use crate::id::{CallId, LeaseId, RequestId, SandboxId, SessionId};

/// Longest secret value, in bytes.
pub const SECRET_BYTES_MAX: usize = 64 * 1024;
/// Shortest secret value, in bytes: shorter ones could not be told from ordinary text when
/// answers are scrubbed.
pub const SECRET_BYTES_MIN: usize = 8;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Health {
    pub daemon: String,
    pub version: String,
    pub pid: u32,
    pub generation: u64,
    /// SHA-256 of the CA certificate that leases get which begin now, hex.
    pub ca_sha256: String,
    /// Where the vault's key came from: `systemd-credential`, `passphrase`, `key-file`.
    pub key_source: String,
    /// Process id of the vault child.
    pub vault_pid: u32,
    /// Where the policy files are read from.
    #[serde(default)]
    pub policies: Option<std::path::PathBuf>,
    /// What is wrong with the files as they are now, so that former ones are in force.
    #[serde(default)]
    pub problem: Option<String>,
    /// Its files.
    #[serde(default)]
    pub in_force: crate::in_force::InForce,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretInfo {
    /// For what somebody else keeps, as a policy names it.
    pub name: String,
    /// Where: `vault`, `file`, `exec`, `openbao` or `aws`.
    #[serde(default)]
    pub kept: String,
    /// 0 where somebody else keeps it.
    pub version: u64,
    /// RFC 3339; where somebody else keeps it, since when it is refused, or empty.
    pub created_at: String,
    pub last_used_at: Option<String>,
    /// RFC 3339: the end of a certificate, of a token that was had for the secret, or of a value
    /// that somebody else keeps, where it was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// `ready` or `needs_login`; `unusable` or `expired` for certificates; where somebody else
    /// keeps it, `unasked` as long as nothing of it is had, and `unavailable` for a file that
    /// cannot be read.
    pub state: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubRequest {
    /// Where they come from. What its credentials put into requests is found cut short too.
    pub environment: String,
    pub texts: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScrubReply {
    /// The same texts, each found value masked at equal length.
    pub texts: Vec<String>,
    /// How many values were masked.
    pub found: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    pub session: SessionId,
    pub events: u64,
    /// SHA-256, hex.
    pub head: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LeaseInfo {
    pub lease: LeaseId,
    pub holder: crate::lease::Holder,
    pub environment: String,
    pub owner: String,
    pub sandbox: Option<SandboxId>,
    pub session: Option<SessionId>,
    pub flows: u64,
    pub connected: bool,
    /// Where its clients find the proxy, besides `proxyd-egress.sock`.
    #[serde(default)]
    pub listens: Vec<String>,
    /// How long it may still last, where that is bounded.
    #[serde(default)]
    pub seconds_left: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateAuthority {
    /// Of the certificate, hex.
    pub sha256: String,
    /// RFC 3339.
    pub valid_from: String,
    pub valid_until: String,
    /// Whether leases that begin now get this one.
    pub issues: bool,
    /// Leases whose clients trust this one.
    pub leases: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuditPage {
    pub records: Vec<AuditRecord>,
    /// Pass as `after` for the next page. It may be beyond the last record here, and a page may be
    /// empty before the end: there is nothing more where this is what was passed.
    pub last: u64,
    /// The newest record that there is.
    pub newest: u64,
}

/// One line of the audit: a decision, its outcome, or a note.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuditRecord {
    pub seq: u64,
    /// RFC 3339, milliseconds.
    pub time: String,
    pub kind: AuditKind,
    pub request: Option<RequestId>,
    pub lease: Option<LeaseId>,
    pub session: Option<SessionId>,
    pub sandbox: Option<SandboxId>,
    /// The calls that ran on the lease at that moment.
    pub calls: Vec<CallId>,
    pub environment: Option<String>,
    pub generation: u64,
    /// `http`, `tunnel`, `dns`, `connect`.
    pub entry: Option<String>,
    pub host: Option<String>,
    pub port: Option<u16>,
    pub address: Option<String>,
    pub method: Option<String>,
    /// The path without its query; what was injected is not in it.
    pub path: Option<String>,
    /// Which rule decided: `egress.allow[2]`.
    pub rule: Option<String>,
    /// Name of the injected credential.
    pub credential: Option<String>,
    /// Why it was denied or how it failed.
    pub reason: Option<String>,
    pub status: Option<u16>,
    pub bytes_up: Option<u64>,
    pub bytes_down: Option<u64>,
    pub duration_ms: Option<u64>,
    /// Values masked in what streamed back.
    pub scrubbed: Option<u64>,
    /// In a record that stands for further denials like the ones before it: how many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeated: Option<u64>,
    /// SHA-256 over the record before and this one, hex.
    pub hash: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditKind {
    Allowed,
    Denied,
    /// How an allowed exchange ended.
    Outcome,
    /// Something else worth a line: a session's chain head, a reload, a secret set.
    Note,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChainReport {
    pub records: u64,
    pub head: String,
    /// What is no longer there, because somebody wanted it kept for so long only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed: Option<RemovedRecords>,
    /// What is wrong, in words; empty when the chain is whole.
    pub problems: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedRecords {
    /// The last of them: what comes after it is there.
    pub last: u64,
    /// When, RFC 3339.
    pub time: String,
}
