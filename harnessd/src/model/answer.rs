//! Puts an answer together from the events of a Messages API stream.
//!
//! Strict where it matters: without `message_stop` there is no answer, and a tool call whose input
//! is not whole JSON is left out. Lenient where servers differ: ids of any form or none, blocks
//! without their empty fields, errors without the outer envelope, unknown events and blocks.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::exchange::Decoder;
use super::{Answer, BlockKind, Delta};
use crate::log::{ErrorKind, Failure, Usage};

/// Most blocks in one answer: bounds what a broken server can make us keep.
const BLOCKS_MAX: usize = 4096;
/// Longest answer, in bytes of its texts and inputs.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// An answer under way.
#[derive(Default)]
pub struct Assembly {
    answer: Answer,
    blocks: BTreeMap<usize, Block>,
    bytes: usize,
    stopped: bool,
}

struct Block {
    value: Value,
    /// Pieces of a tool call's input.
    input: String,
    closed: bool,
}

impl Assembly {
    /// Takes the data of one event; says what a listener may see of it.
    pub fn take(&mut self, data: &str) -> Result<Option<Delta>, Failure> {
        let event: Value = serde_json::from_str(data)
            .map_err(|_| incomplete("the model's stream holds an event that is not JSON"))?;
        self.bytes += data.len();
        if self.bytes > ANSWER_BYTES_MAX || self.blocks.len() > BLOCKS_MAX {
            return Err(incomplete("the model's answer is longer than is accepted"));
        }
        let index = usize::try_from(event["index"].as_u64().unwrap_or(0)).unwrap_or(usize::MAX);
        match event["type"].as_str().unwrap_or_default() {
            "message_start" => self.start(&event["message"]),
            "content_block_start" => return Ok(Some(self.start_block(index, &event))),
            "content_block_delta" => return Ok(self.grow(index, &event["delta"])),
            "content_block_stop" => {
                if let Some(block) = self.blocks.get_mut(&index) {
                    block.closed = true;
                }
            }
            "message_delta" => self.change(&event),
            "message_stop" => self.stopped = true,
            "error" => return Err(failure(None, &event)),
            _ if event.get("type").is_none() && event.get("error").is_some() => {
                return Err(failure(None, &event));
            }
            _ => {}
        }
        Ok(None)
    }

    /// Takes an answer that came in one piece, as if it had come in many.
    pub fn take_message(&mut self, message: &Value) -> Option<Vec<Delta>> {
        let blocks = message["content"].as_array().filter(|_| message["type"] == "message")?;
        self.start(message);
        let mut deltas = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            deltas.push(self.start_block(index, &json!({ "content_block": block })));
            if let Some(text) = block["text"].as_str() {
                deltas.push(Delta::Text { block: index, text: text.to_owned() });
            }
        }
        self.blocks.values_mut().for_each(|block| block.closed = true);
        self.change(&json!({ "delta": message, "usage": message["usage"] }));
        self.stopped = true;
        Some(deltas)
    }

    /// The whole answer, if the stream said that it is whole.
    pub fn finish(self) -> Result<Answer, Failure> {
        if !self.stopped {
            return Err(incomplete("the model's stream ended before the answer was complete"));
        }
        let mut answer = self.answer;
        for block in self.blocks.into_values() {
            match block.finish() {
                Some(value) => answer.blocks.push(value),
                None => answer.cut = true,
            }
        }
        Ok(answer)
    }

    fn start(&mut self, message: &Value) {
        self.answer.message = message["id"].as_str().map(str::to_owned);
        self.answer.model = message["model"].as_str().map(str::to_owned);
        self.count(&message["usage"]);
    }

    fn start_block(&mut self, index: usize, event: &Value) -> Delta {
        let value = event["content_block"].clone();
        let kind = match value["type"].as_str() {
            Some("text") => BlockKind::Text,
            Some("tool_use") => BlockKind::Tool,
            _ => BlockKind::Other,
        };
        self.blocks.insert(index, Block { value, input: String::new(), closed: false });
        Delta::Started { block: index, kind }
    }

    fn grow(&mut self, index: usize, delta: &Value) -> Option<Delta> {
        let block = self.blocks.get_mut(&index)?;
        let (key, field) = match delta["type"].as_str()? {
            "text_delta" => ("text", "text"),
            "thinking_delta" => ("thinking", "thinking"),
            "signature_delta" => {
                block.value["signature"] = delta["signature"].clone();
                return None;
            }
            "input_json_delta" => {
                block.input.push_str(delta["partial_json"].as_str().unwrap_or_default());
                return None;
            }
            "citations_delta" => {
                if !block.value["citations"].is_array() {
                    block.value["citations"] = json!([]);
                }
                let citations = block.value["citations"].as_array_mut()?;
                citations.push(delta["citation"].clone());
                return None;
            }
            _ => return None,
        };
        let more = delta[key].as_str()?;
        append(&mut block.value, field, more);
        (key == "text").then(|| Delta::Text { block: index, text: more.to_owned() })
    }

    fn change(&mut self, event: &Value) {
        let delta = &event["delta"];
        if let Some(reason) = delta["stop_reason"].as_str() {
            self.answer.stop_reason = Some(reason.to_owned());
        }
        if !delta["stop_details"].is_null() {
            self.answer.stop_details = Some(delta["stop_details"].clone());
        }
        self.count(&event["usage"]);
    }

    /// Usage is cumulative: what is stated last holds, what is not stated stays.
    fn count(&mut self, usage: &Value) {
        let Usage {
            input_tokens,
            output_tokens,
            cache_creation_input_tokens,
            cache_read_input_tokens,
        } = &mut self.answer.usage;
        let counters = [
            ("input_tokens", input_tokens),
            ("output_tokens", output_tokens),
            ("cache_creation_input_tokens", cache_creation_input_tokens),
            ("cache_read_input_tokens", cache_read_input_tokens),
        ];
        for (name, counter) in counters {
            if let Some(count) = usage[name].as_u64() {
                *counter = count;
            }
        }
    }
}

