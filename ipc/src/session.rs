//! The operator's own part of `harnessd.sock`, beside the Managed Agents wire API.
//!
//! | call | answer |
//! |---|---|
//! | `GET /cleanhands/v1/health` | [`Health`] |
//! | `GET /cleanhands/v1/sessions/ID/log?after=SEQ&limit=N` | `{"events":[LogEvent…]}` |
//! | `GET /cleanhands/v1/sessions/ID/verify` | [`crate::vault::ChainReport`] |
//! | `GET /cleanhands/v1/sessions/ID/export` | lines of JSON: what it is, its events, `{"end":N}` |
//! | `POST /cleanhands/v1/sessions/ID/import` with some | whether the session is whole now |
//! | `POST /cleanhands/v1/sessions/ID/profile` with `{"profile":P}` | the profile in full |
//! | `GET /cleanhands/v1/sessions/ID/replay?profile=P` | what its model requests would have held |
//! | `GET /cleanhands/v1/backup` | the whole log, for root and harnessd's own user |
//! | `POST /cleanhands/v1/keys` with a [`KeyRequest`] | [`NewKey`]: a key of the loopback port |
//! | `GET /cleanhands/v1/keys` | [`KeyList`] |
//! | `DELETE /cleanhands/v1/keys/NAME` | `{"name":NAME}` |
//!
//! The wire API lives below `/v1/`; its types are harnessd's own, converted at its edge.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Key of a session's `metadata` that names the workspace it works in (a `WorkspaceId`).
pub const METADATA_WORKSPACE: &str = "cleanhands.workspace";
/// Key of an environment's `metadata` that names its policy file, without `.toml`.
pub const METADATA_POLICY: &str = "policy";

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Health {
    pub daemon: String,
    pub version: String,
    pub pid: u32,
    /// Names of the models in the configuration.
    pub models: Vec<String>,
    pub default_environment: String,
    /// Its files.
    #[serde(default)]
    pub in_force: crate::in_force::InForce,
}

/// One event of a session as it is stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogEvent {
    /// From 1, without gaps.
    pub seq: u64,
    pub id: String,
    pub time: String,
    pub kind: String,
    pub body: Value,
    /// Of the event before, hex; 64 zeros for the first.
    pub previous: String,
    /// SHA-256, hex.
    pub hash: String,
}

/// Asks for a key of the loopback port, for the caller's own user.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRequest {
    pub name: String,
}

/// A key, said once: harnessd keeps its hash. No `Debug`, so that it lands in no log.
#[derive(Clone, Serialize, Deserialize)]
pub struct NewKey {
    pub name: String,
    pub owner: String,
    pub key: String,
}

/// The names of the caller's keys.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeyList {
    pub owner: String,
    pub names: Vec<String>,
}
