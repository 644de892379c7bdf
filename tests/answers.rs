//! Promise: what the model is asked and what a client reads back is the log: whole, in order, each
//! result with its call, and nobody else's.
use cleanhands_tests::api::Api;
use cleanhands_tests::installation::{DAEMONS, Installation, Setup};
use cleanhands_tests::origin::{Origin, Request, ok};
use cleanhands_tests::wait;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const DEV: &str = "[sandbox]\nroot = \"host\"\n";
const HARNESS: &str = r#"
[[egress.allow]]
hosts = ["model.example"]
methods = ["POST"]
paths = ["/v1/messages"]
credential = "model"
addresses = ["127.0.0.1/32"]
[credentials.model]
secret = "local:model"
inject = { header = { name = "x-api-key", template = "{}" } }
hosts = ["model.example"]
"#;
const KEY: &str = "SECRET-CANARY-model-key-5d0e9f31";

/// A model's streamed answer with these blocks.
fn streamed(blocks: &[Value], stop_reason: &str) -> Vec<u8> {
    let usage = json!({ "input_tokens": 1, "output_tokens": 1 });
    let message = json!({ "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
        "content": [], "usage": usage });
    let mut events = vec![json!({ "type": "message_start", "message": message })];
    for (index, block) in blocks.iter().enumerate() {
        let (mut empty, delta) = (
            block.clone(),
            match block["type"].as_str().unwrap() {
                "text" => json!({ "type": "text_delta", "text": block["text"] }),
                _ => {
                    let json = block["input"].to_string();
                    json!({ "type": "input_json_delta", "partial_json": json })
                }
            },
        );
        match block["type"].as_str().unwrap() {
            "text" => empty["text"] = json!(""),
            _ => empty["input"] = json!({}),
        }
        let start = "content_block_start";
        events.push(json!({ "type": start, "index": index, "content_block": empty }));
        events.push(json!({ "type": "content_block_delta", "index": index, "delta": delta }));
        events.push(json!({ "type": "content_block_stop", "index": index }));
    }
    let delta = json!({ "stop_reason": stop_reason, "stop_sequence": null });
    events.push(json!({ "type": "message_delta", "delta": delta, "usage": usage }));
    events.push(json!({ "type": "message_stop" }));
    let text: String = events
        .iter()
        .map(|e| format!("event: {}\ndata: {e}\n\n", e["type"].as_str().unwrap()))
        .collect();
    ok("Content-Type: text/event-stream\r\n", text.as_bytes())
}

fn tool(id: u32, name: &str, input: Value) -> Value {
    json!({ "type": "tool_use", "id": format!("toolu_{id}"), "name": name, "input": input })
}

/// Asks for five tools at once, then is content.
fn model(request: &Request) -> Vec<u8> {
    let asked: Value = serde_json::from_slice(&request.body).unwrap();
    if asked["messages"].as_array().unwrap().len() > 1 {
        return streamed(&[json!({ "type": "text", "text": "Done." })], "end_turn");
    }
    let uses = [
        tool(1, "bash", json!({ "command": "echo one" })),
        tool(2, "bash", json!({ "command": "echo two; sleep 300", "timeout_ms": 300 })),
        tool(3, "write", json!({ "file_path": "three", "content": "three" })),
        tool(4, "read", json!({ "file_path": "four" })),
        tool(5, "glob", json!({ "pattern": "five*" })),
    ];
    streamed(&uses, "tool_use")
}

async fn with_a_model() -> (Installation, Origin) {
    let origin = Origin::start(&["model.example"], model).await;
    let setup = Setup::default().policy("dev", DEV).policy("harness", HARNESS);
    let setup = origin.behind("model.example", setup);
    let installation = tokio::task::block_in_place(|| {
        let mut installation = Installation::prepare(&setup);
        let config = installation.layout.config.join("harnessd.toml");
        let models = "default-environment = \"dev\"\n[models.\"*\"]\nprovider = \"messages\"\n\
            url = \"https://model.example\"\nmodel = \"m\"\nmax-tokens = 100\n";
        std::fs::write(config, models).unwrap();
        for daemon in DAEMONS {
            installation.start_daemon(daemon);
        }
        installation
    });
    installation.store_secret("model", KEY).await;
    (installation, origin)
}

