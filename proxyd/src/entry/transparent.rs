//! Connections from a sandbox. Every address is local to it, and the address that a connection
//! was made to says what it is for: one of the lease's names, or a literal.
//!
//! The listener tells whose sandbox it is; no word of the client's does.

mod opaque;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ipc::id::RequestId;
use policies::{ConnectDecision, Host, Scheme};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::ports::{self, First};
use super::{ACCEPT_PAUSE, authority, http, unless};
use crate::audit::Line;
use crate::lease::Lease;
use crate::lease::names::Destination;
use crate::lease::places::Seat;
use crate::lease::share::Exhausted;
use crate::relay::h1::wire::End;
use crate::relay::stream::Stream;
use crate::reply::Refusal;
use crate::request::{self, Scene, Standing};
use crate::sys::interfaces::{self, reset_on_close};
use crate::tls::hello;
use crate::tls::intercept::{self, InterceptError, Intercepted};
use crate::{Daemon, dns};

const DNS_PORT: u16 = 53;
/// How long a client may take to say what it speaks, where that matters.
const FIRST_BYTE: Duration = Duration::from_secs(10);
/// The same on a connection that is refused anyway, where its port says that it is for HTTP or TLS:
/// long enough for any client that speaks first.
const FIRST_BYTE_REFUSED: Duration = Duration::from_secs(3);
/// The same at every other port: whoever waits for the server's first word waits no longer.
const FIRST_BYTE_UNKNOWN: Duration = Duration::from_secs(1);

/// How long a client is told that there is no room for its connection.
const TURNED_AWAY: Duration = Duration::from_secs(5);

/// What to do about a client that does not trust proxyd.
const UNTRUSTED_HINT: &str = "have it use the bundle that SSL_CERT_FILE names, or list the host in \
    a rule of hosts and ports only, which is passed on unread";

