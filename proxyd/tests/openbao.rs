//! Secrets that an OpenBao server keeps: one login for all, renewed while it is used, had again
//! where it counts no more; what is gone serves no longer, what cannot be asked for serves a while.

mod leases;

use std::sync::{Arc, Mutex};

use crate::support::*;

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "api"
[credentials.api]
secret = "openbao:secret/agents/api#token"
inject = { bearer = true }
hosts = ["api.test"]
"#;
const SERVER: &str = "[openbao]\nurl = \"https://bao.test\"\nnamespace = \"team\"\n\
    login = { method = \"approle\", role = \"role-1\", secret = \"local:bao\" }\n";

/// A server that gives tokens for one secret id, and one value to the newest token.
#[derive(Default)]
struct Server {
    value: String,
    token: String,
    life: u64,
    renewable: bool,
    /// What every request is answered instead.
    status: Option<u16>,
    /// Method, path and body of each request.
    asked: Vec<String>,
    /// What the API was shown.
    seen: Vec<String>,
}

type Shared = Arc<Mutex<Server>>;

impl Server {
    fn answer(&mut self, head: &str, body: &str) -> (u16, String) {
        let line = head.lines().next().unwrap().trim_end_matches(" HTTP/1.1");
        self.asked.push(format!("{line} {body}").trim_end().to_owned());
        assert_eq!(field(head, "x-vault-namespace"), Some("team"));
        if let Some(status) = self.status {
            return (status, "{}".to_owned());
        }
        let auth = |server: &Server| {
            let (token, life, renewable) = (&server.token, server.life, server.renewable);
            let auth = serde_json::json!({
                "client_token": token, "lease_duration": life, "renewable": renewable
            });
            (200, serde_json::json!({ "auth": auth }).to_string())
        };
        let known = field(head, "x-vault-token") == Some(&self.token) && !self.token.is_empty();
        match line {
            "POST /v1/auth/approle/login" if body.contains("SECRET-ID-CANARY") => {
                self.token = format!("BAO-TOKEN-CANARY-{}", self.asked.len());
                auth(self)
            }
            "POST /v1/auth/approle/login" => (400, "{\"errors\":[\"no\"]}".to_owned()),
            "POST /v1/auth/token/renew-self" if known => auth(self),
            "GET /v1/secret/data/agents/api?version=3" if known => {
                (200, "{\"data\":{\"data\":{\"token\":\"BAO-THIRD-CANARY\"}}}".to_owned())
            }
            "GET /v1/secret/data/agents/api" if known && self.value.is_empty() => {
                (404, "{\"data\":{\"data\":null}}".to_owned())
            }
            "GET /v1/secret/data/agents/api" if known => {
                let value = &self.value;
                (200, format!("{{\"data\":{{\"data\":{{\"token\":\"{value}\"}}}}}}"))
            }
            _ => (403, "{\"errors\":[\"permission denied\"]}".to_owned()),
        }
    }
}

struct Scene {
    proxyd: Proxyd,
    server: Shared,
    lease: Lease,
    _upstreams: [Upstream; 2],
}

impl Scene {
    async fn start(life: u64, more: &str) -> Scene {
        Self::with(POLICY, life, more).await
    }

    async fn with(policy: &str, life: u64, more: &str) -> Scene {
        let server = Shared::default();
        {
            let mut server = server.lock().unwrap();
            (server.life, server.renewable) = (life, true);
            server.value = "BAO-VALUE-CANARY-1".to_owned();
        }
        let (one, two) = (Arc::clone(&server), Arc::clone(&server));
        let api = Upstream::answering("api.test", move |head, _| {
            let shown = field(head, "authorization").unwrap_or("none").to_owned();
            one.lock().unwrap().seen.push(shown);
            (200, String::new())
        });
        let bao = Upstream::answering("bao.test", move |head, body| {
            two.lock().unwrap().answer(head, body)
        });
        let (api, bao) = (api.await, bao.await);
        let upstreams = [("api.test", &api), ("bao.test", &bao)];
        let proxyd = Proxyd::configured(policy, &upstreams, &format!("{SERVER}{more}\n")).await;
        let lease = proxyd.lease().await;
        let scene = Scene { proxyd, server, lease, _upstreams: [api, bao] };
        scene.put("SECRET-ID-CANARY").await;
        scene
    }

    async fn put(&self, value: &str) {
        self.proxyd.put("bao", value).await;
    }

    async fn ask(&self) -> (u16, String) {
        self.lease.get("api.test", "").await
    }

