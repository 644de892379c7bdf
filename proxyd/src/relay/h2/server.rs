//! The sandbox's leg of HTTP/2: each stream is a request of its own.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use policies::Scheme;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::convert;
use crate::head::{Fields, RequestHead};
use crate::relay::body::BodyIn;
use crate::relay::h1::framing::{self, Framing};
use crate::relay::responder::Responder;
use crate::relay::stream::Stream;

/// Streams at once on one connection; browsers and gRPC clients expect about a hundred.
const STREAMS_MAX: u32 = 128;
const WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
const HEAD_LIST_BYTES_MAX: u32 = 128 * 1024;
const HANDSHAKE: Duration = Duration::from_secs(10);

/// One request as it came over HTTP/2.
pub struct Incoming {
    pub head: RequestHead,
    pub framing: Framing,
    pub body: BodyIn<'static>,
    pub responder: Responder<'static>,
}

/// Serves a connection: `answer` is called for every stream, all at the same time. A stream whose
/// head is not sound is reset.
pub async fn serve<F, A>(stream: Stream, scheme: Scheme, answer: A) -> Result<(), h2::Error>
where
    A: Fn(Incoming) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(HEAD_LIST_BYTES_MAX);
    let handshake = timeout(HANDSHAKE, builder.handshake::<_, Bytes>(stream)).await;
    let Ok(connection) = handshake else { return Ok(()) };
    let mut connection = connection?;
    let mut requests = JoinSet::new();
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        match incoming(request, scheme) {
            Some((head, framing, body)) => {
                let responder = Responder::H2 { respond, started: false };
                requests.spawn(answer(Incoming { head, framing, body, responder }));
            }
            None => respond.send_reset(h2::Reason::PROTOCOL_ERROR),
        }
        while requests.try_join_next().is_some() {}
    }
    Ok(())
}

fn incoming(
    request: http::Request<h2::RecvStream>,
    scheme: Scheme,
) -> Option<(RequestHead, Framing, BodyIn<'static>)> {
    let (parts, stream) = request.into_parts();
    let headers = convert::fields(&parts.headers);
    let host = headers.first("host").map(|h| String::from_utf8_lossy(h).into_owned());
    let authority = match (parts.uri.authority(), host) {
        // Two names for one request: which one counts is exactly what must not be open.
        (Some(a), Some(host)) if !a.as_str().eq_ignore_ascii_case(&host) => return None,
        (Some(a), _) => a.as_str().to_owned(),
        (None, host) => host?,
    };
    let body = BodyIn::h2(stream);
    let framing = match (&body, framing::content_length(&headers).ok()?) {
        (BodyIn::Empty, _) => Framing::None,
        (_, Some(length)) => Framing::Length(length),
        (_, None) => Framing::Chunked,
    };
    let head = RequestHead {
        method: Bytes::copy_from_slice(parts.method.as_str().as_bytes()),
        target: target(&parts.method, &parts.uri)?,
        scheme,
        authority,
        headers: without_host(headers),
    };
    Some((head, framing, body))
}

fn target(method: &http::Method, uri: &http::Uri) -> Option<Bytes> {
    let target = uri.path_and_query()?.as_str();
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
