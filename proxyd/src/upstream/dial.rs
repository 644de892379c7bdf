//! From a permitted name to a verified connection, with one resolution in between.
//!
//! [`Dialer::addresses`] finds the [`Route`]: where to dial, and through which proxy. Whatever the
//! route, the name that TLS verifies is the permit's. Where proxyd resolves a name itself, every
//! address is judged by the permit before and after the dial. Where the operator's proxy resolves
//! names (`resolve = "proxy"`), only literal addresses can be judged; the proxy's own address is
//! the operator's word and never judged.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;

use policies::address::{AddressClass, classify};
use policies::{Denial, Host, Permit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::UpstreamError;
use super::alert;
use super::elsewhere::elsewhere;
use super::eyeballs::{self, Lost};
use super::identities::Identities;
use super::resolve::Resolver;
use super::telling::Telling;
use super::trust::{self, Alpn};
use super::via::Proxy;
use super::way::{Way, Ways};
use crate::config::Protocols;
use crate::relay::stream::{Io, Stream};
use crate::sys::interfaces;
use crate::vault::{Shown, Vault};

pub const HANDSHAKE: Duration = Duration::from_secs(10);
/// Rustls's words for the alert of an upstream that speaks none of the offered protocols.
const NO_PROTOCOL: &str = "received fatal alert: NoApplicationProtocol";

/// Where a connection leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The address that was judged and is reached; none where a proxy resolves the name.
    pub reached: Option<SocketAddr>,
    /// In words, for every record of a request that goes there.
    text: Arc<str>,
}

impl Endpoint {
    /// An address that is reached without a proxy.
    pub fn direct(address: SocketAddr) -> Self {
        Self { reached: Some(address), text: address.to_string().into() }
    }

    fn through(proxy: &Proxy, reached: Option<SocketAddr>) -> Self {
        let via = &proxy.label;
        let text = match &reached {
            Some(address) => format!("{address} via {via}"),
            None => format!("via {via}"),
        };
        Self { reached, text: text.into() }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A connection to an upstream, before anything was sent.
pub struct Dialled {
    pub stream: Stream,
    pub address: Endpoint,
    pub speaks_h2: bool,
}

/// A connection whose bytes nobody reads here.
pub struct Raw {
    pub stream: RawStream,
    pub address: Endpoint,
    /// Keeps its place among the connections that the operator allows to the host.
    _room: Option<OwnedSemaphorePermit>,
}

pub enum RawStream {
    Tcp(TcpStream),
    /// Through a proxy.
    Layered(Stream),
}

impl RawStream {
    /// Has the connection reset when it is dropped, or ended in order again.
    pub fn reset_on_close(&self, resets: bool) {
        match (self, resets) {
            (Self::Tcp(stream), true) => interfaces::reset_on_close(stream),
            (Self::Tcp(stream), false) => interfaces::close_in_order(stream),
            (Self::Layered(stream), true) => stream.reset_on_close(),
            (Self::Layered(stream), false) => stream.close_in_order(),
        }
    }
}

/// Where to dial for one permit.
pub struct Route {
    way: Arc<Way>,
    to: To,
}

enum To {
    Addresses(Vec<SocketAddr>),
    /// A proxy that is asked for the name itself, or for a literal address that was judged.
    Named(Arc<Proxy>, Option<SocketAddr>),
    /// A proxy that is asked for judged addresses.
    Judged(Arc<Proxy>, Vec<SocketAddr>),
}

/// Resolves, checks, dials.
pub struct Dialer {
    ways: RwLock<Arc<Ways>>,
    resolver: Resolver,
    vault: Vault,
    identities: Identities,
}

/// Whether the upstream refused because it speaks another protocol than the one offered.
pub fn is_other_protocol(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Tls { reason, .. } if reason == NO_PROTOCOL)
}

impl Dialer {
    pub fn new(ways: Ways, resolver: Resolver, vault: Vault) -> Self {
        let identities = Identities::default();
        Self { ways: RwLock::new(Arc::new(ways)), resolver, vault, identities }
    }

    pub fn vault(&self) -> &Vault {
        &self.vault
    }

    pub fn ways(&self) -> Arc<Ways> {
        Arc::clone(&self.ways.read().expect("no holder of this lock panics"))
    }

    /// New connections go by these ways from now on.
    pub fn replace(&self, ways: Ways) {
        *self.ways.write().expect("no holder of this lock panics") = Arc::new(ways);
    }

