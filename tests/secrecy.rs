//! Promise: a credential is in the vault, and for an exchange's seconds in the traffic process; the
//! sandbox, the log, the audit, every other file and every environment never have it.
use base64::Engine;
use cleanhands_tests::api::{Api, tool_results};
use cleanhands_tests::installation::{DAEMONS, Installation, Setup};
use cleanhands_tests::upstream::Upstream;
use serde_json::json;

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET", "POST"]
paths = ["/hello", "/echo"]
credential = "api"
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
env = "API_TOKEN"
"#;

/// Secrets that no request of the sandbox has, and a directory that shows them to it all the same.
const LEAK: &str = r#"
[sandbox]
root = "host"
mounts = [{ source = "PLACE", target = "/opt/leak" }]
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
credential = "person"
[credentials.person]
secret = "local:refresh"
hosts = ["api.example"]
[credentials.person.inject.oauth2]
grant = "refresh-token"
token-url = "https://login.example/token"
client-id = "person"
client-secret = "local:client"
[credentials.objects]
secret = "local:aws"
inject = { aws-sigv4 = { regions = ["eu-central-1"], services = ["s3"] } }
hosts = ["api.example"]
env = "AWS_ACCESS_KEY_ID"
"#;

/// A value unique to this run, and the forms it could appear in.
fn canary() -> (String, Vec<Vec<u8>>) {
    let value = format!("SECRET-CANARY-{}", ipc::id::random_text(24));
    let b64 = base64::engine::general_purpose::STANDARD;
    let mut forms = vec![value.clone().into_bytes(), hex::encode(&value).into_bytes()];
    for shift in 0..3 {
        let padded = format!("{}{value}", "x".repeat(shift));
        let encoded = b64.encode(padded);
        // What is the same whatever stands around it.
        forms.push(encoded.as_bytes()[4..encoded.len() - 4].to_vec());
    }
    (value, forms)
}

fn holds(text: &[u8], forms: &[Vec<u8>]) -> bool {
    forms.iter().any(|form| text.windows(form.len()).any(|w| w == form.as_slice()))
}

