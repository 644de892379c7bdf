//! The operator's routes about what a model is shown: choose a profile, and compare them.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::body::JsonBody;
use super::edge::Owner;
use super::error::ApiError;
use super::fields::Fields;
use super::query::Parameters;
use super::{ApiState, session, sessions};
use crate::context::{Profile, replay};
use crate::log::{Body, Guard, LogError};

const NAME_CHARS_MAX: usize = 80;
/// A longer session is not replayed: every profile may read all of it.
const EVENTS_MAX: u64 = 100_000;

/// From the next model request on the session is shown through this profile.
pub async fn choose(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let log = state.engine.log();
    log.object(sessions::KIND, &owner.0, &id, None).await?;
    let mut fields = Fields::of("", &body)?;
    let profile = read("profile", &fields.required_text("profile", NAME_CHARS_MAX)?)?.to_string();
    fields.finish()?;
    let event = Body::ProfileChanged { profile: profile.clone() };
    log.append(&session::id(&id)?, Guard::default(), vec![event.into()]).await?;
    Ok(Json(json!({ "session": id, "profile": profile })))
}

/// What each request of the session would have held through a profile. Nothing is asked.
pub async fn compare(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let parameters = Parameters::of(&uri, &["profile"])?;
    let name = parameters.one("profile")?;
    let name = name.ok_or_else(|| ApiError::field("profile", "required"))?;
    let profile = read("profile", name)?;
    let log = state.engine.log();
    log.object(sessions::KIND, &owner.0, &id, None).await?;
    let session = session::id(&id)?;
    let length = log.chain(&session).await?.events;
    if length > EVENTS_MAX {
        let why = format!("session {id} has {length} events: replay takes up to {EVENTS_MAX}");
        return Err(ApiError::invalid(why));
    }
    let work = move |events: Vec<_>| replay(&events, profile);
    let report = alone(&state.replays, log.all(&session), work).await?;
    Ok(Json(json!({
        "profile": profile.to_string(),
        "requests": report.requests,
        "summaries": report.summaries,
        "bytes": report.bytes,
        "bytes_most": report.bytes_most,
        "bytes_kept": report.bytes_kept,
        "last_begins_at": report.last_begins_at,
        "last_messages": report.last_messages,
    })))
}

/// Reads and works in turn with all others: a replay takes a whole session into memory and a
/// processor for a while. Whoever has gone meanwhile loses its place, but not work that has begun.
async fn alone<R, T>(
    turn: &Arc<Mutex<()>>,
    read: impl Future<Output = Result<R, LogError>>,
    work: impl FnOnce(R) -> T + Send + 'static,
) -> Result<T, ApiError>
where
    R: Send + 'static,
    T: Send + 'static,
{
    let turn = Arc::clone(turn).lock_owned().await;
    let read = read.await?;
    let work = move || {
        let done = work(read);
        drop(turn);
        done
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::internal(&error))
}

fn read(field: &str, name: &str) -> Result<Profile, ApiError> {
    name.parse().map_err(|error| ApiError::field(field, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[tokio::test]
    async fn one_replay_is_under_way_at_a_time_although_its_client_has_gone() {
        let turn: Arc<Mutex<()>> = Arc::default();
        let (go_on, begun) = (std::sync::mpsc::channel::<()>(), tokio::sync::oneshot::channel());
        let first = {
            let turn = Arc::clone(&turn);
            let work = move |()| {
                begun.0.send(()).unwrap();
                go_on.1.recv().unwrap();
            };
            tokio::spawn(async move { alone(&turn, async { Ok(()) }, work).await })
        };
        begun.1.await.unwrap();
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());

        let reads = AtomicBool::new(false);
        let read = async {
            reads.store(true, Ordering::SeqCst);
            Ok(())
        };
        let mut second = std::pin::pin!(alone(&turn, read, |()| ()));
        assert!(futures_util::poll!(&mut second).is_pending());
        assert!(!reads.load(Ordering::SeqCst), "a second replay reads beside the first");
        go_on.0.send(()).unwrap();
        second.await.unwrap();
        assert!(reads.load(Ordering::SeqCst));
    }
}
