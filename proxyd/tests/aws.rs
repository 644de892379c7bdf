//! AWS as a keeper of secrets and of keys: every way to the vault's own keys, secrets that are
//! replaced there, roles whose keys sign for a sandbox; and what ends in a refusal instead.

use std::sync::{Arc, Mutex};

use crate::support::*;
use bytes::Bytes;
use ipc::vault::SecretInfo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "api"
[[egress.allow]]
hosts = ["signed.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "deploy"
[credentials.api]
secret = "aws-secrets-manager:agents/api#token"
inject = { bearer = true }
hosts = ["api.test"]
[credentials.deploy]
secret = "aws-role:deploy"
inject = { aws-sigv4 = { regions = ["eu-central-1"], services = ["s3"] } }
hosts = ["signed.test"]
env = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
"#;
const HOSTS: [&str; 4] = ["api.test", "signed.test", "secrets.test", "sts.test"];
const KEYS: &str = "login = { method = \"keys\", secret = \"local:aws\" }";
const ROLE: &str = "[aws.roles.deploy]\nrole = \"arn:aws:iam::123456789012:role/deploy\"\n\
    external-id = \"ext-1\"\nsession-policy = '{\"Version\":\"2012-10-17\"}'\nduration = \"15m\"\n";

/// AWS's services, and the APIs that take what they give.
#[derive(Default)]
struct Server {
    /// The secret's value, which the API takes alone.
    value: String,
    /// Access keys that count, the newest last.
    keys: Vec<String>,
    /// How long sessions last.
    life: u64,
    /// What is shown by a web identity, and to the container's agent.
    token: String,
    /// The error of the token service.
    refusal: Option<&'static str>,
    /// Everybody answers 503.
    down: bool,
    /// The metadata service gives no sessions, as one of the first version.
    no_sessions: bool,
    /// The metadata service sends everybody elsewhere.
    moved: bool,
    /// Host and first line or action of each request.
    asked: Vec<String>,
    /// What the APIs were shown.
    seen: Vec<String>,
}

type Shared = Arc<Mutex<Server>>;

impl Server {
    /// Another session: its id, its secret, its token and its end.
    fn session(&mut self) -> [String; 4] {
        let number = self.keys.len();
        let id = format!("ASIASESSION{number:05}");
        self.keys.push(id.clone());
        let life = jiff::SignedDuration::from_secs(i64::try_from(self.life).unwrap());
        let end = (jiff::Timestamp::now() + life).to_string();
        [id, format!("KEY-CANARY-{number}"), format!("SESSION-CANARY-{number}"), end]
    }

    fn keys_as_json(&mut self) -> (u16, String) {
        let [id, secret, token, end] = self.session();
        let keys = serde_json::json!({
            "Code": "Success", "AccessKeyId": id, "SecretAccessKey": secret, "Token": token,
            "Expiration": end,
        });
        (200, keys.to_string())
    }

    /// Whether a request is signed with a key that counts.
    fn is_signed(&self, head: &str) -> bool {
        let shown = field(head, "authorization").unwrap_or_default();
        let session = field(head, "x-amz-security-token");
        self.keys.iter().enumerate().any(|(number, id)| {
            let token = format!("SESSION-CANARY-{number}");
            let own = if id.starts_with("ASIA") { Some(&token[..]) } else { None };
            shown.contains(&format!("Credential={id}/")) && session == own
        })
    }

    fn answer(&mut self, head: &str, body: &str) -> (u16, String) {
        let line = head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
        let host = field(head, "host").unwrap_or_default().to_owned();
        let action = body.split('&').next().unwrap_or_default();
        self.asked.push(format!("{host} {line} {action}").trim_end().to_owned());
        match &host[..] {
            "api.test" => {
                let shown = field(head, "authorization").unwrap_or("none").to_owned();
                let good = shown == format!("Bearer {}", self.value);
                self.seen.push(shown);
                (if good { 200 } else { 401 }, String::new())
            }
            "signed.test" => {
                let session = field(head, "x-amz-security-token").unwrap_or("none");
                let good = self.is_signed(head);
                self.seen.push(session.to_owned());
                (if good { 200 } else { 403 }, session.to_owned())
            }
            _ if self.down => (503, String::new()),
            "secrets.test" => self.secret(head, body),
            "sts.test" => self.token_service(head, body),
            _ => self.beside(&line, head),
        }
    }

    fn secret(&mut self, head: &str, body: &str) -> (u16, String) {
        if !self.is_signed(head) {
            return (400, "{\"__type\":\"UnrecognizedClientException\"}".to_owned());
        }
        assert_eq!(field(head, "x-amz-target"), Some("secretsmanager.GetSecretValue"));
        assert_eq!(body, "{\"SecretId\":\"agents/api\"}");
        if self.value.is_empty() {
            return (400, "{\"__type\":\"ResourceNotFoundException\"}".to_owned());
        }
        let text = serde_json::json!({ "token": self.value }).to_string();
        (200, serde_json::json!({ "SecretString": text, "VersionId": "1" }).to_string())
    }

    fn token_service(&mut self, head: &str, body: &str) -> (u16, String) {
        let identified = body.contains(&format!("&WebIdentityToken={}", self.token));
        let refusal = match body.starts_with("Action=AssumeRoleWithWebIdentity&") {
            true if identified && !self.token.is_empty() => None,
            true => Some("InvalidIdentityToken"),
            false if self.is_signed(head) => {
                assert!(body.contains("&ExternalId=ext-1&Policy=%7B%22Version"), "{body}");
                assert!(body.contains("&DurationSeconds=900&"), "{body}");
                None
            }
            false => Some("InvalidClientTokenId"),
        };
        if let Some(word) = self.refusal.or(refusal) {
            return (
                403,
                format!("<ErrorResponse><Error><Code>{word}</Code></Error></ErrorResponse>"),
            );
        }
        let [id, secret, token, end] = self.session();
        let keys = format!(
            "<R><Credentials><AccessKeyId>{id}</AccessKeyId><SecretAccessKey>{secret}\
             </SecretAccessKey><SessionToken>{token}</SessionToken><Expiration>{end}\
             </Expiration></Credentials></R>"
        );
        (200, keys)
    }

    /// What answers without TLS: the container's agent and the metadata service.
    fn beside(&mut self, line: &str, head: &str) -> (u16, String) {
        let session = field(head, "x-aws-ec2-metadata-token") == Some("IMDS-CANARY");
        let keys = "/latest/meta-data/iam/security-credentials/";
        if self.moved {
            return (307, String::new());
        }
        match line.split_once(' ').unwrap() {
            ("GET", "/v1/credentials") => {
                let good = field(head, "authorization") == Some(&self.token[..]);
                if good { self.keys_as_json() } else { (401, String::new()) }
            }
            ("PUT", "/latest/api/token") if !self.no_sessions => {
                assert!(field(head, "x-aws-ec2-metadata-token-ttl-seconds").is_some());
                (200, "IMDS-CANARY".to_owned())
            }
            // One of the first version gives keys without a session.
            ("GET", path) if path.starts_with(keys) && (session || self.no_sessions) => {
                match &path[keys.len()..] {
                    "" => (200, "agents\nothers".to_owned()),
                    "agents" => self.keys_as_json(),
                    _ => (404, String::new()),
                }
            }
            ("GET", _) => (401, String::new()),
            _ => (405, String::new()),
        }
    }
}

async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin, server: Shared) {
    while let Some((head, body)) = request(&mut stream).await {
        let body = String::from_utf8(body).unwrap();
        let (status, text) = server.lock().unwrap().answer(&head, &body);
        let elsewhere = "Location: https://api.test/v1/credentials\r\n";
        let elsewhere = if status == 307 { elsewhere } else { "" };
        let length = text.len();
        let answer =
            format!("HTTP/1.1 {status} So\r\n{elsewhere}Content-Length: {length}\r\n\r\n{text}");
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
        let _ = stream.flush().await;
    }
}

