//! Turns: order, history, stream, tools of the client, confirmations, interrupts, states.

use serde_json::{Value, json};

use super::daemon::{Daemon, message, of};

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

fn ask_tool(name: &str) -> Value {
    json!({ "type": "custom", "name": name, "description": "Asks the client.",
        "input_schema": { "type": "object" } })
}

fn result(tool_use: &Value, text: &str) -> Value {
    json!({ "type": "user.custom_tool_result", "custom_tool_use_id": tool_use,
        "content": [{ "type": "text", "text": text }] })
}

fn stop_reason(events: &[Value]) -> Value {
    of(events, "session.status_idle").last().unwrap()["stop_reason"].clone()
}

#[tokio::test]
async fn a_turn_streams_in_the_documented_order_and_the_history_equals_it() {
    let daemon = Daemon::start(json!([{ "text": "Hello there." }])).await;
    let session = daemon.session(json!([])).await;
    let mut stream = daemon.stream(&session, "").await;

    let echo = daemon.send(&session, json!([message("hi")])).await.ok();
    let events = stream.until("session.status_idle").await;
    let history = daemon.events(&session).await;
    let read = daemon.get(&format!("/v1/sessions/{session}")).await.ok();

    let head = ["session.status_running", "session.thread_status_running", "user.message"];
    let tail = [
        "span.model_request_start",
        "agent.message",
        "span.model_request_end",
        "session.thread_status_idle",
        "session.usage",
        "session.status_idle",
    ];
    assert_eq!(kinds(&events)[0], "user.message");
    assert_eq!(kinds(&events)[1..], [&head[..], &tail[..]].concat());
    assert_eq!(kinds(&history), [&head[..], &tail[..]].concat());
    assert_eq!(events[1..], history[..]);
    assert_eq!(echo["data"][0], events[0]);
    assert_eq!(events[0]["processed_at"], Value::Null);
    assert_eq!(stop_reason(&events)["type"], "end_turn");
    assert_eq!((&read["status"], &read["title"]), (&json!("idle"), &Value::Null));
}

#[tokio::test]
async fn previews_come_only_when_asked_and_are_a_prefix_of_the_message() {
    let text = "A message of more than one piece, so that there is something to preview.";
    let daemon = Daemon::start(json!([{ "text": text, "chunk_ms": 1 }])).await;
    let session = daemon.session(json!([])).await;
    let mut plain = daemon.stream(&session, "").await;
    let mut previewed = daemon.stream(&session, "?event_deltas[]=agent.message").await;

    daemon.say(&session, "hi").await;
    let plain = plain.until("session.status_idle").await;
    let events = previewed.until("session.status_idle").await;

    assert!(of(&plain, "event_start").is_empty() && of(&plain, "event_delta").is_empty());
    let start = of(&events, "event_start");
    let message = of(&events, "agent.message")[0];
    assert_eq!((start.len(), &start[0]["event"]["id"]), (1, &message["id"]));
    let pieces = of(&events, "event_delta");
    let shown: Vec<&str> =
        pieces.iter().map(|p| p["delta"]["content"]["text"].as_str().unwrap()).collect();
    assert!(!shown.is_empty());
    assert!(text.starts_with(&shown.concat()), "{shown:?}");
    let path = format!("/v1/sessions/{session}/events/stream?event_deltas[]=user.message");
    daemon.get(&path).await.refused(400, "invalid_request_error", "event_deltas");
}

#[tokio::test]
async fn a_stream_stays_open_over_turns_and_ends_when_the_session_is_deleted() {
    let daemon = Daemon::start(json!([{ "text": "one" }, { "text": "two" }])).await;
    let session = daemon.session(json!([])).await;
    let mut stream = daemon.stream(&session, "").await;

    for turn in ["first", "second"] {
        daemon.say(&session, turn).await;
        stream.until("session.status_idle").await;
    }
    daemon.until_settled(&session).await;
    daemon.call("DELETE", &format!("/v1/sessions/{session}"), None).await.ok();
    let rest = stream.until("session.deleted").await;

    assert!(rest[0]["id"].is_string() && rest[0]["processed_at"].is_string());
    assert_eq!(stream.next().await, None);
    let gone = daemon.get(&format!("/v1/sessions/{session}/events")).await;
    gone.refused(404, "not_found_error", &session);
}

#[tokio::test]
async fn a_quiet_stream_has_a_head_at_once_and_a_heartbeat() {
    let daemon = Daemon::start(json!([])).await;
    let session = daemon.session(json!([])).await;

    let mut stream = daemon.stream(&session, "").await;

    stream.until_text("\n: alive\n").await;
}

#[tokio::test]
async fn two_custom_tools_are_answered_one_by_one() {
    let daemon = Daemon::start(json!([
        { "text": "I ask.", "tools": [{ "name": "one", "input": { "q": 1 } },
            { "name": "two", "input": {} }] },
        { "text": "Thanks.", "expect": "answer-two" },
    ]))
    .await;
    let session = daemon.session(json!([ask_tool("one"), ask_tool("two")])).await;

    daemon.say(&session, "go").await;
    let events = daemon.until_idle(&session, 1).await;
    let uses = of(&events, "agent.custom_tool_use");
    let (one, two) = (uses[0]["id"].clone(), uses[1]["id"].clone());
    assert_eq!(stop_reason(&events), json!({ "type": "requires_action", "event_ids": [one, two] }));
    daemon.send(&session, json!([result(&one, "answer-one")])).await.ok();
    let partly = daemon.until_idle(&session, 2).await;
    let first = daemon.send(&session, json!([result(&two, "answer-two")])).await.ok();
    let again = daemon.send(&session, json!([result(&two, "answer-two")])).await.ok();
    let events = daemon.until_idle(&session, 3).await;

    assert_eq!(stop_reason(&partly), json!({ "type": "requires_action", "event_ids": [two] }));
    assert_eq!(first["data"][0]["id"], again["data"][0]["id"]);
    assert_eq!(of(&events, "user.custom_tool_result").len(), 2);
    assert_eq!(stop_reason(&events)["type"], "end_turn");
    let last = of(&events, "agent.message").last().unwrap()["content"][0]["text"].clone();
    assert_eq!(last, "Thanks.");
    let other = daemon.send(&session, json!([result(&two, "something else")])).await;
    other.refused(409, "conflict_error", "answered");
}

