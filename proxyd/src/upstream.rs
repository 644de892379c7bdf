//! Whom a permitted request reaches: resolves once, checks the address, dials it, verifies TLS.
//!
//! [`Upstreams::link`] takes the permit and keeps it: one permit, one request. The name that is
//! verified is always the permit's; the operator's table may change where to dial and whose CA to
//! trust, never that. Idle connections are kept per owner, environment, host and credential, and an
//! address is judged by the permit again before a kept connection is used.

mod alert;
pub mod dial;
pub mod elsewhere;
mod error;
mod eyeballs;
mod identities;
pub mod outbound;
pub mod pool;
mod resolve;
pub mod shared;
mod telling;
pub mod trust;
mod via;
pub mod way;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use policies::{Permit, Scheme};

use crate::config::WayOut;
use crate::head::RequestHead;
use crate::lease::flow::Entry;
use crate::lease::share::Share;
use crate::relay::answer::Answer;
use crate::relay::body::BodyOut;
use crate::relay::h1::framing::Framing;
use crate::relay::{h1, h2};
use crate::vault::{Shown, Vault};
use dial::{Dialer, Endpoint, Raw};
pub use error::UpstreamError;
use pool::{Key, Pool};
use resolve::Resolver;
use shared::{Group, Load, Seat, Shared};
use trust::{Alpn, TrustError};
use way::{Opening, Way, Ways};

/// The way out, shared by all requests.
#[derive(Clone)]
pub struct Upstreams {
    dialer: Arc<Dialer>,
    pool: Pool,
    shared: Shared,
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

/// How a request is to be tried once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// The upstream refused one stream; its connection may take another.
    Refused,
    /// The connection is of no use any more.
    Elsewhere,
    /// The upstream wants HTTP/1.1 for this request.
    Http1,
}

/// On whose behalf connections are opened, and of whose shares.
pub struct Behalf {
    /// Owner and environment, which use each other's connections.
    pub tenant: Arc<str>,
    pub windows: Share,
    pub lasting: Share,
}

impl Behalf {
    /// What an HTTP/2 connection takes. One that has no place among those that outlast their
    /// requests serves one request, as a part of what that has.
    fn room(&self) -> h2::client::Room {
        h2::client::Room { windows: self.windows.clone(), lasting: self.lasting.take(1).ok() }
    }
}

enum Wire {
    H1(Box<h1::client::Connection>),
    H2(Seat),
}

/// A connection for one request, with the permit for that request.
pub struct Link {
    permit: Permit,
    key: Key,
    want: Want,
    behalf: Arc<Behalf>,
    wire: Wire,
    pub address: Endpoint,
    dialer: Arc<Dialer>,
    /// Whether it served another request before.
    pub reused: bool,
}

impl Upstreams {
    /// `servers` are asked for names instead of the host's own, if there are any.
    pub fn new(ways: Ways, servers: Vec<SocketAddr>, vault: Vault) -> Self {
        let dialer = Dialer::new(ways, Resolver::new(servers), vault);
        Self { dialer: Arc::new(dialer), pool: Pool::default(), shared: Shared::default() }
    }

    /// Reads the operator's table and all files that it names again. New connections go by it;
    /// those to hosts whose way has changed serve no further request. On an error nothing changes.
    pub fn reload(&self, config: &WayOut) -> Result<(), TrustError> {
        let ways = Ways::load(config, Some(&self.dialer.ways()))?;
        self.dialer.replace(ways);
        Ok(())
    }

    /// A connection for the request that `permit` allows, opened with `shown`. `fresh` asks for a
    /// new one: a request that must not be sent twice does not go on a connection that may be
    /// closing.
    pub async fn link(
        &self,
        (permit, shown): (Permit, Option<Arc<Shown>>),
        scheme: Scheme,
        behalf: &Arc<Behalf>,
        want: Want,
        fresh: bool,
    ) -> Result<Link, UpstreamError> {
        // Nothing goes without what its rule gives it.
        let given = permit.certificate().map(|certificate| &certificate.name);
        if given != shown.as_ref().map(|shown| &shown.credential) {
            let reason = "its connection is not the one that its rule asks for".to_owned();
            return Err(UpstreamError::Send { host: permit.host().to_string(), reason });
        }
        let key = Key {
            shard: crate::shards::here(),
            tenant: Arc::clone(&behalf.tenant),
            way: self.dialer.ways().of(permit.host()),
            scheme,
            host: permit.host().clone(),
            port: permit.port(),
            credential: permit.credential().map(|credential| credential.name.clone()),
            shown,
        };
        if let Some((wire, address)) = self.kept(&key, &permit, want, fresh) {
            return Ok(self.made(permit, key, want, behalf, (wire, address), true));
        }
        self.dial(permit, key, want, behalf).await
    }