struct Scene {
    proxyd: Proxyd,
    server: Shared,
    lease: Lease,
    _upstreams: Vec<Upstream>,
}

impl Scene {
    /// `BESIDE` in the lines of `[aws]` stands for the address of what answers without TLS.
    async fn start(lines: &str, change: impl Fn(&mut Server)) -> Scene {
        let server = Shared::default();
        {
            let mut server = server.lock().unwrap();
            (server.value, server.life) = ("AWS-VALUE-CANARY-1".to_owned(), 3600);
            server.token = "TOKEN-CANARY-1".to_owned();
            server.keys.push("AKIAREAL0000000REAL0".to_owned());
            change(&mut server);
        }
        let mut upstreams = Vec::new();
        for host in HOSTS {
            let shared = Arc::clone(&server);
            let serve = move |stream| serve(stream, Arc::clone(&shared));
            upstreams.push(Upstream::tls(host, &[b"http/1.1"], serve).await);
        }
        let shared = Arc::clone(&server);
        let beside = Upstream::tcp(move |stream| serve(stream, Arc::clone(&shared))).await;
        let lines = lines.replace("BESIDE", &beside.address.to_string());
        let config = format!(
            "secret-directories = [\"DIR\"]\n[aws]\nregion = \"eu-central-1\"\n\
             secrets-url = \"https://secrets.test\"\nsts-url = \"https://sts.test\"\n{lines}\n"
        );
        let rows: Vec<(&str, &Upstream)> = HOSTS.iter().copied().zip(&upstreams).collect();
        let files = [("token", "TOKEN-CANARY-1\n")];
        let proxyd = Proxyd::with(POLICY, &rows, &config, &files, &[]).await;
        let lease = proxyd.lease().await;
        upstreams.push(beside);
        let scene = Scene { proxyd, server, lease, _upstreams: upstreams };
        scene.put("AKIAREAL0000000REAL0:SECRET-CANARY-aws").await;
        scene
    }

