//! Leaf certificates for intercepted hosts: bounded, single flight, renewed ahead of expiry.
//!
//! This process has one key pair for all leaves; the vault child issues the certificates. Each
//! (authority, host, protocols) has one server configuration. Session tickets are a host's own, so
//! one never resumes under another name, and outlive its certificate.
//!
//! A leaf ages in three steps. Fresh, it is served. Aging, it is served and renewed in the
//! background, by whoever uses it or by [`Leaves::keep_fresh`], and nobody waits. Late, which only
//! a clock that jumped or a vault that failed brings about, it is replaced before it is served.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use policies::Host;
use rcgen::{KeyPair, PublicKeyData};
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, NoServerSessionStorage, ProducesTickets, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use super::authority::AuthorityId;
use crate::vault::{Vault, VaultError};

/// Life of a leaf certificate.
const LEAF_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
/// What is left of a leaf's life when its renewal begins, and when nobody gets it any more: a day
/// and half a day of the usual week.
const AGING_FRACTION: u32 = 7;
const LATE_FRACTION: u32 = 14;
/// A clock set back this far makes a leaf late: it might begin in the future.
const CLOCK_BACK: Duration = Duration::from_secs(3600);
/// How often the leaves that are in use are looked through, and how long a renewal that failed is
/// not tried again.
const LOOK: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_secs(30);
/// Most hosts kept of one authority, at some 10 KiB each: a sandbox that walks through names must
/// not fill memory.
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

/// Tells the time since 1970. Tests bring their own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Duration + Send + Sync>);

impl Clock {
    /// The system's.
    pub fn system() -> Self {
        Self(Arc::new(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()))
    }

    pub fn now(&self) -> Duration {
        (self.0)()
    }
}

/// Issues and keeps leaf certificates. Clones share one cache.
#[derive(Clone)]
pub struct Leaves(Arc<Shared>);

struct Shared {
    vault: Vault,
    provider: Arc<CryptoProvider>,
    key: Arc<dyn rustls::sign::SigningKey>,
    spki: Vec<u8>,
    clock: Clock,
    /// A client knows one authority, so each has hosts of its own.
    hosts: Mutex<HashMap<AuthorityId, Hosts>>,
    /// Hosts that had to make room for others.
    evicted: AtomicU64,
}

/// The cache. Who has to go is found by a second chance: in the order in which they came, the
/// first that was not asked for since it was last passed over.
#[derive(Default)]
struct Hosts {
    slots: HashMap<Host, Arc<Slot>>,
    order: VecDeque<Host>,
}

/// One host's place in the cache.
struct Slot {
    authority: AuthorityId,
    host: Host,
    leaf: Mutex<Option<Arc<Leaf>>>,
    /// Held by whoever has one issued; everybody else waits for it instead of asking too.
    flight: tokio::sync::Mutex<()>,
    tickets: Arc<dyn ProducesTickets>,
    /// Asked for since its place in the cache was last questioned.
    asked: AtomicBool,
    /// Served since it was issued: worth a renewal.
    served: AtomicBool,
    /// A renewal is under way, or failed a moment ago.
    renewing: AtomicBool,
}

struct Leaf {
    certified: Arc<CertifiedKey>,
    issued: Duration,
    not_after: Duration,
    /// One for each list of protocols.
    configs: Mutex<Vec<Arc<ServerConfig>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Age {
    Fresh,
    Aging,
    Late,
}

impl Leaf {
    fn age(&self, now: Duration) -> Age {
        let whole = self.not_after.saturating_sub(self.issued);
        let left = self.not_after.saturating_sub(now);
        if now + CLOCK_BACK < self.issued || left < whole / LATE_FRACTION {
            Age::Late
        } else if left < whole / AGING_FRACTION {
            Age::Aging
        } else {
            Age::Fresh
        }
    }
}

impl Leaves {
    pub fn new(vault: Vault) -> Result<Leaves, LeafError> {
        Self::with_clock(vault, Clock::system())
    }

    fn with_clock(vault: Vault, clock: Clock) -> Result<Leaves, LeafError> {
        let key = |error: &dyn std::fmt::Display| LeafError::Key(error.to_string());
        let pair = KeyPair::generate().map_err(|error| key(&error))?;
        let provider = super::provider();
        let signing = provider
            .key_provider
            .load_private_key(PrivatePkcs8KeyDer::from(pair.serialize_der()).into())
            .map_err(|error| key(&error))?;
        let spki = pair.subject_public_key_info();
        let (hosts, evicted) = (Mutex::default(), AtomicU64::new(0));
        let shared = Shared { vault, provider, key: signing, spki, clock, hosts, evicted };
        Ok(Leaves(Arc::new(shared)))
    }

