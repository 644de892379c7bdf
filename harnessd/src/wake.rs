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

use crate::context::{self, Profile};
use crate::engine::Parts;
use crate::fold;
use crate::hands::McpHand;
use crate::log::{
    Agent, Body, CallOutcome, Chain, Created, ErrorKind, Event, Failure, Guard, LogError, NewEvent,
    Note, Ownership, RequestEnded, Retry, StopReason, Tool, ToolResult,
};
use crate::state::State;
use crate::step::{self, PendingCall, Step, next_step};

mod answer;
mod mcp;
mod summary;
mod tools;
mod window;

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
    /// The log, folded as far as it was read.
    state: State,
    /// The event at which the state was last stored.
    stored_at: u64,
    created: Created,
    /// Whose session it is here; one that was imported may have been somebody else's before.
    owner: String,
    /// The agent in force.
    agent: Agent,
    /// What the MCP servers were found to have; part of the agent's tools as well.
    mcp_tools: Vec<Tool>,
    mcp: Option<Arc<McpHand>>,
    /// What the model is shown, once it was asked.
    window: Option<window::Window>,
    /// The log says that nothing is left to do.
    settled: bool,
    _ownership: Ownership,
}

/// Runs a session that this process owns until it is idle.
pub(crate) async fn wake(parts: Arc<Parts>, ownership: Ownership) -> Result<(), WakeError> {
    let session = ownership.session().clone();
    let owner = parts.log.chain(&session).await?.owner;
    let state = fold::load(&parts.log, &session).await?;
    let no_session = || LogError::NoSession(session.clone());
    let first = parts.log.event(&session, 1).await?.ok_or_else(no_session)?;
    let Body::SessionCreated(created) = first.body else { return Err(no_session().into()) };
    let agent = match state.agent_at {
        0 | 1 => created.agent.clone(),
        seq => {
            let event = parts.log.event(&session, seq).await?;
            let agent = event.as_ref().and_then(context::agent_of);
            agent.cloned().ok_or_else(no_session)?
        }
    };
    let mcp = parts.models.egress().map(|egress| {
        let egress = egress.for_session(&created.policy, &owner, &session);
        Arc::new(McpHand::new(Arc::new(egress)))
    });
    let mut run = Run {
        parts,
        fence: ownership.fence,
        session,
        stored_at: state.seq,
        state,
        created,
        owner,
        agent,
        mcp_tools: Vec::new(),
        mcp,
        window: None,
        settled: false,
        _ownership: ownership,
    };
    if run.state.in_mid_turn() {
        tracing::info!(session = %run.session, fence = run.fence, "session recovered in mid-turn");
        let note = Note::Recovered { fence: run.fence, pid: std::process::id() };
        run.append(vec![Body::Note(note).into()]).await?;
    }
    if run.state.mcp_at > 0 {
        let listed = run.parts.log.event(&run.session, run.state.mcp_at).await?;
        if let Some(Body::McpListed { tools: Some(tools) }) = listed.map(|event| event.body) {
            run.put_mcp_tools(tools);
        }
    }
    let outcome = run.drive().await;
    if let Some(mcp) = &run.mcp {
        mcp.close();
    }
    outcome
}

impl Run {
    async fn drive(&mut self) -> Result<(), WakeError> {
        while self.advance().await? {}
        Ok(())
    }

    /// Does the next step. False when there is none.
    async fn advance(&mut self) -> Result<bool, WakeError> {
        if self.parts.stop.is_cancelled() {
            return Err(WakeError::Stopped);
        }
        self.catch_up().await?;
        match next_step(&self.state) {
            Step::Rest => return self.rest().await,
            Step::CloseRequest { request } => self.close_request(request).await?,
            Step::Interrupt { events, calls, idle } => {
                self.interrupt(events, calls, idle).await?;
            }
            Step::Begin { events } => {
                let mut batch: Vec<NewEvent> = vec![Body::StatusRunning {}.into()];
                batch.extend(processed(events));
                self.append_and_ask(batch).await?;
            }
            Step::Process { events } => self.append_and_ask(processed(events)).await?,
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
        let more = self.parts.log.since(&self.session, self.state.seq).await?;
        self.settled &= more.is_empty();
        for event in more {
            self.state.take(&event);
            if let Some(agent) = context::agent_of(&event) {
                self.agent = agent.clone();
                self.agent.tools.extend(self.mcp_tools.iter().cloned());
            }
            if let Body::McpListed { tools: Some(tools) } = &event.body {
                self.put_mcp_tools(tools.clone());
            }
            if let Some(window) = &mut self.window {
                window.push(event);
            }
        }
        if self.state.seq >= self.stored_at + fold::SNAPSHOT_EVERY {
            fold::save(&self.parts.log, &self.session, &self.state).await;
            self.stored_at = self.state.seq;
        }
        Ok(())
    }

    /// Appends as the owner; client events may have come in between.
    async fn append(&mut self, events: Vec<NewEvent>) -> Result<(), LogError> {
        let guard = Guard { fence: Some(self.fence), ..Guard::default() };
        self.parts.log.append(&self.session, guard, events).await?;
        self.catch_up().await
    }

    /// Appends as the owner, if nothing has come in between; else the next step decides anew.
    async fn append_if_last(&mut self, events: Vec<NewEvent>) -> Result<bool, LogError> {
        let (fence, last) = (Some(self.fence), Some(self.state.seq));
        let guard = Guard { fence, last, settles: true, ..Guard::default() };
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
        let message = "the process that asked the model ended before the answer came";
        let failure = Failure {
            // The server did nothing wrong: it is asked again at once, the first time.
            retry_after_ms: Some(0),
            ..Failure::new(ErrorKind::ModelRequestFailed, message, true)
        };
        let ended = RequestEnded { failure: Some(failure), ..RequestEnded::new(request) };
        Ok(self.append(vec![Body::ModelRequestEnded(ended).into()]).await?)
    }

    /// Goes idle: what came before, the usage, the status.
    async fn idle(
        &mut self,
        mut batch: Vec<NewEvent>,
        stop_reason: StopReason,
        stop_details: Option<serde_json::Value>,
    ) -> Result<(), WakeError> {
        batch.push(Body::Usage { usage: self.state.usage }.into());
        batch.push(Body::StatusIdle { stop_reason, stop_details }.into());
        if self.append_if_last(batch).await? {
            self.publish_head().await;
        }
        Ok(())
    }

    /// An error event for a turn that is given up, so that its reader learns why.
    fn reason_given_up(&self, reason: &StopReason) -> Vec<NewEvent> {
        let why = match reason {
            StopReason::RetriesExhausted => self.state.reason_given_up(),
            _ => None,
        };
        let error = |message: &str| Body::Error {
            error: ErrorKind::ModelRequestFailed,
            message: message.to_owned(),
            retry: Retry::Exhausted,
            mcp_server: None,
        };
        why.map(|why| error(why).into()).into_iter().collect()
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
        let proxyd = Arc::clone(&self.parts.proxyd);
        tokio::spawn(async move {
            let session = head.session.clone();
            if let Err(fault) = proxyd.head(head).await {
                tracing::warn!(%session, reason = %fault, "chain head not in the audit");
            }
        });
    }

    /// Completes when the client has interrupted.
    async fn interrupted(&self) -> Result<(), LogError> {
        if self.state.is_interrupted() {
            return Ok(());
        }
        let mut log = self.parts.log.subscribe(&self.session, self.state.seq);
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
