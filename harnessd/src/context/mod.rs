//! What the model is shown of a session: chosen when it is asked, never stored.
//!
//! A profile turns events into the request; the log stays whole whatever a profile leaves out. The
//! first part of what a profile makes from a growing log stays the same byte by byte, so that
//! prompt caches hit. Pure: no I/O, no clock.

mod tools;
mod whole_log;

use serde_json::Value;

use crate::log::{Agent, Body, Event};

/// What a model is asked, before a provider gives it its own form.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    pub system: Option<String>,
    /// Tool definitions as the Messages API knows them.
    pub tools: Vec<Value>,
    /// Messages as the Messages API knows them; roles alternate.
    pub messages: Vec<Value>,
}

/// A named, versioned way to choose. Its name stands in each request's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Everything that happened, in order.
    WholeLog,
}

impl Profile {
    pub fn name(self) -> &'static str {
        match self {
            Self::WholeLog => "whole-log/1",
        }
    }

    pub fn prompt(self, events: &[Event]) -> Prompt {
        let agent = agent(events);
        let messages = match self {
            Self::WholeLog => whole_log::messages(events),
        };
        Prompt {
            system: agent.and_then(|a| a.system.clone()).filter(|text| !text.is_empty()),
            tools: agent.map_or_else(Vec::new, |a| a.tools.iter().map(tools::definition).collect()),
            messages,
        }
    }
}

/// The agent in force at the end of these events.
pub fn agent(events: &[Event]) -> Option<&Agent> {
    events.iter().rev().find_map(|event| match &event.body {
        Body::SessionCreated(created) => Some(&created.agent),
        Body::SessionUpdated { agent, .. } => agent.as_ref(),
        _ => None,
    })
}