    fn kept(
        &self,
        key: &Key,
        permit: &Permit,
        want: Want,
        fresh: bool,
    ) -> Option<(Wire, Endpoint)> {
        let allowed = |address: &Endpoint| self.dialer.check_kept(permit, address);
        if let Some(seat) = self.shared.seat(key, want, allowed) {
            let address = seat.address.clone();
            return Some((Wire::H2(seat), address));
        }
        let (connection, address) = self.pool.idle(key, fresh)?;
        allowed(&address).then_some((Wire::H1(connection), address))
    }

    /// A connection that was not there before, or the one that somebody else is just opening.
    async fn dial(
        &self,
        permit: Permit,
        key: Key,
        want: Want,
        behalf: &Arc<Behalf>,
    ) -> Result<Link, UpstreamError> {
        let group = self.shared.group(&key);
        // HTTP/1.1 connections serve one request at a time: nobody waits for another's.
        if want != Want::Http2 || group.prefers_http1() {
            let opened = self.open(&permit, &key, want, &group, behalf, ()).await?;
            return Ok(self.made(permit, key, want, behalf, opened, false));
        }
        let awaited = group.attempt();
        let (turn, waited) = match Arc::clone(&group.opening).try_lock_owned() {
            Ok(turn) => (turn, false),
            Err(_) => (Arc::clone(&group.opening).lock_owned().await, true),
        };
        let allowed = |address: &Endpoint| self.dialer.check_kept(&permit, address);
        if let Some(seat) = group.seat(want, allowed) {
            let address = seat.address.clone();
            return Ok(self.made(permit, key, want, behalf, (Wire::H2(seat), address), true));
        }
        if let Some(error) = group.failure_since(awaited).filter(|_| waited) {
            return Err(error);
        }
        if group.prefers_http1() {
            drop(turn);
            let opened = self.open(&permit, &key, want, &group, behalf, ()).await?;
            return Ok(self.made(permit, key, want, behalf, opened, false));
        }
        let attempt = group.begin();
        let opened = self.open(&permit, &key, want, &group, behalf, turn).await;
        let opened = opened.inspect_err(|error| group.failed(attempt, error))?;
        Ok(self.made(permit, key, want, behalf, opened, false))
    }

    fn made(
        &self,
        permit: Permit,
        key: Key,
        want: Want,
        behalf: &Arc<Behalf>,
        (wire, address): (Wire, Endpoint),
        reused: bool,
    ) -> Link {
        let behalf = Arc::clone(behalf);
        Link { permit, key, want, behalf, wire, address, dialer: self.dialer(), reused }
    }

    async fn open(
        &self,
        permit: &Permit,
        key: &Key,
        want: Want,
        group: &Group,
        behalf: &Behalf,
        turn: impl Send + 'static,
    ) -> Result<(Wire, Endpoint), UpstreamError> {
        let addresses = self.dialer.addresses(permit, &key.way).await?;
        let _opening = self.make_room(&key.way);
        let tls = |alpn| self.dialer.tls(permit, &addresses, alpn, key.shown.as_ref());
        let dialled = match (key.scheme, want) {
            (Scheme::Http, _) => self.dialer.plain(permit, &addresses).await?,
            (Scheme::Https, Want::Http2) => tls(Alpn::Either).await?,
            (Scheme::Https, Want::Http1Only) => {
                self.dialer.upgradable(permit, &key.way)?;
                tls(Alpn::Http1).await?
            }
            (Scheme::Https, Want::Http1) => match tls(Alpn::Http1).await {
                Err(error) if dial::is_other_protocol(&error) => tls(Alpn::Http2).await?,
                other => other?,
            },
        };
        let address = dialled.address;
        // Over plain HTTP a client that speaks HTTP/2 knows that its server does (RFC 9113,
        // section 3.3); there is nothing to negotiate.
        let through = key.way.absolute(key.scheme, &key.host).is_some();
        let speaks_h2 =
            dialled.speaks_h2 || key.scheme == Scheme::Http && want == Want::Http2 && !through;
        if !speaks_h2 {
            if want == Want::Http2 {
                group.found_http1();
            }
            let connection = h1::client::Connection::new(dialled.stream);
            return Ok((Wire::H1(Box::new(connection)), address));
        }
        let load = Load::default();
        let room = behalf.room();
        let lasts = room.lasting.is_some();
        let opened = h2::client::open(dialled.stream, load.clone(), turn, room).await;
        let sender = opened.map_err(|error| {
            let reason = h2::describe(&error);
            UpstreamError::Send { host: key.host.to_string(), reason }
        })?;
        let seat = group.keep(sender, address.clone(), load, want == Want::Http1, lasts);
        Ok((Wire::H2(seat), address))
    }

