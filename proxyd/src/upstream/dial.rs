//! From a permitted name to a verified connection, with one resolution in between.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hickory_resolver::TokioResolver;
use hickory_resolver::net::NetError;
use policies::{Denial, Host, Permit};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::UpstreamError;
use super::trust::{Alpn, Trust};
use crate::config::UpstreamRow;
use crate::relay::stream::Stream;
use crate::sys::interfaces;

/// How long one address may take to accept, when others are left to try, and when it is the last.
const CONNECT_FIRST: Duration = Duration::from_secs(3);
const CONNECT_LAST: Duration = Duration::from_secs(10);
const HANDSHAKE: Duration = Duration::from_secs(10);
const RESOLVE: Duration = Duration::from_secs(10);
/// Most addresses tried for one name.
const ADDRESSES_MAX: usize = 8;
/// How long the list of this host's own addresses is believed.
const OWN_ADDRESSES_LIFE: Duration = Duration::from_secs(5);
/// Rustls's words for the alert of an upstream that speaks none of the offered protocols.
const NO_PROTOCOL: &str = "received fatal alert: NoApplicationProtocol";

/// A connection to an upstream, before anything was sent.
pub struct Dialled {
    pub stream: Stream,
    pub address: SocketAddr,
    pub speaks_h2: bool,
}

/// Resolves, checks, dials.
pub struct Dialer {
    table: HashMap<Host, UpstreamRow>,
    trust: Trust,
    resolver: Mutex<Option<TokioResolver>>,
    own: Mutex<Option<(Instant, HashSet<IpAddr>)>>,
}

/// Whether the upstream refused because it speaks another protocol than the one offered.
pub fn is_other_protocol(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Tls { reason, .. } if reason == NO_PROTOCOL)
}

/// Why a name was not resolved. The resolver's own words for the two usual cases are its query in
/// debug form.
fn unresolved(error: &NetError) -> String {
    if error.is_nx_domain() {
        "there is no such name".to_owned()
    } else if error.is_no_records_found() {
        "the name server gives no address".to_owned()
    } else {
        error.to_string()
    }
}

impl Dialer {
    pub fn new(table: HashMap<Host, UpstreamRow>, trust: Trust) -> Self {
        Self { table, trust, resolver: Mutex::new(None), own: Mutex::new(None) }
    }

    /// Where to dial for a permit: from the operator's table, the literal address, or the one
    /// resolution. Every address must be allowed: a name that also leads somewhere forbidden is
    /// refused whole, because which one answers is not ours to know.
    pub async fn addresses(&self, permit: &Permit) -> Result<Vec<SocketAddr>, UpstreamError> {
        let found = match (self.table.get(permit.host()).and_then(|row| row.dial), permit.host()) {
            (Some(dial), _) => vec![dial],
            (None, Host::Ip(ip)) => vec![SocketAddr::new(*ip, permit.port())],
            (None, Host::Name(name)) => self.resolve(name, permit.port()).await?,
        };
        for address in &found {
            self.check(permit, *address).map_err(UpstreamError::Denied)?;
        }
        Ok(found)
    }

    /// Judges one address by the permit.
    pub fn check(&self, permit: &Permit, address: SocketAddr) -> Result<(), Denial> {
        permit.address_allowed(address.ip(), self.is_own(address.ip()))
    }

    /// Whether an address belongs to an interface of this host.
    pub fn is_own(&self, ip: IpAddr) -> bool {
        let mut own = self.own.lock().expect("no holder of this lock panics");
        match &*own {
            Some((since, set)) if since.elapsed() < OWN_ADDRESSES_LIFE => set.contains(&ip),
            _ => {
                // Unreadable interfaces count as owning everything: refused rather than missed.
                let Some(set) = interfaces::addresses() else { return true };
                let found = set.contains(&ip);
                *own = Some((Instant::now(), set));
                found
            }
        }
    }

