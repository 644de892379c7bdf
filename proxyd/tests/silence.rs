//! Only silence ends a stream, and it never looks like the end of the stream.

use crate::support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

const H1: &[&[u8]] = &[b"http/1.1"];
const SHORT: &str = "idle-timeout = \"1s\"\ntunnel-idle-timeout = \"1s\"\n";

/// Begins an answer, or another protocol, and then is silent for as long as anybody listens.
async fn begin(mut stream: TlsStream<TcpStream>) {
    let Some((head, _)) = request(&mut stream).await else { return };
    let answer = match head.split(' ').nth(1).unwrap() {
        "/chunked" => "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n",
        "/length" => "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nbegun",
        "/close" => "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nbegun",
        "/ws" => {
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        }
        _ => "",
    };
    stream.write_all(answer.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    let _ = stream.read_to_end(&mut Vec::new()).await;
}

async fn before() -> (Proxyd, Upstream) {
    let upstream = Upstream::tls("api.test", H1, begin).await;
    let proxyd = Proxyd::configured(POLICY, &[("api.test", &upstream)], SHORT).await;
    proxyd.put_secret("api").await;
    (proxyd, upstream)
}

#[tokio::test]
async fn an_answer_that_falls_silent_breaks_off_and_does_not_look_whole() {
    let (proxyd, _upstream) = before().await;
    let lease = proxyd.lease().await;

    for path in ["/chunked", "/length", "/close"] {
        let mut stream = lease.h1("api.test").await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: api.test\r\n\r\n");
        let answer = talk(&mut stream, request.as_bytes()).await;

        assert!(answer.contains("begu"), "{path}: {answer}");
        let whole = answer.ends_with("0\r\n\r\n") || answer.contains("Content-Length: 5");
        assert!(!whole, "{path}: {answer}");
    }
    let mut sender = lease.h2("api.test").await;
    let request = http::Request::get("https://api.test/chunked").body(()).unwrap();
    let (response, _) = sender.send_request(request, true).unwrap();
    let mut body = timely(response).await.unwrap().into_body();
    let end = loop {
        match timely(body.data()).await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break Some(error),
            None => break None,
        }
    };
    assert!(end.is_some_and(|error| error.is_reset()));
}

#[tokio::test]
async fn an_upstream_that_never_answers_is_a_time_out_in_words() {
    let (proxyd, _upstream) = before().await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    let request = b"GET /nothing HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";
    let answer = talk(&mut stream, request).await;

    assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
    assert!(answer.contains("nothing moved for 1 s"), "{answer}");
}

#[tokio::test]
async fn an_upgraded_connection_that_falls_silent_ends() {
    let (proxyd, _upstream) = before().await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    let request = "GET /ws HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\n\
                   Upgrade: websocket\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let switched = timely(head(&mut stream)).await;
    let end = timely(stream.read_to_end(&mut Vec::new())).await;

    assert!(switched.starts_with("HTTP/1.1 101 "), "{switched}");
    // Without the goodbye of TLS: nobody can take it for a close.
    assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
    proxyd
        .record(|r| r.reason.as_deref().is_some_and(|text| text.starts_with("upstream_silent")))
        .await;
}

#[tokio::test]
async fn a_tunnel_that_falls_silent_is_reset_at_its_upstream() {
    let (ended, mut end) = tokio::sync::mpsc::unbounded_channel();
    let upstream = Upstream::tcp(move |mut stream| {
        let ended = ended.clone();
        async move {
            stream.write_all(b"begun").await.unwrap();
            let kind = stream.read_to_end(&mut Vec::new()).await.map_err(|error| error.kind());
            ended.send(kind).unwrap();
        }
    })
    .await;
    let proxyd = Proxyd::configured(POLICY, &[("raw.test", &upstream)], SHORT).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.connect("raw.test:9000").await;
    let mut begun = [0; 5];
    timely(stream.read_exact(&mut begun)).await.unwrap();

    let end = timely(end.recv()).await.unwrap();

    assert_eq!(&begun, b"begun");
    assert_eq!(end, Err(std::io::ErrorKind::ConnectionReset));
    proxyd
        .record(|r| r.reason.as_deref().is_some_and(|text| text.starts_with("tunnel_silent")))
        .await;
}
