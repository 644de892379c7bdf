//! What the model is shown of a session: chosen when it is asked, never stored.
//!
//! A [`Profile`] says where the context begins ([`profile`]); [`talk`] turns the events from there
//! on into messages that every server accepts, wherever the log was cut. The log stays whole
//! whatever a profile leaves out. The first part of what a profile makes from a growing log stays
//! the same byte by byte, so that prompt caches hit. Pure: no I/O, no clock.

mod profile;
mod replay;
mod talk;
mod tools;

use serde_json::Value;

use crate::log::{Agent, Body, Event};

pub use profile::{Cut, Profile, ProfileError};
pub use replay::{Replay, replay};

/// What a model is asked, before a provider gives it its own form.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    pub system: Option<String>,
    /// Tool definitions as the Messages API knows them.
    pub tools: Vec<Value>,
    /// Messages as the Messages API knows them; roles alternate.
    pub messages: Vec<Value>,
}

/// What stands at the end of a request for a summary.
const SUMMARISE: &str = "The conversation is about to be shortened: everything above will be \
    replaced by what you write now. Do not call a tool. Write a summary for yourself, from which \
    the work can go on without the original: the task and every instruction that still holds, \
    what was done and found (exact names, paths, values and errors that still matter), what \
    failed and why, and what comes next.";

/// The prompt from `cut` on. `events` are those that the cut asks for, in order: the whole window,
/// before it the client's words that it names, and its summary.
pub fn prompt(agent: &Agent, events: &[Event], cut: &Cut) -> Prompt {
    Prompt {
        system: agent.system.clone().filter(|text| !text.is_empty()),
        tools: agent.tools.iter().map(tools::definition).collect(),
        messages: talk::messages(events, cut, None),
    }
}

/// The same up to event `upto`, with a request to sum it up at its end.
pub fn summary_prompt(agent: &Agent, events: &[Event], cut: &Cut, upto: u64) -> Prompt {
    let end = events.partition_point(|event| event.seq < upto);
    let messages = talk::messages(&events[..end], cut, Some(SUMMARISE));
    Prompt { messages, ..prompt(agent, &[], cut) }
}

/// The agent that an event puts in force.
pub fn agent_of(event: &Event) -> Option<&Agent> {
    match &event.body {
        Body::SessionCreated(created) => Some(&created.agent),
        Body::SessionUpdated { agent, .. } => agent.as_ref(),
        _ => None,
    }
}
