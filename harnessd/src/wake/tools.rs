//! Runs tool calls and appends what became of them.
//!
//! *Started* is appended before any call is sent; each result as soon as it is there, after
//! proxyd has searched it. Calls of one answer run at the same time, but shell commands one after
//! another, as the model wrote them: they share one shell. A call that a former process started is
//! asked for again under its id and the journal it was sent to.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use ipc::sandbox::Execute;
use tokio::sync::oneshot;

use super::*;
use crate::hands::{Ended, HandError};
use crate::log::HandKind;

/// The tool whose calls share a shell.
const SHELL: &str = "bash";

impl Run {
    pub(super) async fn run_tools(&mut self, calls: Vec<PendingCall>) -> Result<(), WakeError> {
        let fresh: Vec<&PendingCall> = calls.iter().filter(|c| c.journal.is_none()).collect();
        if !fresh.is_empty() {
            let (by_mcp, others): (Vec<_>, Vec<_>) =
                fresh.into_iter().partition(|call| call.used.hand == HandKind::Mcp);
            let mut batch: Vec<NewEvent> =
                by_mcp.into_iter().map(|call| self.begin_mcp(call)).collect();
            if !others.is_empty() {
                let journal = tokio::select! {
                    biased;
                    journal = self.parts.hand.journal() => journal,
                    outcome = self.interrupted() => return Ok(outcome?),
                    () = self.parts.stop.cancelled() => return Err(WakeError::Stopped),
                };
                batch.extend(others.into_iter().map(|call| match &journal {
                    Ok(journal) => started(call, journal, self.fence),
                    Err(fault) => result(call, Ended::failed(CallOutcome::Refused, fault.lines())),
                }));
            }
            // The next step sees them as started, and sends them.
            return Ok(self.append(batch).await?);
        }
        let cancel = CancellationToken::new();
        self.execute(calls, &cancel, false).await
    }

    /// The beginning of an MCP call, or its end when this session reaches no server any more.
    fn begin_mcp(&self, call: &PendingCall) -> NewEvent {
        match &self.mcp {
            Some(hand) => started(call, hand.journal(), self.fence),
            None => {
                let text = "the agent of this session has no MCP servers any more";
                result(call, Ended::failed(CallOutcome::Refused, text))
            }
        }
    }

    /// Sends started calls and appends each result. `ending`: they are to be cancelled.
    async fn execute(
        &mut self,
        calls: Vec<PendingCall>,
        cancel: &CancellationToken,
        ending: bool,
    ) -> Result<(), WakeError> {
        let created = self.created.clone();
        let owner = self.owner.clone();
        let parts = Arc::clone(&self.parts);
        let session = self.session.clone();
        let mut shell: Option<oneshot::Receiver<()>> = None;
        let mut running: FuturesUnordered<_> = calls
            .into_iter()
            .map(|call| {
                let request = request(&call, &created, &owner, &session, self.fence);
                let (parts, policy) = (Arc::clone(&parts), created.policy.clone());
                let cancel = cancel.clone();
                let (done, next) = oneshot::channel();
                let way = self.mcp_way(&call);
                let before = (call.used.name == SHELL).then(|| shell.replace(next)).flatten();
                async move {
                    if let Some(before) = before {
                        // An error says the same: the one before has ended.
                        let _ = before.await;
                    }
                    let outcome = match way {
                        Some((hand, url, tool)) => {
                            let journal = call.journal.as_deref();
                            Ok(hand.execute(&url, &tool, &call.used.input, journal, cancel).await)
                        }
                        None if call.used.hand == HandKind::Mcp => Ok(unreachable_mcp()),
                        None => parts.hand.execute(request, cancel).await,
                    };
                    drop(done);
                    match outcome {
                        Ok(ended) => (call, Ok(parts.scrub.clean(&policy, ended).await)),
                        Err(error) => (call, Err(error)),
                    }
                }
            })
            .collect();
        if ending {
            cancel.cancel();
        }
        while !running.is_empty() {
            let next = tokio::select! {
                biased;
                next = running.next() => next,
                outcome = self.interrupted(), if !cancel.is_cancelled() => {
                    outcome?;
                    cancel.cancel();
                    continue;
                }
                () = parts.stop.cancelled() => return Err(WakeError::Stopped),
            };
            let Some((call, outcome)) = next else { break };
            let ended = match outcome {
                Ok(ended) => ended,
                Err(HandError::Conflict(fault)) => self.conflict(fault).await?,
            };
            tracing::info!(
                session = %self.session,
                call = %call.used.call,
                tool = %call.used.name,
                outcome = ?ended.outcome,
                "tool call ended"
            );
            let result = result(&call, ended);
            self.append(vec![result]).await?;
        }
        Ok(())
    }

