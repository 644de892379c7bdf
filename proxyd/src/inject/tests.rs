//! Injection as a whole: permit, vault, head.

use policies::{Decision, EgressRequest, Host};

use super::*;
use crate::lease::share::Shares;
use crate::vault::Secret;
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
hosts = ["query.example"]
methods = ["GET"]
credential = "query"

[[egress.allow]]
hosts = ["absent.example"]
methods = ["GET"]
credential = "absent"

[[egress.allow]]
hosts = ["asked.example"]
methods = ["GET"]
credential = "asked"

[[egress.allow]]
hosts = ["body.example"]
methods = ["GET"]
credential = "body"

[[egress.allow]]
hosts = ["aws.example"]
methods = ["GET"]
credential = "aws"

[[egress.allow]]
hosts = ["plain.example"]
methods = ["GET"]

[credentials.query]
secret = "local:one"
inject = { query = "key" }
hosts = ["query.example"]

[credentials.absent]
secret = "local:one"
inject = { bearer = true }
when = "absent"
hosts = ["absent.example"]
env = "ABSENT_TOKEN"

[credentials.asked]
secret = "local:one"
inject = { basic = "user" }
when = "placeholder"
hosts = ["asked.example"]
env = ["ASKED_TOKEN", "GH_TOKEN"]

[credentials.body]
secret = "local:one"
inject = { placeholder = ["body"] }
hosts = ["body.example"]
env = "BODY_TOKEN"

[credentials.aws]
secret = "local:aws"
inject = { aws-sigv4 = { regions = ["eu-central-1"], services = ["s3", "sts"] } }
hosts = ["aws.example"]
env = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]

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
        self.vault.placeholders(lease, credential).await.unwrap().remove(0).1
    }

    /// Injects into a request to `host`; gives the head's lines.
    async fn inject(
        &self,
        host: &str,
        head: &mut RequestHead,
    ) -> Result<(Vec<String>, Injected), InjectError> {
        let permit = permit(&self.context.policy, host);
        let (mut body, mut framing) = (BodyIn::Empty, Framing::None);
        self.inject_with(&permit, head, &mut body, &mut framing).await
    }

    async fn inject_with(
        &self,
        permit: &Permit,
        head: &mut RequestHead,
        body: &mut BodyIn<'_>,
        framing: &mut Framing,
    ) -> Result<(Vec<String>, Injected), InjectError> {
        let room = Shares::here().held();
        let idle = std::time::Duration::from_secs(600);
        let mut payload = Payload { body, framing, responder: None, room: &room, idle };
        let injected = inject(permit, &self.vault, &self.context, head, &mut payload).await?;
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

    let (mut body, mut framing) = (BodyIn::Empty, Framing::None);
    let error = scene.inject_with(&foreign, &mut head, &mut body, &mut framing).await;
    let error = error.err().unwrap();

    assert_eq!((error.code(), error.status()), ("credential_refused", 403));
    assert_eq!(lines(&head), ["/"]);
}

#[tokio::test]
async fn a_query_parameter_takes_the_place_of_every_other_key_and_is_encoded() {
    let scene = Scene::new(Some("SECRET+CANARY=&1")).await;
    for (before, after) in [
        ("/a", "/a?key=SECRET%2BCANARY%3D%261"),
        ("/a?b=c&KEY=own&d", "/a?b=c&d&key=SECRET%2BCANARY%3D%261"),
        ("/a?access_token=own", "/a?key=SECRET%2BCANARY%3D%261"),
    ] {
        let mut head = head(before, &[("Authorization", "Bearer own"), ("Accept", "*/*")]);

        let (lines, _) = scene.inject("query.example", &mut head).await.unwrap();

        assert_eq!(lines, [after, "Accept: */*"], "{before}");
    }
}

#[tokio::test]
async fn what_the_sandbox_put_into_the_slot_decides_where_the_policy_says_so() {
    let scene = Scene::new(Some(CANARY)).await;
    let absent = scene.placeholder(&scene.context.lease, "absent").await;
    let credential = &scene.context.policy.credentials["asked"];
    let names = scene.vault.placeholders(&scene.context.lease, credential).await.unwrap();
    assert_eq!(names[0].0.as_deref(), Some("ASKED_TOKEN"));
    assert!(names[1].1.starts_with("ghp_"), "each name has the shape that its clients expect");
    for (host, field, goes_in) in [
        ("absent.example", "", true),
        ("absent.example", &format!("Bearer {absent}")[..], true),
        ("absent.example", "Bearer own", false),
        ("asked.example", "", false),
        ("asked.example", "Bearer own", false),
        ("asked.example", &format!("Bearer {}", names[0].1), true),
        ("asked.example", &format!("Bearer {}", names[1].1), true),
    ] {
        let fields = [("authorization", field)];
        let mut head = head("/", if field.is_empty() { &[] } else { &fields });
        let before = lines(&head);

        let (lines, injected) = scene.inject(host, &mut head).await.unwrap();

        assert_eq!(injected.credential.is_some(), goes_in, "{host} {field}");
        assert_eq!(lines == before, !goes_in, "{host} {field}: {lines:?}");
        assert_eq!(lines.len(), if field.is_empty() && !goes_in { 1 } else { 2 });
    }
    // A key of its own beside the placeholder is a key of its own.
    let both = [("authorization", &absent[..]), ("x-api-key", "own")];
    let error = scene.inject("absent.example", &mut head("/", &both)).await.err().unwrap();
    assert_eq!(error.code(), "placeholder_stray");
}

