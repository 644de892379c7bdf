//! An HTTP proxy for what is not a sandbox of ours: on `proxyd-egress.sock`, and on the sockets
//! that holders of leases hand over for their own clients.
//!
//! The lease's token comes in `Proxy-Authorization`, as Bearer or as the password of Basic. On a
//! socket of one lease no other lease's token counts; on a Unix socket of one lease the kernel says
//! whether the client is its owner, and then no header matters. CONNECT leads into the same path as
//! a sandbox's connection. A target in absolute form is one request; with `https://` proxyd makes
//! the TLS itself, which is how harnessd calls models: the socket is as private as its directory.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use ipc::id::RequestId;
use ipc::peer::Principal;
use policies::Host;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::http::{self, After};
use super::transparent::{self, Target};
use super::{ACCEPT_PAUSE, authority, unless};
use crate::Daemon;
use crate::audit::Line;
use crate::head::RequestHead;
use crate::lease::Lease;
use crate::lease::places::{Place, Seat};
use crate::lease::share::Exhausted;
use crate::relay::h1::framing::Framing;
use crate::relay::h1::server::{Connection, Incoming, NextError};
use crate::relay::responder::Responder;
use crate::relay::stream::{Io, Stream};
use crate::reply::form::Form;
use crate::reply::{self, Refusal};
use crate::request::{self, Scene};
use crate::shards::Portable;
use crate::sys::interfaces;

/// How long a client may take to the end of its first head, by which it says whose it is.
const FIRST_HEAD: Duration = Duration::from_secs(10);
/// How long a client is told that there is no room for its connection.
const TURNED_AWAY: Duration = Duration::from_secs(5);

/// Accepts clients until `stop`. Until its first head says which lease it is under, a connection
/// has a place among those of its user; nobody waits behind connections that say nothing.
pub async fn serve(daemon: Arc<Daemon>, listener: UnixListener, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, uid) = match accepted.and_then(|(stream, _)| {
            let uid = Principal::of(&stream)?.uid;
            Ok((stream, uid))
        }) {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept on the egress socket");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let room = daemon.leases.shares.stranger(uid);
        // All that hold a place are closed sooner or later; whoever finds none is closed now.
        let Ok(place) = room.place(&daemon.ending, false).await else { continue };
        let serving = Arc::clone(&daemon);
        daemon.shards.serve(&daemon.tasks, stream, move |stream| {
            connection(serving, Stream::new(stream), Known::Nothing, place)
        });
    }
}

/// A socket of one lease, for its clients.
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Takes over a listening socket. TCP is for this host alone, unless the operator's list has
    /// the address.
    pub fn take(socket: OwnedFd, addresses: &[IpAddr]) -> std::io::Result<Self> {
        if interfaces::listens_on_unix(&socket)? {
            let listener = std::os::unix::net::UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            return UnixListener::from_std(listener).map(Self::Unix);
        }
        let listener = transparent::listener(socket)?;
        let ip = listener.local_addr()?.ip();
        if !ip.is_loopback() && !addresses.contains(&ip) {
            return Err(std::io::Error::other(format!(
                "{ip} is not this host's loopback, and lease-addresses in proxyd.toml does not \
                 list it"
            )));
        }
        Ok(Self::Tcp(listener))
    }

    /// Where clients find it.
    pub fn place(&self) -> String {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| "unknown".to_owned(), |a| a.to_string())
            }
            Self::Unix(listener) => {
                let address = listener.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or_else(|| "unix".to_owned(), |path| format!("unix:{}", path.display()))
            }
        }
    }

    /// The next client, and what is known of it without a word of its own.
    async fn accept(&self, lease: &Arc<Lease>) -> std::io::Result<(Socket, Known)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Relayed pieces are whole messages already; without the option it works too.
                let _ = stream.set_nodelay(true);
                Ok((Socket::Tcp(stream), Known::Of(Arc::clone(lease))))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let uid = Principal::of(&stream)?.uid;
                let own = uid == 0 || lease.owner_uid() == Some(uid);
                let known = if own { Known::Owner } else { Known::Of };
                Ok((Socket::Unix(stream), known(Arc::clone(lease))))
            }
        }
    }
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// What is known of a client before its first request.
enum Known {
    Nothing,
    /// It came in by a socket of this lease; its token must be this lease's.
    Of(Arc<Lease>),
    /// It is the lease's owner.
    Owner(Arc<Lease>),
}

/// Accepts clients of one lease until it ends.
pub async fn serve_lease(daemon: Arc<Daemon>, lease: Arc<Lease>, listener: Listener) {
    loop {
        let (socket, known) = match listener.accept(&lease).await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(lease = %lease.id, %error, "cannot accept a client");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let place = lease.room.place(&lease.end, true).await;
        match socket {
            Socket::Tcp(stream) => begin(&daemon, &lease, stream, known, place),
            Socket::Unix(stream) => begin(&daemon, &lease, stream, known, place),
        }
    }
}

