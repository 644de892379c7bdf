//! Leaf certificates for intercepted hosts: bounded, single flight, renewed ahead of expiry.
//!
//! This process has one key pair for all leaves; the vault child issues the certificates. Each
//! (host, protocols) has one server configuration with session tickets of its own, so a ticket
//! never resumes under another name.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use policies::Host;
use rcgen::{KeyPair, PublicKeyData};
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use crate::vault::{Vault, VaultError};

/// Life of a leaf certificate.
const LEAF_LIFE_SECONDS: u64 = 7 * 24 * 3600;
/// Most hosts kept, at some 10 KiB each: a sandbox that walks through names must not fill memory.
const HOSTS_MAX: usize = 1024;
/// Most protocol lists kept for a host; there are two in practice.
const PROTOCOLS_MAX: usize = 4;

/// Why a host cannot be intercepted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LeafError {
    #[error("cannot issue a certificate for {host}: {source}")]
    Issue { host: String, source: VaultError },
    #[error("cannot use the certificate issued for {host}: {reason}")]
    Unusable { host: String, reason: String },
    #[error("cannot make the key of the leaf certificates: {0}")]
    Key(String),
}

/// Issues and keeps leaf certificates. Clones share one cache.
#[derive(Clone)]
pub struct Leaves(Arc<Shared>);

struct Shared {
    vault: Vault,
    provider: Arc<CryptoProvider>,
    key: Arc<dyn rustls::sign::SigningKey>,
    spki: Vec<u8>,
    life: Duration,
    hosts: Mutex<Hosts>,
}

#[derive(Default)]
struct Hosts {
    slots: HashMap<Host, (Arc<Slot>, u64)>,
    /// Counts uses: the slot with the lowest number was not used for the longest time.
    clock: u64,
}

/// One host's place in the cache. Whoever has to issue holds the lock, everybody else waits for it
/// instead of issuing too.
#[derive(Default)]
struct Slot(tokio::sync::Mutex<Option<Leaf>>);

struct Leaf {
    certified: Arc<CertifiedKey>,
    not_after: SystemTime,
    renew_at: SystemTime,
    configs: Vec<(Vec<Vec<u8>>, Arc<ServerConfig>)>,
}

impl Leaves {
    pub fn new(vault: Vault) -> Result<Leaves, LeafError> {
        Self::with_life(vault, Duration::from_secs(LEAF_LIFE_SECONDS))
    }

    /// With another life than the usual one; the vault child bounds it from above.
    pub fn with_life(vault: Vault, life: Duration) -> Result<Leaves, LeafError> {
        let key = |error: &dyn std::fmt::Display| LeafError::Key(error.to_string());
        let pair = KeyPair::generate().map_err(|error| key(&error))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let signing = provider
            .key_provider
            .load_private_key(PrivatePkcs8KeyDer::from(pair.serialize_der()).into())
            .map_err(|error| key(&error))?;
        Ok(Leaves(Arc::new(Shared {
            vault,
            provider,
            key: signing,
            spki: pair.subject_public_key_info(),
            life,
            hosts: Mutex::default(),
        })))
    }

    /// The server configuration for a connection to `host` that may speak `alpn`, in our order of
    /// preference.
    pub async fn server_config(
        &self,
        host: &Host,
        alpn: &[&[u8]],
    ) -> Result<Arc<ServerConfig>, LeafError> {
        let slot = self.slot(host);
        let mut leaf = slot.0.lock().await;
        let now = SystemTime::now();
        if leaf.as_ref().is_none_or(|leaf| leaf.renew_at <= now) {
            match self.0.issue(host, now).await {
                Ok(new) => *leaf = Some(new),
                // The old one still serves until its own end.
                Err(_) if leaf.as_ref().is_some_and(|leaf| now < leaf.not_after) => {}
                Err(error) => {
                    *leaf = None;
                    return Err(error);
                }
            }
        }
        let leaf = leaf.as_mut().expect("issued above, or kept because it is there");
        if let Some((_, config)) = leaf.configs.iter().find(|(known, _)| known == alpn) {
            return Ok(config.clone());
        }
        let config = self.0.configure(leaf, host, alpn)?;
        if leaf.configs.len() >= PROTOCOLS_MAX {
            leaf.configs.clear();
        }
        leaf.configs.push((alpn.iter().map(|name| name.to_vec()).collect(), config.clone()));
        Ok(config)
    }

