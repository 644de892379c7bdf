//! The operator's routes about what a model is shown: choose a profile, and compare them.

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use serde_json::{Value, json};

use super::body::JsonBody;
use super::edge::Owner;
use super::error::ApiError;
use super::fields::Fields;
use super::query::Parameters;
use super::{ApiState, session, sessions};
use crate::context::{Profile, replay};
use crate::log::{Body, Guard};

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
    let events = log.all(&session).await?;
    let work = move || replay(&events, profile);
    let report = tokio::task::spawn_blocking(work).await;
    let report = report.map_err(|error| ApiError::internal(&error))?;
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

fn read(field: &str, name: &str) -> Result<Profile, ApiError> {
    name.parse().map_err(|error| ApiError::field(field, error))
}
