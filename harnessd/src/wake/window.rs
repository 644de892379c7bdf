//! The events that a context is made from, kept while a session runs and read no further back than
//! the context begins.

use super::*;
use crate::context::{Cut, Prompt};

/// Events in order: some that the cut names, then all from a place on.
pub(crate) struct Window {
    cut: Cut,
    /// Without gaps from here on.
    from: u64,
    events: Vec<Event>,
}

/// Where the client's words are.
const WORDS: &[&str] = &["user_message", "processed"];

impl Window {
    pub(super) fn push(&mut self, event: Event) {
        self.events.push(event);
    }
}

impl Run {
    pub(super) async fn prompt(&mut self, cut: Cut) -> Result<Prompt, LogError> {
        let window = self.show(cut).await?;
        let prompt = context::prompt(&self.agent, &window.events, &window.cut);
        self.window = Some(window);
        Ok(prompt)
    }

    pub(super) async fn summary_prompt(&mut self, cut: Cut, upto: u64) -> Result<Prompt, LogError> {
        let window = self.show(cut).await?;
        let prompt = context::summary_prompt(&self.agent, &window.events, &window.cut, upto);
        self.window = Some(window);
        Ok(prompt)
    }

    /// Takes the window out, made to hold what the cut asks for.
    async fn show(&mut self, cut: Cut) -> Result<Window, LogError> {
        let log = &self.parts.log;
        let from = cut.read_from.max(1);
        let mut tail = match self.window.take() {
            Some(window) if window.cut == cut => return Ok(window),
            Some(mut window) if window.from <= from => {
                window.events.retain(|event| event.seq >= from);
                window.events
            }
            _ => {
                let mut tail = log.since(&self.session, from - 1).await?;
                // What came in since is taken in by the next step, not by the window alone.
                tail.retain(|event| event.seq <= self.state.seq);
                tail
            }
        };
        let mut events = read_named(log, &self.session, &cut).await?;
        events.append(&mut tail);
        Ok(Window { cut, from, events })
    }
}

/// The events before the window that a cut names.
pub(crate) async fn read_named(
    log: &crate::log::Log,
    session: &SessionId,
    cut: &Cut,
) -> Result<Vec<Event>, LogError> {
    let mut events = Vec::new();
    if let Some(turn) = cut.turn {
        let before = turn.read_from.saturating_sub(1);
        events = log.of_kinds(session, WORDS, before, turn.seq).await?;
    }
    if let Some(seq) = cut.summary {
        events.extend(log.event(session, seq).await?);
    }
    events.retain(|event| event.seq < cut.read_from.max(1));
    events.sort_by_key(|event| event.seq);
    Ok(events)
}