async fn until_stopped(api: &Api, session: &str, reason: &str) -> Vec<Value> {
    wait::until_async(reason, || async {
        let events = api.events(session).await?;
        let idle = events.iter().rfind(|e| e["type"] == "session.status_idle")?;
        (idle["stop_reason"]["type"] == reason).then_some(events)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn five_parallel_calls_are_answered_in_one_message_each_with_its_own_result() {
    let (installation, origin) = with_a_model().await;
    let api = Api::new(&installation.layout.harnessd());
    let config = json!({ "type": "cloud", "networking": { "type": "unrestricted" } });
    let environment = json!({ "name": "e", "config": config, "metadata": { "policy": "dev" } });
    let environment = api.post("/v1/environments", environment).await;
    let ask = json!({ "name": "write", "permission_policy": { "type": "always_ask" } });
    let toolset = json!({ "type": "agent_toolset_20260401", "configs": [ask] });
    let agent = json!({ "name": "tester", "model": "m", "tools": [toolset] });
    let agent = api.post("/v1/agents", agent).await;
    let session = json!({ "agent": agent["id"], "environment_id": environment["id"] });
    let session = api.post("/v1/sessions", session).await;
    let session = session["id"].as_str().unwrap();

    api.say(session, "all at once").await;
    let events = until_stopped(&api, session, "requires_action").await;
    let asked =
        events.iter().find(|e| e["type"] == "agent.tool_use" && e["name"] == "write").unwrap();
    let deny = json!({ "type": "user.tool_confirmation", "tool_use_id": asked["id"],
        "result": "deny", "deny_message": "not this file" });
    api.post(&format!("/v1/sessions/{session}/events"), json!({ "events": [deny] })).await;
    until_stopped(&api, session, "end_turn").await;

    let requests = origin.seen();
    assert_eq!(requests.len(), 2, "{requests:#?}");
    assert!(requests.iter().all(|r| r.values("x-api-key") == [KEY]));
    let second: Value = serde_json::from_slice(&requests[1].body).unwrap();
    let messages = second["messages"].as_array().unwrap();
    let roles: Vec<&str> = messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "user"]);
    let results = messages[2]["content"].as_array().unwrap();
    let ids: Vec<&Value> = results.iter().map(|r| &r["tool_use_id"]).collect();
    assert_eq!(ids, ["toolu_1", "toolu_2", "toolu_3", "toolu_4", "toolu_5"]);
    let said = ["one", "timed out", "not this file", "four", ""];
    for (result, words) in results.iter().zip(said) {
        assert_eq!(result["type"], "tool_result");
        assert!(result["content"].to_string().contains(words), "{words}: {result}");
    }
    assert!(!second.to_string().contains(KEY));
}

async fn scripted(turns: Value) -> (Installation, Api) {
    let setup = Setup::default().policy("dev", DEV).script(turns);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    let api = Api::new(&installation.layout.harnessd());
    (installation, api)
}

/// One GET of which at most `most` bytes are read; gives status and body when they were enough.
async fn get(installation: &Installation, path: &str, most: usize) -> Option<(u16, Value)> {
    let socket = installation.layout.harnessd();
    let mut stream = tokio::net::UnixStream::connect(socket).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = stream.take(most as u64).read_to_end(&mut answer).await.unwrap();
    let text = String::from_utf8(answer).unwrap();
    let (head, body) = text.split_once("\r\n\r\n")?;
    // Cut off: what came so far counts for nothing.
    let body = serde_json::from_str(body).ok().filter(|_| read < most)?;
    Some((head[9..12].parse().unwrap(), body))
}

/// Numbers without an order (a linear congruence), the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> usize {
        let next = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.0 = next;
        usize::try_from((next >> 33) % bound).unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_read_over_connections_that_break_is_the_log() {
    let echo = |n: u32| json!([{ "name": "bash", "input": { "command": format!("echo {n}") } }]);
    let (installation, api) = scripted(json!([
        { "text": "One.", "tools": echo(1) },
        { "text": "Two.", "tools": echo(2) },
        { "text": "Done." },
        { "text": "More." },
    ]))
    .await;
    let session = api.session("dev").await;
    api.say(&session, "go").await;
    api.until_idle(&session).await;
    let log = format!("/cleanhands/v1/sessions/{session}/log?limit=3&after=");
    let pages = format!("/v1/sessions/{session}/events?limit=3");

    let mut numbers = Numbers(7);
    let (mut after, mut seqs, mut broken) = (0, Vec::new(), 0);
    let (mut page, mut ids) = (Some(String::new()), Vec::new());
    for _ in 0..400 {
        // Half of them break somewhere in the head or the body.
        let most = if numbers.below(2) == 0 { numbers.below(300) } else { usize::MAX / 4 };
        match get(&installation, &format!("{log}{after}"), most).await {
            None => broken += 1,
            Some((status, body)) => {
                assert_eq!(status, 200, "{body}");
                let new = body["events"].as_array().unwrap();
                seqs.extend(new.iter().map(|e| e["seq"].as_u64().unwrap()));
                after = seqs.last().copied().unwrap_or(0);
            }
        }
        let Some(cursor) = page.clone() else { continue };
        if let Some((status, body)) = get(&installation, &format!("{pages}{cursor}"), most).await {
            assert_eq!(status, 200, "{body}");
            ids.extend(body["data"].as_array().unwrap().iter().map(|e| e["id"].clone()));
            page = body["next_page"].as_str().map(|next| format!("&page={next}"));
        }
    }

    let whole = api.log(&session).await;
    assert!(broken > 50, "only {broken} connections broke: this test would test little");
    assert_eq!(seqs, (1..=whole.len() as u64).collect::<Vec<_>>());
    let events = api.events(&session).await.unwrap();
    assert_eq!(ids, events.iter().map(|e| e["id"].clone()).collect::<Vec<_>>());
    // Nothing new leaves the place where it was; what comes then comes once.
    let (_, empty) = get(&installation, &format!("{log}{after}"), usize::MAX / 4).await.unwrap();
    assert_eq!(empty["events"], json!([]));
    api.say(&session, "and more").await;
    api.until_idle(&session).await;
    let (_, next) = get(&installation, &format!("{log}{after}"), usize::MAX / 4).await.unwrap();
    assert_eq!(next["events"][0]["seq"], after + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_of_one_session_is_refused_on_another() {
    let (installation, api) = scripted(json!([{ "text": "Hello." }])).await;
    let (one, other) = (api.session("dev").await, api.session("dev").await);
    for session in [&one, &other] {
        api.say(session, "hi").await;
        api.until_idle(session).await;
    }
    let events = |session: &str| format!("/v1/sessions/{session}/events?limit=1");

    let (_, first) = get(&installation, &events(&one), usize::MAX / 4).await.unwrap();
    let cursor = first["next_page"].as_str().unwrap();
    let page = |session: &str| format!("{}&page={cursor}", events(session));
    let own = get(&installation, &page(&one), usize::MAX / 4).await.unwrap();
    let foreign = get(&installation, &page(&other), usize::MAX / 4).await.unwrap();

    assert_eq!(own.0, 200);
    assert_ne!(own.1["data"][0]["id"], first["data"][0]["id"]);
    assert_eq!(foreign.0, 400, "{}", foreign.1);
    assert_eq!(foreign.1["error"]["type"], "invalid_request_error");
}
