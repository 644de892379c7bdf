//! Budgets of rules: what one lease sends and gets under a rule stays within them, however many
//! connections and streams it uses, and whoever is refused can read why and when to come again.
//!
//! Bounds are for a day, so that what comes back while a test runs changes nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::*;
use bytes::Bytes;
use ipc::id::LeaseId;
use ipc::vault::{AuditKind, AuditRecord};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const H1: &[&[u8]] = &[b"http/1.1"];
const H2: &[&[u8]] = &[b"h2"];
const BUDGET: usize = 256 * 1024;

/// A rule for `api.test`.
fn rule(rest: &str) -> String {
    format!("[[egress.allow]]\nhosts = [\"api.test\"]\naddresses = [\"127.0.0.1/32\"]\n{rest}\n")
}

fn gets(rest: &str) -> String {
    rule(&format!("methods = [\"GET\"]\n{rest}"))
}

/// What has arrived at an upstream.
#[derive(Default)]
struct Seen {
    requests: AtomicUsize,
    bytes: AtomicUsize,
}

/// Of fields that come as trailers: more than a half of 16 KiB.
const TRAILER: usize = 10_000;

/// An upstream that counts what arrives. `/endless` is answered without an end, `/trailers` with
/// many bytes of them, all else by an empty answer once the body has ended.
async fn counting() -> (Upstream, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let counts = Arc::clone(&seen);
    let upstream = Upstream::tls("api.test", H2, move |stream| {
        let seen = Arc::clone(&counts);
        async move {
            let builder = h2::server::Builder::new();
            let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
            while let Some(Ok((request, respond))) = connection.accept().await {
                seen.requests.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(count(request, respond, Arc::clone(&seen)));
            }
        }
    });
    (upstream.await, seen)
}

async fn count(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
    seen: Arc<Seen>,
) {
    let endless = request.uri().path() == "/endless";
    let trails = request.uri().path() == "/trailers";
    let mut body = request.into_body();
    while let Some(Ok(data)) = body.data().await {
        seen.bytes.fetch_add(data.len(), Ordering::SeqCst);
        let _ = body.flow_control().release_capacity(data.len());
    }
    if let Ok(Some(trailers)) = body.trailers().await {
        let sizes = trailers.values().map(|value| value.len());
        seen.bytes.fetch_add(sizes.sum(), Ordering::SeqCst);
    }
    let ends = !endless && !trails;
    let Ok(mut out) = respond.send_response(http::Response::new(()), ends) else { return };
    if trails {
        let _ = out.send_trailers(trailers());
    }
    while endless && send(&mut out, 10_000).await {}
}

fn trailers() -> http::HeaderMap {
    let value = http::HeaderValue::from_str(&"x".repeat(TRAILER)).unwrap();
    http::HeaderMap::from_iter([(http::HeaderName::from_static("x-data"), value)])
}

/// Sends so many bytes of a body; false when nobody takes them any more.
async fn send(out: &mut h2::SendStream<Bytes>, mut left: usize) -> bool {
    while left > 0 {
        out.reserve_capacity(left);
        let room = std::future::poll_fn(|context| out.poll_capacity(context)).await;
        let Some(Ok(room)) = room else { return false };
        if out.send_data(vec![b'x'; room.min(left)].into(), false).is_err() {
            return false;
        }
        left -= room.min(left);
    }
    true
}

fn asked(method: &str, path: &str) -> http::Request<()> {
    http::Request::builder().method(method).uri(format!("https://api.test{path}")).body(()).unwrap()
}