    /// A conflict means that another process has taken over, unless the log says otherwise.
    async fn conflict(&self, fault: ipc::fault::Fault) -> Result<Ended, LogError> {
        let chain = self.parts.log.chain(&self.session).await?;
        if chain.fence != self.fence {
            return Err(LogError::Fenced { session: self.session.clone(), ours: self.fence });
        }
        Ok(Ended::failed(CallOutcome::Refused, fault.lines()))
    }

    pub(super) async fn refuse(
        &mut self,
        calls: Vec<(PendingCall, String)>,
    ) -> Result<(), WakeError> {
        let results = calls
            .iter()
            .map(|(call, why)| result(call, Ended::failed(CallOutcome::Denied, why)))
            .collect();
        Ok(self.append(results).await?)
    }

    /// Ends the turn: started calls are cancelled, the others never begin.
    pub(super) async fn interrupt(
        &mut self,
        events: Vec<String>,
        calls: Vec<PendingCall>,
        idle: bool,
    ) -> Result<(), WakeError> {
        let (started, others): (Vec<_>, Vec<_>) =
            calls.into_iter().partition(|call| call.journal.is_some());
        if !started.is_empty() {
            let cancel = CancellationToken::new();
            self.execute(started, &cancel, true).await?;
        }
        let text = "interrupted by the user before the call began";
        let mut batch: Vec<NewEvent> = others
            .iter()
            .map(|call| result(call, Ended::failed(CallOutcome::Cancelled, text)))
            .collect();
        batch.extend(processed(events));
        if idle {
            batch.push(Body::Usage { usage: self.state.usage }.into());
            let stop_reason = StopReason::EndTurn;
            batch.push(Body::StatusIdle { stop_reason, stop_details: None }.into());
        }
        self.append(batch).await?;
        if idle {
            self.publish_head().await;
        }
        Ok(())
    }
}

fn request(
    call: &PendingCall,
    created: &Created,
    owner: &str,
    session: &SessionId,
    fence: u64,
) -> Execute {
    Execute {
        call: call.used.call.clone(),
        session: session.clone(),
        owner: owner.to_owned(),
        fence,
        journal: call.journal.clone(),
        environment: created.policy.clone(),
        workspace: created.workspace.clone(),
        tool: call.used.name.clone(),
        input: call.used.input.clone(),
    }
}

/// Nothing here leads to a server: a call that was begun elsewhere has no end that could be known.
fn unreachable_mcp() -> Ended {
    let text = "the process that sent this call ended before the answer came: whether it did its \
                work is unknown; check before you repeat it";
    Ended::failed(CallOutcome::OutcomeUnknown, text)
}

fn started(pending: &PendingCall, journal: &str, fence: u64) -> NewEvent {
    let call = pending.used.call.clone();
    Body::ToolStarted { call, journal: journal.to_owned(), fence }.into()
}

fn result(call: &PendingCall, ended: Ended) -> NewEvent {
    let Ended { content, is_error, outcome, receipt } = ended;
    NewEvent::new(Body::ToolResult(ToolResult {
        tool_use: call.tool_use.clone(),
        call: call.used.call.clone(),
        content,
        is_error,
        outcome,
        receipt,
        mcp: call.used.mcp.is_some(),
    }))
}
