//! Image registries: proxyd has their tokens itself, shows the password to no server that the
//! operator has not named, and answers clients that ask for tokens on their own with placeholders.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::support::*;
use bytes::Bytes;
use ipc::vault::SecretInfo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

const H1: &[&[u8]] = &[b"http/1.1"];
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["images.test", "thievish.test", "basic.test"]
methods = ["GET", "HEAD", "POST", "DELETE"]
paths = ["/v2/", "/v2/team/**", "/v2/secret/**"]
addresses = ["127.0.0.1/32"]
credential = "images"

[[egress.allow]]
hosts = ["auth.test"]
methods = ["GET", "POST"]
addresses = ["127.0.0.1/32"]
credential = "images"

[credentials.images]
secret = "local:images"
hosts = ["images.test", "thievish.test", "basic.test", "auth.test"]
inject = { registry = "bot" }
env = "API_TOKEN"
"#;
const PASSWORD: &str = "PASSWORD-CANARY";
/// `bot:PASSWORD-CANARY`.
const BASIC: &str = "Basic Ym90OlBBU1NXT1JELUNBTkFSWQ==";

/// A registry, and the server that gives its tokens.
#[derive(Default)]
struct Server {
    /// What each token is good for.
    tokens: HashMap<String, String>,
    /// Targets of requests for tokens.
    asked: Vec<String>,
    /// Request lines and keys that the registry has seen, but for those at `/v2/`.
    seen: Vec<String>,
    /// The registry has forgotten all tokens that were given so far.
    forgotten: usize,
    /// What requests for a token of no scope are answered instead.
    busy: Option<u16>,
}

type Shared = Arc<Mutex<Server>>;

async fn answer(stream: &mut (impl AsyncWrite + Unpin), status: u16, more: &str, text: &str) {
    let length = text.len();
    let head = format!("HTTP/1.1 {status} So\r\n{more}Content-Length: {length}\r\n\r\n");
    // A client that has gone needs none.
    let _ = stream.write_all((head + text).as_bytes()).await;
    let _ = stream.flush().await;
}

/// The target of a request line.
fn target(head: &str) -> String {
    head.split(' ').nth(1).unwrap_or_default().to_owned()
}

