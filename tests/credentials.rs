//! Promise: what an upstream gives back, and whatever a sandbox reads of itself and of the daemons,
//! never holds a credential; a rule that is taken back ends what it allowed.
#![allow(clippy::unwrap_used)]

use std::io::Write;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use cleanhands_tests::installation::{DAEMONS, Installation, Setup};
use cleanhands_tests::origin::{Origin, Request, ok};
use cleanhands_tests::wait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
credential = "api"
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["stays.example"]
ports = [7000]
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
env = "API_TOKEN"
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

fn canary() -> String {
    // A quote, a backslash and a slash, so that JSON and URLs must write it in another way.
    format!("SECRET\"CANARY\\{}/+", ipc::id::random_text(20))
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// The forms in which an origin can give a value back, by the path that asks for each.
fn forms(value: &str) -> Vec<(&'static str, String)> {
    let percent = |upper: bool| -> String {
        let digits = |b: u8| if upper { format!("%{b:02X}") } else { format!("%{b:02x}") };
        value.bytes().map(digits).collect()
    };
    vec![
        ("raw", value.to_owned()),
        ("base64", STANDARD.encode(value)),
        ("base64-1", STANDARD.encode(format!("x{value}"))),
        ("base64-2", STANDARD.encode(format!("xy{value}"))),
        ("base64-bearer", STANDARD.encode(format!("Bearer {value}"))),
        ("base64url", URL_SAFE_NO_PAD.encode(value)),
        ("hex", hex::encode(value)),
        ("hex-upper", hex::encode_upper(value)),
        ("percent", percent(false)),
        ("percent-upper", percent(true)),
        ("json", serde_json::to_string(value).unwrap()),
    ]
}

/// What gives a value away: each form without the ends that its neighbours share.
fn needles(value: &str) -> Vec<Vec<u8>> {
    forms(value).into_iter().map(|(_, f)| f.as_bytes()[4..f.len() - 4].to_vec()).collect()
}

fn holds(text: &[u8], needles: &[Vec<u8>]) -> bool {
    needles.iter().any(|needle| text.windows(needle.len()).any(|w| w == needle.as_slice()))
}

/// Answers `/PLACE/FORM` with the value that came in, in that form and in that place.
fn echo(request: &Request) -> Vec<u8> {
    let authorization = request.values("authorization").join(",");
    let value = authorization.strip_prefix("Bearer ").unwrap_or_default();
    let mut parts = request.target().split('/').skip(1);
    let (place, form) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let forms = forms(value);
    let Some((_, shown)) = forms.iter().find(|(name, _)| *name == form) else {
        return ok("", b"no such form");
    };
    let text = format!("before {shown} after");
    let chunked = "Transfer-Encoding: chunked\r\nConnection: close\r\n";
    match place {
        "body" => ok("", text.as_bytes()),
        "field" => ok(&format!("X-Shown: {text}\r\n"), b"before after"),
        "gzip" => ok("Content-Encoding: gzip\r\nConnection: close\r\n", &gzip(&text)),
        "chunks" | "events" => {
            let sse = place == "events";
            let text = if sse { format!("data: {text}\n\n") } else { text };
            let kind = if sse { "Content-Type: text/event-stream\r\n" } else { "" };
            let mut answer = format!("HTTP/1.1 200 OK\r\n{kind}{chunked}\r\n");
            for piece in text.as_bytes().chunks(3) {
                answer += &format!("{:x}\r\n", piece.len());
                answer += std::str::from_utf8(piece).unwrap();
                answer += "\r\n";
            }
            (answer + "0\r\n\r\n").into_bytes()
        }
        "trailer" => format!(
            "HTTP/1.1 200 OK\r\n{chunked}Trailer: X-Shown\r\n\r\nc\r\nbefore after\r\n0\r\n\
             X-Shown: {text}\r\n\r\n"
        )
        .into_bytes(),
        _ => ok("", b"no such place"),
    }
}

async fn started(value: &str) -> (Installation, Origin) {
    let origin = Origin::start(&["api.example"], echo).await;
    let setup = origin.behind("api.example", Setup::default().policy("dev", POLICY));
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", value).await;
    (installation, origin)
}

fn shell(installation: &Installation, script: &str) -> String {
    let (status, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));
    assert_eq!(status, Some(0), "{out}\n{err}");
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_in_any_form_and_place_reaches_the_sandbox_masked_or_not_at_all() {
    let value = canary();
    let (installation, origin) = started(&value).await;
    let names: Vec<&str> = forms("x").into_iter().map(|(name, _)| name).collect();
    let places = ["body", "field", "chunks", "events", "trailer", "gzip"];
    let script = format!(
        "for v in 1.1 2; do for p in {}; do \
         [ $p = gzip ] && how=--compressed || how=-i; \
         curl -s $how --http$v -w '##' $(printf \"https://api.example/$p/%s \" {}); done; done",
        places.join(" "),
        names.join(" ")
    );

    let (_, out, _) = tokio::task::block_in_place(|| installation.shell("dev", &script));

    let parts: Vec<&str> = out.strip_suffix("##").unwrap().split("##").collect();
    let asked =
        || [0, 1].into_iter().flat_map(|_| places).flat_map(|p| names.iter().map(move |f| (p, f)));
    assert_eq!(parts.len(), asked().count(), "{out}");
    let needles = needles(&value);
    for (part, (place, form)) in parts.iter().zip(asked()) {
        assert!(!holds(part.as_bytes(), &needles), "{place} {form}: {part}");
        // A compressed answer cannot be masked: it breaks off. All others come, with a mask.
        let came = part.contains("before") && part.contains("after") && part.contains("****");
        assert_eq!(came, place != "gzip", "{place} {form}: {part}");
    }
    assert_eq!(origin.seen().len(), asked().count());
    let bearer = format!("Bearer {value}");
    assert!(origin.seen().iter().all(|r| r.values("authorization") == [bearer.as_str()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encoding_that_cannot_be_searched_does_not_come_through() {
    let value = canary();
    let origin = Origin::start(&["api.example"], |request| {
        let shown = request.values("authorization").join(",");
        let coding = request.target().trim_start_matches('/').replace('_', ", ");
        ok(&format!("Content-Encoding: {coding}\r\n"), shown.as_bytes())
    })
    .await;
    let setup = origin.behind("api.example", Setup::default().policy("dev", POLICY));
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", &value).await;
    let codings = ["compress", "x-unknown", "gzip_gzip", "identity_rot13", "br_x"];
    let script = format!(
        "for c in {}; do curl -s -o /tmp/got -w '%{{http_code}}\\n' https://api.example/$c; \
         cat /tmp/got; echo; done",
        codings.join(" ")
    );

    let out = shell(&installation, &script);

    assert!(!holds(out.as_bytes(), &needles(&value)), "{out}");
    assert!(!out.contains("200\n"), "{out}");
    assert_eq!(origin.seen().len(), codings.len(), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_can_read_nothing_of_the_daemons_and_no_value_of_itself() {
    let value = canary();
    let (installation, _origin) = started(&value).await;
    let pids: Vec<String> = DAEMONS.iter().map(|d| installation.pid(d).to_string()).collect();
    // Uses the credential, then reads whatever a process can read, also of itself and of a
    // process that it makes dump its core.
    let script = format!(
        "curl -s https://api.example/body/raw; echo; echo \"$API_TOKEN\"; env; set; \
         cat /proc/self/environ; cd /proc; for p in [0-9]*; do \
         for f in comm environ cmdline maps stack syscall; do \
         cat $p/$f 2>/dev/null; done; ls -l $p/fd $p/task $p/map_files $p/cwd $p/root $p/exe \
         2>/dev/null; done; \
         for p in 1 2 {}; do ( : < $p/mem ) 2>/dev/null && echo \"MEMORY-$((40+2)) $p\"; done; \
         cd /workspace; ulimit -c unlimited 2>/dev/null; ulimit -c; \
         python3 -c 'import os; os.abort()'; ls -A /workspace /tmp; \
         grep -rls CANARY / --exclude-dir=proc --exclude-dir=usr; true",
        pids.join(" ")
    );

    let out = shell(&installation, &script);

    assert!(out.starts_with("before ") && out.contains("****"), "the credential was not used");
    let leaked: Vec<&str> =
        out.lines().filter(|line| holds(line.as_bytes(), &needles(&value))).collect();
    assert!(leaked.is_empty(), "{leaked:#?}");
    for absent in ["proxyd", "harnessd", "MEMORY-42", "core."] {
        let found: Vec<&str> = out.lines().filter(|line| line.contains(absent)).collect();
        assert!(found.is_empty(), "{absent}: {found:#?}");
    }
    assert!(out.contains("API_TOKEN="), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_is_taken_back_ends_its_open_flows_and_no_other() {
    let origin = Origin::start(&["api.example", "read.example"], |_| ok("", b"ok")).await;
    let raw = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut setup = Setup::default().policy("dev", &format!("{POLICY}{REVOCABLE}"));
    for host in ["api.example", "read.example"] {
        setup = origin.behind(host, setup);
    }
    for host in ["goes.example", "stays.example"] {
        setup.upstreams.insert(host.to_owned(), raw.local_addr().unwrap().port());
    }
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = raw.accept().await {
            tokio::spawn(async move {
                while let Ok(byte) = stream.read_u8().await {
                    let _ = stream.write_u8(byte).await;
                }
            });
        }
    });
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    let program = r#"
import socket, ssl
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
goes, stays = (socket.create_connection((h, 7000), 30) for h in ("goes.example", "stays.example"))
read = ssl.create_default_context().wrap_socket(
    socket.create_connection(("read.example", 443), 30), server_hostname="read.example")
get = b"GET / HTTP/1.1\r\nHost: read.example\r\n\r\n"
print(say(goes), say(stays), say(read, get)); open("ready", "w")
goes.settimeout(50)
try: print("goes:", goes.recv(1))
except ConnectionResetError: print("goes: reset")
print("stays:", say(stays))
print("read:", say(read, get)[:12])
print("again:", say(socket.create_connection(("goes.example", 7000), 30)))
"#;
    let workspace = tempfile::tempdir().unwrap();
    let mut command = installation.command(&["exec"]);
    command
        .args(["--environment", "dev", "--workspace"])
        .arg(workspace.path())
        .args(["--", "python3", "-c", program])
        .stdout(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    wait::until_async("the flows", || async {
        workspace.path().join("ready").exists().then_some(())
    })
    .await;
    let since = std::time::Instant::now();

    let policy = installation.layout.policies.join("dev.toml");
    std::fs::write(policy, POLICY).unwrap();
    let output = tokio::task::block_in_place(|| child.wait_with_output().unwrap());

    let out = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{out}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "b'x' b'x' b'HTTP/1.1 200 OK'");
    assert!(["goes: reset", "goes: b''"].contains(&lines[1]), "{out}");
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
