//! `next_step`: the whole decision of what a session needs next. Pure: events in, one step out.
//!
//! It keeps no state of its own, so any process that reads the log comes to the same decision,
//! whatever happened to the one before. Each step is finished by one append; a crash between two
//! appends leaves a log from which the same or the next step follows, and never a tool call
//! without its result when the model is asked again.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::log::{
    Body, Event, HandKind, Permission, RequestEnded, Status, StopReason, ToolUse, Usage,
};

/// Requests in a row that may fail before a turn is given up.
pub const FAILURES_MAX: u32 = 6;
/// First wait between two tries; it doubles from one to the next.
const BACKOFF_MS: u64 = 500;
/// Longest wait that we choose ourselves.
const BACKOFF_MS_MAX: u64 = 30_000;
/// Longest wait that a provider may ask for; beyond it the turn ends instead.
pub const RETRY_AFTER_MS_MAX: u64 = 120_000;

/// What must happen next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing: the session waits for its client, or is over.
    Rest,
    /// A model request was left open by a process that ended: close it.
    CloseRequest { request: String },
    /// Stop the turn: end these calls, then take these client events in and go idle.
    Interrupt { events: Vec<String>, calls: Vec<PendingCall>, idle: bool },
    /// Begin a turn, or go on with it: take these client events in.
    Begin { events: Vec<String> },
    /// Take these client events in; the turn is under way already.
    Process { events: Vec<String> },
    /// Answer these calls with an error: they may not run.
    Refuse { calls: Vec<(PendingCall, String)> },
    /// Run these calls.
    RunTools { calls: Vec<PendingCall> },
    /// Wait for the client to answer these tool uses; take the confirmations in.
    RequireAction { events: Vec<String>, tool_uses: Vec<String> },
    /// Ask the model; after `wait_ms`, when it failed before.
    CallModel { wait_ms: u64 },
    /// End the turn.
    Finish { stop_reason: StopReason, stop_details: Option<serde_json::Value> },
}

/// A tool call without a result.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingCall {
    /// Id of the `ToolUse` event.
    pub tool_use: String,
    pub used: ToolUse,
    /// The journal it was sent to, if it was: it may have run.
    pub journal: Option<String>,
}

/// Decides what comes next after these events.
pub fn next_step(events: &[Event]) -> Step {
    let state = State::of(events);
    state.next()
}

/// Whether a turn was under way when the log ended: whoever takes it up now recovers it.
pub fn in_mid_turn(events: &[Event]) -> bool {
    matches!(State::of(events).status, Status::Running | Status::Rescheduling)
}

/// Whether the last failure put the turn off; going on says so.
pub fn is_rescheduling(events: &[Event]) -> bool {
    State::of(events).status == Status::Rescheduling
}

/// Whether an interrupt waits to be taken in.
pub fn is_interrupted(events: &[Event]) -> bool {
    State::of(events).interrupt().is_some()
}

/// How long to wait before the model is asked again once `failed` is in the log; `None` when it is
/// not asked again.
pub fn wait_after<'a>(events: &'a [Event], failed: &'a RequestEnded) -> Option<u64> {
    let mut state = State::of(events);
    state.end_request(failed);
    match state.call_model() {
        Step::CallModel { wait_ms } => Some(wait_ms),
        _ => None,
    }
}

/// Tokens used by the whole session.
pub fn usage(events: &[Event]) -> Usage {
    let mut sum = Usage::default();
    for event in events {
        if let Body::ModelRequestEnded(ended) = &event.body {
            sum += ended.usage;
        }
    }
    sum
}

/// What the log says, folded.
struct State<'a> {
    created: bool,
    status: Status,
    /// Client events that were not taken in yet, in order.
    queued: Vec<&'a Event>,
    /// Tool uses without a result, by their place in the log.
    pending: BTreeMap<u64, PendingCall>,
    /// Decisions of the client about tool uses: allowed, or why not.
    decisions: HashMap<&'a str, Result<(), String>>,
    /// The model request that began and did not end.
    open_request: Option<&'a str>,
    /// The model is to be asked as soon as no call is pending.
    model_due: bool,
    /// The last request that ended in this turn.
    ended: Option<&'a RequestEnded>,
    failures: u32,
    /// The tool uses that the client was last asked about.
    asked: HashSet<&'a str>,
}