fn held(sent: impl Into<bytes::Bytes>) -> BodyIn<'static> {
    BodyIn::Held { body: Some(sent.into()), sent: Box::new(BodyIn::Empty) }
}

#[tokio::test]
async fn a_placeholder_in_a_body_gives_way_to_the_value_as_its_kind_demands() {
    let scene = Scene::new(Some("SECRET\"CANARY&1")).await;
    let own = scene.placeholder(&scene.context.lease, "body").await;
    let permit = permit(&scene.context.policy, "body.example");
    for (kind, sent, goes) in [
        ("application/json", format!("{{\"a\":\"{own}\"}}"), "{\"a\":\"SECRET\\\"CANARY&1\"}"),
        ("application/x-www-form-urlencoded", format!("a={own}&b=1"), "a=SECRET%22CANARY%261&b=1"),
        ("application/json; charset=utf-8", "{}".into(), "{}"),
    ] {
        let mut head = head("/", &[("content-type", kind), ("transfer-encoding", "chunked")]);
        let mut body = held(sent);
        let mut framing = Framing::Chunked;

        let (lines, _) =
            scene.inject_with(&permit, &mut head, &mut body, &mut framing).await.unwrap();

        assert_eq!(body.held().map(|body| &body[..]), Some(goes.as_bytes()));
        assert_eq!(framing, Framing::Length(goes.len() as u64));
        assert!(lines.contains(&format!("Content-Length: {}", goes.len())), "{lines:?}");
    }
    let stranger = scene.placeholder(&LeaseId::random(), "body").await;
    for (kind, sent, code) in [
        ("application/json", stranger, "placeholder_foreign"),
        ("application/octet-stream", own, "credential_unusable"),
    ] {
        let mut head = head("/", &[("content-type", kind)]);
        let (mut body, mut framing) = (held(sent), Framing::Chunked);
        let outcome = scene.inject_with(&permit, &mut head, &mut body, &mut framing).await;
        assert_eq!(outcome.err().unwrap().code(), code);
    }
}

#[tokio::test]
async fn only_what_the_sandbox_signed_with_its_placeholder_is_signed_again() {
    let scene = Scene::new(Some(CANARY)).await;
    let value = format!("AKIAREAL0000000REAL0:{CANARY}:SESSION-CANARY");
    scene.vault.put("aws", Secret::new(value.into_bytes())).await.unwrap();
    let own = scene.placeholder(&scene.context.lease, "aws").await;
    assert!(own.starts_with("AKIA") && own.len() == 20, "{own}");
    let scope = |key: &str, region: &str, service: &str| {
        format!(
            "AWS4-HMAC-SHA256 Credential={key}/20200101/{region}/{service}/aws4_request, \
             SignedHeaders=host, Signature=00"
        )
    };
    let stranger = scene.placeholder(&LeaseId::random(), "aws").await;
    for (field, code) in [
        (scope(&own, "eu-central-1", "s3"), None),
        (scope(&own, "eu-central-1", "sts"), None),
        (scope(&own, "us-east-1", "s3"), Some("signature_refused")),
        (scope(&own, "eu-central-1", "iam"), Some("signature_refused")),
        (scope("AKIAOWNKEYOFATTACKER", "eu-central-1", "s3"), Some("signature_refused")),
        (scope(&stranger, "eu-central-1", "s3"), Some("placeholder_foreign")),
        (String::new(), Some("signature_refused")),
    ] {
        let fields = [("authorization", &field[..]), ("x-api-key", "own")];
        let mut head = head("/", if field.is_empty() { &[] } else { &fields });

        let outcome = scene.inject("aws.example", &mut head).await;

        match (outcome, code) {
            (Ok((lines, injected)), None) => {
                let text = lines.join("\n");
                let last = lines.last().unwrap();
                assert!(last.contains("Credential=AKIAREAL0000000REAL0/"), "{text}");
                assert!(text.contains("X-Amz-Security-Token: SESSION-CANARY"), "{text}");
                assert!(!text.contains(CANARY) && !text.contains("own"), "{text}");
                // The secret key never leaves the vault, not even to be searched for.
                let echo = format!("{CANARY} SESSION-CANARY");
                let (_, found) = crate::scrub::scrub_text(&injected.patterns.unwrap(), &echo);
                assert_eq!(found, 1);
            }
            (outcome, code) => {
                assert_eq!(outcome.err().map(|error| error.code()), code, "{field}");
            }
        }
    }
}
