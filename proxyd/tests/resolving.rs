//! One resolution, and only for names that a rule allowed: what a name server says first is
//! checked and dialled, what it says next is not asked for, and no question carries anything out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::nameserver::NameServer;
use crate::support::*;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const A: u16 = 1;
const AAAA: u16 = 28;

fn v4(text: &str) -> IpAddr {
    text.parse::<Ipv4Addr>().unwrap().into()
}

/// An upstream that says a word, at the same port of two loopback addresses.
async fn two_upstreams() -> (Upstream, Upstream) {
    loop {
        let inner = Upstream::tcp(|mut stream| async move {
            let _ = stream.write_all(b"inner").await;
        })
        .await;
        let address = SocketAddr::new(v4("127.0.0.2"), inner.address.port());
        let outer = Upstream::tcp_at(address, |mut stream| async move {
            let _ = stream.write_all(b"outer").await;
        });
        // Somebody else may have that port at the second address.
        if let Some(outer) = outer.await {
            return (inner, outer);
        }
    }
}

fn policy(host: &str, port: u16) -> String {
    format!(
        "[[egress.allow]]\nhosts = [\"{host}\"]\nports = [{port}]\naddresses = [\"127.0.0.2/32\"]\n"
    )
}

/// What comes out of a tunnel to an authority.
async fn said(lease: &Lease, authority: &str) -> String {
    let mut stream = lease.connect(authority).await;
    // A plain request, so that a refusal has something to answer.
    stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = Vec::new();
    let _ = timely(stream.read_to_end(&mut text)).await;
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test]
async fn only_checked_addresses_are_dialled_whatever_the_resolver_says_next() {
    let (inner, outer) = two_upstreams().await;
    let port = outer.address.port();
    let names = NameServer::start(|name, kind, asked_before| match (name, kind) {
        ("flip.test", A) if asked_before % 2 == 0 => Some(vec![v4("127.0.0.2")]),
        ("flip.test", A) => Some(vec![v4("127.0.0.1")]),
        ("flip.test", AAAA) => Some(vec![]),
        _ => None,
    })
    .await;
    let proxyd = Proxyd::configured(&policy("flip.test", port), &[], &names.config()).await;
    let lease = proxyd.lease().await;

    let authority = format!("flip.test:{port}");
    for turn in 0..6 {
        let text = said(&lease, &authority).await;

        if turn % 2 == 0 {
            assert_eq!(text, "outer", "turn {turn}");
        } else {
            assert!(text.starts_with("HTTP/1.1 403 "), "turn {turn}: {text}");
            assert!(text.contains("address_private") && text.contains("127.0.0.1"), "{text}");
        }
        assert_eq!(names.asked("flip.test", A), turn + 1, "more than one resolution");
    }
    assert_eq!((outer.connections(), inner.connections()), (3, 0));
}

#[tokio::test]
async fn a_name_with_one_forbidden_address_among_others_is_refused_whole() {
    let (inner, outer) = two_upstreams().await;
    let port = outer.address.port();
    let names = NameServer::start(|name, kind, _| match (name, kind) {
        ("two.test", A) => Some(vec![v4("127.0.0.2"), v4("127.0.0.1")]),
        ("six.test" | "mapped.test", A) => Some(vec![v4("127.0.0.2")]),
        ("six.test", AAAA) => Some(vec![Ipv6Addr::LOCALHOST.into()]),
        ("mapped.test", AAAA) => Some(vec![Ipv4Addr::LOCALHOST.to_ipv6_mapped().into()]),
        ("metadata.test", A) => Some(vec![v4("169.254.169.254")]),
        ("good.test", A) => Some(vec![v4("127.0.0.2")]),
        (_, AAAA) => Some(vec![]),
        _ => None,
    })
    .await;
    let policy = policy("*.test", port).replace("*.test", "*.bad.test\", \"good.test");
    let policy = ["two", "six", "mapped", "metadata"]
        .iter()
        .fold(policy, |text, name| text.replace("\"good", &format!("\"{name}.test\", \"good")));
    let proxyd = Proxyd::configured(&policy, &[], &names.config()).await;
    let lease = proxyd.lease().await;

    for name in ["two", "six", "mapped", "metadata"] {
        let text = said(&lease, &format!("{name}.test:{port}")).await;
        assert!(text.starts_with("HTTP/1.1 403 "), "{name}: {text}");
    }

    assert_eq!(said(&lease, &format!("good.test:{port}")).await, "outer");
    assert_eq!((outer.connections(), inner.connections()), (1, 0));
}

