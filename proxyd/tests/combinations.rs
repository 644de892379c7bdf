//! HTTP/1.1 and HTTP/2 on either leg: bodies, trailers and denials in all combinations.

use crate::support::*;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

const H1: &[&[u8]] = &[b"http/1.1"];
const H2: &[&[u8]] = &[b"h2"];

type Conn = TlsStream<TcpStream>;

/// A body that no buffer on the way holds whole.
fn large() -> Bytes {
    (0..5 << 20).map(|n| (n % 251) as u8).collect::<Vec<u8>>().into()
}

async fn post_h2(lease: &Lease, body: Bytes) -> (http::response::Parts, Vec<u8>, bool) {
    let mut sender = lease.h2("api.test").await;
    let request = http::Request::post("https://api.test/echo").body(()).unwrap();
    let (response, mut send) = sender.send_request(request, false).unwrap();
    let upload = async {
        h2_send(&mut send, body).await;
        let mut trailers = http::HeaderMap::new();
        trailers.insert("x-sum", http::HeaderValue::from_static("1"));
        send.send_trailers(trailers).unwrap();
    };
    let download = async {
        let (parts, body) = response.await.unwrap().into_parts();
        let (body, trailers) = h2_body(body).await;
        (parts, body, trailers.is_some_and(|map| map.contains_key("grpc-status")))
    };
    timely(async { tokio::join!(upload, download).1 }).await
}

async fn post_h1(lease: &Lease, body: &[u8]) -> (String, Vec<u8>) {
    let stream = lease.h1("api.test").await;
    let (mut read, mut write) = tokio::io::split(stream);
    let length = body.len();
    let head = format!("POST /echo HTTP/1.1\r\nHost: api.test\r\nContent-Length: {length}\r\n\r\n");
    let upload = async {
        write.write_all(head.as_bytes()).await.unwrap();
        write.write_all(body).await.unwrap();
        write.flush().await.unwrap();
    };
    let download = async {
        let head = crate::support::head(&mut read).await;
        let mut body = Vec::new();
        match field(&head, "content-length") {
            Some(digits) => {
                body.resize(digits.parse().unwrap(), 0);
                read.read_exact(&mut body).await.unwrap();
            }
            None => body = chunked(&mut read).await,
        }
        (head, body)
    };
    timely(async { tokio::join!(upload, download).1 }).await
}

async fn chunked(read: &mut (impl tokio::io::AsyncRead + Unpin)) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(read.read_u8().await.unwrap());
        }
        let digits = std::str::from_utf8(&line[..line.len() - 2]).unwrap();
        let size = usize::from_str_radix(digits, 16).unwrap();
        if size == 0 {
            return body;
        }
        let start = body.len();
        body.resize(start + size, 0);
        read.read_exact(&mut body[start..]).await.unwrap();
        read.read_u16().await.unwrap();
    }
}

#[tokio::test]
async fn large_bodies_pass_in_all_four_combinations_of_protocols() {
    let h1_upstream = Upstream::tls("api.test", H1, echo_h1_chunked).await;
    let h2_upstream = Upstream::tls("api.test", H2, echo_h2).await;
    let body = large();
    let masked = format!("Bearer {}", "*".repeat(CANARY.len()));

    for upstream in [&h1_upstream, &h2_upstream] {
        let proxyd = Proxyd::start(POLICY, &[("api.test", upstream)]).await;
        proxyd.put_secret("api").await;
        let lease = proxyd.lease().await;

        let (head, over_h1) = post_h1(&lease, &body).await;
        let (parts, over_h2, _) = post_h2(&lease, body.clone()).await;

        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(over_h1 == body && over_h2 == body, "a body arrived changed");
        assert_eq!(field(&head, "x-echo"), Some(&masked[..]));
        assert_eq!(parts.headers["x-echo"], masked);
    }
}

/// Echoes a request's body, chunked or with a length, as chunks.
async fn echo_h1_chunked(stream: Conn) {
    let (mut read, mut write) = tokio::io::split(stream);
    let head = head(&mut read).await;
    let body = match field(&head, "content-length") {
        Some(digits) => {
            let mut body = vec![0u8; digits.parse().unwrap()];
            read.read_exact(&mut body).await.unwrap();
            body
        }
        None => chunked(&mut read).await,
    };
    let authorization = field(&head, "authorization").unwrap_or("none");
    let answer = format!(
        "HTTP/1.1 200 OK\r\nX-Echo: {authorization}\r\nTransfer-Encoding: chunked\r\n\
         Connection: close\r\n\r\n{:x}\r\n",
        body.len()
    );
    write.write_all(answer.as_bytes()).await.unwrap();
    write.write_all(&body).await.unwrap();
    write.write_all(b"\r\n0\r\n\r\n").await.unwrap();
    write.shutdown().await.unwrap();
}

#[tokio::test]
async fn trailers_pass_over_http2_both_ways() {
    let upstream = Upstream::tls("api.test", H2, echo_h2).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;

    let (parts, body, has_status) = post_h2(&lease, Bytes::from_static(b"message")).await;

    assert_eq!(parts.headers["x-trailers"], "1");
    assert_eq!(body, b"message");
    assert!(has_status);
}

#[tokio::test]
async fn trailers_over_http2_cannot_bring_what_was_judged_already() {
    let upstream = Upstream::tls("api.test", H2, echo_h2).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;
    for name in ["authorization", "host", "content-type", "cookie"] {
        let request = http::Request::post("https://api.test/echo").body(()).unwrap();
        let (response, mut send) = sender.send_request(request, false).unwrap();
        let mut trailers = http::HeaderMap::new();
        trailers.insert(name, http::HeaderValue::from_static("mine"));
        send.send_trailers(trailers).unwrap();

        let response = timely(response).await;

        assert!(response.is_err() || response.unwrap().status() == 400, "{name} went on");
    }
}

#[tokio::test]
async fn a_grpc_client_reads_a_denial_in_its_own_form() {
    let upstream = Upstream::tls("api.test", H2, echo_h2).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let request = http::Request::patch("https://api.test/svc/Method")
        .header("content-type", "application/grpc")
        .body(())
        .unwrap();
    let (response, _) = sender.send_request(request, true).unwrap();
    let response = timely(response).await.unwrap();

    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["grpc-status"], "7");
    let message = response.headers()["grpc-message"].to_str().unwrap();
    assert!(message.contains("method_not_listed"), "{message}");
}
