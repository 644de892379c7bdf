//! Replaces the certificate authority without anybody noticing.
//!
//! A lease is served with certificates of the one authority that its clients were told to trust
//! when it began, for as long as it lasts, over restarts of proxyd too: what runs inside has read
//! its list of roots long ago. Leases that begin after a rotation have the new one. A former one is
//! retired, and its key wiped, when the last lease of its own has ended.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ipc::peer::Principal;
use ipc::vault::CertificateAuthority;

use crate::Daemon;
use crate::audit::{AuditError, Line};
use crate::tls::authority::Public;
use crate::vault::VaultError;

/// How often it is looked whether the next one is due.
const LOOK: Duration = Duration::from_secs(3600);
/// Between two looks, however many leases end.
const PAUSE: Duration = Duration::from_secs(1);

/// Held while the authorities are looked at: the vault takes what it is told for complete.
#[derive(Default)]
pub struct Rotation(tokio::sync::Mutex<()>);

/// Why nothing was rotated, or nobody may have learnt that it was.
#[derive(Debug, thiserror::Error)]
pub enum RotationError {
    #[error("{0}")]
    Vault(#[from] VaultError),
    #[error("{0}")]
    Audit(#[from] AuditError),
}

/// Makes the next authority when that is due, and retires former ones that nobody uses any more,
/// for as long as the daemon runs.
pub async fn keep(daemon: Arc<Daemon>) {
    loop {
        if let Err(error) = look(&daemon, None).await {
            tracing::warn!(%error, "certificate authorities are not looked after");
        }
        let ended = async {
            daemon.leases.forgotten().await;
            while daemon.vault.authorities().len() == 1 {
                daemon.leases.forgotten().await;
            }
        };
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = ended => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Makes the next authority at somebody's word.
pub async fn rotate(daemon: &Daemon, by: Principal) -> Result<(), RotationError> {
    look(daemon, Some(by)).await?;
    // The former one too, where nobody uses it.
    look(daemon, None).await
}

async fn look(daemon: &Daemon, wanted: Option<Principal>) -> Result<(), RotationError> {
    let _alone = daemon.rotation.0.lock().await;
    let before = daemon.vault.authorities();
    let used = match daemon.leases.authorities() {
        Some(used) => used.into_keys().collect(),
        // Nothing is retired while a lease is taken in.
        None => {
            daemon.leases.look_again();
            before.iter().map(|authority| authority.id).collect()
        }
    };
    let after = daemon.vault.tend_authorities(wanted.is_some(), used).await?;
    let ids: BTreeSet<_> = after.iter().map(|authority| authority.id).collect();
    daemon.leaves.keep_only(|id| ids.contains(&id));
    for made in after.iter().filter(|authority| !before.contains(authority)) {
        let by = wanted.map_or_else(|| "as due".to_owned(), |peer| format!("by {peer}"));
        note(daemon, format!("certificate authority {} made {by}", made.sha256)).await?;
    }
    for gone in before.iter().filter(|authority| !ids.contains(&authority.id)) {
        note(daemon, format!("certificate authority {} retired", gone.sha256)).await?;
    }
    Ok(())
}

async fn note(daemon: &Daemon, reason: String) -> Result<(), AuditError> {
    tracing::info!("{reason}");
    let generation = daemon.policies.current().number;
    let line = Line { reason: Some(reason), generation, ..Line::default() };
    daemon.audit.note(&line).await.map(drop)
}

/// The authorities as operators see them, the issuing one first.
pub fn list(daemon: &Daemon) -> Vec<CertificateAuthority> {
    let leases = daemon.leases.authorities().unwrap_or_default();
    let shown = |(at, authority): (usize, &Public)| CertificateAuthority {
        sha256: authority.sha256.clone(),
        valid_from: rfc3339(authority.not_before),
        valid_until: rfc3339(authority.not_after),
        issues: at == 0,
        leases: leases.get(&authority.id).copied().unwrap_or_default(),
    };
    daemon.vault.authorities().iter().enumerate().map(shown).collect()
}

fn rfc3339(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|s| jiff::Timestamp::from_second(s).ok());
    time.unwrap_or_default().to_string()
}
