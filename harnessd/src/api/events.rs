//! `GET /v1/sessions/ID/events`: the history of a session, page by page.
//!
//! Ordered by the time an event was processed; client events that still wait come last. Previews
//! are never part of it.

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use serde_json::Value;

use super::cursor::{Direction, Listing};
use super::edge::Owner;
use super::error::ApiError;
use super::history::Place;
use super::query::{Order, Parameters, TimeRange};
use super::wire::WireEvent;
use super::{ApiState, history, page, session, sessions};

/// Page size, default and maximum: what clients ask for.
const LIMIT: usize = 1_000;

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
    let mut page: Vec<WireEvent> = Vec::new();
    let take = |event: WireEvent| {
        if asked(&event) {
            page.push(event);
        }
        page.len() <= limit
    };
    match order {
        Order::Asc => history::forward(log, &session, behind, take).await?,
        Order::Desc => history::backward(log, &session, behind, take).await?,
    }
    let more = page.len() > limit;
    page.truncate(limit);
    let next = page.last().filter(|_| more);
    let next = next.map(|event| listing.cursor(Direction::After, &key(event)));
    Ok(Json(page::body(page.into_iter().map(|event| event.body).collect(), next)))
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
fn place(key: &str, range: &TimeRange) -> Result<Place, ApiError> {
    let bad = || ApiError::field("page", "not a cursor of this list");
    let parts: Vec<&str> = key.splitn(3, '|').collect();
    let [seq, at, time] = parts[..] else { return Err(bad()) };
    if !time.is_empty() && !range.contains(time) {
        return Err(ApiError::field("page", "the cursor lies outside the created_at filter"));
    }
    Ok((seq.parse().map_err(|_| bad())?, at.parse().map_err(|_| bad())?))
}
