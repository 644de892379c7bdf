//! Claims about the messages made from a log.

use ipc::id::CallId;
use serde_json::json;

use super::*;
use crate::log::{CallOutcome, HandKind, Permission, RequestEnded, StopReason, ToolResult};

fn messages(events: &[Event]) -> Vec<Value> {
    super::messages(events, &Cut::default(), None)
}

fn log(bodies: Vec<(&str, Body)>) -> Vec<Event> {
    let event = |(n, (id, body)): (usize, (&str, Body))| Event {
        seq: n as u64 + 1,
        id: id.to_owned(),
        time: "2026-01-01T00:00:00.000Z".into(),
        body,
    };
    bodies.into_iter().enumerate().map(event).collect()
}

fn said(what: &str) -> Body {
    Body::UserMessage { content: vec![text(what)] }
}

fn taken(id: &str) -> Body {
    Body::Processed { events: vec![id.into()] }
}

fn answered(what: &str) -> Body {
    Body::AgentMessage { request: "r".into(), content: vec![text(what)] }
}

fn used(id: &str) -> Body {
    Body::ToolUse(ToolUse {
        request: "r".into(),
        call: CallId::parse(&format!("call_{id}")).unwrap(),
        model_id: format!("toolu_{id}"),
        name: "bash".into(),
        input: json!({"command": id}),
        hand: HandKind::Sandbox,
        permission: Permission::Allow,
        reason: None,
    })
}

fn result(id: &str, what: &str) -> Body {
    Body::ToolResult(ToolResult {
        tool_use: id.into(),
        call: CallId::parse(&format!("call_{id}")).unwrap(),
        content: vec![text(what)],
        is_error: false,
        outcome: CallOutcome::Finished,
        receipt: None,
    })
}

fn ended() -> Body {
    Body::ModelRequestEnded(RequestEnded::new("r"))
}

fn whole() -> Vec<Event> {
    let thinking = json!({"type": "thinking", "thinking": "", "signature": "s"});
    log(vec![
        ("m1", said("one")),
        ("x1", taken("m1")),
        ("t1", Body::AgentThinking { request: "r".into(), blocks: vec![thinking] }),
        ("p1", answered("running")),
        ("a", used("a")),
        ("b", used("b")),
        ("e1", ended()),
        ("m2", said("two")),
        ("rb", result("b", "of b")),
        ("ra", result("a", "of a")),
        ("p2", answered("done")),
        ("e2", ended()),
        ("x2", taken("m2")),
        ("p3", answered("")),
        ("e3", ended()),
        ("i", Body::StatusIdle { stop_reason: StopReason::EndTurn, stop_details: None }),
        ("m3", said("three")),
        ("x3", taken("m3")),
    ])
}

#[test]
fn results_come_first_in_the_order_of_their_uses_and_messages_when_they_were_taken_in() {
    let messages = messages(&whole());

    let expected = json!([
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "", "signature": "s"},
            {"type": "text", "text": "running"},
            {"type": "tool_use", "id": "toolu_a", "name": "bash", "input": {"command": "a"}},
            {"type": "tool_use", "id": "toolu_b", "name": "bash", "input": {"command": "b"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_a",
             "content": [{"type": "text", "text": "of a"}]},
            {"type": "tool_result", "tool_use_id": "toolu_b",
             "content": [{"type": "text", "text": "of b"}]},
        ]},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
        {"role": "user", "content": [
            {"type": "text", "text": "two"}, {"type": "text", "text": "three"},
        ]},
    ]);
    assert_eq!(Value::Array(messages), expected);
}

#[test]
fn any_cut_of_a_log_has_every_use_answered_in_the_next_message_and_roles_that_alternate() {
    let whole = whole();
    for end in 0..=whole.len() {
        let messages = messages(&whole[..end]);
        for (place, message) in messages.iter().enumerate() {
            let role = if place % 2 == 0 { "user" } else { "assistant" };
            assert_eq!(message["role"], role, "cut at {end}, message {place}");
            let ids = |message: &Value, kind: &str, key: &str| -> Vec<String> {
                let blocks = message["content"].as_array().unwrap().iter();
                blocks
                    .filter(|b| b["type"] == kind)
                    .map(|b| b[key].as_str().unwrap().to_owned())
                    .collect()
            };
            let used = ids(message, "tool_use", "id");
            if !used.is_empty() {
                let next = messages.get(place + 1).expect("an answer to the tool uses");
                assert_eq!(ids(next, "tool_result", "tool_use_id"), used, "cut at {end}");
            }
        }
    }
}

#[test]
fn a_longer_log_keeps_the_messages_of_a_shorter_one_byte_by_byte() {
    let whole = whole();
    // Where a request can begin: after a message or all results were taken in.
    let [first, second] = [&whole[..2], &whole[..10]].map(messages);
    let longest = messages(&whole);

    let bytes = |m: &[Value]| Value::Array(m.to_vec()).to_string();
    assert_eq!(bytes(&longest[..first.len()]), bytes(&first));
    assert_eq!(bytes(&longest[..second.len()]), bytes(&second));
}
