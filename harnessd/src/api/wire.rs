//! The wire form of a session's events: the log's events, converted one by one.
//!
//! A [`Fold`] reads the log in order and gives what a client sees. It knows three things that no
//! single event says: a client's event appears when it is processed, not when it is sent; thread
//! events stand beside the session's own, since clients look for them; and usage stands between
//! the two idle events. Ids of thread events derive from the event they stand beside.

use serde_json::{Map, Value, json};

use super::wire_blocks;
use crate::log::event::{
    Agent, Body, CallOutcome, ErrorKind, Event, HandKind, Permission, RequestEnded, Retry,
    StopReason, ToolResult, ToolUse, Usage,
};

/// An event as a client sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct WireEvent {
    /// Its name: the `type` in `body`.
    pub kind: &'static str,
    pub id: String,
    /// Place in the history: sequence number of the log's event that put it there, and the place
    /// among those that this one event became.
    pub place: (u64, u32),
    /// `None`: a client's event that still waits.
    pub processed_at: Option<String>,
    pub body: Value,
}

/// Reads the log from its first event and gives wire events.
#[derive(Debug)]
pub struct Fold {
    thread: String,
    agent: String,
    /// Client events that wait, in the order of their coming.
    queued: Vec<Event>,
    /// A usage event waits for the idle event behind it.
    usage: Option<Event>,
    active: Active,
}

/// How long a session has been running.
#[derive(Clone, Debug, Default)]
struct Active {
    since: Option<jiff::Timestamp>,
    millis: i64,
}

impl Active {
    fn start(&mut self, time: &str) {
        if self.since.is_none() {
            self.since = time.parse().ok();
        }
    }

    fn stop(&mut self, time: &str) {
        self.millis = self.millis_at(time);
        self.since = None;
    }

    fn millis_at(&self, time: &str) -> i64 {
        let now: Option<jiff::Timestamp> = time.parse().ok();
        let running = match (self.since, now) {
            (Some(since), Some(now)) => (now.as_millisecond() - since.as_millisecond()).max(0),
            _ => 0,
        };
        self.millis + running
    }
}

/// The id of a session's one thread.
pub fn thread_id(session: &str) -> String {
    format!("sthr_{}", session.strip_prefix("sesn_").unwrap_or(session))
}

impl Fold {
    pub fn new(session: &str) -> Self {
        Self {
            thread: thread_id(session),
            agent: String::new(),
            queued: Vec::new(),
            usage: None,
            active: Active::default(),
        }
    }

    /// Milliseconds that the session has been running, at `time`.
    pub fn active_millis(&self, time: &str) -> i64 {
        self.active.millis_at(time)
    }

    /// What becomes of the next event of the log. A client's event comes out twice: without
    /// `processed_at` when it arrives, with it when the loop took it in.
    pub fn feed(&mut self, event: &Event) -> Vec<WireEvent> {
        let mut out = Out { event, place: 0, events: Vec::new() };
        let idle = matches!(event.body, Body::StatusIdle { .. });
        if let Some(usage) = self.usage.take().filter(|_| !idle) {
            self.usage_event(&usage, &mut out);
        }
        if event.body.needs_processing() {
            if let Some((kind, body)) = client_event(&event.body) {
                out.waiting(kind, body);
            }
            self.queued.push(event.clone());
            return out.events;
        }
        match &event.body {
            Body::Processed { events } => self.processed(events, &mut out),
            Body::Usage { .. } => self.usage = Some(event.clone()),
            Body::SessionCreated(created) => self.agent = agent_name(&created.agent),
            Body::SessionUpdated { agent, title, metadata } => {
                if let Some(agent) = agent {
                    self.agent = agent_name(agent);
                }
                out.push("session.updated", updated(agent.as_ref(), title, metadata));
            }
            Body::UserCustomToolResult { .. } => {
                if let Some((kind, body)) = client_event(&event.body) {
                    out.push(kind, body);
                }
            }
            Body::StatusRunning {}
            | Body::StatusIdle { .. }
            | Body::StatusRescheduled {}
            | Body::StatusTerminated {} => self.status(&event.body, &mut out),
            Body::ModelRequestStarted { .. } => out.push("span.model_request_start", json!({})),
            Body::ModelRequestEnded(ended) => {
                out.push("span.model_request_end", request_end(ended))
            }
            Body::AgentMessage { content, .. } => {
                let content = wire_blocks::all(content);
                out.push("agent.message", json!({ "content": content }));
            }
            Body::AgentThinking { .. } => out.push("agent.thinking", json!({})),
            Body::ToolUse(call) => {
                let (kind, body) = tool_use(call);
                out.push(kind, body);
            }
            Body::ToolResult(result) => out.push("agent.tool_result", tool_result(result)),
            Body::Error { error, message, retry } => {
                out.push("session.error", session_error(*error, message, *retry));
            }
            Body::ToolStarted { .. } | Body::Note(_) => {}
            Body::UserMessage { .. }
            | Body::UserInterrupt {}
            | Body::UserToolConfirmation { .. } => {}
        }
        out.events
    }

