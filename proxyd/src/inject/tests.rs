//! Injection as a whole: permit, vault, head.

use policies::{Decision, EgressRequest, Host};

use super::*;
use crate::vault::tests::{CANARY, in_process, policy};

const POLICY: &str = r#"
description = "test"

[[egress.allow]]
hosts = ["bearer.example"]
methods = ["GET"]
credential = "bearer"

[[egress.allow]]
hosts = ["basic.example"]
methods = ["GET"]
credential = "basic"

[[egress.allow]]
hosts = ["header.example"]
methods = ["GET"]
credential = "header"

[[egress.allow]]
hosts = ["placeholder.example"]
methods = ["GET"]
credential = "placeholder"

[[egress.allow]]
hosts = ["plain.example"]
methods = ["GET"]

[credentials.bearer]
secret = "local:one"
inject = { bearer = true }
hosts = ["bearer.example"]

[credentials.basic]
secret = "local:one"
inject = { basic = { user = "x-access-token" } }
hosts = ["basic.example"]

[credentials.header]
secret = "local:one"
inject = { header = { name = "x-api-key" } }
hosts = ["header.example"]

[credentials.placeholder]
secret = "local:one"
inject = { placeholder = ["header", "query"] }
hosts = ["placeholder.example"]
env = "TOKEN"
"#;

fn permit(policy: &Policy, host: &str) -> Permit {
    let host = Host::parse(host).unwrap();
    let request = EgressRequest {
        scheme: Scheme::Https,
        host: &host,
        port: 443,
        method: "GET",
        path: "/",
        query: None,
    };
    match policy.decide(&request) {
        Decision::Allowed(permit) => permit,
        Decision::Denied(denial) => panic!("{denial}"),
    }
}

struct Scene {
    _dir: tempfile::TempDir,
    vault: Vault,
    context: LeaseContext,
}

impl Scene {
    async fn new(value: Option<&str>) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let vault = in_process(dir.path());
        if let Some(value) = value {
            vault.put("one", Secret::new(value.as_bytes().to_vec())).await.unwrap();
        }
        let context = LeaseContext {
            lease: LeaseId::random(),
            environment: "dev".into(),
            policy: policy(POLICY),
        };
        Scene { _dir: dir, vault, context }
    }

    async fn placeholder(&self, lease: &LeaseId, credential: &str) -> String {
        let credential = &self.context.policy.credentials[credential];
        self.vault.placeholder(lease, credential).await.unwrap()
    }

    /// Injects into a request to `host`; gives the head's lines.
    async fn inject(
        &self,
        host: &str,
        head: &mut RequestHead,
    ) -> Result<(Vec<String>, Injected), InjectError> {
        let permit = permit(&self.context.policy, host);
        let injected = inject(&permit, &self.vault, &self.context, head).await?;
        Ok((lines(head), injected))
    }
}

#[tokio::test]
async fn each_kind_puts_its_value_in_and_clears_what_was_there() {
    let scene = Scene::new(Some(CANARY)).await;
    let basic = "Basic eC1hY2Nlc3MtdG9rZW46U0VDUkVULUNBTkFSWS03ZjNhOWIyYw==";
    for (host, line) in [
        ("bearer.example", format!("Authorization: Bearer {CANARY}")),
        ("basic.example", format!("Authorization: {basic}")),
        ("header.example", format!("x-api-key: {CANARY}")),
    ] {
        let mut head = head(
            "/?a=1&access_token=attacker",
            &[("authorization", "Bearer attacker"), ("X-API-Key", "attacker"), ("Accept", "*/*")],
        );

        let (lines, injected) = scene.inject(host, &mut head).await.unwrap();

        assert_eq!(lines, ["/?a=1".to_owned(), "Accept: */*".into(), line], "{host}");
        assert_eq!(injected.credential.as_deref(), host.split('.').next());
        let patterns = injected.patterns.unwrap();
        let (_, found) = crate::scrub::scrub_text(&patterns, &format!("{CANARY} and {basic}"));
        assert_eq!(found, 2);
    }
}

