//! Odd requests through our parser and through hyper's: whatever we take for sound, hyper must cut
//! in the same places.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncWriteExt, duplex};

use super::body::Piece;
use super::h1::server::Connection;
use super::stream::Stream;

/// Method, target and body.
type Seen = (String, String, Vec<u8>);

/// The requests that are taken, up to the first that is refused or broken.
async fn ours(bytes: &[u8]) -> Vec<Seen> {
    let (mut far, near) = duplex(bytes.len().max(1));
    far.write_all(bytes).await.unwrap();
    far.shutdown().await.unwrap();
    let mut connection = Connection::new(Stream::new(near));
    let mut seen = Vec::new();
    while let Ok(incoming) = connection.next().await {
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        let (method, target) = (text(&incoming.raw.method), text(&incoming.raw.target));
        let closes = incoming.connection.close;
        let (mut reading, _) = connection.parts(&incoming);
        let mut body = Vec::new();
        loop {
            match reading.next().await {
                Ok(Some(Piece::Data(data))) => body.extend_from_slice(&data),
                Ok(Some(Piece::Trailers(_))) => {}
                Ok(None) => break,
                Err(_) => return seen,
            }
        }
        seen.push((method, target, body));
        if closes {
            break;
        }
    }
    seen
}

async fn hypers(bytes: &[u8]) -> Vec<Seen> {
    use http_body_util::BodyExt;
    let (mut far, near) = duplex(1 << 20);
    far.write_all(bytes).await.unwrap();
    far.shutdown().await.unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let service =
        hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let log = Arc::clone(&log);
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await?.to_bytes().to_vec();
                log.lock().unwrap().push((parts.method.to_string(), parts.uri.to_string(), body));
                let answer = http_body_util::Empty::<Bytes>::new();
                Ok::<_, hyper::Error>(http::Response::new(answer))
            }
        });
    // It ends with an error where the bytes are no HTTP; what it took before that counts.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(near), service)
        .await;
    std::mem::take(&mut seen.lock().unwrap())
}

/// Pieces of which heads are made: sound ones, odd ones, broken ones.
const FIELDS: &[&str] = &[
    "",
    "Content-Length: 5\r\n",
    "content-length:5\r\n",
    "Content-Length: 05\r\n",
    "Content-Length: 0\r\n",
    "Content-Length: 5 \r\n",
    "Content-Length: \t5\r\n",
    "Content-Length: +5\r\n",
    "Content-Length: -5\r\n",
    "Content-Length: 5,5\r\n",
    "Content-Length: 0x5\r\n",
    "Content-Length:\r\n",
    "Content-Length: 5\r\nContent-Length: 5\r\n",
    "Content-Length: 5\r\nContent-Length: 6\r\n",
    "Content-Length : 5\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: CHUNKED\r\n",
    "Transfer-Encoding: chunked \r\n",
    "Transfer-Encoding:\tchunked\r\n",
    "Transfer-Encoding: chunked,\r\n",
    "Transfer-Encoding: ,chunked\r\n",
    "Transfer-Encoding: gzip, chunked\r\n",
    "Transfer-Encoding: chunked, gzip\r\n",
    "Transfer-Encoding: identity\r\n",
    "Transfer-Encoding: \"chunked\"\r\n",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "Transfer-Encoding : chunked\r\n",
    "Transfer-Encoding\r\n : chunked\r\n",
    "X: y\r\n Transfer-Encoding: chunked\r\n",
    "X: y\nTransfer-Encoding: chunked\r\n",
    "X: y\rTransfer-Encoding: chunked\r\n",
    "X: \0\r\n",
    "X: \x7f\r\n",
    "X: \x0b\r\n",
    "X: \u{e9}\r\n",
    ": y\r\n",
    "X\r\n",
    "Connection: close\r\n",
    "Connection: keep-alive\r\n",
    "Expect: 100-continue\r\nContent-Length: 5\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\n",
    "Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 5\r\n",
];
const BODIES: &[&str] = &[
    "",
    "hello",
    "5\r\nhello\r\n0\r\n\r\n",
    "05\r\nhello\r\n0\r\n\r\n",
    "5;a=b\r\nhello\r\n0;c\r\n\r\n",
    "5 \r\nhello\r\n0\r\n\r\n",
    "5\nhello\n0\n\n",
    "5\r\nhello0\r\n\r\n",
    "5\r\nhell\r\n0\r\n\r\n",
    "0\r\n\r\n",
    "00000000\r\n\r\n",
    "0\r\nX: y\r\n\r\n",
    "0\r\nX: y\n\r\n",
    "0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "0x0\r\n\r\n",
    "ffffffffffffffff0\r\n\r\n",
    "\r\n\r\n",
];
const LINES: &[&str] = &[
    "POST /one HTTP/1.1\r\n",
    "GET /one HTTP/1.1\r\n",
    "POST /one HTTP/1.0\r\n",
    "HEAD /one?a=b HTTP/1.1\r\n",
    "\r\nPOST /one HTTP/1.1\r\n",
    "POST  /one HTTP/1.1\r\n",
    "POST /one  HTTP/1.1\r\n",
    "POST /one HTTP/1.1 \r\n",
    "POST\t/one HTTP/1.1\r\n",
    "POST /one HTTP/1.2\r\n",
    "post /one HTTP/1.1\r\n",
    "POST /o\u{e9} HTTP/1.1\r\n",
    "POST /one#x HTTP/1.1\r\n",
    "POST /one\r\n",
];

#[tokio::test]
async fn whatever_is_taken_for_sound_is_cut_in_the_same_places_by_hyper() {
    let next = "GET /next HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
    let (mut all, mut taken) = (0, 0);
    for line in LINES {
        for fields in FIELDS {
            for body in BODIES {
                let text = format!("{line}Host: a.test\r\n{fields}\r\n{body}{next}");
                all += 1;
                let ours = ours(text.as_bytes()).await;
                if ours.is_empty() {
                    continue;
                }
                taken += 1;
                let theirs = hypers(text.as_bytes()).await;

                // hyper may refuse more; what both take they must read alike.
                let both = ours.len().min(theirs.len());
                assert_eq!(ours[..both], theirs[..both], "{text:?}");
                assert!(!theirs.is_empty(), "hyper refuses what we take: {text:?}");
                assert!(theirs.len() <= ours.len(), "hyper sees a request more in {text:?}");
            }
        }
    }
    assert!(all > 10_000 && taken > 200, "{taken} of {all} were taken");
}