    async fn resolve(&self, name: &str, port: u16) -> Result<Vec<SocketAddr>, UpstreamError> {
        let failed = |reason: String| UpstreamError::Resolve { host: name.to_owned(), reason };
        let resolver = self.resolver().map_err(failed)?;
        let lookup = timeout(RESOLVE, resolver.lookup_ip(format!("{name}.")))
            .await
            .map_err(|_| failed(format!("no answer within {} s", RESOLVE.as_secs())))?
            .map_err(|error| failed(unresolved(&error)))?;
        let found: Vec<_> =
            lookup.iter().take(ADDRESSES_MAX).map(|ip| SocketAddr::new(ip, port)).collect();
        if found.is_empty() {
            return Err(failed("the name has no address".to_owned()));
        }
        Ok(found)
    }

    /// The resolver of this host's configuration, read when it is first needed.
    fn resolver(&self) -> Result<TokioResolver, String> {
        let mut kept = self.resolver.lock().expect("no holder of this lock panics");
        if let Some(resolver) = &*kept {
            return Ok(resolver.clone());
        }
        let resolver = TokioResolver::builder_tokio()
            .and_then(|mut builder| {
                let options = builder.options_mut();
                options.ip_strategy = hickory_resolver::config::LookupIpStrategy::Ipv4AndIpv6;
                builder.build()
            })
            .map_err(|error| error.to_string())?;
        *kept = Some(resolver.clone());
        Ok(resolver)
    }

    /// The first of the addresses that accepts.
    pub async fn connect(
        &self,
        permit: &Permit,
        addresses: &[SocketAddr],
    ) -> Result<(TcpStream, SocketAddr), UpstreamError> {
        let host = || permit.host().to_string();
        let mut failure =
            UpstreamError::Resolve { host: host(), reason: "the name has no address".to_owned() };
        for (index, address) in addresses.iter().copied().enumerate() {
            let last = index + 1 == addresses.len();
            let patience = if last { CONNECT_LAST } else { CONNECT_FIRST };
            failure = match timeout(patience, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    // Relayed pieces are whole messages already; waiting to fill packets only
                    // delays them. A socket that refuses the option still works.
                    let _ = stream.set_nodelay(true);
                    interfaces::keep_alive(&stream);
                    return Ok((stream, address));
                }
                Ok(Err(error)) => {
                    UpstreamError::Connect { host: host(), address, reason: error.to_string() }
                }
                Err(_) => {
                    UpstreamError::Timeout { host: host(), address, seconds: patience.as_secs() }
                }
            };
        }
        Err(failure)
    }

    pub async fn plain(
        &self,
        permit: &Permit,
        addresses: &[SocketAddr],
    ) -> Result<Dialled, UpstreamError> {
        let (stream, address) = self.connect(permit, addresses).await?;
        Ok(Dialled { stream: Stream::new(stream), address, speaks_h2: false })
    }

    /// Connects and verifies that the upstream is who the permit names.
    pub async fn tls(
        &self,
        permit: &Permit,
        addresses: &[SocketAddr],
        alpn: Alpn,
    ) -> Result<Dialled, UpstreamError> {
        let (stream, address) = self.connect(permit, addresses).await?;
        let host = permit.host();
        let tls_failed =
            |reason: String| UpstreamError::Tls { host: host.to_string(), address, reason };
        let name = match host {
            Host::Ip(ip) => ServerName::IpAddress((*ip).into()),
            Host::Name(name) => ServerName::try_from(name.clone())
                .map_err(|_| tls_failed("not a name that certificates can hold".to_owned()))?,
        };
        let connector = TlsConnector::from(self.trust.client_config(host, alpn));
        let stream = timeout(HANDSHAKE, connector.connect(name, stream))
            .await
            .map_err(|_| UpstreamError::Timeout {
                host: host.to_string(),
                address,
                seconds: HANDSHAKE.as_secs(),
            })?
            .map_err(|error| tls_failed(error.to_string()))?;
        let speaks_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok(Dialled { stream: Stream::new(stream), address, speaks_h2 })
    }
}
