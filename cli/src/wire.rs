//! The parts of the Managed Agents wire API that this command reads, as types of its own.
//!
//! Unions are open: what is not known here is kept as [`Event::Other`] with its JSON beside it, so
//! a newer harnessd can be watched with an older command.

use serde::Deserialize;
use serde_json::Value;

/// An agent or an environment, as far as it is needed to choose one.
#[derive(Clone, Debug, Deserialize)]
pub struct Named {
    pub id: String,
    pub name: String,
    #[serde(default)]
    pub archived_at: Option<String>,
    #[serde(default)]
    pub metadata: serde_json::Map<String, Value>,
    #[serde(default)]
    pub model: Value,
}

/// A page of a list.
#[derive(Clone, Debug, Deserialize)]
pub struct Page<T> {
    pub data: Vec<T>,
    #[serde(default)]
    pub next_page: Option<String>,
}

/// One event of a session with everything it was sent with.
#[derive(Clone, Debug)]
pub struct Received {
    /// Absent on previews.
    pub id: Option<String>,
    pub event: Event,
    pub json: Value,
}

/// What happened, as far as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    UserMessage {
        text: String,
        /// Still queued: it comes again when the agent takes it up.
        queued: bool,
    },
    Interrupt,
    Message {
        text: String,
    },
    Thinking,
    ToolUse {
        name: String,
        input: Value,
    },
    ToolResult {
        tool_use: String,
        text: String,
        failed: bool,
    },
    /// The running text of a message that is not whole yet.
    PreviewStart {
        message: String,
    },
    Preview {
        message: String,
        text: String,
    },
    ModelStart,
    ModelEnd,
    Running,
    Rescheduled,
    Idle {
        reason: String,
    },
    Terminated,
    Deleted,
    Error {
        message: String,
        retry: String,
    },
    Other(String),
}

impl Received {
    /// Reads one event; whatever it is, it is kept.
    pub fn of(json: Value) -> Self {
        let id = json.get("id").and_then(Value::as_str).map(str::to_owned);
        Self { id, event: event(&json), json }
    }
}

/// The text at a path of keys, empty where there is none.
pub fn text_at(json: &Value, path: &[&str]) -> String {
    let found = path.iter().try_fold(json, |value, key| value.get(key));
    found.and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The text of content blocks, joined; other kinds are named.
fn content(json: &Value) -> String {
    let blocks = json.get("content").and_then(Value::as_array);
    let parts: Vec<String> = blocks
        .into_iter()
        .flatten()
        .map(|block| match text_at(block, &["type"]).as_str() {
            "text" => text_at(block, &["text"]),
            kind => format!("[{kind}]"),
        })
        .collect();
    parts.join("\n")
}

fn event(json: &Value) -> Event {
    let kind = text_at(json, &["type"]);
    match kind.as_str() {
        "user.message" => Event::UserMessage {
            text: content(json),
            queued: json.get("processed_at").is_none_or(Value::is_null),
        },
        "user.interrupt" => Event::Interrupt,
        "agent.message" => Event::Message { text: content(json) },
        "agent.thinking" => Event::Thinking,
        "agent.tool_use" | "agent.custom_tool_use" | "agent.mcp_tool_use" => Event::ToolUse {
            name: text_at(json, &["name"]),
            input: json.get("input").cloned().unwrap_or_default(),
        },
        "agent.tool_result" => Event::ToolResult {
            tool_use: text_at(json, &["tool_use_id"]),
            text: content(json),
            failed: json.get("is_error").and_then(Value::as_bool).unwrap_or_default(),
        },
        "event_start" => Event::PreviewStart { message: text_at(json, &["event", "id"]) },
        "event_delta" => Event::Preview {
            message: text_at(json, &["event_id"]),
            text: text_at(json, &["delta", "content", "text"]),
        },
        "span.model_request_start" => Event::ModelStart,
        "span.model_request_end" => Event::ModelEnd,
        "session.status_running" => Event::Running,
        "session.status_rescheduled" => Event::Rescheduled,
        "session.status_idle" => Event::Idle { reason: text_at(json, &["stop_reason", "type"]) },
        "session.status_terminated" => Event::Terminated,
        "session.deleted" => Event::Deleted,
        "session.error" => Event::Error {
            message: text_at(json, &["error", "message"]),
            retry: text_at(json, &["error", "retry_status", "type"]),
        },
        _ => Event::Other(kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reads_the_events_that_are_shown_and_keeps_the_rest() {
        let text = json!([{"type": "text", "text": "hi"}, {"type": "image"}]);
        let cases = [
            (
                json!({"type": "agent.message", "id": "sevt_1", "content": text}),
                Event::Message { text: "hi\n[image]".into() },
            ),
            (
                json!({"type": "agent.tool_result", "tool_use_id": "sevt_0", "content": [],
                       "is_error": true}),
                Event::ToolResult { tool_use: "sevt_0".into(), text: String::new(), failed: true },
            ),
            (
                json!({"type": "event_delta", "event_id": "sevt_2",
                       "delta": {"type": "content_delta", "content": {"text": "x"}}}),
                Event::Preview { message: "sevt_2".into(), text: "x".into() },
            ),
            (
                json!({"type": "session.status_idle", "stop_reason": {"type": "end_turn"}}),
                Event::Idle { reason: "end_turn".into() },
            ),
            (json!({"type": "something.new"}), Event::Other("something.new".into())),
            (json!(3), Event::Other(String::new())),
        ];

        for (json, expected) in cases {
            assert_eq!(Received::of(json.clone()).event, expected, "{json}");
        }
    }
}
