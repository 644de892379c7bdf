//! Certificates that policies open connections with: to whom they are shown, on which connections,
//! and what is told where one is not to be had or not liked.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::corporate::{Corporate, forwards};
use crate::support::*;
use bytes::Bytes;
use ipc::vault::{AuditKind, SecretInfo};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::{TLS12, TLS13};
use rustls::{HandshakeKind, SupportedProtocolVersion};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

const H1: &[&[u8]] = &[b"http/1.1"];
const BOTH: &[&[u8]] = &[b"h2", b"http/1.1"];
const VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["corp.test"]
paths = ["/one/**"]
addresses = ["127.0.0.1/32"]
credential = "one"
[[egress.allow]]
hosts = ["corp.test"]
paths = ["/two/**"]
addresses = ["127.0.0.1/32"]
credential = ["two", "token"]
[[egress.allow]]
hosts = ["corp.test"]
paths = ["/plain/**"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["other.test"]
paths = ["/**"]
addresses = ["127.0.0.1/32"]
[credentials.one]
secret = "local:one"
inject = { client-certificate = true }
hosts = ["corp.test"]
[credentials.two]
secret = "local:two"
inject = { client-certificate = true }
hosts = ["corp.test"]
[credentials.token]
secret = "local:token"
inject = { bearer = true }
hosts = ["corp.test"]
"#;

/// What an upstream saw of each connection that it took: which of its clients, and how.
struct Notes {
    clients: Vec<Vec<u8>>,
    seen: Mutex<Vec<(Option<usize>, HandshakeKind)>>,
}

impl Notes {
    fn of(clients: &[&Identity]) -> Arc<Self> {
        let clients = clients.iter().map(|client| der(client)).collect();
        Arc::new(Self { clients, seen: Mutex::default() })
    }

    fn note(&self, stream: &TlsStream<TcpStream>) {
        let session = stream.get_ref().1;
        let shown = session.peer_certificates().map(|chain| {
            self.clients.iter().position(|known| **known == *chain[0]).expect("a known client")
        });
        self.seen.lock().unwrap().push((shown, session.handshake_kind().unwrap()));
    }

    fn take(&self) -> Vec<(Option<usize>, HandshakeKind)> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }

    fn shown(&self) -> Vec<Option<usize>> {
        self.take().into_iter().map(|(shown, _)| shown).collect()
    }
}

/// Says of each request whether it brings a key of its own.
async fn serve_h1(mut stream: TlsStream<TcpStream>, more: &str) {
    while let Some((head, _)) = request(&mut stream).await {
        let bearer = field(&head, "authorization") == Some(&format!("Bearer {CANARY}"));
        let answer =
            format!("HTTP/1.1 200 Fine\r\nContent-Length: 0\r\nX-Key: {bearer}\r\n{more}\r\n");
        if stream.write_all(answer.as_bytes()).await.is_err() || !more.is_empty() {
            break;
        }
    }
    let _ = stream.shutdown().await;
}