async fn tokens(mut stream: impl AsyncRead + AsyncWrite + Unpin, server: Shared) {
    while let Some((head, _)) = request(&mut stream).await {
        let target = target(&head);
        let scope = target.split("scope=").nth(1).unwrap_or("none").to_owned();
        let (status, text) = {
            let mut server = server.lock().unwrap();
            server.asked.push(target);
            let number = server.asked.len();
            if let Some(status) = server.busy.filter(|_| scope == "none") {
                (status, String::new())
            } else if field(&head, "authorization") != Some(BASIC) || scope.contains("secret") {
                (401, String::new())
            } else {
                let token = format!("TOKEN-CANARY-{number}");
                server.tokens.insert(token.clone(), scope);
                (200, format!(r#"{{"token":"{token}","expires_in":3600}}"#))
            }
        };
        answer(&mut stream, status, "", &text).await;
    }
}

/// Asks for a login as `challenge` says, and echoes what it was shown.
async fn registry(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    server: Shared,
    challenge: &'static str,
) {
    while let Some((head, _)) = request(&mut stream).await {
        let shown = field(&head, "authorization").unwrap_or_default().to_owned();
        let good = {
            let mut server = server.lock().unwrap();
            let token = shown.strip_prefix("Bearer ").unwrap_or_default();
            let number = token.rsplit('-').next().and_then(|number| number.parse().ok());
            let forgotten = number.is_none_or(|number: usize| number <= server.forgotten);
            let line = head.lines().next().unwrap_or_default();
            let scope = server.tokens.get(token).cloned().filter(|_| !forgotten);
            let good = (challenge.starts_with("Basic") && shown == BASIC) || scope.is_some();
            if target(&head) != "/v2/" {
                let scope = scope.unwrap_or_default();
                server.seen.push(format!("{} {scope}", line.trim_end_matches(" HTTP/1.1")));
            }
            good
        };
        let (status, more) = match good {
            true => (200, String::new()),
            false => (401, format!("WWW-Authenticate: {challenge}\r\n")),
        };
        answer(&mut stream, status, &more, &format!("before {shown} after")).await;
    }
}

struct Scene {
    proxyd: Proxyd,
    server: Shared,
    thief: Upstream,
    _upstreams: Vec<Upstream>,
}

impl Scene {
    async fn start() -> Scene {
        let server = Shared::default();
        let shared = Arc::clone(&server);
        let auth = Upstream::tls("auth.test", H1, move |stream| tokens(stream, shared.clone()));
        let auth = auth.await;
        let shared = Arc::clone(&server);
        let thief = Upstream::tls("thief.test", H1, move |stream| tokens(stream, shared.clone()));
        let thief = thief.await;
        let mut upstreams = vec![auth];
        let names = ["images.test", "thievish.test", "basic.test"];
        let challenges = [
            r#"Bearer realm="https://auth.test/token",service="images.test""#,
            r#"Bearer realm="https://thief.test/token",service="images.test""#,
            r#"Basic realm="all images""#,
        ];
        for (name, challenge) in names.into_iter().zip(challenges) {
            let shared = Arc::clone(&server);
            let serve = move |stream| registry(stream, shared.clone(), challenge);
            upstreams.push(Upstream::tls(name, H1, serve).await);
        }
        let mut table = vec![("auth.test", &upstreams[0]), ("thief.test", &thief)];
        table.extend(names.into_iter().zip(&upstreams[1..]));
        let proxyd = Proxyd::start(POLICY, &table).await;
        let scene = Scene { proxyd, server, thief, _upstreams: upstreams };
        scene.put(PASSWORD).await;
        scene
    }

    async fn put(&self, value: &str) {
        let value = Bytes::copy_from_slice(value.as_bytes());
        let control = self.proxyd.control();
        control.call(http::Method::PUT, "/v1/secrets/images", None, value).await.unwrap();
    }

    async fn state(&self) -> String {
        let list: serde_json::Value = self.proxyd.control().get("/v1/secrets").await.unwrap();
        let secrets: Vec<SecretInfo> = serde_json::from_value(list["secrets"].clone()).unwrap();
        secrets.into_iter().next().unwrap().state
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.server.lock().unwrap().asked)
    }

    fn seen(&self) -> Vec<String> {
        std::mem::take(&mut self.server.lock().unwrap().seen)
    }
}

/// Status and body of the answer to a request with these further lines.
async fn ask(lease: &Lease, host: &str, line: &str, more: &str) -> (u16, String) {
    let mut stream = lease.h1(host).await;
    let request = format!("{line} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;
    let whole = head.clone() + &String::from_utf8_lossy(&body);
    assert!(!whole.contains("CANARY"), "{whole}");
    (head[9..12].parse().unwrap(), String::from_utf8(body).unwrap())
}

fn code(body: &str) -> String {
    let text: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    let code = text["errors"][0]["detail"]["code"].as_str().or(text["error"]["code"].as_str());
    code.map_or_else(|| body.to_owned(), str::to_owned)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exchange_is_proxyds_and_each_access_has_one_token_that_no_sandbox_sees() {
    let scene = Scene::start().await;
    let lease = Arc::new(scene.proxyd.lease().await);

    let (status, body) = ask(&lease, "images.test", "GET /v2/", "").await;
    assert_eq!((status, body.contains("****")), (200, true), "{body}");
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let lease = Arc::clone(&lease);
            let pull = "GET /v2/team/app/manifests/v1";
            tokio::spawn(async move { ask(&lease, "images.test", pull, "").await.0 })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
    let length = "Content-Length: 0\r\n";
    let push = "POST /v2/team/app/blobs/uploads/";
    assert_eq!(ask(&lease, "images.test", push, length).await.0, 200);

    let of = |scope: &str| format!("/token?service=images.test&account=bot{scope}");
    assert_eq!(
        scene.asked(),
        [of(""), of("&scope=repository:team/app:pull"), of("&scope=repository:team/app:pull,push")]
    );
    let seen = scene.seen();
    assert_eq!(seen[0], "GET /v2/team/app/manifests/v1 repository:team/app:pull");
    assert_eq!(seen[20..], [format!("{push} repository:team/app:pull,push")]);
    assert!(!scene.proxyd.log().contains("CANARY"), "{}", scene.proxyd.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_names_a_server_of_its_own_does_not_get_the_password_there() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;

    let (status, body) = ask(&lease, "thievish.test", "GET /v2/", "").await;

    assert_eq!((status, scene.thief.connections()), (503, 0), "{body}");
    assert!(body.contains("thief.test"), "{body}");
    assert!(scene.asked().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_takes_the_password_gets_it_and_its_echo_is_masked() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    let own = "Authorization: Basic YXR0YWNrZXI6b3duLWtleQ==\r\n";

    let (status, body) = ask(&lease, "basic.test", "GET /v2/team/app/tags/list", own).await;

    assert_eq!((status, body.contains("****")), (200, true), "{body}");
    assert!(!body.contains("Ym90OlBB"), "{body}");
    assert_eq!(scene.asked().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_asks_for_tokens_itself_gets_placeholders_and_goes_on_with_them() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    let placeholder = lease.placeholder().to_owned();
    let scope = "GET /token?service=images.test&scope=repository:team/app:pull";
    let form = "Content-Length: 18\r\n\r\ngrant_type=refresh";

    for (line, more) in [(scope, "\r\n"), ("POST /token", form)] {
        let mut stream = lease.h1("auth.test").await;
        let request = format!("{line} HTTP/1.1\r\nHost: auth.test\r\n{more}");
        stream.write_all(request.as_bytes()).await.unwrap();
        let (head, body) = timely(response(&mut stream)).await;
        let answer: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_eq!(answer["token"], placeholder, "{answer}");
        assert_eq!(answer["access_token"], placeholder, "{answer}");
    }
    assert!(scene.asked().is_empty());
    let record = scene.proxyd.record(|record| record.host.as_deref() == Some("auth.test")).await;
    assert_eq!(record.credential.as_deref(), Some("images"));

    let shown = format!("Authorization: Bearer {placeholder}\r\n");
    let pull = "GET /v2/team/app/manifests/v1";
    assert_eq!(ask(&lease, "images.test", pull, &shown).await.0, 200);
    assert_eq!(scene.asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_that_is_refused_is_no_wrong_password_and_a_wrong_password_needs_a_login() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    let pull = "GET /v2/team/app/manifests/v1";

    let (status, body) = ask(&lease, "images.test", "GET /v2/secret/x/tags/list", "").await;
    assert_eq!((status, &*code(&body)), (403, "credential_refused"), "{body}");
    assert_eq!(scene.state().await, "ready");
    assert_eq!(ask(&lease, "images.test", pull, "").await.0, 200);

    scene.put("WRONG-CANARY").await;
    for _ in 0..3 {
        let (status, body) = ask(&lease, "images.test", pull, "").await;
        assert_eq!((status, &*code(&body)), (502, "credential_needs_login"), "{body}");
    }
    assert_eq!(scene.state().await, "needs_login");
    scene.put(PASSWORD).await;
    assert_eq!(ask(&lease, "images.test", pull, "").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_too_busy_to_judge_the_password_has_not_refused_it() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    for status in [429, 503] {
        scene.server.lock().unwrap().busy = Some(status);
        let secret = format!("GET /v2/secret/{status}/tags/list");

        let (answered, body) = ask(&lease, "images.test", &secret, "").await;

        assert_eq!((answered, &*code(&body)), (503, "secret_unavailable"), "{body}");
        assert_eq!(scene.state().await, "ready");
    }
    let pull = "GET /v2/team/app/manifests/v1";
    assert_eq!(ask(&lease, "images.test", pull, "").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_upload_takes_a_blob_of_a_repository_that_no_rule_allows() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    let mount = "POST /v2/team/app/blobs/uploads/?mount=sha256:00&from=other/app";

    let (status, body) = ask(&lease, "images.test", mount, "Content-Length: 0\r\n").await;

    assert_eq!(status, 200, "{body}");
    let upload = "POST /v2/team/app/blobs/uploads/ repository:team/app:pull,push";
    assert_eq!(scene.seen(), [upload]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_the_registry_refuses_is_had_anew_once() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    let pull = "GET /v2/team/app/manifests/v1";
    assert_eq!(ask(&lease, "images.test", pull, "").await.0, 200);
    scene.server.lock().unwrap().forgotten = 1;

    assert_eq!(ask(&lease, "images.test", pull, "").await.0, 200);

    assert_eq!(scene.asked().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_is_none_of_the_api_takes_no_token() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;

    let (status, body) = ask(&lease, "auth.test", "GET /admin", "").await;

    assert_eq!((status, &*code(&body)), (403, "credential_refused"), "{body}");
    assert!(scene.asked().is_empty());
}
