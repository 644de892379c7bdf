//! What a log says, folded: all that the next step depends on, kept as the log grows.
//!
//! A fold takes one event at a time and never looks back, so a session costs what is new in it. It
//! can be stored as a snapshot and taken up again; the log stays the only truth, and a fold of the
//! whole log gives the same. What was said (texts, results) is not in it: that is read where a
//! context begins. Pure: no socket, no file, no time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::log::{
    Body, Event, Failure, HandKind, RequestEnded, Status, StopReason, ToolUse, Usage,
};
use crate::spending::Spending;

/// Places where a context may begin that are remembered; older ones are counted only. It bounds
/// both a snapshot and how far back a profile of the last answers can reach.
pub const MARKS_KEPT: usize = 512;
/// The stop reason of an answer that filled the model's window.
const WINDOW_FULL: &str = "model_context_window_exceeded";
/// The stop reason of a turn that the provider wants sent back as it is.
const PAUSED: &str = "pause_turn";

/// The folded log of one session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The last event that was folded.
    pub seq: u64,
    pub(crate) created: bool,
    pub(crate) status: Status,
    /// Client events that were not taken in yet, in order.
    pub(crate) queued: Vec<Queued>,
    /// Tool uses without a result, by their place in the log.
    pub(crate) pending: BTreeMap<u64, PendingCall>,
    /// Decisions of the client about pending tool uses: allowed, or why not.
    pub(crate) decisions: BTreeMap<String, Result<(), String>>,
    /// The model request that began and did not end.
    pub(crate) open_request: Option<OpenRequest>,
    /// The model is to be asked as soon as no call is pending.
    pub(crate) model_due: bool,
    /// The last request for an answer that ended in this turn.
    pub(crate) ended: Option<Ending>,
    pub(crate) failures: u32,
    /// Answers in a row that were cut off, and turns that were paused.
    pub(crate) cuts: u32,
    pub(crate) pauses: u32,
    /// The tool uses that the client was last asked about.
    pub(crate) asked: BTreeSet<String>,
    /// A call was sent to a sandbox: something may lie there.
    pub used_sandbox: bool,
    /// Place of the event with the latest tools of MCP servers; 0: none.
    pub(crate) mcp_at: u64,
    /// The MCP servers were asked for their tools in this turn.
    pub(crate) mcp_listed: bool,
    pub usage: Usage,
    pub(crate) spending: Spending,
    /// Place of the event that holds the agent in force.
    pub agent_at: u64,
    /// The context profile that was chosen for this session.
    pub profile: Option<String>,
    pub marks: VecDeque<Mark>,
    /// Marks that are not kept any more.
    pub marks_before: u64,
    /// Where the latest turn begins.
    pub turn: Option<Turn>,
    /// Tokens of the last request and its answer: what the context held then.
    pub context_tokens: u64,
    /// A context does not begin before this event: more was too much for the model.
    pub floor: u64,
    /// The context cannot be made shorter: the model refused its shortest form.
    pub(crate) stuck: bool,
    pub summary: Option<SummaryAt>,
    /// Summaries in a row that failed.
    pub(crate) summary_failures: u32,
}

/// A client event that waits to be taken in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    pub id: String,
    pub seq: u64,
    pub kind: Waiting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Waiting {
    Message,
    Interrupt,
    Confirmation,
}

/// A tool call without a result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PendingCall {
    /// Id of the `ToolUse` event.
    pub tool_use: String,
    pub used: ToolUse,
    /// The journal it was sent to, if it was: it may have run.
    pub journal: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpenRequest {
    pub id: String,
    pub seq: u64,
    /// First event of the context it was made from.
    pub from: u64,
    pub summary: bool,
}

/// What the next step needs of a request that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ending {
    pub failure: Option<Failure>,
    pub stop_reason: Option<String>,
    pub stop_details: Option<serde_json::Value>,
    pub cut: bool,
}

/// A place where a context may begin: no tool use before it has its result behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredMark", into = "StoredMark")]
pub struct Mark {
    /// The first event of it.
    pub seq: u64,
    /// Messages that are taken in behind `seq` may lie before it; none before this.
    pub read_from: u64,
    /// Begins with what the client said, not with an answer.
    pub begins_turn: bool,
    /// Tokens of the context before it.
    pub tokens: u64,
    /// The turn it is part of.
    pub turn: Option<Turn>,
}

/// The same in fewer bytes, since a snapshot holds many.
type StoredMark = (u64, u64, bool, u64, Option<(u64, u64)>);

impl From<Mark> for StoredMark {
    fn from(m: Mark) -> Self {
        (m.seq, m.read_from, m.begins_turn, m.tokens, m.turn.map(|t| (t.seq, t.read_from)))
    }
}

