//! The operator's own routes beside the wire API, with the types of [`ipc::session`].

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use ipc::in_force::InForce;
use ipc::peer::Principal;
use ipc::session::{Health, KeyList, KeyRequest, LogEvent, NewKey};
use ipc::vault::ChainReport;
use serde::Serialize;
use serde_json::{Value, json};

use super::body::JsonBody;
use super::edge::Owner;
use super::error::ApiError;
use super::fields::Fields;
use super::keys::KeysError;
use super::query::Parameters;
use super::{ApiState, session, sessions};

/// Events of one answer, default and maximum.
const LOG_DEFAULT: usize = 100;
const LOG_MAX: usize = 1_000;
const KEY_NAME_CHARS_MAX: usize = 64;

#[derive(Serialize)]
pub struct LogPage {
    events: Vec<LogEvent>,
}

pub async fn health(State(state): State<ApiState>) -> Json<Health> {
    let policies_sha256 = state.policies.current().await.ok().map(|set| set.digest().to_owned());
    Json(Health {
        daemon: "harnessd".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        models: state.engine.models(),
        default_environment: state.config.default_environment.clone(),
        in_force: InForce {
            policies: Some(state.policies.dir().to_owned()),
            policies_sha256,
            ..state.config.in_force.clone()
        },
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

/// Makes a key of the loopback port for the caller, who must come over the Unix socket: a key
/// that could make keys would outlive its removal.
pub async fn add_key(
    State(state): State<ApiState>,
    principal: Option<Extension<Principal>>,
    JsonBody(body): JsonBody,
) -> Result<Json<NewKey>, ApiError> {
    let owner = local(principal)?;
    let mut fields = Fields::of("", &body)?;
    let KeyRequest { name } =
        KeyRequest { name: fields.required_text("name", KEY_NAME_CHARS_MAX)? };
    fields.finish()?;
    // It stands in lists, in paths and in the file of keys.
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !name.chars().all(plain) {
        return Err(ApiError::field("name", "may have letters, digits, '-', '_' and '.' only"));
    }
    let key = state.keys.add(&name, &owner).map_err(refused)?;
    Ok(Json(NewKey { name, owner, key }))
}

pub async fn list_keys(
    State(state): State<ApiState>,
    principal: Option<Extension<Principal>>,
) -> Result<Json<KeyList>, ApiError> {
    let owner = local(principal)?;
    let names = state.keys.names(&owner).map_err(refused)?;
    Ok(Json(KeyList { owner, names }))
}

pub async fn remove_key(
    State(state): State<ApiState>,
    principal: Option<Extension<Principal>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let owner = local(principal)?;
    if !state.keys.remove(&name, &owner).map_err(refused)? {
        return Err(ApiError::not_found("key", &name));
    }
    Ok(Json(json!({ "name": name })))
}

fn local(principal: Option<Extension<Principal>>) -> Result<String, ApiError> {
    let Some(Extension(principal)) = principal else {
        return Err(ApiError::denied("keys are made over the Unix socket only"));
    };
    Ok(principal.owner())
}

fn refused(error: KeysError) -> ApiError {
    match &error {
        KeysError::Taken { .. } => ApiError::conflict(error.to_string()),
        KeysError::Operators { .. } | KeysError::TooMany => ApiError::invalid(error.to_string()),
        _ => ApiError::internal(&error),
    }
}
