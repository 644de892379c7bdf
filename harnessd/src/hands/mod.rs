//! The hands: whatever carries out a tool call. One interface; a hand that dies is a failed call.
//!
//! A hand never decides whether a call may run and never repeats one: the log says what was
//! begun, the hand's own journal says what became of it.

mod mcp;
mod proxyd;
mod sandbox;
mod scrub;

use futures_util::future::BoxFuture;
use ipc::fault::Fault;
use ipc::sandbox::Execute;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::log::{CallOutcome, ReceiptFacts};

pub use mcp::{Listed, McpHand, Trouble, TroubleKind, model_name};
pub use proxyd::Proxyd;
pub use sandbox::SandboxHand;
pub use scrub::Scrub;

/// How a call ended, as the log keeps it.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    pub content: Vec<Value>,
    pub is_error: bool,
    pub outcome: CallOutcome,
    pub receipt: Option<ReceiptFacts>,
}

impl Ended {
    /// A call that came to nothing, told to the model in one text.
    pub fn failed(outcome: CallOutcome, text: impl Into<String>) -> Self {
        Self { content: vec![text_block(text)], is_error: true, outcome, receipt: None }
    }
}

/// Why a call has no end that this process may record.
#[derive(Debug, thiserror::Error)]
pub enum HandError {
    /// The hand knows a higher fencing number, or another call under this id.
    #[error("{}", .0.text)]
    Conflict(Fault),
}

/// Something that executes tool calls.
pub trait Hand: Send + Sync {
    /// Identity of the journal that a call would go to now. It is written in the log before the
    /// call is sent, and no other journal may say later that it never heard of the call.
    fn journal(&self) -> BoxFuture<'_, Result<String, Fault>>;

    /// Runs a call, or joins it, or fetches its result: the call's id says which. `cancel` ends
    /// the call; dropping the future leaves it running, to be joined later.
    fn execute(
        &self,
        call: Execute,
        cancel: CancellationToken,
    ) -> BoxFuture<'_, Result<Ended, HandError>>;

    /// Ends what this hand keeps for a session, for good.
    fn forget<'a>(&'a self, session: &'a ipc::id::SessionId) -> BoxFuture<'a, Result<(), Fault>>;
}

pub(crate) fn text_block(text: impl Into<String>) -> Value {
    json!({ "type": "text", "text": text.into() })
}