/// One request on an open connection over HTTP/1.1.
async fn ask(stream: &mut Tls, method: &str, fields: &str) -> (String, String) {
    let request = format!("{method} /x HTTP/1.1\r\nHost: api.test\r\n{fields}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let (head, body) = timely(response(stream)).await;
    (head, String::from_utf8(body).unwrap())
}

async fn get(lease: &Lease) -> String {
    let mut stream = lease.h1("api.test").await;
    ask(&mut stream, "GET", "").await.0
}

fn is_exceeded(what: &str) -> impl Fn(&AuditRecord) -> bool {
    let what = format!("{what}_exceeded: ");
    move |record| record.reason.as_ref().is_some_and(|reason| reason.starts_with(&what))
}

#[tokio::test]
async fn requests_beyond_a_rate_are_refused_in_words_with_the_time_to_wait_and_recorded() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let policy = gets("rate = \"3/day\"") + &rule("methods = [\"POST\"]");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let (lease, other) = (proxyd.lease().await, proxyd.lease().await);
    let mut stream = lease.h1("api.test").await;
    for _ in 0..3 {
        let (head, _) = ask(&mut stream, "GET", "").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }

    let (head, body) = ask(&mut stream, "GET", "").await;
    let (grpc, _) = ask(&mut stream, "GET", "Content-Type: application/grpc\r\n").await;
    let (_, npm) = ask(&mut stream, "GET", "User-Agent: npm/10.8.2\r\n").await;

    assert!(head.starts_with("HTTP/1.1 429 cleanhands: rate_exceeded: "), "{head}");
    assert_eq!(field(&head, "x-cleanhands-denial"), Some("rate_exceeded"));
    // A third of a day.
    let wait: u32 = field(&head, "retry-after").unwrap().parse().unwrap();
    assert!((1..=28_800).contains(&wait), "{wait}");
    let error = &serde_json::from_str::<serde_json::Value>(&body).unwrap()["error"];
    assert_eq!(
        (&error["code"], &error["rule"]),
        (&"rate_exceeded".into(), &"egress.allow[0]".into())
    );
    assert!(error["reason"].as_str().unwrap().contains("3 requests a day"), "{body}");
    assert_eq!(field(&grpc, "grpc-status"), Some("8"));
    assert!(npm.contains("rate_exceeded"), "{npm}");
    let record = proxyd.record(is_exceeded("rate")).await;
    assert_eq!(record.kind, AuditKind::Denied);
    assert_eq!((record.rule.as_deref(), record.status), (Some("egress.allow[0]"), Some(429)));
    // Neither another rule nor another lease has less for it.
    assert!(ask(&mut stream, "POST", "").await.0.starts_with("HTTP/1.1 200 "));
    assert!(get(&other).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn parallel_connections_new_ones_and_streams_cannot_outrun_a_rate() {
    let (upstream, seen) = counting().await;
    let policy = gets("rate = \"10/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let lease = Arc::new(proxyd.lease().await);
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let lease = Arc::clone(&lease);
        tasks.spawn(async move {
            let mut sender = lease.h2("api.test").await;
            let mut sent = Vec::new();
            for _ in 0..8 {
                sent.push(sender.send_request(asked("GET", "/"), true).unwrap().0);
            }
            let mut passed = 0;
            for response in sent {
                passed += usize::from(timely(response).await.unwrap().status() == 200);
            }
            passed
        });
    }
    for _ in 0..8 {
        let lease = Arc::clone(&lease);
        tasks.spawn(async move { usize::from(get(&lease).await.starts_with("HTTP/1.1 200 ")) });
    }

    let passed: usize = timely(tasks.join_all()).await.into_iter().sum();

    assert_eq!((passed, seen.requests.load(Ordering::SeqCst)), (10, 10));
    assert!(get(&lease).await.starts_with("HTTP/1.1 429 "));
}

#[tokio::test]
async fn uploads_on_many_streams_together_stay_within_a_budget_of_bytes() {
    let (upstream, seen) = counting().await;
    let policy = rule("methods = [\"POST\"]\nbytes = \"256KiB/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let lease = Arc::new(proxyd.lease().await);
    let mut tasks = JoinSet::new();
    for _ in 0..2 {
        let mut sender = lease.h2("api.test").await;
        for _ in 0..4 {
            let (response, mut out) = sender.send_request(asked("POST", "/"), false).unwrap();
            tasks.spawn(async move {
                let whole = send(&mut out, 100_000).await;
                let _ = out.send_data(Bytes::new(), true);
                let status = timely(response).await.map(|response| response.status().as_u16());
                (whole, status.ok())
            });
        }
    }

    let ends = timely(tasks.join_all()).await;

    let arrived = seen.bytes.load(Ordering::SeqCst);
    assert!((50_000..=BUDGET).contains(&arrived), "{arrived}");
    let whole = ends.iter().filter(|(_, status)| *status == Some(200)).count();
    assert!(whole <= 2, "{ends:?}");
    let cut = proxyd.record(|r| is_exceeded("bytes")(r) && r.kind == AuditKind::Outcome).await;
    assert_eq!(cut.rule.as_deref(), Some("egress.allow[0]"));
}

#[tokio::test]
async fn trailers_are_of_the_budget_in_both_directions() {
    let (upstream, seen) = counting().await;
    let policy = rule("methods = [\"GET\", \"POST\"]\nbytes = \"16KiB/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let (up, down) = (proxyd.lease().await, proxyd.lease().await);

    let mut sender = up.h2("api.test").await;
    let mut sent = Vec::new();
    for _ in 0..2 {
        let (response, mut out) = sender.send_request(asked("POST", "/"), false).unwrap();
        out.send_trailers(trailers()).unwrap();
        sent.push(timely(response).await.map(|response| response.status().as_u16()));
    }
    assert!(matches!(&sent[..], [Ok(200), Ok(429)]), "{sent:?}");
    assert_eq!(seen.bytes.load(Ordering::SeqCst), TRAILER);

    let mut sender = down.h2("api.test").await;
    let mut got = Vec::new();
    for _ in 0..2 {
        let (response, _) = sender.send_request(asked("GET", "/trailers"), true).unwrap();
        let mut body = timely(response).await.unwrap().into_body();
        assert!(!matches!(timely(body.data()).await, Some(Ok(data)) if !data.is_empty()));
        got.push(timely(body.trailers()).await.map(|fields| fields.is_some()).ok());
    }
    assert_eq!(got, [Some(true), None]);
    let cut = |r: &AuditRecord| is_exceeded("bytes")(r) && r.kind == AuditKind::Outcome;
    until("both are recorded", || async {
        proxyd.audit().await.iter().filter(|record| cut(record)).count() == 2
    })
    .await;
}

#[tokio::test]
async fn a_request_that_is_sent_once_more_with_another_token_is_paid_for_once_more() {
    let upstream = Upstream::tls("api.test", H1, |mut stream| async move {
        while let Some((head, _)) = request(&mut stream).await {
            let status = if head.contains("TOKEN-NUMBER-1") { 401 } else { 200 };
            let answer = format!("HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n");
            if stream.write_all(answer.as_bytes()).await.is_err() || stream.flush().await.is_err() {
                return;
            }
        }
    })
    .await;
    let policy = gets("bytes = \"16KiB/day\"\ncredential = \"api\"")
        + "[credentials.api]\nsecret = \"exec:op\"\ninject = { bearer = true }\n\
           hosts = [\"api.test\"]\n";
    let config = "[commands.op]\ncommand = [\"/bin/sh\", \"DIR/op.sh\"]\nread = [\"DIR\"]\n\
                  write = [\"DIR\"]\n";
    let script = "cd ${0%/*} && echo run >>runs && echo TOKEN-NUMBER-$(wc -l <runs)";
    let upstreams = [("api.test", &upstream)];
    let proxyd = Proxyd::with(&policy, &upstreams, config, &[("op.sh", script)], &[]).await;
    let (small, large) = (proxyd.lease().await, proxyd.lease().await);

    let fields = format!("X-Large: {}\r\n", "x".repeat(TRAILER));
    let mut stream = large.h1("api.test").await;
    let (head, _) = ask(&mut stream, "GET", &fields).await;

    assert!(head.starts_with("HTTP/1.1 429 cleanhands: bytes_exceeded: "), "{head}");
    // The token that was fetched for it serves whoever has room.
    assert!(get(&small).await.starts_with("HTTP/1.1 200 "));
    let records = proxyd.audit().await;
    let allowed = records.iter().filter(|record| record.kind == AuditKind::Allowed).count();
    assert_eq!(allowed, 2);
}

#[tokio::test]
async fn what_a_request_may_be_taken_for_is_not_let_past_the_budget_of_its_rule() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let policy = rule("methods = [\"POST\"]")
        + &rule("methods = [\"DELETE\", \"PUT\"]\nrate = \"1/day\"")
        + &rule("methods = [\"PATCH\"]\nbytes = \"1MiB/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    for (method, rule) in [("DELETE", 1), ("PATCH", 2)] {
        let taken = format!("X-HTTP-Method-Override: {method}\r\nContent-Length: 0\r\n");
        let (head, body) = ask(&mut stream, "POST", &taken).await;
        assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
        let why = format!("egress.allow[{rule}] counts, and egress.allow[0] does not count for it");
        assert!(body.contains(&why), "{body}");
    }
    assert_eq!(upstream.connections(), 0);
    // Under the same rule it is counted whatever it is taken for, and what nobody counts may be
    // asked for by what is counted.
    let counted = "X-HTTP-Method-Override: DELETE\r\nContent-Length: 0\r\n";
    assert!(ask(&mut stream, "PUT", counted).await.0.starts_with("HTTP/1.1 200 "));
    assert!(ask(&mut stream, "PUT", counted).await.0.starts_with("HTTP/1.1 429 "));
    let free = "X-HTTP-Method-Override: POST\r\nContent-Length: 0\r\n";
    assert!(ask(&mut stream, "PATCH", free).await.0.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn answers_are_cut_where_the_budget_ends_and_do_not_look_whole() {
    let (upstream, _seen) = counting().await;
    let policy = gets("bytes = \"256KiB/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut h1 = lease.h1("api.test").await;
    h1.write_all(b"GET /endless HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let mut sender = lease.h2("api.test").await;
    let (first, _) = sender.send_request(asked("GET", "/endless"), true).unwrap();

    let over_h2 = async {
        let mut body = timely(first).await.unwrap().into_body();
        let mut got = 0;
        loop {
            match timely(body.data()).await {
                Some(Ok(data)) => {
                    got += data.len();
                    assert!(got < 1 << 20, "nothing ends it");
                    let _ = body.flow_control().release_capacity(data.len());
                }
                Some(Err(error)) => return (got, error.is_reset()),
                None => return (got, false),
            }
        }
    };
    let over_h1 = async {
        let mut got = Vec::new();
        let end = timely((&mut h1).take(1 << 20).read_to_end(&mut got)).await;
        assert!(got.len() < 1 << 20, "nothing ends it");
        (got.len(), end.is_err() || !got.ends_with(b"0\r\n\r\n"))
    };
    let (one, two) = tokio::join!(over_h2, over_h1);

    assert!(one.1 && two.1, "an answer looks whole");
    // Chunks have a frame of their own.
    assert!((50_000..=BUDGET + BUDGET / 10).contains(&(one.0 + two.0)), "{one:?} {two:?}");
    let cut = proxyd.record(|r| is_exceeded("bytes")(r) && r.kind == AuditKind::Outcome).await;
    assert_eq!((cut.status, cut.rule.as_deref()), (Some(200), Some("egress.allow[0]")));
}

#[tokio::test]
async fn what_announces_more_than_there_is_room_for_does_not_begin() {
    let announcing = |mut stream: tokio_rustls::server::TlsStream<TcpStream>| async move {
        while request(&mut stream).await.is_some() {
            let answer = b"HTTP/1.1 200 So\r\nContent-Length: 300000\r\n\r\n";
            if stream.write_all(answer).await.is_err() || stream.flush().await.is_err() {
                return;
            }
        }
    };
    let upstream = Upstream::tls("api.test", H1, announcing).await;
    let policy = rule("methods = [\"GET\", \"PUT\"]\nbytes = \"256KiB/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;

    let mut stream = lease.h1("api.test").await;
    let (up, _) = ask(&mut stream, "PUT", "Content-Length: 300000\r\n").await;
    assert_eq!(upstream.connections(), 0);
    let down = get(&lease).await;

    for head in [up, down] {
        assert!(head.starts_with("HTTP/1.1 429 cleanhands: bytes_exceeded: "), "{head}");
        assert!(head.contains("256KiB a day, and this alone is more"), "{head}");
        // No time makes room for it.
        assert_eq!(field(&head, "retry-after"), None);
    }
}

/// Gives every byte back; over TLS after a switch of protocols.
async fn echo(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let mut buffer = vec![0; 4096];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        if stream.write_all(&buffer[..length]).await.is_err() || stream.flush().await.is_err() {
            return;
        }
    }
}

/// Sends a piece and has it back, until that ends; says how many bytes came back.
async fn to_the_end(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> usize {
    let (piece, mut got) = ([7; 1024], 0);
    loop {
        let mut back = [0; 1024];
        let sent = stream.write_all(&piece).await.is_ok() && stream.flush().await.is_ok();
        if !sent || timely(stream.read_exact(&mut back)).await.is_err() {
            return got;
        }
        got += back.len();
        assert!(got < 1 << 20, "nothing ends it");
    }
}

fn tunnels(port: u16, rest: &str) -> String {
    format!(
        "[[egress.allow]]\nhosts = [\"raw.test\"]\nports = [{port}]\n\
         addresses = [\"127.0.0.1/32\"]\n{rest}\n"
    )
}

#[tokio::test]
async fn a_tunnel_is_cut_where_its_budget_ends_and_refused_beyond_its_rate() {
    let raw = Upstream::tcp(echo).await;
    let policy = tunnels(9000, "bytes = \"64KiB/day\"") + &tunnels(9001, "rate = \"1/day\"");
    let proxyd = Proxyd::start(&policy, &[("raw.test", &raw)]).await;
    let lease = proxyd.lease().await;

    let mut tunnel = lease.connect("raw.test:9000").await;
    let mut passed = to_the_end(&mut tunnel).await;
    // Another one has nothing of its own.
    passed += to_the_end(&mut lease.connect("raw.test:9000").await).await;
    // What passed went up and came down; a little has come back meanwhile.
    assert!((31 * 1024..=33 * 1024).contains(&passed), "{passed}");
    proxyd.record(|r| is_exceeded("bytes")(r) && r.kind == AuditKind::Outcome).await;

    let mut first = lease.connect("raw.test:9001").await;
    first.write_all(b"x").await.unwrap();
    assert_eq!(timely(first.read_u8()).await.unwrap(), b'x');
    let mut second = lease.connect("raw.test:9001").await;
    let asked = b"GET / HTTP/1.1\r\nHost: raw.test:9001\r\nConnection: close\r\n\r\n";
    let said = talk(&mut second, asked).await;
    assert!(said.starts_with("HTTP/1.1 429 ") && said.contains("rate_exceeded"), "{said}");
    let denied = proxyd.record(is_exceeded("rate")).await;
    assert_eq!((denied.port, denied.rule.as_deref()), (Some(9001), Some("egress.allow[1]")));
}

#[tokio::test]
async fn what_an_upgraded_connection_carries_is_of_the_budget() {
    let upstream = Upstream::tls("api.test", H1, |mut stream| async move {
        let _ = request(&mut stream).await;
        let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                      Upgrade: websocket\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        echo(stream).await;
    })
    .await;
    let policy = gets("bytes = \"64KiB/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let asked = "GET / HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\n\
                 Upgrade: websocket\r\n\r\n";
    stream.write_all(asked.as_bytes()).await.unwrap();
    assert!(timely(head(&mut stream)).await.starts_with("HTTP/1.1 101 "));

    let passed = to_the_end(&mut stream).await;

    assert!((30 * 1024..=32 * 1024).contains(&passed), "{passed}");
    let cut = proxyd.record(is_exceeded("bytes")).await;
    assert_eq!((cut.kind, cut.status), (AuditKind::Outcome, Some(101)));
}

/// Puts another policy in force.
async fn change(proxyd: &Proxyd, policy: &str, generation: u64) {
    proxyd.write_policy(policy);
    let loaded = format!("policies loaded as generation {generation}");
    proxyd.record(|r| r.reason.as_deref() == Some(&loaded)).await;
}

#[tokio::test]
async fn a_changed_file_leaves_what_was_used_under_a_rule_that_is_still_there() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(&gets("rate = \"3/day\""), &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    for _ in 0..2 {
        assert!(get(&lease).await.starts_with("HTTP/1.1 200 "));
    }

    let before = rule("methods = [\"POST\"]");
    change(&proxyd, &(before.clone() + &gets("rate = \"3/day\"")), 2).await;
    assert!(get(&lease).await.starts_with("HTTP/1.1 200 "));
    assert!(get(&lease).await.contains("egress.allow[1] allows 3 requests a day"));
    change(&proxyd, &(before.clone() + &gets("rate = \"4/day\"")), 3).await;
    assert!(get(&lease).await.starts_with("HTTP/1.1 200 "));
    assert!(get(&lease).await.starts_with("HTTP/1.1 429 "));
    change(&proxyd, &before.replace("POST", "GET"), 4).await;
    assert!(get(&lease).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_budget_of_bytes_that_a_rule_gets_ends_what_nobody_counts() {
    let raw = Upstream::tcp(echo).await;
    let proxyd = Proxyd::start(&tunnels(9000, ""), &[("raw.test", &raw)]).await;
    let lease = proxyd.lease().await;
    let mut uncounted = lease.connect("raw.test:9000").await;
    uncounted.write_all(b"x").await.unwrap();
    assert_eq!(timely(uncounted.read_u8()).await.unwrap(), b'x');

    change(&proxyd, &tunnels(9000, "bytes = \"64KiB/day\""), 2).await;

    assert!(timely(uncounted.read_u8()).await.is_err());
    let passed = to_the_end(&mut lease.connect("raw.test:9000").await).await;
    assert!((31 * 1024..=33 * 1024).contains(&passed), "{passed}");
}

#[tokio::test]
async fn a_lease_that_broke_off_and_comes_back_has_used_what_it_used() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(&gets("rate = \"1/day\""), &[("api.test", &upstream)]).await;
    let id = LeaseId::random();
    let lease = proxyd.open(id.clone()).await.unwrap();
    assert!(get(&lease).await.starts_with("HTTP/1.1 200 "));

    drop(lease);
    // Until its end was noticed, the id is taken.
    let again = std::sync::Mutex::new(None);
    until("the id can be taken again", || async {
        let opened = proxyd.open(id.clone()).await.ok();
        let taken = opened.is_some();
        *again.lock().unwrap() = opened;
        taken
    })
    .await;
    let again = again.into_inner().unwrap().unwrap();

    assert!(get(&again).await.starts_with("HTTP/1.1 429 "));
}
