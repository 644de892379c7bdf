//! A changed policy ends the flows that it no longer allows, of every kind, and no others.

use std::sync::Arc;

use crate::support::*;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

const H1: &[&[u8]] = &[b"http/1.1"];
const H2: &[&[u8]] = &[b"h2"];
const KEPT: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
paths = ["/kept/**"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["kept.test"]
ports = [9000]
addresses = ["127.0.0.1/32"]
"#;
const TAKEN_BACK: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
paths = ["/goes/**"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["goes.test"]
ports = [9000]
addresses = ["127.0.0.1/32"]
"#;

type Conn = TlsStream<TcpStream>;

fn both() -> String {
    format!("{KEPT}{TAKEN_BACK}")
}

/// Serves HTTP/1.1: an endless body that echoes nothing but says each line of its input once, or
/// another protocol that gives every byte back.
async fn serve_h1(mut stream: Conn) {
    while let Some((head, _)) = request(&mut stream).await {
        let switches = field(&head, "upgrade").is_some();
        let answer = if switches {
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        } else if head.contains("/open ") {
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n"
        } else {
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        };
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        if answer.ends_with("ok") {
            continue;
        }
        let mut byte = [0];
        while let Ok(1) = stream.read(&mut byte).await {
            let _ = stream.write_all(&byte).await;
            let _ = stream.flush().await;
        }
        return;
    }
}

async fn echo(mut stream: TcpStream) {
    let mut byte = [0];
    while let Ok(1) = stream.read(&mut byte).await {
        let _ = stream.write_all(&byte).await;
    }
}

async fn says_back(stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin)) -> bool {
    let mut byte = [0];
    stream.write_all(b"x").await.unwrap();
    stream.flush().await.unwrap();
    timely(stream.read_exact(&mut byte)).await.is_ok() && byte == *b"x"
}

async fn start(lease: &Lease, path: &str, upgrade: bool) -> (Tls, String) {
    let mut stream = lease.h1("api.test").await;
    let fields = if upgrade { "Connection: Upgrade\r\nUpgrade: websocket\r\n" } else { "" };
    let request = format!("GET {path} HTTP/1.1\r\nHost: api.test\r\n{fields}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = timely(head(&mut stream)).await;
    (stream, head)
}

/// How a stream ended: with an error, or in order after so many bytes.
async fn end(stream: &mut (impl AsyncReadExt + Unpin)) -> Result<usize, std::io::ErrorKind> {
    timely(stream.read_to_end(&mut Vec::new())).await.map_err(|error| error.kind())
}

#[tokio::test]
async fn what_a_changed_file_takes_back_ends_over_http_1_1_upgraded_and_tunnelled() {
    let upstream = Upstream::tls("api.test", H1, serve_h1).await;
    let raw = Upstream::tcp(echo).await;
    let rows = [("api.test", &upstream), ("kept.test", &raw), ("goes.test", &raw)];
    let proxyd = Proxyd::start(&both(), &rows).await;
    let lease = proxyd.lease().await;
    let (mut body_goes, begun) = start(&lease, "/goes/open", false).await;
    assert!(begun.starts_with("HTTP/1.1 200 "), "{begun}");
    let (mut socket_goes, _) = start(&lease, "/goes/ws", true).await;
    let (mut socket_kept, _) = start(&lease, "/kept/ws", true).await;
    let mut tunnel_goes = lease.connect("goes.test:9000").await;
    let mut tunnel_kept = lease.connect("kept.test:9000").await;
    let (mut resting, _) = start(&lease, "/goes/short", false).await;
    let mut ok = [0; 2];
    timely(resting.read_exact(&mut ok)).await.unwrap();
    for stream in [&mut socket_goes, &mut socket_kept] {
        assert!(says_back(stream).await);
    }
    for stream in [&mut tunnel_goes, &mut tunnel_kept] {
        assert!(says_back(stream).await);
    }

    proxyd.write_policy(KEPT);

    // Neither goes on, and neither looks as if it had come to its end.
    assert!(end(&mut body_goes).await.is_err());
    assert!(end(&mut socket_goes).await.is_err());
    // A Unix socket knows no reset.
    let _ = end(&mut tunnel_goes).await;
    assert!(says_back(&mut socket_kept).await && says_back(&mut tunnel_kept).await);
    // A connection at rest stays, and its next request is judged by what holds now.
    resting.write_all(b"GET /goes/again HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let denied = timely(head(&mut resting)).await;
    assert!(denied.starts_with("HTTP/1.1 403 "), "{denied}");
    for path in ["/goes/open", "/goes/ws"] {
        let changed = |text: &String| text.starts_with("policy_changed");
        let ended = |r: &ipc::vault::AuditRecord| {
            r.path.as_deref() == Some(path) && r.reason.as_ref().is_some_and(changed)
        };
        proxyd.record(ended).await;
    }
}

#[tokio::test]
async fn what_is_taken_back_ends_its_http2_streams_and_leaves_the_others_of_the_connection() {
    let upstream = Upstream::tls("api.test", H2, |stream| async move {
        let builder = h2::server::Builder::new();
        let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let mut send = respond.send_response(http::Response::new(()), false).unwrap();
            send.send_data(Bytes::from_static(b"begun"), false).unwrap();
            tokio::spawn(async move {
                let (body, _) = h2_body(request.into_body()).await;
                let _ = send.send_data(body.into(), true);
            });
        }
    })
    .await;
    let policy = both().replace("[\"GET\"]", "[\"POST\"]");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;
    let mut streams = Vec::new();
    for path in ["/goes/x", "/kept/x"] {
        let request = http::Request::post(format!("https://api.test{path}")).body(()).unwrap();
        let (response, up) = sender.send_request(request, false).unwrap();
        let mut down = timely(response).await.unwrap().into_body();
        assert_eq!(timely(down.data()).await.unwrap().unwrap(), "begun");
        streams.push((up, down));
    }

    proxyd.write_policy(&KEPT.replace("[\"GET\"]", "[\"POST\"]"));

    let (_goes_up, mut goes) = streams.remove(0);
    let (mut kept_up, mut kept) = streams.remove(0);
    let ended = timely(goes.data()).await.unwrap();
    kept_up.send_data(Bytes::from_static(b"still here"), true).unwrap();
    let back = timely(kept.data()).await.unwrap().unwrap();
    assert!(ended.unwrap_err().is_reset());
    assert_eq!(back, "still here");
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn the_signal_reads_the_files_again_and_what_is_still_allowed_notices_nothing() {
    let raw = Arc::new(Upstream::tcp(echo).await);
    let proxyd = Proxyd::start(&both(), &[("kept.test", &raw)]).await;
    let lease = proxyd.lease().await;
    let mut kept = lease.connect("kept.test:9000").await;
    assert!(says_back(&mut kept).await);

    for _ in 0..3 {
        let before = reloads(&proxyd).await;
        proxyd.hang_up();
        until("the files are read again", || async { reloads(&proxyd).await > before }).await;
        assert!(says_back(&mut kept).await);
    }
}

async fn reloads(proxyd: &Proxyd) -> usize {
    let loaded = |text: &String| text.starts_with("policies loaded");
    proxyd.audit().await.iter().filter(|r| r.reason.as_ref().is_some_and(loaded)).count()
}

#[tokio::test]
async fn a_credential_that_is_taken_back_ends_the_requests_that_carry_it() {
    let upstream = Upstream::tls("api.test", H1, serve_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let (mut carries, head) = start(&lease, "/open", false).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");

    // The request itself would still be allowed, without the credential.
    proxyd.write_policy(&POLICY.replacen("credential = \"api\"\n", "", 1));

    assert!(end(&mut carries).await.is_err());
}

/// A rule with a credential whose value stands in bodies.
const IN_BODIES: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET", "POST"]
addresses = ["127.0.0.1/32"]
credential = "api"
[credentials.api]
secret = "local:api"
inject = { placeholder = ["body"] }
hosts = ["api.test"]
env = "API_TOKEN"
"#;
const ASKED_FOR: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "api"
[credentials.api]
secret = "exec:op"
inject = { bearer = true }
hosts = ["api.test"]
"#;
/// A command that has begun, and ends when a file is there.
const SLOW: &str =
    "cd ${0%/*}; echo begun >begun; until [ -e go ]; do sleep 0.1; done; echo TAKEN-BACK-VALUE";

fn is_changed(record: &ipc::vault::AuditRecord) -> bool {
    record.reason.as_ref().is_some_and(|reason| reason.starts_with("policy_changed: "))
}

#[tokio::test]
async fn what_is_taken_back_while_its_secret_is_fetched_is_refused_at_once_and_never_sent() {
    let upstream = Upstream::tls("api.test", H1, serve_h1).await;
    let config = "[commands.op]\ncommand = [\"/bin/sh\", \"DIR/op.sh\"]\nread = [\"DIR\"]\n\
                  write = [\"DIR\"]\ntimeout = \"15s\"\n";
    let upstreams = [("api.test", &upstream)];
    let proxyd = Proxyd::with(ASKED_FOR, &upstreams, config, &[("op.sh", SLOW)], &[]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    stream.write_all(b"GET /short HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let begun = proxyd.layout.config.join("begun");
    until("the command has begun", || async { begun.exists() }).await;

    proxyd.write_policy(&ASKED_FOR.replace("\"GET\"", "\"PUT\""));

    // The command has not ended.
    let (denied, _) = timely(response(&mut stream)).await;
    assert!(denied.starts_with("HTTP/1.1 403 "), "{denied}");
    assert_eq!(field(&denied, "x-cleanhands-denial"), Some("policy_changed"));
    proxyd.write_config("go", "");
    let record = proxyd.record(is_changed).await;
    assert_eq!(record.kind, ipc::vault::AuditKind::Denied);
    // What it fetches serves a request that is still allowed, so it has come to its end by then.
    let mut other = lease.h1("api.test").await;
    let put = b"PUT /short HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\n\r\n";
    other.write_all(put).await.unwrap();
    assert!(timely(head(&mut other)).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn what_is_taken_back_while_its_body_is_held_is_not_sent_on_a_connection_that_was_kept() {
    let (seen, mut arrives) = tokio::sync::mpsc::unbounded_channel();
    let upstream = Upstream::tls("api.test", H2, move |stream| {
        let seen = seen.clone();
        async move {
            let builder = h2::server::Builder::new();
            let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                seen.send(request.method().to_string()).unwrap();
                respond.send_response(http::Response::new(()), true).unwrap();
            }
        }
    })
    .await;
    let proxyd = Proxyd::start(IN_BODIES, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;
    let ask = |method: &str| {
        http::Request::builder().method(method).uri("https://api.test/x").body(()).unwrap()
    };
    let (first, _) = sender.send_request(ask("GET"), true).unwrap();
    assert_eq!(timely(first).await.unwrap().status(), 200);
    let (held, mut body) = sender.send_request(ask("POST"), false).unwrap();
    body.send_data(Bytes::from_static(b"half"), false).unwrap();
    // Until it is held: it is under way on the lease by then.
    until("it is under way", || async { flows(&proxyd).await == 1 }).await;

    proxyd.write_policy(&IN_BODIES.replace("[\"GET\", \"POST\"]", "[\"GET\"]"));

    let denied = timely(held).await.unwrap();
    assert_eq!(denied.status(), 403);
    assert_eq!(denied.headers()["x-cleanhands-denial"], "policy_changed");
    let _ = body.send_data(Bytes::from_static(b"whole"), true);
    let (last, _) = sender.send_request(ask("GET"), true).unwrap();
    assert_eq!(timely(last).await.unwrap().status(), 200);
    let arrived = [timely(arrives.recv()).await, timely(arrives.recv()).await];
    assert_eq!(arrived.map(Option::unwrap), ["GET", "GET"]);
    assert_eq!(upstream.connections(), 1);
}

async fn flows(proxyd: &Proxyd) -> u64 {
    let leases: serde_json::Value = proxyd.control().get("/v1/leases").await.unwrap();
    leases["leases"][0]["flows"].as_u64().unwrap()
}

#[tokio::test]
async fn what_is_taken_back_while_it_is_dialled_passes_nothing_and_ends_at_once() {
    // A proxy that takes the request for a tunnel and says nothing.
    let (asked, mut asks) = tokio::sync::mpsc::unbounded_channel();
    let (ended, mut ends) = tokio::sync::mpsc::unbounded_channel();
    let silent = Upstream::tcp(move |mut stream| {
        let (asked, ended) = (asked.clone(), ended.clone());
        async move {
            let _ = request(&mut stream).await;
            asked.send(()).unwrap();
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            ended.send(rest).unwrap();
        }
    })
    .await;
    let config = format!(
        "[upstream-proxy]\nurl = \"http://{}\"\nresolve = \"proxy\"\n\
         [upstreams.\"goes.test\"]\nconnect-timeout = \"60s\"\n",
        silent.address
    );
    let proxyd = Proxyd::configured(&both(), &[], &config).await;
    let lease = proxyd.lease().await;
    let mut tunnel = lease.connect("goes.test:9000").await;
    tunnel.write_all(b"x").await.unwrap();
    timely(asks.recv()).await.unwrap();

    proxyd.write_policy(KEPT);

    assert!(timely(ends.recv()).await.unwrap().is_empty());
    let _ = end(&mut tunnel).await;
    let outcome = proxyd.record(is_changed).await;
    assert_eq!(outcome.kind, ipc::vault::AuditKind::Outcome);
}
