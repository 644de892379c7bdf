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
        mcp: None,
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
        mcp: false,
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

fn answered_with(blocks: Vec<Value>, stop_reason: &str) -> Vec<(&'static str, Body)> {
    let ended = RequestEnded { stop_reason: Some(stop_reason.into()), ..RequestEnded::new("r") };
    vec![
        ("t", Body::AgentThinking { request: "r".into(), blocks }),
        ("e", Body::ModelRequestEnded(ended)),
    ]
}

#[test]
fn what_no_server_takes_back_is_left_out() {
    let signed = json!({"type": "thinking", "thinking": "x", "signature": "s"});
    let unsigned = json!({"type": "thinking", "thinking": "x", "signature": ""});
    let searched = json!({"type": "server_tool_use", "id": "srv_1", "name": "web_search"});
    let found = json!({"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []});
    let lost = json!({"type": "web_search_tool_result", "tool_use_id": "srv_0", "content": []});
    let so = json!({"type": "text", "text": "so"});
    let cases = [
        (vec![unsigned, so.clone()], vec![so.clone()]),
        (vec![signed.clone()], vec![]),
        (vec![searched.clone(), so.clone()], vec![so.clone()]),
        (vec![lost, so.clone()], vec![so.clone()]),
        (vec![searched.clone(), found.clone()], vec![searched, found]),
        (vec![signed.clone(), so.clone()], vec![signed, so]),
    ];
    for (blocks, expected) in cases {
        let mut bodies = vec![("m1", said("one")), ("x1", taken("m1"))];
        bodies.extend(answered_with(blocks.clone(), "end_turn"));
        bodies.extend([("m2", said("two")), ("x2", taken("m2"))]);

        let messages = messages(&log(bodies));

        let answers: Vec<&Value> = messages.iter().filter(|m| m["role"] == "assistant").collect();
        let content = answers.first().map_or(json!([]), |m| m["content"].clone());
        assert_eq!(content, json!(expected), "{blocks:?}");
        assert_eq!(messages.last().unwrap()["role"], "user");
    }
}

#[test]
fn a_paused_answer_goes_back_as_it_is_and_grows_where_it_stopped() {
    let searched = json!({"type": "server_tool_use", "id": "srv_1", "name": "web_search"});
    let found = json!({"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []});
    let mut bodies = vec![("m1", said("one")), ("x1", taken("m1"))];
    bodies.extend(answered_with(vec![searched.clone()], "pause_turn"));
    let paused = messages(&log(bodies.clone()));
    bodies.extend(answered_with(vec![found.clone()], "end_turn"));
    let done = messages(&log(bodies));

    assert_eq!(paused[1]["content"], json!([searched]));
    assert_eq!(done[1]["content"], json!([searched, found]));
}

#[test]
fn ids_that_a_server_used_before_become_ours() {
    let again = |id: &str| match used(id) {
        Body::ToolUse(used) => Body::ToolUse(ToolUse { model_id: "toolu_1".into(), ..used }),
        other => other,
    };
    let messages = messages(&log(vec![
        ("m1", said("one")),
        ("x1", taken("m1")),
        ("a", again("a")),
        ("e1", ended()),
        ("ra", result("a", "of a")),
        ("b", again("b")),
        ("e2", ended()),
        ("rb", result("b", "of b")),
    ]));

    assert_eq!(messages[1]["content"][0]["id"], "toolu_1");
    assert_eq!(messages[3]["content"][0]["id"], "call_b");
    assert_eq!(messages[4]["content"][0]["tool_use_id"], "call_b");
}

#[test]
fn a_context_that_begins_later_says_so_and_keeps_the_words_that_began_the_turn() {
    let whole = whole();
    let turn = crate::state::Turn { seq: 2, read_from: 1 };
    let cut = Cut { from: 11, read_from: 8, turn: Some(turn), summary: None };
    let messages = super::messages(&whole, &cut, None);

    assert_eq!(messages[0]["content"], json!([text(LEFT_OUT), text("one")]));
    assert_eq!(messages[1]["content"], json!([text("done")]));
    assert_eq!(messages[2]["content"], json!([text("two"), text("three")]));
}

#[test]
fn an_answer_that_was_cut_off_is_told_behind_its_results() {
    let cut = RequestEnded { cut: true, ..RequestEnded::new("r") };
    let messages = messages(&log(vec![
        ("m1", said("one")),
        ("x1", taken("m1")),
        ("a", used("a")),
        ("e1", Body::ModelRequestEnded(cut)),
        ("ra", result("a", "of a")),
    ]));

    let content = messages[2]["content"].as_array().unwrap();
    assert_eq!(content[0]["type"], "tool_result");
    assert_eq!(content[1], text(WAS_CUT));
}
