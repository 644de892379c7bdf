//! The profile `whole-log`: everything that happened, as alternating messages.
//!
//! What the API asks for holds whatever log it is given: every tool use is answered in the next
//! user message, results first and in the order of the uses; an assistant's blocks come back
//! unchanged; no text is empty. A result that is not in the log is stated as unknown.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::log::{Body, Event, ToolUse};

/// The messages of a whole log.
pub fn messages(events: &[Event]) -> Vec<Value> {
    let said: HashMap<&str, &[Value]> = events
        .iter()
        .filter_map(|event| match &event.body {
            Body::UserMessage { content } => Some((event.id.as_str(), content.as_slice())),
            _ => None,
        })
        .collect();
    let mut talk = Talk::default();
    for event in events {
        match &event.body {
            Body::Processed { events } => {
                for content in events.iter().filter_map(|id| said.get(id.as_str())) {
                    talk.user(content);
                }
            }
            Body::AgentMessage { content, .. } => talk.answer.extend(content.iter().cloned()),
            Body::AgentThinking { blocks, .. } => talk.answer.extend(blocks.iter().cloned()),
            Body::ToolUse(used) => talk.tool_use(&event.id, used),
            Body::ModelRequestEnded(ended) if ended.failure.is_none() => talk.end_answer(),
            Body::ToolResult(result) => {
                talk.result(&result.tool_use, &result.content, result.is_error);
            }
            Body::UserCustomToolResult { tool_use, content, is_error } => {
                talk.result(tool_use, content, *is_error);
            }
            _ => {}
        }
    }
    talk.finish()
}

/// The conversation as it grows.
#[derive(Default)]
struct Talk {
    messages: Vec<(Role, Vec<Value>)>,
    /// Blocks of the answer that is being read.
    answer: Vec<Value>,
    /// Tool uses of that answer: event id and the model's id.
    used: Vec<(String, String)>,
    /// Tool uses of the last complete answer that await their results.
    awaiting: Vec<(String, String)>,
    results: HashMap<String, (Vec<Value>, bool)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    User,
    Assistant,
}

impl Talk {
    fn user(&mut self, content: &[Value]) {
        self.answer_tool_uses();
        let content = content.iter().filter(|block| !is_empty_text(block)).cloned().collect();
        self.push(Role::User, content);
    }

    fn tool_use(&mut self, event: &str, used: &ToolUse) {
        self.answer.push(json!({
            "type": "tool_use",
            "id": used.model_id,
            "name": used.name,
            "input": used.input,
        }));
        self.used.push((event.to_owned(), used.model_id.clone()));
    }

    fn end_answer(&mut self) {
        self.answer_tool_uses();
        let mut answer = std::mem::take(&mut self.answer);
        answer.retain(|block| !is_empty_text(block));
        self.push(Role::Assistant, answer);
        self.awaiting = std::mem::take(&mut self.used);
    }

    fn result(&mut self, tool_use: &str, content: &[Value], is_error: bool) {
        // The first result counts: a later one came from somebody who did not know.
        self.results.entry(tool_use.to_owned()).or_insert((content.to_vec(), is_error));
    }

    fn answer_tool_uses(&mut self) {
        let mut blocks = Vec::new();
        for (event, model_id) in std::mem::take(&mut self.awaiting) {
            let (content, is_error) = self
                .results
                .remove(&event)
                .unwrap_or_else(|| (vec![text("no result was recorded: outcome unknown")], true));
            blocks.push(tool_result(&model_id, content, is_error));
        }
        self.push(Role::User, blocks);
    }

    fn push(&mut self, role: Role, content: Vec<Value>) {
        if content.is_empty() {
            return;
        }
        match self.messages.last_mut() {
            Some((last, blocks)) if *last == role => blocks.extend(content),
            _ => self.messages.push((role, content)),
        }
    }

    fn finish(mut self) -> Vec<Value> {
        self.answer_tool_uses();
        let message = |(role, content)| match role {
            Role::User => json!({ "role": "user", "content": content }),
            Role::Assistant => json!({ "role": "assistant", "content": content }),
        };
        self.messages.into_iter().map(message).collect()
    }
}

fn tool_result(id: &str, mut content: Vec<Value>, is_error: bool) -> Value {
    content.retain(|block| !is_empty_text(block));
    if content.is_empty() {
        content.push(text("(no output)"));
    }
    let mut block = json!({ "type": "tool_result", "tool_use_id": id, "content": content });
    if is_error {
        block["is_error"] = Value::Bool(true);
    }
    block
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

fn is_empty_text(block: &Value) -> bool {
    block["type"] == "text" && block["text"].as_str().is_none_or(str::is_empty)
}

#[cfg(test)]
#[path = "whole_log_tests.rs"]
mod tests;
