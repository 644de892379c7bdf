//! What goes out and what comes back: injection, denials, and the name checks, over real sockets
//! and real TLS.

use std::process::Command;

use crate::support::*;
use ipc::vault::{AuditKind, AuditRecord};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const H1: &[&[u8]] = &[b"http/1.1"];

async fn api() -> (Proxyd, Upstream) {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    (proxyd, upstream)
}

#[tokio::test]
async fn the_credential_arrives_and_its_echo_does_not_come_back() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    stream.write_all(b"GET /x?q=1 HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;

    let body = String::from_utf8(body).unwrap();
    let masked = format!("Bearer {}", "*".repeat(CANARY.len()));
    assert_eq!(field(&head, "x-echo"), Some(&masked[..]), "{head}");
    assert!(body.starts_with("GET /x?q=1 HTTP/1.1\r\nHost: api.test\r\n"), "{body}");
    assert!(body.contains(&format!("Authorization: {masked}")), "{body}");
    let record = proxyd.record(|record| record.scrubbed == Some(2)).await;
    assert_eq!(record.credential.as_deref(), Some("api"));
    assert_eq!(record.path.as_deref(), Some("/x"));
    assert!(!proxyd.log().contains(CANARY));
}

#[tokio::test]
async fn what_the_client_put_into_the_slot_is_replaced_and_a_stray_placeholder_stops() {
    let (proxyd, upstream) = api().await;
    let lease = proxyd.lease().await;
    let placeholder = lease.placeholder();
    let mut stream = lease.h1("api.test").await;

    let own = format!(
        "GET / HTTP/1.1\r\nHost: api.test\r\nAUTHORIZATION: Bearer {placeholder}\r\n\
         authorization: Basic eA==\r\n\r\n"
    );
    stream.write_all(own.as_bytes()).await.unwrap();
    let (_, body) = timely(response(&mut stream)).await;
    let stray = format!("GET / HTTP/1.1\r\nHost: api.test\r\nX-Copy: {placeholder}\r\n\r\n");
    stream.write_all(stray.as_bytes()).await.unwrap();
    let (head, _) = timely(response(&mut stream)).await;

    let body = String::from_utf8(body).unwrap().to_ascii_lowercase();
    assert_eq!(body.matches("authorization:").count(), 1, "{body}");
    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn a_placeholder_in_a_body_that_is_no_place_goes_on_as_text_and_never_as_the_value() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let text = format!("{{\"log\":\"{}\"}}", lease.placeholder());
    let mut stream = lease.h1("api.test").await;

    let request = format!(
        "POST / HTTP/1.1\r\nHost: api.test\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{text}",
        text.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;

    let body = String::from_utf8(body).unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(body.ends_with(&format!("\r\n\r\n{text}")), "{body}");
}

#[tokio::test]
async fn without_a_secret_the_request_stays_here_and_names_the_command() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;

    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    assert_eq!(body["error"]["code"], "credential_missing");
    assert!(body["error"]["hint"].as_str().unwrap().contains("cleanhands secret set api"));
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn every_request_of_a_connection_is_judged_anew() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    let mut statuses = Vec::new();
    for method in ["GET", "DELETE", "GET"] {
        let request = format!("{method} /a HTTP/1.1\r\nHost: api.test\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let (head, _) = timely(response(&mut stream)).await;
        statuses.push(head[9..12].to_owned());
    }

    assert_eq!(statuses, ["200", "403", "200"]);
}

#[tokio::test]
async fn another_name_behind_an_allowed_one_is_refused() {
    let (proxyd, upstream) = api().await;
    let lease = proxyd.lease().await;
    let ask = async |authority: &str, name: &str, request: &str| {
        let mut stream = lease.tls(authority, name, b"http/1.1").await;
        stream.write_all(request.as_bytes()).await.unwrap();
        timely(response(&mut stream)).await.0[9..12].to_owned()
    };

    let table = [
        ("api.test:443", "api.test", "GET / HTTP/1.1\r\nHost: open.test\r\n\r\n"),
        ("api.test:443", "open.test", "GET / HTTP/1.1\r\nHost: open.test\r\n\r\n"),
        ("api.test:443", "open.test", "GET / HTTP/1.1\r\nHost: api.test\r\n\r\n"),
        ("api.test:443", "api.test", "GET https://open.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n"),
        ("api.test:443", "api.test", "GET / HTTP/1.1\r\nHost: x@api.test\r\n\r\n"),
        ("api.test:443", "api.test", "GET / HTTP/1.1\r\nHost: api.test:444\r\n\r\n"),
    ];
    for (authority, name, request) in table {
        assert_eq!(ask(authority, name, request).await, "421", "{authority} {name} {request:?}");
    }
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn another_authority_on_an_http2_stream_is_refused() {
    let (proxyd, upstream) = api().await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    let mut statuses = Vec::new();
    for uri in ["https://open.test/", "https://api.test/"] {
        let request = http::Request::get(uri).body(()).unwrap();
        let (response, _) = sender.send_request(request, true).unwrap();
        statuses.push(timely(response).await.unwrap().status().as_u16());
    }

    assert_eq!(statuses, [421, 200]);
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test]
async fn an_upstream_that_cannot_be_verified_gets_nothing() {
    let right = Upstream::tls("api.test", H1, echo_h1).await;
    let mut wrong = Upstream::tls("api.test", H1, echo_h1).await;
    wrong.ca_pem.clone_from(&right.ca_pem);
    let other_name = Upstream::tls("other.test", H1, echo_h1).await;
    let hosts = [("api.test", &wrong), ("open.test", &other_name)];
    let proxyd = Proxyd::start(POLICY, &hosts).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;

    for host in ["api.test", "open.test"] {
        let mut stream = lease.h1(host).await;
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let (head, body) = timely(response(&mut stream)).await;

        assert!(head.starts_with("HTTP/1.1 502 "), "{host}: {head}");
        assert_eq!(field(&head, "x-cleanhands-failure"), Some("upstream_tls"));
        assert!(!String::from_utf8_lossy(&body).contains(CANARY));
    }
}

#[tokio::test]
async fn a_private_address_needs_the_rule_to_name_it() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let policy = POLICY.replace("addresses = [\"127.0.0.1/32\"]\n", "");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, _) = timely(response(&mut stream)).await;

    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    assert_eq!(field(&head, "x-cleanhands-denial"), Some("address_private"));
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn a_tunnel_is_passed_unread_in_both_directions_and_ends_half_by_half() {
    let upstream = Upstream::tcp(|mut stream| async move {
        stream.write_all(b"first").await.unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await.unwrap();
        stream.write_all(&said).await.unwrap();
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("raw.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.connect("raw.test:9000").await;

    let mut first = [0u8; 5];
    timely(stream.read_exact(&mut first)).await.unwrap();
    stream.write_all(b"then \x00\xff").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut rest = Vec::new();
    timely(stream.read_to_end(&mut rest)).await.unwrap();

    assert_eq!((&first[..], &rest[..]), (&b"first"[..], &b"then \x00\xff"[..]));
    let outcome = proxyd.record(|record| record.bytes_down == Some(12)).await;
    assert_eq!((outcome.bytes_up, outcome.entry.as_deref()), (Some(7), Some("tunnel")));
}

#[tokio::test]
async fn a_changed_policy_ends_what_it_no_longer_allows() {
    let upstream = Upstream::tcp(|mut stream| async move {
        let _ = stream.read_u8().await;
    })
    .await;
    let proxyd = Proxyd::start(POLICY, &[("raw.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut tunnel = lease.connect("raw.test:9000").await;
    until("the tunnel is open", || async { upstream.connections() == 1 }).await;

    proxyd.write_policy(&POLICY.replace("raw.test", "other.test"));
    let ended = timely(tunnel.read_u8()).await;

    assert!(ended.is_err());
    let outcome = proxyd.record(|record| record.duration_ms.is_some()).await;
    assert!(outcome.reason.unwrap().starts_with("policy_changed"));
}

#[tokio::test]
async fn a_policy_that_does_not_parse_changes_nothing() {
    let (proxyd, _upstream) = api().await;
    proxyd.write_policy("[[egress.allow]]\nhost = 1\n");

    let fault = proxyd
        .control()
        .post::<_, serde_json::Value>("/v1/reload", &serde_json::json!({}))
        .await
        .unwrap_err();
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, _) = timely(response(&mut stream)).await;

    assert!(fault.text.contains("dev.toml:2"), "{fault}");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn a_lease_that_ends_takes_its_flows_and_its_token_with_it() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let mut plain = lease.plain().await;
    let token = lease.token().to_owned();

    lease.close().await;
    let ended = timely(stream.read_u8()).await;
    let request = format!(
        "GET https://api.test/ HTTP/1.1\r\nHost: api.test\r\n\
         Proxy-Authorization: Bearer {token}\r\n\r\n"
    );
    let answer = talk(&mut plain, request.as_bytes()).await;

    assert!(ended.is_err());
    assert!(answer.starts_with("HTTP/1.1 407 "), "{answer}");
}

#[tokio::test]
async fn a_lease_is_taken_up_again_after_a_restart_with_the_same_placeholders() {
    let (mut proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let (id, placeholder) = (lease.opened.lease.clone(), lease.placeholder().to_owned());

    proxyd.restart().await;
    let again = proxyd.open(id.clone()).await.unwrap();
    let twice = proxyd.open(id).await;

    assert_eq!(again.placeholder(), placeholder);
    assert_eq!(twice.err().map(|fault| fault.code), Some(ipc::fault::Code::Conflict));
}

#[tokio::test]
async fn curl_reads_denials_and_answers_over_both_protocols() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let ca = proxyd.layout.config.join("ca.pem");
    std::fs::write(&ca, proxyd.ca_pem().await).unwrap();
    let proxy = forwarder(proxyd.layout.proxyd_egress()).await;
    let token = lease.token().to_owned();
    let curl = async |arguments: &[&str]| {
        let mut command = Command::new("curl");
        command
            .env_clear()
            .args(["-sS", "-m", "10", "-w", "\n%{http_code} %{http_version}"])
            .args(["-x", &format!("http://u:{token}@{proxy}"), "--cacert"])
            .arg(&ca)
            .args(arguments);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap());
        let output = output.await.unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };

    for (version, number) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let good = curl(&[version, "https://api.test/a"]).await;
        let denied = curl(&[version, "https://evil.test/"]).await;
        let posted = curl(&[version, "-d", "x=1", "https://api.test/b"]).await;

        assert!(good.ends_with(&format!("200 {number}")), "{good}");
        assert!(posted.ends_with(&format!("200 {number}")), "{posted}");
        assert!(denied.ends_with(&format!("403 {number}")), "{denied}");
        assert!(denied.contains("does not list evil.test"), "{denied}");
    }
    let records = proxyd.audit().await;
    assert!(records.iter().any(|record| record.host.as_deref() == Some("evil.test")));
}

#[tokio::test]
async fn what_a_lease_asks_in_a_form_that_nobody_can_judge_is_refused_and_recorded() {
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let token = lease.token().to_owned();
    let ask = |line: &str, fields: &str| {
        format!("{line} HTTP/1.1\r\nProxy-Authorization: Bearer {token}\r\n{fields}\r\n")
    };
    let table = [
        ask("CONNECT api.test", "Host: api.test\r\n"),
        ask("CONNECT api..test:443", "Host: api..test:443\r\n"),
        ask("CONNECT api.test:443", "Host: api.test:443\r\nContent-Length: 1\r\n"),
        ask("GET ftp://api.test/", "Host: api.test\r\n"),
        ask("GET /x", "Host: api.test\r\n"),
    ];

    for (number, asked) in table.iter().enumerate() {
        let mut stream = lease.plain().await;
        let answer = talk(&mut stream, asked.as_bytes()).await;

        assert!(answer.starts_with("HTTP/1.1 400 "), "{asked}: {answer}");
        let denied = |record: &AuditRecord| {
            let reason = record.reason.as_deref().unwrap_or_default();
            record.kind == AuditKind::Denied && reason.starts_with("request_malformed")
        };
        until("the refusal is recorded", || async {
            proxyd.audit().await.iter().filter(|record| denied(record)).count() == number + 1
        })
        .await;
    }
    assert_eq!(upstream.connections(), 0);
}
