//! Requests on a connection whose name is verified: HTTP/1.1 one after the other, HTTP/2 at once.

use std::time::Duration;

use bytes::Bytes;
use ipc::id::RequestId;
use tokio::time::timeout;

use super::authority;
use crate::audit::Line;
use crate::head::RequestHead;
use crate::relay::alarm::Alarm;
use crate::relay::h1::framing::Version;
use crate::relay::h1::server::{Connection, Incoming, NextError};
use crate::relay::h2;
use crate::relay::responder::Responder;
use crate::relay::stream::Stream;
use crate::reply::form::Form;
use crate::reply::{self, Refusal};
use crate::request::{self, Asked, Scene};
use crate::upstream::Want;

/// How long and how much of a body is read and dropped after an early answer over HTTP/2.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 1024 * 1024;

/// Serves HTTP/1.1 until the connection ends.
pub async fn serve_h1(scene: &Scene, stream: Stream) {
    let mut connection = Connection::new(stream);
    loop {
        let incoming = match connection.next().await {
            Ok(incoming) => incoming,
            Err(error) => {
                refuse_head(scene, &mut connection, &error).await;
                break;
            }
        };
        // One that has to make room takes nothing more: its client sends the request elsewhere.
        let Some(_working) = scene.seat.works() else { return };
        match one(scene, &mut connection, incoming).await {
            After::Next => {}
            After::Close => break,
            // An answer that broke off must not look whole: then the connection just goes.
            After::Broken => return,
            After::Cut => return connection.reset(),
        }
    }
    connection.close().await;
}

/// What a request left of its connection.
pub enum After {
    Next,
    Close,
    /// The last answer is not whole, as its framing shows.
    Broken,
    /// The same where nothing but the way in which the connection ends can show it.
    Cut,
}

async fn one(scene: &Scene, connection: &mut Connection, mut incoming: Incoming) -> After {
    match head(scene, &mut incoming) {
        Ok(head) => pass(scene, connection, incoming, head).await,
        Err(refusal) => {
            refuse_unread(scene, connection, &refusal).await;
            After::Close
        }
    }
}

/// Hands one request over and says what is left of the connection after it.
pub async fn pass(
    scene: &Scene,
    connection: &mut Connection,
    incoming: Incoming,
    head: RequestHead,
) -> After {
    let alarm = std::mem::take(&mut connection.alarm);
    let (body, reply) = connection.parts(&incoming);
    let mut asked = Asked {
        head,
        framing: incoming.framing,
        upgrade: incoming.connection.upgrade,
        want: Want::Http1,
        body,
        responder: Responder::H1(reply),
        alarm,
    };
    request::answer(scene, &mut asked).await;
    let Responder::H1(reply) = &asked.responder else { return After::Broken };
    let after = if reply.needs_reset() {
        After::Cut
    } else if !reply.is_whole() {
        After::Broken
    } else if reply.stays_open() && asked.body.is_done() {
        After::Next
    } else {
        After::Close
    };
    connection.alarm = asked.alarm;
    after
}

/// The head as it goes on. A target in absolute form must name the verified host too.
fn head(scene: &Scene, incoming: &mut Incoming) -> Result<RequestHead, Refusal> {
    let malformed = |reason: &str| Refusal::denied(400, "request_malformed", reason);
    let host = host_field(incoming)?;
    let raw = &mut incoming.raw;
    let text = std::str::from_utf8(&raw.target).map_err(|_| malformed("target is not text"))?;
    let target = if text.starts_with('/') || text == "*" && raw.method == "OPTIONS" {
        raw.target.clone()
    } else {
        let absolute = authority::absolute(text)
            .ok_or_else(|| malformed("the request target is neither a path nor a URI"))?;
        let (same_host, same_scheme) =
            (agree(absolute.authority, &host, scene), absolute.scheme == scene.scheme);
        if !same_host || !same_scheme {
            let reason = "the request target names another host or scheme than the connection";
            return Err(Refusal::denied(421, "authority_mismatch", reason));
        }
        Bytes::from(absolute.target)
    };
    Ok(RequestHead {
        method: raw.method.clone(),
        target,
        scheme: scene.scheme,
        authority: host,
        headers: std::mem::take(&mut raw.headers),
    })
}

/// Whether target and Host name the same host and port; one that is left out is the connection's.
fn agree(target: &str, host: &str, scene: &Scene) -> bool {
    [target, host].iter().all(|text| authority::settle(text, &scene.host, scene.port).is_some())
        || authority::agree(target, host, scene.scheme)
}

/// The one Host field. HTTP/1.0 needs none; two would be read differently by different servers.
pub fn host_field(incoming: &Incoming) -> Result<String, Refusal> {
    let malformed = |reason: &str| Refusal::denied(400, "request_malformed", reason);
    let mut hosts = incoming.raw.headers.all("host");
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        let version = incoming.raw.version;
        let reason = if version == Version::Http10 {
            "HTTP/1.0 without exactly one Host field"
        } else {
            "not exactly one Host field"
        };
        return Err(malformed(reason));
    };
    String::from_utf8(host.to_vec()).map_err(|_| malformed("the Host field is not text"))
}

/// Answers a head that could not be read, and records it.
pub async fn refuse_head(scene: &Scene, connection: &mut Connection, error: &NextError) {
    let Some(status) = error.status() else { return };
    let refusal = Refusal::denied(status, "request_malformed", error.to_string());
    refuse_unread(scene, connection, &refusal).await;
}

async fn refuse_unread(scene: &Scene, connection: &mut Connection, refusal: &Refusal) {
    let id = RequestId::random();
    request::record_denied(&scene.daemon, head_line(scene, &id), refusal).await;
    if let Some(standing) = &scene.standing {
        standing.has_record();
    }
    let mut responder = Responder::H1(connection.refusal());
    let environment = &scene.lease.environment;
    // The client may have gone; the refusal is recorded already.
    let _ = reply::send(&mut responder, refusal, Form::Json, &id, environment).await;
}

fn head_line(scene: &Scene, id: &RequestId) -> Line {
    Line {
        request: Some(id.clone()),
        entry: Some("http".to_owned()),
        host: Some(scene.host.to_string()),
        port: Some(scene.port),
        generation: scene.daemon.policies.current().number,
        ..scene.lease.line()
    }
}

/// Serves HTTP/2 until the connection ends.
pub async fn serve_h2(scene: &Scene, stream: Stream) {
    let served = h2::server::serve(stream, scene.scheme, &scene.lease.behalf.windows, |incoming| {
        let scene = scene.clone();
        let working = scene.seat.works();
        async move {
            // Told to go before this request came: the connection ends, and nothing was done.
            let Some(_working) = working else { return };
            let mut asked = Asked {
                head: incoming.head,
                framing: incoming.framing,
                upgrade: incoming.upgrade,
                want: Want::Http2,
                body: incoming.body,
                responder: incoming.responder,
                alarm: Alarm::default(),
            };
            request::answer(&scene, &mut asked).await;
            // Resetting a stream whose body is still coming in loses the answer for clients that
            // take the reset for a failure, although RFC 9113, section 8.1 provides for it.
            let _ = timeout(LINGER, asked.body.linger(LINGER_BYTES_MAX)).await;
        }
    });
    if let Err(error) = served.await {
        tracing::debug!(lease = %scene.lease.id, %error, "connection broke off");
    }
}