impl<'a> State<'a> {
    fn of(events: &'a [Event]) -> Self {
        let mut state = Self {
            created: false,
            status: Status::Idle,
            queued: Vec::new(),
            pending: BTreeMap::new(),
            decisions: HashMap::new(),
            open_request: None,
            model_due: false,
            ended: None,
            failures: 0,
            asked: HashSet::new(),
        };
        for event in events {
            state.take(event);
        }
        state
    }

    fn take(&mut self, event: &'a Event) {
        if let Some(status) = event.body.status() {
            self.status = status;
        }
        if event.body.needs_processing() {
            self.queued.push(event);
        }
        match &event.body {
            Body::SessionCreated(_) => self.created = true,
            Body::UserToolConfirmation { tool_use, allow, deny_message } => {
                let decision = if *allow { Ok(()) } else { Err(rejection(deny_message)) };
                self.decisions.entry(tool_use).or_insert(decision);
            }
            Body::UserCustomToolResult { tool_use, .. } => self.settle(tool_use),
            Body::Processed { events } => self.process(events),
            Body::ModelRequestStarted { .. } => self.open_request = Some(&event.id),
            Body::ModelRequestEnded(ended) => self.end_request(ended),
            Body::ToolUse(used) => {
                let call =
                    PendingCall { tool_use: event.id.clone(), used: used.clone(), journal: None };
                self.pending.insert(event.seq, call);
            }
            Body::ToolStarted { call, journal, .. } => {
                let started = self.pending.values_mut().find(|c| c.used.call == *call);
                if let Some(started) = started {
                    started.journal.get_or_insert_with(|| journal.clone());
                }
            }
            Body::ToolResult(result) => self.settle(&result.tool_use),
            Body::StatusIdle { stop_reason, .. } => self.idle(stop_reason),
            Body::StatusRunning {} => self.asked.clear(),
            _ => {}
        }
    }

    fn settle(&mut self, tool_use: &str) {
        self.pending.retain(|_, call| call.tool_use != tool_use);
    }

    fn process(&mut self, ids: &[String]) {
        for event in self.queued.extract_if(.., |e| ids.contains(&e.id)) {
            if matches!(event.body, Body::UserMessage { .. }) {
                self.model_due = true;
                self.failures = 0;
                self.ended = None;
            }
        }
    }

    fn end_request(&mut self, ended: &'a RequestEnded) {
        self.open_request = None;
        self.ended = Some(ended);
        if ended.failure.is_some() {
            self.failures += 1;
            self.model_due = true;
            return;
        }
        self.failures = 0;
        // With tool uses pending the model is due again, behind their results; a paused turn is
        // to be sent back as it is.
        self.model_due =
            !self.pending.is_empty() || ended.stop_reason.as_deref() == Some("pause_turn");
    }

    fn idle(&mut self, reason: &'a StopReason) {
        self.asked.clear();
        if let StopReason::RequiresAction { events } = reason {
            self.asked.extend(events.iter().map(String::as_str));
        } else {
            self.model_due = false;
            self.ended = None;
            self.failures = 0;
        }
    }

    fn next(&self) -> Step {
        if !self.created || self.status == Status::Terminated {
            return Step::Rest;
        }
        if let Some(request) = self.open_request {
            return Step::CloseRequest { request: request.to_owned() };
        }
        self.interrupt().or_else(|| self.tools()).unwrap_or_else(|| self.turn())
    }

    fn queued(&self, which: impl Fn(&Body) -> bool) -> Vec<String> {
        self.queued.iter().filter(|e| which(&e.body)).map(|e| e.id.clone()).collect()
    }

    /// An interrupt goes before everything else.
    fn interrupt(&self) -> Option<Step> {
        let events = self.queued(|b| matches!(b, Body::UserInterrupt {}));
        if events.is_empty() {
            return None;
        }
        let calls: Vec<_> = self.pending.values().cloned().collect();
        let idle = self.status != Status::Idle || !calls.is_empty();
        Some(Step::Interrupt { events, calls, idle })
    }

