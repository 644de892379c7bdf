//! Promise: what is no sandbox (containers, virtual machines, CI jobs) comes in by a lease: under a
//! policy, on somebody's behalf, for a time, and by nobody else's token.
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};

use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::origin::{Origin, echoing, ok};
use cleanhands_tests::wait;
use ipc::vault::AuditKind;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

const TOKEN: &str = "SECRET-CANARY-leases-0b1d4c7790fe";
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
credential = "api"
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["raw.example"]
ports = [7000]
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
env = "API_TOKEN"
"#;
const CLOSED: &str = "[access]\nusers = [\"uid:4000000000\"]\n";

/// An installation whose origin wants the credential, and a raw server that gives bytes back.
async fn started(more: &str) -> (Installation, Origin) {
    let origin = Origin::start(&["api.example"], |request| {
        let known = request.values("authorization") == [format!("Bearer {TOKEN}")];
        if known { ok("", b"welcome") } else { ok("", b"who are you?") }
    })
    .await;
    let mut setup = Setup::default().policy("dev", POLICY).policy("closed", CLOSED);
    setup = origin.behind("api.example", setup);
    setup.upstreams.insert("raw.example".to_owned(), echoing().await);
    let installation = tokio::task::block_in_place(|| {
        let mut installation = Installation::prepare(&setup);
        let path = installation.layout.config.join("proxyd.toml");
        let table = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{more}{table}")).unwrap();
        installation.start_daemon("proxyd");
        installation
    });
    installation.store_secret("api", TOKEN).await;
    (installation, origin)
}

/// A lease that `cleanhands lease open` holds.
struct Held {
    child: Child,
    said: Value,
}