    /// Client events that still wait, behind everything else in the history.
    pub fn queued(&self) -> Vec<WireEvent> {
        let wire = |event: &Event| {
            let (kind, body) = client_event(&event.body)?;
            let mut out = Out { event, place: 0, events: Vec::new() };
            out.waiting(kind, body);
            let mut wire = out.events.pop()?;
            wire.place = (u64::MAX, u32::try_from(event.seq).unwrap_or(u32::MAX));
            Some(wire)
        };
        self.queued.iter().filter_map(wire).collect()
    }

    /// A usage event that no idle event followed yet.
    pub fn finish(&mut self) -> Vec<WireEvent> {
        let Some(usage) = self.usage.take() else { return Vec::new() };
        let mut out = Out { event: &usage, place: 0, events: Vec::new() };
        self.usage_event(&usage, &mut out);
        out.events
    }

    fn processed(&mut self, ids: &[String], out: &mut Out<'_>) {
        for id in ids {
            let Some(at) = self.queued.iter().position(|event| event.id == *id) else { continue };
            let event = self.queued.remove(at);
            if let Some((kind, body)) = client_event(&event.body) {
                out.push_as(&event.id, kind, body);
            }
        }
    }

    fn status(&mut self, body: &Body, out: &mut Out<'_>) {
        let time = out.event.time.clone();
        match body {
            Body::StatusRunning {} => {
                self.active.start(&time);
                out.push("session.status_running", json!({}));
                out.beside("session.thread_status_running", self.thread_fields(json!({})));
            }
            Body::StatusIdle { stop_reason: reason, stop_details: details } => {
                self.active.stop(&time);
                let fields = json!({
                    "stop_reason": stop_reason(reason),
                    "stop_details": details.as_ref().map(refusal),
                });
                out.beside("session.thread_status_idle", self.thread_fields(fields.clone()));
                if let Some(usage) = self.usage.take() {
                    self.usage_event(&usage, out);
                }
                out.push("session.status_idle", fields);
            }
            Body::StatusRescheduled {} => {
                out.push("session.status_rescheduled", json!({}));
                out.beside("session.thread_status_rescheduled", self.thread_fields(json!({})));
            }
            _ => {
                self.active.stop(&time);
                out.beside("session.thread_status_terminated", self.thread_fields(json!({})));
                out.push("session.status_terminated", json!({}));
            }
        }
    }

    fn thread_fields(&self, mut body: Value) -> Value {
        body["session_thread_id"] = json!(self.thread);
        body["agent_name"] = json!(self.agent);
        body
    }

    fn usage_event(&self, event: &Event, out: &mut Out<'_>) {
        let Body::Usage { usage } = &event.body else { return };
        let usage = session_usage(usage, self.active.millis_at(&event.time));
        out.push_as(&event.id, "session.usage", json!({ "usage": usage, "budget": null }));
    }
}

/// Collects the wire events that one event of the log becomes.
struct Out<'a> {
    event: &'a Event,
    place: u32,
    events: Vec<WireEvent>,
}

impl Out<'_> {
    fn push(&mut self, kind: &'static str, body: Value) {
        let id = self.event.id.clone();
        self.add(id, kind, Some(self.event.time.clone()), body);
    }

    fn push_as(&mut self, id: &str, kind: &'static str, body: Value) {
        self.add(id.to_owned(), kind, Some(self.event.time.clone()), body);
    }

    /// An event that stands beside the log's own: its id is the other's with a suffix.
    fn beside(&mut self, kind: &'static str, body: Value) {
        let id = format!("{}_thread", self.event.id);
        self.add(id, kind, Some(self.event.time.clone()), body);
    }

    fn waiting(&mut self, kind: &'static str, body: Value) {
        let id = self.event.id.clone();
        self.add(id, kind, None, body);
    }

    fn add(&mut self, id: String, kind: &'static str, processed_at: Option<String>, body: Value) {
        let mut whole = Map::new();
        whole.insert("id".to_owned(), json!(id));
        whole.insert("type".to_owned(), json!(kind));
        if let Value::Object(fields) = body {
            whole.extend(fields);
        }
        whole.insert("processed_at".to_owned(), json!(processed_at));
        let place = (self.event.seq, self.place);
        self.place += 1;
        self.events.push(WireEvent { kind, id, place, processed_at, body: Value::Object(whole) });
    }
}

fn agent_name(agent: &Agent) -> String {
    agent.snapshot["name"].as_str().unwrap_or_default().to_owned()
}

