//! Request bodies: JSON within limits, whatever their content type says.
//!
//! Clients send POSTs of length zero with `Content-Type: application/json`; they read as `{}`.
//! What is made of a text can be twenty times as long, so its values are counted as it comes, and
//! bodies under way are bounded together. An owner's long ones go one behind the other, so that
//! one who dawdles holds up his own; short ones have room of their own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ApiState;
use super::edge::Owner;
use super::error::ApiError;

/// The documented limit for agents, environments, sessions and events.
pub const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;
/// A longer body waits for room before it is read on.
const SHORT_BYTES_MAX: usize = 64 * 1024;
/// Long bodies that are under way at once, of as many owners.
const LONG_AT_ONCE: usize = 3;
/// How long a long one may take to come.
const LONG_TIME_MAX: Duration = Duration::from_secs(60);
/// How long the rest of a refused one is read.
const REST_TIME_MAX: Duration = Duration::from_secs(5);
/// About twice what a step of an import, the fullest of honest requests, can have.
const VALUES_MAX: usize = 400_000;
/// About what one value or name takes beside its text.
const VALUE_BYTES: usize = 128;
/// What may be made of short bodies together, KiB.
const SHORT_ROOM: usize = 64 * 1024;

/// The body of a request, parsed and not yet understood.
pub struct JsonBody(pub Value);

/// Room for the bodies that are under way.
pub struct Bodies {
    long: Arc<Semaphore>,
    /// The turns of owners who have long ones under way.
    turns: Mutex<HashMap<String, Weak<Semaphore>>>,
    /// In KiB.
    short: Arc<Semaphore>,
}

impl Default for Bodies {
    fn default() -> Self {
        let [long, short] = [LONG_AT_ONCE, SHORT_ROOM].map(|room| Arc::new(Semaphore::new(room)));
        Self { long, turns: Mutex::default(), short }
    }
}

impl Bodies {
    /// Waits until this owner has no other long body under way, and few others have.
    async fn long_of(&self, owner: &str) -> Result<Vec<OwnedSemaphorePermit>, ApiError> {
        let turn = self.turn(owner);
        Ok(vec![permit(&turn, 1).await?, permit(&self.long, 1).await?])
    }

    fn turn(&self, owner: &str) -> Arc<Semaphore> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = turns.get(owner).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::new(Semaphore::new(1));
        turns.insert(owner.to_owned(), Arc::downgrade(&turn));
        turn
    }
}

/// What a request's body holds of that room.
#[derive(Clone, Default)]
pub struct Room(Arc<Mutex<Vec<OwnedSemaphorePermit>>>);

impl Room {
    fn keep(&self, permits: Vec<OwnedSemaphorePermit>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(permits);
    }

    pub fn leave(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl FromRequest<ApiState> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &ApiState) -> Result<Self, ApiError> {
        let room = request.extensions().get::<Room>().cloned().unwrap_or_default();
        let owner = request.extensions().get::<Owner>().cloned();
        let mut coming = Coming::of(request.into_body());
        if !coming.read_to(SHORT_BYTES_MAX).await? {
            let owner = owner.map(|Owner(name)| name).unwrap_or_default();
            let permits = state.bodies.long_of(&owner).await?;
            let whole = tokio::time::timeout(LONG_TIME_MAX, coming.read_to(BODY_BYTES_MAX)).await;
            if !whole.map_err(|_| ApiError::too_slow(LONG_TIME_MAX))?? {
                coming.pass_over().await;
                return Err(ApiError::too_large(BODY_BYTES_MAX));
            }
            // The permits go along: the work goes on when the client has gone.
            let parsing = tokio::task::spawn_blocking(move || (parse(&coming.bytes), permits));
            let (value, permits) = parsing.await.map_err(|error| ApiError::internal(&error))?;
            room.keep(permits);
            return value;
        }
        let cost = (coming.bytes.len() + coming.values.count * VALUE_BYTES) / 1024 + 1;
        room.keep(vec![permit(&state.bodies.short, cost).await?]);
        parse(&coming.bytes)
    }
}