    async fn put(&self, value: &'static str) {
        let value = Bytes::from_static(value.as_bytes());
        let control = self.proxyd.control();
        control.call(http::Method::PUT, "/v1/secrets/aws", None, value).await.unwrap();
    }

    async fn ask(&self) -> (u16, String) {
        self.request("api.test", "").await
    }

    /// A request that is signed with the sandbox's placeholder.
    async fn ask_signed(&self) -> (u16, String) {
        let own = self.lease.opened.env.iter().find(|(name, _)| name == "AWS_ACCESS_KEY_ID");
        let signed = format!(
            "X-Amz-Content-Sha256: UNSIGNED-PAYLOAD\r\nAuthorization: AWS4-HMAC-SHA256 \
             Credential={}/20200101/eu-central-1/s3/aws4_request, SignedHeaders=host, \
             Signature={}\r\n",
            own.unwrap().1,
            "0".repeat(64)
        );
        self.request("signed.test", &signed).await
    }

    async fn request(&self, host: &str, fields: &str) -> (u16, String) {
        let mut stream = self.lease.h1(host).await;
        let head = format!("GET / HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let (head, body) = timely(response(&mut stream)).await;
        (head[9..12].parse().unwrap(), String::from_utf8_lossy(&body).into_owned())
    }

    fn asked(&self, part: &str) -> usize {
        self.server.lock().unwrap().asked.iter().filter(|line| line.contains(part)).count()
    }

    fn change(&self, change: impl FnOnce(&mut Server)) {
        change(&mut self.server.lock().unwrap());
    }

    async fn secret(&self, name: &str) -> Option<SecretInfo> {
        let list: serde_json::Value = self.proxyd.control().get("/v1/secrets").await.unwrap();
        let secrets: Vec<SecretInfo> = serde_json::from_value(list["secrets"].clone()).unwrap();
        secrets.into_iter().find(|secret| secret.name == name)
    }

    async fn state(&self, name: &str) -> Option<String> {
        self.secret(name).await.map(|secret| secret.state)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_had_by_stored_keys_and_one_that_was_rotated_by_one_more_question() {
    let scene = Scene::start(KEYS, |_| {}).await;
    assert_eq!(scene.ask().await.0, 200);
    assert_eq!(scene.ask().await.0, 200);
    assert_eq!(scene.asked("secrets.test"), 1);

    scene.change(|server| server.value = "AWS-VALUE-CANARY-2".to_owned());

    assert_eq!(scene.ask().await.0, 200);
    assert_eq!(scene.asked("secrets.test"), 2);
    let seen = scene.server.lock().unwrap().seen.clone();
    let [one, two] = [1, 2].map(|number| format!("Bearer AWS-VALUE-CANARY-{number}"));
    assert_eq!(seen, [&one, &one, &one, &two].map(String::as_str));
    assert!(!scene.proxyd.log().contains("CANARY"), "{}", scene.proxyd.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_web_identity_is_read_again_for_every_session_and_those_are_replaced_ahead() {
    let login = "refresh = \"1s\"\n\
        login = { method = \"web-identity\", secret = \"file:DIR/token\", \
        role = \"arn:aws:iam::123456789012:role/agents\" }";
    let scene = Scene::start(login, |server| server.life = 6).await;
    assert_eq!(scene.ask().await.0, 200);
    assert_eq!(scene.asked("sts.test"), 1);

    scene.proxyd.write_config("token", "TOKEN-CANARY-2\n");
    scene.change(|server| server.token = "TOKEN-CANARY-2".to_owned());

    until("there was another session", || async {
        assert_eq!(scene.ask().await.0, 200);
        scene.asked("sts.test") > 1
    })
    .await;
    assert_eq!(scene.asked("sts.test POST / Action=AssumeRoleWithWebIdentity"), scene.asked("sts"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_containers_agent_gives_keys_for_its_token_and_for_no_other() {
    let login = "login = { method = \"container\", url = \"http://BESIDE/v1/credentials\", \
        secret = \"file:DIR/token\" }";
    let scene = Scene::start(login, |_| {}).await;
    assert_eq!(scene.ask().await.0, 200);
    assert_eq!(scene.asked("GET /v1/credentials"), 1);

    let other = Scene::start(login, |server| server.token = "ANOTHER".to_owned()).await;
    let (status, body) = other.ask().await;
    assert_eq!(status, 502, "{body}");
    assert!(body.contains("answers 401") && !body.contains("CANARY"), "{body}");
    assert_eq!(other.asked("secrets.test"), 0);
    assert_eq!(other.state("[aws] login").await.as_deref(), Some("needs_login"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instances_keys_are_had_by_a_session_and_never_without_one() {
    for login in [
        "login = { method = \"instance\", url = \"http://BESIDE\" }",
        "login = { method = \"instance\", url = \"http://BESIDE\", role = \"agents\" }",
    ] {
        let scene = Scene::start(login, |_| {}).await;
        assert_eq!(scene.ask().await.0, 200);
        assert_eq!(scene.asked("PUT /latest/api/token"), 1);
        assert_eq!(scene.asked("security-credentials/agents"), 1);
    }
    let login = "login = { method = \"instance\", url = \"http://BESIDE\" }";
    let first = Scene::start(login, |server| server.no_sessions = true).await;
    let (status, body) = first.ask().await;
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("gives no session"), "{body}");
    assert_eq!(first.asked("security-credentials"), 0);

    // Nobody is followed elsewhere with what was shown.
    let moved = Scene::start(login, |server| server.moved = true).await;
    assert_eq!(moved.ask().await.0, 503);
    assert_eq!(moved.asked("api.test"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_was_revoked_is_had_again_before_anybody_is_refused() {
    let login = "refresh = \"1s\"\nlogin = { method = \"container\", \
        url = \"http://BESIDE/v1/credentials\", secret = \"file:DIR/token\" }";
    let scene = Scene::start(login, |_| {}).await;
    assert_eq!(scene.ask().await.0, 200);

    scene.change(|server| server.keys.fill("REVOKED".to_owned()));

    until("there was another session", || async {
        assert_eq!(scene.ask().await.0, 200);
        scene.asked("GET /v1/credentials") > 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_down_leaves_the_last_value_for_a_while_and_a_secret_that_is_gone_none() {
    let lines = format!("refresh = \"1s\"\nstale = \"1h\"\n{KEYS}");
    let scene = Scene::start(&lines, |_| {}).await;
    assert_eq!(scene.ask().await.0, 200);
    scene.change(|server| server.down = true);
    let before = scene.asked("secrets.test");
    until("it was asked in vain", || async {
        assert_eq!(scene.ask().await.0, 200);
        scene.asked("secrets.test") > before
    })
    .await;
    assert_eq!(scene.ask().await.0, 200);
    // It answers again, and the secret is no more.
    scene.change(|server| {
        server.down = false;
        server.value.clear();
    });
    until("nothing leaves", || async { scene.ask().await.0 == 502 }).await;
    let name = "aws-secrets-manager:agents/api#token";
    assert_eq!(scene.state(name).await.as_deref(), Some("needs_login"));

    let lines = format!("refresh = \"1s\"\nstale = \"0s\"\n{KEYS}");
    let closed = Scene::start(&lines, |_| {}).await;
    assert_eq!(closed.ask().await.0, 200);
    closed.change(|server| server.down = true);
    until("nothing leaves", || async { closed.ask().await.0 == 503 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keys_of_a_role_sign_for_the_sandbox_and_are_replaced_ahead_of_their_end() {
    let scene = Scene::start(&format!("{KEYS}\n{ROLE}"), |server| server.life = 8).await;

    let (status, echoed) = scene.ask_signed().await;

    assert_eq!(status, 200, "{echoed}");
    assert_eq!(scene.server.lock().unwrap().seen, ["SESSION-CANARY-1"]);
    assert_eq!(echoed, "*".repeat("SESSION-CANARY-1".len()));
    until("others sign", || async {
        assert_eq!(scene.ask_signed().await.0, 200);
        scene.asked("sts.test POST / Action=AssumeRole") > 1
    })
    .await;
    assert!(!scene.proxyd.log().contains("CANARY"), "{}", scene.proxyd.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_have_one_session_of_a_role() {
    let scene = Scene::start(&format!("{KEYS}\n{ROLE}"), |_| {}).await;

    let scene = Arc::new(scene);
    let ask = |scene: Arc<Scene>| async move { scene.ask_signed().await };

    let all: Vec<_> = (0..20).map(|_| tokio::spawn(ask(Arc::clone(&scene)))).collect();

    for asked in all {
        let (status, body) = asked.await.unwrap();
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(scene.asked("sts.test"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_by_a_web_identity_needs_no_keys_of_the_vaults() {
    let role = "[aws.roles.deploy]\nrole = \"arn:aws:iam::123456789012:role/deploy\"\n\
        web-identity = \"file:DIR/token\"\n";
    let scene = Scene::start(role, |_| {}).await;

    assert_eq!(scene.ask_signed().await.0, 200);

    assert_eq!(scene.asked("sts.test POST / Action=AssumeRoleWithWebIdentity"), 1);
    let (status, body) = scene.ask().await;
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("has no login"), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_is_denied_needs_a_login_visibly_and_is_not_asked_for_each_request() {
    let scene = Scene::start(&format!("{KEYS}\n{ROLE}"), |server| {
        server.refusal = Some("AccessDenied");
    })
    .await;

    for _ in 0..3 {
        let (status, body) = scene.ask_signed().await;
        assert_eq!(status, 502, "{body}");
        assert!(body.contains("credential_needs_login"), "{body}");
        assert!(body.contains("AWS STS answers 403 AccessDenied"), "{body}");
    }

    assert_eq!(scene.asked("sts.test"), 1);
    assert_eq!(scene.asked("signed.test"), 0);
    assert_eq!(scene.state("aws-role:deploy").await.as_deref(), Some("needs_login"));
    scene.change(|server| server.refusal = None);
    // Another key is another attempt.
    scene.put("AKIAREAL0000000REAL0:SECRET-CANARY-new").await;
    assert_eq!(scene.ask_signed().await.0, 200);
    let role = scene.secret("aws-role:deploy").await.unwrap();
    assert_eq!((&role.state[..], &role.kept[..], role.version), ("ready", "aws", 0));
    let end: jiff::Timestamp = role.expires_at.unwrap().parse().unwrap();
    assert!(end > jiff::Timestamp::now());
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_keys_of_the_vaults_own_go_nowhere_else() {
    let scene = Scene::start(KEYS, |_| {}).await;
    let policy = POLICY.replace("aws-secrets-manager:agents/api#token", "aws-role:deploy");
    scene.proxyd.write_policy(&policy);
    scene.proxyd.hang_up();

    // A policy that would put a role's keys into a request is none, so the former one stays.
    until("the mistake is known", || async {
        let health = scene.proxyd.health().await;
        health.problem.is_some_and(|problem| problem.contains("sign requests and stand in none"))
    })
    .await;
    assert_eq!(scene.ask().await.0, 200);
    let seen = scene.server.lock().unwrap().seen.clone();
    assert_eq!(seen, ["Bearer AWS-VALUE-CANARY-1"]);
}
