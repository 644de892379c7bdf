//! Promise: `web_fetch` reaches what the environment's policy allows, by the way of everything
//! else, and what comes back is bounded and readable.
use cleanhands_tests::api::{Api, tool_results};
use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::origin::{Origin, Request, ok};
use ipc::id::{CallId, SessionId};
use ipc::sandbox::{Content, Execute, Receipt};
use serde_json::json;

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["docs.example"]
methods = ["GET"]
paths = ["/**"]
credential = "docs"
addresses = ["127.0.0.1/32"]
[credentials.docs]
secret = "local:docs"
inject = { bearer = true }
hosts = ["docs.example"]
"#;
const TOKEN: &str = "SECRET-CANARY-fetch-91c2e0";

fn page(request: &Request) -> Vec<u8> {
    let moved = |place: &str| {
        format!("HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n").into_bytes()
    };
    match request.target() {
        "/moved" => moved("/page?x=1"),
        "/round" => moved("/round"),
        "/out" => moved("https://other.example/"),
        "/down" => moved("http://docs.example/page"),
        "/missing" => b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\n\
            Content-Length: 4\r\n\r\ngone"
            .to_vec(),
        "/pixel" => ok("Content-Type: image/png\r\n", b"\x89PNG\r\n\x1a\n"),
        "/paper" => ok("Content-Type: application/pdf\r\n", b"%PDF-1.7"),
        "/binary" => ok("Content-Type: application/zip\r\n", b"PK\x03\x04"),
        "/long" => ok("Content-Type: text/plain\r\n", &vec![b'x'; 300_000]),
        "/silent" => b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc".to_vec(),
        "/echo" => ok("Content-Type: text/plain\r\n", request.head.as_bytes()),
        "/broken" => {
            b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\nabc".to_vec()
        }
        _ => ok(
            "Content-Type: text/html; charset=utf-8\r\n",
            b"<title>Docs</title><h1>Usage</h1><p>Run <a href=/x>it</a>.<script>no()</script>",
        ),
    }
}

async fn started() -> (Installation, Origin) {
    started_with(POLICY).await
}

async fn started_with(policy: &str) -> (Installation, Origin) {
    let origin = Origin::start(&["docs.example"], page).await;
    let tool = |url: &str| json!({ "name": "web_fetch", "input": { "url": url } });
    let tools = json!([tool("https://docs.example/page"), tool("https://other.example/")]);
    let turns = json!([{ "text": "I look.", "tools": tools }, { "text": "I have looked." }]);
    let setup = Setup::default().policy("dev", policy).script(turns);
    let setup = origin.behind("docs.example", setup);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("docs", TOKEN).await;
    (installation, origin)
}

async fn fetch(installation: &Installation, session: &SessionId, url: &str) -> Receipt {
    let request = Execute {
        call: CallId::random(),
        session: session.clone(),
        owner: ipc::peer::Principal::own().owner(),
        fence: 1,
        journal: None,
        environment: "dev".into(),
        workspace: None,
        tool: "web_fetch".into(),
        input: json!({ "url": url }),
    };
    let sandboxd = ipc::http::Client::new(installation.layout.sandboxd());
    sandboxd.post("/v1/execute", &request).await.unwrap()
}

