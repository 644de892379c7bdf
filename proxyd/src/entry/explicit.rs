//! `proxyd-egress.sock`: an HTTP proxy for what is not a sandbox of ours.
//!
//! The lease's token comes in `Proxy-Authorization`, as Bearer or as the password of Basic. CONNECT
//! leads into the same path as a sandbox's connection. A target in absolute form is one request;
//! with `https://` proxyd makes the TLS itself, which is how harnessd calls models: the socket is
//! as private as its directory.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use ipc::id::RequestId;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::authority;
use super::http::{self, After};
use super::transparent::{self, Target};
use crate::Daemon;
use crate::head::RequestHead;
use crate::lease::Lease;
use crate::relay::h1::framing::Framing;
use crate::relay::h1::server::{Connection, Incoming, NextError};
use crate::relay::responder::Responder;
use crate::relay::stream::Stream;
use crate::reply::form::Form;
use crate::reply::{self, Refusal};
use crate::request::Scene;

/// Connections at once; more wait in the backlog.
const CONNECTIONS_MAX: usize = 4096;

/// Accepts clients until `stop`.
pub async fn serve(daemon: Arc<Daemon>, listener: UnixListener, stop: CancellationToken) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    // The semaphore is never closed, so waiting for room cannot fail.
    while let Ok(permit) = Arc::clone(&room).acquire_owned().await {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let (serving, ending) = (Arc::clone(&daemon), daemon.ending.clone());
                daemon.shards.serve(&daemon.tasks, stream, move |stream| async move {
                    ending.run_until_cancelled(connection(serving, stream)).await;
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept on the egress socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(daemon: Arc<Daemon>, stream: UnixStream) {
    let mut connection = Connection::new(Stream::new(stream));
    loop {
        let incoming = match connection.next().await {
            Ok(incoming) => incoming,
            Err(error) => {
                refuse_head(&mut connection, &error).await;
                return connection.close().await;
            }
        };
        let lease = match lease(&daemon, incoming.proxy_authorization.as_ref()) {
            Ok(lease) => lease,
            Err(refusal) => {
                refuse(&mut connection, &refusal).await;
                return connection.close().await;
            }
        };
        let end = lease.end.clone();
        if incoming.raw.method == "CONNECT" {
            let tunnelling = connect(daemon, lease, connection, incoming);
            end.run_until_cancelled(tunnelling).await;
            return;
        }
        let passing = forward(&daemon, lease, &mut connection, incoming);
        match end.run_until_cancelled(passing).await {
            Some(After::Next) => {}
            Some(After::Close) => return connection.close().await,
            Some(After::Broken) | None => return,
        }
    }
}

/// The lease that the request's token stands for.
fn lease(daemon: &Daemon, authorization: Option<&Bytes>) -> Result<Arc<Lease>, Refusal> {
    let refused = |reason: &str| {
        Refusal::denied(407, "lease_token", reason)
            .with_hint("open a lease on proxyd-lease.sock and send its token as Bearer")
    };
    let value = authorization.ok_or_else(|| refused("no Proxy-Authorization"))?;
    let token = token(value).ok_or_else(|| refused("Proxy-Authorization holds no token"))?;
    daemon.leases.by_token(&token).ok_or_else(|| refused("no open lease has this token"))
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

/// CONNECT: accepted, and then judged like a sandbox's connection, so that a denial can be read
/// by the client inside.
async fn connect(
    daemon: Arc<Daemon>,
    lease: Arc<Lease>,
    mut connection: Connection,
    incoming: Incoming,
) {
    let text = String::from_utf8_lossy(&incoming.raw.target).into_owned();
    let Some((host, Some(port))) = authority::parse(&text) else {
        let reason = "CONNECT needs host:port";
        refuse(&mut connection, &Refusal::denied(400, "request_malformed", reason)).await;
        return connection.close().await;
    };
    if incoming.framing != Framing::None {
        let reason = "CONNECT has no body";
        refuse(&mut connection, &Refusal::denied(400, "request_malformed", reason)).await;
        return connection.close().await;
    }
    let Ok(stream) = connection.tunnel().await else { return };
    let target = Target { daemon, lease, host, port };
    transparent::enter(target, transparent::Incoming::Tunnel(stream)).await;
}

/// One request in absolute form.
async fn forward(
    daemon: &Arc<Daemon>,
    lease: Arc<Lease>,
    connection: &mut Connection,
    incoming: Incoming,
) -> After {
    match locate(daemon, lease, &incoming) {
        Ok((scene, head)) => http::pass(&scene, connection, incoming, head).await,
        Err(refusal) => {
            refuse(connection, &refusal).await;
            After::Close
        }
    }
}

fn locate(
    daemon: &Arc<Daemon>,
    lease: Arc<Lease>,
    incoming: &Incoming,
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

async fn refuse_head(connection: &mut Connection, error: &NextError) {
    if let Some(status) = error.status() {
        let refusal = Refusal::denied(status, "request_malformed", error.to_string());
        refuse(connection, &refusal).await;
    }
}

/// Refuses what belongs to no lease or to no host, so that no policy has a say and the audit has
/// nobody to name.
async fn refuse(connection: &mut Connection, refusal: &Refusal) {
    tracing::info!(code = refusal.code, "request on the egress socket refused");
    let mut responder = Responder::H1(connection.refusal());
    let id = RequestId::random();
    // The client may have gone.
    let _ = reply::send(&mut responder, refusal, Form::Json, &id, "").await;
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
