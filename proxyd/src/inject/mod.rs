//! The only place where a secret meets a request. It demands the permit of an allowed decision.
//!
//! 1. Every placeholder in the head must be this lease's for this credential ([`stray`]).
//! 2. The credential must be one of the lease's own environment, its own list must hold the
//!    permitted host, and plain HTTP must be allowed for it.
//! 3. What the sandbox put into the slot decides with the credential's `when` whether it goes in.
//! 4. The whole slot is cleared ([`slot`]): a sandbox must not use a key of its own at an allowed
//!    host to carry data to somebody else's account there.
//! 5. The vault renders the value, and it is put in: one file for each kind.
//! 6. No placeholder may be left, since the upstream could not know what it is.
//!
//! The value stands in the head as [`Bytes`] that are wiped when the last copy is dropped.

mod aws;
mod basic;
mod bearer;
mod body;
mod certificate;
pub mod chunks;
mod header;
mod placeholder;
mod query;
mod registry;
pub(crate) mod sigv4;
mod slot;
mod stray;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ipc::id::LeaseId;
use policies::{Backend, Credential, Inject, Permit, Place, Policy, Scheme, SecretRef, When};

use crate::head::RequestHead;
use crate::lease::share::{Exhausted, Share};
use crate::relay::body::BodyIn;
use crate::relay::h1::framing::Framing;
use crate::reply;
use crate::scrub::Patterns;
use crate::vault::{Access, Rendered, Shown, Vault, VaultError};
pub use body::Payload;
pub use stray::percent_decoded;

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
    /// Which token went in, where a refused one can be replaced by another.
    pub token: Option<u64>,
    /// What it is good for, where that is less than every request with the credential.
    pub access: Option<Access>,
    /// What the connection is to be opened with.
    pub shown: Option<Arc<Shown>>,
    /// Whether a signature went in: the key that made it stands nowhere in the request.
    pub signed: bool,
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
    /// What is stored cannot be shown as a certificate.
    #[error("credential {credential:?} cannot open a connection: {reason}")]
    Certificate { credential: String, secret: SecretRef, reason: String },
    /// Whoever gives tokens for the secret refuses; an operator has to set a new one.
    #[error("credential {credential:?} needs a login: {reason}")]
    NeedsLogin { credential: String, secret: String, reason: String },
    /// What the sandbox signed cannot be signed again.
    #[error("the request cannot be signed with credential {credential:?}: {reason}")]
    Unsigned { credential: String, reason: String },
    /// The body has to be looked at as a whole, and is too long for that.
    #[error(
        "the body is longer than {bytes_max} bytes, which is the most that credential \
             {credential:?} lets be held back"
    )]
    TooLong { credential: String, bytes_max: usize },
    /// Too much is held back already.
    #[error("the body would have to be held back: {0}")]
    Busy(#[from] Exhausted),
    /// The client broke its body off.
    #[error("the body broke off: {0}")]
    Body(String),
    #[error(transparent)]
    Vault(VaultError),
}

impl InjectError {
    /// The status of the reply: 403 for what the sandbox did, 502 for what the operator must mend,
    /// 503 when the vault does not answer.
    pub fn status(&self) -> u16 {
        match self {
            Self::Foreign { .. } | Self::Stray { .. } | Self::Refused { .. } => 403,
            Self::Unsigned { .. } => 403,
            Self::TooLong { .. } => 413,
            Self::Body(_) => 400,
            Self::Missing { .. }
            | Self::Value { .. }
            | Self::Certificate { .. }
            | Self::NeedsLogin { .. } => 502,
            Self::Busy(_) | Self::Vault(_) => 503,
        }
    }