/// An upstream that knows these clients, and lets in who shows nothing where that is not demanded.
async fn asking(
    name: &str,
    clients: &[&Identity],
    demanded: bool,
    versions: &[&'static SupportedProtocolVersion],
    alpn: &[&[u8]],
) -> (Upstream, Arc<Notes>) {
    let seen = Notes::of(clients);
    let notes = Arc::clone(&seen);
    let cas: Vec<_> = clients.iter().map(|client| client.ca_pem.as_str()).collect();
    let serve = move |stream: TlsStream<TcpStream>| {
        notes.note(&stream);
        async move {
            match stream.get_ref().1.alpn_protocol() {
                Some(b"h2") => echo_h2(stream).await,
                _ => serve_h1(stream, "").await,
            }
        }
    };
    (Upstream::asking(name, (&cas, demanded), versions, alpn, serve).await, seen)
}

fn pair(client: &Identity) -> String {
    [client.chain_pem.as_str(), &client.key_pem].concat()
}

fn der(client: &Identity) -> Vec<u8> {
    CertificateDer::from_pem_slice(client.chain_pem.as_bytes()).unwrap().to_vec()
}

async fn store(proxyd: &Proxyd, name: &str, value: &str) {
    stored(proxyd, name, value).await.unwrap();
}

async fn stored(proxyd: &Proxyd, name: &str, value: &str) -> Result<Bytes, ipc::fault::Fault> {
    let path = format!("/v1/secrets/{name}");
    let value = Bytes::copy_from_slice(value.as_bytes());
    proxyd.control().call(http::Method::PUT, &path, None, value).await
}

async fn state(proxyd: &Proxyd, name: &str) -> String {
    #[derive(serde::Deserialize)]
    struct List {
        secrets: Vec<SecretInfo>,
    }
    let list: List = proxyd.control().get("/v1/secrets").await.unwrap();
    list.secrets.into_iter().find(|secret| secret.name == name).unwrap().state
}

/// One request on a connection that stays open.
async fn ask(stream: &mut Tls, host: &str, path: &str) -> (String, String) {
    let get = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    stream.write_all(get.as_bytes()).await.unwrap();
    let (head, body) = timely(response(stream)).await;
    (head, String::from_utf8(body).unwrap())
}

fn told(body: &str) -> (String, String) {
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    let word = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
    (word("code"), format!("{} {}", word("reason"), word("hint")))
}

#[tokio::test]
async fn each_rules_requests_go_on_connections_that_were_opened_with_its_certificate() {
    let (one, two) = (Identity::new(), Identity::new());
    for version in VERSIONS {
        let (upstream, seen) = asking("corp.test", &[&one, &two], false, &[version], BOTH).await;
        let (other, at_other) = asking("other.test", &[&one, &two], false, &[version], BOTH).await;
        let upstreams = [("corp.test", &upstream), ("other.test", &other)];
        let proxyd = Proxyd::start(POLICY, &upstreams).await;
        store(&proxyd, "one", &pair(&one)).await;
        store(&proxyd, "two", &pair(&two)).await;
        proxyd.put_secret("token").await;
        let lease = proxyd.lease().await;
        let paths = ["/one/a", "/one/b", "/two/a", "/plain/a", "/one/c", "/two/b", "/plain/b"];
        let wanted = [Some(0), Some(1), None];

        let mut client = lease.h2("corp.test").await;
        for path in paths {
            let url = format!("https://corp.test{path}");
            let request = http::Request::get(url).body(()).unwrap();
            let (answer, _) = client.send_request(request, true).unwrap();
            let answer = timely(answer).await.unwrap();
            assert_eq!(answer.status(), 200, "{path}");
            // The other credential of a rule goes into the request as ever.
            let keyless = answer.headers().get("x-echo").is_some_and(|echo| echo == "none");
            assert_eq!(keyless, !path.starts_with("/two"), "{answer:?}");
        }
        assert_eq!(seen.shown(), wanted, "over HTTP/2");

        let mut client = lease.h1("corp.test").await;
        for path in paths {
            let (head, body) = ask(&mut client, "corp.test", path).await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}{body}");
            let bearer = path.starts_with("/two").to_string();
            assert_eq!(field(&head, "x-key"), Some(&bearer[..]), "{head}");
        }
        let (head, _) = ask(&mut lease.h1("other.test").await, "other.test", "/a").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        // A connection is kept a moment after its answer was seen, so there may be one more.
        let mut shown = seen.shown();
        shown.sort_by_key(|shown| wanted.iter().position(|one| one == shown));
        shown.dedup();
        assert_eq!(shown, wanted, "over HTTP/1.1");

        assert_eq!(at_other.shown(), [None], "a host of no credential");
        let names = proxyd.audit().await.into_iter().filter(|r| r.kind == AuditKind::Allowed);
        let names: std::collections::BTreeSet<_> = names.map(|record| record.credential).collect();
        let expected = [None, Some("one".to_owned()), Some("token, two".to_owned())];
        assert_eq!(names, expected.into());
    }
}

#[tokio::test]
async fn after_a_rotation_no_request_goes_on_a_connection_that_showed_the_former_certificate() {
    let (first, second) = (Identity::new(), Identity::new());
    let (upstream, seen) = asking("corp.test", &[&first, &second], true, &VERSIONS, BOTH).await;
    let proxyd = Proxyd::start(POLICY, &[("corp.test", &upstream)]).await;
    store(&proxyd, "one", &pair(&first)).await;
    let lease = proxyd.lease().await;
    let mut over_h1 = lease.h1("corp.test").await;
    let mut over_h2 = lease.h2("corp.test").await;
    let mut both = async || {
        let (head, _) = ask(&mut over_h1, "corp.test", "/one/a").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let request = http::Request::get("https://corp.test/one/a").body(()).unwrap();
        let (answer, _) = over_h2.send_request(request, true).unwrap();
        assert_eq!(timely(answer).await.unwrap().status(), 200);
    };

    both().await;
    both().await;
    let before = seen.shown();
    store(&proxyd, "one", &pair(&second)).await;
    both().await;
    both().await;
    let after = seen.shown();

    // One at least for each protocol, since none is taken over.
    assert!(before.len() >= 2 && before.iter().all(|shown| *shown == Some(0)), "{before:?}");
    assert!(after.len() >= 2 && after.iter().all(|shown| *shown == Some(1)), "{after:?}");
}