    /// Whether an address belongs to an interface of this host.
    pub fn is_own(&self, address: SocketAddr) -> bool {
        self.dialer.is_own(address.ip())
    }

    /// Lets idle connections to the host go, where one more is to be opened than there may be.
    fn make_room<'a>(&self, way: &'a Way) -> Opening<'a> {
        let opening = way.opening();
        if way.is_full() {
            self.pool.evict(way);
        }
        opening
    }

    fn dialer(&self) -> Arc<Dialer> {
        Arc::clone(&self.dialer)
    }

    /// Tells a flow where its connection leads.
    pub fn note(&self, link: &Link, flow: &Entry) {
        if let Some(address) = link.address.reached {
            // Its address was judged a moment ago. Of this host's own ones only those that a rule
            // names are passed: where there are none, the kernel need not be asked again.
            let permit = link.permit();
            let named = !permit.addresses().is_empty() || permit.host().ip().is_some();
            flow.dialled(address.ip(), named && self.is_own(address));
        }
    }

    /// A connection for a tunnel's permit.
    pub async fn tunnel(&self, permit: Permit) -> Result<Raw, UpstreamError> {
        let way = self.dialer.ways().of(permit.host());
        let route = self.dialer.addresses(&permit, &way).await?;
        let _opening = self.make_room(&way);
        self.dialer.raw(&permit, &route).await
    }

    /// Another connection for a request that its first one did not carry out. Unless only this
    /// one stream was refused, the former connection is offered to nobody any more.
    pub async fn redial(&self, link: Link, retry: Retry) -> Result<Link, UpstreamError> {
        let Link { permit, key, want, behalf, wire, .. } = link;
        if let Wire::H2(seat) = &wire
            && retry == Retry::Elsewhere
        {
            self.shared.forget(&key, seat);
        }
        drop(wire);
        if retry == Retry::Http1 {
            return self.dial(permit, key, Want::Http1Only, &behalf).await;
        }
        let allowed = |address: &Endpoint| self.dialer.check_kept(&permit, address);
        if let Some(seat) = self.shared.seat(&key, want, allowed) {
            let address = seat.address.clone();
            let made = (Wire::H2(seat), address);
            return Ok(self.made(permit, key, want, &behalf, made, true));
        }
        self.dial(permit, key, want, &behalf).await
    }

    /// Takes a connection back after its request; keeps it if nothing is left on it.
    pub fn release(&self, link: Link) {
        if let Wire::H1(mut connection) = link.wire
            && connection.is_reusable()
        {
            self.pool.keep(link.key, connection, link.address);
        }
    }

    /// Closes what has been idle for too long, for as long as the daemon runs.
    pub async fn sweep(self) {
        loop {
            tokio::time::sleep(pool::IDLE).await;
            self.pool.sweep();
            self.shared.sweep();
        }
    }
}

impl Link {
    /// What the connection is for.
    pub fn permit(&self) -> &Permit {
        &self.permit
    }

    /// What the failure of an exchange on it means, where it tells about certificates.
    pub fn told(&self, failure: &str) -> Option<UpstreamError> {
        let whose = self.key.way.shows(self.key.shown.as_ref());
        let connection = match &self.wire {
            Wire::H2(seat) => seat.failure(),
            Wire::H1(_) => None,
        };
        let mut texts = std::iter::once(failure).chain(connection);
        texts.find_map(|text| alert::told(text, &self.permit, whose.as_deref()))
    }

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
                let absolute = match self.key.way.absolute(self.key.scheme, host) {
                    Some(proxy) => Some(proxy.absolute(head, &self.key, &self.dialer).await?),
                    None => None,
                };
                let through = absolute.is_some();
                let head = absolute.as_ref().unwrap_or(head);
                let sent = connection.send(head, framing, upgrade).await;
                let (out, mut awaited) = sent.map_err(|error| failed(error.to_string()))?;
                awaited.from_proxy = through;
                Ok((out, Answer::H1(awaited)))
            }
            Wire::H2(seat) => match h2::client::send(seat.sender.clone(), head, framing).await {
                Err(h2::client::SendError::Full) => {
                    let seconds = h2::client::TURN.as_secs();
                    Err(UpstreamError::Full { host: host.to_string(), seconds })
                }
                sent => sent.map_err(|error| failed(error.to_string())),
            },
        }
    }
}
