//! The models: one trait, one file for each provider, and the table that names them.
//!
//! A provider turns a prompt into one request and its stream into one whole answer. It never
//! decides whether to try again (the log does) and never hands out a part of a tool call.

mod answer;
mod egress;
mod messages;
mod scripted;
mod sse;

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::Value;

use crate::config::{ModelConfig, Provider};
use crate::context::Prompt;
use crate::log::{Failure, Usage};

pub use egress::Egress;
pub use scripted::{Script, ScriptError};

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The provider's id of it.
    pub message: Option<String>,
    /// The model, as it names itself.
    pub model: Option<String>,
    /// Complete content blocks, in order. Every `tool_use` has an id and an input.
    pub blocks: Vec<Value>,
    pub stop_reason: Option<String>,
    pub stop_details: Option<Value>,
    /// A tool call was incomplete and is left out.
    pub cut: bool,
    pub usage: Usage,
}

/// A sign of life while an answer is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Content block `block` begins.
    Started { block: usize, kind: BlockKind },
    /// More text of a text block.
    Text { block: usize, text: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    Text,
    Tool,
    /// Thinking, and whatever else only the model reads.
    Other,
}

/// Where deltas go. Called on the task that reads the answer; must not block.
pub type Sink<'a> = &'a (dyn Fn(Delta) + Send + Sync);

/// One way to ask a model.
pub trait Model: Send + Sync {
    /// Asks once. Dropping the future gives the request up.
    fn ask<'a>(&'a self, prompt: Prompt, sink: Sink<'a>) -> BoxFuture<'a, Result<Answer, Failure>>;
}

/// The models of the configuration.
pub struct Models {
    table: BTreeMap<String, ModelConfig>,
    scripts: BTreeMap<String, Arc<Script>>,
    egress: Arc<Egress>,
}

/// The name that stands for every model not named.
const ANY: &str = "*";

impl Models {
    /// `scripts` holds the loaded script of each model with provider `scripted`.
    pub fn new(
        table: BTreeMap<String, ModelConfig>,
        scripts: BTreeMap<String, Arc<Script>>,
        egress: Egress,
    ) -> Self {
        Self { table, scripts, egress: Arc::new(egress) }
    }

    pub fn names(&self) -> Vec<String> {
        self.table.keys().cloned().collect()
    }

    /// The provider for the model of this name.
    pub fn find(&self, name: &str) -> Option<Arc<dyn Model>> {
        let key = if self.table.contains_key(name) { name } else { ANY };
        let config = self.table.get(key)?;
        match &config.provider {
            Provider::Scripted { .. } => {
                let script = Arc::clone(self.scripts.get(key)?);
                Some(Arc::new(scripted::Scripted::new(script)))
            }
            Provider::Messages { endpoint, temperature } => Some(Arc::new(messages::Messages {
                egress: Arc::clone(&self.egress),
                endpoint: endpoint.clone(),
                model: config.model.clone().unwrap_or_else(|| name.to_owned()),
                max_tokens: config.max_tokens,
                temperature: *temperature,
            })),
        }
    }
}