impl From<StoredMark> for Mark {
    fn from((seq, read_from, begins_turn, tokens, turn): StoredMark) -> Self {
        let turn = turn.map(|(seq, read_from)| Turn { seq, read_from });
        Self { seq, read_from, begins_turn, tokens, turn }
    }
}

/// Where the client's words that began a turn are: taken in at `seq`, said at `read_from` or later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    pub seq: u64,
    pub read_from: u64,
}

/// A summary in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SummaryAt {
    /// Its event.
    pub seq: u64,
    /// What it sums up lies before this event.
    pub upto: u64,
}

impl State {
    pub fn of(events: &[Event]) -> Self {
        let mut state = Self::default();
        for event in events {
            state.take(event);
        }
        state
    }

    /// Whether a turn was under way when the log ended: whoever takes it up now recovers it.
    pub fn in_mid_turn(&self) -> bool {
        matches!(self.status, Status::Running | Status::Rescheduling)
    }

    pub fn status(&self) -> Status {
        self.status
    }

    /// Whether the last failure put the turn off; going on says so.
    pub fn is_rescheduling(&self) -> bool {
        self.status == Status::Rescheduling
    }

    /// Whether an interrupt waits to be taken in.
    pub fn is_interrupted(&self) -> bool {
        self.queued.iter().any(|event| event.kind == Waiting::Interrupt)
    }

    /// Whether this tool use still waits for the client.
    pub fn awaits(&self, tool_use: &str) -> bool {
        self.pending.values().any(|call| call.tool_use == tool_use)
            && !self.decisions.contains_key(tool_use)
    }

