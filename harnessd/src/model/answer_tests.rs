//! Claims about answers put together from streams, whole, broken and odd.

use super::*;

fn play(events: &[Value]) -> (Result<Answer, Failure>, Vec<Delta>) {
    let mut assembly = Assembly::default();
    let mut deltas = Vec::new();
    for event in events {
        match assembly.take(&event.to_string()) {
            Ok(delta) => deltas.extend(delta),
            Err(failure) => return (Err(failure), deltas),
        }
    }
    (assembly.finish(), deltas)
}

fn block(index: u64, block: Value) -> Value {
    json!({"type": "content_block_start", "index": index, "content_block": block})
}

fn delta(index: u64, delta: Value) -> Value {
    json!({"type": "content_block_delta", "index": index, "delta": delta})
}

fn stop(index: u64) -> Value {
    json!({"type": "content_block_stop", "index": index})
}

fn whole() -> Vec<Value> {
    vec![
        json!({"type": "message_start", "message": {
            "id": "msg_1", "model": "m-1", "content": [], "usage": {"input_tokens": 7}}}),
        json!({"type": "ping"}),
        block(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
        delta(0, json!({"type": "thinking_delta", "thinking": "hm"})),
        delta(0, json!({"type": "signature_delta", "signature": "sig"})),
        stop(0),
        block(1, json!({"type": "text", "text": ""})),
        delta(1, json!({"type": "text_delta", "text": "Hel"})),
        delta(1, json!({"type": "text_delta", "text": "lo"})),
        stop(1),
        block(2, json!({"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {}})),
        delta(2, json!({"type": "input_json_delta", "partial_json": "{\"comm"})),
        delta(2, json!({"type": "input_json_delta", "partial_json": "and\":\"ls\"}"})),
        stop(2),
        json!({"type": "some_new_event"}),
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"},
               "usage": {"output_tokens": 3}}),
        json!({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9}}),
        json!({"type": "message_stop"}),
    ]
}

#[test]
fn a_whole_stream_gives_the_whole_answer() {
    let (answer, deltas) = play(&whole());

    let answer = answer.unwrap();
    assert_eq!(
        answer.blocks,
        [
            json!({"type": "thinking", "thinking": "hm", "signature": "sig"}),
            json!({"type": "text", "text": "Hello"}),
            json!({"type": "tool_use", "id": "toolu_1", "name": "bash",
                   "input": {"command": "ls"}}),
        ]
    );
    assert_eq!(answer.stop_reason.as_deref(), Some("tool_use"));
    assert_eq!((answer.usage.input_tokens, answer.usage.output_tokens), (7, 9));
    assert!(!answer.cut);
    let text: String = deltas
        .iter()
        .filter_map(|d| match d {
            Delta::Text { text, .. } => Some(text.as_str()),
            Delta::Started { .. } => None,
        })
        .collect();
    assert_eq!(text, "Hello");
}

#[test]
fn a_stream_that_ends_early_is_no_answer_wherever_it_ends() {
    let whole = whole();
    for end in 0..whole.len() {
        let (answer, _) = play(&whole[..end]);
        let failure = answer.expect_err("a truncated stream was taken as an answer");
        assert!(failure.retryable);
    }
}

#[test]
fn an_error_in_mid_stream_is_a_failure_of_its_kind() {
    let mut events = whole();
    events.truncate(8);
    let error = json!({"type": "overloaded_error", "message": "Overloaded"});
    events.push(json!({"type": "error", "error": error}));

    let failure = play(&events).0.unwrap_err();

    assert_eq!(failure.error, ErrorKind::ModelOverloaded);
    assert!(failure.retryable);
}

#[test]
fn a_tool_call_cut_off_by_the_output_limit_is_left_out() {
    let events = [
        block(0, json!({"type": "text", "text": "I run"})),
        stop(0),
        block(1, json!({"type": "tool_use", "id": "toolu_1", "name": "bash"})),
        delta(1, json!({"type": "input_json_delta", "partial_json": "{\"command\":\"rm -r"})),
        stop(1),
        json!({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}),
        json!({"type": "message_stop"}),
    ];

    let answer = play(&events).0.unwrap();

    assert_eq!(answer.blocks, [json!({"type": "text", "text": "I run"})]);
    assert!(answer.cut);
}

#[test]
fn takes_the_forms_of_other_servers() {
    let events = [
        json!({"type": "message_start", "message": {"id": "chatcmpl-9", "model": "smollm"}}),
        block(0, json!({"type": "tool_use", "id": "k3j", "name": "bash"})),
        delta(0, json!({"type": "input_json_delta", "partial_json": ""})),
        stop(0),
        block(1, json!({"type": "tool_use", "name": "glob"})),
        stop(1),
        json!({"type": "message_stop"}),
    ];

    let answer = play(&events).0.unwrap();

    assert_eq!(answer.blocks[0]["id"], "k3j");
    assert_eq!(answer.blocks[0]["input"], json!({}));
    assert!(answer.blocks[1]["id"].as_str().unwrap().starts_with("toolu_"));
    let body = json!({"error": {"message": "no", "type": "invalid_request_error", "code": 400}});
    let failure = failure(Some(400), &body);
    assert!(!failure.retryable);
    assert_eq!(failure.message, "the model's server answered 400: no");
}

#[test]
fn statuses_are_sorted_by_whether_another_try_helps() {
    let retryable = |status| failure(Some(status), &Value::Null).retryable;

    for status in [408, 409, 429, 500, 502, 503, 504, 529] {
        assert!(retryable(status), "{status}");
    }
    for status in [400, 401, 402, 403, 404, 413, 422] {
        assert!(!retryable(status), "{status}");
    }
}
