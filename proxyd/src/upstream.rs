//! Whom a permitted request reaches: resolves once, checks the address, dials it, verifies TLS.
//!
//! [`Upstreams::link`] takes the permit and keeps it: one permit, one request. The name that is
//! verified is always the permit's; the operator's table may change where to dial and whose CA to
//! trust, never that. Idle connections are kept per environment, host and credential, and an
//! address is judged by the permit again before a kept connection is used.

pub mod dial;
pub mod pool;
mod resolve;
pub mod trust;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use policies::{Denial, Host, Permit, Scheme};

use crate::config::UpstreamRow;
use crate::head::RequestHead;
use crate::lease::flow::Entry;
use crate::relay::answer::Answer;
use crate::relay::body::BodyOut;
use crate::relay::h1::framing::Framing;
use crate::relay::{h1, h2};
use dial::Dialer;
use pool::{Key, Pool};
use resolve::Resolver;
use trust::{Alpn, Trust, TrustError};

/// Why there is no way to the upstream.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// The name leads to an address that the rule does not allow.
    #[error("{}", .0.reason)]
    Denied(Denial),
    #[error("cannot resolve {host}: {reason}")]
    Resolve { host: String, reason: String },
    #[error("cannot connect to {host} at {address}: {reason}")]
    Connect { host: String, address: SocketAddr, reason: String },
    #[error("{host} at {address} does not answer within {seconds} s")]
    Timeout { host: String, address: SocketAddr, seconds: u64 },
    #[error("cannot verify {host} at {address}: {reason}")]
    Tls { host: String, address: SocketAddr, reason: String },
    #[error("cannot send to {host}: {reason}")]
    Send { host: String, reason: String },
}

/// The way out, shared by all requests.
#[derive(Clone)]
pub struct Upstreams {
    dialer: Arc<Dialer>,
    pool: Pool,
}

/// Which protocol a request would rather have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// HTTP/1.1 keeps spelling and order of fields; another only where the upstream has no other.
    Http1,
    /// HTTP/1.1 and nothing else: the connection is to be upgraded.
    Http1Only,
    Http2,
}

enum Wire {
    H1(Box<h1::client::Connection>),
    H2(::h2::client::SendRequest<Bytes>),
}

/// A connection for one request, with the permit for that request.
pub struct Link {
    permit: Permit,
    key: Key,
    want: Want,
    wire: Wire,
    pub address: SocketAddr,
    /// Whether it served another request before.
    pub reused: bool,
}

impl Upstreams {
    /// `servers` are asked for names instead of the host's own, if there are any.
    pub fn new(
        table: HashMap<Host, UpstreamRow>,
        servers: Vec<SocketAddr>,
    ) -> Result<Self, TrustError> {
        let trust = Trust::load(&table)?;
        let dialer = Dialer::new(table, trust, Resolver::new(servers));
        Ok(Self { dialer: Arc::new(dialer), pool: Pool::default() })
    }

    /// A connection for the request that `permit` allows. `fresh` asks for a new one: a request
    /// that must not be sent twice does not go on a connection that may be closing.
    pub async fn link(
        &self,
        permit: Permit,
        scheme: Scheme,
        environment: &str,
        want: Want,
        fresh: bool,
    ) -> Result<Link, UpstreamError> {
        let key = Key {
            environment: environment.to_owned(),
            scheme,
            host: permit.host().clone(),
            port: permit.port(),
            credential: permit.credential().map(|credential| credential.name.clone()),
        };
        if let Some((wire, address)) = self.kept(&key, &permit, want, fresh) {
            return Ok(Link { permit, key, want, wire, address, reused: true });
        }
        self.dial(permit, key, want).await
    }

    fn kept(
        &self,
        key: &Key,
        permit: &Permit,
        want: Want,
        fresh: bool,
    ) -> Option<(Wire, SocketAddr)> {
        let allowed = |address: SocketAddr| self.dialer.check(permit, address).is_ok();
        let shared = self.pool.shared(key, want).filter(|(_, address)| allowed(*address));
        if let Some((sender, address)) = shared {
            return Some((Wire::H2(sender), address));
        }
        let (stream, address) = self.pool.idle(key, fresh)?;
        let connection = h1::client::Connection::new(stream);
        allowed(address).then(|| (Wire::H1(Box::new(connection)), address))
    }

