//! What is left of connections of which an upstream has ended a part.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::*;
use bytes::Bytes;
use h2::Reason;
use h2::server::SendResponse;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::server::TlsStream;

type Conn = TlsStream<TcpStream>;

/// A text frame, under a mask of zeros.
fn text(payload: &str) -> Vec<u8> {
    let length = 0x80 | u8::try_from(payload.len()).unwrap();
    [&[0x81, length, 0, 0, 0, 0], payload.as_bytes()].concat()
}

#[tokio::test]
async fn a_placeholder_sent_to_an_upstream_that_says_no_more_is_refused_and_recorded() {
    const SWITCH: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
        Upgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], move |mut stream| {
        let arrived = arrived.clone();
        async move {
            let _ = request(&mut stream).await;
            stream.write_all(SWITCH).await.unwrap();
            stream.write_all(&[0x81, 3, b'b', b'y', b'e']).await.unwrap();
            stream.shutdown().await.unwrap();
            let mut all = Vec::new();
            let _ = stream.read_to_end(&mut all).await;
            arrived.send(all).unwrap();
        }
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let handshake = b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\n\
        Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
        Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(handshake).await.unwrap();
    let head = timely(head(&mut stream)).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");

    // The end goes on as it came: after it there is no place for a word of ours.
    let mut rest = Vec::new();
    timely(stream.read_to_end(&mut rest)).await.unwrap();
    stream.write_all(&text(lease.placeholder())).await.unwrap();
    stream.flush().await.unwrap();
    let arrived = timely(arrivals.recv()).await.unwrap();

    assert_eq!(rest, [0x81, 3, b'b', b'y', b'e']);
    // The upstream is told why nothing follows.
    assert_eq!(arrived, [&[0x88, 0x82, 0, 0, 0, 0][..], &1008u16.to_be_bytes()].concat());
    proxyd
        .record(|r| r.reason.as_deref().is_some_and(|text| text.starts_with("message_refused")))
        .await;
}

/// Over HTTP/2 a connection takes one stream. `/hold` is never answered; of the others two are
/// refused and all that follow have to come over HTTP/1.1, where they are answered.
async fn reluctant(stream: Conn, held: Arc<AtomicUsize>, asked: Arc<AtomicUsize>) {
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return echo_h1(stream).await;
    }
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(1);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    let mut kept: Vec<SendResponse<Bytes>> = Vec::new();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        if request.uri().path() == "/hold" {
            held.fetch_add(1, Ordering::SeqCst);
            kept.push(respond);
        } else if asked.fetch_add(1, Ordering::SeqCst) < 2 {
            respond.send_reset(Reason::REFUSED_STREAM);
        } else {
            respond.send_reset(Reason::HTTP_1_1_REQUIRED);
        }
    }
}

#[tokio::test]
async fn a_connection_on_which_the_last_try_succeeded_serves_the_next_request_too() {
    let (held, asked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let upstream = Upstream::tls("open.test", &[b"h2", b"http/1.1"], {
        let (held, asked) = (Arc::clone(&held), Arc::clone(&asked));
        move |stream| reluctant(stream, Arc::clone(&held), Arc::clone(&asked))
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("open.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("open.test").await;
    let mut get = |path: &str| {
        let request = http::Request::get(format!("https://open.test{path}")).body(()).unwrap();
        sender.send_request(request, true).unwrap().0
    };

    let one = get("/hold");
    until("one is held", || async { held.load(Ordering::SeqCst) == 1 }).await;
    let first = timely(get("/")).await.unwrap();
    let (first, _) = (first.status(), timely(h2_body(first.into_body())).await);
    let (tries, connections) = (asked.load(Ordering::SeqCst), upstream.connections());
    let two = get("/hold");
    until("two are held", || async { held.load(Ordering::SeqCst) == 2 }).await;
    let second = timely(get("/")).await.unwrap().status();

    // Each of the two over HTTP/2 is full, and the third one is idle.
    assert_eq!((first, tries, connections), (http::StatusCode::OK, 3, 3));
    assert_eq!((second, upstream.connections()), (http::StatusCode::OK, 3));
    drop((one, two));
}
