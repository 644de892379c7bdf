//! `wake`: read the events, ask what comes next, do it, append, until the session is idle.
//!
//! An event is appended before anything acts on it: the answer before its tools run, *started*
//! before a call is sent. So whoever reads the log after a crash knows all that may have happened.
//! This process owns the session while it is here; every append carries the fencing number, and
//! the first one that is refused ends the run: another process has taken over.

use std::sync::Arc;
use std::time::Instant;

use ipc::id::SessionId;
use tokio_util::sync::CancellationToken;

use crate::context::Profile;
use crate::engine::Parts;
use crate::log::{
    Body, CallOutcome, Chain, Created, ErrorKind, Event, Failure, Guard, LogError, NewEvent, Note,
    Ownership, RequestEnded, Retry, StopReason, Tool, ToolResult, Usage,
};
use crate::step::{self, PendingCall, Step, next_step};

mod answer;
mod tools;

/// Why a run ended before the session was idle.
#[derive(Debug, thiserror::Error)]
pub enum WakeError {
    #[error(transparent)]
    Log(#[from] LogError),
    /// The daemon stops; whoever starts next goes on from the log.
    #[error("the daemon stops")]
    Stopped,
}

/// One run of one session, from taking it up to idle.
pub(crate) struct Run {
    parts: Arc<Parts>,
    session: SessionId,
    fence: u64,
    /// The whole log, as far as it was read.
    events: Vec<Event>,
    /// The log says that nothing is left to do.
    settled: bool,
    profile: Profile,
    _ownership: Ownership,
}

/// Runs a session that this process owns until it is idle.
pub(crate) async fn wake(parts: Arc<Parts>, ownership: Ownership) -> Result<(), WakeError> {
    let session = ownership.session().clone();
    let events = parts.log.all(&session).await?;
    let mut run = Run {
        parts,
        fence: ownership.fence,
        session,
        events,
        settled: false,
        profile: Profile::WholeLog,
        _ownership: ownership,
    };
    if step::in_mid_turn(&run.events) {
        tracing::info!(session = %run.session, fence = run.fence, "session recovered in mid-turn");
        let note = Note::Recovered { fence: run.fence, pid: std::process::id() };
        run.append(vec![Body::Note(note).into()]).await?;
    }
    while run.advance().await? {}
    Ok(())
}

impl Run {
    /// Does the next step. False when there is none.
    async fn advance(&mut self) -> Result<bool, WakeError> {
        if self.parts.stop.is_cancelled() {
            return Err(WakeError::Stopped);
        }
        self.catch_up().await?;
        match next_step(&self.events) {
            Step::Rest => return self.rest().await,
            Step::CloseRequest { request } => self.close_request(request).await?,
            Step::Interrupt { events, calls, idle } => {
                self.interrupt(events, calls, idle).await?;
            }
            Step::Begin { events } => {
                let mut batch: Vec<NewEvent> = vec![Body::StatusRunning {}.into()];
                batch.extend(processed(events));
                self.append(batch).await?;
            }
            Step::Process { events } => self.append(processed(events)).await?,
            Step::Refuse { calls } => self.refuse(calls).await?,
            Step::RunTools { calls } => self.run_tools(calls).await?,
            Step::RequireAction { events, tool_uses } => {
                let reason = StopReason::RequiresAction { events: tool_uses };
                self.idle(processed(events), reason, None).await?;
            }
            Step::CallModel { wait_ms } => self.call_model(wait_ms).await?,
            Step::Finish { stop_reason, stop_details } => {
                let batch = self.reason_given_up(&stop_reason);
                self.idle(batch, stop_reason, stop_details).await?;
            }
        }
        Ok(true)
    }

    async fn catch_up(&mut self) -> Result<(), LogError> {
        let more = self.parts.log.since(&self.session, self.last()).await?;
        self.settled &= more.is_empty();
        self.events.extend(more);
        Ok(())
    }

    fn last(&self) -> u64 {
        self.events.last().map_or(0, |e| e.seq)
    }

    /// Appends as the owner; client events may have come in between.
    async fn append(&mut self, events: Vec<NewEvent>) -> Result<(), LogError> {
        let guard = Guard { fence: Some(self.fence), ..Guard::default() };
        self.parts.log.append(&self.session, guard, events).await?;
        self.catch_up().await
    }

