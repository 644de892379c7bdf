//! Tokens that are had for secrets: one flight for all who wait, nothing lost by a crash, one
//! repetition after a 401, and an end where the server refuses for good.

use std::sync::{Arc, Mutex};

use crate::support::*;
use bytes::Bytes;
use ipc::vault::SecretInfo;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::JoinHandle;

const H1: &[&[u8]] = &[b"http/1.1"];
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET", "POST"]
addresses = ["127.0.0.1/32"]
credential = "api"

[credentials.api]
secret = "local:refresh"
hosts = ["api.test"]
env = "API_TOKEN"
[credentials.api.inject.oauth2]
grant = "refresh-token"
token-url = "https://login.test/token"
client-id = "cleanhands"
client-secret = "local:client"
scope = "read write"
"#;

/// A token server that rotates refresh tokens and takes none twice, and the API that takes only
/// the newest of its access tokens.
#[derive(Default)]
struct Server {
    refresh: String,
    access: String,
    life: u64,
    /// Bodies of the requests for tokens.
    asked: Vec<String>,
    /// How the API answered, by status.
    answered: Vec<u16>,
    /// What the token server says instead of a token; nothing at all where the status is 0.
    refusal: Option<(u16, &'static str)>,
    /// It has rotated and does not say so before it is told to.
    silent: Option<watch::Receiver<bool>>,
}

type Shared = Arc<Mutex<Server>>;

async fn login(mut stream: impl AsyncRead + AsyncWrite + Unpin, server: Shared) {
    while let Some((head, body)) = request(&mut stream).await {
        let body = String::from_utf8(body).unwrap();
        let (status, text) = {
            let mut server = server.lock().unwrap();
            server.asked.push(format!("{} {body}", field(&head, "authorization").unwrap_or("-")));
            let shown = format!("refresh_token={}&", server.refresh);
            match server.refusal {
                Some((status, error)) => (status, format!("{{\"error\":\"{error}\"}}")),
                None if !body.contains(&shown) => (400, "{\"error\":\"invalid_grant\"}".to_owned()),
                None => {
                    let number = server.asked.len();
                    server.refresh = format!("REFRESH-CANARY-{number}");
                    server.access = format!("ACCESS-CANARY-{number}");
                    let answer = serde_json::json!({
                        "access_token": server.access, "token_type": "Bearer",
                        "expires_in": server.life, "refresh_token": server.refresh,
                    });
                    (200, answer.to_string())
                }
            }
        };
        if status == 0 {
            return;
        }
        let silent = server.lock().unwrap().silent.clone();
        if let Some(mut silent) = silent
            && silent.wait_for(|speaks| *speaks).await.is_err()
        {
            return;
        }
        let head = format!("HTTP/1.1 {status} So\r\nContent-Length: {}\r\n\r\n", text.len());
        if stream.write_all((head + &text).as_bytes()).await.is_err() {
            return;
        }
        let _ = stream.flush().await;
    }
}

async fn api(mut stream: impl AsyncRead + AsyncWrite + Unpin, server: Shared) {
    while let Some((head, _)) = request(&mut stream).await {
        let status = {
            let mut server = server.lock().unwrap();
            let good = format!("Bearer {}", server.access);
            let good = !server.access.is_empty() && field(&head, "authorization") == Some(&good);
            let status = if good { 200 } else { 401 };
            server.answered.push(status);
            status
        };
        let answer = format!("HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n");
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
        let _ = stream.flush().await;
    }
}

struct Scene {
    proxyd: Proxyd,
    server: Shared,
    _upstreams: [Upstream; 2],
}

impl Scene {
    async fn start() -> Scene {
        let server = Shared::default();
        {
            let mut server = server.lock().unwrap();
            server.refresh = "REFRESH-CANARY-0".to_owned();
            server.life = 3600;
        }
        let (one, two) = (Arc::clone(&server), Arc::clone(&server));
        let api = Upstream::tls("api.test", H1, move |stream| api(stream, Arc::clone(&one))).await;
        let login = Upstream::tls("login.test", H1, move |stream| login(stream, Arc::clone(&two)));
        let login = login.await;
        let proxyd = Proxyd::start(POLICY, &[("api.test", &api), ("login.test", &login)]).await;
        let scene = Scene { proxyd, server, _upstreams: [api, login] };
        scene.put("refresh", "REFRESH-CANARY-0").await;
        scene.put("client", "CLIENT-CANARY").await;
        scene
    }