impl Held {
    fn open(installation: &Installation, options: &[&str]) -> Self {
        let mut command = installation.command(&["lease", "open", "dev", "--json"]);
        command.args(options).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut errors = String::new();
            child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
            panic!("no lease: {errors}");
        }
        Self { said: serde_json::from_str(&line).unwrap(), child }
    }

    fn text(&self, name: &str) -> String {
        self.said[name].as_str().unwrap().to_owned()
    }

    fn id(&self) -> String {
        self.text("lease")
    }

    /// Ctrl-C, as far as a program sees it.
    fn interrupt(mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a client gets for one request at the lease's TCP address.
async fn ask(address: &str, authorization: &str, request: &str) -> String {
    let stream = TcpStream::connect(address).await;
    let Ok(mut stream) = stream else { return "nobody listens".to_owned() };
    talk(&mut stream, authorization, request).await
}

async fn talk(
    stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin),
    authorization: &str,
    request: &str,
) -> String {
    let bytes = format!("{request}{authorization}Connection: close\r\n\r\n");
    let mut answer = Vec::new();
    // A connection that is reset after its answer has said it all the same.
    let _ = stream.write_all(bytes.as_bytes()).await;
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

const GET: &str = "GET https://api.example/ HTTP/1.1\r\nHost: api.example\r\n";

fn bearer(token: &str) -> String {
    format!("Proxy-Authorization: Bearer {token}\r\n")
}

fn leases(installation: &Installation) -> Vec<Value> {
    let output = installation.command(&["lease", "list", "--json"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_reaches_what_the_policy_allows_with_the_variables_of_its_lease_alone() {
    let (installation, origin) = started("").await;
    let script = "\
        curl -sS https://api.example/a; echo; \
        curl -sS --http2 https://api.example/b; echo; \
        curl -sS https://evil.example/; \
        curl -sS http://evil.example/; \
        echo \"$API_TOKEN\"; exit 7";

    let output = tokio::task::block_in_place(|| {
        let mut command = installation.command(&["lease", "open", "dev"]);
        command.args(["--", "sh", "-c", script]).stdin(Stdio::null()).output().unwrap()
    });

    let out = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{out}\n{errors}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..2], ["welcome", "welcome"], "{out}\n{errors}");
    for denied in &lines[2..4] {
        let denied: Value = serde_json::from_str(denied).unwrap();
        assert_eq!(denied["error"]["code"], "host_not_listed", "{denied}");
        assert_eq!(denied["error"]["environment"], "dev", "{denied}");
    }
    assert!(!lines[4].is_empty() && lines[4] != TOKEN, "{out}");
    assert!(!out.contains(TOKEN));
    assert_eq!(origin.seen().len(), 2);
    assert!(leases(&installation).is_empty());
    let allowed = |r: &&ipc::vault::AuditRecord| r.kind == AuditKind::Allowed;
    let audit = installation.audit().await;
    let record = audit.iter().find(allowed).unwrap();
    assert_eq!(record.environment.as_deref(), Some("dev"));
    assert_eq!(record.credential.as_deref(), Some("api"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_opens_the_socket_of_its_own_lease_and_no_other() {
    let (installation, origin) = started("").await;
    let (one, two) = tokio::task::block_in_place(|| {
        (Held::open(&installation, &[]), Held::open(&installation, &["--tcp=127.0.0.1"]))
    });
    let (address, token) = (one.text("address"), one.text("token"));

    let own = ask(&address, &bearer(&token), GET).await;
    let others = ask(&address, &bearer(&two.text("token")), GET).await;
    let changed = ask(&address, &bearer(&token.to_uppercase()), GET).await;
    let none = ask(&address, "", GET).await;
    let connect = "CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443\r\n";
    let tunnel = ask(&address, "", connect).await;

    assert!(own.starts_with("HTTP/1.1 200 ") && own.ends_with("welcome"), "{own}");
    for refused in [others, changed, none, tunnel] {
        assert!(refused.starts_with("HTTP/1.1 407 "), "{refused}");
        assert!(refused.contains("cleanhands lease open ENVIRONMENT"), "{refused}");
        assert!(refused.to_lowercase().contains("proxy-authenticate: basic"), "{refused}");
    }
    assert_eq!(origin.seen().len(), 1);
    assert!(token.len() * 5 >= 256, "{} characters of five bits", token.len());
    let state = installation
        .files()
        .into_iter()
        .filter(|(_, bytes)| bytes.windows(token.len()).any(|window| window == token.as_bytes()));
    assert_eq!(state.count(), 0, "a token is nowhere kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_unix_socket_the_kernel_says_who_comes_and_no_header_matters() {
    let (installation, _origin) = started("").await;
    let held = tokio::task::block_in_place(|| Held::open(&installation, &["--unix"]));
    let path = held.text("address");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());

    for authorization in ["", "Proxy-Authorization: Bearer wrong\r\n"] {
        let mut stream = UnixStream::connect(&path).await.unwrap();
        let answer = talk(&mut stream, authorization, GET).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("welcome"), "{answer}");
    }

    assert_eq!(mode & 0o777, 0o600);
    assert!(held.said["proxy"].is_null());
    let listed = tokio::task::block_in_place(|| leases(&installation));
    assert_eq!(listed[0]["listens"][0], format!("unix:{path}"));
}

/// A CONNECT to the raw server through the lease, and one byte there and back.
async fn tunnel(held: &Held) -> TcpStream {
    let mut stream = TcpStream::connect(held.text("address")).await.unwrap();
    let connect = format!(
        "CONNECT raw.example:7000 HTTP/1.1\r\nHost: raw.example:7000\r\n{}\r\n",
        bearer(&held.text("token"))
    );
    stream.write_all(connect.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_closed_or_expires_takes_its_flows_and_its_token_with_it() {
    let (installation, _origin) = started("").await;
    for by_hand in [true, false] {
        let options: &[&str] = if by_hand { &["--ttl", "8h"] } else { &["--ttl", "10s"] };
        let mut held = tokio::task::block_in_place(|| Held::open(&installation, options));
        let mut open = tunnel(&held).await;

        if by_hand {
            assert!(held.said["seconds_left"].as_u64().unwrap() > 8 * 3600 - 60);
            let id = held.id();
            let closed = tokio::task::block_in_place(|| {
                installation.command(&["lease", "close", &id]).output().unwrap()
            });
            assert!(closed.status.success(), "{closed:?}");
        }
        // The end of the connection, in order or by a reset.
        let ended = tokio::time::timeout(wait::LONG, open.read_u8()).await;
        let status = tokio::task::block_in_place(|| held.child.wait().unwrap());

        assert!(ended.unwrap().is_err(), "the tunnel goes on");
        assert_eq!(status.code(), Some(1));
        let mut errors = String::new();
        held.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        let reason = if by_hand { "closed by hand" } else { "its time is over" };
        assert!(errors.contains(reason), "{errors}");
        let mut egress = UnixStream::connect(installation.layout.proxyd_egress()).await.unwrap();
        let after = talk(&mut egress, &bearer(&held.text("token")), GET).await;
        assert!(after.starts_with("HTTP/1.1 407 "), "{after}");
        let files = std::path::PathBuf::from(held.text("ca"));
        assert!(!files.exists(), "its files are left behind");
    }
    let listed = tokio::task::block_in_place(|| leases(&installation));
    assert!(listed.is_empty(), "{listed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_a_lease_only_wait_while_proxyd_restarts() {
    let (mut installation, _origin) = started("").await;
    let held = tokio::task::block_in_place(|| Held::open(&installation, &[]));
    let (address, token) = (held.text("address"), held.text("token"));
    let before = ask(&address, &bearer(&token), GET).await;

    tokio::task::block_in_place(|| installation.kill("proxyd"));
    // The socket lives on with its holder: a client that comes now waits in its backlog.
    let (address_then, authorization) = (address.clone(), bearer(&token));
    let meanwhile = tokio::spawn(async move { ask(&address_then, &authorization, GET).await });
    tokio::task::block_in_place(|| installation.start_daemon("proxyd"));
    let waited = tokio::time::timeout(wait::LONG, meanwhile).await.unwrap().unwrap();
    let after = ask(&address, &bearer(&token), GET).await;

    for answer in [before, waited, after] {
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("welcome"), "{answer}");
    }
    assert_eq!(held.interrupt().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_open_a_lease_and_where_it_listens_is_not_the_callers_to_say() {
    let (installation, _origin) = started("lease-addresses = [\"0.0.0.0\"]\n").await;
    let open = |words: &[&str]| {
        let mut command = installation.command(&["lease", "open"]);
        let output =
            command.args(words).args(["--", "true"]).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (closed, harness, absent, elsewhere, listed) = tokio::task::block_in_place(|| {
        (
            open(&["closed"]),
            open(&["harness"]),
            open(&["nowhere"]),
            open(&["dev", "--tcp=[::]"]),
            open(&["dev", "--tcp=0.0.0.0"]),
        )
    });

    for (refused, words) in [
        (closed, "does not admit uid:"),
        (harness, "harnessd's own"),
        (absent, "no policy file"),
        (elsewhere, "lease-addresses in proxyd.toml"),
    ] {
        assert_eq!(refused.0, Some(1), "{}", refused.1);
        assert!(refused.1.contains(words), "{}", refused.1);
    }
    assert_eq!(listed, (Some(0), String::new()), "the operator's list has it");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_printed_for_shells_and_containers_leads_to_the_proxy() {
    let (installation, _origin) = started("").await;
    let print = |form: &str| {
        let mut command = installation.command(&["lease", "open", "dev", form]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        (child.stdout.take().unwrap(), child)
    };
    let sourced = tokio::task::block_in_place(|| {
        let (mut out, child) = print("--shell");
        let mut lines = Vec::new();
        let mut byte = [0];
        // The last of them is the placeholder of the policy.
        while !String::from_utf8_lossy(&lines).contains("API_TOKEN=") || byte[0] != b'\n' {
            out.read_exact(&mut byte).unwrap();
            lines.push(byte[0]);
        }
        let script = format!("{}curl -sS https://api.example/", String::from_utf8(lines).unwrap());
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        drop(Held { child, said: Value::Null });
        String::from_utf8(output.stdout).unwrap()
    });
    let (words, environment) = tokio::task::block_in_place(|| {
        let (out, child) = print("--docker");
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line).unwrap();
        let file = line.split_once("--env-file ").unwrap().1.split(' ').next().unwrap();
        let environment = std::fs::read_to_string(file.trim_matches('\'')).unwrap();
        drop(Held { child, said: Value::Null });
        (line, environment)
    });

    assert_eq!(sourced, "welcome");
    assert!(words.contains(":/etc/ssl/cleanhands-bundle.pem:ro"), "{words}");
    assert!(words.trim_end().ends_with("--network host"), "{words}");
    assert!(!words.contains("lease:"), "the token is on nobody's command line: {words}");
    let variable = |name: &str| {
        let found = environment.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {name} in\n{environment}")).to_owned()
    };
    assert!(variable("HTTPS_PROXY").starts_with("http://lease:"));
    assert_eq!(variable("SSL_CERT_FILE"), "/etc/ssl/cleanhands-bundle.pem");
    assert_eq!(variable("NODE_EXTRA_CA_CERTS"), "/etc/ssl/cleanhands-ca.pem");
    assert!(!variable("API_TOKEN").is_empty());
}
