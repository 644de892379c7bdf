//! `GET /v1/sessions/ID/events`: the history of a session, page by page.
//!
//! Ordered by the time an event was processed; client events that still wait come last. Previews
//! are never part of it.

use std::collections::VecDeque;

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use ipc::id::SessionId;
use serde_json::Value;

use super::cursor::{Direction, Listing};
use super::edge::Owner;
use super::error::ApiError;
use super::query::{Order, Parameters, TimeRange};
use super::wire::{Fold, WireEvent};
use super::{ApiState, page, session, sessions};
use crate::log::{Log, LogError};

/// Page size, default and maximum: what clients ask for.
const LIMIT: usize = 1_000;
/// Events read at once, so that memory does not grow with the session.
const SLICE: usize = 1_000;

pub async fn list(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let known = ["limit", "page", "order", "types[]", "created_at[op]"];
    let parameters = Parameters::of(&uri, &known)?;
    let limit = parameters.limit(LIMIT, LIMIT)?;
    let order = parameters.order(Order::Asc)?;
    let range = parameters.created_at()?;
    let types = parameters.many("types");
    let listing = Listing { kind: "events", scope: &id, order };
    let behind = match parameters.one("page")? {
        Some(cursor) => Some(place(&listing.position(cursor)?.key, &range)?),
        None => None,
    };
    let log = state.engine.log();
    log.object(sessions::KIND, &owner.0, &id, None).await?;
    let session = session::id(&id)?;
    let asked = |event: &WireEvent| {
        (types.is_empty() || types.contains(&event.kind)) && in_range(&range, event)
    };
    // One more than the page tells whether another follows.
    let mut page: VecDeque<WireEvent> = VecDeque::new();
    match order {
        Order::Asc => {
            read(log, &session, |event| {
                if behind.is_none_or(|place| event.place > place) && asked(&event) {
                    page.push_back(event);
                }
                page.len() <= limit
            })
            .await?;
        }
        Order::Desc => {
            read(log, &session, |event| {
                let before = behind.is_none_or(|place| event.place < place);
                if before && asked(&event) {
                    page.push_front(event);
                    page.truncate(limit + 1);
                }
                before
            })
            .await?;
        }
    }
    let more = page.len() > limit;
    page.truncate(limit);
    let next = page.back().filter(|_| more);
    let next = next.map(|event| listing.cursor(Direction::After, &key(event)));
    Ok(Json(page::body(page.into_iter().map(|event| event.body).collect(), next)))
}

/// Gives the events of a session as a client sees them, oldest first, for as long as `take` wants.
async fn read(
    log: &Log,
    session: &SessionId,
    mut take: impl FnMut(WireEvent) -> bool,
) -> Result<(), LogError> {
    let mut fold = Fold::new(session.as_str());
    let mut after = 0;
    loop {
        let events = log.slice(session, after, SLICE).await?;
        for event in &events {
            after = event.seq;
            // What waits comes last, or again when it was processed.
            let wires = fold.feed(event).into_iter().filter(|wire| wire.processed_at.is_some());
            for wire in wires {
                if !take(wire) {
                    return Ok(());
                }
            }
        }
        if events.len() < SLICE {
            break;
        }
    }
    for wire in fold.finish().into_iter().chain(fold.queued()) {
        if !take(wire) {
            break;
        }
    }
    Ok(())
}

/// An event without a time is in no range of times.
fn in_range(range: &TimeRange, event: &WireEvent) -> bool {
    match &event.processed_at {
        Some(time) => range.contains(time),
        None => *range == TimeRange::default(),
    }
}

fn key(event: &WireEvent) -> String {
    let (seq, at) = event.place;
    format!("{seq}|{at}|{}", event.processed_at.as_deref().unwrap_or_default())
}

/// The place of a cursor, which the filter on time must not exclude.
fn place(key: &str, range: &TimeRange) -> Result<(u64, u32), ApiError> {
    let bad = || ApiError::field("page", "not a cursor of this list");
    let parts: Vec<&str> = key.splitn(3, '|').collect();
    let [seq, at, time] = parts[..] else { return Err(bad()) };
    if !time.is_empty() && !range.contains(time) {
        return Err(ApiError::field("page", "the cursor lies outside the created_at filter"));
    }
    Ok((seq.parse().map_err(|_| bad())?, at.parse().map_err(|_| bad())?))
}