    fn asked(&self, part: &str) -> usize {
        self.server.lock().unwrap().asked.iter().filter(|asked| asked.contains(part)).count()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_is_read_after_one_login_and_shown_to_the_api_alone() {
    let scene = Scene::start(3600, "").await;

    for _ in 0..5 {
        assert_eq!(scene.ask().await.0, 200);
    }

    let server = scene.server.lock().unwrap();
    let login =
        r#"POST /v1/auth/approle/login {"role_id":"role-1","secret_id":"SECRET-ID-CANARY"}"#;
    assert_eq!(server.asked, [login, "GET /v1/secret/data/agents/api"]);
    assert_eq!(server.seen, ["Bearer BAO-VALUE-CANARY-1"; 5]);
    assert!(!scene.proxyd.log().contains("CANARY"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_the_policy_names_is_the_one_that_is_shown() {
    let policy = POLICY.replace("openbao:secret/agents/api#", "vault:secret/agents/api@3#");
    let scene = Scene::with(&policy, 3600, "").await;

    assert_eq!(scene.ask().await.0, 200);

    assert_eq!(scene.server.lock().unwrap().seen, ["Bearer BAO-THIRD-CANARY"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_is_renewed_while_it_is_used_and_had_again_where_that_does_not_help() {
    let scene = Scene::start(4, "refresh = \"1s\"").await;

    until("the token was renewed", || async {
        assert_eq!(scene.ask().await.0, 200);
        scene.asked("renew-self") > 0
    })
    .await;
    assert_eq!(scene.asked("login"), 1);
    // From now on it is given less and less, as near its greatest age.
    scene.server.lock().unwrap().life = 1;
    until("there was another login", || async {
        assert_eq!(scene.ask().await.0, 200);
        scene.asked("login") > 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_was_revoked_is_had_again_before_anybody_is_refused() {
    let scene = Scene::start(3600, "refresh = \"1s\"").await;
    assert_eq!(scene.ask().await.0, 200);
    scene.server.lock().unwrap().token.clear();

    until("there was another login", || async {
        assert_eq!(scene.ask().await.0, 200);
        scene.asked("login") > 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sealed_server_leaves_the_last_value_for_a_while_and_a_secret_that_is_gone_leaves_none() {
    let sealed = Scene::start(3600, "refresh = \"1s\"\nstale = \"1h\"").await;
    assert_eq!(sealed.ask().await.0, 200);
    sealed.server.lock().unwrap().status = Some(503);
    let before = sealed.asked("GET ");
    until("it was asked in vain", || async {
        assert_eq!(sealed.ask().await.0, 200);
        sealed.asked("GET ") > before
    })
    .await;
    assert_eq!(sealed.ask().await.0, 200);

    // It answers again, and the secret is no more.
    {
        let mut server = sealed.server.lock().unwrap();
        server.status = None;
        server.value.clear();
    }
    until("nothing leaves", || async { sealed.ask().await.0 == 503 }).await;

    let closed = Scene::start(3600, "refresh = \"1s\"\nstale = \"0s\"").await;
    assert_eq!(closed.ask().await.0, 200);
    closed.server.lock().unwrap().status = Some(503);
    until("nothing leaves", || async { closed.ask().await.0 == 503 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_is_refused_lets_nothing_leave_until_another_secret_is_stored() {
    let scene = Scene::start(3600, "").await;
    scene.put("WRONG-ID-CANARY").await;

    let answers = [scene.ask().await, scene.ask().await];

    for (status, body) in &answers {
        assert_eq!(*status, 503, "{body}");
        assert!(body.contains("answers a login with 400") && !body.contains("CANARY"), "{body}");
    }
    assert_eq!(scene.asked("login"), 1);
    scene.put("SECRET-ID-CANARY").await;
    assert_eq!(scene.ask().await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_had_by_a_login_ends_with_its_secret() {
    let scene = Scene::start(3600, "").await;
    assert_eq!(scene.ask().await.0, 200);

    scene.put("SECRET-ID-CANARY-2").await;

    scene.server.lock().unwrap().value = "BAO-VALUE-CANARY-2".to_owned();
    assert_eq!(scene.ask().await.0, 200);
    assert_eq!(scene.asked("login"), 2);
    let seen = scene.server.lock().unwrap().seen.clone();
    assert_eq!(seen, ["Bearer BAO-VALUE-CANARY-1", "Bearer BAO-VALUE-CANARY-2"]);
    scene.proxyd.remove("bao").await;
    for _ in 0..2 {
        let (status, body) = scene.ask().await;
        assert_eq!(status, 502, "{body}");
        assert!(body.contains("credential_missing") && !body.contains("CANARY"), "{body}");
    }
    assert_eq!(scene.server.lock().unwrap().seen.len(), 2);
    scene.put("SECRET-ID-CANARY").await;
    assert_eq!(scene.ask().await.0, 200);
}