    /// Where to dial for a permit: from the operator's table, the literal address, or the one
    /// resolution. Every address must be allowed: a name that also leads somewhere forbidden is
    /// refused whole, because which one answers is not ours to know.
    pub async fn addresses(&self, permit: &Permit, way: &Arc<Way>) -> Result<Route, UpstreamError> {
        let (host, port) = (permit.host(), permit.port());
        let proxy = way.proxy(host);
        let found = match (&way.row.dial[..], host) {
            ([], Host::Name(_)) if proxy.is_some_and(|proxy| proxy.resolves()) => Vec::new(),
            ([], Host::Ip(ip)) => vec![SocketAddr::new(*ip, port)],
            ([], Host::Name(name)) => self.resolve(name, port, proxy).await?,
            (dial, _) => dial.iter().map(|dial| dial.at(port)).collect(),
        };
        for address in &found {
            self.check(permit, *address).map_err(UpstreamError::Denied)?;
        }
        let to = match proxy {
            None => To::Addresses(found),
            Some(proxy) if proxy.resolves() && way.row.dial.is_empty() => {
                To::Named(Arc::clone(proxy), found.first().copied())
            }
            Some(proxy) => To::Judged(Arc::clone(proxy), found),
        };
        Ok(Route { way: Arc::clone(way), to })
    }

    async fn resolve(
        &self,
        name: &str,
        port: u16,
        proxy: Option<&Arc<Proxy>>,
    ) -> Result<Vec<SocketAddr>, UpstreamError> {
        let found = self.resolver.addresses(name, port).await;
        found.map_err(|error| match (proxy, error) {
            (Some(proxy), UpstreamError::Resolve { host, reason }) => proxy.failed(
                format!("it is asked for addresses, and {host} has none here: {reason}"),
                Some("resolve = \"proxy\" leaves names to the proxy: see proxyd(8)".into()),
            ),
            (_, error) => error,
        })
    }

    /// Whether a connection that is to be upgraded can be had: HTTP/2 has no upgrades.
    pub fn upgradable(&self, permit: &Permit, way: &Way) -> Result<(), UpstreamError> {
        if way.row.protocols != Protocols::Http2 {
            return Ok(());
        }
        let reason = "the request asks for an upgrade, which needs HTTP/1.1, and proxyd.toml \
                      allows only HTTP/2 for this host";
        Err(UpstreamError::Send { host: permit.host().to_string(), reason: reason.to_owned() })
    }

    /// Judges one address by the permit.
    pub fn check(&self, permit: &Permit, address: SocketAddr) -> Result<(), Denial> {
        permit.address_allowed(address.ip(), self.is_own(address.ip()))
    }

    /// Judges where a kept connection leads.
    pub fn check_kept(&self, permit: &Permit, endpoint: &Endpoint) -> bool {
        endpoint.reached.is_none_or(|address| self.check(permit, address).is_ok())
    }

    /// Whether an address is one of this host's own, now. Only of public ones it matters: all
    /// others need a rule that names them anyway.
    pub fn is_own(&self, ip: IpAddr) -> bool {
        matches!(classify(ip), AddressClass::Public) && interfaces::is_own(ip)
    }

    /// The first of the addresses that answers.
    async fn connect(
        &self,
        permit: &Permit,
        way: &Way,
        addresses: &[SocketAddr],
    ) -> Result<(TcpStream, SocketAddr), UpstreamError> {
        let patience = way.row.connect_timeout;
        let host = || permit.host().to_string();
        let raced = eyeballs::race(addresses, patience).await;
        let (stream, address) = raced.map_err(|lost| match lost {
            Lost::Refused(reason) => UpstreamError::Connect { host: host(), reason },
            Lost::Silent(tried) => {
                UpstreamError::Timeout { host: host(), tried, seconds: patience.as_secs() }
            }
        })?;
        // It may have become one of this host's own since it was checked.
        self.check(permit, address).map_err(UpstreamError::Denied)?;
        // Relayed pieces are whole messages already; waiting to fill packets only delays them. A
        // socket that refuses the option still works.
        let _ = stream.set_nodelay(true);
        interfaces::keep_alive(&stream);
        Ok((stream, address))
    }

    /// A connection whose bytes are passed on unread.
    pub async fn raw(&self, permit: &Permit, route: &Route) -> Result<Raw, UpstreamError> {
        let room = self.room(permit, &route.way).await?;
        if let To::Addresses(addresses) = &route.to {
            let (stream, address) = self.connect(permit, &route.way, addresses).await?;
            let address = Endpoint::direct(address);
            return Ok(Raw { stream: RawStream::Tcp(stream), address, _room: room });
        }
        let (stream, address) = self.tunnel(permit, route).await?;
        Ok(Raw { stream: RawStream::Layered(stream), address, _room: room })
    }

    /// A tunnel through the route's proxy.
    async fn tunnel(
        &self,
        permit: &Permit,
        route: &Route,
    ) -> Result<(Stream, Endpoint), UpstreamError> {
        match &route.to {
            To::Addresses(addresses) => {
                let (stream, address) = self.connect(permit, &route.way, addresses).await?;
                let endpoint = Endpoint::direct(address);
                Ok((Stream::new(stream), endpoint))
            }
            To::Named(proxy, address) => {
                let authority = permit.host().authority(permit.port());
                let authority = address.map_or(authority, |address| address.to_string());
                let stream = self.through(proxy, &route.way, &authority).await?;
                Ok((stream, Endpoint::through(proxy, *address)))
            }
            To::Judged(proxy, addresses) => {
                let mut failure = proxy.failed("there is no address to ask it for", None);
                for address in addresses {
                    match self.through(proxy, &route.way, &address.to_string()).await {
                        Ok(stream) => {
                            return Ok((stream, Endpoint::through(proxy, Some(*address))));
                        }
                        Err(error) => failure = error,
                    }
                }
                Err(failure)
            }
        }
    }

