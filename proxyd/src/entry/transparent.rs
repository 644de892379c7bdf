//! Connections from a sandbox. Every address is local to it, and the address that a connection
//! was made to says what it is for: one of the lease's names, or a literal.
//!
//! The listener tells whose sandbox it is; no word of the client's does.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ipc::id::RequestId;
use policies::{ConnectDecision, Host, Permit, Scheme};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::http;
use crate::audit::Line;
use crate::lease::Lease;
use crate::lease::flow::{Flow, Given};
use crate::lease::names::Destination;
use crate::relay::stream::Stream;
use crate::relay::tunnel;
use crate::reply::Refusal;
use crate::request::{self, Outcome, Scene};
use crate::sys::interfaces;
use crate::tls::{hello, intercept};
use crate::{Daemon, dns};

const DNS_PORT: u16 = 53;
/// How long a client may take to say what it speaks, where that matters.
const FIRST_BYTE: Duration = Duration::from_secs(10);
/// The same on a connection that is refused anyway: long enough for any client that speaks first.
const FIRST_BYTE_REFUSED: Duration = Duration::from_secs(3);

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
    // The semaphore is never closed, so waiting for room cannot fail.
    while let Ok(room) = Arc::clone(&lease.room).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let end = lease.end.clone();
                let connection = connection(Arc::clone(&daemon), Arc::clone(&lease), stream);
                daemon.tasks.spawn(async move {
                    end.run_until_cancelled(connection).await;
                    drop(room);
                });
            }
            Err(error) => {
                // Out of descriptors or memory: the next try may find some.
                tracing::warn!(lease = %lease.id, %error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(daemon: Arc<Daemon>, lease: Arc<Lease>, stream: TcpStream) {
    let Ok(wanted) = stream.local_addr() else { return };
    // Relayed pieces are whole messages already; a socket without the option still works.
    let _ = stream.set_nodelay(true);
    if wanted.port() == DNS_PORT {
        if let Err(error) = dns::serve::tcp(&daemon, &lease, Stream::new(stream)).await {
            tracing::debug!(lease = %lease.id, %error, "lookup broke off");
        }
        return;
    }
    let target = match lease.names.destination(wanted.ip()) {
        Destination::Named(host) | Destination::Literal(host) => {
            Target { daemon, lease, host, port: wanted.port() }
        }
        Destination::Unbound => {
            let host = Host::from_ip(wanted.ip());
            let target = Target { daemon, lease, host, port: wanted.port() };
            let reason = "this address stands for no name: look the name up again";
            let refusal = Refusal::denied(403, "address_unbound", reason);
            target.record(&RequestId::random(), &refusal).await;
            return reset(stream);
        }
    };
    enter(target, Incoming::Tcp(stream)).await;
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

    fn into_stream(self) -> Stream {
        match self {
            Self::Tcp(stream) => Stream::new(stream),
            Self::Tunnel(stream) => stream,
        }
    }

    fn reset(self) {
        if let Self::Tcp(stream) = self {
            reset(stream);
        }
    }
}

/// Ends a connection so that its client sees at once that it was refused.
fn reset(stream: TcpStream) {
    interfaces::reset_on_close(&stream);
}

/// Whom a connection is for.
pub struct Target {
    pub daemon: Arc<Daemon>,
    pub lease: Arc<Lease>,
    pub host: Host,
    pub port: u16,
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

    fn scene(&self, scheme: Scheme, standing: Option<(RequestId, Refusal)>) -> Scene {
        Scene {
            daemon: Arc::clone(&self.daemon),
            lease: Arc::clone(&self.lease),
            scheme,
            host: self.host.clone(),
            port: self.port,
            standing,
        }
    }
}

/// Decides by name and port what becomes of a connection.
pub async fn enter(target: Target, incoming: Incoming) {
    let Some((policy, generation)) = target.lease.policy(&target.daemon.policies.current()) else {
        return deny(&target, incoming, request::environment_gone()).await;
    };
    match policy.at_connect(&target.host, target.port) {
        ConnectDecision::Deny(denial) => deny(&target, incoming, denial.into()).await,
        ConnectDecision::Tunnel(permit) => {
            pass_unread(&target, incoming, permit, generation).await;
        }
        ConnectDecision::Inspect => inspect(&target, incoming).await,
    }
}

/// Refuses a connection and records it.
async fn deny(target: &Target, incoming: Incoming, refusal: Refusal) {
    let id = RequestId::random();
    target.record(&id, &refusal).await;
    explain(target, incoming, id, refusal).await;
}

/// Tells a client why its connection leads nowhere, where its protocol has room for words.
async fn explain(target: &Target, mut incoming: Incoming, id: RequestId, refusal: Refusal) {
    match incoming.first_byte(FIRST_BYTE_REFUSED).await {
        Some(hello::FIRST_BYTE) => {
            // Recorded already; a client that does not trust us learns nothing more.
            let _ = read_tls(target, incoming.into_stream(), Some((id, refusal))).await;
        }
        Some(byte) if byte.is_ascii_uppercase() => {
            let scene = target.scene(Scheme::Http, Some((id, refusal)));
            http::serve_h1(&scene, incoming.into_stream()).await;
        }
        _ => incoming.reset(),
    }
}

/// Reads requests where a rule needs to see them.
async fn inspect(target: &Target, mut incoming: Incoming) {
    match incoming.first_byte(FIRST_BYTE).await {
        Some(hello::FIRST_BYTE) => {
            if let Err(refusal) = read_tls(target, incoming.into_stream(), None).await {
                target.record(&RequestId::random(), &refusal).await;
            }
        }
        Some(byte) if byte.is_ascii_uppercase() => {
            let scene = target.scene(Scheme::Http, None);
            http::serve_h1(&scene, incoming.into_stream()).await;
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

/// Ends the client's TLS and serves what is inside. A name in the hello that is not the verified
/// one is answered in its own name, with a refusal.
async fn read_tls(
    target: &Target,
    stream: Stream,
    standing: Option<(RequestId, Refusal)>,
) -> Result<(), Refusal> {
    let failed = |reason: String| Refusal::denied(403, "tls_client", reason);
    let hello = hello::read(stream).await.map_err(|error| failed(error.to_string()))?;
    let named = match hello.server_name.as_deref().map(Host::parse) {
        Some(Ok(named)) => named,
        Some(Err(error)) => return Err(failed(format!("the server name in the hello: {error}"))),
        // Nothing in the hello contradicts the name that the address stands for.
        None => target.host.clone(),
    };
    let standing = match standing {
        None if named != target.host => Some(refuse_name(target, &named).await),
        other => other,
    };
    let accepted = intercept::accept(&target.daemon.leaves, hello, &named).await;
    let intercepted = accepted.map_err(|error| failed(error.to_string()))?;
    let scene = target.scene(Scheme::Https, standing);
    if intercepted.speaks_h2 {
        http::serve_h2(&scene, intercepted.stream).await;
    } else {
        http::serve_h1(&scene, intercepted.stream).await;
    }
    Ok(())
}

async fn refuse_name(target: &Target, named: &Host) -> (RequestId, Refusal) {
    let verified = target.host.authority(target.port);
    let reason = format!("the client hello names {named} on a connection to {verified}");
    let refusal = Refusal::denied(421, "server_name_mismatch", reason);
    let id = RequestId::random();
    target.record(&id, &refusal).await;
    (id, refusal)
}

/// Passes bytes both ways where no rule needs to see them.
async fn pass_unread(target: &Target, incoming: Incoming, permit: Permit, generation: u64) {
    let id = RequestId::random();
    let mut line = target.line(&id, "tunnel");
    line.rule = Some(permit.rule().to_owned());
    line.generation = generation;
    let flow = Flow::Tunnel { host: target.host.clone(), port: target.port };
    let flow = target.lease.flows.enter(flow, Given { generation, credential: None });
    if let Err(error) = target.daemon.audit.decide(true, line.clone()).await {
        tracing::error!(%error, "connection stopped: the audit cannot be written");
        return incoming.reset();
    }
    let mut outcome = Outcome::new(Arc::clone(&target.daemon), line);
    let (upstream, address): (TcpStream, SocketAddr) =
        match target.daemon.upstreams.tunnel(permit).await {
            Ok(dialled) => dialled,
            Err(error) => {
                let refusal = Refusal::from(error);
                outcome.refused(&refusal);
                drop(outcome);
                return explain(target, incoming, id, refusal).await;
            }
        };
    outcome.line.address = Some(address.to_string());
    flow.dialled(address.ip(), target.daemon.upstreams.is_own(address));
    let passed = tokio::select! {
        passed = tunnel::run(incoming.into_stream(), upstream, &outcome.tally) => passed,
        () = flow.stop.cancelled() => {
            let reason = "the policy no longer allows this connection";
            return outcome.refused(&Refusal::denied(403, "policy_changed", reason));
        }
    };
    match passed {
        Ok(()) => outcome.done(),
        Err(error) => outcome.refused(&Refusal::failed(502, "tunnel_broke", error.to_string())),
    }
}