#[tokio::test]
async fn a_session_is_taken_up_again_only_in_the_name_of_the_client_that_began_it() {
    let (one, two, next) = (Identity::new(), Identity::new(), Identity::new());
    let cas = [one.ca_pem.as_str(), &two.ca_pem, &next.ca_pem];
    for version in VERSIONS {
        let seen = Notes::of(&[&one, &two, &next]);
        let notes = Arc::clone(&seen);
        // Every connection serves one request, so that each request needs another.
        let serve = move |stream: TlsStream<TcpStream>| {
            notes.note(&stream);
            serve_h1(stream, "Connection: close\r\n")
        };
        let upstream = Upstream::asking("corp.test", (&cas, false), &[version], H1, serve).await;
        let proxyd = Proxyd::start(POLICY, &[("corp.test", &upstream)]).await;
        store(&proxyd, "one", &pair(&one)).await;
        store(&proxyd, "two", &pair(&two)).await;
        proxyd.put_secret("token").await;
        let lease = proxyd.lease().await;
        let mut client = lease.h1("corp.test").await;

        for path in ["/one/", "/one/", "/two/", "/plain/", "/one/", "/two/", "/plain/"] {
            let (head, _) = ask(&mut client, "corp.test", path).await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        }
        store(&proxyd, "one", &pair(&next)).await;
        for path in ["/one/", "/one/"] {
            let (head, _) = ask(&mut client, "corp.test", path).await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        }

        let (full, again) = (HandshakeKind::Full, HandshakeKind::Resumed);
        let expected = [
            (Some(0), full),
            (Some(0), again),
            (Some(1), full),
            (None, full),
            (Some(0), again),
            (Some(1), again),
            (None, again),
            (Some(2), full),
            (Some(2), again),
        ];
        assert_eq!(seen.take(), expected, "{version:?}");
    }
}

#[tokio::test]
async fn an_upstream_that_refuses_the_certificate_or_misses_one_is_told_in_words() {
    let (known, own) = (Identity::new(), Identity::new());
    for version in VERSIONS {
        for alpn in [H1, BOTH] {
            let (upstream, seen) = asking("corp.test", &[&known], true, &[version], alpn).await;
            let proxyd = Proxyd::start(POLICY, &[("corp.test", &upstream)]).await;
            store(&proxyd, "one", &pair(&own)).await;
            let lease = proxyd.lease().await;
            for (path, code, part) in [
                ("/one/a", "credential_refused_upstream", "the certificate of credential \"one\""),
                ("/plain/a", "upstream_certificate", "asks for a client certificate, and egress"),
            ] {
                let (head, body) = ask(&mut lease.h1("corp.test").await, "corp.test", path).await;
                assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
                let (name, text) = told(&body);
                assert_eq!(name, code, "{text}");
                assert!(text.contains(part), "{text}");

                let url = format!("https://corp.test{path}");
                let request = http::Request::get(url).body(()).unwrap();
                let mut client = lease.h2("corp.test").await;
                let (answer, _) = client.send_request(request, true).unwrap();
                let answer = timely(answer).await.unwrap();
                assert_eq!(answer.status(), 502);
                let told = answer.headers()["x-cleanhands-failure"].clone();
                let (body, _) = h2_body(answer.into_body()).await;
                assert_eq!(told, code, "{}", String::from_utf8_lossy(&body));
            }
            assert!(seen.take().is_empty());
        }
    }
}