    /// Appends as the owner, if nothing has come in between; else the next step decides anew.
    async fn append_if_last(&mut self, events: Vec<NewEvent>) -> Result<bool, LogError> {
        let guard = Guard { fence: Some(self.fence), last: Some(self.last()), settles: true };
        match self.parts.log.append(&self.session, guard, events).await {
            Ok(_) => {
                self.catch_up().await?;
                self.settled = true;
                Ok(true)
            }
            Err(LogError::Moved(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Records that nothing is left to do, unless something has come in.
    async fn rest(&mut self) -> Result<bool, WakeError> {
        Ok(!self.settled && !self.append_if_last(Vec::new()).await?)
    }

    async fn close_request(&mut self, request: String) -> Result<(), WakeError> {
        let failure = Failure {
            error: ErrorKind::ModelRequestFailed,
            message: "the process that asked the model ended before the answer came".to_owned(),
            retryable: true,
            retry_after_ms: None,
        };
        let ended = failed_request(request, failure, 0);
        Ok(self.append(vec![Body::ModelRequestEnded(ended).into()]).await?)
    }

    /// Goes idle: what came before, the usage, the status.
    async fn idle(
        &mut self,
        mut batch: Vec<NewEvent>,
        stop_reason: StopReason,
        stop_details: Option<serde_json::Value>,
    ) -> Result<(), WakeError> {
        batch.push(Body::Usage { usage: step::usage(&self.events) }.into());
        batch.push(Body::StatusIdle { stop_reason, stop_details }.into());
        if self.append_if_last(batch).await? {
            self.publish_head().await;
        }
        Ok(())
    }

    /// An error event for a turn that is given up, so that its reader learns why.
    fn reason_given_up(&self, reason: &StopReason) -> Vec<NewEvent> {
        let cut = |e: &RequestEnded| e.cut && e.failure.is_none();
        let last = self.events.iter().rev().find_map(|event| match &event.body {
            Body::ModelRequestEnded(ended) => Some(ended),
            _ => None,
        });
        if *reason != StopReason::RetriesExhausted || !last.is_some_and(cut) {
            return Vec::new();
        }
        let message = "the model's answer was cut off by max-tokens in the middle of a tool call";
        vec![
            Body::Error {
                error: ErrorKind::ModelRequestFailed,
                message: message.to_owned(),
                retry: Retry::Exhausted,
            }
            .into(),
        ]
    }

    /// Gives the chain's head to proxyd's audit, so that a truncated log shows. Losing one head
    /// loses no protection of those before, so a proxyd that is away does not stop the session.
    async fn publish_head(&self) {
        let chain: Chain = match self.parts.log.chain(&self.session).await {
            Ok(chain) => chain,
            Err(error) => return tracing::warn!(%error, "cannot read the chain's head"),
        };
        let head = ipc::vault::Head {
            session: self.session.clone(),
            events: chain.events,
            head: chain.head,
        };
        let proxyd = self.parts.proxyd.clone();
        tokio::spawn(async move {
            let sent = proxyd.post::<_, serde_json::Value>("/v1/heads", &head).await;
            if let Err(fault) = sent {
                let session = head.session;
                tracing::warn!(%session, reason = %fault, "chain head not in the audit");
            }
        });
    }

    fn created(&self) -> Result<&Created, LogError> {
        self.events
            .iter()
            .find_map(|event| match &event.body {
                Body::SessionCreated(created) => Some(created),
                _ => None,
            })
            .ok_or_else(|| LogError::NoSession(self.session.clone()))
    }

    /// Completes when the client has interrupted.
    async fn interrupted(&self) -> Result<(), LogError> {
        if step::is_interrupted(&self.events) {
            return Ok(());
        }
        let mut log = self.parts.log.subscribe(&self.session, self.last());
        loop {
            let Some(events) = log.next().await? else { return Ok(()) };
            if events.iter().any(|e| matches!(e.body, Body::UserInterrupt {})) {
                return Ok(());
            }
        }
    }
}

fn processed(events: Vec<String>) -> Vec<NewEvent> {
    if events.is_empty() {
        return Vec::new();
    }
    vec![Body::Processed { events }.into()]
}

fn failed_request(request: String, failure: Failure, duration_ms: u64) -> RequestEnded {
    RequestEnded {
        request,
        failure: Some(failure),
        model: None,
        message: None,
        stop_reason: None,
        stop_details: None,
        cut: false,
        usage: Usage::default(),
        first_token_ms: None,
        duration_ms,
    }
}