    /// The server configuration for a connection to `host` of a client that trusts `authority`, and
    /// may speak `alpn`, in our order of preference.
    pub async fn server_config(
        &self,
        authority: AuthorityId,
        host: &Host,
        alpn: &[&[u8]],
    ) -> Result<Arc<ServerConfig>, LeafError> {
        let slot = self.0.slot(authority, host)?;
        let leaf = match slot.kept(self.0.clock.now()) {
            Some((leaf, Age::Fresh)) => leaf,
            Some((leaf, Age::Aging)) => {
                self.renew(&slot);
                leaf
            }
            _ => self.0.replace(&slot, |age| age != Age::Late).await?,
        };
        slot.served.store(true, Ordering::Relaxed);
        self.0.config(&slot, &leaf, alpn)
    }

    /// Has the leaf of a host issued, if there is none, while its first client is still busy with
    /// something else.
    pub fn prefetch(&self, authority: AuthorityId, host: &Host) {
        if let Ok(slot) = self.0.slot(authority, host)
            && !matches!(slot.kept(self.0.clock.now()), Some((_, Age::Fresh | Age::Aging)))
        {
            self.renew(&slot);
        }
    }

    /// How many hosts are kept, and how many had to make room for others so far.
    pub fn numbers(&self) -> (u64, u64) {
        let kept: usize = self.0.hosts().values().map(|hosts| hosts.slots.len()).sum();
        (kept as u64, self.0.evicted.load(Ordering::Relaxed))
    }

    /// Forgets the leaves of all other authorities.
    pub fn keep_only(&self, authorities: impl Fn(AuthorityId) -> bool) {
        self.0.hosts().retain(|authority, _| authorities(*authority));
    }

    /// Renews, for as long as the daemon runs, what is in use before it is late, and forgets what
    /// is not.
    pub async fn keep_fresh(self) {
        loop {
            tokio::time::sleep(LOOK).await;
            self.look().await;
        }
    }

    async fn look(&self) {
        let now = self.0.clock.now();
        let old = |slot: &Arc<Slot>| slot.kept(now).is_some_and(|(_, age)| age != Age::Fresh);
        let slots: Vec<_> = {
            let all = self.0.hosts();
            let slots = all.values().flat_map(|hosts| hosts.slots.values());
            slots.filter(|slot| old(slot)).cloned().collect()
        };
        for slot in slots {
            if !slot.served.load(Ordering::Relaxed) {
                if let Some(hosts) = self.0.hosts().get_mut(&slot.authority) {
                    hosts.forget(&slot.host);
                }
            } else if let Err(error) = self.0.replace(&slot, |age| age == Age::Fresh).await {
                tracing::warn!(%error, "a certificate is not renewed");
            }
        }
    }

    /// One renewal in the background at a time.
    fn renew(&self, slot: &Arc<Slot>) {
        if slot.renewing.swap(true, Ordering::AcqRel) {
            return;
        }
        let (shared, slot) = (Arc::clone(&self.0), Arc::clone(slot));
        tokio::spawn(async move {
            if let Err(error) = shared.replace(&slot, |age| age == Age::Fresh).await {
                tracing::warn!(%error, "a certificate is not renewed");
                tokio::time::sleep(PAUSE).await;
            }
            slot.renewing.store(false, Ordering::Release);
        });
    }
}

impl Hosts {
    /// Takes a slot in, and says how many had to go: the cache is never larger than its bound.
    fn insert(&mut self, slot: Arc<Slot>) -> u64 {
        let mut evicted = 0;
        while self.slots.len() >= HOSTS_MAX
            && let Some(host) = self.order.pop_front()
        {
            // One that was forgotten has only its place in the order left.
            let Some(oldest) = self.slots.get(&host) else { continue };
            if oldest.asked.swap(false, Ordering::Relaxed) {
                self.order.push_back(host);
            } else {
                self.slots.remove(&host);
                evicted += 1;
            }
        }
        self.order.push_back(slot.host.clone());
        self.slots.insert(slot.host.clone(), slot);
        evicted
    }

