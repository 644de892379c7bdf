//! What the server makes for one lease each: had once, let live on, revoked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ipc::vault::{ScrubReply, ScrubRequest};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::*;

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "api"
[[egress.allow]]
hosts = ["both.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "both"
[[egress.allow]]
hosts = ["pair.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "pair"
[[egress.allow]]
hosts = ["issued.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "issued"
[credentials.api]
secret = "openbao-lease:db/creds/agents#password"
inject = { bearer = true }
hosts = ["api.test"]
[credentials.both]
secret = "openbao-lease:db/creds/agents#username:password"
inject = { bearer = true }
hosts = ["both.test"]
[credentials.pair]
secret = "openbao-lease:db/creds/agents#username:password"
inject = { basic = true }
hosts = ["pair.test"]
[credentials.issued]
secret = "openbao-lease:pki/issue/agents?common_name=a.example&ttl=1h#serial"
inject = { bearer = true }
hosts = ["issued.test"]
"#;

/// A server that makes accounts, and what knows which of them there are.
#[derive(Default)]
struct Maker {
    token: String,
    /// How many accounts were made.
    made: usize,
    /// How long one lives, in seconds.
    life: u64,
    /// The passwords that are good, by the names of their leases.
    live: BTreeMap<String, String>,
    revoked: BTreeSet<String>,
    renewals: usize,
    /// What revocations are answered instead.
    failing: Option<u16>,
    /// Method, path and body of each request.
    asked: Vec<String>,
    /// What the hosts were shown.
    seen: Vec<String>,
}

impl Maker {
    fn answer(&mut self, head: &str, body: &str) -> (u16, String) {
        let line = head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
        self.asked.push(format!("{line} {body}").trim_end().to_owned());
        let given: Value = serde_json::from_str(body).unwrap_or_default();
        if line == "POST /v1/auth/approle/login" {
            self.token = format!("BAO-TOKEN-CANARY-{}", self.asked.len());
            let auth = json!({
                "client_token": self.token, "lease_duration": 3600, "renewable": true
            });
            return (200, json!({ "auth": auth }).to_string());
        }
        if self.token.is_empty() || field(head, "x-vault-token") != Some(&self.token) {
            return (403, json!({ "errors": ["permission denied"] }).to_string());
        }
        let id = given["lease_id"].as_str().unwrap_or_default();
        match &*line {
            "GET /v1/db/creds/agents" => self.make("db/creds/agents", true),
            "POST /v1/pki/issue/agents" if given["common_name"] == "a.example" => {
                self.make("pki/issue/agents", false)
            }
            "POST /v1/sys/leases/renew" if self.live.contains_key(id) => {
                self.renewals += 1;
                let lease = json!({
                    "lease_id": id, "lease_duration": self.life, "renewable": true, "data": null
                });
                (200, lease.to_string())
            }
            "POST /v1/sys/leases/revoke" if self.failing.is_some() => {
                (self.failing.unwrap(), "{}".to_owned())
            }
            "POST /v1/sys/leases/revoke" => {
                self.live.remove(id);
                self.revoked.insert(id.to_owned());
                (200, "{}".to_owned())
            }
            _ => (400, json!({ "errors": ["no"] }).to_string()),
        }
    }

    fn make(&mut self, path: &str, renewable: bool) -> (u16, String) {
        self.made += 1;
        let number = self.made;
        let (id, password) = (format!("{path}/L{number}"), format!("PASSWORD-CANARY-{number}"));
        self.live.insert(id.clone(), password.clone());
        let data = json!({
            "username": format!("USER-CANARY-{number}"), "password": password,
            "serial": format!("SERIAL-CANARY-{number}"), "number": number,
        });
        let lease = json!({
            "lease_id": id, "lease_duration": self.life, "renewable": renewable, "data": data
        });
        (200, lease.to_string())
    }

    /// Echoes what it is shown, where that is an account that it knows.
    fn serve(&mut self, head: &str) -> (u16, String) {
        let shown = field(head, "authorization").unwrap_or("none").to_owned();
        let pair = shown.strip_prefix("Basic ").map(|token| STANDARD.decode(token).unwrap());
        let pair = pair.map(|pair| String::from_utf8(pair).unwrap());
        let number = pair.as_ref().unwrap_or(&shown).rsplit('-').next().unwrap_or_default();
        let good = self.live.keys().any(|id| id.ends_with(&format!("/L{number}")));
        let body = format!("shown {shown}.");
        self.seen.push(shown);
        (if good { 200 } else { 401 }, body)
    }
}

struct Scene {
    proxyd: Proxyd,
    maker: Arc<Mutex<Maker>>,
    _upstreams: Vec<Upstream>,
}

impl Scene {
    async fn start(life: u64) -> Self {
        let maker = Arc::new(Mutex::new(Maker { life, ..Maker::default() }));
        let server = Arc::clone(&maker);
        let answer = move |head: &str, body: &str| server.lock().unwrap().answer(head, body);
        let mut upstreams = vec![Upstream::answering("bao.test", answer).await];
        let hosts = ["api.test", "both.test", "pair.test", "issued.test"];
        for host in hosts {
            let server = Arc::clone(&maker);
            let answer = move |head: &str, _: &str| server.lock().unwrap().serve(head);
            upstreams.push(Upstream::answering(host, answer).await);
        }
        let table: Vec<_> = ["bao.test"].into_iter().chain(hosts).zip(&upstreams).collect();
        let config = SERVER.replace("namespace = \"team\"\n", "");
        let proxyd = Proxyd::configured(POLICY, &table, &config).await;
        proxyd.put("bao", "SECRET-ID-CANARY").await;
        Self { proxyd, maker, _upstreams: upstreams }
    }

    fn server(&self) -> std::sync::MutexGuard<'_, Maker> {
        self.maker.lock().unwrap()
    }

    async fn until(&self, what: &str, seen: impl Fn(&Maker) -> bool) {
        until(what, || async { seen(&self.server()) }).await;
    }

    async fn revoked(&self, ids: &[&str]) {
        self.until("what was made is revoked", |maker| {
            maker.revoked.iter().map(String::as_str).eq(ids.iter().copied())
        })
        .await;
    }
}

async fn asked(lease: &Lease, host: &str) {
    let (status, body) = lease.get(host, "").await;
    assert_eq!(status, 200, "{body}");
    assert!(body.starts_with("shown ") && !body.contains("CANARY"), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_lease_has_an_account_of_its_own_for_all_its_requests() {
    let scene = Scene::start(3600).await;
    let (one, two) = (scene.proxyd.lease().await, scene.proxyd.lease().await);

    asked(&one, "api.test").await;
    asked(&two, "api.test").await;
    asked(&one, "both.test").await;
    asked(&one, "api.test").await;
    asked(&two, "issued.test").await;

    let text = "PASSWORD-CANARY-1 USER-CANARY-2 USER-CANARY-1:PASSWORD-CANARY-1".to_owned();
    let texts = ScrubRequest { environment: "dev".to_owned(), texts: vec![text] };
    let masked: ScrubReply = scene.proxyd.control().post("/v1/scrub", &texts).await.unwrap();
    assert!(!masked.texts[0].contains("PASSWORD"), "{masked:?}");
    assert!(!masked.texts[0].contains("-CANARY-1"), "{masked:?}");
    let named = "openbao-lease:db/creds/agents";
    assert_eq!(scene.proxyd.secret(named).await.unwrap().state, "ready");
    assert!(!scene.proxyd.log().contains("CANARY"));
    let maker = scene.server();
    let expected = [
        "Bearer PASSWORD-CANARY-1",
        "Bearer PASSWORD-CANARY-2",
        "Bearer USER-CANARY-1:PASSWORD-CANARY-1",
        "Bearer PASSWORD-CANARY-1",
        "Bearer SERIAL-CANARY-3",
    ];
    assert_eq!(maker.seen, expected);
    let issued = r#"POST /v1/pki/issue/agents {"common_name":"a.example","ttl":"1h"}"#;
    assert_eq!(maker.asked.last().unwrap(), issued);
    assert_eq!(maker.asked.len(), 4, "{:?}", maker.asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn user_and_password_of_one_account_log_in_together() {
    let scene = Scene::start(3600).await;
    let (one, two) = (scene.proxyd.lease().await, scene.proxyd.lease().await);

    for (lease, number) in [(&one, 1), (&two, 2), (&one, 1)] {
        let (status, body) = lease.get("pair.test", "").await;
        assert_eq!(status, 200, "{body}");
        let token = STANDARD.encode(format!("USER-CANARY-{number}:PASSWORD-CANARY-{number}"));
        assert_eq!(scene.server().seen.last().unwrap(), &format!("Basic {token}"));
        assert!(body.starts_with("shown Basic ***") && !body.contains(&token), "{body}");
    }

    // What only bears the password has it from the same account.
    asked(&one, "api.test").await;
    assert_eq!(scene.server().seen.last().unwrap(), "Bearer PASSWORD-CANARY-1");
    assert_eq!(scene.server().made, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_lives_on_while_its_lease_does_and_ends_with_it() {
    let scene = Scene::start(4).await;
    let (one, two) = (scene.proxyd.lease().await, scene.proxyd.lease().await);
    asked(&one, "api.test").await;
    asked(&two, "api.test").await;

    // Nobody uses them.
    scene.until("both live on", |maker| maker.renewals > 2).await;
    asked(&one, "api.test").await;
    assert_eq!(scene.server().made, 2);

    one.close().await;
    scene.revoked(&["db/creds/agents/L1"]).await;
    asked(&two, "api.test").await;
    assert_eq!(scene.server().made, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_that_is_gone_is_made_anew() {
    let scene = Scene::start(3600).await;
    let lease = scene.proxyd.lease().await;
    asked(&lease, "api.test").await;

    // Its host says so.
    scene.server().live.clear();
    asked(&lease, "api.test").await;
    let seen = scene.server().seen.split_off(1);
    assert_eq!(seen, ["Bearer PASSWORD-CANARY-1", "Bearer PASSWORD-CANARY-2"]);

    // The server has ended the vault's own token, and with it what was made by that.
    let scene = Scene::start(2).await;
    let lease = scene.proxyd.lease().await;
    asked(&lease, "api.test").await;
    {
        let mut maker = scene.server();
        (maker.token, maker.live) = (String::new(), BTreeMap::new());
    }
    scene.until("there was another login", |maker| !maker.token.is_empty()).await;
    asked(&lease, "api.test").await;
    assert_eq!(scene.server().made, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_accounts_end_with_proxyd() {
    for signal in [Signal::TERM, Signal::KILL] {
        let mut scene = Scene::start(3600).await;
        let leases = [scene.proxyd.lease().await, scene.proxyd.lease().await];
        for lease in &leases {
            asked(lease, "api.test").await;
        }

        scene.proxyd.end(signal);

        scene.revoked(&["db/creds/agents/L1", "db/creds/agents/L2"]).await;
        // The next one has nothing left to do.
        scene.server().asked.clear();
        scene.proxyd.begin();
        scene.proxyd.serves().await;
        let lease = scene.proxyd.lease().await;
        asked(&lease, "api.test").await;
        let revoked = scene.server().asked.iter().filter(|asked| asked.contains("revoke")).count();
        assert_eq!(revoked, 0, "{signal:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_proxyd_could_not_revoke_the_next_one_does() {
    let mut scene = Scene::start(3600).await;
    let lease = scene.proxyd.lease().await;
    asked(&lease, "api.test").await;
    scene.server().failing = Some(503);
    scene.proxyd.end(Signal::KILL);
    scene
        .until("the former vault has tried", |maker| {
            maker.asked.iter().any(|asked| asked.contains("revoke"))
        })
        .await;
    assert!(scene.server().revoked.is_empty());

    scene.server().failing = None;
    scene.proxyd.begin();

    scene.revoked(&["db/creds/agents/L1"]).await;
    scene.proxyd.serves().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accounts_end_with_the_secret_of_the_login_by_which_they_were_made() {
    let scene = Scene::start(3600).await;
    let lease = scene.proxyd.lease().await;
    asked(&lease, "api.test").await;
    let logins = |maker: &Maker| maker.asked.iter().filter(|line| line.contains("login")).count();

    scene.proxyd.put("bao", "SECRET-ID-CANARY-2").await;

    // By the token of before: nobody has logged in by the new one.
    scene.revoked(&["db/creds/agents/L1"]).await;
    assert_eq!(logins(&scene.server()), 1);
    asked(&lease, "api.test").await;
    {
        let maker = scene.server();
        assert_eq!((maker.made, logins(&maker)), (2, 2));
    }

    scene.proxyd.remove("bao").await;

    scene.revoked(&["db/creds/agents/L1", "db/creds/agents/L2"]).await;
    let (status, body) = lease.get("api.test", "").await;
    assert!(status == 502 && body.contains("credential_missing"), "{status} {body}");
    assert_eq!(logins(&scene.server()), 2);
    assert!(!scene.proxyd.log().contains("CANARY"));
}
