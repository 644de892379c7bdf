//! The hand `mcp`: tools of MCP servers that an agent names, reached through proxyd.
//!
//! It lives as long as one run of a session. A server keeps no journal that could be asked later,
//! so a call that another run has sent is never sent again: its outcome is unknown.

mod client;
mod rpc;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Uri;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::Ended;
use crate::log::CallOutcome;
use crate::model::Egress;
use client::Client;

pub use client::{Listed, Trouble, TroubleKind};
pub use rpc::model_name;

/// How long a server may take to hear that a call is cancelled.
const CANCEL_MAX: Duration = Duration::from_secs(2);

/// The MCP servers of one run.
pub struct McpHand {
    journal: String,
    egress: Arc<Egress>,
    clients: Mutex<BTreeMap<String, Arc<Client>>>,
}

impl McpHand {
    /// `egress` is the way out of this session.
    pub fn new(egress: Arc<Egress>) -> Self {
        let journal = format!("mcp-run-{}", ipc::id::random_text(16));
        Self { journal, egress, clients: Mutex::default() }
    }

    /// What stands for a journal in the log: only this run can say what became of a call.
    pub fn journal(&self) -> &str {
        &self.journal
    }

    /// The tools of the server at `url`.
    pub async fn tools(&self, url: &str) -> Result<Vec<Listed>, Trouble> {
        self.client(url)?.tools().await
    }

    /// Whether a server has said that its tools changed.
    pub fn take_changed(&self) -> bool {
        // All of them, so that none says it again for the same change.
        self.clients().values().fold(false, |changed, client| client.take_changed() | changed)
    }

    /// Sends a call that was marked as started under `journal`.
    pub async fn execute(
        &self,
        url: &str,
        tool: &str,
        input: &Value,
        journal: Option<&str>,
        cancel: CancellationToken,
    ) -> Ended {
        if journal != Some(self.journal.as_str()) {
            let text = "the process that sent this call ended before the answer came: whether it \
                        did its work is unknown; check before you repeat it";
            return Ended::failed(CallOutcome::OutcomeUnknown, text);
        }
        if cancel.is_cancelled() {
            let text = "interrupted by the user before the call began";
            return Ended::failed(CallOutcome::Cancelled, text);
        }
        let client = match self.client(url) {
            Ok(client) => client,
            Err(trouble) => return failed(&trouble),
        };
        let asked = AtomicU64::new(0);
        tokio::select! {
            answer = client.call(tool, input, &asked) => return match answer {
                Ok(result) => ended(&result),
                Err(trouble) => failed(&trouble),
            },
            () = cancel.cancelled() => {}
        }
        // The answer is awaited no longer, whether the server hears of it or not.
        let _ = tokio::time::timeout(CANCEL_MAX, client.cancel(&asked)).await;
        let text = "the call was cancelled by the user: whether it did its work is unknown";
        Ended::failed(CallOutcome::OutcomeUnknown, text)
    }

    /// Ends the sessions at the servers, in the background.
    pub fn close(&self) {
        for (_, client) in std::mem::take(&mut *self.clients()) {
            tokio::spawn(async move { client.close().await });
        }
    }

    fn client(&self, url: &str) -> Result<Arc<Client>, Trouble> {
        let mut clients = self.clients();
        if let Some(client) = clients.get(url) {
            return Ok(Arc::clone(client));
        }
        let parsed: Uri = url.parse().map_err(|e| Trouble {
            kind: TroubleKind::Connection,
            begun: false,
            text: format!("its address {url:?} is none: {e}"),
        })?;
        let client = Arc::new(Client::new(Arc::clone(&self.egress), parsed));
        clients.insert(url.to_owned(), Arc::clone(&client));
        Ok(client)
    }

    fn clients(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Arc<Client>>> {
        self.clients.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn ended(result: &Value) -> Ended {
    let (content, is_error) = rpc::content(result);
    Ended { content, is_error, outcome: CallOutcome::Finished, receipt: None }
}

fn failed(trouble: &Trouble) -> Ended {
    let Trouble { kind, begun, text } = trouble;
    if *kind == TroubleKind::Answered {
        return Ended::failed(CallOutcome::Finished, format!("the MCP server refused: {text}"));
    }
    if *begun {
        let text = format!(
            "the MCP server was lost during this call: whether it did its work is unknown; check \
             before you repeat it ({text})"
        );
        return Ended::failed(CallOutcome::OutcomeUnknown, text);
    }
    Ended::failed(CallOutcome::Refused, format!("the call did not reach the MCP server: {text}"))
}