    fn forget(&mut self, host: &Host) {
        if self.slots.remove(host).is_some() {
            self.order.retain(|other| other != host);
        }
    }
}

impl Slot {
    /// What is kept and how old it is.
    fn kept(&self, now: Duration) -> Option<(Arc<Leaf>, Age)> {
        let leaf = lock(&self.leaf).clone()?;
        let age = leaf.age(now);
        Some((leaf, age))
    }
}

impl Shared {
    fn hosts(&self) -> MutexGuard<'_, HashMap<AuthorityId, Hosts>> {
        lock(&self.hosts)
    }

    fn slot(&self, authority: AuthorityId, host: &Host) -> Result<Arc<Slot>, LeafError> {
        let mut all = self.hosts();
        let hosts = all.entry(authority).or_default();
        if let Some(slot) = hosts.slots.get(host) {
            slot.asked.store(true, Ordering::Relaxed);
            return Ok(Arc::clone(slot));
        }
        let slot = Arc::new(Slot {
            authority,
            host: host.clone(),
            leaf: Mutex::default(),
            flight: tokio::sync::Mutex::default(),
            tickets: rustls::crypto::aws_lc_rs::Ticketer::new()
                .map_err(|error| unusable(host, &error))?,
            asked: AtomicBool::new(false),
            served: AtomicBool::new(false),
            renewing: AtomicBool::new(false),
        });
        let evicted = hosts.insert(Arc::clone(&slot));
        self.evicted.fetch_add(evicted, Ordering::Relaxed);
        Ok(slot)
    }

    /// A leaf whose age is `good`: the kept one, or one that is issued now. When none can be
    /// issued, the kept one serves until its own end.
    async fn replace(&self, slot: &Slot, good: fn(Age) -> bool) -> Result<Arc<Leaf>, LeafError> {
        let _flight = slot.flight.lock().await;
        let now = self.clock.now();
        let kept = match slot.kept(now) {
            Some((leaf, age)) if good(age) => return Ok(leaf),
            Some((leaf, _)) => Some(leaf),
            None => None,
        };
        match self.issue(slot, now).await {
            Ok(leaf) => {
                let leaf = Arc::new(leaf);
                slot.served.store(false, Ordering::Relaxed);
                *lock(&slot.leaf) = Some(Arc::clone(&leaf));
                Ok(leaf)
            }
            Err(error) => {
                let alive = kept.filter(|leaf| now + CLOCK_BACK > leaf.issued);
                alive.filter(|leaf| now < leaf.not_after).ok_or(error)
            }
        }
    }

    async fn issue(&self, slot: &Slot, now: Duration) -> Result<Leaf, LeafError> {
        let host = &slot.host;
        let (der, not_after) = self
            .vault
            .issue_leaf(slot.authority, host, &self.spki, LEAF_LIFE.as_secs())
            .await
            .map_err(|source| LeafError::Issue { host: host.to_string(), source })?;
        let certified = CertifiedKey::new(vec![CertificateDer::from(der)], self.key.clone());
        Ok(Leaf {
            certified: Arc::new(certified),
            issued: now,
            not_after: Duration::from_secs(not_after),
            configs: Mutex::default(),
        })
    }

    fn config(
        &self,
        slot: &Slot,
        leaf: &Leaf,
        alpn: &[&[u8]],
    ) -> Result<Arc<ServerConfig>, LeafError> {
        let mut configs = lock(&leaf.configs);
        if let Some(config) = configs.iter().find(|config| config.alpn_protocols == alpn) {
            return Ok(config.clone());
        }
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&slot.host, &error))?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(One(leaf.certified.clone())));
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer = Arc::clone(&slot.tickets);
        // Each costs more than what it carries, and most clients end after one connection.
        config.send_tls13_tickets = 1;
        // The client runs on this machine, or on a virtual one of it: what is quick here is there.
        config.ignore_client_order = true;
        let config = Arc::new(config);
        if configs.len() >= PROTOCOLS_MAX {
            configs.clear();
        }
        configs.push(Arc::clone(&config));
        Ok(config)
    }
}

fn unusable(host: &Host, error: &rustls::Error) -> LeafError {
    LeafError::Unusable { host: host.to_string(), reason: error.to_string() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while holding one of these in the middle of a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
mod tests;
