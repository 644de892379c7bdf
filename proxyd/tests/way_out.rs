//! The way out by the operator's table: a corporate proxy, CAs and certificates of one's own,
//! limits for a host, and changes while proxyd runs.

use std::sync::{Arc, Mutex};

use crate::corporate::{Corporate, Manner, corporate, forwards, table};
use crate::support::*;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ipc::vault::AuditKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const H1: &[&[u8]] = &[b"http/1.1"];
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["open.test"]
methods = ["GET"]
[[egress.allow]]
hosts = ["plain.test"]
plaintext = true
methods = ["GET"]
[[egress.allow]]
hosts = ["raw.test"]
ports = [9000]
[[egress.allow]]
hosts = ["near.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
"#;

/// The row that trusts an upstream's CA and says nothing of where to dial.
fn trusted(name: &str) -> String {
    format!("[upstreams.\"{name}\"]\nca = \"DIR/{name}.ca\"\n")
}

async fn ask(lease: &Lease, host: &str) -> (String, Vec<u8>) {
    let mut stream = lease.h1(host).await;
    let get = format!("GET /x?q=1 HTTP/1.1\r\nHost: {host}\r\n\r\n");
    stream.write_all(get.as_bytes()).await.unwrap();
    timely(response(&mut stream)).await
}

/// One request of plain HTTP, in absolute form as a proxy's client sends it.
async fn ask_plainly(lease: &Lease, target: &str) -> (String, Vec<u8>) {
    let mut stream = lease.plain().await;
    let get = format!(
        "GET http://{target} HTTP/1.1\r\nHost: plain.test\r\n\
         Proxy-Authorization: Bearer {}\r\n\r\n",
        lease.token()
    );
    stream.write_all(get.as_bytes()).await.unwrap();
    timely(response(&mut stream)).await
}

fn code(body: &[u8]) -> (String, String) {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap();
    let word = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
    (word("code"), format!("{} {}", word("reason"), word("hint")))
}

#[tokio::test]
async fn https_goes_through_the_operators_proxy_by_its_verified_name_with_a_password_of_the_vault()
{
    let upstream = Upstream::tls("open.test", H1, echo_h1).await;
    let login = format!("Basic {}", STANDARD.encode(format!("svc:{CANARY}")));
    let demands = Manner::Demands(login.clone(), table(&[("open.test:443", &upstream)]));
    let (corporate, _listening) = Corporate::start(demands).await;
    let config = corporate.table("user = \"svc\"\npassword = \"local:corp\"");
    let files = [("open.test.ca", upstream.ca_pem.as_str())];
    let more = format!("{config}{}", trusted("open.test"));
    let proxyd = Proxyd::with(POLICY, &[], &more, &files, &[]).await;
    let lease = proxyd.lease().await;

    let (_, without) = ask(&lease, "open.test").await;
    proxyd.put_secret("corp").await;
    let (head, body) = ask(&lease, "open.test").await;

    let (name, text) = code(&without);
    assert_eq!(name, "upstream_proxy", "{text}");
    assert!(text.contains("cleanhands secret set corp"), "{text}");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let body = String::from_utf8(body).unwrap();
    assert!(!body.to_ascii_lowercase().contains("proxy-authorization"), "{body}");
    let seen = corporate.seen();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(seen[0].starts_with("CONNECT open.test:443 HTTP/1.1\r\nHost: open.test:443\r\n"));
    let record = proxyd.record(|r| r.kind == AuditKind::Outcome && r.status == Some(200)).await;
    assert_eq!(record.address, Some(format!("via {}", corporate.address)));
    let written = format!("{}{:?}", proxyd.log(), proxyd.audit().await);
    assert!(!written.contains(CANARY) && !written.contains(&login["Basic ".len()..]));
}

#[tokio::test]
async fn a_password_in_a_file_that_others_can_read_is_refused_and_a_private_one_is_used() {
    let upstream = Upstream::tls("open.test", H1, echo_h1).await;
    let login = format!("Basic {}", STANDARD.encode(format!("svc:{CANARY}")));
    let demands = Manner::Demands(login, table(&[("open.test:443", &upstream)]));
    let (corporate, _listening) = Corporate::start(demands).await;
    let config = corporate.table("user = \"svc\"\npassword = \"file:DIR/password\"");
    let line = format!("{CANARY}\n");
    let files = [("open.test.ca", upstream.ca_pem.as_str()), ("password", line.as_str())];
    let more = format!("{config}{}", trusted("open.test"));
    let proxyd = Proxyd::with(POLICY, &[], &more, &files, &[]).await;
    let lease = proxyd.lease().await;

    let (head, _) = ask(&lease, "open.test").await;
    let password = proxyd.layout.config.join("password");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(&password, open).unwrap();
    proxyd.hang_up();
    until("the problem to be told", || async { proxyd.health().await.problem.is_some() }).await;

    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let problem = proxyd.health().await.problem.unwrap();
    assert!(
        problem.contains("can be read by others") && problem.contains("chmod 600"),
        "{problem}"
    );
    assert!(!proxyd.log().contains(CANARY) && !problem.contains(CANARY));
}

#[tokio::test]
async fn plain_http_goes_to_the_proxy_in_absolute_form_and_its_challenge_stays_with_proxyd() {
    let (corporate, _listening) = Corporate::start(forwards(&[])).await;
    let proxyd = Proxyd::configured(POLICY, &[], &corporate.table("")).await;
    let lease = proxyd.lease().await;
    let (challenging, _challenges) = Corporate::start(Manner::Says(
        "HTTP/1.1 407 Who?\r\nProxy-Authenticate: Basic realm=\"corp\"\r\nContent-Length: 2\r\n\
         Connection: close\r\n\r\nno",
    ))
    .await;

    let (head, body) = ask_plainly(&lease, "plain.test/x?q=1").await;
    proxyd.write_config("proxyd.toml", &challenging.table(""));
    let reloaded = proxyd.control().post::<_, serde_json::Value>("/v1/reload", &()).await;
    let (challenged, refusal) = ask_plainly(&lease, "plain.test/x?q=1").await;

    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let body = String::from_utf8(body).unwrap();
    assert!(body.starts_with("GET http://plain.test/x?q=1 HTTP/1.1\r\nHost: plain.test\r\n"));
    assert!(!body.contains(lease.token()), "{body}");
    assert!(reloaded.is_ok(), "{reloaded:?}");
    assert!(challenged.starts_with("HTTP/1.1 502 "), "{challenged}");
    assert_eq!(field(&challenged, "proxy-authenticate"), None);
    assert_eq!(code(&refusal).0, "upstream_proxy");
}

#[tokio::test]
async fn a_tunnel_through_the_proxy_loses_nothing_that_the_server_said_first() {
    let upstream = Upstream::tcp(|mut stream| async move {
        stream.write_all(b"220 ready\r\n").await.unwrap();
        let mut line = [0; 5];
        stream.read_exact(&mut line).await.unwrap();
        stream.write_all(&line).await.unwrap();
    })
    .await;
    let (corporate, _listening) = Corporate::start(forwards(&[("raw.test:9000", &upstream)])).await;
    let proxyd = Proxyd::configured(POLICY, &[], &corporate.table("")).await;
    let lease = proxyd.lease().await;

    let mut stream = lease.connect("raw.test:9000").await;
    let mut greeting = [0; 11];
    timely(stream.read_exact(&mut greeting)).await.unwrap();
    stream.write_all(b"QUIT\n").await.unwrap();
    let mut rest = String::new();
    timely(stream.read_to_string(&mut rest)).await.unwrap();

    assert_eq!((&greeting, rest.as_str()), (b"220 ready\r\n", "QUIT\n"));
    assert!(corporate.seen()[0].starts_with("CONNECT raw.test:9000 "));
}

#[tokio::test]
async fn what_the_proxy_does_wrong_is_said_in_our_words_and_never_in_its_own() {
    let html = "HTTP/1.1 403 Nope\r\nContent-Type: text/html\r\nContent-Length: 20\r\n\r\n\
                <html>squid</html>\r\n";
    let digest = "HTTP/1.1 407 No\r\nProxy-Authenticate: Digest realm=\"a\"\r\n\
                  Proxy-Authenticate: NTLM\r\nContent-Length: 0\r\n\r\n";
    let basic = "HTTP/1.1 407 No\r\nProxy-Authenticate: basic realm=\"a\"\r\n\r\n";
    let cases = [
        (Manner::Says(html), "403 Forbidden"),
        (Manner::Says(digest), "Digest, NTLM"),
        (Manner::Says(basic), "set user and password"),
        (Manner::Says("HTTP/1.1 503 Later\r\n\r\n"), "503 Service Unavailable"),
        (Manner::Says("SSH-2.0-OpenSSH\r\n\r\n"), "no sound answer"),
        (Manner::Says("HTTP/1.1 200 OK\n\n"), "no sound answer"),
        (Manner::Says(""), "without an answer"),
        (Manner::Silent, "within 1 s"),
    ];
    for (manner, words) in cases {
        let (corporate, _listening) = Corporate::start(manner).await;
        let patience = if words == "within 1 s" { "1s" } else { "100s" };
        let row = format!("[upstreams.\"open.test\"]\nconnect-timeout = \"{patience}\"\n");
        let more = format!("{}{row}", corporate.table(""));
        let proxyd = Proxyd::configured(POLICY, &[], &more).await;
        let lease = proxyd.lease().await;

        let (head, body) = ask(&lease, "open.test").await;

        let (name, text) = code(&body);
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
        assert_eq!(name, "upstream_proxy", "{text}");
        assert!(text.contains(words) && !text.contains("html"), "{text}");
    }
}

#[tokio::test]
async fn a_proxy_that_is_asked_for_addresses_is_asked_for_judged_ones_only() {
    let upstream = Upstream::tls("near.test", H1, echo_h1).await;
    let address = upstream.address.to_string();
    let (corporate, _listening) = Corporate::start(forwards(&[(&address, &upstream)])).await;
    let here = format!("proxy = {{ url = \"http://{}\", resolve = \"here\" }}", corporate.address);
    let row = |name: &str| format!("{}dial = \"{address}\"\n{here}\n", trusted(name));
    let more = row("near.test") + &row("open.test");
    let files = ["near.test.ca", "open.test.ca"].map(|name| (name, upstream.ca_pem.as_str()));
    let proxyd = Proxyd::with(POLICY, &[], &more, &files, &[]).await;
    let lease = proxyd.lease().await;

    let (near, _) = ask(&lease, "near.test").await;
    // Its rule names no private address, and the operator's table cannot stand in for that.
    let (open, body) = ask(&lease, "open.test").await;

    assert!(near.starts_with("HTTP/1.1 200 "), "{near}");
    assert!(open.starts_with("HTTP/1.1 403 "), "{open}");
    assert_eq!(code(&body).0, "address_private");
    let seen = corporate.seen();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(seen[0].starts_with(&format!("CONNECT {address} ")), "{seen:?}");
    let record = proxyd.record(|r| r.kind == AuditKind::Outcome && r.status == Some(200)).await;
    assert_eq!(record.address, Some(format!("{address} via {}", corporate.address)));
}

#[tokio::test]
async fn hosts_that_the_operator_exempts_are_reached_without_the_proxy() {
    let upstream = Upstream::tls("near.test", H1, echo_h1).await;
    let (corporate, _listening) = Corporate::start(forwards(&[])).await;
    let files = [("near.test.ca", upstream.ca_pem.as_str())];
    let dial = format!("dial = \"{}\"\n", upstream.address);
    let direct = format!("{}{dial}", trusted("near.test"));
    let none = format!("{direct}proxy = \"none\"\n");
    for more in [
        // An address that the operator gives is dialled.
        format!("{}{direct}", corporate.table("")),
        format!("{}{none}", corporate.table("")),
        format!("{}{direct}", corporate.table("no-proxy = [\"*.other.test\", \"near.test\"]")),
    ] {
        let proxyd = Proxyd::with(POLICY, &[], &more, &files, &[]).await;
        let lease = proxyd.lease().await;

        let (head, _) = ask(&lease, "near.test").await;

        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
    assert!(corporate.seen().is_empty());
}

#[tokio::test]
async fn a_proxy_behind_tls_is_verified_before_it_learns_anything() {
    let upstream = Upstream::tls("open.test", H1, echo_h1).await;
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let (log, manner) = (Arc::clone(&seen), forwards(&[("open.test:443", &upstream)]));
    let proxy = Upstream::tls("127.0.0.1", H1, move |stream| {
        corporate(stream, manner.clone(), Arc::clone(&log))
    })
    .await;
    let config = |ca: &str| {
        let address = proxy.address;
        format!("[upstream-proxy]\nurl = \"https://{address}\"\nresolve = \"proxy\"\n{ca}\n")
            + &trusted("open.test")
    };
    let files = [("open.test.ca", upstream.ca_pem.as_str()), ("proxy.ca", proxy.ca_pem.as_str())];
    let unknown = Proxyd::with(POLICY, &[], &config(""), &files, &[]).await;
    let (_, refusal) = ask(&unknown.lease().await, "open.test").await;
    assert!(seen.lock().unwrap().is_empty());

    let known = Proxyd::with(POLICY, &[], &config("ca = \"DIR/proxy.ca\""), &files, &[]).await;
    let (head, _) = ask(&known.lease().await, "open.test").await;

    let (name, text) = code(&refusal);
    assert_eq!(name, "upstream_proxy");
    assert!(text.contains("cannot verify"), "{text}");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn variables_of_proxyds_environment_add_no_trust() {
    let upstream = Upstream::tls("near.test", H1, echo_h1).await;
    let files = [("near.test.ca", upstream.ca_pem.as_str())];
    let variables = [("SSL_CERT_FILE", "DIR/near.test.ca"), ("SSL_CERT_DIR", "DIR")];
    let row = format!("[upstreams.\"near.test\"]\ndial = \"{}\"\n", upstream.address);
    let store = "trust-store = \"DIR/near.test.ca\"\n";

    let by_variable = Proxyd::with(POLICY, &[], &row, &files, &variables).await;
    let (_, refusal) = ask(&by_variable.lease().await, "near.test").await;
    let by_key = Proxyd::with(POLICY, &[], &format!("{store}{row}"), &files, &[]).await;
    let (head, _) = ask(&by_key.lease().await, "near.test").await;

    assert_eq!(code(&refusal).0, "upstream_tls");
    assert!(by_variable.log().contains("does not follow this variable"));
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn a_host_that_asks_for_a_client_certificate_gets_the_one_of_its_row() {
    let client = Identity::new();
    let upstream = Upstream::knowing("near.test", &client.ca_pem, echo_h1).await;
    let row = format!("{}dial = \"{}\"\n", trusted("near.test"), upstream.address);
    let shown = "client-certificate = \"DIR/client.pem\"\nclient-key = \"DIR/client.key\"\n";
    let files = [
        ("near.test.ca", upstream.ca_pem.as_str()),
        ("client.pem", client.chain_pem.as_str()),
        ("client.key", client.key_pem.as_str()),
    ];

    let without = Proxyd::with(POLICY, &[], &row, &files, &[]).await;
    let (nothing, _) = ask(&without.lease().await, "near.test").await;
    let with = Proxyd::with(POLICY, &[], &format!("{row}{shown}"), &files, &[]).await;
    let (head, _) = ask(&with.lease().await, "near.test").await;

    assert!(nothing.starts_with("HTTP/1.1 502 "), "{nothing}");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn protocols_of_a_row_are_what_its_host_is_offered() {
    let both: &[&[u8]] = &[b"h2", b"http/1.1"];
    let upstream = Upstream::tls("near.test", both, |stream| async move {
        match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => echo_h2(stream).await,
            _ => echo_h1(stream).await,
        }
    })
    .await;
    let files = [("near.test.ca", upstream.ca_pem.as_str())];
    for (protocols, is_h2) in [("[\"http/1.1\"]", false), ("[\"h2\"]", true)] {
        let row = format!("dial = \"{}\"\nprotocols = {protocols}\n", upstream.address);
        let more = format!("{}{row}", trusted("near.test"));
        let proxyd = Proxyd::with(POLICY, &[], &more, &files, &[]).await;
        let lease = proxyd.lease().await;

        // Over either protocol of the client's own.
        let (over_h1, _) = ask(&lease, "near.test").await;
        let request = http::Request::get("https://near.test/").body(()).unwrap();
        let (response, _) = lease.h2("near.test").await.send_request(request, true).unwrap();
        let over_h2 = timely(response).await.unwrap();

        // The HTTP/2 server of these tests tells the length of the body, the other does not.
        assert_eq!(field(&over_h1, "x-length").is_some(), is_h2, "{over_h1}");
        assert_eq!(over_h2.headers().contains_key("x-length"), is_h2, "{over_h2:?}");
    }
}

#[tokio::test]
async fn requests_wait_for_a_place_where_the_number_of_connections_is_bounded() {
    let open = Arc::new(Mutex::new((0, 0)));
    let counter = Arc::clone(&open);
    let upstream = Upstream::tls("near.test", H1, move |stream| {
        let counter = Arc::clone(&counter);
        async move {
            {
                let mut count = counter.lock().unwrap();
                count.0 += 1;
                count.1 = count.1.max(count.0);
            }
            echo_h1(stream).await;
            counter.lock().unwrap().0 -= 1;
        }
    })
    .await;
    let files = [("near.test.ca", upstream.ca_pem.as_str())];
    let row = format!("dial = \"{}\"\nconnections-max = 2\n", upstream.address);
    let more = format!("{}{row}", trusted("near.test"));
    let proxyd = Proxyd::with(POLICY, &[], &more, &files, &[]).await;
    let lease = proxyd.lease().await;

    let asked = (0..12).map(|_| ask(&lease, "near.test"));
    let answers = futures(asked).await;

    for (head, _) in &answers {
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
    assert!(open.lock().unwrap().1 <= 2, "{:?}", open.lock().unwrap());
}

/// All of them, at the same time.
async fn futures<F: Future>(list: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut list: Vec<_> = list.map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|context| {
        for (future, output) in &mut list {
            if output.is_none()
                && let std::task::Poll::Ready(ready) = future.as_mut().poll(context)
            {
                *output = Some(ready);
            }
        }
        match list.iter().all(|(_, output)| output.is_some()) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    list.into_iter().map(|(_, output)| output.unwrap()).collect()
}

#[tokio::test]
async fn a_connection_of_another_way_serves_no_request_of_this_one() {
    let upstream = Upstream::tls("near.test", H1, echo_h1).await;
    let other = Upstream::tls("open.test", H1, echo_h1).await;
    let files = [
        ("near.test.ca", upstream.ca_pem.as_str()),
        ("near.test.same", upstream.ca_pem.as_str()),
        ("other.ca", other.ca_pem.as_str()),
    ];
    let row = |ca: &str, more: &str| {
        let address = upstream.address;
        format!("[upstreams.\"near.test\"]\nca = \"DIR/{ca}\"\ndial = \"{address}\"\n{more}")
    };
    let proxyd = Proxyd::with(POLICY, &[], &row("near.test.ca", ""), &files, &[]).await;
    let lease = proxyd.lease().await;
    let reload = |text: String| {
        proxyd.write_config("proxyd.toml", &text);
        let control = proxyd.control();
        async move { control.post::<_, serde_json::Value>("/v1/reload", &()).await.unwrap() }
    };
    assert!(ask(&lease, "near.test").await.0.starts_with("HTTP/1.1 200 "));
    assert!(ask(&lease, "near.test").await.0.starts_with("HTTP/1.1 200 "));
    assert_eq!(upstream.connections(), 1, "kept between requests");

    // Another row's change is none of this way's.
    let elsewhere = "[upstreams.\"open.test\"]\nconnect-timeout = \"7s\"\n";
    reload(row("near.test.ca", elsewhere)).await;
    assert!(ask(&lease, "near.test").await.0.starts_with("HTTP/1.1 200 "));
    assert_eq!(upstream.connections(), 1, "kept over a reload that does not concern it");

    reload(row("near.test.ca", "connect-timeout = \"7s\"\n")).await;
    assert!(ask(&lease, "near.test").await.0.starts_with("HTTP/1.1 200 "));
    assert_eq!(upstream.connections(), 2, "made anew for the changed row");

    reload(row("other.ca", "")).await;
    let (_, refusal) = ask(&lease, "near.test").await;
    assert_eq!(code(&refusal).0, "upstream_tls", "the former CA does not count any more");
}

#[tokio::test]
async fn a_file_that_is_wrong_changes_nothing_and_is_told_until_it_is_mended() {
    let upstream = Upstream::tls("near.test", H1, echo_h1).await;
    let files = [("near.test.ca", upstream.ca_pem.as_str())];
    let row = format!("{}dial = \"{}\"\n", trusted("near.test"), upstream.address);
    let proxyd = Proxyd::with(POLICY, &[], &row, &files, &[]).await;
    let lease = proxyd.lease().await;
    let before = proxyd.health().await;

    proxyd.write_config("proxyd.toml", &format!("{row}nonsense = 1\n"));
    proxyd.hang_up();
    until("the problem to be told", || async { proxyd.health().await.problem.is_some() }).await;
    let problem = proxyd.health().await.problem.unwrap();
    let (head, _) = ask(&lease, "near.test").await;
    proxyd.write_policy("nonsense\n");
    until("both problems to be told", || async {
        proxyd.health().await.problem.is_some_and(|text| text.contains("dev.toml"))
    })
    .await;
    proxyd.write_config("proxyd.toml", &row);
    proxyd.write_policy(POLICY);
    proxyd.hang_up();
    until("the problems to be gone", || async { proxyd.health().await.problem.is_none() }).await;

    assert_eq!(before.problem, None);
    assert!(problem.contains("nonsense"), "{problem}");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(proxyd.health().await.generation, before.generation, "the same texts again");
}

#[tokio::test]
async fn a_generation_in_the_audit_means_the_same_policies_after_a_restart() {
    let mut proxyd = Proxyd::start(POLICY, &[]).await;
    let first = proxyd.health().await.generation;

    proxyd.restart().await;
    let same = proxyd.health().await.generation;
    proxyd.write_policy(&format!("{POLICY}\n# another text\n"));
    until("the change to be seen", || async { proxyd.health().await.generation != same }).await;
    let second = proxyd.health().await.generation;
    proxyd.restart().await;
    let again = proxyd.health().await.generation;

    assert_eq!((same, again), (first, second));
    assert!(second > first);
}

#[tokio::test]
async fn a_name_below_a_starred_row_goes_by_it_and_the_nearest_counts() {
    let (corporate, _listening) = Corporate::start(forwards(&[])).await;
    let upstream = Upstream::tls("a.b.near.test", H1, echo_h1).await;
    let policy = POLICY.replace("\"near.test\"", "\"*.near.test\"");
    let files = [("near.ca", upstream.ca_pem.as_str())];
    let rows = format!(
        "[upstreams.\"*.near.test\"]\nproxy = {{ url = \"http://{}\", resolve = \"proxy\" }}\n\
         [upstreams.\"*.b.near.test\"]\ndial = \"{}\"\nca = \"DIR/near.ca\"\n",
        corporate.address, upstream.address
    );
    let proxyd = Proxyd::with(&policy, &[], &rows, &files, &[]).await;
    let lease = proxyd.lease().await;

    let (near, _) = ask(&lease, "a.b.near.test").await;
    let (far, _) = ask(&lease, "c.near.test").await;

    assert!(near.starts_with("HTTP/1.1 200 "), "{near}");
    assert!(far.starts_with("HTTP/1.1 502 "), "{far}");
    assert_eq!(corporate.seen().len(), 1);
}
