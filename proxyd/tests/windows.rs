//! How much a peer of HTTP/2 may send before it is read, on both legs: large windows while the
//! lease has memory for them, the smallest there are beyond that.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::*;
use bytes::Bytes;

const LEAST: usize = 65_535;
const CLIENTS_WINDOW: usize = 256 * 1024;
const UPSTREAMS_WINDOW: usize = 1 << 20;
/// Of its 32 MiB a client's connection takes one, and one to an upstream four.
const CLIENTS_MAX: usize = 32;
const UPSTREAMS_MAX: usize = 8;

fn request(path: &str) -> http::Request<()> {
    http::Request::post(format!("https://api.test{path}")).body(()).unwrap()
}

/// How much of a body may go before any of it is read. The settings have come: a request was
/// answered.
async fn window(sender: &mut h2::client::SendRequest<Bytes>) -> usize {
    let (answer, _) = sender.send_request(request("/settle"), true).unwrap();
    assert_eq!(timely(answer).await.unwrap().status(), 200);
    let (_answer, mut body) = sender.send_request(request("/"), false).unwrap();
    body.reserve_capacity(2 * UPSTREAMS_WINDOW);
    let room = std::future::poll_fn(|context| body.poll_capacity(context));
    timely(room).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_one_lease_have_large_windows_for_so_many_connections_and_small_ones_then() {
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let (greedy, other) = (proxyd.lease().await, proxyd.lease().await);

    let mut kept = Vec::new();
    let mut windows = Vec::new();
    for _ in 0..CLIENTS_MAX + 2 {
        let mut sender = greedy.h2("api.test").await;
        windows.push(window(&mut sender).await);
        kept.push(sender);
    }

    assert!(windows[..CLIENTS_MAX].iter().all(|own| *own == CLIENTS_WINDOW), "{windows:?}");
    assert!(windows[CLIENTS_MAX..].iter().all(|own| *own == LEAST), "{windows:?}");
    let mut sender = other.h2("api.test").await;
    assert_eq!(window(&mut sender).await, CLIENTS_WINDOW, "another lease's are its own");
    drop(kept);
    until("what has ended gave its windows back", || async {
        window(&mut greedy.h2("api.test").await).await == CLIENTS_WINDOW
    })
    .await;
}

/// Says of each stream how much of an answer may go before any of it is read.
async fn say_window(
    stream: tokio_rustls::server::TlsStream<tokio::net::TcpStream>,
    connections: Arc<AtomicUsize>,
) {
    connections.fetch_add(1, Ordering::SeqCst);
    let mut builder = h2::server::Builder::new();
    // One request each, so that every request needs a connection.
    builder.max_concurrent_streams(1).max_send_buffer_size(8 * UPSTREAMS_WINDOW);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    while let Some(Ok((_, mut respond))) = connection.accept().await {
        let answer = http::Response::new(());
        let mut body = respond.send_response(answer, false).unwrap();
        body.reserve_capacity(2 * UPSTREAMS_WINDOW);
        let capacity = body.capacity();
        // The answer does not end: its connection stays taken.
        body.send_data(Bytes::from(format!("{capacity:>8}")), false).unwrap();
        tokio::spawn(async move {
            let _ = std::future::poll_fn(|context| body.poll_reset(context)).await;
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upstreams_of_one_lease_have_large_windows_for_so_many_connections_and_small_ones_then() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let serve = move |stream| say_window(stream, Arc::clone(&counted));
    let mut upstreams = Vec::new();
    let names: Vec<_> = (0..UPSTREAMS_MAX + 2).map(|n| format!("u{n}.test")).collect();
    for name in &names {
        upstreams.push(Upstream::tls(name, &[b"h2"], serve.clone()).await);
    }
    let rows: Vec<_> = names.iter().map(String::as_str).zip(&upstreams).collect();
    let hosts = names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
    let rule = format!(
        "[[egress.allow]]\nhosts = [{hosts}]\nmethods = [\"GET\"]\naddresses = [\"127.0.0.1/32\"]\n"
    );
    let proxyd = Proxyd::start(&rule, &rows).await;
    let lease = proxyd.lease().await;

    let (mut kept, mut windows) = (Vec::new(), Vec::new());
    for name in &names {
        let mut sender = lease.h2(name).await;
        let asked = http::Request::get(format!("https://{name}/")).body(()).unwrap();
        let (answer, _) = sender.send_request(asked, true).unwrap();
        let mut body = timely(answer).await.unwrap().into_body();
        let said = timely(body.data()).await.unwrap().unwrap();
        windows.push(std::str::from_utf8(&said).unwrap().trim().parse::<usize>().unwrap());
        kept.push((sender, body));
    }

    // The client's connections take their part of the same share.
    let large = windows.iter().take_while(|own| **own == UPSTREAMS_WINDOW).count();
    assert!((UPSTREAMS_MAX / 2..UPSTREAMS_MAX).contains(&large), "{windows:?}");
    assert!(windows[large..].iter().all(|own| *own == LEAST), "{windows:?}");
    assert_eq!(connections.load(Ordering::SeqCst), names.len());
}
