//! The hand `sandbox`: tool calls in sandboxes, made by sandboxd when the first call needs one.
//!
//! A call is one long request. When the connection breaks, the same call is asked for again under
//! the same id: sandboxd joins it, or hands out its receipt, or says that the outcome is unknown.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use ipc::fault::{Code, Fault};
use ipc::http::Client;
use ipc::id::{CallId, SessionId};
use ipc::sandbox::{CallReport, Content, Execute, Health, Outcome, Receipt};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Ended, Hand, HandError, text_block};
use crate::log::{CallOutcome, ReceiptFacts};

/// How long sandboxd may be away before a call is given up: a restart takes a second or two.
const AWAY_MAX: Duration = Duration::from_secs(60);
/// How long a call that has not been sent waits for sandboxd.
const BEGIN_MAX: Duration = Duration::from_secs(20);
/// How long a cancelled call may take to end.
const CANCEL_MAX: Duration = Duration::from_secs(10);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// sandboxd, over its socket.
pub struct SandboxHand {
    client: Client,
}

impl SandboxHand {
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    async fn journal(&self) -> Result<String, Fault> {
        let deadline = Instant::now() + BEGIN_MAX;
        let mut pause = PAUSE_MIN;
        loop {
            match self.client.get::<Health>("/v1/health").await {
                Ok(health) => return Ok(health.journal),
                Err(fault) if is_passing(&fault) && Instant::now() + pause < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    async fn execute(&self, call: Execute, cancel: CancellationToken) -> Result<Ended, HandError> {
        if cancel.is_cancelled() && self.never_began(&call).await {
            let text = "interrupted by the user before the call began";
            return Ok(Ended::failed(CallOutcome::Cancelled, text));
        }
        let ask = self.ask(&call);
        tokio::pin!(ask);
        tokio::select! {
            ended = &mut ask => return ended,
            () = cancel.cancelled() => {}
        }
        let end = async {
            self.cancel(&call.call).await;
            ask.await
        };
        match tokio::time::timeout(CANCEL_MAX, end).await {
            Ok(ended) => ended,
            Err(_) => Ok(Ended::failed(
                CallOutcome::OutcomeUnknown,
                "the call was cancelled and did not end in 10 s: whether it did its work is \
                 unknown",
            )),
        }
    }

    /// Asks until there is an answer, or sandboxd was away too long.
    async fn ask(&self, call: &Execute) -> Result<Ended, HandError> {
        let mut away_since = None;
        let mut pause = PAUSE_MIN;
        loop {
            let fault = match self.client.post::<_, Receipt>("/v1/execute", call).await {
                Ok(receipt) => return Ok(ended(receipt)),
                Err(fault) => fault,
            };
            if fault.code == Code::Conflict {
                return Err(HandError::Conflict(fault));
            }
            if !is_passing(&fault) {
                return Ok(Ended::failed(CallOutcome::Refused, fault.lines()));
            }
            let since = *away_since.get_or_insert_with(Instant::now);
            if since.elapsed() > AWAY_MAX {
                return Ok(given_up(&fault));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Whether no process of ours has sent the call: it is not in the journal it was meant for.
    async fn never_began(&self, call: &Execute) -> bool {
        let path = format!("/v1/calls/{}", call.call);
        match self.client.get(&path).await {
            Ok(CallReport::Unknown { journal }) => call.journal.as_ref() == Some(&journal),
            _ => false,
        }
    }

    async fn cancel(&self, call: &CallId) {
        let path = format!("/v1/calls/{call}/cancel");
        let outcome: Result<Value, Fault> = self.client.post(&path, &json!({})).await;
        if let Err(fault) = outcome {
            tracing::warn!(%call, reason = %fault, "cannot cancel a tool call");
        }
    }

    async fn forget(&self, session: &SessionId) -> Result<(), Fault> {
        let path = format!("/v1/sessions/{session}");
        match self.client.delete::<Value>(&path).await {
            Err(fault) if fault.code != Code::NotFound => Err(fault),
            _ => Ok(()),
        }
    }
}

impl Hand for SandboxHand {
    fn journal(&self) -> BoxFuture<'_, Result<String, Fault>> {
        self.journal().boxed()
    }

    fn execute(
        &self,
        call: Execute,
        cancel: CancellationToken,
    ) -> BoxFuture<'_, Result<Ended, HandError>> {
        self.execute(call, cancel).boxed()
    }

    fn forget<'a>(&'a self, session: &'a SessionId) -> BoxFuture<'a, Result<(), Fault>> {
        self.forget(session).boxed()
    }
}

/// Faults behind which the call may still be running.
fn is_passing(fault: &Fault) -> bool {
    matches!(fault.code, Code::Unavailable | Code::Internal | Code::Busy)
}

fn given_up(fault: &Fault) -> Ended {
    match fault.code {
        Code::Busy => Ended::failed(CallOutcome::Refused, fault.lines()),
        _ => Ended::failed(
            CallOutcome::OutcomeUnknown,
            format!(
                "sandboxd was lost during this call: whether it did its work is unknown; check \
                 before you repeat it ({})",
                fault.text
            ),
        ),
    }
}

fn ended(receipt: Receipt) -> Ended {
    let outcome = match receipt.outcome {
        Outcome::Finished => CallOutcome::Finished,
        Outcome::TimedOut => CallOutcome::TimedOut,
        Outcome::OutOfMemory => CallOutcome::OutOfMemory,
        Outcome::Cancelled => CallOutcome::Cancelled,
        Outcome::OutcomeUnknown => CallOutcome::OutcomeUnknown,
        Outcome::Refused => CallOutcome::Refused,
    };
    let mut content: Vec<Value> = receipt.content.into_iter().map(block).collect();
    if content.is_empty() {
        content.push(text_block("(no output)"));
    }
    let facts = ReceiptFacts {
        sandbox: receipt.sandbox,
        exit_code: receipt.exit_code,
        signal: receipt.signal,
        output_bytes: receipt.output_bytes,
        spill: receipt.spill,
        started_at: receipt.started_at,
        duration_ms: receipt.duration_ms,
        provision_us: receipt.provision_us,
        layers: receipt.layers,
        journal: receipt.journal,
        masked: 0,
    };
    Ended { content, is_error: receipt.is_error, outcome, receipt: Some(facts) }
}

fn block(content: Content) -> Value {
    let (kind, media_type, data) = match content {
        Content::Text { text } => return text_block(text),
        Content::Image { media_type, data } => ("image", media_type, data),
        Content::Document { media_type, data } => ("document", media_type, data),
    };
    let source = json!({ "type": "base64", "media_type": media_type, "data": data });
    json!({ "type": kind, "source": source })
}