async fn started(turns: serde_json::Value) -> (Installation, Vec<Vec<u8>>, Upstream) {
    let (value, forms) = canary();
    let upstream = Upstream::start(&["api.example"], &format!("Bearer {value}")).await;
    let setup =
        Setup::default().policy("dev", POLICY).upstream("api.example", &upstream).script(turns);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", &value).await;
    (installation, forms, upstream)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_hunts_for_the_token_finds_a_placeholder_or_a_mask() {
    let hunt = "curl -sS https://api.example/hello; echo; curl -sS https://api.example/echo; env; \
        cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; \
        grep -rIl SECRET-CANARY / --exclude-dir=proc --exclude-dir=usr 2>/dev/null; true";
    let turns = json!([
        { "text": "Looking.", "tools": [{ "name": "bash", "input": { "command": hunt } }] },
        { "text": "Nothing there." },
    ]);
    let (installation, forms, _upstream) = started(turns).await;
    let api = Api::new(&installation.layout.harnessd());
    let session = api.session("dev").await;

    api.say(&session, "find the token").await;
    let events = api.until_idle(&session).await;

    let results = tool_results(&events);
    assert_eq!(results.len(), 1, "{events:?}");
    assert!(results[0].contains("hello"), "the credential did not work: {}", results[0]);
    assert!(results[0].contains("authorization: "), "the echo did not answer: {}", results[0]);
    assert!(results[0].contains("API_TOKEN="), "no placeholder in the environment");
    let everything = serde_json::to_vec(&events).unwrap();
    assert!(!holds(&everything, &forms), "the token is in the events");
    for (file, content) in installation.files() {
        assert!(!holds(&content, &forms), "the token is in {}", file.display());
    }
    for daemon in DAEMONS {
        let pid = installation.pid(daemon);
        for part in ["environ", "cmdline"] {
            // A daemon that keeps even its own user out has nothing to show there.
            let read = std::fs::read(format!("/proc/{pid}/{part}")).unwrap_or_default();
            assert!(!holds(&read, &forms), "the token is in {daemon}'s {part}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_tool_puts_out_of_secrets_that_never_leave_the_vault_is_masked_before_it_is_kept() {
    let secrets = ["refresh", "client", "aws", "of-no-policy"].map(|name| (name, canary()));
    let place = tempfile::tempdir().unwrap();
    for (name, (value, _)) in &secrets {
        std::fs::write(place.path().join(name), value).unwrap();
    }
    let policy = LEAK.replace("PLACE", &place.path().display().to_string());
    let look = "cd /opt/leak; for f in *; do echo \"$f: $(cat $f)\"; base64 -w0 $f; echo; \
        (printf ab; cat $f) | base64 -w0; echo; od -An -v -tx1 $f | tr -d ' \\n'; echo; done >&2; \
        echo the end";
    let turns = json!([
        { "text": "Looking.", "tools": [{ "name": "bash", "input": { "command": look } }] },
        { "text": "Nothing there." },
    ]);
    let setup = Setup::default().policy("dev", &policy).script(turns);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    for (name, (value, _)) in &secrets {
        let key = format!("AKIAEXAMPLE000000000:{value}");
        installation.store_secret(name, if *name == "aws" { &key } else { value }).await;
    }
    let api = Api::new(&installation.layout.harnessd());
    let session = api.session("dev").await;

    api.say(&session, "look").await;
    let events = api.until_idle(&session).await;

    let results = tool_results(&events);
    assert!(results.len() == 1 && results[0].contains("the end"), "{events:?}");
    for (name, (value, _)) in &secrets {
        let masked = format!("{name}: {}\n", "*".repeat(value.len()));
        assert!(results[0].contains(&masked), "{name}: {}", results[0]);
    }
    let everything = serde_json::to_vec(&events).unwrap();
    for (name, (_, forms)) in &secrets {
        assert!(!holds(&everything, forms), "{name} is in the events: {}", results[0]);
        for (file, content) in installation.files() {
            // What ran in a sandbox and what it said stays as it was with sandboxd.
            let journal = file.to_string_lossy().contains("/sandboxd/journal.db");
            assert!(journal || !holds(&content, forms), "{name} is in {}", file.display());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_echo_is_masked_at_equal_length_also_when_it_is_compressed_or_ranged() {
    let (installation, forms, upstream) = started(json!([])).await;

    let script = "curl -sS https://api.example/echo; \
        curl -sS --compressed https://api.example/echo; \
        curl -sS --http1.1 https://api.example/echo; \
        curl -sS -D - -o /dev/null https://api.example/hello";
    let (status, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));

    assert_eq!(status, Some(0), "{err}");
    assert_eq!(upstream.seen().len(), 4, "{out}");
    assert!(!holds(out.as_bytes(), &forms), "{out}");
    let shown = out.lines().find(|l| l.starts_with("authorization:")).unwrap();
    assert!(shown.contains("****"), "{shown}");
    let sent =
        upstream.seen()[0].headers.iter().find(|(n, _)| n == "authorization").cloned().unwrap();
    assert_eq!(shown.len(), "authorization: ".len() + sent.1.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_an_injected_request_cannot_be_asked_for_in_parts() {
    let (installation, _forms, upstream) = started(json!([])).await;

    let script = "curl -sS -r 0-20 -H 'If-Range: \"x\"' https://api.example/hello";
    let (status, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));

    assert_eq!((status, out.as_str()), (Some(0), "hello"), "{err}");
    let seen = upstream.seen();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(seen[0].headers.iter().all(|(n, _)| !n.contains("range")), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_sent_to_another_host_or_by_another_sandbox_is_refused() {
    let (installation, _forms, upstream) = started(json!([])).await;
    let (_, placeholder, _) =
        tokio::task::block_in_place(|| installation.shell("dev", "printf %s \"$API_TOKEN\""));
    assert!(placeholder.len() >= 16, "{placeholder:?}");

    let script = format!(
        "curl -sS -w '%{{http_code}}' -H 'x-note: {placeholder}' https://api.example/hello"
    );
    let (_, out, err) = tokio::task::block_in_place(|| installation.shell("dev", &script));

    assert!(out.ends_with("403"), "{out} {err}");
    assert!(upstream.seen().is_empty(), "{:?}", upstream.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemons_that_hold_or_see_secrets_cannot_be_read_by_another_process_of_their_user() {
    let (installation, _forms, _upstream) = started(json!([])).await;

    // Root may read anything; the claim is about an ordinary user.
    if ipc::peer::Principal::own().uid != 0 {
        for daemon in ["proxyd", "harnessd"] {
            let pid = installation.pid(daemon);
            let read = std::fs::read(format!("/proc/{pid}/environ"));
            assert!(read.is_err(), "{daemon}'s environment can be read");
            let memory = std::fs::File::open(format!("/proc/{pid}/mem"));
            assert!(memory.is_err(), "{daemon}'s memory can be opened");
        }
    }
    let proxyd = ipc::http::Client::new(installation.layout.proxyd());
    let health: ipc::vault::Health = proxyd.get("/v1/health").await.unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", health.vault_pid)).unwrap();
    assert!(status.contains("Seccomp:\t2"), "the vault child has no filter: {status}");
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
}
