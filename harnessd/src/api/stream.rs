//! `GET /v1/sessions/ID/events/stream`: a session's events as they happen, as server-sent events.
//!
//! Live only: what was emitted before the connection is in the history. Every frame is named, since
//! clients drop frames that are not. The stream stays open while the session is idle and ends when
//! it is deleted or the daemon stops.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::response::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Uri};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use super::edge::Owner;
use super::error::ApiError;
use super::query::Parameters;
use super::wire::{Fold, WireEvent};
use super::{ApiState, history, session, sessions};
use crate::engine::{Live, LiveStream, Part, Preview};
use crate::log::event::new_event_id;
use crate::log::now;

/// A comment is sent when nothing else was for this long: clients give up after 600 seconds and
/// proxies between them often after 60. It also is how a client that has gone is noticed, since
/// the socket lets clients close their own direction early.
const HEARTBEAT: Duration = Duration::from_secs(5);
const DELTAS_MAX: usize = 100;
/// Streams open at once. Each holds one of the connections that a socket serves, of which there
/// are twice as many, so that streams alone never shut everybody out.
pub const STREAMS_MAX: usize = 512;

/// Which previews a connection asked for.
#[derive(Clone, Copy, Debug, Default)]
struct Deltas {
    message: bool,
    thinking: bool,
}

pub async fn stream(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let deltas = read_deltas(&Parameters::of(&uri, &["event_deltas[]"])?)?;
    let log = state.engine.log();
    log.object(sessions::KIND, &owner.0, &id, None).await?;
    let session = session::id(&id)?;
    let permit = Arc::clone(&state.streams).try_acquire_owned();
    let permit = permit.map_err(|_| ApiError::busy("event streams", STREAMS_MAX))?;
    // What is appended from here on is live; the fold needs to know what came before.
    let before = log.chain(&session).await?.events;
    let live = state.engine.subscribe(&session).await?;
    let fold = history::fold_after(log, &session, before).await?;
    let mut frames = Frames::new(fold, before, deltas, live, permit);
    for event in log.since(&session, before).await? {
        frames.take(Live::Event(Box::new(event)));
    }
    let stream = futures_util::stream::unfold(frames, |mut frames| async move {
        let bytes = frames.next().await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), frames))
    });
    let mut response = Response::new(Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    Ok(response)
}

fn read_deltas(parameters: &Parameters) -> Result<Deltas, ApiError> {
    let values = parameters.many("event_deltas");
    if values.len() > DELTAS_MAX {
        let why = format!("must have at most {DELTAS_MAX} values");
        return Err(ApiError::field("event_deltas", why));
    }
    let mut deltas = Deltas::default();
    for value in values {
        match value {
            "agent.message" => deltas.message = true,
            "agent.thinking" => deltas.thinking = true,
            _ => {
                let why = "must be agent.message or agent.thinking";
                return Err(ApiError::field("event_deltas", why));
            }
        }
    }
    Ok(deltas)
}

/// One connection's frames.
struct Frames {
    fold: Fold,
    deltas: Deltas,
    live: LiveStream,
    /// The last event of the log that the fold has seen.
    last: u64,
    ready: VecDeque<Bytes>,
    /// Previews that this connection has seen begin.
    open: HashSet<String>,
    ended: bool,
    _permit: OwnedSemaphorePermit,
}

impl Frames {
    fn new(
        fold: Fold,
        last: u64,
        deltas: Deltas,
        live: LiveStream,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        // The first bytes go out at once, so that no client waits for an event to see the head.
        let ready = VecDeque::from([Bytes::from_static(b": open\n\n")]);
        let open = HashSet::new();
        Self { fold, deltas, live, last, ready, open, ended: false, _permit: permit }
    }

    /// The next frame, or a heartbeat; `None` when the stream is over.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if self.ended {
                return None;
            }
            match tokio::time::timeout(HEARTBEAT, self.live.next()).await {
                Err(_) => return Some(Bytes::from_static(b": alive\n\n")),
                Ok(None) => return None,
                Ok(Some(Ok(live))) => self.take(live),
                Ok(Some(Err(error))) => {
                    tracing::warn!(%error, "event stream broken off");
                    return None;
                }
            }
        }
    }

    fn take(&mut self, live: Live) {
        match live {
            Live::Event(event) if event.seq <= self.last => {}
            Live::Event(event) => {
                self.last = event.seq;
                let wires = self.fold.feed(&event);
                wires.iter().for_each(|wire| self.push(wire));
            }
            Live::Preview(preview) => self.preview(&preview),
            Live::Deleted => {
                let body = json!({
                    "id": new_event_id(),
                    "type": "session.deleted",
                    "processed_at": now(),
                });
                self.ready.push_back(frame("session.deleted", &body));
                self.ended = true;
            }
        }
    }

    fn push(&mut self, wire: &WireEvent) {
        self.open.remove(&wire.id);
        self.ready.push_back(frame(wire.kind, &wire.body));
    }

    /// Pieces follow only where the beginning was sent: together they are then a prefix of the
    /// final text, as clients rely on.
    fn preview(&mut self, preview: &Preview) {
        let kind = match &preview.part {
            Part::MessageStarted if self.deltas.message => "agent.message",
            Part::ThinkingStarted if self.deltas.thinking => "agent.thinking",
            Part::Text { index, text } if self.open.contains(&preview.event) => {
                let delta = json!({
                    "type": "event_delta",
                    "event_id": preview.event,
                    "delta": {
                        "type": "content_delta",
                        "index": index,
                        "content": { "type": "text", "text": text },
                    },
                });
                self.ready.push_back(frame("event_delta", &delta));
                return;
            }
            Part::Dropped => {
                self.open.remove(&preview.event);
                return;
            }
            _ => return,
        };
        if self.open.insert(preview.event.clone()) {
            let event = json!({ "type": kind, "id": preview.event });
            let start = json!({ "type": "event_start", "event": event });
            self.ready.push_back(frame("event_start", &start));
        }
    }
}

/// JSON never holds a raw line break, so one `data` line carries it.
fn frame(name: &str, body: &Value) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {body}\n\n"))
}
