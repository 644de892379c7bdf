//! Claims about the form of OpenAI's API, both ways.

use super::*;

fn play(chunks: &[Value], done: bool) -> Result<Answer, Failure> {
    let mut decoder = Chunks::default();
    for chunk in chunks {
        decoder.take(&chunk.to_string())?;
    }
    if done {
        decoder.take(DONE)?;
    }
    decoder.finish()
}

fn chunk(delta: Value) -> Value {
    json!({ "id": "chatcmpl-1", "model": "m", "choices": [{ "index": 0, "delta": delta }] })
}

fn end(reason: &str) -> Value {
    json!({ "id": "chatcmpl-1", "choices": [{ "delta": {}, "finish_reason": reason }] })
}

fn call(index: u64, id: &str, name: &str, arguments: &str) -> Value {
    let function = json!({ "name": name, "arguments": arguments });
    chunk(json!({ "tool_calls": [{ "index": index, "id": id, "function": function }] }))
}

#[test]
fn words_and_parallel_calls_in_pieces_are_one_answer() {
    let usage = json!({ "choices": [], "usage": {
        "prompt_tokens": 10, "completion_tokens": 4,
        "prompt_tokens_details": { "cached_tokens": 6 } } });
    let more = |index: u64, arguments: &str| {
        let function = json!({ "arguments": arguments });
        chunk(json!({ "tool_calls": [{ "index": index, "function": function }] }))
    };
    let chunks = [
        chunk(json!({ "role": "assistant", "content": "" })),
        chunk(json!({ "content": "I " })),
        chunk(json!({ "content": "look" })),
        call(0, "call_a", "bash", "{\"comm"),
        call(1, "call_b", "read", ""),
        more(0, "and\":\"ls\"}"),
        more(1, "{\"file_path\":\"x\"}"),
        end("tool_calls"),
        usage,
    ];

    let answer = play(&chunks, true).unwrap();

    assert_eq!(
        answer.blocks,
        [
            json!({ "type": "text", "text": "I look" }),
            json!({ "type": "tool_use", "id": "call_a", "name": "bash",
                    "input": { "command": "ls" } }),
            json!({ "type": "tool_use", "id": "call_b", "name": "read",
                    "input": { "file_path": "x" } }),
        ]
    );
    assert_eq!(answer.stop_reason.as_deref(), Some("tool_use"));
    let usage = answer.usage;
    let counts = (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens);
    assert_eq!(counts, (4, 4, 6));
    assert!(!answer.cut);
}

#[test]
fn a_stream_without_its_reason_is_no_answer_and_one_without_its_last_line_is() {
    let words = chunk(json!({ "content": "hi" }));

    let broken = play(std::slice::from_ref(&words), false).unwrap_err();
    let whole = play(&[words, end("stop")], false).unwrap();

    assert!(broken.retryable);
    assert_eq!(whole.stop_reason.as_deref(), Some("end_turn"));
}

#[test]
fn a_call_at_the_length_limit_never_runs_even_if_it_looks_whole() {
    let chunks = [
        call(0, "call_a", "bash", "{\"command\":\"ls\"}"),
        call(1, "call_b", "bash", "{\"command\":\"rm\"}"),
        end("length"),
    ];

    let answer = play(&chunks, true).unwrap();

    let ids: Vec<&Value> = answer.blocks.iter().map(|b| &b["id"]).collect();
    assert_eq!(ids, [&json!("call_a")]);
    assert!(answer.cut);
}

#[test]
fn an_error_in_mid_stream_and_an_answer_in_one_piece_are_understood() {
    let error = json!({ "error": { "message": "context length exceeded", "code": 400 } });
    let failure = play(&[chunk(json!({ "content": "hi" })), error], false).unwrap_err();
    assert!(failure.overflow);

    let mut decoder = Chunks::default();
    let function = json!({ "name": "bash", "arguments": "{\"command\":\"ls\"}" });
    let message = json!({ "content": null, "tool_calls": [{ "id": "a", "function": function }] });
    let whole = json!({ "choices": [{ "message": message, "finish_reason": "tool_calls" }] });
    assert!(decoder.take_whole(&whole).unwrap().is_some());
    assert_eq!(decoder.finish().unwrap().blocks[0]["input"]["command"], "ls");
    assert_eq!(Chunks::default().take_whole(&json!({ "status": "ok" })).unwrap(), None);
}

#[test]
fn a_prompt_takes_the_other_form_with_results_before_words() {
    let source = json!({ "type": "base64", "media_type": "image/png", "data": "QUJD" });
    let result = json!({ "type": "tool_result", "tool_use_id": "t1", "is_error": true, "content": [
        { "type": "text", "text": "no" }, { "type": "image", "source": source } ] });
    let prompt = Prompt {
        system: Some("Be brief.".into()),
        tools: vec![json!({ "name": "bash", "description": "d", "input_schema": {} })],
        messages: vec![
            json!({ "role": "user", "content": [{ "type": "text", "text": "hi" }] }),
            json!({ "role": "assistant", "content": [
                { "type": "thinking", "thinking": "x", "signature": "s" },
                { "type": "tool_use", "id": "t1", "name": "bash", "input": { "command": "ls" } },
            ] }),
            json!({ "role": "user", "content": [result, { "type": "text", "text": "go on" }] }),
        ],
    };

    let body = request(prompt);

    let image =
        json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,QUJD" } });
    let function = json!({ "name": "bash", "arguments": "{\"command\":\"ls\"}" });
    assert_eq!(
        body["messages"],
        json!([
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "hi" },
            { "role": "assistant", "content": null,
              "tool_calls": [{ "id": "t1", "type": "function", "function": function }] },
            { "role": "tool", "tool_call_id": "t1",
              "content": "[this call failed]\nno\n[its result is shown below]" },
            { "role": "user", "content": [image, { "type": "text", "text": "go on" }] },
        ])
    );
    assert_eq!(body["tools"][0]["function"]["name"], "bash");
}
