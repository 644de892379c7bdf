//! Reads a session's history as clients see it, from any place on, without reading it all.
//!
//! What a wire event looks like depends on what came before it (what waits, who the agent is, how
//! long it ran). That is folded once and stored on the way, which makes a page cost what it holds
//! and a little more, however long the session is.

use ipc::id::SessionId;

use super::wire::{Fold, WireEvent};
use crate::fold::{self, Kind};
use crate::log::{Log, LogError};

/// Events read at once.
const SLICE: u64 = 1_000;

/// Changes with every change of [`Fold`].
const WIRE: Kind = Kind { name: "wire/2", newest_only: false };

/// A place in the history; see [`WireEvent::place`].
pub type Place = (u64, u32);

/// A fold that has read everything up to event `last`, from where one was last stored.
pub async fn fold_after(log: &Log, session: &SessionId, last: u64) -> Result<Fold, LogError> {
    let fresh = Fold::new(session.as_str());
    fold::upto(log, session, &WIRE, last, fresh, |fold, event| drop(fold.feed(event))).await
}

/// Gives what comes behind `behind`, oldest first, for as long as `take` wants more.
pub async fn forward(
    log: &Log,
    session: &SessionId,
    behind: Option<Place>,
    mut take: impl FnMut(WireEvent) -> bool,
) -> Result<(), LogError> {
    let last = log.chain(session).await?.events;
    // The event of the place itself is read again: it may have become more than one.
    let mut after = behind.map_or(0, |(seq, _)| seq.min(last + 1).saturating_sub(1));
    let mut fold = fold_after(log, session, after).await?;
    let mut take = |wire: WireEvent| behind.is_some_and(|b| wire.place <= b) || take(wire);
    loop {
        let wires = read(log, session, &mut fold, after, SLICE).await?;
        let Some(read) = wires.last else { break };
        after = read;
        for wire in wires.events {
            if !take(wire) {
                return Ok(());
            }
        }
    }
    for wire in fold.finish().into_iter().chain(fold.queued()) {
        if !take(wire) {
            break;
        }
    }
    Ok(())
}

/// Gives what comes before `before`, newest first, for as long as `take` wants more.
pub async fn backward(
    log: &Log,
    session: &SessionId,
    before: Option<Place>,
    mut take: impl FnMut(WireEvent) -> bool,
) -> Result<(), LogError> {
    let last = log.chain(session).await?.events;
    let mut end = before.map_or(last, |(seq, _)| seq.min(last));
    let mut take = |wire: WireEvent| before.is_some_and(|b| wire.place >= b) || take(wire);
    // What waits is newest of all, and known once the last event was read.
    let mut with_queued = before.is_none_or(|(seq, _)| seq > last);
    while end > 0 || with_queued {
        let start = end.saturating_sub(SLICE);
        let mut fold = fold_after(log, session, start).await?;
        let mut wires = read(log, session, &mut fold, start, end - start).await?.events;
        if with_queued {
            wires.extend(fold.finish());
            wires.extend(fold.queued());
            with_queued = false;
        }
        for wire in wires.into_iter().rev() {
            if !take(wire) {
                return Ok(());
            }
        }
        end = start;
    }
    Ok(())
}

struct Slice {
    events: Vec<WireEvent>,
    /// The last event of the log that was read; `None` when there was none.
    last: Option<u64>,
}

async fn read(
    log: &Log,
    session: &SessionId,
    fold: &mut Fold,
    after: u64,
    limit: u64,
) -> Result<Slice, LogError> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let events = log.slice(session, after, limit).await?;
    let mut wires = Vec::new();
    for event in &events {
        // What waits comes last, or where it was processed.
        wires.extend(fold.feed(event).into_iter().filter(|wire| wire.processed_at.is_some()));
    }
    Ok(Slice { events: wires, last: events.last().map(|event| event.seq) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Guard;
    use crate::log::event::{Agent, Body, Created, NewEvent, StopReason, Usage};
    use crate::log::objects::NewObject;
    use serde_json::json;

    fn first() -> NewEvent {
        let snapshot = json!({ "name": "tester" });
        let agent =
            Agent { model: "m".into(), system: None, tools: Vec::new(), mcp: vec![], snapshot };
        let created = Created {
            owner: "uid:1".into(),
            policy: "dev".into(),
            workspace: None,
            agent,
            budget_cents: None,
        };
        NewEvent::new(Body::SessionCreated(created))
    }

    fn message() -> NewEvent {
        NewEvent::new(Body::UserMessage { content: vec![json!({ "type": "text", "text": "x" })] })
    }

    /// Turns of 10 events each; every message waits for one turn before it is processed.
    fn turns(number: usize) -> Vec<NewEvent> {
        let mut events = vec![first()];
        let mut waiting = message();
        events.push(waiting.clone());
        for _ in 0..number {
            let next = message();
            let text = || vec![json!({ "type": "text", "text": "y" })];
            let say = || Body::AgentMessage { request: "r".into(), content: text() };
            let bodies = [
                Body::StatusRunning {},
                Body::Processed { events: vec![waiting.id.clone()] },
                say(),
                say(),
                say(),
                say(),
                say(),
                Body::Usage { usage: Usage::default() },
                Body::StatusIdle { stop_reason: StopReason::EndTurn, stop_details: None },
            ];
            events.extend(bodies.into_iter().map(NewEvent::new));
            events.insert(events.len() - 5, next.clone());
            waiting = next;
        }
        events
    }

    /// The history as one fold over the whole log gives it.
    async fn whole(log: &Log, session: &SessionId) -> Vec<WireEvent> {
        let mut fold = Fold::new(session.as_str());
        let mut all = Vec::new();
        for event in log.all(session).await.unwrap() {
            all.extend(fold.feed(&event).into_iter().filter(|w| w.processed_at.is_some()));
        }
        all.extend(fold.finish());
        all.extend(fold.queued());
        all
    }

    async fn paged(log: &Log, session: &SessionId, size: usize, forwards: bool) -> Vec<WireEvent> {
        let mut all: Vec<WireEvent> = Vec::new();
        loop {
            let place = all.last().map(|wire| wire.place);
            let mut page = Vec::new();
            let take = |wire: WireEvent| {
                page.push(wire);
                page.len() < size
            };
            if forwards {
                forward(log, session, place, take).await.unwrap();
            } else {
                backward(log, session, place, take).await.unwrap();
            }
            if page.is_empty() {
                return all;
            }
            all.extend(page);
        }
    }

    #[tokio::test]
    async fn pages_of_any_size_and_direction_give_the_whole_history() {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::open(dir.path()).unwrap();
        let session = SessionId::random();
        let object = NewObject {
            kind: "session",
            id: session.as_str().to_owned(),
            owner: "uid:1".into(),
            unique_name: None,
            body: json!({}),
        };
        // More than two slices, so that turns lie across their borders.
        let mut events = turns(230).into_iter();
        let begin = events.by_ref().take(1).collect();
        log.create_session(&session, object, begin).await.unwrap();
        log.append(&session, Guard::default(), events.collect()).await.unwrap();
        let mut expected = whole(&log, &session).await;
        assert_eq!(expected.last().unwrap().processed_at, None);
        assert!(expected.len() > 2_500, "{}", expected.len());

        for size in [997, 1_000, 2_700] {
            assert!(paged(&log, &session, size, true).await == expected, "forwards by {size}");
        }
        expected.reverse();
        for size in [997, 1_000, 2_700] {
            assert!(paged(&log, &session, size, false).await == expected, "backwards by {size}");
        }
    }
}