/// Serves a client that has a place, and tells one that has none, where there is room for that.
fn begin<S: Portable + Io>(
    daemon: &Arc<Daemon>,
    lease: &Arc<Lease>,
    stream: S,
    known: Known,
    place: Result<Place, Exhausted>,
) {
    let (serving, lease) = (Arc::clone(daemon), Arc::clone(lease));
    match place {
        Ok(place) => daemon.shards.serve(&daemon.tasks, stream, move |stream| {
            connection(serving, Stream::new(stream), known, place)
        }),
        Err(error) => {
            let Ok(room) = lease.refusals.take(1) else { return };
            daemon.shards.serve(&daemon.tasks, stream, move |stream| async move {
                let mut connection = Connection::new(Stream::new(stream));
                let telling = async {
                    if connection.next().await.is_ok() {
                        let refusal = error.into();
                        refuse_known(&serving, &lease, &mut connection, &refusal).await;
                    }
                    connection.close().await;
                };
                // Whoever does not listen to the end is cut off.
                let _ = timeout(TURNED_AWAY, telling).await;
                drop(room);
            });
        }
    }
}

/// A client's connection. What holds its place may have it go while nothing is under way.
async fn connection(daemon: Arc<Daemon>, stream: Stream, known: Known, mut place: Place) {
    let mut connection = Connection::new(stream);
    let mut first = true;
    loop {
        let end = place.seat().end.clone();
        let next = unless(&end, async {
            match first {
                true => timeout(FIRST_HEAD, connection.next()).await.ok(),
                false => Some(connection.next().await),
            }
        });
        let Some(Some(next)) = next.await else { return };
        let incoming = match next {
            Ok(incoming) => incoming,
            Err(error) => {
                refuse_head(&daemon, &known, &mut connection, &error).await;
                return connection.close().await;
            }
        };
        first = false;
        let lease = match lease(&daemon, &known, incoming.proxy_authorization.as_ref()) {
            Ok(lease) => lease,
            Err(refusal) => {
                refuse(&mut connection, &refusal, &RequestId::random()).await;
                return connection.close().await;
            }
        };
        if !place.is_in(&lease.room) {
            // From here on the connection is that lease's.
            place = match lease.room.place(&lease.end, false).await {
                Ok(place) => place,
                Err(error) => {
                    refuse_known(&daemon, &lease, &mut connection, &error.into()).await;
                    return connection.close().await;
                }
            };
        }
        let seat = Arc::clone(place.seat());
        let end = seat.end.clone();
        if incoming.raw.method == "CONNECT" {
            let wanted = wanted(&incoming);
            // It keeps the buffer that it was read into, for as long as the tunnel lasts.
            drop(incoming);
            let tunnelling = Box::pin(connect(daemon, lease, connection, wanted, seat));
            unless(&end, tunnelling).await;
            return;
        }
        let Some(_working) = seat.works() else { return };
        let passing = Box::pin(forward(&daemon, lease, &mut connection, incoming, &seat));
        match unless(&end, passing).await {
            Some(After::Next) => {}
            Some(After::Close) => return connection.close().await,
            Some(After::Broken) => return,
            Some(After::Cut) | None => return connection.reset(),
        }
    }
}

/// The lease that the request is under: the client's by the kernel's word, or its token's.
fn lease(
    daemon: &Daemon,
    known: &Known,
    authorization: Option<&Bytes>,
) -> Result<Arc<Lease>, Refusal> {
    let refused = |reason: &str| {
        Refusal::denied(407, "lease_token", reason).with_hint(
            "`cleanhands lease open ENVIRONMENT` opens a lease and prints the proxy's address with \
             its token",
        )
    };
    let of = match known {
        Known::Owner(lease) => return Ok(Arc::clone(lease)),
        Known::Of(lease) => Some(lease),
        Known::Nothing => None,
    };
    let value = authorization.ok_or_else(|| refused("no Proxy-Authorization"))?;
    let token = token(value).ok_or_else(|| refused("Proxy-Authorization holds no token"))?;
    let lease = daemon.leases.by_token(&token);
    let lease = lease.ok_or_else(|| refused("no open lease has this token"))?;
    if of.is_some_and(|of| !Arc::ptr_eq(of, &lease)) {
        return Err(refused("the token is of another lease than this socket"));
    }
    Ok(lease)
}

/// `Bearer TOKEN`, or `Basic base64(anything:TOKEN)` for clients that know nothing else.
fn token(value: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(value).ok()?;
    let (scheme, rest) = text.split_once(' ')?;
    let rest = rest.trim();
    match scheme.to_ascii_lowercase().as_str() {
        "bearer" => Some(rest.to_owned()),
        "basic" => {
            let decoded = String::from_utf8(STANDARD.decode(rest).ok()?).ok()?;
            decoded.split_once(':').map(|(_, password)| password.to_owned())
        }
        _ => None,
    }
}

