//! The way to each host: what the operator's table says about it, with its files read.
//!
//! A [`Way`] has an identity. Connections are kept under it, so one that was made with another CA,
//! client certificate or proxy is never used for a request that shall go by this one. When the
//! configuration is read again, ways that did not change keep their identity and connections.

use std::hash::{Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use foldhash::HashMap;
use policies::{Host, HostPattern, Scheme};
use rustls::RootCertStore;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use super::trust::{self, Offers, TrustError};
use super::via::Proxy;
use crate::config::{Exempt, ProxyRow, Through, UpstreamRow, WayOut};
use crate::vault::Shown;

/// How one host, or all below one name, are reached.
pub struct Way {
    id: u64,
    /// Of all that it was made from, contents of files included.
    print: [u8; 32],
    pub row: UpstreamRow,
    pub offers: Offers,
    proxy: Option<Arc<Proxy>>,
    /// Hosts that the proxy is not asked for.
    exempt: Vec<Exempt>,
    /// Room for connections, where their number is bounded.
    pub room: Option<Arc<Semaphore>>,
    /// How many are about to open a connection.
    opening: AtomicUsize,
}

/// Somebody who is about to open a connection.
pub struct Opening<'a>(&'a Way);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.opening.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Way {
    /// The proxy between here and the host, if there is one.
    pub fn proxy(&self, host: &Host) -> Option<&Arc<Proxy>> {
        self.proxy.as_ref().filter(|_| !self.exempt.iter().any(|exempt| exempt.covers(host)))
    }
}

impl Way {
    /// The proxy that gets requests in absolute form instead of being asked for a tunnel.
    pub fn absolute(&self, scheme: Scheme, host: &Host) -> Option<&Arc<Proxy>> {
        let proxy = self.proxy(host)?;
        (scheme == Scheme::Http && proxy.resolves() && self.row.dial.is_empty()).then_some(proxy)
    }

    /// Whose certificate connections are opened with, in words: that of a rule's credential, or
    /// else the one of the operator's table.
    pub fn shows(&self, shown: Option<&Arc<Shown>>) -> Option<String> {
        let own = self.row.identity.as_ref().map(|_| "proxyd.toml".to_owned());
        shown.map(|shown| format!("credential {:?}", shown.credential)).or(own)
    }

    /// Whether all connections that the operator allows are in use or kept.
    pub fn is_full(&self) -> bool {
        self.room.as_ref().is_some_and(|room| room.available_permits() == 0)
    }

    /// Whether a connection that has become idle is to make room for another.
    pub fn is_wanted(&self) -> bool {
        self.is_full() && self.opening.load(Ordering::Acquire) > 0
    }

    /// Announces that a connection is to be opened, until the answer is dropped.
    pub fn opening(&self) -> Opening<'_> {
        self.opening.fetch_add(1, Ordering::AcqRel);
        Opening(self)
    }
}

impl PartialEq for Way {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Way {}

impl Hash for Way {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

/// All ways.
pub struct Ways {
    exact: HashMap<Host, Arc<Way>>,
    /// Longest name first: the nearest one counts.
    below: Vec<(HostPattern, Arc<Way>)>,
    all: Arc<Way>,
}

impl Ways {
    /// Reads every file that the configuration names. Ways that are as `former` has them are taken
    /// over from there.
    pub fn load(config: &WayOut, former: Option<&Ways>) -> Result<Self, TrustError> {
        let maker = Maker::new(config, former)?;
        let all = maker.way(&UpstreamRow::default())?;
        let (mut exact, mut below) = (HashMap::default(), Vec::new());
        for (pattern, row) in &config.rows {
            let way = maker.way(row)?;
            match pattern {
                HostPattern::Exact(host) => {
                    exact.insert(host.clone(), way);
                }
                HostPattern::Below(_) => below.push((pattern.clone(), way)),
            }
        }
        below.sort_by_key(|(pattern, _)| std::cmp::Reverse(pattern.to_string().len()));
        Ok(Self { exact, below, all })
    }

