//! The API of OpenBao and Vault for what a server makes for one asker and takes back: a secret
//! with a lease. Had, let live on, revoked.

use policies::Made;
use serde_json::{Map, Value, json};

use super::{Ask, Meaning, Remote, asked_wrongly, checked, openbao};
use crate::vault::VaultError;
use crate::vault::mint::{Life, seconds};
use crate::vault::secret::Secret;

/// Longest name of a lease that is kept: mount, path, and what the server adds.
const ID_BYTES_MAX: usize = 2048;

/// What a server says of a lease.
pub(in crate::vault) struct Lease {
    /// None where the server keeps no account of it.
    pub id: Option<String>,
    pub renewable: bool,
    pub life: Life,
    /// All fields, as JSON; not where only the life was asked for.
    pub fields: Option<Secret>,
}

/// What the answer means.
pub(in crate::vault) enum Answered {
    Lease(Lease),
    /// There is no such lease any more.
    Ended,
    /// What any other answer means.
    Other(Meaning),
}

impl Remote {
    /// The question for a new one. `place` is what a policy says before the fields.
    pub fn make(&self, place: &str, token: &Secret) -> Result<Ask, VaultError> {
        let text = format!("{place}#field");
        let made = Made::parse(&text).ok_or_else(asked_wrongly)?;
        let server = self.server()?;
        if made.parameters.is_empty() {
            return Ok(openbao::ask(server, "GET", made.path, Some(token), None));
        }
        let pairs = made.parameters.iter();
        let given: Map<String, Value> =
            pairs.map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        Ok(openbao::ask(server, "POST", made.path, Some(token), Some(&Value::Object(given))))
    }

    /// The question that lets a lease live on.
    pub fn prolong(&self, id: &str, token: &Secret) -> Result<Ask, VaultError> {
        let body = json!({ "lease_id": id });
        Ok(openbao::ask(self.server()?, "POST", "sys/leases/renew", Some(token), Some(&body)))
    }

    /// The question that ends it.
    pub fn revoke(&self, id: &str, token: &Secret) -> Result<Ask, VaultError> {
        // What it was made for is gone when the answer comes.
        let body = json!({ "lease_id": id, "sync": true });
        Ok(openbao::ask(self.server()?, "POST", "sys/leases/revoke", Some(token), Some(&body)))
    }

    /// What the answer to the first two means.
    pub fn leased(&self, renewal: bool, status: u16, body: &[u8]) -> Answered {
        if renewal && matches!(status, 400 | 404) {
            return Answered::Ended;
        }
        let what = if renewal { "renewal of a lease" } else { "request for a lease" };
        if let Some(refusal) = openbao::refused(what, status) {
            return Answered::Other(refusal);
        }
        let unsound = || {
            let text = format!("the server's answer to a {what} is none that it should give");
            Answered::Other(Meaning::Later(text))
        };
        let Ok(mut answer) = serde_json::from_slice::<Value>(body) else { return unsound() };
        let Some(left) = answer["lease_duration"].as_u64() else { return unsound() };
        let id = answer["lease_id"].as_str().filter(|id| !id.is_empty()).map(str::to_owned);
        if id.as_ref().is_some_and(|id| id.len() > ID_BYTES_MAX) {
            return unsound();
        }
        let renewable = answer["renewable"].as_bool() == Some(true) && id.is_some();
        let life = match (left, self.server()) {
            (0, Ok(server)) => Life::Fresh(server.freshness.refresh, server.freshness.stale),
            _ => Life::Until(seconds(left)),
        };
        let fields = match answer["data"].take() {
            _ if renewal => None,
            Value::Object(fields) => {
                let text = serde_json::to_vec(&fields).map(Secret::new);
                Some(text.expect("what came as JSON can go as JSON"))
            }
            _ => return unsound(),
        };
        Answered::Lease(Lease { id, renewable, life, fields })
    }
}

/// What a credential makes of the fields: those that it names, with colons between them.
pub(in crate::vault) fn value(fields: &Secret, named: &[String]) -> Result<Secret, VaultError> {
    let parsed: Value = serde_json::from_slice(fields.expose_secret()).unwrap_or_default();
    let mut texts = Vec::new();
    for name in named {
        let text = parsed[name].as_str().ok_or_else(|| {
            VaultError::Refused(format!("what the server makes has no text {name:?} in it"))
        })?;
        texts.extend([b":", text.as_bytes()]);
    }
    checked(Secret::concat(texts.get(1..).unwrap_or_default()).expose_secret())
        .map_err(VaultError::Refused)
}

/// Every text among the fields.
pub(in crate::vault) fn texts(fields: &Secret) -> Vec<Secret> {
    let parsed: Value = serde_json::from_slice(fields.expose_secret()).unwrap_or_default();
    let parsed = parsed.as_object().into_iter().flat_map(Map::values);
    parsed.filter_map(Value::as_str).map(|text| Secret::concat(&[text.as_bytes()])).collect()
}
