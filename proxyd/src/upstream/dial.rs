//! From a permitted name to a verified connection, with one resolution in between.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use policies::address::{AddressClass, classify};
use policies::{Denial, Host, Permit};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::UpstreamError;
use super::resolve::Resolver;
use super::trust::{Alpn, Trust};
use crate::config::UpstreamRow;
use crate::relay::stream::Stream;
use crate::sys::interfaces;

/// How long one address may take to accept, when others are left to try, and when it is the last.
const CONNECT_FIRST: Duration = Duration::from_secs(3);
const CONNECT_LAST: Duration = Duration::from_secs(10);
const HANDSHAKE: Duration = Duration::from_secs(10);
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
    resolver: Resolver,
}

/// Whether the upstream refused because it speaks another protocol than the one offered.
pub fn is_other_protocol(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Tls { reason, .. } if reason == NO_PROTOCOL)
}

impl Dialer {
    pub fn new(table: HashMap<Host, UpstreamRow>, trust: Trust, resolver: Resolver) -> Self {
        Self { table, trust, resolver }
    }

    /// Where to dial for a permit: from the operator's table, the literal address, or the one
    /// resolution. Every address must be allowed: a name that also leads somewhere forbidden is
    /// refused whole, because which one answers is not ours to know.
    pub async fn addresses(&self, permit: &Permit) -> Result<Vec<SocketAddr>, UpstreamError> {
        let found = match (self.table.get(permit.host()).and_then(|row| row.dial), permit.host()) {
            (Some(dial), _) => vec![dial],
            (None, Host::Ip(ip)) => vec![SocketAddr::new(*ip, permit.port())],
            (None, Host::Name(name)) => self.resolver.addresses(name, permit.port()).await?,
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

    /// Whether an address is one of this host's own, now. Only of public ones it matters: all
    /// others need a rule that names them anyway.
    pub fn is_own(&self, ip: IpAddr) -> bool {
        matches!(classify(ip), AddressClass::Public) && interfaces::is_own(ip)
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
                    // It may have become one of this host's own since it was checked.
                    self.check(permit, address).map_err(UpstreamError::Denied)?;
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
