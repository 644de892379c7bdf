//! `/v1/agents`: agents and their versions.

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use serde_json::{Value, json};

use super::ApiState;
use super::agent::Agent;
use super::attempt::{self, Failed};
use super::body::JsonBody;
use super::cursor::{Direction, Listing};
use super::edge::Owner;
use super::error::ApiError;
use super::page;
use super::query::{Order, Parameters};
use crate::log::objects::{Change, NewObject, Object};

pub const KIND: &str = "agent";

pub async fn create(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let agent = Agent::create(&body)?;
    check_model(&state, "model", &agent)?;
    let object = NewObject {
        kind: KIND,
        id: format!("agent_{}", ipc::id::random_text(24)),
        owner: owner.0,
        unique_name: None,
        body: agent.document(),
    };
    let object = state.engine.log().insert_object(object).await?;
    Ok(Json(wire(&object)))
}

pub async fn list(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let known = ["limit", "page", "include_archived", "created_at[op]"];
    let parameters = Parameters::of(&uri, &known)?;
    let asked = page::asked(KIND, &owner.0, &parameters, page::MAX)?;
    let page = page::read(&state, asked, &parameters).await?;
    Ok(Json(page::body(page.objects.iter().map(wire).collect(), page.next)))
}

pub async fn retrieve(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let parameters = Parameters::of(&uri, &["version"])?;
    let version = match parameters.one("version")? {
        None => None,
        Some(text) => match text.parse::<u32>() {
            Ok(version) if version >= 1 => Some(u64::from(version)),
            _ => return Err(ApiError::field("version", "must be a whole number from 1")),
        },
    };
    let object = state.engine.log().object(KIND, &owner.0, &id, version).await?;
    Ok(Json(wire(&object)))
}

pub async fn update(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    attempt::until_done(&state.turn, || updated(&state, &owner, &id, &body)).await
}

async fn updated(
    state: &ApiState,
    owner: &Owner,
    id: &str,
    body: &Value,
) -> Result<Json<Value>, Failed> {
    let log = state.engine.log();
    let object = log.object(KIND, &owner.0, id, None).await?;
    let old = of_object(&object)?;
    let (new, expected) = old.updated(body)?;
    if object.archived_at.is_some() {
        let why = format!("agent {id}: archived agents cannot change");
        return Err(ApiError::invalid(why).into());
    }
    if let Some(expected) = expected.filter(|expected| *expected != object.version) {
        let current = object.version;
        let message = format!("version: {expected} was expected, the agent has {current}");
        return Err(ApiError::conflict(message).into());
    }
    if new == old {
        return Ok(Json(wire(&object)));
    }
    check_model(state, "model", &new)?;
    let body = new.document();
    let change = Change { from: object, body, unique_name: None, new_version: true };
    Ok(Json(wire(&log.change_object(change).await?)))
}

pub async fn archive(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let object = state.engine.log().archive_object(KIND, &owner.0, &id).await?;
    Ok(Json(wire(&object)))
}

pub async fn versions(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let parameters = Parameters::of(&uri, &["limit", "page"])?;
    let limit = parameters.limit(page::DEFAULT, page::MAX)?;
    let listing = Listing { kind: "agent_versions", scope: &id, order: Order::Desc };
    let before = match parameters.one("page")? {
        None => None,
        Some(text) => {
            let key = listing.position(text)?.key;
            let bad = |_| ApiError::field("page", "not a cursor of this list");
            Some(u64::from(key.parse::<u32>().map_err(bad)?))
        }
    };
    let log = state.engine.log();
    let page = log.object_versions(KIND, &owner.0, &id, before, limit).await?;
    let last = page.objects.last().filter(|_| page.more);
    let next = last.map(|object| listing.cursor(Direction::After, &object.version.to_string()));
    Ok(Json(page::body(page.objects.iter().map(wire).collect(), next)))
}

/// The stored agent. One that cannot be read is a failure of ours.
pub fn of_object(object: &Object) -> Result<Agent, ApiError> {
    Agent::of_document(&object.body).ok_or_else(|| {
        tracing::error!(agent = object.id, version = object.version, "agent is not readable");
        ApiError::unavailable(format!("agent {}: the stored document is not readable", object.id))
    })
}

/// Refuses a model that the configuration does not have, so that no session fails on it later.
pub fn check_model(state: &ApiState, path: &str, agent: &Agent) -> Result<(), ApiError> {
    if state.engine.knows_model(&agent.model.id) {
        return Ok(());
    }
    let known = state.engine.models().join(", ");
    let why = format!(
        "no model {id:?} is configured here: add [models.{id:?}] to harnessd.toml, or use one of: \
         {known}",
        id = agent.model.id
    );
    Err(ApiError::field(path, why))
}

fn wire(object: &Object) -> Value {
    let mut out = json!({ "id": object.id, "type": "agent", "version": object.version });
    if let (Some(out), Some(document)) = (out.as_object_mut(), object.body.as_object()) {
        out.extend(document.clone());
    }
    out["created_at"] = json!(object.created_at);
    out["updated_at"] = json!(object.updated_at);
    out["archived_at"] = json!(object.archived_at);
    out
}