    /// A word for programs: the reply's code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Foreign { .. } => "placeholder_foreign",
            Self::Stray { .. } => "placeholder_stray",
            Self::Refused { .. } => "credential_refused",
            Self::Missing { .. } => "credential_missing",
            Self::Value { .. } | Self::Certificate { .. } => "credential_unusable",
            Self::NeedsLogin { .. } => "credential_needs_login",
            Self::Unsigned { .. } => "signature_refused",
            Self::TooLong { .. } => "body_too_long",
            Self::Body(_) => "request_broken",
            Self::Busy(_) => reply::BODIES_BUSY,
            Self::Vault(VaultError::Unavailable(_)) => "secret_unavailable",
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
            Self::NeedsLogin { secret, .. } => Some(match secret.strip_prefix("local:") {
                Some(name) => {
                    format!("an operator logs in and stores it: cleanhands secret set {name}")
                }
                None => {
                    format!("an operator lets proxyd have {secret}: cleanhands secret list")
                }
            }),
            Self::Certificate { secret, .. } => Some(match secret.backend {
                Backend::Local => {
                    format!("an operator stores another: cleanhands secret set {}", secret.path)
                }
                _ => format!("an operator looks after {secret}"),
            }),
            Self::Unsigned { .. } => {
                Some("sign with the keys that this sandbox's environment holds".into())
            }
            Self::Busy(_) => Some(reply::BUSY_HINT.into()),
            Self::Refused { .. }
            | Self::Value { .. }
            | Self::TooLong { .. }
            | Self::Body(_)
            | Self::Vault(_) => None,
        }
    }

    pub fn of_vault(error: VaultError, credential: &Credential) -> Self {
        let name = credential.name.clone();
        match error {
            VaultError::Missing(secret) => Self::Missing { credential: name, secret },
            VaultError::Refused(reason) => Self::Refused { credential: name, reason },
            VaultError::NeedsLogin(reason) => {
                let secret = credential.secret.to_string();
                Self::NeedsLogin { credential: name, secret, reason }
            }
            other => Self::Vault(other),
        }
    }
}

/// Finds what the connection is to be opened with, and puts the credential that the permit names
/// into the request.
pub async fn inject(
    permit: &Permit,
    vault: &Vault,
    context: &LeaseContext,
    head: &mut RequestHead,
    payload: &mut Payload<'_, '_>,
) -> Result<Injected, InjectError> {
    let shown = certificate::shown(permit, vault, context, head).await?;
    let mut injected = inject_value(permit, vault, context, head, payload).await?;
    if let Some(shown) = &shown {
        let put_in = injected.credential.iter().map(|name| format!("{name}, "));
        injected.credential = Some(put_in.chain([shown.credential.clone()]).collect());
    }
    Ok(Injected { shown, ..injected })
}

/// Puts the credential that the permit names into the request, after removing what the sandbox
/// put into that slot. Without a credential it only refuses placeholders.
async fn inject_value(
    permit: &Permit,
    vault: &Vault,
    context: &LeaseContext,
    head: &mut RequestHead,
    payload: &mut Payload<'_, '_>,
) -> Result<Injected, InjectError> {
    let Some(credential) = permit.credential() else {
        refuse_stray_placeholder(head)?;
        return Ok(Injected::default());
    };
    let body = match &credential.inject {
        Inject::Placeholder { places } => places.contains(&Place::Body),
        _ => false,
    };
    let own = match stray::first(head) {
        None if !body => Vec::new(),
        _ => {
            let made = vault.placeholders(&context.lease, credential).await;
            let made = made.map_err(|error| InjectError::of_vault(error, credential))?;
            made.into_iter().map(|(_, placeholder)| placeholder).collect()
        }
    };
    if !own.is_empty()
        && let Some(place) = stray::first_foreign(head, &own)
    {
        return Err(InjectError::Foreign { place });
    }
    check_destination(permit, credential, context, head)?;
    if let Inject::AwsSigV4 { .. } = &credential.inject {
        let access = own_access(credential, context);
        return aws::inject(permit, (vault, access), credential, &own, head, payload).await;
    }
    if leaves_alone(credential, head, &own) {
        refuse_stray_placeholder(head)?;
        return Ok(Injected::default());
    }
    if body {
        payload.hold(&credential.name, head).await?;
        if !stray::only(payload.held(), &own) {
            return Err(InjectError::Foreign { place: "body" });
        }
    }
    slot::clear(&credential.inject, head);
    if let Inject::Placeholder { places } = &credential.inject
        && !own.iter().any(|own| placeholder::stands_in(head, Some(payload.held()), own, places))
    {
        // Nothing asked for the credential: the request goes as it is, without a secret.
        refuse_stray_placeholder(head)?;
        return Ok(Injected::default());
    }
    let access = match &credential.inject {
        Inject::Registry { .. } => {
            Some(Access::Registry(registry::access(credential, permit.port(), head)?))
        }
        _ => own_access(credential, context),
    };
    let rendered = match access.clone() {
        Some(access) => vault.render_access(credential, permit.host(), access).await,
        None => vault.render(credential, permit.host()).await,
    };
    let rendered = rendered.map_err(|error| InjectError::of_vault(error, credential))?;
    put(credential, head, payload, &own, &rendered)?;
    refuse_stray_placeholder(head)?;
    Ok(Injected { access, ..Injected::of(credential, &rendered) })
}

