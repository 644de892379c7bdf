//! The operator's own routes beside the wire API, with the types of [`ipc::session`].

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use ipc::session::{Health, LogEvent};
use ipc::vault::ChainReport;
use serde::Serialize;

use super::edge::Owner;
use super::error::ApiError;
use super::query::Parameters;
use super::{ApiState, session, sessions};

/// Events of one answer, default and maximum.
const LOG_DEFAULT: usize = 100;
const LOG_MAX: usize = 1_000;

#[derive(Serialize)]
pub struct LogPage {
    events: Vec<LogEvent>,
}

pub async fn health(State(state): State<ApiState>) -> Json<Health> {
    Json(Health {
        daemon: "harnessd".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        models: state.engine.models(),
        default_environment: state.config.default_environment.clone(),
    })
}

pub async fn log(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<LogPage>, ApiError> {
    let parameters = Parameters::of(&uri, &["after", "limit"])?;
    let limit = parameters.limit(LOG_DEFAULT, LOG_MAX)?;
    let after = match parameters.one("after")? {
        None => 0,
        Some(text) => {
            text.parse().map_err(|_| ApiError::field("after", "must be the number of an event"))?
        }
    };
    let log = state.engine.log();
    log.object(sessions::KIND, &owner.0, &id, None).await?;
    let events = log.stored(&session::id(&id)?, after, limit).await?;
    Ok(Json(LogPage { events }))
}

pub async fn verify(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<ChainReport>, ApiError> {
    let log = state.engine.log();
    log.object(sessions::KIND, &owner.0, &id, None).await?;
    Ok(Json(log.verify(&session::id(&id)?).await?))
}
