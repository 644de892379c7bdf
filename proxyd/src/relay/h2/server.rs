//! The sandbox's leg of HTTP/2: each stream is a request of its own.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use policies::Scheme;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{SEND_BYTES_MAX, Windows, convert};
use crate::entry::authority;
use crate::head::{Fields, RequestHead};
use crate::lease::share::Share;
use crate::relay::body::BodyIn;
use crate::relay::h1::framing::{self, Framing};
use crate::relay::responder::Responder;
use crate::relay::stream::Stream;
use crate::relay::websocket;

/// Streams at once on one connection; browsers and gRPC clients expect about a hundred.
const STREAMS_MAX: u32 = 128;
/// Flow control windows. The client is on this host, or next to it: no long way has to be filled.
const WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 1024 * 1024;
const HEAD_LIST_BYTES_MAX: u32 = 128 * 1024;
const HANDSHAKE: Duration = Duration::from_secs(10);

/// One request as it came over HTTP/2.
pub struct Incoming {
    pub head: RequestHead,
    pub framing: Framing,
    pub body: BodyIn<'static>,
    /// The protocol that the stream is to speak (RFC 8441), if not HTTP.
    pub upgrade: Option<Bytes>,
    pub responder: Responder<'static>,
}

/// Serves a connection: `answer` is called for every stream, all at the same time. A stream whose
/// head is not sound is reset. Its windows are of the share `room`.
pub async fn serve<F, A>(
    stream: Stream,
    scheme: Scheme,
    room: &Share,
    answer: A,
) -> Result<(), h2::Error>
where
    A: Fn(Incoming) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let windows = Windows::of(room, WINDOW_BYTES, CONNECTION_WINDOW_BYTES);
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_send_buffer_size(SEND_BYTES_MAX)
        .max_header_list_size(HEAD_LIST_BYTES_MAX)
        .enable_connect_protocol();
    let handshake = timeout(HANDSHAKE, builder.handshake::<_, Bytes>(stream)).await;
    let Ok(connection) = handshake else { return Ok(()) };
    let mut connection = connection?;
    let mut requests = JoinSet::new();
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        match incoming(request, scheme) {
            Some((head, framing, body, upgrade)) => {
                let responder = Responder::H2 { respond, started: false, interim_bytes: 0 };
                requests.spawn(answer(Incoming { head, framing, body, upgrade, responder }));
            }
            None => respond.send_reset(h2::Reason::PROTOCOL_ERROR),
        }
        while requests.try_join_next().is_some() {}
    }
    // What is still under way sees by itself that its client is gone, and says so in its record.
    while requests.join_next().await.is_some() {}
    Ok(())
}

type Parts = (RequestHead, Framing, BodyIn<'static>, Option<Bytes>);

fn incoming(request: http::Request<h2::RecvStream>, scheme: Scheme) -> Option<Parts> {
    let (mut parts, stream) = request.into_parts();
    let headers = convert::fields(&parts.headers);
    let authority = authority(&parts.uri, &headers, scheme)?;
    let protocol = parts.extensions.remove::<h2::ext::Protocol>();
    let upgrade = protocol.map(|protocol| Bytes::copy_from_slice(protocol.as_str().as_bytes()));
    let body = match upgrade {
        Some(_) => BodyIn::Waiting(Some(stream)),
        None => BodyIn::h2(stream),
    };
    let framing = match (&body, framing::content_length(&headers).ok()?) {
        (BodyIn::Empty | BodyIn::Waiting(_), _) => Framing::None,
        (_, Some(length)) => Framing::Length(length),
        (_, None) => Framing::Chunked,
    };
    let method = if upgrade.is_some() { http::Method::GET } else { parts.method };
    let mut head = RequestHead {
        target: target(&method, &parts.uri)?,
        method: Bytes::copy_from_slice(method.as_str().as_bytes()),
        scheme,
        authority,
        headers: without_host(headers),
    };
    if upgrade.is_some() {
        // The handshake of HTTP/1.1 is ours to make and to check.
        let key = websocket::random_key()?;
        head.headers.set("Sec-WebSocket-Key", key);
        // What follows are bytes of the other protocol, not a body (RFC 9110, section 9.3.6).
        head.headers.remove_all("content-length");
    }
    Some((head, framing, body, upgrade))
}

/// The one authority of a request. Two names for it are none: which one counts is exactly what
/// must not be open.
fn authority(uri: &http::Uri, headers: &Fields, scheme: Scheme) -> Option<String> {
    let mut hosts = headers.all("host").map(|host| String::from_utf8_lossy(host).into_owned());
    let authority = match uri.authority() {
        Some(authority) => authority.as_str().to_owned(),
        None => hosts.next()?,
    };
    hosts.all(|host| authority::agree(&authority, &host, scheme)).then_some(authority)
}

fn target(method: &http::Method, uri: &http::Uri) -> Option<Bytes> {
    let Some(target) = uri.path_and_query() else {
        // A plain CONNECT names a host and no path; policy has an answer for that method.
        return (method == http::Method::CONNECT).then(|| Bytes::from_static(b"/"));
    };
    let target = target.as_str();
    if target == "*" && method != http::Method::OPTIONS {
        return None;
    }
    Some(Bytes::copy_from_slice(if target.is_empty() { "/" } else { target }.as_bytes()))
}

/// The authority stands for `Host` from here on.
fn without_host(mut headers: Fields) -> Fields {
    headers.remove_all("host");
    headers
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