    fn slot(&self, host: &Host) -> Arc<Slot> {
        let mut hosts = self.0.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        hosts.clock += 1;
        let clock = hosts.clock;
        if let Some((slot, used)) = hosts.slots.get_mut(host) {
            *used = clock;
            return slot.clone();
        }
        if hosts.slots.len() >= HOSTS_MAX
            && let Some(oldest) =
                hosts.slots.iter().min_by_key(|(_, (_, used))| *used).map(|(host, _)| host.clone())
        {
            hosts.slots.remove(&oldest);
        }
        let slot = Arc::new(Slot::default());
        hosts.slots.insert(host.clone(), (slot.clone(), clock));
        slot
    }
}

impl Shared {
    async fn issue(&self, host: &Host, now: SystemTime) -> Result<Leaf, LeafError> {
        let der = self
            .vault
            .issue_leaf(host, &self.spki, self.life.as_secs())
            .await
            .map_err(|source| LeafError::Issue { host: host.to_string(), source })?;
        let certified = CertifiedKey::new(vec![CertificateDer::from(der)], self.key.clone());
        // Certificates count in whole seconds; the one begun now is no longer ours.
        let whole = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let not_after = UNIX_EPOCH + Duration::from_secs(whole) + self.life;
        Ok(Leaf {
            certified: Arc::new(certified),
            not_after,
            // A seventh of its life ahead: a day of the usual week.
            renew_at: not_after - self.life / 7,
            configs: Vec::new(),
        })
    }

    fn configure(
        &self,
        leaf: &Leaf,
        host: &Host,
        alpn: &[&[u8]],
    ) -> Result<Arc<ServerConfig>, LeafError> {
        let unusable = |error: rustls::Error| LeafError::Unusable {
            host: host.to_string(),
            reason: error.to_string(),
        };
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(One(leaf.certified.clone())));
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer = rustls::crypto::aws_lc_rs::Ticketer::new().map_err(unusable)?;
        Ok(Arc::new(config))
    }
}

/// Always the same certificate: which one fits was decided by the connection's address.
struct One(Arc<CertifiedKey>);

impl ResolvesServerCert for One {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

impl std::fmt::Debug for One {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("One")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vault::tests::in_process;
    use std::time::Instant;

    const H2: &[&[u8]] = &[b"h2", b"http/1.1"];
    const H1: &[&[u8]] = &[b"http/1.1"];

    fn host(text: &str) -> Host {
        Host::parse(text).unwrap()
    }

    async fn certificate(leaves: &Leaves, name: &str) -> Vec<u8> {
        let slot = leaves.slot(&host(name));
        let leaf = slot.0.lock().await;
        leaf.as_ref().unwrap().certified.cert[0].to_vec()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_hundred_connections_at_once_issue_one_certificate() {
        let dir = tempfile::tempdir().unwrap();
        let leaves = Leaves::new(in_process(dir.path())).unwrap();
        let tasks: Vec<_> = (0..100)
            .map(|_| {
                let leaves = leaves.clone();
                tokio::spawn(async move { leaves.server_config(&host("a.example"), H2).await })
            })
            .collect();

        let mut configs = Vec::new();
        for task in tasks {
            configs.push(task.await.unwrap().unwrap());
        }
        let other = leaves.server_config(&host("a.example"), H1).await.unwrap();

        assert!(configs.iter().all(|config| Arc::ptr_eq(config, &configs[0])));
        assert_eq!(other.alpn_protocols, [b"http/1.1"]);
        assert!(!Arc::ptr_eq(&other, &configs[0]));
    }

    #[tokio::test]
    async fn a_leaf_is_renewed_before_it_expires() {
        let dir = tempfile::tempdir().unwrap();
        let vault = in_process(dir.path());
        let leaves = Leaves::with_life(vault, Duration::from_secs(2)).unwrap();
        leaves.server_config(&host("a.example"), H2).await.unwrap();
        let (first, begun) = (certificate(&leaves, "a.example").await, Instant::now());

        loop {
            leaves.server_config(&host("a.example"), H2).await.unwrap();
            if certificate(&leaves, "a.example").await != first {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(2), "an expired leaf was served");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn the_cache_is_bounded_and_keeps_what_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let leaves = Leaves::new(in_process(dir.path())).unwrap();
        let busy = leaves.server_config(&host("busy.example"), H1).await.unwrap();
        for i in 0..HOSTS_MAX + 10 {
            leaves.slot(&host(&format!("n{i}.example")));
            leaves.slot(&host("busy.example"));
        }

        let again = leaves.server_config(&host("busy.example"), H1).await.unwrap();

        assert!(Arc::ptr_eq(&busy, &again));
        assert_eq!(leaves.0.hosts.lock().unwrap().slots.len(), HOSTS_MAX);
    }
}
