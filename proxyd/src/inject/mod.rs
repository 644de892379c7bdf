//! The only place where a secret meets a request.

use std::sync::Arc;

use ipc::id::LeaseId;
use policies::{Permit, Policy};

use crate::head::RequestHead;
use crate::scrub::Patterns;
use crate::vault::{Vault, VaultError};

/// On whose behalf a request is made.
pub struct LeaseContext {
    pub lease: LeaseId,
    pub environment: String,
    pub policy: Arc<Policy>,
}

/// What was put into the request.
pub struct Injected {
    /// Name of the credential, for the audit.
    pub credential: Option<String>,
    /// What to search the answer for; none when nothing was injected.
    pub patterns: Option<Patterns>,
}

/// Why a request does not leave.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The vault has no value for the credential.
    #[error("credential {credential:?} has no value: secret {secret:?} is not in the vault")]
    Missing { credential: String, secret: String },
    /// A placeholder of another lease or credential.
    #[error("the request carries a placeholder in its {place} that is not this lease's for this host")]
    Foreign { place: &'static str },
    /// A placeholder where nothing replaces it.
    #[error("the request carries a placeholder in its {place}, where no credential is put")]
    Stray { place: &'static str },
    /// The credential's own list, or its rule on plain HTTP, refuses.
    #[error("credential {credential:?} may not go to this request: {reason}")]
    Refused { credential: String, reason: String },
    /// The value cannot stand in its place.
    #[error("credential {credential:?} cannot be put into the request: {reason}")]
    Value { credential: String, reason: &'static str },
    #[error(transparent)]
    Vault(VaultError),
}

impl InjectError {
    /// The status of the reply: 403 for what the sandbox did, 502 for what the operator must mend,
    /// 503 when the vault is gone.
    pub fn status(&self) -> u16 {
        match self {
            Self::Foreign { .. } | Self::Stray { .. } | Self::Refused { .. } => 403,
            Self::Missing { .. } | Self::Value { .. } => 502,
            Self::Vault(_) => 503,
        }
    }

    /// A word for programs: the reply's code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Foreign { .. } => "placeholder_foreign",
            Self::Stray { .. } => "placeholder_stray",
            Self::Refused { .. } => "credential_refused",
            Self::Missing { .. } => "credential_missing",
            Self::Value { .. } => "credential_unusable",
            Self::Vault(_) => "vault_unavailable",
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Missing { secret, .. } => {
                Some(format!("an operator stores it with: cleanhands secret set {secret}"))
            }
            _ => None,
        }
    }
}

/// Puts the credential that the permit names into the request, after removing what the sandbox
/// put into that slot. Without a credential it only refuses placeholders.
pub async fn inject(
    permit: &Permit,
    vault: &Vault,
    context: &LeaseContext,
    head: &mut RequestHead,
) -> Result<Injected, InjectError> {
    let _ = (permit, vault, context, head);
    todo!()
}

/// Refuses a request that carries a placeholder anywhere in its head.
pub fn refuse_stray_placeholder(head: &RequestHead) -> Result<(), InjectError> {
    let _ = head;
    todo!()
}