#[tokio::test]
async fn a_leases_own_placeholder_gives_way_to_the_value() {
    let scene = Scene::new(Some(CANARY)).await;
    let own = scene.placeholder(&scene.context.lease, "bearer").await;
    let mut bearer = head("/", &[("authorization", &format!("Bearer {own}"))]);
    let own = scene.placeholder(&scene.context.lease, "placeholder").await;
    let mut anywhere =
        head(&format!("/?k={own}"), &[("x-any", &format!("a {own} b")), ("authorization", "own")]);

    let (bearer, _) = scene.inject("bearer.example", &mut bearer).await.unwrap();
    let (anywhere, _) = scene.inject("placeholder.example", &mut anywhere).await.unwrap();

    assert_eq!(bearer, ["/".to_owned(), format!("Authorization: Bearer {CANARY}")]);
    assert_eq!(
        anywhere,
        [format!("/?k={CANARY}"), format!("x-any: a {CANARY} b"), "authorization: own".into()]
    );
}

#[tokio::test]
async fn without_its_placeholder_a_placeholder_credential_stays_in_the_vault() {
    let scene = Scene::new(Some(CANARY)).await;
    let mut head = head("/", &[("authorization", "Bearer own key")]);

    let (lines, injected) = scene.inject("placeholder.example", &mut head).await.unwrap();

    assert_eq!(lines, ["/", "authorization: Bearer own key"]);
    assert!(injected.credential.is_none() && injected.patterns.is_none());
}

#[tokio::test]
async fn placeholders_of_others_or_in_the_wrong_place_stop_the_request() {
    let scene = Scene::new(Some(CANARY)).await;
    let own = scene.placeholder(&scene.context.lease, "bearer").await;
    let sibling = scene.placeholder(&scene.context.lease, "header").await;
    let stranger = scene.placeholder(&LeaseId::random(), "bearer").await;
    for (host, target, header, code) in [
        ("bearer.example", "/", &stranger, "placeholder_foreign"),
        ("bearer.example", "/", &sibling, "placeholder_foreign"),
        ("bearer.example", &format!("/{stranger}")[..], &own, "placeholder_foreign"),
        ("bearer.example", &format!("/?q={own}"), &own, "placeholder_stray"),
        ("plain.example", "/", &own, "placeholder_stray"),
        ("placeholder.example", "/", &own, "placeholder_foreign"),
    ] {
        let mut head = head(target, &[("authorization", &format!("Bearer {header}"))]);

        let error = scene.inject(host, &mut head).await.err().unwrap();

        assert_eq!((error.code(), error.status()), (code, 403), "{host} {target}");
        assert!(!error.to_string().contains("PXDmark"));
    }
}

#[tokio::test]
async fn a_missing_value_names_the_command_that_mends_it() {
    let scene = Scene::new(None).await;
    let mut head = head("/", &[]);

    let error = scene.inject("bearer.example", &mut head).await.err().unwrap();

    assert_eq!((error.code(), error.status()), ("credential_missing", 502));
    assert!(error.hint().unwrap().contains("cleanhands secret set one"));
    assert_eq!(lines(&head), ["/"]);
}

#[tokio::test]
async fn a_credential_does_not_go_over_plain_http_unless_it_says_so() {
    let scene = Scene::new(Some(CANARY)).await;
    let mut head = head("/", &[]);
    head.scheme = Scheme::Http;

    let error = scene.inject("bearer.example", &mut head).await.err().unwrap();

    assert_eq!((error.code(), error.status()), ("credential_refused", 403));
    assert_eq!(lines(&head), ["/"]);
}

#[tokio::test]
async fn a_permit_of_another_environment_injects_nothing() {
    let scene = Scene::new(Some(CANARY)).await;
    let foreign = permit(&policy(POLICY), "bearer.example");
    let mut head = head("/", &[]);

    let error = inject(&foreign, &scene.vault, &scene.context, &mut head).await.err().unwrap();

    assert_eq!((error.code(), error.status()), ("credential_refused", 403));
    assert_eq!(lines(&head), ["/"]);
}
