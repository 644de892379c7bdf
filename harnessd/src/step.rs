//! `next_step`: the whole decision of what a session needs next. Pure: a folded log in, one step
//! out.
//!
//! It knows nothing but the log, so any process that reads it comes to the same decision, whatever
//! happened to the one before. Each step is finished by one append; a crash between two
//! appends leaves a log from which the same or the next step follows, and never a tool call
//! without its result when the model is asked again.

use crate::log::{HandKind, Permission, Status, StopReason};
use crate::state::{State, Waiting};

pub use crate::state::PendingCall;

/// Requests in a row that may fail before a turn is given up.
pub const FAILURES_MAX: u32 = 6;
/// First wait between two tries; it doubles from one to the next.
const BACKOFF_MS: u64 = 500;
/// Longest wait that we choose ourselves.
const BACKOFF_MS_MAX: u64 = 30_000;
/// Longest wait that a provider may ask for; beyond it the turn ends instead.
pub const RETRY_AFTER_MS_MAX: u64 = 120_000;

/// Answers in a row that may be cut off before a turn is given up: the model was told each time.
pub const CUTS_MAX: u32 = 3;
/// Times in a row that a provider may pause a turn: each is ten rounds of its own tools.
pub const PAUSES_MAX: u32 = 20;

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

/// Decides what comes next.
pub fn next_step(state: &State) -> Step {
    state.next()
}

/// How long to wait before the model is asked again once `failed` is in the log; `None` when it is
/// not asked again.
pub fn wait_after(state: &State, failed: &crate::log::RequestEnded) -> Option<u64> {
    let mut state = state.clone();
    state.end_request(failed);
    match state.call_model() {
        Step::CallModel { wait_ms } => Some(wait_ms),
        _ => None,
    }
}

impl State {
    fn next(&self) -> Step {
        if !self.created || self.status == Status::Terminated {
            return Step::Rest;
        }
        if let Some(request) = &self.open_request {
            return Step::CloseRequest { request: request.id.clone() };
        }
        self.interrupt().or_else(|| self.tools()).unwrap_or_else(|| self.turn())
    }

    fn waiting(&self, kind: Waiting) -> Vec<String> {
        self.queued.iter().filter(|e| e.kind == kind).map(|e| e.id.clone()).collect()
    }

    /// An interrupt goes before everything else.
    fn interrupt(&self) -> Option<Step> {
        let events = self.waiting(Waiting::Interrupt);
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
        let confirmations = self.waiting(Waiting::Confirmation);
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
        let stray = self.waiting(Waiting::Confirmation);
        let messages = self.waiting(Waiting::Message);
        if self.status == Status::Idle {
            // A turn that waited for its client while the budget was spent says so when it goes on.
            let due = self.model_due && !self.spending.has_stopped();
            return match (messages.is_empty() && !due, stray.is_empty()) {
                (true, true) => Step::Rest,
                (true, false) => Step::Process { events: stray },
                (false, _) => Step::Begin { events: [stray, messages].concat() },
            };
        }
        if !stray.is_empty() {
            return Step::Process { events: stray };
        }
        // What the client said meanwhile goes to the model with the results; but a paused answer
        // goes back with nothing behind it.
        if !messages.is_empty() && !self.is_paused() {
            return Step::Process { events: messages };
        }
        if self.model_due {
            return self.call_model();
        }
        let (stop_reason, stop_details) = match &self.ended {
            Some(e) if e.stop_reason.as_deref() == Some("refusal") => {
                (StopReason::Refusal, e.stop_details.clone())
            }
            _ => (StopReason::EndTurn, None),
        };
        Step::Finish { stop_reason, stop_details }
    }

    pub(crate) fn call_model(&self) -> Step {
        let finish = |stop_reason| Step::Finish { stop_reason, stop_details: None };
        if self.spending.is_spent() {
            return finish(StopReason::BudgetReached);
        }
        let endless = self.cuts > CUTS_MAX || self.pauses > PAUSES_MAX;
        if self.stuck || endless {
            return finish(StopReason::RetriesExhausted);
        }
        let Some(failure) = self.ended.as_ref().and_then(|e| e.failure.as_ref()) else {
            return Step::CallModel { wait_ms: 0 };
        };
        if failure.overflow {
            return Step::CallModel { wait_ms: 0 };
        }
        if failure.retryable && failure.retry_after_ms == Some(0) && self.failures <= 1 {
            return Step::CallModel { wait_ms: 0 };
        }
        let asked = failure.retry_after_ms.unwrap_or(0);
        if !failure.retryable || self.failures >= FAILURES_MAX || asked > RETRY_AFTER_MS_MAX {
            return finish(StopReason::RetriesExhausted);
        }
        let doublings = self.failures.saturating_sub(1).min(16);
        let ours = (BACKOFF_MS << doublings).min(BACKOFF_MS_MAX);
        Step::CallModel { wait_ms: asked.max(ours) }
    }

    /// Why a turn is given up, where no failure in the log has said so.
    pub fn reason_given_up(&self) -> Option<&'static str> {
        if self.ended.as_ref().is_some_and(|e| e.failure.is_some()) {
            return None;
        }
        if self.stuck {
            return Some(
                "the conversation does not fit the model's context window, even at its shortest",
            );
        }
        if self.cuts > CUTS_MAX {
            return Some("the model's answers were cut off by the output limit again and again");
        }
        if self.pauses > PAUSES_MAX {
            return Some("the model's server paused the turn again and again");
        }
        None
    }
}

enum Verdict {
    Run,
    Refuse(String),
    Wait,
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