#[tokio::test]
async fn a_kept_connection_is_not_resolved_again_and_stays_where_it_was_checked() {
    let mut upstream = Upstream::tls_at(v4("127.0.0.2"), "api.test", &[b"http/1.1"], echo_h1).await;
    let names = NameServer::start(|_, kind, asked_before| match (kind, asked_before) {
        (A, 0) => Some(vec![v4("127.0.0.2")]),
        (A, _) => Some(vec![v4("127.0.0.1")]),
        _ => Some(vec![]),
    })
    .await;
    let port = upstream.address.port();
    let policy = policy("api.test", port) + "methods = [\"GET\"]\n";
    // The table only says whom to trust.
    let ca = std::mem::take(&mut upstream.ca_pem);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ca.pem"), ca).unwrap();
    let row =
        format!("[upstreams.\"api.test\"]\nca = \"{}\"\n", dir.path().join("ca.pem").display());
    let proxyd = Proxyd::configured(&policy, &[], &(names.config() + &row)).await;
    let lease = proxyd.lease().await;

    for _ in 0..3 {
        let mut stream = lease.tls(&format!("api.test:{port}"), "api.test", b"http/1.1").await;
        let request = format!("GET / HTTP/1.1\r\nHost: api.test:{port}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let (head, _) = timely(response(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }

    assert_eq!((upstream.connections(), names.asked("api.test", A)), (1, 1));
}

#[tokio::test]
async fn a_name_that_no_rule_could_match_is_never_asked_for_outside() {
    let names = NameServer::start(|_, _, _| Some(vec![v4("127.0.0.1")])).await;
    let proxyd = Proxyd::configured(POLICY, &[], &names.config()).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let secret = "d4c3b2a1.evil.test";

    // By every way in, as a name of its own and behind an allowed one.
    let plain = format!("GET / HTTP/1.1\r\nHost: {secret}\r\nConnection: close\r\n\r\n");
    for authority in [format!("{secret}:443"), format!("{secret}:80"), format!("{secret}:9000")] {
        let answer = talk(&mut lease.connect(&authority).await, plain.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{authority}: {answer}");
        let mut inside = lease.tls(&authority, secret, b"http/1.1").await;
        let answer = talk(&mut inside, plain.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{authority}: {answer}");
    }
    let token = lease.token();
    for scheme in ["http", "https"] {
        let absolute = format!(
            "GET {scheme}://{secret}/ HTTP/1.1\r\nHost: {secret}\r\nConnection: close\r\n\
             Proxy-Authorization: Bearer {token}\r\n\r\n"
        );
        let answer = talk(&mut lease.plain().await, absolute.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{scheme}: {answer}");
    }
    let answer = talk(&mut lease.h1("api.test").await, plain.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 421 "), "{answer}");
    let mut hello = lease.tls("api.test:443", secret, b"http/1.1").await;
    let answer = talk(&mut hello, plain.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 421 "), "{answer}");

    // What is listed and still not allowed is not asked for either.
    let denied = "DELETE / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";
    let answer = talk(&mut lease.h1("api.test").await, denied.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    assert_eq!(names.questions(), Vec::<(String, u16)>::new());

    let allowed = "GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n";
    talk(&mut lease.h1("api.test").await, allowed.as_bytes()).await;
    let asked = names.questions();
    assert!(!asked.is_empty() && asked.iter().all(|(name, _)| name == "api.test"), "{asked:?}");
}

/// Answers every request with a text.
async fn says(mut stream: impl AsyncRead + AsyncWrite + Unpin, text: &str) {
    while request(&mut stream).await.is_some() {
        let length = text.len();
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}");
        if stream.write_all(answer.as_bytes()).await.is_err() || stream.flush().await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_vaults_worker_finds_a_token_server_by_the_same_name_servers() {
    let token = r#"{"access_token":"ACCESS-CANARY","token_type":"Bearer","expires_in":3600}"#;
    let login = Upstream::tls("login.test", &[b"http/1.1"], |stream| says(stream, token)).await;
    let api = Upstream::tls("api.test", &[b"http/1.1"], |stream| says(stream, "came")).await;
    let names = NameServer::start(|name, kind, _| match (name, kind) {
        ("login.test", A) => Some(vec![v4("127.0.0.1")]),
        ("login.test", AAAA) => Some(vec![]),
        _ => None,
    })
    .await;
    let policy = format!(
        "[[egress.allow]]\nhosts = [\"api.test\"]\nmethods = [\"GET\"]\n\
         addresses = [\"127.0.0.1/32\"]\ncredential = \"api\"\n\
         [credentials.api]\nsecret = \"local:client\"\nhosts = [\"api.test\"]\n\
         [credentials.api.inject.oauth2]\ngrant = \"client-credentials\"\nclient-id = \"c\"\n\
         token-url = \"https://login.test:{}/token\"\n",
        login.address.port()
    );
    let config = names.config() + "[upstreams.\"login.test\"]\nca = \"DIR/login.pem\"\n";
    let files = [("login.pem", &*login.ca_pem)];
    let proxyd = Proxyd::with(&policy, &[("api.test", &api)], &config, &files, &[]).await;
    let value = bytes::Bytes::from_static(b"CLIENT-CANARY");
    let control = proxyd.control();
    control.call(http::Method::PUT, "/v1/secrets/client", None, value).await.unwrap();
    let lease = proxyd.lease().await;

    let mut stream = lease.h1("api.test").await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;

    assert_eq!((&head[..12], &body[..]), ("HTTP/1.1 200", &b"came"[..]), "{head}");
    assert_eq!(names.asked("login.test", A), 1);
    assert_eq!(login.connections(), 1);
}
