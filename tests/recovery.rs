//! Promise: any daemon may die at any moment; the history stays true and no tool runs twice.
use cleanhands_tests::api::{Api, tool_results};
use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::upstream::Upstream;
use cleanhands_tests::wait;
use serde_json::{Value, json};

const TOKEN: &str = "SECRET-CANARY-recovery-77aa31c0";
const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
paths = ["/hello"]
credential = "api"
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
"#;

/// Begins, waits for the test, and asks while proxyd is away.
const ASK_WHEN_TOLD: &str = "touch ready; until [ -e go ]; do sleep 0.02; done; touch asked; \
    curl -sS --max-time 50 https://api.example/hello";

/// Adds one line to a file of this call's own: a second line would be a second execution.
fn count(call: u32, rest: &str) -> Value {
    let command = format!("echo ran >> count-{call}; {rest}");
    json!([{ "name": "bash", "input": { "command": command } }])
}

fn three_tools() -> Value {
    json!([
        { "text": "One.", "tools": count(1, "echo first") },
        { "text": "Two.", "tools": count(2, "curl -sS https://api.example/hello") },
        { "text": "Three.", "tools": count(3, "sleep 0.2; echo third") },
        { "text": "Finished." },
    ])
}

async fn started(turns: Value) -> (Installation, Upstream) {
    let upstream = Upstream::start(&["api.example"], &format!("Bearer {TOKEN}")).await;
    let setup =
        Setup::default().policy("dev", POLICY).upstream("api.example", &upstream).script(turns);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", TOKEN).await;
    (installation, upstream)
}

/// What must hold of any finished session of `three_tools`, whatever was killed on the way.
async fn assert_true_history(installation: &Installation, api: &Api, session: &str, what: &str) {
    let events = api.until_idle(session).await;
    let of = |kind: &str| events.iter().filter(|e| e["type"] == kind).collect::<Vec<_>>();
    let (uses, results) = (of("agent.tool_use"), of("agent.tool_result"));
    assert_eq!(uses.len(), 3, "{what}: {events:#?}");
    for tool_use in &uses {
        let answers = results.iter().filter(|r| r["tool_use_id"] == tool_use["id"]).count();
        assert_eq!(answers, 1, "{what}: {tool_use} has {answers} results");
    }
    let ids: std::collections::BTreeSet<_> = events.iter().map(|e| e["id"].as_str()).collect();
    assert_eq!(ids.len(), events.len(), "{what}: an event is there twice");
    let ended = events.iter().rev().find(|e| e["type"] == "session.status_idle").unwrap();
    assert_eq!(ended["stop_reason"]["type"], "end_turn", "{what}: {ended}");
    assert_eq!(api.problems(session).await, Vec::<String>::new(), "{what}");
    let workspace = installation.layout.state.join("sandboxd/workspaces").join(session);
    for call in 1..=3 {
        let lines = std::fs::read_to_string(workspace.join(format!("count-{call}")))
            .map_or(0, |t| t.lines().count());
        assert!(lines <= 1, "{what}: call {call} ran {lines} times");
        let unknown = tool_results(&events)[call - 1].contains("outcome unknown");
        assert!(lines == 1 || unknown, "{what}: call {call} never ran and nobody says so");
    }
}

/// Kills `daemon` when the log of a fresh session holds `at` events; gives false when the session
/// was over before.
async fn killed_at(installation: &mut Installation, daemon: &'static str, at: usize) -> bool {
    let api = Api::new(&installation.layout.harnessd());
    let session = api.session("dev").await;
    api.say(&session, "go").await;
    let met = wait::until_async("an event count", || async {
        let events = api.events(&session).await?;
        if events.len() >= at {
            return Some(true);
        }
        let over = events.iter().any(|e| e["type"] == "session.status_idle");
        over.then_some(false)
    })
    .await;
    if !met {
        return false;
    }
    tokio::task::block_in_place(|| {
        installation.kill(daemon);
        installation.start_daemon(daemon);
    });
    assert_true_history(installation, &api, &session, &format!("{daemon} killed at event {at}"))
        .await;
    true
}

async fn survives_kills_of(daemon: &'static str) {
    let (mut installation, _upstream) = started(three_tools()).await;

    let mut at = 1;
    while killed_at(&mut installation, daemon, at).await {
        at += 1;
    }

    assert!(at > 10, "the session has only {at} events: this test would test little");
}

#[tokio::test(flavor = "multi_thread")]
async fn harnessd_killed_at_every_event_of_a_three_tool_session() {
    survives_kills_of("harnessd").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxd_killed_at_every_event_of_a_three_tool_session() {
    survives_kills_of("sandboxd").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn proxyd_killed_at_every_event_of_a_three_tool_session() {
    survives_kills_of("proxyd").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_connects_while_proxyd_is_down_is_served_when_it_is_back() {
    let (mut installation, _upstream) = started(json!([
        { "text": "Ask.", "tools": count(1, ASK_WHEN_TOLD) },
        { "text": "Done." },
    ]))
    .await;
    let api = Api::new(&installation.layout.harnessd());
    let session = api.session("dev").await;
    let workspace = installation.layout.state.join("sandboxd/workspaces").join(&session);
    let there = |name: &str| workspace.join(name).exists().then_some(());
    api.say(&session, "go").await;
    wait::until_async("the sandbox", || async { there("ready") }).await;

    tokio::task::block_in_place(|| installation.kill("proxyd"));
    std::fs::write(workspace.join("go"), "").unwrap();
    wait::until_async("the client", || async { there("asked") }).await;
    tokio::task::block_in_place(|| installation.start_daemon("proxyd"));
    let events = api.until_idle(&session).await;

    assert_eq!(tool_results(&events)[0].trim(), "hello", "{events:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_killed_in_mid_call_is_an_unknown_outcome_and_the_workspace_survives() {
    let (installation, _upstream) = started(json!([
        { "text": "Work.", "tools": count(1, "touch begun; sleep 600") },
        { "text": "Look.", "tools": [{ "name": "bash", "input": { "command": "cat count-1" } }] },
        { "text": "Done." },
    ]))
    .await;
    let api = Api::new(&installation.layout.harnessd());
    let session = api.session("dev").await;
    let workspace = installation.layout.state.join("sandboxd/workspaces").join(&session);
    api.say(&session, "go").await;
    wait::until_async("the call", || async { workspace.join("begun").exists().then_some(()) })
        .await;
    let sandboxd = ipc::http::Client::new(installation.layout.sandboxd());
    let list: Value = sandboxd.get("/v1/sandboxes").await.unwrap();
    let sandbox = list["sandboxes"][0]["sandbox"].as_str().unwrap().to_owned();

    let _: Value = sandboxd.delete(&format!("/v1/sandboxes/{sandbox}")).await.unwrap();
    let events = api.until_idle(&session).await;

    let results = tool_results(&events);
    assert!(results[0].contains("outcome unknown"), "{results:?}");
    assert_eq!(results[1].trim(), "ran", "{results:?}");
}