async fn permit(room: &Arc<Semaphore>, amount: usize) -> Result<OwnedSemaphorePermit, ApiError> {
    let amount = u32::try_from(amount.min(SHORT_ROOM)).unwrap_or(u32::MAX);
    let permit = Arc::clone(room).acquire_many_owned(amount).await;
    permit.map_err(|error| ApiError::internal(&error))
}

fn parse(bytes: &[u8]) -> Result<JsonBody, ApiError> {
    if bytes.is_empty() {
        return Ok(JsonBody(Value::Object(Map::new())));
    }
    let value = serde_json::from_slice(bytes).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        ApiError::invalid(format!("request body: not JSON at line {line}, column {column}"))
    })?;
    Ok(JsonBody(value))
}

/// A body as it comes.
struct Coming {
    body: Body,
    bytes: Vec<u8>,
    values: Values,
}

impl Coming {
    fn of(body: Body) -> Self {
        Self { body, bytes: Vec::new(), values: Values::default() }
    }

    /// Reads until the end, or until there are more bytes than that: false.
    async fn read_to(&mut self, limit: usize) -> Result<bool, ApiError> {
        // What is announced is only reserved when there is room for all of it.
        let announced = usize::try_from(self.body.size_hint().lower()).unwrap_or(usize::MAX);
        self.bytes.reserve_exact(announced.min(limit.saturating_sub(self.bytes.len())));
        while self.bytes.len() <= limit {
            let Some(frame) = self.body.frame().await else { return Ok(true) };
            let frame = frame.map_err(|_| ApiError::invalid("request body: broken off"))?;
            let Ok(piece) = frame.into_data() else { continue };
            self.values.see(&piece);
            if self.values.count > VALUES_MAX {
                self.pass_over().await;
                return Err(ApiError::too_many_values(VALUES_MAX));
            }
            self.bytes.extend_from_slice(&piece);
        }
        Ok(false)
    }

    /// Reads what still comes and keeps none of it: a client that is sending when its connection
    /// closes may never see the answer (RFC 9112, section 9.6). Who sends on and on is cut off.
    async fn pass_over(&mut self) {
        self.bytes = Vec::new();
        let rest = async {
            let mut passed = 0;
            while passed <= BODY_BYTES_MAX
                && let Some(Ok(frame)) = self.body.frame().await
            {
                passed += frame.data_ref().map_or(0, |piece| piece.len());
            }
        };
        // Whatever came until then, the answer follows.
        let _ = tokio::time::timeout(REST_TIME_MAX, rest).await;
    }
}

/// Counts values and names, by the marks that begin or part them outside of texts.
#[derive(Default)]
struct Values {
    count: usize,
    in_text: bool,
    escaped: bool,
}

impl Values {
    fn see(&mut self, piece: &[u8]) {
        for byte in piece {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_text => self.escaped = true,
                b'"' => self.in_text = !self.in_text,
                b',' | b':' | b'[' | b'{' if !self.in_text => self.count += 1,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(pieces: &[&str]) -> usize {
        let mut values = Values::default();
        pieces.iter().for_each(|piece| values.see(piece.as_bytes()));
        values.count
    }

    #[tokio::test]
    async fn a_long_body_holds_up_those_of_its_owner_and_no_others() {
        let bodies = Bodies::default();
        let first = bodies.long_of("one").await.unwrap();

        let mut second = std::pin::pin!(bodies.long_of("one"));
        let waits = futures_util::poll!(second.as_mut()).is_pending();
        let others = bodies.long_of("two").await.unwrap();
        drop(first);

        assert!(waits, "two long bodies of one owner at once");
        second.await.unwrap();
        drop(others);
        assert_eq!(bodies.long.available_permits(), LONG_AT_ONCE);
    }

    #[test]
    fn values_are_counted_wherever_the_body_is_cut_and_texts_are_one_each() {
        let text = r#"{"a,b":["[{,:\\\"[",{},1],"c":"\\"}"#;

        let cuts = (0..=text.len()).map(|at| counted(&[&text[..at], &text[at..]]));

        assert!(cuts.into_iter().all(|count| count == 8), "{}", counted(&[text]));
    }
}
