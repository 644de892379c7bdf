//! The models: one trait, one file for each provider, and the table that names them.
//!
//! A provider turns a prompt into one request and its stream into one whole answer. It never
//! decides whether to try again (the log does) and never hands out a part of a tool call.

mod answer;
mod chat;
pub(crate) mod egress;
mod exchange;
mod messages;
mod price;
mod scripted;
pub(crate) mod sse;

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::Value;

use crate::config::{ModelConfig, Provider};
use crate::context::{Profile, Prompt};
use crate::log::{Failure, Usage};

pub use egress::Egress;
pub use price::Price;
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
    egress: Option<Arc<Egress>>,
    /// Models that are not of the configuration.
    given: BTreeMap<String, (ModelConfig, Arc<dyn Model>)>,
}

/// The name that stands for every model not named.
const ANY: &str = "*";

impl Models {
    /// The way out that a session's own is made from; none in a process without proxyd.
    pub(crate) fn egress(&self) -> Option<&Egress> {
        self.egress.as_deref()
    }

    /// `scripts` holds the loaded script of each model with provider `scripted`.
    pub fn new(
        table: BTreeMap<String, ModelConfig>,
        scripts: BTreeMap<String, Arc<Script>>,
        egress: Egress,
    ) -> Self {
        Self { table, scripts, egress: Some(Arc::new(egress)), given: BTreeMap::new() }
    }

    /// Models made elsewhere, under their names.
    pub fn given(given: BTreeMap<String, (ModelConfig, Arc<dyn Model>)>) -> Self {
        Self { table: BTreeMap::new(), scripts: BTreeMap::new(), egress: None, given }
    }

    pub fn names(&self) -> Vec<String> {
        self.table.keys().chain(self.given.keys()).cloned().collect()
    }

    /// What the model of this name is shown of a session that says nothing else.
    pub fn profile(&self, name: &str) -> Profile {
        self.config(name).map_or(Profile::WholeLog, |(_, config)| config.context)
    }

    pub fn price(&self, name: &str) -> Option<Price> {
        self.config(name)?.1.price
    }

    fn config(&self, name: &str) -> Option<(&str, &ModelConfig)> {
        if let Some((key, (config, _))) = self.given.get_key_value(name) {
            return Some((key, config));
        }
        let found = self.table.get_key_value(name).or_else(|| self.table.get_key_value(ANY));
        found.map(|(key, config)| (key.as_str(), config))
    }

    /// The provider for the model of this name.
    pub fn find(&self, name: &str) -> Option<Arc<dyn Model>> {
        if let Some((_, model)) = self.given.get(name) {
            return Some(Arc::clone(model));
        }
        let (key, config) = self.config(name)?;
        let server = |endpoint: &http::Uri, temperature: Option<f64>| {
            Some(exchange::Server {
                egress: Arc::clone(self.egress.as_ref()?),
                endpoint: endpoint.clone(),
                model: config.model.clone().unwrap_or_else(|| name.to_owned()),
                max_tokens: config.max_tokens,
                temperature,
                stall: config.stall,
            })
        };
        match &config.provider {
            Provider::Scripted { .. } => {
                let script = Arc::clone(self.scripts.get(key)?);
                Some(Arc::new(scripted::Scripted::new(script)))
            }
            Provider::Messages { endpoint, temperature } => {
                Some(Arc::new(messages::Messages(server(endpoint, *temperature)?)))
            }
            Provider::Chat { endpoint, temperature } => {
                Some(Arc::new(chat::Chat(server(endpoint, *temperature)?)))
            }
        }
    }
}
