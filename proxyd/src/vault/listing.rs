//! The list of secrets: their names, where they are kept, and how long what is had for them serves.

use std::collections::BTreeMap;

use ipc::vault::SecretInfo;
use policies::Backend;

use super::VaultError;
use super::child::{Child, now};
use super::store::rfc3339;

impl Child {
    /// The secrets of the store, then those that others keep as far as policies name them or
    /// something of them is had; not those that are refused.
    pub(super) fn listed(&mut self) -> Result<Vec<SecretInfo>, VaultError> {
        let mut secrets = self.stored()?;
        let mut elsewhere = BTreeMap::new();
        for secret in self.known.elsewhere() {
            let name = match secret.backend {
                // All its fields are had at once.
                Backend::OpenBaoLease => secret.to_string().split('#').next().map(str::to_owned),
                _ => None,
            };
            let name = name.unwrap_or_else(|| secret.to_string());
            let state = match secret.backend {
                Backend::File if self.files.values(&secret.path).is_ok() => "ready",
                Backend::File => "unavailable",
                _ => "unasked",
            };
            elsewhere.insert(name.clone(), row(name, state, None));
        }
        for (name, left) in self.mints.elsewhere() {
            let left = left.map(|left| i64::try_from(left.as_secs()).unwrap_or(i64::MAX));
            let end = left.map(|left| rfc3339(now().saturating_add(left)));
            elsewhere.insert(name.clone(), row(name, "ready", end));
        }
        for refused in self.mints.refused() {
            elsewhere.remove(&refused.name);
        }
        secrets.extend(elsewhere.into_values());
        Ok(secrets)
    }
}

fn row(name: String, state: &str, expires_at: Option<String>) -> SecretInfo {
    SecretInfo {
        kept: place(&name).to_owned(),
        name,
        version: 0,
        created_at: String::new(),
        last_used_at: None,
        expires_at,
        state: state.to_owned(),
    }
}

/// Where a secret is kept that is not the store's, by the name that a list has for it.
pub(super) fn place(name: &str) -> &'static str {
    match name.split([':', ' ']).next() {
        Some("local") => "vault",
        Some("file") => "file",
        Some("exec") => "exec",
        Some("openbao" | "openbao-lease" | "[openbao]") => "openbao",
        _ => "aws",
    }
}