impl Block {
    /// The block, unless it is a tool call that is not whole.
    fn finish(mut self) -> Option<Value> {
        if self.value["type"] != "tool_use" {
            return Some(self.value);
        }
        let name = self.value["name"].as_str().unwrap_or_default();
        if !self.closed || name.is_empty() {
            return None;
        }
        let input = if self.input.trim().is_empty() {
            match self.value.get("input") {
                Some(input) if input.is_object() => input.clone(),
                _ => json!({}),
            }
        } else {
            serde_json::from_str(&self.input).ok()?
        };
        let id = match self.value["id"].as_str() {
            Some(id) if !id.is_empty() => id.to_owned(),
            _ => format!("toolu_{}", ipc::id::random_text(24)),
        };
        self.value = json!({ "type": "tool_use", "id": id, "name": name, "input": input });
        Some(self.value)
    }
}

fn append(value: &mut Value, field: &str, more: &str) {
    match &mut value[field] {
        Value::String(text) => text.push_str(more),
        other => *other = Value::String(more.to_owned()),
    }
}

impl Decoder for Assembly {
    fn take(&mut self, data: &str) -> Result<Vec<Delta>, Failure> {
        Ok(Assembly::take(self, data)?.into_iter().collect())
    }

    fn take_whole(&mut self, body: &Value) -> Result<Option<Vec<Delta>>, Failure> {
        Ok(self.take_message(body))
    }

    fn is_complete(&self) -> bool {
        self.stopped
    }

    fn finish(self) -> Result<Answer, Failure> {
        Assembly::finish(self)
    }
}

/// The failure of an answer that broke off: the same request may succeed.
pub fn incomplete(message: &str) -> Failure {
    Failure::new(ErrorKind::ModelRequestFailed, message, true)
}

/// The failure of a request that was longer than the model can take.
pub fn overflow(message: String) -> Failure {
    Failure { overflow: true, ..Failure::new(ErrorKind::ModelRequestFailed, message, false) }
}

/// How servers say that a request was too long: the Messages API, OpenAI's, llama.cpp's.
const TOO_LONG: [&str; 6] = [
    "prompt is too long",
    "context length",
    "context window",
    "context size",
    "exceed_context_size",
    "context_length_exceeded",
];

/// Whether an error says that the request was too long for the model.
fn is_overflow(status: Option<u16>, body: &Value) -> bool {
    let error = &body["error"];
    let parts = [&error["message"], &error["type"], &error["code"], &body["message"]];
    let said = |text: &str| TOO_LONG.iter().any(|phrase| text.contains(phrase));
    let said = parts.iter().filter_map(|p| p.as_str()).any(|t| said(&t.to_ascii_lowercase()));
    status == Some(413) || (matches!(status, None | Some(400 | 422)) && said)
}

/// The failure that an error body states; `status` is that of the response, none within a stream.
pub fn failure(status: Option<u16>, body: &Value) -> Failure {
    let kind = body["error"]["type"].as_str().unwrap_or_default();
    let text = body["error"]["message"]
        .as_str()
        .or_else(|| body["error"]["reason"].as_str())
        .or_else(|| body["error"].as_str())
        .or_else(|| body["message"].as_str())
        .unwrap_or("no reason given");
    let (error, retryable) = match (status, kind) {
        (Some(529 | 503), _) | (_, "overloaded_error") => (ErrorKind::ModelOverloaded, true),
        (Some(429), _) | (_, "rate_limit_error") => (ErrorKind::ModelRateLimited, true),
        (Some(402), _) | (_, "billing_error") => (ErrorKind::Billing, false),
        (Some(408 | 409 | 500..), _) | (None, _) => (ErrorKind::ModelRequestFailed, true),
        _ => (ErrorKind::ModelRequestFailed, false),
    };
    let text: String = text.chars().take(500).collect();
    let message = match status {
        Some(status) => format!("the model's server answered {status}: {text}"),
        None => format!("the model's server broke off: {text}"),
    };
    if is_overflow(status, body) {
        return overflow(message);
    }
    Failure::new(error, message, retryable)
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
