//! Promise: a changed policy takes effect at once: what it takes back ends, what it adds counts,
//! and nothing else notices.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Child, Stdio};

use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::origin::{Origin, ok};
use cleanhands_tests::wait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

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

/// What the programs below begin with.
const CLIENT: &str = r#"
import os, socket, ssl, time
def say(stream, data=b"x"):
    got = b""
    try:
        stream.sendall(data)
        # A whole answer: the byte that comes back, or one that ends with its body.
        while not got.strip().endswith((b"x", b"ok", b"}")):
            piece = stream.recv(4096)
            if not piece: break
            got += piece
    except OSError: pass
    return got.split(b"\r\n")[0]
def tls(host, context=ssl.create_default_context()):
    plain = socket.create_connection((host, 443), 30)
    return context.wrap_socket(plain, server_hostname=host)
def get(host):
    return b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host.encode()
def end(stream):
    stream.settimeout(50)
    try: return "more" if stream.recv(1) else ""
    except OSError: return "reset"
"#;

/// A TCP server that gives each byte back.
async fn echoing() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                while let Ok(byte) = stream.read_u8().await {
                    let _ = stream.write_u8(byte).await;
                }
            });
        }
    });
    port
}

/// A Python program in a sandbox, with a directory through which it and the test wait.
fn running(installation: &Installation, program: &str, workspace: &Path) -> Child {
    let mut command = installation.command(&["exec"]);
    command.args(["--environment", "dev", "--workspace"]).arg(workspace);
    command.args(["--", "python3", "-c", &format!("{CLIENT}{program}")]).stdout(Stdio::piped());
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
    let program = r#"
hosts = ("goes.example", "stays.example")
goes, stays = (socket.create_connection((host, 7000), 30) for host in hosts)
read, ask = tls("read.example"), get("read.example")
print(say(goes), say(stays), say(read, ask)); open("ready", "w")
print("goes:", end(goes))
print("stays:", say(stays))
print("read:", say(read, ask)[:12])
print("again:", say(socket.create_connection(("goes.example", 7000), 30)))
"#;
    let workspace = tempfile::tempdir().unwrap();
    let child = running(&installation, program, workspace.path());
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
    assert_eq!(lines[0], "b'x' b'x' b'HTTP/1.1 200 OK'");
    assert!(["goes: reset", "goes: "].contains(&lines[1]), "{out}");
    assert_eq!(lines[2], "stays: b'x'");
    assert!(["read: b'HTTP/1.1 403'", "read: b''"].contains(&lines[3]), "{out}");
    assert_eq!(lines[4], "again: b''");
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
    let program = r#"
anyone = ssl.create_default_context(); anyone.check_hostname = False
anyone.verify_mode = ssl.CERT_NONE
api, stays = tls("api.example", anyone), socket.create_connection(("stays.example", 7000), 30)
print(say(api, get("api.example")), say(stays))
print("denied:", say(tls("read.example"), get("read.example"))[:12])
open("ready", "w")
print("tunnel:", end(api))
print("again:", say(tls("api.example"), get("api.example")))
print("read:", say(tls("read.example"), get("read.example")))
print("stays:", say(stays))
"#;
    let workspace = tempfile::tempdir().unwrap();
    let child = running(&installation, program, workspace.path());
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
    assert_eq!(lines[..2], ["b'HTTP/1.1 200 OK' b'x'", "denied: b'HTTP/1.1 403'"]);
    assert!(["tunnel: ", "tunnel: reset"].contains(&lines[2]), "{out}");
    let after = ["again: b'HTTP/1.1 200 OK'", "read: b'HTTP/1.1 200 OK'", "stays: b'x'"];
    assert_eq!(lines[3..], after);
    let seen = origin.seen();
    let sent: Vec<Vec<&str>> = seen.iter().map(|r| r.values("authorization")).collect();
    let bearer = format!("Bearer {TOKEN}");
    assert_eq!(sent, [vec![], vec![bearer.as_str()], vec![]]);
}