    pub fn of(&self, host: &Host) -> Arc<Way> {
        let below = || self.below.iter().find(|(pattern, _)| pattern.matches(host));
        let named = self.exact.get(host).or_else(|| below().map(|(_, way)| way));
        Arc::clone(named.unwrap_or(&self.all))
    }

    fn each(&self) -> impl Iterator<Item = &Arc<Way>> {
        let below = self.below.iter().map(|(_, way)| way);
        self.exact.values().chain(below).chain([&self.all])
    }
}

/// What all ways of one configuration share.
struct Maker<'a> {
    config: &'a WayOut,
    former: Option<&'a Ways>,
    roots: Arc<RootCertStore>,
    proxy: Option<Arc<Proxy>>,
}

impl<'a> Maker<'a> {
    fn new(config: &'a WayOut, former: Option<&'a Ways>) -> Result<Self, TrustError> {
        let roots = trust::public_roots(config.trust_store.as_deref())?;
        let proxy = config.proxy.as_ref().map(|row| proxy(row, &roots)).transpose()?;
        Ok(Self { config, former, roots, proxy })
    }

    fn way(&self, row: &UpstreamRow) -> Result<Arc<Way>, TrustError> {
        let (proxy_row, exempt) = match &row.proxy {
            // An address that the operator gives is dialled; the proxy is for all else.
            Through::AsAll if row.dial.is_empty() => {
                (self.config.proxy.as_ref(), &self.config.no_proxy[..])
            }
            Through::AsAll | Through::Direct => (None, &[][..]),
            Through::Proxy(own) => (Some(own), &[][..]),
        };
        let print = self.print(row, proxy_row, exempt)?;
        let kept = self.former.and_then(|ways| ways.each().find(|way| way.print == print));
        if let Some(way) = kept {
            return Ok(Arc::clone(way));
        }
        let proxy = match &row.proxy {
            Through::Proxy(own) => Some(proxy(own, &self.roots)?),
            _ => self.proxy.clone().filter(|_| proxy_row.is_some()),
        };
        let roots = match &row.ca {
            Some(path) => trust::roots("CA", path)?,
            None => Arc::clone(&self.roots),
        };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Arc::new(Way {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            print,
            offers: Offers::new(&roots, row.identity.as_ref())?,
            proxy,
            exempt: exempt.to_vec(),
            room: row.connections_max.map(|max| Arc::new(Semaphore::new(max))),
            opening: AtomicUsize::new(0),
            row: row.clone(),
        }))
    }

    /// Differs as soon as anything differs that a connection could have been made by.
    fn print(
        &self,
        row: &UpstreamRow,
        proxy: Option<&ProxyRow>,
        exempt: &[Exempt],
    ) -> Result<[u8; 32], TrustError> {
        let mut digest = Sha256::new();
        let mut add = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_be_bytes());
            digest.update(bytes);
        };
        add(format!("{row:?}{proxy:?}{exempt:?}").as_bytes());
        let public = || {
            let mut certificates: Vec<_> =
                self.roots.roots.iter().map(|r| r.subject.to_vec()).collect();
            certificates
                .extend(self.roots.roots.iter().map(|r| r.subject_public_key_info.to_vec()));
            certificates
        };
        let file = |what, path: &Path| {
            std::fs::read(path).map_err(|e| TrustError::file(what, path, e.to_string()))
        };
        match &row.ca {
            Some(path) => add(&file("CA", path)?),
            None => public().iter().for_each(|bytes| add(bytes)),
        }
        if let Some(identity) = &row.identity {
            add(&file("client certificate", &identity.certificate)?);
            add(&trust::private_file("client key", &identity.key)?);
        }
        if let Some(proxy) = proxy.filter(|proxy| proxy.tls) {
            match &proxy.ca {
                Some(path) => add(&file("CA", path)?),
                None => public().iter().for_each(|bytes| add(bytes)),
            }
        }
        Ok(digest.finalize().into())
    }
}

fn proxy(row: &ProxyRow, public: &Arc<RootCertStore>) -> Result<Arc<Proxy>, TrustError> {
    let roots = match &row.ca {
        Some(path) => trust::roots("CA", path)?,
        None => Arc::clone(public),
    };
    Ok(Arc::new(Proxy::new(row.clone(), &roots)?))
}
