//! Connections beyond what there are descriptors for: who waits, who goes, who is told so. The
//! limit of this very process is lowered first, and proxyd inherits it: a file of its own.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

mod support;

use rustix::process::{Resource, Rlimit, setrlimit};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// A lease's share of connections is a sixteenth; of what is common there are 192, of places for
/// clients without a token 32.
const DESCRIPTORS: u64 = 1024;
const SHARE: usize = 64;
const COMMON: usize = 192;
const FIRST: usize = 4;

const PLAIN: &str = r#"
[[egress.allow]]
hosts = ["plain.test"]
plaintext = true
methods = ["GET"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["raw.test"]
ports = [9000]
addresses = ["127.0.0.1/32"]
"#;

fn lower_limit() {
    let limit = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    setrlimit(Resource::Nofile, limit).unwrap();
}

async fn started() -> (Proxyd, Upstream, Upstream) {
    lower_limit();
    let raw = Upstream::tcp(|mut stream| async move {
        stream.write_all(b"hello").await.unwrap();
        let _ = stream.read_u8().await;
    })
    .await;
    let plain = Upstream::tcp(echo_h1).await;
    let proxyd = Proxyd::start(PLAIN, &[("raw.test", &raw), ("plain.test", &plain)]).await;
    (proxyd, raw, plain)
}

/// A tunnel through which the upstream's first word has come; or the words of the refusal.
async fn tunnel(lease: &Lease) -> Result<UnixStream, String> {
    let mut stream = lease.plain().await;
    let token = lease.token();
    let request = format!(
        "CONNECT raw.test:9000 HTTP/1.1\r\nHost: raw.test:9000\r\n\
         Proxy-Authorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = timely(head(&mut stream)).await;
    if !head.starts_with("HTTP/1.1 200 ") {
        return Err(head + &talk(&mut stream, b"").await);
    }
    let mut greeting = [0; 5];
    timely(stream.read_exact(&mut greeting)).await.unwrap();
    Ok(stream)
}

async fn ask(stream: &mut UnixStream, lease: &Lease) -> String {
    let token = lease.token();
    let request = format!(
        "GET http://plain.test/ HTTP/1.1\r\nHost: plain.test\r\n\
         Proxy-Authorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    timely(response(stream)).await.0
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_take_all_they_get_cannot_keep_a_fresh_one_out() {
    let (proxyd, _raw, _plain) = started().await;
    let mut greedy = Vec::new();
    for _ in 0..10 {
        greedy.push(proxyd.lease().await);
    }
    let (mut held, mut refusals) = (Vec::new(), Vec::new());
    for lease in &greedy {
        loop {
            match tunnel(lease).await {
                Ok(stream) => held.push(stream),
                Err(words) => break refusals.push(words),
            }
            assert!(held.len() <= greedy.len() * FIRST + COMMON, "{}", held.len());
        }
    }

    assert!(held.len() > 2 * SHARE, "{}", held.len());
    for words in &refusals {
        assert!(words.starts_with("HTTP/1.1 503 ") && words.contains("lease_busy"), "{words}");
        assert_eq!(field(words, "retry-after"), Some("1"));
    }
    proxyd.record(|r| r.reason.as_deref().is_some_and(|r| r.starts_with("lease_busy: "))).await;
    let fresh = proxyd.lease().await;
    let mut first = Vec::new();
    for _ in 0..FIRST {
        first.push(tunnel(&fresh).await.unwrap());
    }
    assert!(!proxyd.health().await.version.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_that_say_nothing_do_not_keep_others_from_opening_leases() {
    let (proxyd, _raw, _plain) = started().await;
    let silent: Vec<_> = (0..300)
        .map(|_| ipc::fd::Channel::connect(&proxyd.layout.proxyd_lease()).unwrap())
        .collect();

    let lease = proxyd.lease().await;

    assert!(tunnel(&lease).await.is_ok());
    let told = timely(silent[0].receive::<ipc::lease::LeaseReply>()).await;
    assert!(told.is_err(), "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_rests_makes_room_for_the_next_of_its_lease() {
    let (proxyd, _raw, _plain) = started().await;
    let lease = proxyd.lease().await;
    let mut resting = Vec::new();
    for _ in 0..SHARE {
        let mut stream = lease.plain().await;
        assert!(ask(&mut stream, &lease).await.starts_with("HTTP/1.1 200 "));
        resting.push(stream);
    }

    let mut next = lease.plain().await;
    let answer = ask(&mut next, &lease).await;

    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    // The one that has rested longest, and no other.
    assert_eq!(timely(resting[0].read(&mut [0])).await.unwrap(), 0);
    for stream in &mut resting[1..] {
        assert!(ask(stream, &lease).await.starts_with("HTTP/1.1 200 "));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_say_nothing_do_not_keep_others_from_the_egress_socket() {
    let (proxyd, _raw, _plain) = started().await;
    let lease = proxyd.lease().await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(lease.plain().await);
    }

    let mut honest = lease.plain().await;
    let answer = ask(&mut honest, &lease).await;

    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(timely(silent[0].read(&mut [0])).await.unwrap(), 0);
    // Nor does the end of all of them touch one that has said whose it is.
    assert!(ask(&mut honest, &lease).await.starts_with("HTTP/1.1 200 "));
}
