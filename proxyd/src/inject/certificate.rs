//! The certificate that a rule's connections are opened with: nothing of it stands in a request.

use std::sync::Arc;

use policies::{Credential, Permit};

use super::{InjectError, LeaseContext, check_destination};
use crate::head::RequestHead;
use crate::vault::{Shown, Vault, VaultError};

/// What to open the request's connection with, after the same checks as for what is put in.
pub(super) async fn shown(
    permit: &Permit,
    vault: &Vault,
    context: &LeaseContext,
    head: &RequestHead,
) -> Result<Option<Arc<Shown>>, InjectError> {
    let Some(credential) = permit.certificate() else { return Ok(None) };
    check_destination(permit, credential, context, head)?;
    let shown = vault.shown(credential, permit.host()).await;
    let shown = shown.map_err(|error| unusable(error, credential))?;
    Ok(Some(Arc::new(shown)))
}

fn unusable(error: VaultError, credential: &Credential) -> InjectError {
    match error {
        VaultError::Invalid(reason) => InjectError::Certificate {
            credential: credential.name.clone(),
            secret: credential.secret.clone(),
            reason,
        },
        other => InjectError::of_vault(other, credential),
    }
}