/// Name and fields of an event that the client sent; `None` for all others.
fn client_event(body: &Body) -> Option<(&'static str, Value)> {
    Some(match body {
        Body::UserMessage { content } => {
            ("user.message", json!({ "content": wire_blocks::all(content) }))
        }
        Body::UserInterrupt {} => ("user.interrupt", json!({})),
        Body::UserToolConfirmation { tool_use, allow, deny_message } => {
            let result = if *allow { "allow" } else { "deny" };
            let fields = json!({
                "tool_use_id": tool_use,
                "result": result,
                "deny_message": deny_message,
            });
            ("user.tool_confirmation", fields)
        }
        Body::UserCustomToolResult { tool_use, content, is_error } => {
            let fields = json!({
                "custom_tool_use_id": tool_use,
                "content": wire_blocks::all(content),
                "is_error": is_error,
            });
            ("user.custom_tool_result", fields)
        }
        _ => return None,
    })
}

/// Only what changed; metadata that became empty is left out, as the wire API does.
fn updated(agent: Option<&Agent>, title: &Option<Value>, metadata: &Option<Value>) -> Value {
    let mut fields = Map::new();
    if let Some(agent) = agent {
        fields.insert("agent".to_owned(), agent.snapshot.clone());
    }
    if let Some(title) = title {
        fields.insert("title".to_owned(), title.clone());
    }
    let filled = |map: &&Value| map.as_object().is_some_and(|map| !map.is_empty());
    if let Some(metadata) = metadata.as_ref().filter(filled) {
        fields.insert("metadata".to_owned(), metadata.clone());
    }
    Value::Object(fields)
}

fn request_end(ended: &RequestEnded) -> Value {
    json!({
        "model_request_start_id": ended.request,
        "is_error": ended.failure.is_some(),
        "model_usage": {
            "input_tokens": ended.usage.input_tokens,
            "output_tokens": ended.usage.output_tokens,
            "cache_creation_input_tokens": ended.usage.cache_creation_input_tokens,
            "cache_read_input_tokens": ended.usage.cache_read_input_tokens,
        },
    })
}

fn tool_use(call: &ToolUse) -> (&'static str, Value) {
    // Clients expect a map; what a model wrote instead of one is shown inside one.
    let input = match &call.input {
        Value::Object(_) => call.input.clone(),
        other => json!({ "input": other }),
    };
    if call.hand == HandKind::Client {
        return ("agent.custom_tool_use", json!({ "name": call.name, "input": input }));
    }
    let mut fields = json!({ "name": call.name, "input": input });
    match call.permission {
        Permission::Allow => {
            fields["evaluated_permission"] = json!("allow");
            fields["evaluation"] = json!({ "type": "always_allow" });
        }
        Permission::Ask => {
            fields["evaluated_permission"] = json!("ask");
            fields["evaluation"] = json!({ "type": "always_ask" });
        }
        // No policy was consulted: the tool is unknown or disabled.
        Permission::Deny => fields["evaluated_permission"] = json!("deny"),
    }
    ("agent.tool_use", fields)
}

fn tool_result(result: &ToolResult) -> Value {
    let is_error = result.is_error || result.outcome != CallOutcome::Finished;
    json!({
        "tool_use_id": result.tool_use,
        "content": wire_blocks::all(&result.content),
        "is_error": is_error,
    })
}

fn session_error(error: ErrorKind, message: &str, retry: Retry) -> Value {
    let kind = match error {
        ErrorKind::Unknown => "unknown_error",
        ErrorKind::ModelOverloaded => "model_overloaded_error",
        ErrorKind::ModelRateLimited => "model_rate_limited_error",
        ErrorKind::ModelRequestFailed => "model_request_failed_error",
        ErrorKind::Billing => "billing_error",
    };
    let retry = match retry {
        Retry::Retrying => "retrying",
        Retry::Exhausted => "exhausted",
        Retry::Terminal => "terminal",
    };
    json!({ "error": { "type": kind, "message": message, "retry_status": { "type": retry } } })
}

fn stop_reason(reason: &StopReason) -> Value {
    match reason {
        StopReason::EndTurn => json!({ "type": "end_turn" }),
        StopReason::RequiresAction { events } => {
            json!({ "type": "requires_action", "event_ids": events })
        }
        StopReason::RetriesExhausted => json!({ "type": "retries_exhausted" }),
        StopReason::Refusal => json!({ "type": "refusal" }),
    }
}

fn refusal(details: &Value) -> Value {
    json!({
        "type": "refusal",
        "category": details.get("category").and_then(Value::as_str),
        "explanation": details.get("explanation").and_then(Value::as_str),
    })
}

/// Tokens and time of a whole session. Costs are not tracked and stand as null.
pub fn session_usage(usage: &Usage, active_millis: i64) -> Value {
    json!({
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_input_tokens": usage.cache_read_input_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_creation_input_tokens,
            "ephemeral_1h_input_tokens": 0,
        },
        "list_cost": null,
        "active_seconds": seconds(active_millis),
        "server_tool_use": { "web_search_requests": 0, "web_fetch_requests": 0 },
    })
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds of a session fit a double exactly")]
pub fn seconds(millis: i64) -> f64 {
    millis as f64 / 1000.0
}
