//! One lease at the end of its share of descriptors, and another beside it. The limit of this very
//! process is lowered first, and proxyd inherits it: a file of its own, so that no other test meets
//! the limit.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, Rlimit, setrlimit};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Of which one lease's share of requests is a sixteenth.
const DESCRIPTORS: u64 = 512;
const SHARE: usize = 32;

/// Answers `/`, and is silent to everything else as long as the client stays.
async fn often_silent(mut stream: tokio_rustls::server::TlsStream<TcpStream>) {
    while let Some((head, _)) = request(&mut stream).await {
        if !head.starts_with("GET / ") {
            let _ = stream.read_u8().await;
            return;
        }
        let answer = b"HTTP/1.1 200 So\r\nContent-Length: 0\r\n\r\n";
        if stream.write_all(answer).await.is_err() || stream.flush().await.is_err() {
            return;
        }
    }
}

fn get(path: &str) -> http::Request<()> {
    http::Request::builder().uri(format!("https://open.test{path}")).body(()).unwrap()
}

async fn status(lease: &Lease) -> String {
    let mut stream = lease.h1("open.test").await;
    let asked = b"GET / HTTP/1.1\r\nHost: open.test\r\nConnection: close\r\n\r\n";
    talk(&mut stream, asked).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_with_too_many_requests_is_told_so_at_once_and_another_lease_is_served() {
    let limit = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let waiting = Arc::new(AtomicUsize::new(0));
    let upstream = Upstream::tls("open.test", &[b"http/1.1"], {
        let waiting = Arc::clone(&waiting);
        move |stream| {
            let waiting = Arc::clone(&waiting);
            async move {
                waiting.fetch_add(1, Ordering::SeqCst);
                often_silent(stream).await;
                waiting.fetch_sub(1, Ordering::SeqCst);
            }
        }
    })
    .await;
    let raw = Upstream::tcp(|_| std::future::ready(())).await;
    let rows = [("open.test", &upstream), ("raw.test", &raw)];
    let proxyd = Proxyd::start(POLICY, &rows).await;
    let (greedy, other) = (proxyd.lease().await, proxyd.lease().await);

    let mut sender = greedy.h2("open.test").await;
    let asked: Vec<_> = (0..SHARE)
        .map(|number| sender.send_request(get(&format!("/{number}")), true).unwrap())
        .collect();
    until("all of the share is under way", || async { waiting.load(Ordering::SeqCst) == SHARE })
        .await;

    // One more, over either protocol, is refused in words, and recorded.
    let (refused, _) = sender.send_request(get("/more"), true).unwrap();
    let refused = timely(refused).await.unwrap();
    assert_eq!(
        (refused.status(), refused.headers()["retry-after"].as_bytes()),
        (http::StatusCode::SERVICE_UNAVAILABLE, &b"1"[..])
    );
    let (body, _) = h2_body(refused.into_body()).await;
    let body = String::from_utf8(body).unwrap();
    assert!(body.contains("lease_busy") && body.contains("32 requests"), "{body}");
    let answer = status(&greedy).await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("lease_busy"), "{answer}");
    let mut tunnel = greedy.connect("raw.test:9000").await;
    let answer =
        talk(&mut tunnel, b"GET / HTTP/1.1\r\nHost: raw.test:9000\r\nConnection: close\r\n\r\n")
            .await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("lease_busy"), "{answer}");
    assert_eq!(raw.connections.load(Ordering::SeqCst), 0);
    let busy = |record: &ipc::vault::AuditRecord| {
        record.reason.as_deref().is_some_and(|reason| reason.starts_with("lease_busy: "))
    };
    proxyd.record(|record| busy(record) && record.path.as_deref() == Some("/more")).await;
    proxyd.record(|record| busy(record) && record.host.as_deref() == Some("raw.test")).await;

    // The other lease, and the control socket.
    let answer = status(&other).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(!proxyd.health().await.version.is_empty());

    // What has ended can be asked for again.
    drop(asked);
    drop(sender);
    until("the share is free again", || async {
        status(&greedy).await.starts_with("HTTP/1.1 200 ")
    })
    .await;
}