    async fn put(&self, name: &str, value: &str) {
        let (path, value) =
            (format!("/v1/secrets/{name}"), Bytes::copy_from_slice(value.as_bytes()));
        self.proxyd.control().call(http::Method::PUT, &path, None, value).await.unwrap();
    }

    async fn secret(&self, name: &str) -> SecretInfo {
        let list: serde_json::Value = self.proxyd.control().get("/v1/secrets").await.unwrap();
        let secrets: Vec<SecretInfo> = serde_json::from_value(list["secrets"].clone()).unwrap();
        secrets.into_iter().find(|secret| secret.name == name).unwrap()
    }

    fn asked(&self) -> Vec<String> {
        self.server.lock().unwrap().asked.clone()
    }

    fn answered(&self) -> Vec<u16> {
        std::mem::take(&mut self.server.lock().unwrap().answered)
    }

    /// The API takes none of the tokens that it has given so far.
    fn revoke(&self) {
        self.server.lock().unwrap().access = "ACCESS-CANARY-none".to_owned();
    }
}

/// Status and code of the answer to one request.
async fn ask(lease: &Lease, request: &str) -> (u16, String) {
    let mut stream = lease.h1("api.test").await;
    stream.write_all(request.as_bytes()).await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;
    let text = serde_json::from_slice::<serde_json::Value>(&body).unwrap_or_default();
    let code = text["error"]["code"].as_str().unwrap_or_default().to_owned();
    (head[9..12].parse().unwrap(), code)
}

const GET: &str = "GET / HTTP/1.1\r\nHost: api.test\r\n\r\n";
const POST: &str = "POST / HTTP/1.1\r\nHost: api.test\r\nContent-Length: 2\r\n\r\nhi";

fn good() -> (u16, String) {
    (200, String::new())
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_requests_without_a_token_cause_one_flight_and_a_restart_loses_nothing() {
    let mut scene = Scene::start().await;
    let lease = Arc::new(scene.proxyd.lease().await);
    let tasks: Vec<_> = (0..50)
        .map(|_| {
            let lease = Arc::clone(&lease);
            tokio::spawn(async move { ask(&lease, GET).await })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), good());
    }
    let basic = "Basic Y2xlYW5oYW5kczpDTElFTlQtQ0FOQVJZ";
    let shown = "grant_type=refresh_token&refresh_token=REFRESH-CANARY-0&scope=read%20write";
    assert_eq!(scene.asked(), [format!("{basic} {shown}")]);
    let listed = scene.secret("refresh").await;
    assert_eq!((listed.version, &listed.kept[..]), (2, "vault"));
    let end: jiff::Timestamp = listed.expires_at.unwrap().parse().unwrap();
    assert!(end > jiff::Timestamp::now());

    // The token of before serves on, and when it is refused the rotated one gets another.
    scene.proxyd.restart().await;
    let lease = scene.proxyd.lease().await;
    assert_eq!(ask(&lease, GET).await, good());
    assert_eq!(scene.asked().len(), 1);
    scene.revoke();
    assert_eq!(ask(&lease, GET).await, good());
    assert_eq!(scene.asked().len(), 2);
    assert!(!scene.proxyd.log().contains("CANARY"), "{}", scene.proxyd.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_401_forces_one_refresh_and_one_repetition_where_there_is_no_body() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    assert_eq!(ask(&lease, GET).await, good());
    scene.answered();
    scene.revoke();

    // A body is not sent twice: the client learns of it, and the next request has a new token.
    assert_eq!(ask(&lease, POST).await.0, 401);
    until("the token is replaced", || async { ask(&lease, POST).await == good() }).await;
    assert_eq!(scene.asked().len(), 2);
    let answered = scene.answered();
    assert!(answered.len() >= 2 && answered[..answered.len() - 1].iter().all(|s| *s == 401));

    // A token that was had for a refused one is not taken for the culprit again so soon.
    scene.revoke();
    assert_eq!(ask(&lease, GET).await.0, 401);
    assert_eq!(scene.answered(), [401, 401]);
    assert_eq!(scene.asked().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_refuses_for_good_is_asked_once_and_the_secret_needs_a_login() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    scene.put("refresh", "REFRESH-CANARY-wrong").await;

    for _ in 0..3 {
        assert_eq!(ask(&lease, GET).await, (502, "credential_needs_login".to_owned()));
    }
    assert_eq!(scene.asked().len(), 1);
    assert_eq!(scene.secret("refresh").await.state, "needs_login");
    assert!(scene.answered().is_empty());

    scene.put("refresh", "REFRESH-CANARY-0").await;
    assert_eq!(scene.secret("refresh").await.state, "ready");
    assert_eq!(ask(&lease, GET).await, good());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_token_servers_own_word_makes_a_login_needed() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    for (status, error, needed) in [
        (400, "invalid_grant", true),
        (401, "", true),
        (403, "access_denied", true),
        (400, "", false),
        (403, "blocked by a firewall", false),
        (404, "", false),
        (408, "", false),
        (429, "invalid_grant", false),
        (500, "", false),
        (503, "temporarily_unavailable", false),
        // It closes the connection.
        (0, "", false),
    ] {
        scene.server.lock().unwrap().refusal = Some((status, error));
        // Whoever failed with the former value may be asked again.
        scene.put("refresh", "REFRESH-CANARY-0").await;

        let answer = ask(&lease, GET).await;

        let (code, state) = match needed {
            true => ((502, "credential_needs_login".to_owned()), "needs_login"),
            false => ((503, "secret_unavailable".to_owned()), "ready"),
        };
        assert_eq!(answer, code, "{status} {error}");
        assert_eq!(scene.secret("refresh").await.state, state, "{status} {error}");
    }
    assert!(scene.answered().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_token_server_fails_its_tokens_serve_on_and_without_one_nothing_leaves() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    scene.server.lock().unwrap().refusal = Some((503, "temporarily_unavailable"));

    assert_eq!(ask(&lease, GET).await, (503, "secret_unavailable".to_owned()));
    assert_eq!(scene.secret("refresh").await.state, "ready");
    assert!(scene.answered().is_empty());

    {
        let mut server = scene.server.lock().unwrap();
        server.refusal = None;
        // Half of this is over before it is used for the second time, or it is not: either way
        // the token is good.
        server.life = 60;
    }
    until("the pause is over", || async { ask(&lease, GET).await == good() }).await;
    scene.server.lock().unwrap().refusal = Some((503, "temporarily_unavailable"));
    for _ in 0..3 {
        assert_eq!(ask(&lease, GET).await, good());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_ends_with_the_secret_of_the_client_that_asked_for_it() {
    let mut scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    assert_eq!(ask(&lease, GET).await, good());
    scene.put("client", "CLIENT-CANARY-2").await;
    assert_eq!(ask(&lease, GET).await, good());
    assert_eq!(scene.asked().len(), 2);

    // Also one that lies on disk.
    scene.proxyd.restart().await;
    scene.put("client", "CLIENT-CANARY-3").await;
    let lease = scene.proxyd.lease().await;
    assert_eq!(ask(&lease, GET).await, good());
    assert_eq!(scene.asked().len(), 3);

    scene.proxyd.remove("client").await;
    assert_eq!(ask(&lease, GET).await, (502, "credential_missing".to_owned()));
    assert_eq!(scene.asked().len(), 3);
}

/// A request waits for a token; the server has rotated and says nothing yet.
async fn rotated(scene: &Scene) -> (watch::Sender<bool>, JoinHandle<()>) {
    let lease = scene.proxyd.lease().await;
    let (speaks, silent) = watch::channel(false);
    scene.server.lock().unwrap().silent = Some(silent);
    let waiting = tokio::spawn(async move {
        let mut stream = lease.h1("api.test").await;
        let _ = stream.write_all(GET.as_bytes()).await;
        // Held until the lease's connection is no longer of use.
        let mut rest = Vec::new();
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest).await;
    });
    until("the server has rotated", || async { scene.asked().len() == 1 }).await;
    (speaks, waiting)
}

/// The next proxyd waits for the answer, has its token, and is given another for what was rotated.
async fn the_next_one_has_the_answer(scene: &mut Scene, speaks: watch::Sender<bool>) {
    scene.proxyd.begin();
    until("the next vault waits", || async { scene.proxyd.log().contains("waits until") }).await;
    speaks.send_replace(true);
    scene.proxyd.serves().await;
    let lease = scene.proxyd.lease().await;

    assert_eq!(ask(&lease, GET).await, good());

    assert_eq!(scene.asked().len(), 1);
    assert_eq!(scene.secret("refresh").await.version, 2);
    scene.revoke();
    assert_eq!(ask(&lease, GET).await, good());
    let asked = scene.asked();
    assert!(asked.len() == 2 && asked[1].contains("=REFRESH-CANARY-1&"), "{asked:?}");
    assert_eq!(scene.secret("refresh").await.state, "ready");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotated_token_is_stored_though_proxyd_is_killed_before_the_answer() {
    let mut scene = Scene::start().await;
    let (speaks, waiting) = rotated(&scene).await;

    scene.proxyd.end(Signal::KILL);
    waiting.await.unwrap();

    the_next_one_has_the_answer(&mut scene, speaks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotated_token_is_stored_though_all_of_proxyd_is_told_to_end_before_the_answer() {
    let mut scene = Scene::start().await;
    let (speaks, waiting) = rotated(&scene).await;

    // As systemd and terminals do.
    let parent = scene.proxyd.health().await.pid;
    for pid in children(parent) {
        for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
            kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
        }
    }
    scene.proxyd.end(Signal::TERM);
    waiting.await.unwrap();

    the_next_one_has_the_answer(&mut scene, speaks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_all_between_a_rotation_and_its_news_ends_in_needs_login_and_no_loop() {
    let mut scene = Scene::start().await;
    let (_speaks, waiting) = rotated(&scene).await;
    let vault = scene.proxyd.health().await.vault_pid.cast_signed();

    kill_process(Pid::from_raw(vault).unwrap(), Signal::KILL).unwrap();
    scene.proxyd.restart().await;
    waiting.await.unwrap();
    scene.server.lock().unwrap().silent = None;
    let lease = scene.proxyd.lease().await;
    for _ in 0..3 {
        assert_eq!(ask(&lease, GET).await, (502, "credential_needs_login".to_owned()));
    }

    assert_eq!(scene.asked().len(), 2);
    assert_eq!(scene.secret("refresh").await.state, "needs_login");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_key_that_systemd_passes_opens_the_token_server_too() {
    let client = Identity::new();
    let server = Shared::default();
    {
        let mut server = server.lock().unwrap();
        (server.refresh, server.life) = ("REFRESH-CANARY-0".to_owned(), 3600);
    }
    let (one, two) = (Arc::clone(&server), Arc::clone(&server));
    let api = Upstream::tls("api.test", H1, move |stream| api(stream, Arc::clone(&one))).await;
    let versions = &[&rustls::version::TLS13];
    let serve = move |stream| login(stream, Arc::clone(&two));
    let cas = [client.ca_pem.as_str()];
    let login = Upstream::asking("login.test", (&cas, true), versions, H1, serve).await;
    let files = [
        ("login.pem", &login.ca_pem[..]),
        ("client.pem", &client.chain_pem),
        ("credentials/client.key", &client.key_pem),
    ];
    let row = format!(
        "[upstreams.\"login.test\"]\ndial = \"{}\"\nca = \"DIR/login.pem\"\n\
         client-certificate = \"DIR/client.pem\"\nclient-key = \"DIR/credentials/client.key\"\n",
        login.address
    );
    let variables = [("CREDENTIALS_DIRECTORY", "DIR/credentials")];
    let proxyd = Proxyd::with(POLICY, &[("api.test", &api)], &row, &files, &variables).await;
    proxyd.put("refresh", "REFRESH-CANARY-0").await;
    proxyd.put("client", "CLIENT-CANARY").await;
    let lease = proxyd.lease().await;

    assert_eq!(ask(&lease, GET).await, good(), "{}", proxyd.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_worker_is_confined_and_ends_with_proxyd() {
    let scene = Scene::start().await;
    let lease = scene.proxyd.lease().await;
    assert_eq!(ask(&lease, GET).await, good());
    let parent = scene.proxyd.health().await.pid;
    let worker = children(parent)
        .into_iter()
        .find(|pid| proc(*pid, "cmdline").is_some_and(|line| line.contains("vault-fetch")))
        .expect("proxyd has started the worker");

    let status = proc(worker, "status").unwrap();
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.lines().any(|found| found == line), "{line} is missing in\n{status}");
    }
    let line = proc(worker, "cmdline").unwrap();
    assert!(!line.contains("CANARY") && !line.contains("login.test"), "{line}");
    // An undumpable process's memory is not even its own user's to read.
    let memory = std::fs::File::open(format!("/proc/{worker}/mem"));
    assert!(rustix::process::geteuid().is_root() || memory.is_err());
    drop(scene);
    until("the worker has ended with proxyd", || async {
        proc(worker, "cmdline").is_none_or(|line| !line.contains("vault-fetch"))
    })
    .await;
}