    async fn through(
        &self,
        proxy: &Proxy,
        way: &Way,
        authority: &str,
    ) -> Result<Stream, UpstreamError> {
        let patience = way.row.connect_timeout;
        let authorization = proxy.authorization(&self.vault).await?;
        let stream = proxy.reach(&self.resolver, patience).await?;
        proxy.tunnel(stream, authority, authorization.as_ref(), patience).await
    }

    /// Plain HTTP. A proxy that resolves names gets whole requests, in absolute form: many refuse
    /// a tunnel to port 80. See [`Way::absolute`].
    pub async fn plain(&self, permit: &Permit, route: &Route) -> Result<Dialled, UpstreamError> {
        let room = self.room(permit, &route.way).await?;
        if let To::Named(proxy, reached) = &route.to {
            let stream = proxy.reach(&self.resolver, route.way.row.connect_timeout).await?;
            let address = Endpoint::through(proxy, *reached);
            return Ok(Dialled { stream: held(stream, room), address, speaks_h2: false });
        }
        let (stream, address) = self.tunnel(permit, route).await?;
        Ok(Dialled { stream: held(stream, room), address, speaks_h2: false })
    }

    /// Connects and verifies that the upstream is who the permit names; says who asks where the
    /// upstream wants to know and there is something to show.
    pub async fn tls(
        &self,
        permit: &Permit,
        route: &Route,
        alpn: Alpn,
        shown: Option<&Arc<Shown>>,
    ) -> Result<Dialled, UpstreamError> {
        let protocols = route.way.row.protocols;
        let alpn = match protocols {
            Protocols::Either => alpn,
            Protocols::Http1 => Alpn::Http1,
            Protocols::Http2 => Alpn::Http2,
        };
        let room = self.room(permit, &route.way).await?;
        let host = permit.host();
        let (stream, address) = self.tunnel(permit, route).await?;
        let tls_failed = |reason: String| UpstreamError::Tls {
            host: host.to_string(),
            address: address.to_string(),
            reason,
        };
        let name = trust::server_name(host).map_err(tls_failed)?;
        let handshake = async {
            let Some(shown) = shown else {
                return TlsConnector::from(route.way.offers.of(alpn)).connect(name, stream).await;
            };
            let offers = self.identities.offers(&route.way, shown).map_err(io::Error::other)?;
            // In the middle of it the vault is asked for a signature.
            elsewhere(TlsConnector::from(offers.of(alpn)).connect(name, stream)).await.flatten()
        };
        let stream = timeout(HANDSHAKE, handshake)
            .await
            .map_err(|_| UpstreamError::Timeout {
                host: host.to_string(),
                tried: format!("{address}: no TLS handshake"),
                seconds: HANDSHAKE.as_secs(),
            })?
            .map_err(|error| {
                let reason = error.to_string();
                let whose = route.way.shows(shown);
                alert::told(&reason, permit, whose.as_deref()).unwrap_or(tls_failed(reason))
            })?;
        let speaks_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        if protocols == Protocols::Http2 && !speaks_h2 {
            let reason = "it does not speak HTTP/2, and proxyd.toml allows nothing else for it";
            return Err(tls_failed(reason.to_owned()));
        }
        Ok(Dialled { stream: held(Telling::new(stream), room), address, speaks_h2 })
    }

    /// Waits for a place among the connections that the operator allows to the host.
    async fn room(
        &self,
        permit: &Permit,
        way: &Way,
    ) -> Result<Option<OwnedSemaphorePermit>, UpstreamError> {
        let Some(room) = &way.room else { return Ok(None) };
        let waiting = Arc::clone(room).acquire_owned();
        match timeout(way.row.connect_timeout, waiting).await {
            // The semaphore is never closed.
            Ok(place) => Ok(place.ok()),
            Err(_) => Err(UpstreamError::Busy {
                host: permit.host().to_string(),
                connections_max: way.row.connections_max.unwrap_or_default(),
                seconds: way.row.connect_timeout.as_secs(),
            }),
        }
    }
}

/// A connection that gives its place back when it ends, whoever holds it then.
fn held(io: impl Io + 'static, room: Option<OwnedSemaphorePermit>) -> Stream {
    match room {
        None => Stream::new(io),
        Some(room) => Stream::new(Held { io, _room: room }),
    }
}

struct Held<T> {
    io: T,
    _room: OwnedSemaphorePermit,
}

impl<T: AsyncRead + Unpin> AsyncRead for Held<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Held<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