    /// Whether a call has no result yet: it runs, is to run, or waits for the client.
    pub fn has_open_calls(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Takes the next event of the log.
    pub fn take(&mut self, event: &Event) {
        self.seq = event.seq;
        if self.status == Status::Idle && event.body.status() == Some(Status::Running) {
            self.mcp_listed = false;
        }
        if let Some(status) = event.body.status() {
            self.status = status;
        }
        self.spending.take(&event.body);
        match &event.body {
            Body::SessionCreated(_) => {
                self.created = true;
                self.agent_at = event.seq;
            }
            Body::SessionUpdated { agent: Some(_), .. } => self.agent_at = event.seq,
            Body::ProfileChanged { profile } => {
                self.profile = Some(profile.clone());
                (self.floor, self.stuck) = (0, false);
            }
            Body::UserMessage { .. } => self.queue(event, Waiting::Message),
            Body::UserInterrupt {} => self.queue(event, Waiting::Interrupt),
            Body::UserToolConfirmation { tool_use, allow, deny_message } => {
                self.queue(event, Waiting::Confirmation);
                let decision = if *allow { Ok(()) } else { Err(rejection(deny_message)) };
                self.decisions.entry(tool_use.clone()).or_insert(decision);
            }
            Body::UserCustomToolResult { tool_use, .. } => self.settle(tool_use),
            Body::Processed { events } => self.process(event.seq, events),
            Body::ModelRequestStarted { from, summary, .. } => {
                let (id, seq) = (event.id.clone(), event.seq);
                let (from, summary) = (*from, *summary);
                self.open_request = Some(OpenRequest { id, seq, from, summary });
            }
            Body::ModelRequestEnded(ended) => self.end_request(ended),
            Body::Summary(summary) => {
                self.summary = Some(SummaryAt { seq: event.seq, upto: summary.upto });
                self.summary_failures = 0;
                // What is summed up was in the context of the last answer; now it is not.
                self.context_tokens = 0;
            }
            Body::ToolUse(used) => {
                let call =
                    PendingCall { tool_use: event.id.clone(), used: used.clone(), journal: None };
                self.pending.insert(event.seq, call);
            }
            Body::ToolStarted { call, journal, .. } => {
                let started = self.pending.values_mut().find(|c| c.used.call == *call);
                let by_mcp = started.as_ref().is_some_and(|c| c.used.hand == HandKind::Mcp);
                self.used_sandbox |= !by_mcp;
                if let Some(started) = started {
                    started.journal.get_or_insert_with(|| journal.clone());
                }
            }
            Body::McpListed { tools } => {
                self.mcp_listed = true;
                if tools.is_some() {
                    self.mcp_at = event.seq;
                }
            }
            Body::ToolResult(result) => self.settle(&result.tool_use),
            Body::StatusIdle { stop_reason, .. } => self.idle(stop_reason),
            Body::StatusRunning {} => self.asked.clear(),
            _ => {}
        }
    }

    fn queue(&mut self, event: &Event, kind: Waiting) {
        self.queued.push(Queued { id: event.id.clone(), seq: event.seq, kind });
    }

    fn settle(&mut self, tool_use: &str) {
        self.pending.retain(|_, call| call.tool_use != tool_use);
        self.decisions.remove(tool_use);
    }

    /// The first event that a context must be read from when it begins at `seq`.
    fn read_from(&self, seq: u64) -> u64 {
        self.queued.iter().map(|event| event.seq).min().map_or(seq, |first| first.min(seq))
    }

    fn process(&mut self, seq: u64, ids: &[String]) {
        let read_from = self.read_from(seq);
        let mut said = false;
        self.queued.retain(|event| {
            let taken = ids.contains(&event.id);
            said |= taken && event.kind == Waiting::Message;
            !taken
        });
        // What comes in while the model is due already joins the turn, and is no new beginning:
        // not of the turn, not of the count of failures.
        if !said || self.model_due {
            return;
        }
        self.model_due = true;
        (self.failures, self.cuts, self.pauses, self.summary_failures) = (0, 0, 0, 0);
        (self.ended, self.stuck) = (None, false);
        let turn = Turn { seq, read_from };
        self.turn = Some(turn);
        let tokens = self.context_tokens;
        self.mark(Mark { seq, read_from, begins_turn: true, tokens, turn: Some(turn) });
    }

    fn mark(&mut self, mark: Mark) {
        self.marks.push_back(mark);
        if self.marks.len() > MARKS_KEPT {
            self.marks.pop_front();
            self.marks_before += 1;
        }
    }

    /// Takes the end of a request, whether it is in the log or about to be.
    pub(crate) fn end_request(&mut self, ended: &RequestEnded) {
        let open = self.open_request.take();
        self.usage += ended.usage;
        self.spending.request_ended(ended);
        if open.as_ref().is_some_and(|open| open.summary) {
            self.summary_failures += u32::from(ended.failure.is_some());
            return;
        }
        self.ended = Some(Ending {
            failure: ended.failure.clone(),
            stop_reason: ended.stop_reason.clone(),
            stop_details: ended.stop_details.clone(),
            cut: ended.is_cut(),
        });
        if let Some(failure) = &ended.failure {
            if failure.overflow {
                self.raise_floor(open.as_ref().map_or(0, |open| open.from));
            } else {
                self.failures += 1;
            }
            self.model_due = true;
            return;
        }
        self.failures = 0;
        let tokens = self.context_tokens;
        self.context_tokens = ended.usage.total();
        // The rest of a paused answer is no beginning: its tools began before it.
        if let Some(open) = open.as_ref().filter(|_| !self.is_paused()) {
            let (seq, read_from) = (open.seq, self.read_from(open.seq));
            self.mark(Mark { seq, read_from, begins_turn: false, tokens, turn: self.turn });
        }
        if ended.stop_reason.as_deref() == Some(WINDOW_FULL) {
            self.raise_floor(open.as_ref().map_or(0, |open| open.from));
        }
        let paused = ended.stop_reason.as_deref() == Some(PAUSED);
        self.pauses = if paused { self.pauses + 1 } else { 0 };
        self.cuts = if ended.is_cut() { self.cuts + 1 } else { 0 };
        // With tool uses pending the model is due again, behind their results; a paused turn is to
        // be sent back as it is; an answer that was cut off is to be given in another way.
        self.model_due = !self.pending.is_empty() || paused || ended.is_cut();
    }

    /// The context from `from` on was too long: leaves out half of what can be left out.
    fn raise_floor(&mut self, from: u64) {
        let behind: Vec<u64> = self.marks.iter().map(|m| m.seq).filter(|s| *s > from).collect();
        match behind.get(behind.len() / 2) {
            Some(seq) => self.floor = *seq,
            None => self.stuck = true,
        }
    }

    fn idle(&mut self, reason: &StopReason) {
        self.asked.clear();
        match reason {
            StopReason::RequiresAction { events } => self.asked.extend(events.iter().cloned()),
            // A greater budget lets the turn go on where it stopped.
            StopReason::BudgetReached => {}
            _ => {
                self.model_due = false;
                self.ended = None;
                (self.failures, self.cuts, self.pauses) = (0, 0, 0);
            }
        }
    }

    /// Whether the last answer is to be sent back as it is: nothing may come behind it.
    pub fn is_paused(&self) -> bool {
        self.pauses > 0
    }
}

impl RequestEnded {
    /// Whether the answer was cut off in a way that the model must be told about.
    pub fn is_cut(&self) -> bool {
        self.cut || (self.failure.is_none() && self.stop_reason.as_deref() == Some(WINDOW_FULL))
    }
}

fn rejection(message: &Option<String>) -> String {
    match message {
        Some(message) => format!("the user rejected this call: {message}"),
        None => "the user rejected this call".to_owned(),
    }
}
