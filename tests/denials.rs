//! Promise: whoever is refused learns at once what was refused, by which rule and what would change
//! it, in words that his own program prints; and nobody waits.
use cleanhands_tests::installation::Installation;
use cleanhands_tests::origin::Origin;
use ipc::vault::{AuditKind, AuditRecord};
use serde_json::Value;

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
paths = ["/allowed/**"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["git.example"]
git = { repositories = ["acme/widget"], push = false }
addresses = ["127.0.0.1/32"]
"#;

async fn started() -> (Installation, Origin) {
    Installation::before(&["api.example", "git.example"], POLICY).await
}

/// Runs a script in a sandbox; gives all that it said.
fn said(installation: &Installation, script: &str) -> String {
    let (_, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));
    out + &err
}

fn denied<'a>(audit: &'a [AuditRecord], id: &str) -> Option<&'a AuditRecord> {
    audit.iter().find(|record| {
        record.kind == AuditKind::Denied
            && record.request.as_ref().is_some_and(|request| request.as_str() == id)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn json_over_both_protocols_names_reason_hint_and_the_request_in_the_audit() {
    let (installation, origin) = started().await;
    let cases = [
        ("--http1.1 https://evil.example/", "host_not_listed", "api.example"),
        ("--http2 https://evil.example/", "host_not_listed", "api.example"),
        ("http://evil.example/", "host_not_listed", "api.example"),
        ("--http1.1 https://api.example/other", "path_not_listed", "/allowed/**"),
        ("--http2 https://api.example/other", "path_not_listed", "/allowed/**"),
        ("--http2 -X PUT -d x https://api.example/allowed/a", "method_not_listed", "GET"),
        ("--http1.1 -X PUT -d x https://api.example/allowed/a", "method_not_listed", "GET"),
        ("http://api.example:81/", "port_not_listed", "443"),
        // The denial of an upgrade is no upgrade.
        (
            "--http1.1 -H 'Connection: Upgrade' -H 'Upgrade: websocket' https://api.example/ws",
            "path_not_listed",
            "/allowed/**",
        ),
    ];
    let script: String = cases
        .iter()
        .map(|(arguments, _, _)| format!("curl -sS -w '%{{http_code}}\\n' {arguments}; "))
        .collect();

    let out = said(&installation, &script);

    let audit = installation.audit().await;
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 2 * cases.len(), "{out}");
    for (answer, (arguments, code, hint)) in lines.chunks(2).zip(cases) {
        let body: Value = serde_json::from_str(answer[0]).unwrap();
        let error = &body["error"];
        assert_eq!((error["code"].as_str(), answer[1]), (Some(code), "403"), "{arguments}: {out}");
        assert!(error["hint"].as_str().unwrap().contains(hint), "{arguments}: {error}");
        assert!(error["message"].as_str().unwrap().contains(hint), "{arguments}: {error}");
        let id = error["request_id"].as_str().unwrap();
        assert!(denied(&audit, id).is_some(), "{arguments}: {id} is not in the audit");
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_with_protocols_of_their_own_are_told_in_them() {
    let (installation, origin) = started().await;
    let ask =
        |arguments: &str| format!("curl -sS -D - {arguments} https://evil.example/v2/; echo;");
    let grpc = said(&installation, &ask("--http2 -H 'content-type: application/grpc' -d x"));
    let web = said(&installation, &ask("-H 'content-type: application/grpc-web-text' -d x"));
    let registry = said(&installation, &ask("-A docker/27.0"));
    let npm = said(&installation, &ask("-A 'npm/10.8.2 node/v20.0.0'"));
    let head = said(&installation, "curl -sSI --http1.1 https://evil.example/");

    let status = |text: &str| text.split(' ').nth(1).unwrap_or_default().to_owned();
    let last = |text: &str| text.trim_end().lines().last().unwrap_or_default().to_owned();
    for (text, kind) in [(&grpc, "application/grpc"), (&web, "application/grpc-web-text")] {
        assert_eq!(status(text), "200", "{text}");
        assert!(text.contains("grpc-status: 7\r\n"), "{text}");
        assert!(text.contains("grpc-message: cleanhands: denied (host_not_listed)"), "{text}");
        assert!(text.contains(&format!("content-type: {kind}\r\n")), "{text}");
    }
    let body: Value = serde_json::from_str(&last(&registry)).unwrap();
    assert_eq!((status(&registry).as_str(), &body["errors"][0]["code"]), ("403", &"DENIED".into()));
    let body: Value = serde_json::from_str(&last(&npm)).unwrap();
    assert!(body["error"].as_str().unwrap().contains("does not list evil.example"), "{npm}");
    assert!(head.starts_with("HTTP/1.1 403 cleanhands: host_not_listed: policy"), "{head}");
    assert!(head.contains("x-cleanhands-denial: host_not_listed\r\n"), "{head}");
    for text in [grpc, web, registry, npm, head] {
        assert!(!text.to_lowercase().contains("html"), "{text}");
        assert!(text.contains("x-cleanhands-request: req_"), "{text}");
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn git_prints_the_reason_for_hosts_repositories_and_pushes() {
    let (installation, origin) = started().await;
    let script = "\
        git ls-remote https://evil.example/acme/widget.git; echo \"status $?\"; \
        git -c protocol.version=0 ls-remote https://git.example/acme/other.git; \
        cd /tmp && git init -q r && cd r && \
        git -c user.name=a -c user.email=a@example.invalid commit -q --allow-empty -m x && \
        git push https://git.example/acme/widget.git HEAD:main";

    let out = said(&installation, script);

    let told = |code: &str| out.contains(&format!("remote error: cleanhands: denied ({code})"));
    assert!(told("host_not_listed") && out.contains("status 128"), "{out}");
    assert!(told("repository_not_listed") && out.contains("acme/widget"), "{out}");
    assert!(told("push_not_allowed") && out.contains("git = { push = true }"), "{out}");
    assert!(origin.seen().is_empty(), "{:?}", origin.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_have_no_room_for_words_end_instead_of_hanging() {
    let (installation, _origin) = started().await;
    // Clients of such protocols wait for the server's first word. `timeout` would give 124.
    let script = "\
        for port in 22 25 3306; do \
          timeout 60 bash -c \"exec 3<>/dev/tcp/evil.example/$port; cat <&3\" 2>/dev/null; \
          echo \"$port $?\"; \
        done; \
        timeout 60 bash -c 'exec 3<>/dev/tcp/evil.example/5432; printf \"\\0\\0\\0\\x08x\" >&3; \
          cat <&3' 2>/dev/null; echo \"5432 $?\"; \
        timeout 60 getent hosts nothing..example; echo \"dns $?\"";

    let out = said(&installation, script);

    let lines: Vec<(&str, &str)> = out.lines().filter_map(|line| line.split_once(' ')).collect();
    assert_eq!(lines.len(), 5, "{out}");
    assert!(lines.iter().all(|(_, status)| *status != "124"), "{out}");
    let audit = installation.audit().await;
    let ports: Vec<_> = audit
        .iter()
        .filter(|record| {
            record.kind == AuditKind::Denied && record.entry.as_deref() == Some("connect")
        })
        .filter_map(|record| record.port)
        .collect();
    assert_eq!(ports, [22, 25, 3306, 5432]);
}
