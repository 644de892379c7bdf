//! The provider `messages`: a server that speaks the Messages API with streaming.
//!
//! Anthropic's, or another that speaks it (llama.cpp's server does).

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::answer::Assembly;
use super::exchange::Server;
use super::{Answer, Model, Sink};
use crate::context::Prompt;
use crate::log::Failure;

const HEADERS: &[(&str, &str)] = &[("anthropic-version", "2023-06-01")];

/// One model at one server.
pub struct Messages(pub(super) Server);

impl Model for Messages {
    fn ask<'a>(&'a self, prompt: Prompt, sink: Sink<'a>) -> BoxFuture<'a, Result<Answer, Failure>> {
        let body = self.body(prompt);
        async move { self.0.ask(HEADERS, &body, Assembly::default(), sink).await }.boxed()
    }
}

impl Messages {
    fn body(&self, prompt: Prompt) -> Value {
        let mut body = json!({ "model": self.0.model, "max_tokens": self.0.max_tokens });
        if let Some(temperature) = self.0.temperature {
            body["temperature"] = temperature.into();
        }
        let mut tools = prompt.tools;
        match prompt.system {
            // A mark on the system text covers the tools as well: they come before it.
            Some(text) => {
                let block = json!({ "type": "text", "text": text, "cache_control": mark() });
                body["system"] = json!([block]);
            }
            None => {
                if let Some(last) = tools.last_mut() {
                    last["cache_control"] = mark();
                }
            }
        }
        if !tools.is_empty() {
            body["tools"] = Value::Array(tools);
        }
        let mut messages = prompt.messages;
        mark_messages(&mut messages);
        body["messages"] = Value::Array(messages);
        body["stream"] = true.into();
        body
    }
}

fn mark() -> Value {
    json!({ "type": "ephemeral" })
}

/// Marks the ends of the last two user messages for the provider's cache: the last is written now,
/// the one before it was written by the request before and is found again, however many blocks
/// this turn added (a lookup reaches back 20 blocks only).
fn mark_messages(messages: &mut [Value]) {
    let of_user = messages.iter_mut().rev().filter(|m| m["role"] == "user");
    for message in of_user.take(2) {
        let blocks = message["content"].as_array_mut();
        if let Some(block) = blocks.and_then(|b| b.last_mut()) {
            block["cache_control"] = mark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_the_last_two_user_messages_and_nothing_of_the_assistant() {
        let user =
            |text: &str| json!({"role": "user", "content": [{"type": "text", "text": text}]});
        let agent = json!({"role": "assistant", "content": [{"type": "text", "text": "x"}]});
        let mut messages = vec![user("a"), agent.clone(), user("b"), agent.clone(), user("c")];

        mark_messages(&mut messages);

        let marked: Vec<bool> =
            messages.iter().map(|m| m["content"][0].get("cache_control").is_some()).collect();
        assert_eq!(marked, [false, false, true, false, true]);
    }
}