/// Whom a CONNECT is for.
fn wanted(incoming: &Incoming) -> Result<(Host, u16), &'static str> {
    let text = String::from_utf8_lossy(&incoming.raw.target);
    match authority::parse(&text) {
        Some((host, Some(port))) if incoming.framing == Framing::None => Ok((host, port)),
        Some((_, Some(_))) => Err("CONNECT has no body"),
        _ => Err("CONNECT needs host:port"),
    }
}

/// CONNECT: accepted, and then judged like a sandbox's connection, so that a denial can be read
/// by the client inside.
async fn connect(
    daemon: Arc<Daemon>,
    lease: Arc<Lease>,
    mut connection: Connection,
    wanted: Result<(Host, u16), &'static str>,
    seat: Arc<Seat>,
) {
    let (host, port) = match wanted {
        Ok(wanted) => wanted,
        Err(reason) => {
            let refusal = Refusal::denied(400, "request_malformed", reason);
            refuse_known(&daemon, &lease, &mut connection, &refusal).await;
            return connection.close().await;
        }
    };
    let Ok(stream) = connection.tunnel().await else { return };
    let target = Target { daemon, lease, host, port, seat };
    transparent::enter(target, transparent::Incoming::Tunnel(stream)).await;
}

/// One request in absolute form.
async fn forward(
    daemon: &Arc<Daemon>,
    lease: Arc<Lease>,
    connection: &mut Connection,
    incoming: Incoming,
    seat: &Arc<Seat>,
) -> After {
    match locate(daemon, Arc::clone(&lease), &incoming, seat) {
        Ok((scene, head)) => http::pass(&scene, connection, incoming, head).await,
        Err(refusal) => {
            refuse_known(daemon, &lease, connection, &refusal).await;
            After::Close
        }
    }
}

fn locate(
    daemon: &Arc<Daemon>,
    lease: Arc<Lease>,
    incoming: &Incoming,
    seat: &Arc<Seat>,
) -> Result<(Scene, RequestHead), Refusal> {
    let malformed = |reason: &str| Refusal::denied(400, "request_malformed", reason);
    let raw = &incoming.raw;
    let text = std::str::from_utf8(&raw.target).map_err(|_| malformed("target is not text"))?;
    let absolute = authority::absolute(text)
        .ok_or_else(|| malformed("a proxy takes requests with a whole URI, or CONNECT"))?;
    let (host, port) =
        authority::parse(absolute.authority).ok_or_else(|| malformed("the URI names no host"))?;
    let scene = Scene {
        daemon: Arc::clone(daemon),
        lease,
        scheme: absolute.scheme,
        host,
        port: port.unwrap_or_else(|| authority::default_port(absolute.scheme)),
        seat: Arc::clone(seat),
        standing: None,
    };
    let head = RequestHead {
        method: raw.method.clone(),
        target: absolute.target.into(),
        scheme: absolute.scheme,
        // Judged against the URI's authority in `request`.
        authority: http::host_field(incoming)?,
        headers: raw.headers.clone(),
    };
    Ok((scene, head))
}

async fn refuse_head(
    daemon: &Daemon,
    known: &Known,
    connection: &mut Connection,
    error: &NextError,
) {
    let Some(status) = error.status() else { return };
    let refusal = Refusal::denied(status, "request_malformed", error.to_string());
    match known {
        Known::Owner(lease) => refuse_known(daemon, lease, connection, &refusal).await,
        // What could not be read holds no token that was checked.
        Known::Of(_) | Known::Nothing => refuse(connection, &refusal, &RequestId::random()).await,
    }
}

/// Refuses a request of a lease that names no host in a way that a policy could have a say about,
/// and records it.
async fn refuse_known(
    daemon: &Daemon,
    lease: &Lease,
    connection: &mut Connection,
    refusal: &Refusal,
) {
    let id = RequestId::random();
    let line = Line {
        request: Some(id.clone()),
        entry: Some("http".to_owned()),
        generation: daemon.policies.current().number,
        ..lease.line()
    };
    request::record_denied(daemon, line, refusal).await;
    refuse(connection, refusal, &id).await;
}

/// Refuses what belongs to no lease, so that the audit has nobody to name. Whoever reaches the
/// socket can cause this as often as he likes: it is no line of the log.
async fn refuse(connection: &mut Connection, refusal: &Refusal, id: &RequestId) {
    tracing::debug!(code = refusal.code, "request on the egress socket refused");
    let mut responder = Responder::H1(connection.refusal());
    // The client may have gone.
    let _ = reply::send(&mut responder, refusal, Form::Json, id, "").await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_as_bearer_or_as_the_password_of_basic() {
        assert_eq!(token(b"Bearer abc").as_deref(), Some("abc"));
        assert_eq!(token(b"basic dXNlcjphYmM=").as_deref(), Some("abc"));
        for bad in [&b"abc"[..], b"Digest abc", b"Basic abc", b"Basic dXNlcg==", b"\xff abc"] {
            assert_eq!(token(bad), None, "{bad:?}");
        }
    }
}
