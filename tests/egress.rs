//! Promise: nothing leaves a sandbox but what its policy file allows, and a denial says why.
use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::upstream::Upstream;

const TOKEN: &str = "SECRET-CANARY-egress-4f1c9a7be2";
const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
paths = ["/hello", "/echo"]
credential = "api"
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["open.example"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["private.example"]
methods = ["GET"]
paths = ["/**"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
env = "API_TOKEN"
"#;

async fn started() -> (Installation, Upstream) {
    let hosts = ["api.example", "open.example", "private.example"];
    let upstream = Upstream::start(&hosts, &format!("Bearer {TOKEN}")).await;
    let mut setup = Setup::default().policy("dev", POLICY);
    for host in hosts {
        setup = setup.upstream(host, &upstream);
    }
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", TOKEN).await;
    (installation, upstream)
}

fn shell(installation: &Installation, script: &str) -> (Option<i32>, String, String) {
    tokio::task::block_in_place(|| installation.shell("dev", script))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listed_request_is_injected_over_both_protocols_with_no_setting_in_the_client() {
    let (installation, upstream) = started().await;

    for protocol in ["--http1.1", "--http2"] {
        let script = format!("env -i /usr/bin/curl -sS {protocol} https://api.example/hello");
        let (status, out, err) = shell(&installation, &script);

        assert_eq!((status, out.as_str()), (Some(0), "hello"), "{protocol}: {err}");
    }
    let sent = format!("Bearer {TOKEN}");
    for seen in upstream.seen() {
        let values: Vec<_> = seen.headers.iter().filter(|(n, _)| n == "authorization").collect();
        assert_eq!(values.len(), 1, "{seen:?}");
        assert_eq!(values[0].1, sent);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clients_own_authorization_is_replaced_never_added_to() {
    let (installation, upstream) = started().await;

    let (status, out, err) = shell(
        &installation,
        "curl -sS -H 'Authorization: Bearer mine' -H 'aUTHORIZATION: other' \
         https://api.example/hello",
    );

    assert_eq!((status, out.as_str()), (Some(0), "hello"), "{err}");
    let seen = upstream.seen();
    let count = seen[0].headers.iter().filter(|(n, _)| n == "authorization").count();
    assert_eq!(count, 1, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_denied_method_and_path_are_answered_with_the_rule_and_reach_nobody() {
    let (installation, upstream) = started().await;

    for request in ["-X DELETE https://api.example/hello", "https://api.example/admin"] {
        let (_, out, err) =
            shell(&installation, &format!("curl -sS -w '%{{http_code}}' {request}"));

        assert!(out.ends_with("403"), "{request}: {out} {err}");
        assert!(out.contains("reason") && out.contains("request_id"), "{out}");
    }
    assert!(upstream.seen().is_empty(), "{:?}", upstream.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_no_rule_names_is_refused_at_once_with_a_reason_the_client_can_read() {
    let (installation, upstream) = started().await;

    let script = "curl -sS --max-time 20 -w ' %{http_code}' https://evil.example/?x=1; \
        curl -sS --max-time 20 telnet://evil.example:5432; echo $?";
    let (status, out, err) = shell(&installation, script);

    assert_eq!(status, Some(0));
    assert!(out.contains("does not list evil.example") && out.contains(" 403"), "{out} {err}");
    // 28 would be a time-out, 0 a connection that somebody took.
    let code = out.lines().last().unwrap();
    assert!(!["28", "0"].contains(&code), "{out} {err}");
    assert!(upstream.seen().is_empty());
    let audit = installation.audit().await;
    let denied = audit.iter().any(|r| {
        r.kind == ipc::vault::AuditKind::Denied && r.host.as_deref() == Some("evil.example")
    });
    assert!(denied, "{audit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_literal_is_refused_in_every_spelling() {
    let (installation, upstream) = started().await;
    let port = upstream.port;

    for literal in [
        "10.0.0.1",
        "169.254.169.254",
        "0x0a000001",
        "167772161",
        "[::ffff:10.0.0.1]",
        "[fd00:ec2::254]",
    ] {
        let script = format!("curl -sSk --max-time 20 https://{literal}:{port}/hello; echo $?");
        let (status, out, err) = shell(&installation, &script);

        assert_eq!(status, Some(0), "{err}");
        let code = out.lines().last().unwrap_or_default().to_owned();
        assert!(!out.contains("hello") && code != "28", "{literal}: {out} {err}");
    }
    assert!(upstream.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_leads_to_a_private_address_is_refused_unless_its_rule_names_the_address() {
    let (installation, upstream) = started().await;

    let (_, out, err) =
        shell(&installation, "curl -sS -w '%{http_code}' https://private.example/hello");

    assert!(out.ends_with("403"), "{out} {err}");
    assert!(out.contains("127.0.0.1"), "the denial does not name the address: {out}");
    assert!(upstream.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_request_rules_is_tunnelled_with_its_own_certificate() {
    let (installation, upstream) = started().await;

    let out = installation.intrude(
        "dev",
        &[],
        "./intruder certificate open.example; ./intruder certificate api.example",
    );

    let (own, ours) = out.trim_end().split_once('\n').unwrap();
    assert_eq!(own, hex::encode(&upstream.certificate));
    assert!(ours.contains(&hex::encode("Cleanhands CA")), "{ours}");
    assert!(upstream.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_host_header_cannot_take_a_credential_elsewhere() {
    let (installation, upstream) = started().await;

    let (_, out, err) = shell(
        &installation,
        "curl -sS -w '%{http_code}' -H 'Host: open.example' https://api.example/hello",
    );

    assert!(out.ends_with("403") || out.ends_with("421"), "{out} {err}");
    assert!(upstream.seen().is_empty(), "{:?}", upstream.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_secret_is_an_error_that_names_it_and_the_command_and_sends_nothing() {
    let (installation, upstream) = started().await;
    let removed = tokio::task::block_in_place(|| {
        installation.command(&["secret", "remove"]).arg("api").output().unwrap()
    });
    assert!(removed.status.success(), "{removed:?}");

    let (_, out, err) =
        shell(&installation, "curl -sS -w '%{http_code}' https://api.example/hello");

    assert!(out.contains("secret set api"), "{out} {err}");
    assert!(out.ends_with("502") || out.ends_with("503"), "{out}");
    assert!(upstream.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_exchange_has_one_decision_and_one_outcome_with_its_rule() {
    let (installation, _upstream) = started().await;
    let _ =
        shell(&installation, "curl -sS https://api.example/hello; curl -sS https://api.example/no");

    let audit = installation.audit().await;

    let of =
        |kind| audit.iter().filter(|r| r.kind == kind && r.method.is_some()).collect::<Vec<_>>();
    let allowed = of(ipc::vault::AuditKind::Allowed);
    assert_eq!(allowed.len(), 1, "{audit:?}");
    assert_eq!(allowed[0].rule.as_deref(), Some("egress.allow[0]"));
    assert_eq!(allowed[0].credential.as_deref(), Some("api"));
    let outcomes = audit
        .iter()
        .filter(|r| r.kind == ipc::vault::AuditKind::Outcome && r.request == allowed[0].request);
    assert_eq!(outcomes.count(), 1, "{audit:?}");
    assert_eq!(of(ipc::vault::AuditKind::Denied).len(), 1, "{audit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn localhost_inside_stays_inside() {
    let (installation, upstream) = started().await;
    let port = upstream.port;

    let script = format!(
        "./intruder serve 8099 & \
         for i in $(seq 200); do \
         curl -s -o /dev/null http://127.0.0.1:8099/ && break; sleep 0.05; done; \
         curl -s -o /dev/null -w '%{{http_code}}' http://localhost:8099/; \
         curl -sk --max-time 5 https://127.0.0.1:{port}/hello; echo \" $?\""
    );
    let out = installation.intrude("dev", &[], &script);

    // 7: connection refused, by the sandbox's own loopback.
    assert_eq!(out.trim(), "200 7");
    assert!(upstream.seen().is_empty());
}
