//! The wire form of a session's events: the log's events, converted one by one.
//!
//! A [`Fold`] reads the log in order and gives what a client sees. It knows three things that no
//! single event says: a client's event appears when it is processed, not when it is sent; thread
//! events stand beside the session's own, since clients look for them; and usage stands between
//! the two idle events. Ids of thread events derive from the event they stand beside.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::wire_bodies::{
    client_event, refusal, request_end, session_error, session_usage, stop_reason, tool_result,
    tool_use, updated,
};
use super::{budget, wire_blocks};
use crate::log::event::{Agent, Body, Event, Usage};
use crate::spending::Spending;

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
#[derive(Debug, Serialize, Deserialize)]
pub struct Fold {
    thread: String,
    agent: String,
    /// Client events that wait, in the order of their coming.
    queued: Vec<Event>,
    /// A usage event waits for the idle event behind it.
    usage: Option<Event>,
    active: Active,
    /// Tokens of the whole session, and what they cost.
    tokens: Usage,
    spending: Spending,
}

/// How long a session has been running.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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
            tokens: Usage::default(),
            spending: Spending::default(),
        }
    }

    /// Milliseconds that the session has been running, at `time`.
    pub fn active_millis(&self, time: &str) -> i64 {
        self.active.millis_at(time)
    }

    /// Tokens that the session has used.
    pub fn tokens(&self) -> Usage {
        self.tokens
    }

    /// What that cost, and the budget.
    pub fn spending(&self) -> Spending {
        self.spending
    }

    /// What becomes of the next event of the log. A client's event comes out twice: without
    /// `processed_at` when it arrives, with it when the loop took it in.
    pub fn feed(&mut self, event: &Event) -> Vec<WireEvent> {
        let mut out = Out { event, place: 0, events: Vec::new() };
        let idle = matches!(event.body, Body::StatusIdle { .. });
        if !idle && let Some(usage) = self.usage.take() {
            self.usage_event(&usage, &mut out);
        }
        self.spending.take(&event.body);
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
            Body::SessionUpdated { agent, title, metadata, budget_cents } => {
                if let Some(agent) = agent {
                    self.agent = agent_name(agent);
                }
                let fields = updated(agent.as_ref(), title, metadata, *budget_cents);
                out.push("session.updated", fields);
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
                self.tokens += ended.usage;
                self.spending.request_ended(ended);
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
            Body::ToolResult(result) => {
                let (kind, body) = tool_result(result);
                out.push(kind, body);
            }
            Body::Error { error, message, retry, mcp_server } => {
                let mut body = session_error(*error, message, *retry);
                if let Some(server) = mcp_server {
                    body["error"]["mcp_server_name"] = json!(server);
                }
                out.push("session.error", body);
            }
            Body::Summary(_) => out.push("agent.thread_context_compacted", json!({})),
            Body::ToolStarted { .. }
            | Body::ProfileChanged { .. }
            | Body::McpListed { .. }
            | Body::Note(_) => {}
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
        let usage = session_usage(usage, &self.spending, self.active.millis_at(&event.time));
        let budget = budget::wire(self.spending.budget_cents());
        out.push_as(&event.id, "session.usage", json!({ "usage": usage, "budget": budget }));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::event::{RequestEnded, StopReason};

    /// Events of one session, one second apart.
    fn log(bodies: Vec<(&str, Body)>) -> Vec<Event> {
        let event = |(at, (id, body)): (usize, (&str, Body))| Event {
            seq: at as u64 + 1,
            id: id.to_owned(),
            time: format!("2026-01-01T00:00:{:02}.000Z", at + 1),
            body,
        };
        bodies.into_iter().enumerate().map(event).collect()
    }

    fn turn() -> Vec<Event> {
        let text = || vec![json!({ "type": "text", "text": "hi" })];
        let ended = RequestEnded {
            stop_reason: Some("end_turn".into()),
            usage: Usage { input_tokens: 3, ..Usage::default() },
            ..RequestEnded::new("sevt_start")
        };
        let started = Body::ModelRequestStarted {
            model: "m".into(),
            profile: "p".into(),
            from: 0,
            summary: false,
        };
        log(vec![
            ("sevt_user", Body::UserMessage { content: text() }),
            ("sevt_run", Body::StatusRunning {}),
            ("sevt_proc", Body::Processed { events: vec!["sevt_user".into()] }),
            ("sevt_start", started),
            ("sevt_say", Body::AgentMessage { request: "sevt_start".into(), content: text() }),
            ("sevt_end", Body::ModelRequestEnded(ended)),
            ("sevt_usage", Body::Usage { usage: Usage::default() }),
            (
                "sevt_idle",
                Body::StatusIdle { stop_reason: StopReason::EndTurn, stop_details: None },
            ),
        ])
    }

    fn kinds(events: &[WireEvent]) -> Vec<&str> {
        events.iter().map(|event| event.kind).collect()
    }

    #[test]
    fn a_normal_turn_comes_out_in_the_documented_order() {
        let mut fold = Fold::new("sesn_abc");
        let wires: Vec<WireEvent> = turn().iter().flat_map(|event| fold.feed(event)).collect();

        assert_eq!(
            kinds(&wires),
            [
                "user.message",
                "session.status_running",
                "session.thread_status_running",
                "user.message",
                "span.model_request_start",
                "agent.message",
                "span.model_request_end",
                "session.thread_status_idle",
                "session.usage",
                "session.status_idle",
            ]
        );
        assert_eq!(wires[0].id, wires[3].id);
        assert_eq!(wires[0].body["processed_at"], Value::Null);
        assert_eq!(wires[3].body["processed_at"], "2026-01-01T00:00:03.000Z");
        assert_eq!(wires[2].body["session_thread_id"], "sthr_abc");
        assert_eq!(wires[8].body["usage"]["active_seconds"], 6.0);
        assert_eq!(wires[9].body["stop_reason"]["type"], "end_turn");
    }

    #[test]
    fn every_event_has_its_own_id_and_places_only_grow() {
        let mut fold = Fold::new("sesn_abc");
        let wires: Vec<WireEvent> = turn().iter().flat_map(|event| fold.feed(event)).collect();
        let listed: Vec<&WireEvent> = wires.iter().filter(|w| w.processed_at.is_some()).collect();

        let mut ids: Vec<&str> = listed.iter().map(|wire| wire.id.as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), listed.len());
        assert!(listed.windows(2).all(|pair| pair[0].place < pair[1].place));
        assert!(listed.windows(2).all(|pair| pair[0].processed_at <= pair[1].processed_at));
    }

    #[test]
    fn what_waits_is_last_and_usage_without_idle_is_not_lost() {
        let mut fold = Fold::new("sesn_abc");
        let events = log(vec![
            ("sevt_run", Body::StatusRunning {}),
            ("sevt_usage", Body::Usage { usage: Usage::default() }),
            ("sevt_stop", Body::UserInterrupt {}),
        ]);

        let wires: Vec<WireEvent> = events.iter().flat_map(|event| fold.feed(event)).collect();

        assert_eq!(kinds(&wires)[2..], ["session.usage", "user.interrupt"]);
        assert_eq!(kinds(&fold.queued()), ["user.interrupt"]);
        assert_eq!(fold.finish(), []);
    }
}