#[tokio::test]
async fn without_a_usable_certificate_nothing_leaves_and_the_reason_is_told_from_the_first_moment()
{
    let client = Identity::new();
    let (upstream, _) = asking("corp.test", &[&client], true, &VERSIONS, BOTH).await;
    let proxyd = Proxyd::start("", &[("corp.test", &upstream)]).await;
    // While no policy says what it is for, anything can be stored.
    let foreign = [client.chain_pem.as_str(), &Identity::new().key_pem].concat();
    store(&proxyd, "two", &foreign).await;
    proxyd.write_policy(POLICY);
    proxyd.control().post::<_, serde_json::Value>("/v1/reload", &()).await.unwrap();
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("corp.test").await;

    let (_, missing) = ask(&mut stream, "corp.test", "/one/").await;
    let (_, unusable) = ask(&mut stream, "corp.test", "/two/").await;
    let refused = stored(&proxyd, "one", &foreign).await.unwrap_err();

    let (code, text) = told(&missing);
    assert_eq!(code, "credential_missing", "{text}");
    assert!(text.contains("cleanhands secret set one"), "{text}");
    let (code, text) = told(&unusable);
    assert_eq!(code, "credential_unusable", "{text}");
    assert!(text.contains("does not belong to its first certificate"), "{text}");
    assert!(text.contains("cleanhands secret set two"), "{text}");
    assert_eq!(refused.code, ipc::fault::Code::Invalid);
    assert!(refused.text.contains("does not belong to its first certificate"), "{refused:?}");
    assert_eq!(state(&proxyd, "two").await, "unusable");
    assert_eq!(upstream.connections(), 0);
    store(&proxyd, "two", &pair(&client)).await;
    proxyd.put_secret("token").await;
    assert_eq!(state(&proxyd, "two").await, "ready");
    let (head, _) = ask(&mut stream, "corp.test", "/two/").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn a_certificate_is_shown_to_the_host_behind_a_corporate_proxy_and_not_to_the_proxy() {
    let client = Identity::new();
    let (upstream, seen) = asking("corp.test", &[&client], true, &VERSIONS, BOTH).await;
    let (corporate, _listening) = Corporate::start(forwards(&[("corp.test:443", &upstream)])).await;
    let more = format!("{}[upstreams.\"corp.test\"]\nca = \"DIR/ca\"\n", corporate.table(""));
    let files = [("ca", upstream.ca_pem.as_str())];
    let proxyd = Proxyd::with(POLICY, &[], &more, &files, &[]).await;
    store(&proxyd, "one", &pair(&client)).await;
    let lease = proxyd.lease().await;

    let (head, _) = ask(&mut lease.h1("corp.test").await, "corp.test", "/one/").await;

    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(corporate.seen().len(), 1);
    assert_eq!(seen.shown(), [Some(0)]);
}

/// Whether writable memory of a process holds the bytes; none where it cannot be looked at.
fn memory_holds(pid: u32, wanted: &[u8]) -> Option<bool> {
    let process = Path::new("/proc").join(pid.to_string());
    let memory = std::fs::File::open(process.join("mem")).ok()?;
    let maps = std::fs::read_to_string(process.join("maps")).ok()?;
    let mut found = false;
    for line in maps.lines().filter(|line| line.split(' ').nth(1) == Some("rw-p")) {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let from = u64::from_str_radix(from, 16).unwrap();
        let to = u64::from_str_radix(to, 16).unwrap();
        let mut bytes = vec![0; usize::try_from(to - from).unwrap()];
        if memory.read_exact_at(&mut bytes, from).is_ok() {
            found |= memchr::memmem::find(&bytes, wanted).is_some();
        }
    }
    Some(found)
}

#[tokio::test]
async fn the_key_of_a_certificate_never_enters_the_process_that_carries_traffic() {
    let client = Identity::new();
    let (upstream, seen) = asking("corp.test", &[&client], true, &VERSIONS, BOTH).await;
    let mut proxyd = Proxyd::start(POLICY, &[("corp.test", &upstream)]).await;
    store(&proxyd, "one", &pair(&client)).await;
    // What it has been told by the operator went through it; from now on there is nothing to tell.
    proxyd.restart().await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("corp.test").await;

    let (head, _) = ask(&mut stream, "corp.test", "/one/").await;

    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(seen.shown(), [Some(0)]);
    let health = proxyd.health().await;
    let key = rustls::pki_types::PrivateKeyDer::from_pem_slice(client.key_pem.as_bytes()).unwrap();
    // The number itself, as it stands in every form of the key.
    let marked = [2, 1, 1, 4, 32];
    let at = memchr::memmem::find(key.secret_der(), &marked).unwrap() + marked.len();
    let number = &key.secret_der()[at..at + 32];
    let line = client.key_pem.lines().nth(1).unwrap();
    // Undumpable: only root can look, and nobody else needs to.
    let Some(held) = memory_holds(health.pid, number) else { return };
    assert!(!held && memory_holds(health.pid, line.as_bytes()) == Some(false));
    // The search itself works.
    assert_eq!(memory_holds(health.pid, &der(&client)), Some(true));
}
