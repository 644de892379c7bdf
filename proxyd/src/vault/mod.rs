//! The traffic process's side of the vault: asks the vault child, holds nothing itself.
//!
//! The child ([`child`]) is a process of its own that holds keys and values; this side knows names
//! and gets, for one permitted request, one rendered credential with the patterns to search answers
//! for. Both are wiped when the last exchange that uses them ends.

pub mod child;
pub mod key;
pub mod secret;

use std::path::Path;
use std::sync::Arc;

use ipc::daemon::SelfExec;
use ipc::id::LeaseId;
use ipc::vault::SecretInfo;
use policies::{Credential, Host};

pub use key::KeySource;
pub use secret::Secret;

use crate::scrub::Patterns;

/// Why the vault did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum VaultError {
    /// The child ended. Nothing that needs a credential leaves any more; proxyd ends itself.
    #[error("the vault process has ended")]
    Gone,
    /// No such secret in the vault.
    #[error("no secret {0:?} in the vault")]
    Missing(String),
    /// The child's own check refused; names only.
    #[error("the vault refused: {0}")]
    Refused(String),
    /// A name or value that the vault does not take.
    #[error("{0}")]
    Invalid(String),
    /// The child could not start or its store failed.
    #[error("the vault failed: {0}")]
    Failed(String),
    /// The configuration names a key that cannot be used. proxyd ends with status 78.
    #[error("{0}")]
    Key(String),
}

/// What the child said when it had opened its store.
#[derive(Clone, Debug)]
pub struct VaultFacts {
    pub pid: u32,
    /// `systemd-credential`, `passphrase`, `key-file`.
    pub key_source: String,
    /// SHA-256 of the certificate that issues, hex.
    pub ca_sha256: String,
    /// What is weaker here than in the best case, in words.
    pub notes: Vec<String>,
}

/// One credential rendered for one host: the value to put into the slot, and what to search
/// answers for. Wiped on drop.
pub struct Rendered {
    /// The whole header value, or the bare value for a placeholder's place.
    pub value: Secret,
    pub patterns: Patterns,
}

/// The way to the vault child. Clones share one connection.
#[derive(Clone)]
pub struct Vault {
    inner: Arc<()>,
}

impl Vault {
    /// Starts the child and waits until it has opened the vault below `state` (proxyd's own state
    /// directory). Blocking; call before the runtime starts.
    pub fn start(
        exec: &SelfExec,
        state: &Path,
        key: &KeySource,
    ) -> Result<(Vault, VaultFacts), VaultError> {
        let _ = (exec, state, key);
        todo!()
    }

    /// Starts the task that carries messages. Call once, inside the runtime, before any other call.
    pub fn attach(&self) -> Result<(), VaultError> {
        todo!()
    }

    /// Resolves when the child has ended: proxyd must then end too, with a failure, so that its
    /// supervisor starts both again.
    pub async fn gone(&self) {
        todo!()
    }

    /// The CA certificates, PEM: the issuing one first.
    pub fn ca_pem(&self) -> &str {
        let _ = &self.inner;
        todo!()
    }

    /// What a lease's sandbox sees in place of the credential. Needs no stored secret.
    pub async fn placeholder(
        &self,
        lease: &LeaseId,
        credential: &Credential,
    ) -> Result<String, VaultError> {
        let _ = (lease, credential);
        todo!()
    }

    /// Renders `credential` for a request of `lease` to `host`.
    pub async fn render(
        &self,
        lease: &LeaseId,
        credential: &Arc<Credential>,
        host: &Host,
    ) -> Result<Arc<Rendered>, VaultError> {
        let _ = (lease, credential, host);
        todo!()
    }

    /// Stores a value under `name`, as the next version.
    pub async fn put(&self, name: &str, value: Secret) -> Result<SecretInfo, VaultError> {
        let _ = (name, value);
        todo!()
    }

    pub async fn list(&self) -> Result<Vec<SecretInfo>, VaultError> {
        todo!()
    }

    /// Removes every version; [`VaultError::Missing`] when there is none.
    pub async fn remove(&self, name: &str) -> Result<(), VaultError> {
        let _ = name;
        todo!()
    }

    /// What to search texts for, for these credentials. A credential without a secret adds nothing.
    pub async fn patterns(&self, credentials: &[Arc<Credential>]) -> Result<Patterns, VaultError> {
        let _ = credentials;
        todo!()
    }

    /// Has the child issue a leaf certificate for `host` over the public key `spki` (DER), valid
    /// for at most `life_seconds`. Returns DER.
    pub async fn issue_leaf(
        &self,
        host: &Host,
        spki: &[u8],
        life_seconds: u64,
    ) -> Result<Vec<u8>, VaultError> {
        let _ = (host, spki, life_seconds);
        todo!()
    }
}
