//! The provider `chat-completions`: a server that speaks OpenAI's chat completions with streaming.
//!
//! The prompt is turned into its form, and what it streams into the events of the Messages API, so
//! that one place ([`Assembly`]) puts answers together. What the form cannot say is left out
//! (thinking) or said in words (documents, and pictures in results, which follow as the user's).

use std::collections::BTreeMap;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::answer::Assembly;
use super::exchange::{Decoder, Server};
use super::{Answer, Delta, Model, Sink};
use crate::context::Prompt;
use crate::log::Failure;

/// What a server sends behind the last event.
const DONE: &str = "[DONE]";

/// One model at one server.
pub struct Chat(pub(super) Server);

impl Model for Chat {
    fn ask<'a>(&'a self, prompt: Prompt, sink: Sink<'a>) -> BoxFuture<'a, Result<Answer, Failure>> {
        let mut body = request(prompt);
        body["model"] = json!(self.0.model);
        body["max_tokens"] = json!(self.0.max_tokens);
        if let Some(temperature) = self.0.temperature {
            body["temperature"] = temperature.into();
        }
        async move { self.0.ask(&[], &body, Chunks::default(), sink).await }.boxed()
    }
}

/// The prompt in the form of this API.
fn request(prompt: Prompt) -> Value {
    let mut messages = Vec::new();
    if let Some(system) = prompt.system {
        messages.push(json!({ "role": "system", "content": system }));
    }
    for message in &prompt.messages {
        let blocks = message["content"].as_array().map(Vec::as_slice).unwrap_or_default();
        if message["role"] == "assistant" {
            messages.extend(assistant(blocks));
        } else {
            user(blocks, &mut messages);
        }
    }
    let mut body = json!({
        "messages": messages,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    if !prompt.tools.is_empty() {
        let tool = |tool: &Value| {
            let function = json!({
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
            });
            json!({ "type": "function", "function": function })
        };
        body["tools"] = prompt.tools.iter().map(tool).collect();
    }
    body
}

fn assistant(blocks: &[Value]) -> Option<Value> {
    let texts: Vec<&str> = blocks.iter().filter_map(text_of).collect();
    let uses = blocks.iter().filter(|block| block["type"] == "tool_use");
    let calls: Vec<Value> = uses
        .map(|used| {
            let arguments = used["input"].to_string();
            let function = json!({ "name": used["name"], "arguments": arguments });
            json!({ "id": used["id"], "type": "function", "function": function })
        })
        .collect();
    if texts.is_empty() && calls.is_empty() {
        return None;
    }
    let content = if texts.is_empty() { Value::Null } else { json!(texts.join("\n\n")) };
    let mut message = json!({ "role": "assistant", "content": content });
    if !calls.is_empty() {
        message["tool_calls"] = Value::Array(calls);
    }
    Some(message)
}

/// Results are messages of their own here; what else the user said comes behind them.
fn user(blocks: &[Value], messages: &mut Vec<Value>) {
    let mut parts = Vec::new();
    for block in blocks {
        if block["type"] != "tool_result" {
            parts.extend(part(block));
            continue;
        }
        let mut texts = Vec::new();
        if block["is_error"] == true {
            texts.push("[this call failed]".to_owned());
        }
        for inner in block["content"].as_array().map(Vec::as_slice).unwrap_or_default() {
            match text_of(inner) {
                Some(text) => texts.push(text.to_owned()),
                None => {
                    texts.push("[its result is shown below]".to_owned());
                    parts.extend(part(inner));
                }
            }
        }
        let content = texts.join("\n");
        messages.push(json!({
            "role": "tool", "tool_call_id": block["tool_use_id"], "content": content,
        }));
    }
    let content = match &parts[..] {
        [] => return,
        // Many servers know the plain form only.
        [only] if only["type"] == "text" => only["text"].clone(),
        _ => Value::Array(parts),
    };
    messages.push(json!({ "role": "user", "content": content }));
}

fn part(block: &Value) -> Option<Value> {
    let source = &block["source"];
    let text = |text: String| json!({ "type": "text", "text": text });
    Some(match (block["type"].as_str()?, source["type"].as_str()) {
        ("text", _) => text(block["text"].as_str()?.to_owned()),
        ("image", Some("base64")) => {
            let kind = source["media_type"].as_str().unwrap_or("image/png");
            let url = format!("data:{kind};base64,{}", source["data"].as_str()?);
            json!({ "type": "image_url", "image_url": { "url": url } })
        }
        ("image", Some("url")) => {
            json!({ "type": "image_url", "image_url": { "url": source["url"] } })
        }
        ("document", Some("text")) => text(source["data"].as_str()?.to_owned()),
        (kind, _) => text(format!("[a {kind} that this model cannot be shown]")),
    })
}

fn text_of(block: &Value) -> Option<&str> {
    block["text"].as_str().filter(|_| block["type"] == "text")
}

/// The chunks of a stream, on their way to being an answer.
#[derive(Default)]
struct Chunks {
    assembly: Assembly,
    begun: bool,
    /// The number of the text block, and of the block of each tool call by its place.
    text: Option<usize>,
    calls: BTreeMap<u64, usize>,
    blocks: usize,
    usage: Value,
    /// The reason, once it was said; usage may follow it.
    finished: Option<String>,
    done: bool,
}

impl Chunks {
    fn feed(&mut self, event: &Value) -> Result<Option<Delta>, Failure> {
        self.assembly.take(&event.to_string())
    }

    fn open(&mut self, block: &Value) -> Result<(usize, Option<Delta>), Failure> {
        let index = self.blocks;
        self.blocks += 1;
        let event =
            json!({ "type": "content_block_start", "index": index, "content_block": block });
        Ok((index, self.feed(&event)?))
    }

    fn chunk(&mut self, chunk: &Value) -> Result<Vec<Delta>, Failure> {
        let mut deltas = Vec::new();
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            return Err(super::answer::failure(None, chunk));
        }
        if !self.begun {
            self.begun = true;
            let message = json!({ "id": chunk["id"], "model": chunk["model"] });
            self.feed(&json!({ "type": "message_start", "message": message }))?;
        }
        if chunk["usage"].is_object() {
            self.usage = chunk["usage"].clone();
        }
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        // A refusal is words of the model too.
        for words in [&delta["content"], &delta["refusal"]] {
            if let Some(text) = words.as_str().filter(|text| !text.is_empty()) {
                self.words(text, &mut deltas)?;
            }
        }
        for call in delta["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default() {
            self.call(call, &mut deltas)?;
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finished = Some(reason.to_owned());
        }
        Ok(deltas)
    }

    fn words(&mut self, text: &str, deltas: &mut Vec<Delta>) -> Result<(), Failure> {
        let index = match self.text {
            Some(index) => index,
            None => {
                let (index, started) = self.open(&json!({ "type": "text", "text": "" }))?;
                deltas.extend(started);
                self.text = Some(index);
                index
            }
        };
        let delta = json!({ "type": "text_delta", "text": text });
        let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
        deltas.extend(self.feed(&event)?);
        Ok(())
    }

    fn call(&mut self, call: &Value, deltas: &mut Vec<Delta>) -> Result<(), Failure> {
        let function = &call["function"];
        // Servers that send whole calls often leave the place out.
        let place = call["index"].as_u64().unwrap_or(self.calls.len() as u64);
        let index = match self.calls.get(&place) {
            Some(index) => *index,
            None => {
                let block =
                    json!({ "type": "tool_use", "id": call["id"], "name": function["name"] });
                let (index, started) = self.open(&block)?;
                deltas.extend(started);
                self.calls.insert(place, index);
                index
            }
        };
        let arguments = match &function["arguments"] {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            whole => whole.to_string(),
        };
        let delta = json!({ "type": "input_json_delta", "partial_json": arguments });
        self.feed(&json!({ "type": "content_block_delta", "index": index, "delta": delta }))?;
        Ok(())
    }

    /// Says the end in the words of the other API.
    fn end(&mut self) -> Result<(), Failure> {
        let Some(reason) = self.finished.take() else { return Ok(()) };
        let last = self.calls.values().max().copied();
        for index in 0..self.blocks {
            // The call that the limit met may look whole and not be.
            if reason != "length" || Some(index) != last {
                self.feed(&json!({ "type": "content_block_stop", "index": index }))?;
            }
        }
        let reason = match reason.as_str() {
            "stop" => "end_turn",
            "length" => "max_tokens",
            "tool_calls" | "function_call" => "tool_use",
            "content_filter" => "refusal",
            other => other,
        };
        let count = |key: &str| self.usage[key].as_u64().unwrap_or(0);
        let cached = self.usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let usage = json!({
            "input_tokens": count("prompt_tokens").saturating_sub(cached),
            "output_tokens": count("completion_tokens"),
            "cache_read_input_tokens": cached,
        });
        let delta = json!({ "stop_reason": reason });
        self.feed(&json!({ "type": "message_delta", "delta": delta, "usage": usage }))?;
        self.feed(&json!({ "type": "message_stop" }))?;
        Ok(())
    }
}

impl Decoder for Chunks {
    fn take(&mut self, data: &str) -> Result<Vec<Delta>, Failure> {
        if data.trim() == DONE {
            self.done = true;
            self.end()?;
            return Ok(Vec::new());
        }
        let chunk = serde_json::from_str(data).map_err(|_| {
            super::answer::incomplete("the model's stream holds an event that is not JSON")
        })?;
        self.chunk(&chunk)
    }

    fn take_whole(&mut self, body: &Value) -> Result<Option<Vec<Delta>>, Failure> {
        if !body["choices"][0]["message"].is_object() {
            return Ok(None);
        }
        let mut chunk = body.clone();
        chunk["choices"][0]["delta"] = body["choices"][0]["message"].clone();
        let deltas = self.chunk(&chunk)?;
        self.finished.get_or_insert_with(|| "stop".to_owned());
        self.end()?;
        self.done = true;
        Ok(Some(deltas))
    }

    fn is_complete(&self) -> bool {
        self.done
    }

    /// A stream that ended behind its reason is whole; some servers say nothing more.
    fn finish(mut self) -> Result<Answer, Failure> {
        self.end()?;
        self.assembly.finish()
    }
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
