//! What may be asked of the vault: what the policy files say, read here once more.
//!
//! The traffic process names an environment and a credential. Which secret that is, in which form
//! it goes where, and which server gives tokens for it, the vault reads in the files itself. So a
//! traffic process under foreign control can have rendered what policies define, for the hosts
//! they list, and nothing else: no refresh token, no signing key, no other form.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use policies::{Backend, Credential, PolicySet};
use sha2::{Digest, Sha256};

use super::VaultError;

type Seen = BTreeMap<PathBuf, (u64, i64, i64, u64)>;

/// The policies as they were when last looked at.
pub(super) struct Known {
    dir: PathBuf,
    seen: Seen,
    set: PolicySet,
}

impl Known {
    pub fn open(dir: &Path) -> Result<Self, VaultError> {
        let seen = look(dir);
        let set = PolicySet::load(dir).map_err(|found| {
            let first = found.first().map(ToString::to_string).unwrap_or_default();
            VaultError::Failed(format!("the vault cannot read the policies: {first}"))
        })?;
        Ok(Self { dir: dir.to_owned(), seen, set })
    }

    /// The credential of that environment, if the files define it as the asker knows it. A file
    /// that has changed is read again; one with a mistake leaves the former policies in force.
    pub fn find(
        &mut self,
        environment: &str,
        name: &str,
        print: &str,
    ) -> Result<Arc<Credential>, VaultError> {
        if let Some(found) = self.defined(environment, name, print) {
            return Ok(found);
        }
        let seen = look(&self.dir);
        if seen != self.seen {
            if let Ok(set) = PolicySet::load(&self.dir) {
                self.set = set;
            }
            self.seen = seen;
        }
        self.defined(environment, name, print).ok_or_else(|| {
            VaultError::Refused(format!(
                "the policy of environment {environment:?} does not define credential {name:?} so"
            ))
        })
    }

    fn defined(&self, environment: &str, name: &str, print: &str) -> Option<Arc<Credential>> {
        #[cfg(test)]
        if let Some(found) = super::tests::registered(environment, name, print) {
            return Some(found);
        }
        let credential = self.set.environment(environment)?.credentials.get(name)?;
        (self::print(credential) == print).then(|| Arc::clone(credential))
    }

    /// Whether any policy has a use for the secret.
    pub fn names(&self, secret: &str) -> bool {
        let uses = |credential: &Arc<Credential>| {
            let client = credential.grant.as_ref().and_then(|grant| grant.client.as_ref());
            (credential.secret.backend == Backend::Local && credential.secret.path == secret)
                || client.is_some_and(|client| client.secret.as_deref() == Some(secret))
        };
        let environments = self.set.names().filter_map(|name| self.set.environment(name));
        environments.into_iter().any(|policy| policy.credentials.values().any(uses))
    }
}

/// Tells definitions apart: two that differ in anything have different ones.
pub(super) fn print(credential: &Credential) -> String {
    hex::encode(Sha256::digest(format!("{credential:?}")))
}

fn look(dir: &Path) -> Seen {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    entries
        .filter_map(|entry| {
            let meta = std::fs::metadata(entry.path()).ok()?;
            let changed = (meta.ino(), meta.ctime(), meta.ctime_nsec(), meta.len());
            Some((entry.path(), changed))
        })
        .collect()
}
