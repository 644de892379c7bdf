//! AWS: which requests are signed again, and with what. How is [`super::sigv4`]'s part.

use std::sync::Arc;

use policies::{Credential, Inject, Permit, When};

use super::body::Payload;
use super::sigv4::{self, Asked, Content, Key};
use super::{InjectError, Injected, refuse_stray_placeholder, slot};
use crate::head::RequestHead;
use crate::vault::{Access, Scope, Vault};

/// Signs the request again, if it is signed with the lease's own placeholder. One that is not is
/// refused, or goes as it is where the credential's `when` says so.
pub(super) async fn inject(
    permit: &Permit,
    (vault, access): (&Vault, Option<Access>),
    credential: &Arc<Credential>,
    own: &[String],
    head: &mut RequestHead,
    payload: &mut Payload<'_, '_>,
) -> Result<Injected, InjectError> {
    let refused =
        |reason: String| InjectError::Unsigned { credential: credential.name.clone(), reason };
    let now = jiff::Timestamp::now();
    let asked = sigv4::read(head, now).map_err(|reason| refused(reason.to_owned()))?;
    let ours = asked.filter(|asked| own.contains(&asked.key_id));
    let Some(asked) = ours else {
        if credential.when == When::Always {
            return Err(refused("it is not signed with the keys of this sandbox".to_owned()));
        }
        refuse_stray_placeholder(head)?;
        return Ok(Injected::default());
    };
    check_scope(credential, &asked).map_err(refused)?;
    match sigv4::content(head, &asked).map_err(|reason| refused(reason.to_owned()))? {
        Content::Held => payload.hold(&credential.name, head).await?,
        Content::AsItIs | Content::Chunked => {}
    }
    let date = sigv4::stamp(now)[..8].to_owned();
    let (region, service) = (asked.region.clone(), asked.service.clone());
    let scope = Scope { date, region, service };
    let rendered = vault
        .render_for(credential, permit.host(), scope, access)
        .await
        .map_err(|error| InjectError::of_vault(error, credential))?;
    let [id, session] = &rendered.more[..] else {
        return Err(refused("the vault gave no key".to_owned()));
    };
    slot::clear(&credential.inject, head);
    let key = Key {
        signing: rendered.value.expose_secret(),
        id: id.expose_secret(),
        session: session.expose_secret(),
    };
    if let Some(signer) = sigv4::sign(head, &asked, &key, Some(payload.held()), now) {
        payload.sign(signer)?;
    }
    refuse_stray_placeholder(head)?;
    Ok(Injected {
        credential: Some(credential.name.clone()),
        patterns: Some(rendered.patterns.clone()),
        token: None,
        access: None,
        shown: None,
        signed: true,
    })
}

fn check_scope(credential: &Credential, asked: &Asked) -> Result<(), String> {
    let Inject::AwsSigV4 { regions, services } = &credential.inject else { return Ok(()) };
    for (what, named, allowed) in
        [("region", &asked.region, regions), ("service", &asked.service, services)]
    {
        if !allowed.contains(named) {
            let allowed = allowed.join(", ");
            return Err(format!("it is for {what} {named:?}; the credential is for {allowed}"));
        }
    }
    Ok(())
}
