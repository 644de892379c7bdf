//! Promise: a changed policy takes effect at once: what it takes back ends, what it adds counts,
//! and nothing else notices.
use std::path::Path;
use std::process::{Child, Stdio};

use cleanhands_tests::installation::{Installation, Setup, intruders_workspace};
use cleanhands_tests::origin::{Origin, echoing, ok};
use cleanhands_tests::wait;

const TOKEN: &str = "SECRET-CANARY-changes-6be09d4f12aa";
const KEPT: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["stays.example"]
ports = [7000]
addresses = ["127.0.0.1/32"]
"#;
const REVOCABLE: &str = r#"
[[egress.allow]]
hosts = ["goes.example"]
ports = [7000]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["read.example"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
"#;
const PLAIN: &str = r#"
[[egress.allow]]
hosts = ["api.example"]
addresses = ["127.0.0.1/32"]
"#;
const WITH_CREDENTIAL: &str = r#"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
credential = "api"
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["read.example"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
"#;

/// A request in hex, as the intruder's conversations have it.
fn get(host: &str) -> String {
    hex::encode(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"))
}

/// A conversation in a sandbox, with a directory through which it and the test wait.
fn talking(installation: &Installation, steps: &str, workspace: &Path) -> Child {
    std::fs::write(workspace.join("steps"), steps).unwrap();
    let mut command = installation.intruder("dev", workspace);
    command.args(["./intruder", "talk", "steps"]).stdout(Stdio::piped());
    command.spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_is_taken_back_ends_its_open_flows_and_no_other() {
    let origin = Origin::start(&["read.example"], |_| ok("", b"ok")).await;
    let raw = echoing().await;
    let mut setup = Setup::default().policy("dev", &format!("{KEPT}{REVOCABLE}"));
    setup = origin.behind("read.example", setup);
    for host in ["goes.example", "stays.example"] {
        setup.upstreams.insert(host.to_owned(), raw);
    }
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    let read = get("read.example");
    let steps = format!(
        "tcp goes goes.example 7000\ntcp stays stays.example 7000\ntls read read.example\n\
         say goes 78\nsay stays 78\nsay read {read}\ntouch ready\n\
         end goes\nsay stays 78\nsay read {read}\n\
         tcp again goes.example 7000\nsay again 78\n"
    );
    let workspace = intruders_workspace();
    let child = talking(&installation, &steps, workspace.path());
    wait::until_async("the flows", || async {
        workspace.path().join("ready").exists().then_some(())
    })
    .await;
    let since = std::time::Instant::now();

    let policy = installation.layout.policies.join("dev.toml");
    std::fs::write(policy, KEPT).unwrap();
    let output = tokio::task::block_in_place(|| child.wait_with_output().unwrap());

    let out = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{out}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..3], ["goes: x", "stays: x", "read: HTTP/1.1 200 OK"]);
    assert!(["goes: reset", "goes: closed"].contains(&lines[3]), "{out}");
    assert_eq!(lines[4], "stays: x");
    assert!(lines[5] == "read: " || lines[5].starts_with("read: HTTP/1.1 403"), "{out}");
    assert_eq!(lines[6..], ["again: "]);
    assert!(since.elapsed() < wait::LONG);
    let audit = installation.audit().await;
    let ended = audit.iter().find(|r| {
        r.kind == ipc::vault::AuditKind::Outcome
            && r.host.as_deref() == Some("goes.example")
            && r.reason.as_deref().is_some_and(|reason| reason.starts_with("policy_changed"))
    });
    assert!(ended.is_some(), "{audit:#?}");
    let generations: std::collections::BTreeSet<u64> = audit.iter().map(|r| r.generation).collect();
    assert!(generations.len() >= 2, "{generations:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_is_added_counts_at_once_and_a_new_credential_ends_tunnels_past_it() {
    let origin = Origin::start(&["api.example", "read.example"], |_| ok("", b"ok")).await;
    let mut setup = Setup::default().policy("dev", &format!("{KEPT}{PLAIN}"));
    for host in ["api.example", "read.example"] {
        setup = origin.behind(host, setup);
    }
    setup.upstreams.insert("stays.example".to_owned(), echoing().await);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", TOKEN).await;
    // The tunnel shows the origin's own certificate, whose CA is not known inside.
    let (api, read) = (get("api.example"), get("read.example"));
    let steps = format!(
        "tls-unverified api api.example\ntcp stays stays.example 7000\n\
         say api {api}\nsay stays 78\ntls denied read.example\nsay denied {read}\n\
         touch ready\nend api\ntls again api.example\nsay again {api}\n\
         tls read read.example\nsay read {read}\nsay stays 78\n"
    );
    let workspace = intruders_workspace();
    let child = talking(&installation, &steps, workspace.path());
    wait::until_async("the flows", || async {
        workspace.path().join("ready").exists().then_some(())
    })
    .await;

    let policy = installation.layout.policies.join("dev.toml");
    std::fs::write(policy, format!("{KEPT}{WITH_CREDENTIAL}")).unwrap();
    let output = tokio::task::block_in_place(|| child.wait_with_output().unwrap());

    let out = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{out}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..2], ["api: HTTP/1.1 200 OK", "stays: x"]);
    assert!(lines[2].starts_with("denied: HTTP/1.1 403"), "{out}");
    assert!(["api: closed", "api: reset"].contains(&lines[3]), "{out}");
    let after = ["again: HTTP/1.1 200 OK", "read: HTTP/1.1 200 OK", "stays: x"];
    assert_eq!(lines[4..], after);
    let seen = origin.seen();
    let sent: Vec<Vec<&str>> = seen.iter().map(|r| r.values("authorization")).collect();
    let bearer = format!("Bearer {TOKEN}");
    assert_eq!(sent, [vec![], vec![bearer.as_str()], vec![]]);
}
