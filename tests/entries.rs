//! Promise: whichever way a request comes in, the same rule judges it, and whatever comes in, it
//! ends nothing but itself.
use cleanhands_tests::installation::Installation;
use cleanhands_tests::origin::Origin;
use ipc::lease::{Holder, LeaseReply, LeaseRequest, Open, Opened, VERSION};
use ipc::vault::AuditKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
"#;

async fn started() -> (Installation, Origin) {
    Installation::before(&["api.example", "evil.example"], POLICY).await
}

fn shell(installation: &Installation, script: &str) -> String {
    let (status, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));
    assert_eq!(status, Some(0), "{out}\n{err}");
    out
}

/// A lease for a caller that is no sandbox; it lasts as long as the channel.
async fn lease(installation: &Installation) -> (ipc::fd::Channel, Opened) {
    let open = Open {
        version: VERSION,
        lease: ipc::id::LeaseId::random(),
        holder: Holder::Explicit,
        environment: "dev".to_owned(),
        owner: ipc::peer::Principal::own().owner(),
        sandbox: None,
        session: None,
        descriptors: Vec::new(),
    };
    let channel = ipc::fd::Channel::connect(&installation.layout.proxyd_lease()).unwrap();
    channel.send(&LeaseRequest::Open(open), &[]).await.unwrap();
    let LeaseReply::Opened(opened) = channel.receive().await.unwrap().0 else {
        panic!("the lease was refused")
    };
    (channel, opened)
}

/// Sends bytes to the explicit entry and gives all that comes back.
async fn explicit(installation: &Installation, request: &str) -> String {
    let mut stream = UnixStream::connect(installation.layout.proxyd_egress()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A reset after the answer takes nothing from it.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_host_is_denied_by_the_same_code_at_every_entry() {
    let (installation, origin) = started().await;
    let (_channel, opened) = lease(&installation).await;
    let token = opened.token.unwrap();
    let authority = format!("Proxy-Authorization: Bearer {token}\r\nConnection: close\r\n\r\n");
    let script = "ask() { curl -gs -w '%{http_code}\\n' \"$@\"; }; \
        ask --http1.1 https://evil.example/; ask --http2 https://evil.example/; \
        ask http://evil.example/; ask http://evil.example:8080/; ask https://evil.example:8443/; \
        ask https://10.20.30.40/; ask 'https://[2001:db8::9]/'; ask http://evil.example./";

    let inside = shell(&installation, script);
    let mut outside = Vec::new();
    for request in [
        "GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n",
        "GET https://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n",
        "GET https://10.20.30.40/ HTTP/1.1\r\nHost: 10.20.30.40\r\n",
        "CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n",
    ] {
        outside.push(explicit(&installation, &format!("{request}{authority}")).await);
    }

    let inside: Vec<&str> = inside.lines().collect();
    assert_eq!(inside.len(), 2 * 8, "{inside:#?}");
    for answer in inside.chunks(2) {
        assert!(answer[0].contains("host_not_listed") && answer[1] == "403", "{answer:?}");
    }
    for answer in &outside {
        // A CONNECT may be accepted so that the reason can be read inside; nothing is dialled.
        let accepted = answer.starts_with("HTTP/1.1 200 Connection established\r\n\r\n");
        assert!(answer.contains("host_not_listed") || accepted, "{answer}");
    }
    assert!(origin.seen().is_empty(), "{:?}", origin.seen());
    let audit = installation.audit().await;
    assert!(audit.iter().all(|r| r.kind != AuditKind::Allowed), "{audit:#?}");
    let denied = |host: &str| {
        audit
            .iter()
            .filter(|r| r.host.as_deref() == Some(host))
            .filter(|r| {
                r.kind == AuditKind::Denied
                    && r.reason
                        .as_deref()
                        .is_some_and(|reason| reason.starts_with("host_not_listed"))
            })
            .count()
    };
    assert_eq!((denied("evil.example"), denied("10.20.30.40"), denied("2001:db8::9")), (9, 2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_opens_nothing_without_its_lease_and_a_wrong_one_nothing_at_all() {
    let (installation, origin) = started().await;
    let (channel, opened) = lease(&installation).await;
    let token = opened.token.unwrap();
    let request = |token: &str| {
        format!(
            "GET https://api.example/ HTTP/1.1\r\nHost: api.example\r\n\
             Proxy-Authorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        )
    };

    let with = explicit(&installation, &request(&token)).await;
    let wrong = explicit(&installation, &request(&token.to_uppercase())).await;
    let none = explicit(
        &installation,
        "GET http://api.example/ HTTP/1.1\r\nHost: api.example\r\n\
        Connection: close\r\n\r\n",
    )
    .await;
    drop(channel);
    let after = cleanhands_tests::wait::until_async("the lease to end", || async {
        let answer = explicit(&installation, &request(&token)).await;
        answer.starts_with("HTTP/1.1 407 ").then_some(answer)
    })
    .await;

    assert!(with.starts_with("HTTP/1.1 200 "), "{with}");
    for refused in [wrong, none, after] {
        assert!(refused.starts_with("HTTP/1.1 407 "), "{refused}");
    }
    assert!(origin.seen().iter().all(|r| r.values("proxy-authorization").is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_denied_and_malformed_connections_end_nothing_but_themselves() {
    let (installation, origin) = started().await;
    let proxyd = ipc::http::Client::new(installation.layout.proxyd());
    let before: ipc::vault::Health = proxyd.get("/v1/health").await.unwrap();

    let flood = "./intruder flood 2000; curl -sS https://api.example/";
    let out = installation.intrude("dev", &[], flood);
    let another = shell(&installation, "curl -sS https://api.example/");

    assert_eq!((out.as_str(), another.as_str()), ("2000\nok", "ok"));
    let after: ipc::vault::Health = proxyd.get("/v1/health").await.unwrap();
    assert_eq!((after.pid, after.vault_pid), (before.pid, before.vault_pid));
    for daemon in ["proxyd", "sandboxd"] {
        assert!(!installation.log(daemon).contains("panicked"), "{daemon} panicked");
    }
    // What got through had a head that is allowed; the two at the end are among it.
    assert!(origin.seen().iter().all(|r| r.method() == "GET"), "{:?}", origin.seen());
}