    /// Calls that have no result yet come before the model and before new messages.
    fn tools(&self) -> Option<Step> {
        if self.pending.is_empty() {
            return None;
        }
        let confirmations = self.queued(|b| matches!(b, Body::UserToolConfirmation { .. }));
        let mut run = Vec::new();
        let mut refuse = Vec::new();
        let mut wait = Vec::new();
        for call in self.pending.values() {
            match self.verdict(call) {
                Verdict::Run => run.push(call.clone()),
                Verdict::Refuse(why) => refuse.push((call.clone(), why)),
                Verdict::Wait => wait.push(call.tool_use.clone()),
            }
        }
        let waiting = self.status == Status::Idle;
        if waiting && wait.is_empty() {
            return Some(Step::Begin { events: confirmations });
        }
        if waiting {
            let same = wait.len() == self.asked.len()
                && wait.iter().all(|id| self.asked.contains(id.as_str()));
            if same && confirmations.is_empty() {
                return Some(Step::Rest);
            }
            return Some(Step::RequireAction { events: confirmations, tool_uses: wait });
        }
        if !confirmations.is_empty() {
            return Some(Step::Process { events: confirmations });
        }
        if !refuse.is_empty() {
            return Some(Step::Refuse { calls: refuse });
        }
        if !run.is_empty() {
            return Some(Step::RunTools { calls: run });
        }
        Some(Step::RequireAction { events: Vec::new(), tool_uses: wait })
    }

    fn verdict(&self, call: &PendingCall) -> Verdict {
        let used = &call.used;
        let decision = self.decisions.get(call.tool_use.as_str());
        match (used.permission, decision, used.hand) {
            (Permission::Deny, _, _) => {
                let why = used.reason.clone().unwrap_or_else(|| "this tool may not be used".into());
                Verdict::Refuse(why)
            }
            (Permission::Ask, None, _) | (_, _, HandKind::Client) => Verdict::Wait,
            (Permission::Ask, Some(Err(why)), _) => Verdict::Refuse(why.clone()),
            (Permission::Ask, Some(Ok(())), _) | (Permission::Allow, ..) => Verdict::Run,
        }
    }

    /// No call is pending: the model, new messages, or the end of the turn.
    fn turn(&self) -> Step {
        // Confirmations that nothing waits for (any more) are taken in and change nothing.
        let stray = self.queued(|b| matches!(b, Body::UserToolConfirmation { .. }));
        let messages = self.queued(|b| matches!(b, Body::UserMessage { .. }));
        if self.status == Status::Idle {
            return match (messages.is_empty() && !self.model_due, stray.is_empty()) {
                (true, true) => Step::Rest,
                (true, false) => Step::Process { events: stray },
                (false, _) => Step::Begin { events: [stray, messages].concat() },
            };
        }
        if !stray.is_empty() {
            return Step::Process { events: stray };
        }
        if self.model_due {
            return self.call_model();
        }
        if !messages.is_empty() {
            return Step::Process { events: messages };
        }
        let (stop_reason, stop_details) = match self.ended {
            Some(e) if e.stop_reason.as_deref() == Some("refusal") => {
                (StopReason::Refusal, e.stop_details.clone())
            }
            Some(e) if e.cut => (StopReason::RetriesExhausted, None),
            _ => (StopReason::EndTurn, None),
        };
        Step::Finish { stop_reason, stop_details }
    }

    fn call_model(&self) -> Step {
        let exhausted =
            Step::Finish { stop_reason: StopReason::RetriesExhausted, stop_details: None };
        let Some(failure) = self.ended.and_then(|e| e.failure.as_ref()) else {
            return Step::CallModel { wait_ms: 0 };
        };
        let asked = failure.retry_after_ms.unwrap_or(0);
        if !failure.retryable || self.failures >= FAILURES_MAX || asked > RETRY_AFTER_MS_MAX {
            return exhausted;
        }
        let doublings = self.failures.saturating_sub(1).min(16);
        let ours = (BACKOFF_MS << doublings).min(BACKOFF_MS_MAX);
        Step::CallModel { wait_ms: asked.max(ours) }
    }
}

enum Verdict {
    Run,
    Refuse(String),
    Wait,
}

fn rejection(message: &Option<String>) -> String {
    match message {
        Some(message) => format!("the user rejected this call: {message}"),
        None => "the user rejected this call".to_owned(),
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