fn text(receipt: &Receipt) -> String {
    let texts = receipt.content.iter().map(|content| match content {
        Content::Text { text } => text.as_str(),
        other => panic!("{other:?}"),
    });
    texts.collect::<Vec<_>>().join("\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_allowed_page_comes_as_text_with_the_credential_put_in_on_the_way() {
    let (installation, origin) = started().await;
    let session = SessionId::random();

    let page = fetch(&installation, &session, "https://docs.example/page").await;
    let moved = fetch(&installation, &session, "https://docs.example/moved").await;
    let pixel = fetch(&installation, &session, "https://docs.example/pixel").await;
    let paper = fetch(&installation, &session, "https://docs.example/paper").await;

    assert_eq!((text(&page).as_str(), page.is_error), ("Docs\n\n# Usage\n\nRun it (/x).", false));
    assert!(text(&moved).starts_with("[from https://docs.example/page?x=1]\nDocs\n"), "{moved:?}");
    assert!(matches!(&pixel.content[..], [Content::Image { media_type, .. }]
        if media_type == "image/png"));
    assert!(
        matches!(&paper.content[..], [Content::Document { data, .. }] if data == "JVBERi0xLjc=")
    );
    let sent = origin.seen();
    assert_eq!(sent[0].values("authorization"), [format!("Bearer {TOKEN}")]);
    let audit = installation.audit().await;
    let mine = audit.iter().filter(|record| record.calls.contains(&page.call));
    assert!(mine.count() >= 1, "{audit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_with_the_bare_tool_set_fetches_what_its_environment_allows() {
    let (installation, origin) = started().await;
    let api = Api::new(&installation.layout.harnessd());
    let session = api.session("dev").await;

    api.say(&session, "What do the docs say?").await;
    let events = api.until_idle(&session).await;

    // In the order of their ends.
    let mut results = tool_results(&events);
    results.sort();
    assert_eq!(results.len(), 2, "{events:?}");
    assert_eq!(results[0], "Docs\n\n# Usage\n\nRun it (/x).");
    assert!(results[1].contains("does not list other.example"), "{results:?}");
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_echoes_the_credential_shows_the_model_none_of_it() {
    let (installation, origin) = started().await;

    let echo = fetch(&installation, &SessionId::random(), "https://docs.example/echo").await;

    let text = text(&echo);
    assert_eq!(origin.seen()[0].values("authorization"), [format!("Bearer {TOKEN}")]);
    assert!(!echo.is_error && text.starts_with("GET /echo ") && !text.contains(TOKEN), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_holds_a_call_no_longer_than_its_time() {
    let policy = POLICY.replace("[sandbox]", "[sandbox]\ntool-timeout = \"3s\"");
    let (installation, _origin) = started_with(&policy).await;

    let silent = fetch(&installation, &SessionId::random(), "https://docs.example/silent").await;

    // The first is the tool's own word; on a machine without a free core sandboxd may be first.
    let said = text(&silent);
    assert!(said.contains("no answer in time") || said.contains("timed out after 3s"), "{said}");
    assert!(silent.is_error, "{silent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_policy_does_not_list_is_refused_with_its_reason_also_by_a_redirection() {
    let (installation, origin) = started().await;
    let session = SessionId::random();

    let other = fetch(&installation, &session, "https://other.example/").await;
    let out = fetch(&installation, &session, "https://docs.example/out").await;
    let plain = fetch(&installation, &session, "http://other.example/").await;
    let local = fetch(&installation, &session, "http://127.0.0.1:1/").await;

    for refused in [&other, &out, &plain] {
        let text = text(refused);
        assert!(refused.is_error && text.starts_with("web_fetch: "), "{text}");
        assert!(text.contains("does not list other.example"), "{text}");
    }
    assert!(local.is_error && text(&local).contains("the connection was refused"), "{local:?}");
    assert_eq!(origin.seen().len(), 1, "the one that led out");
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_answers_are_errors_or_cut_and_say_so() {
    let (installation, _origin) = started().await;
    let session = SessionId::random();

    for (path, expected) in [
        ("/missing", "web_fetch: https://docs.example/missing: 404 Not Found\ngone"),
        ("/round", "more than 10 redirections"),
        ("/down", "leads to http://docs.example/page, which is not https"),
        ("/binary", "is application/zip, not text"),
        ("/broken", "broke off"),
    ] {
        let receipt = fetch(&installation, &session, &format!("https://docs.example{path}")).await;

        assert!(receipt.is_error && text(&receipt).contains(expected), "{path}: {receipt:?}");
    }
    for url in ["docs.example", "file:///etc/passwd", "https://user@docs.example/"] {
        let receipt = fetch(&installation, &session, url).await;

        assert!(receipt.is_error && text(&receipt).starts_with("web_fetch: "), "{receipt:?}");
    }
    let long = fetch(&installation, &session, "https://docs.example/long").await;
    assert!(text(&long).ends_with("[content truncated: 102400 of 300000 bytes shown]"));
    assert!(!long.is_error);
}