    async fn dial(&self, permit: Permit, key: Key, want: Want) -> Result<Link, UpstreamError> {
        let addresses = self.dialer.addresses(&permit).await?;
        let dialled = match (key.scheme, want) {
            (Scheme::Http, _) => self.dialer.plain(&permit, &addresses).await?,
            (Scheme::Https, Want::Http2) => {
                self.dialer.tls(&permit, &addresses, Alpn::Either).await?
            }
            (Scheme::Https, Want::Http1Only) => {
                self.dialer.tls(&permit, &addresses, Alpn::Http1).await?
            }
            (Scheme::Https, Want::Http1) => {
                match self.dialer.tls(&permit, &addresses, Alpn::Http1).await {
                    Err(error) if dial::is_other_protocol(&error) => {
                        self.dialer.tls(&permit, &addresses, Alpn::Http2).await?
                    }
                    other => other?,
                }
            }
        };
        let address = dialled.address;
        let wire = if dialled.speaks_h2 {
            let sender = h2::client::open(dialled.stream).await.map_err(|error| {
                let reason = h2::describe(&error);
                UpstreamError::Send { host: key.host.to_string(), reason }
            })?;
            self.pool.share(&key, sender.clone(), address, want == Want::Http1);
            Wire::H2(sender)
        } else {
            Wire::H1(Box::new(h1::client::Connection::new(dialled.stream)))
        };
        Ok(Link { permit, key, want, wire, address, reused: false })
    }

    /// Whether an address belongs to an interface of this host.
    pub fn is_own(&self, address: SocketAddr) -> bool {
        self.dialer.is_own(address.ip())
    }

    /// Tells a flow where its connection leads.
    pub fn note(&self, link: &Link, flow: &Entry) {
        flow.dialled(link.address.ip(), self.is_own(link.address));
    }

    /// The checked addresses of a tunnel's permit, dialled.
    pub async fn tunnel(
        &self,
        permit: Permit,
    ) -> Result<(tokio::net::TcpStream, SocketAddr), UpstreamError> {
        let addresses = self.dialer.addresses(&permit).await?;
        self.dialer.connect(&permit, &addresses).await
    }

    /// Replaces a kept connection that turned out to be closed, for the same request.
    pub async fn redial(&self, link: Link) -> Result<Link, UpstreamError> {
        if matches!(link.wire, Wire::H2(_)) {
            self.pool.forget(&link.key);
        }
        self.dial(link.permit, link.key, link.want).await
    }

    /// Takes a connection back after its request; keeps it if nothing is left on it.
    pub fn release(&self, link: Link) {
        if let Wire::H1(connection) = link.wire
            && let Some(stream) = connection.reusable()
        {
            self.pool.keep(link.key, stream, link.address);
        }
    }

    /// Closes what has been idle for too long, for as long as the daemon runs.
    pub async fn sweep(self) {
        loop {
            tokio::time::sleep(pool::IDLE).await;
            self.pool.sweep();
        }
    }
}

impl Link {
    /// Whether other requests use the connection too. A head that could not be sent on such a
    /// connection was not sent at all.
    pub fn shares(&self) -> bool {
        matches!(self.wire, Wire::H2(_))
    }

    /// Sends a head; gives the way for the body and the way of the answer.
    pub async fn send(
        &mut self,
        head: &RequestHead,
        framing: Framing,
        upgrade: Option<&Bytes>,
    ) -> Result<(BodyOut<'_>, Answer<'_>), UpstreamError> {
        let host = &self.key.host;
        let failed = |reason: String| UpstreamError::Send { host: host.to_string(), reason };
        match &mut self.wire {
            Wire::H1(connection) => {
                let sent = connection.send(head, framing, upgrade).await;
                let (out, awaited) = sent.map_err(|error| failed(error.to_string()))?;
                Ok((out, Answer::H1(awaited)))
            }
            Wire::H2(sender) => h2::client::send(sender.clone(), head, framing)
                .await
                .map_err(|error| failed(error.to_string())),
        }
    }
}
