//! Passes a tool's output through proxyd before it is stored: no secret value enters the log.
//!
//! The patterns never leave proxyd. If it does not answer, the output is withheld, not stored
//! unsearched (design, decision 18).

use std::sync::Arc;
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::vault::{ScrubReply, ScrubRequest};
use serde_json::Value;
use tokio::time::Instant;

use super::{Ended, Proxyd, text_block};

/// How long proxyd may be away before an output is withheld.
const AWAY_MAX: Duration = Duration::from_secs(30);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// proxyd's search for secret values.
pub struct Scrub {
    proxyd: Arc<dyn Proxyd>,
}

impl Scrub {
    pub fn new(proxyd: Arc<dyn Proxyd>) -> Self {
        Self { proxyd }
    }

    /// Masks secret values of `environment` in the output, or withholds it.
    pub async fn clean(&self, environment: &str, mut ended: Ended) -> Ended {
        let texts: Vec<String> =
            ended.content.iter_mut().flat_map(texts_of).map(|text| text.clone()).collect();
        if texts.is_empty() {
            return ended;
        }
        let count = texts.len();
        let request = ScrubRequest { environment: environment.to_owned(), texts };
        match self.ask(&request).await {
            Ok(reply) if reply.texts.len() == count => {
                let places = ended.content.iter_mut().flat_map(texts_of);
                for (place, clean) in places.zip(reply.texts) {
                    *place = clean;
                }
                if let Some(receipt) = &mut ended.receipt {
                    receipt.masked = reply.found;
                }
            }
            Ok(_) => withhold(&mut ended, "its answer does not fit the question"),
            Err(fault) => withhold(&mut ended, &fault.text),
        }
        ended
    }

    async fn ask(&self, request: &ScrubRequest) -> Result<ScrubReply, Fault> {
        let deadline = Instant::now() + AWAY_MAX;
        let mut pause = PAUSE_MIN;
        loop {
            match self.proxyd.scrub(request.clone()).await {
                Ok(reply) => return Ok(reply),
                Err(fault) if is_passing(&fault) && Instant::now() + pause < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                Err(fault) => return Err(fault),
            }
        }
    }
}

fn is_passing(fault: &Fault) -> bool {
    matches!(fault.code, Code::Unavailable | Code::Internal | Code::Busy)
}

fn withhold(ended: &mut Ended, why: &str) {
    tracing::error!(reason = why, "tool output withheld: it could not be searched for secrets");
    ended.content = vec![text_block(format!(
        "the output of this call was withheld: proxyd could not search it for secret values: {why}"
    ))];
    ended.is_error = true;
}

/// The texts of a block that a program in the sandbox has chosen.
fn texts_of(block: &mut Value) -> Vec<&mut String> {
    let Some(fields) = block.as_object_mut() else { return Vec::new() };
    let mut found = Vec::new();
    for (name, value) in fields.iter_mut() {
        match (name.as_str(), value) {
            ("text", Value::String(text)) => found.push(text),
            ("source", Value::Object(source)) => {
                if let Some(Value::String(data)) = source.get_mut("data") {
                    found.push(data);
                }
            }
            _ => {}
        }
    }
    found
}