/// What a client sends first that speaks HTTP/2 without having asked (RFC 9113 section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Takes over a listening socket of a sandbox.
pub fn listener(socket: OwnedFd) -> std::io::Result<TcpListener> {
    if !interfaces::listens_for_tcp(&socket)? {
        return Err(std::io::Error::other("it is no listening TCP socket"));
    }
    let listener = std::net::TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Accepts connections until the lease ends.
pub async fn serve(daemon: Arc<Daemon>, lease: Arc<Lease>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let place = lease.room.place(&lease.end, true).await;
                let (serving, lease) = (Arc::clone(&daemon), Arc::clone(&lease));
                match place {
                    Ok(place) => {
                        daemon.shards.serve(&daemon.tasks, stream, move |stream| async move {
                            let seat = Arc::clone(place.seat());
                            let connection = connection(serving, lease, stream, seat, None);
                            unless(&place.seat().end, Box::pin(connection)).await;
                        });
                    }
                    Err(error) => turn_away(serving, lease, stream, error),
                }
            }
            Err(error) => {
                tracing::warn!(lease = %lease.id, %error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Tells a client that there is no room for its connection, where there is room for that.
fn turn_away(daemon: Arc<Daemon>, lease: Arc<Lease>, stream: TcpStream, error: Exhausted) {
    let room = lease.refusals.take(1).ok();
    let serving = Arc::clone(&daemon);
    daemon.shards.serve(&daemon.tasks, stream, move |stream| async move {
        if room.is_none() {
            reset_on_close(&stream);
        }
        let patience = if room.is_some() { TURNED_AWAY } else { Duration::ZERO };
        let seat = Arc::new(Seat::new(lease.end.child_token()));
        let telling = connection(serving, lease, stream, seat, Some(error.into()));
        // Whoever does not listen to the end is cut off.
        let _ = timeout(patience, Box::pin(telling)).await;
        drop(room);
    });
}

async fn connection(
    daemon: Arc<Daemon>,
    lease: Arc<Lease>,
    stream: TcpStream,
    seat: Arc<Seat>,
    refusal: Option<Refusal>,
) {
    let Ok(wanted) = stream.local_addr() else { return };
    // Relayed pieces are whole messages already; a socket without the option still works.
    let _ = stream.set_nodelay(true);
    if wanted.port() == DNS_PORT && refusal.is_none() {
        if let Err(error) = dns::serve::tcp(&daemon, &lease, Stream::new(stream)).await {
            tracing::debug!(lease = %lease.id, %error, "lookup broke off");
        }
        return;
    }
    let target = match lease.names.destination(wanted.ip()) {
        Destination::Named(host) | Destination::Literal(host) => {
            Target { daemon, lease, host, port: wanted.port(), seat }
        }
        Destination::Unbound => {
            let host = Host::from_ip(wanted.ip());
            let target = Target { daemon, lease, host, port: wanted.port(), seat };
            let reason = "this address stands for no name: look the name up again";
            let refusal = Refusal::denied(403, "address_unbound", reason);
            target.record(&RequestId::random(), &refusal).await;
            return reset(stream);
        }
    };
    match refusal {
        None => enter(target, Incoming::Tcp(stream)).await,
        Some(refusal) => deny(&target, Incoming::Tcp(stream), refusal).await,
    }
}

/// A connection before anything of it was read.
pub enum Incoming {
    /// From a sandbox: one that is refused unread is reset.
    Tcp(TcpStream),
    /// From a CONNECT.
    Tunnel(Stream),
}

impl Incoming {
    /// The first byte the client sends, left in place; none when it stays silent or ends.
    async fn first_byte(&mut self, patience: Duration) -> Option<u8> {
        let mut byte = [0u8; 1];
        match self {
            Self::Tcp(stream) => match timeout(patience, stream.peek(&mut byte)).await {
                Ok(Ok(1)) => Some(byte[0]),
                _ => None,
            },
            Self::Tunnel(stream) => match timeout(patience, stream.peek()).await {
                Ok(Ok(bytes)) => bytes.first().copied(),
                _ => None,
            },
        }
    }

    /// How the client has ended, as far as that can be told while nothing is read.
    fn end(&mut self) -> Option<End> {
        let (hung_up, has_ended) = match self {
            Self::Tcp(stream) => (interfaces::hung_up(&*stream), interfaces::has_ended(&*stream)),
            Self::Tunnel(stream) => (stream.hung_up(), stream.has_ended()),
        };
        match (hung_up, has_ended) {
            (true, _) => Some(End::Closed),
            // It may wait for the server's word.
            (false, true) => Some(End::Half),
            (false, false) => None,
        }
    }

    fn into_stream(self) -> Stream {
        match self {
            Self::Tcp(stream) => Stream::new(stream),
            Self::Tunnel(stream) => stream,
        }
    }

    /// Has the connection reset when it is dropped, or ended in order again.
    fn reset_on_close(&self, resets: bool) {
        match (self, resets) {
            (Self::Tcp(stream), true) => interfaces::reset_on_close(stream),
            (Self::Tcp(stream), false) => interfaces::close_in_order(stream),
            (Self::Tunnel(stream), true) => stream.reset_on_close(),
            (Self::Tunnel(stream), false) => stream.close_in_order(),
        }
    }

    fn reset(self) {
        self.reset_on_close(true);
    }
}

/// Ends a connection so that its client sees at once that it was refused.
fn reset(stream: TcpStream) {
    reset_on_close(&stream);
}

/// Whom a connection is for.
pub struct Target {
    pub daemon: Arc<Daemon>,
    pub lease: Arc<Lease>,
    pub host: Host,
    pub port: u16,
    pub seat: Arc<Seat>,
}

impl Target {
    fn line(&self, id: &RequestId, entry: &str) -> Line {
        Line {
            request: Some(id.clone()),
            entry: Some(entry.to_owned()),
            host: Some(self.host.to_string()),
            port: Some(self.port),
            generation: self.daemon.policies.current().number,
            ..self.lease.line()
        }
    }

    async fn record(&self, id: &RequestId, refusal: &Refusal) {
        request::record_denied(&self.daemon, self.line(id, "connect"), refusal).await;
    }

    /// The refusal of all that comes on the connection.
    fn standing(&self, refusal: Refusal) -> Arc<Standing> {
        let line = self.line(&RequestId::random(), "connect");
        Standing::denied(&self.daemon, line, refusal)
    }

    fn scene(&self, scheme: Scheme, standing: Option<Arc<Standing>>) -> Scene {
        Scene {
            daemon: Arc::clone(&self.daemon),
            lease: Arc::clone(&self.lease),
            scheme,
            host: self.host.clone(),
            port: self.port,
            seat: Arc::clone(&self.seat),
            standing,
        }
    }
}

/// Decides by name and port what becomes of a connection. Each step that needs much for a moment is
/// in a box: a task is as large as the largest state that it can be in, and once more for each
/// layer around it, for as long as the connection lasts.
pub async fn enter(target: Target, incoming: Incoming) {
    let Some((policy, generation)) = target.lease.policy(&target.daemon.policies.current()) else {
        return deny(&target, incoming, request::environment_gone()).await;
    };
    match policy.at_connect(&target.host, target.port) {
        ConnectDecision::Deny(denial) => {
            Box::pin(deny(&target, incoming, denial.into())).await;
        }
        ConnectDecision::Tunnel(permit) => {
            Box::pin(opaque::pass(&target, incoming, (permit, generation))).await;
        }
        ConnectDecision::Inspect => inspect(&target, incoming).await,
    }
}

/// Refuses a connection and what comes on it.
async fn deny(target: &Target, incoming: Incoming, refusal: Refusal) {
    explain(target, incoming, target.standing(refusal)).await;
}

/// Tells a client why its connection leads nowhere, where its protocol has room for words.
async fn explain(target: &Target, mut incoming: Incoming, standing: Arc<Standing>) {
    // Its record is made before the client can see the end.
    let unheard = |incoming: Incoming, standing| {
        drop(standing);
        incoming.reset();
    };
    let patience = match ports::who_speaks_first(target.port) {
        First::Server => return unheard(incoming, standing),
        First::Client => FIRST_BYTE_REFUSED,
        First::Unknown => FIRST_BYTE_UNKNOWN,
    };
    match incoming.first_byte(patience).await {
        Some(hello::FIRST_BYTE) => {
            // A client that does not trust us learns nothing more.
            let accepting = accept_tls(target, incoming.into_stream(), Some(standing));
            if let Ok(accepted) = Box::pin(accepting).await {
                serve_tls(target, accepted).await;
            }
        }
        Some(byte) if byte.is_ascii_uppercase() => {
            let scene = target.scene(Scheme::Http, Some(standing));
            Box::pin(plain(&scene, incoming.into_stream())).await;
        }
        _ => unheard(incoming, standing),
    }
}

/// Reads requests where a rule needs to see them.
async fn inspect(target: &Target, mut incoming: Incoming) {
    if target.port != authority::default_port(Scheme::Http) {
        // Its certificate is issued while the client's hello is on its way.
        target.daemon.leaves.prefetch(target.lease.names.authority(), &target.host);
    }
    match incoming.first_byte(FIRST_BYTE).await {
        Some(hello::FIRST_BYTE) => {
            let opening = target.lease.notes.opening();
            match Box::pin(accept_tls(target, incoming.into_stream(), None)).await {
                Ok(accepted) => {
                    drop(opening);
                    serve_tls(target, accepted).await;
                }
                Err(refusal) => target.record(&RequestId::random(), &refusal).await,
            }
        }
        Some(byte) if byte.is_ascii_uppercase() => {
            let scene = target.scene(Scheme::Http, None);
            Box::pin(plain(&scene, incoming.into_stream())).await;
        }
        first => {
            let said = if first.is_some() { "something else" } else { "nothing" };
            let authority = target.host.authority(target.port);
            let reason = format!(
                "the rules for {authority} read requests, and the client spoke {said} \
                 instead of HTTP or TLS"
            );
            target.record(&RequestId::random(), &Refusal::denied(403, "not_http", reason)).await;
            incoming.reset();
        }
    }
}

/// Serves what needs no TLS, in the version that the client begins with.
async fn plain(scene: &Scene, mut stream: Stream) {
    match timeout(FIRST_BYTE, stream.begins_with(HTTP2_PREFACE)).await {
        Ok(true) => http::serve_h2(scene, stream).await,
        Ok(false) => http::serve_h1(scene, stream).await,
        Err(_) => {}
    }
}

/// A connection whose TLS ended here, and why all its requests are refused, if they are.
type Accepted = (Intercepted, Option<Arc<Standing>>);

/// Ends the client's TLS. A name in the hello that is not the verified one is answered in its own
/// name, with a refusal.
async fn accept_tls(
    target: &Target,
    stream: Stream,
    standing: Option<Arc<Standing>>,
) -> Result<Accepted, Refusal> {
    let failed = |reason: String| Refusal::denied(403, "tls_client", reason);
    let hello = hello::read(stream).await.map_err(|error| failed(error.to_string()))?;
    let named = match hello.server_name.as_deref().map(Host::parse) {
        Some(Ok(named)) => named,
        Some(Err(error)) => return Err(failed(format!("the server name in the hello: {error}"))),
        // Nothing in the hello contradicts the name that the address stands for.
        None => target.host.clone(),
    };
    let standing = match standing {
        None if named != target.host => Some(refuse_name(target, &named)),
        other => other,
    };
    let authority = target.lease.names.authority();
    match intercept::accept(&target.daemon.leaves, authority, hello, &named).await {
        Ok(intercepted) => Ok((intercepted, standing)),
        Err(error @ InterceptError::Untrusted(_)) => {
            let refusal = Refusal::denied(403, "tls_untrusted", error.to_string());
            Err(refusal.with_hint(UNTRUSTED_HINT))
        }
        Err(error @ InterceptError::BrokenOff) => {
            Err(failed(error.to_string()).with_hint(UNTRUSTED_HINT))
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Serves what is inside.
async fn serve_tls(target: &Target, (intercepted, standing): Accepted) {
    let scene = target.scene(Scheme::Https, standing);
    // In boxes, see `enter`.
    if intercepted.speaks_h2 {
        Box::pin(http::serve_h2(&scene, intercepted.stream)).await;
    } else {
        Box::pin(http::serve_h1(&scene, intercepted.stream)).await;
    }
}

fn refuse_name(target: &Target, named: &Host) -> Arc<Standing> {
    let verified = target.host.authority(target.port);
    let reason = format!("the client hello names {named} on a connection to {verified}");
    target.standing(Refusal::denied(421, "server_name_mismatch", reason))
}
