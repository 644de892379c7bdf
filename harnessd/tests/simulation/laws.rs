//! What must hold of every session, whatever its world did to it.

use std::collections::{HashMap, HashSet};

use harnessd::context::{self, Profile};
use harnessd::fold;
use harnessd::log::{Body, CallOutcome, Event, HandKind, Log};
use harnessd::state::State;
use harnessd::step::{Step, next_step};
use ipc::id::SessionId;

use super::valid;
use super::world::World;

pub async fn check(world: &World, log: &Log, session: &SessionId, acknowledged: &[String]) {
    let events = log.all(session).await.unwrap();
    let complain = |what: String| world.complain(format!("{session}: {what}"));
    for problem in log.verify(session).await.unwrap().problems {
        complain(problem);
    }
    if !events.is_sorted_by(|a, b| a.time <= b.time) {
        complain("times go back".to_owned());
    }
    calls(world, &events, &complain);
    requests(&events, &complain);
    let taken: Vec<&String> = events
        .iter()
        .filter_map(|event| match &event.body {
            Body::Processed { events } => Some(events),
            _ => None,
        })
        .flatten()
        .collect();
    if taken.iter().collect::<HashSet<_>>().len() != taken.len() {
        complain("a client's event was taken in twice".to_owned());
    }
    for id in acknowledged {
        if !events.iter().any(|event| event.id == *id) {
            complain(format!("{id} was acknowledged and is gone"));
        } else if !taken.contains(&id) {
            complain(format!("{id} was never taken in"));
        }
    }
    let folded = State::of(&events);
    if fold::load(log, session).await.unwrap() != folded {
        complain("the stored state is not that of the log".to_owned());
    }
    if next_step(&folded) != Step::Rest {
        complain(format!("something is left to do: {:?}", next_step(&folded)));
    }
    cuts(world, &events, &complain);
}

/// Each use has one result, and what ran, ran once.
fn calls(world: &World, events: &[Event], complain: &dyn Fn(String)) {
    let sandboxes = world.sandboxes.lock().unwrap();
    let mut results: HashMap<&str, Vec<Option<CallOutcome>>> = HashMap::new();
    for event in events {
        match &event.body {
            Body::ToolResult(result) => {
                results.entry(&result.tool_use).or_default().push(Some(result.outcome));
            }
            Body::UserCustomToolResult { tool_use, .. } => {
                results.entry(tool_use).or_default().push(None);
            }
            _ => {}
        }
    }
    for event in events {
        let Body::ToolUse(used) = &event.body else { continue };
        let of_it = results.get(event.id.as_str()).map(Vec::as_slice).unwrap_or_default();
        if of_it.len() != 1 {
            complain(format!("{} has the results {of_it:?}", used.call));
        }
        let runs = sandboxes.calls.get(&used.call).map_or(0, |call| call.runs);
        let finished = of_it.contains(&Some(CallOutcome::Finished));
        let never = [CallOutcome::Refused, CallOutcome::Denied];
        let refused = of_it.iter().flatten().any(|outcome| never.contains(outcome));
        if runs > 1 || (finished && runs != 1) || (refused && runs != 0) {
            complain(format!("{} ran {runs} times and has {of_it:?}", used.call));
        }
        if runs > 0 && used.hand == HandKind::Client {
            complain(format!("{} was the client's and ran here", used.call));
        }
    }
}

/// Requests do not overlap, and each has one end.
fn requests(events: &[Event], complain: &dyn Fn(String)) {
    let mut open: Option<&str> = None;
    for event in events {
        match &event.body {
            Body::ModelRequestStarted { .. } => {
                if let Some(other) = open.replace(&event.id) {
                    complain(format!("request {other} was never closed"));
                }
            }
            Body::ModelRequestEnded(ended) if open.take() != Some(&ended.request) => {
                complain(format!("request {} ended and was not open", ended.request));
            }
            _ => {}
        }
    }
}

/// Wherever the log ends, every profile makes a valid request of it, and a state that was stored
/// half-way is the same as one that was not.
fn cuts(world: &World, events: &[Event], complain: &dyn Fn(String)) {
    let agent = events.iter().find_map(context::agent_of).unwrap();
    for _ in 0..4 {
        let end = usize::try_from(world.chance.below(events.len() as u64 + 1)).unwrap();
        let middle = usize::try_from(world.chance.below(end as u64 + 1)).unwrap();
        let whole = State::of(&events[..end]);
        let stored = serde_json::to_string(&State::of(&events[..middle])).unwrap();
        let mut taken_up: State = serde_json::from_str(&stored).unwrap();
        events[middle..end].iter().for_each(|event| taken_up.take(event));
        if taken_up != whole {
            complain(format!("a state stored at {middle} is another at {end}"));
        }
        for name in ["whole-log", "last-n:1", "last-n:2", "summary:500:1", "reset:500"] {
            let profile: Profile = name.parse().unwrap();
            let cut = profile.cut(&whole);
            let log = with_a_word(&events[..end]);
            for problem in valid::problems(&context::prompt(agent, &log, &cut), false) {
                complain(format!("cut at {end}, {name}: {problem}"));
            }
        }
    }
}

/// The log, and the client says one thing more: so it can be asked about wherever it ended.
fn with_a_word(events: &[Event]) -> Vec<Event> {
    let mut log = events.to_vec();
    let seq = events.len() as u64;
    let content = vec![serde_json::json!({ "type": "text", "text": "and?" })];
    let bodies =
        [Body::UserMessage { content }, Body::Processed { events: vec!["word".to_owned()] }];
    for (place, (id, body)) in ["word", "taken"].into_iter().zip(bodies).enumerate() {
        let (seq, id) = (seq + 1 + place as u64, id.to_owned());
        log.push(Event { seq, id, time: String::new(), body });
    }
    log
}

/// An event without what is drawn at random outside the simulation.
pub fn told(event: &Event) -> String {
    let (kind, _) = event.body.to_columns().unwrap();
    let more = match &event.body {
        Body::ToolUse(used) => format!("{} {}", used.name, used.input),
        Body::ToolResult(result) => format!("{:?}", result.outcome),
        Body::ModelRequestStarted { profile, from, summary, .. } => {
            format!("{profile} from {from} summary {summary}")
        }
        Body::ModelRequestEnded(ended) => {
            let failure = ended.failure.as_ref().map(|failure| &failure.message);
            format!("{:?} cut {} {failure:?}", ended.stop_reason, ended.cut)
        }
        Body::StatusIdle {
            stop_reason: harnessd::log::StopReason::RequiresAction { .. }, ..
        } => "requires action".to_owned(),
        Body::StatusIdle { stop_reason, .. } => format!("{stop_reason:?}"),
        Body::Error { message, .. } => message.clone(),
        Body::ProfileChanged { profile } => profile.clone(),
        _ => String::new(),
    };
    format!("{} {} {kind} {more}", event.seq, event.time)
}