#[tokio::test]
async fn a_denied_call_does_not_run_and_the_reason_reaches_the_model() {
    let daemon = Daemon::start(json!([
        { "text": "May I?", "tools": [{ "name": "bash", "input": { "command": "true" } }] },
        { "text": "Understood.", "expect": "not on my watch" },
    ]))
    .await;
    let policy = json!({ "permission_policy": { "type": "always_ask" } });
    let toolset = json!({ "type": "agent_toolset_20260401", "default_config": policy });
    let session = daemon.session(json!([toolset])).await;

    daemon.say(&session, "go").await;
    let events = daemon.until_idle(&session, 1).await;
    let call = of(&events, "agent.tool_use")[0].clone();
    let deny = json!([{ "type": "user.tool_confirmation", "tool_use_id": call["id"],
        "result": "deny", "deny_message": "not on my watch" }]);
    daemon.send(&session, deny).await.ok();
    let events = daemon.until_idle(&session, 2).await;

    assert_eq!(call["evaluated_permission"], "ask");
    let reason = json!({ "type": "requires_action", "event_ids": [call["id"]] });
    assert_eq!(of(&events, "session.status_idle")[0]["stop_reason"], reason);
    let result = of(&events, "agent.tool_result")[0];
    assert_eq!((&result["tool_use_id"], &result["is_error"]), (&call["id"], &json!(true)));
    let last = of(&events, "agent.message").last().unwrap()["content"][0]["text"].clone();
    assert_eq!(last, "Understood.");
}

#[tokio::test]
async fn an_interrupt_ends_the_turn_and_closes_the_model_span() {
    let slow = "word ".repeat(2_000);
    let daemon = Daemon::start(json!([{ "text": slow, "chunk_ms": 50 }])).await;
    let session = daemon.session(json!([])).await;
    let running = |events: &[Value]| !of(events, "span.model_request_start").is_empty();

    daemon.say(&session, "go").await;
    daemon.until(&session, running).await;
    let path = format!("/v1/sessions/{session}");
    let busy = daemon.call("DELETE", &path, None).await;
    let archive = daemon.call("POST", &format!("{path}/archive"), None).await;
    let tools = daemon.post(&path, json!({ "agent": { "tools": [ask_tool("x")] } })).await;
    daemon.send(&session, json!([{ "type": "user.interrupt" }])).await.ok();
    let events = daemon.until_idle(&session, 1).await;

    assert_eq!(busy.header("x-should-retry"), Some("false"));
    for refused in [busy, archive, tools] {
        refused.refused(409, "conflict_error", &session);
    }
    assert_eq!(stop_reason(&events)["type"], "end_turn");
    assert_eq!(of(&events, "span.model_request_end").len(), 1);
    assert_eq!(of(&events, "user.interrupt").len(), 1);
}

#[tokio::test]
async fn changes_are_events_and_an_archived_session_takes_none() {
    let daemon = Daemon::start(json!([{ "text": "x" }])).await;
    let session = daemon.session(json!([])).await;
    let path = format!("/v1/sessions/{session}");

    let change = json!({ "title": "t", "agent": { "tools": [ask_tool("later")] } });
    let changed = daemon.post(&path, change.clone()).await.ok();
    let same = daemon.post(&path, change).await.ok();
    let archived = daemon.call("POST", &format!("{path}/archive"), None).await.ok();
    let again = daemon.call("POST", &format!("{path}/archive"), None).await.ok();
    let events = daemon.events(&session).await;

    assert_eq!(changed["agent"]["tools"][0]["name"], "later");
    assert_eq!(same["title"], "t");
    assert_eq!(kinds(&events)[0], "session.updated");
    assert_eq!(of(&events, "session.updated").len(), 1);
    assert_eq!(archived["status"], "terminated");
    assert_eq!(again["archived_at"], archived["archived_at"]);
    let late = daemon.send(&session, json!([message("hello?")])).await;
    late.refused(400, "invalid_request_error", "archived");
    let listed = daemon.get("/v1/sessions").await.ok();
    assert_eq!(listed["data"], json!([]));
}

#[tokio::test]
async fn the_operator_reads_the_log_and_verifies_it() {
    let daemon = Daemon::start(json!([{ "text": "x" }])).await;
    let session = daemon.session(json!([])).await;
    daemon.say(&session, "hi").await;
    daemon.until_idle(&session, 1).await;
    let path = format!("/cleanhands/v1/sessions/{session}");

    let log = daemon.get(&format!("{path}/log?after=1&limit=2")).await.ok();
    let report = daemon.get(&format!("{path}/verify")).await.ok();
    let health = daemon.get("/cleanhands/v1/health").await.ok();

    let seqs: Vec<&Value> = log["events"].as_array().unwrap().iter().map(|e| &e["seq"]).collect();
    assert_eq!(seqs, [2, 3]);
    assert_eq!(report["problems"], json!([]));
    assert_eq!(health["default_environment"], "dev");
}