/// Puts another token in the place of one that the upstream refused: the request is as the sandbox
/// sent it, and was judged and found good before.
pub async fn inject_again(
    permit: &Permit,
    vault: &Vault,
    head: &mut RequestHead,
    (refused, access): (u64, Option<Access>),
    room: &Share,
) -> Result<Injected, InjectError> {
    let Some(credential) = permit.credential() else { return Ok(Injected::default()) };
    let rendered = vault
        .render_again(credential, permit.host(), access.clone(), refused)
        .await
        .map_err(|error| InjectError::of_vault(error, credential))?;
    slot::clear(&credential.inject, head);
    let (mut body, mut framing) = (BodyIn::Empty, Framing::None);
    // A request that can be sent again has no body: nothing is held back, and nothing waits.
    let (body, framing, idle) = (&mut body, &mut framing, Duration::ZERO);
    let mut payload = Payload { body, framing, responder: None, room, idle };
    put(credential, head, &mut payload, &[], &rendered)?;
    refuse_stray_placeholder(head)?;
    Ok(Injected { access, ..Injected::of(credential, &rendered) })
}

impl Injected {
    fn of(credential: &Credential, rendered: &Rendered) -> Self {
        // A placeholder's places are found by the placeholder, which is gone by then, and so is
        // what the sandbox had signed.
        let once =
            matches!(credential.inject, Inject::Placeholder { .. } | Inject::AwsSigV4 { .. });
        let again = credential.is_replaceable() && !once;
        Self {
            credential: Some(credential.name.clone()),
            patterns: Some(rendered.patterns.clone()),
            token: again.then_some(rendered.serial),
            access: None,
            shown: None,
            signed: false,
        }
    }
}

/// Whose it is, where a server makes one for each lease.
fn own_access(credential: &Credential, context: &LeaseContext) -> Option<Access> {
    let own = credential.secret.backend == Backend::OpenBaoLease;
    own.then(|| Access::Lease(context.lease.clone()))
}

/// Whether the credential stays out of this request, for what the sandbox itself put in its slot.
fn leaves_alone(credential: &Credential, head: &RequestHead, own: &[String]) -> bool {
    let found = || slot::found(&credential.inject, head, own);
    match credential.when {
        When::Always => false,
        When::Absent => found() == slot::Found::Key,
        When::Placeholder => found() != slot::Found::Placeholder,
    }
}

fn put(
    credential: &Credential,
    head: &mut RequestHead,
    payload: &mut Payload<'_, '_>,
    own: &[String],
    rendered: &Arc<Rendered>,
) -> Result<(), InjectError> {
    let unusable = |reason| InjectError::Value { credential: credential.name.clone(), reason };
    match &credential.inject {
        Inject::Bearer | Inject::Registry { .. } => bearer::put(head, whole(rendered)),
        Inject::Basic { .. } => basic::put(head, whole(rendered)),
        Inject::Header { name, .. } => header::put(head, name, whole(rendered)),
        Inject::Query { name } => query::put(head, name, rendered.value.expose_secret()),
        Inject::Placeholder { places } => {
            let value = rendered.value.expose_secret();
            for own in own {
                placeholder::replace(head, own, value, places).map_err(unusable)?;
                if places.contains(&Place::Body) {
                    let kind = head.headers.first("content-type").map(|kind| &kind[..]);
                    let most = placeholder::in_body_max(payload.held(), own, value);
                    let room = payload.room_for(&credential.name, most)?;
                    let body = placeholder::in_body(payload.held(), kind, own, value);
                    if let Some(body) = body.map_err(unusable)? {
                        payload.replace(head, body, room);
                    }
                }
            }
        }
        // Signed in `aws`, by what the request says of itself.
        Inject::AwsSigV4 { .. } => {}
        // Shown when the connection is opened.
        Inject::ClientCertificate => {}
    }
    Ok(())
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
