//! The only place where a secret meets a request. It demands the permit of an allowed decision.
//!
//! 1. Every placeholder in the head must be this lease's for this credential ([`stray`]).
//! 2. The credential must be one of the lease's own environment, its own list must hold the
//!    permitted host, and plain HTTP must be allowed for it.
//! 3. The whole slot is cleared ([`slot`]): a sandbox must not use a key of its own at an allowed
//!    host to carry data to somebody else's account there.
//! 4. The vault renders the value, and it is put in: one file for each kind.
//! 5. No placeholder may be left, since the upstream could not know what it is.
//!
//! The value stands in the head as [`Bytes`] that are wiped when the last copy is dropped.

mod basic;
mod bearer;
mod header;
mod placeholder;
mod slot;
mod stray;

use std::sync::Arc;

use bytes::Bytes;
use ipc::id::LeaseId;
use policies::{Credential, Inject, Permit, Policy, Scheme};

use crate::head::RequestHead;
use crate::scrub::Patterns;
use crate::vault::{Rendered, Secret, Vault, VaultError};

/// On whose behalf a request is made.
pub struct LeaseContext {
    pub lease: LeaseId,
    pub environment: String,
    pub policy: Arc<Policy>,
}

/// What was put into the request.
#[derive(Default)]
pub struct Injected {
    /// Name of the credential, for the audit.
    pub credential: Option<String>,
    /// What to search the answer for; none when nothing was injected.
    pub patterns: Option<Patterns>,
}

/// Why a request does not leave.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InjectError {
    /// The vault has no value for the credential.
    #[error("credential {credential:?} has no value: secret {secret:?} is not in the vault")]
    Missing { credential: String, secret: String },
    /// A placeholder of another lease or credential.
    #[error(
        "the request carries a placeholder in its {place} that was made for another sandbox or \
         another credential"
    )]
    Foreign { place: &'static str },
    /// A placeholder where nothing replaces it.
    #[error("the request carries a placeholder in its {place}, where no credential is put")]
    Stray { place: &'static str },
    /// The credential's own list, or its rule on plain HTTP, refuses.
    #[error("credential {credential:?} may not go into this request: {reason}")]
    Refused { credential: String, reason: String },
    /// The value cannot stand in its place.
    #[error("credential {credential:?} cannot be put into the request: {reason}")]
    Value { credential: String, reason: &'static str },
    #[error(transparent)]
    Vault(VaultError),
}

impl InjectError {
    /// The status of the reply: 403 for what the sandbox did, 502 for what the operator must mend,
    /// 503 when the vault does not answer.
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
            Self::Foreign { .. } => {
                Some("use the value that this sandbox's environment holds now".into())
            }
            Self::Stray { .. } => Some(
                "a placeholder works only at the hosts and in the places that its credential names"
                    .into(),
            ),
            Self::Refused { .. } | Self::Value { .. } | Self::Vault(_) => None,
        }
    }

    fn of_vault(error: VaultError, credential: &Credential) -> Self {
        let name = credential.name.clone();
        match error {
            VaultError::Missing(secret) => Self::Missing { credential: name, secret },
            VaultError::Refused(reason) => Self::Refused { credential: name, reason },
            other => Self::Vault(other),
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
    let Some(credential) = permit.credential() else {
        refuse_stray_placeholder(head)?;
        return Ok(Injected::default());
    };
    let own = match stray::first(head) {
        None => None,
        Some(_) => Some(
            vault
                .placeholder(&context.lease, credential)
                .await
                .map_err(|error| InjectError::of_vault(error, credential))?,
        ),
    };
    if let Some(place) = own.as_ref().and_then(|own| stray::first_foreign(head, own)) {
        return Err(InjectError::Foreign { place });
    }
    check_destination(permit, credential, context, head)?;
    slot::clear(&credential.inject, head);
    if let Inject::Placeholder { places } = &credential.inject
        && !own.as_ref().is_some_and(|own| placeholder::stands_in(head, own, places))
    {
        // Nothing asked for the credential: the request goes as it is, without a secret.
        refuse_stray_placeholder(head)?;
        return Ok(Injected::default());
    }
    let rendered = vault
        .render(credential, permit.host())
        .await
        .map_err(|error| InjectError::of_vault(error, credential))?;
    match &credential.inject {
        Inject::Bearer => bearer::put(head, whole(&rendered)),
        Inject::Basic { .. } => basic::put(head, whole(&rendered)),
        Inject::Header { name, .. } => header::put(head, name, whole(&rendered)),
        Inject::Placeholder { places } => {
            let own = own.as_deref().unwrap_or_default();
            placeholder::replace(head, own, rendered.value.expose_secret(), places).map_err(
                |reason| InjectError::Value { credential: credential.name.clone(), reason },
            )?;
        }
    }
    refuse_stray_placeholder(head)?;
    Ok(Injected {
        credential: Some(credential.name.clone()),
        patterns: Some(rendered.patterns.clone()),
    })
}

/// Refuses a request that carries a placeholder anywhere in its head.
pub fn refuse_stray_placeholder(head: &RequestHead) -> Result<(), InjectError> {
    match stray::first(head) {
        None => Ok(()),
        Some(place) => Err(InjectError::Stray { place }),
    }
}

/// The second and independent check, after the decision: by the credential's own words.
fn check_destination(
    permit: &Permit,
    credential: &Arc<Credential>,
    context: &LeaseContext,
    head: &RequestHead,
) -> Result<(), InjectError> {
    let refused =
        |reason: String| Err(InjectError::Refused { credential: credential.name.clone(), reason });
    // A permit of another environment, or of an older generation of this one, proves nothing here.
    let own = context.policy.credentials.get(&credential.name);
    if !own.is_some_and(|own| Arc::ptr_eq(own, credential)) {
        return refused(format!("environment {:?} does not define it", context.environment));
    }
    if !credential.may_go_to(permit.host()) {
        return refused(format!("its own list does not name {}", permit.host()));
    }
    if head.scheme == Scheme::Http && !credential.allow_plaintext {
        return refused("it goes over TLS only".into());
    }
    Ok(())
}

/// The rendered value without a copy: it is wiped when the last head and the vault's own memory
/// let it go.
fn whole(rendered: &Arc<Rendered>) -> Bytes {
    struct Owner(Arc<Rendered>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            self.0.value.expose_secret()
        }
    }
    Bytes::from_owner(Owner(rendered.clone()))
}

/// Text with a secret in it, wiped when the last copy is dropped.
fn wiped(secret: Secret) -> Bytes {
    struct Owner(Secret);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            self.0.expose_secret()
        }
    }
    Bytes::from_owner(Owner(secret))
}

#[cfg(test)]
fn head(target: &str, headers: &[(&str, &str)]) -> RequestHead {
    RequestHead {
        method: Bytes::from_static(b"GET"),
        target: Bytes::copy_from_slice(target.as_bytes()),
        scheme: Scheme::Https,
        authority: "api.example".into(),
        headers: headers
            .iter()
            .map(|(n, v)| {
                (Bytes::copy_from_slice(n.as_bytes()), Bytes::copy_from_slice(v.as_bytes()))
            })
            .collect(),
    }
}

#[cfg(test)]
fn lines(head: &RequestHead) -> Vec<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    std::iter::once(text(&head.target))
        .chain(head.headers.iter().map(|(n, v)| format!("{}: {}", text(n), text(v))))
        .collect()
}

#[cfg(test)]
mod tests;
