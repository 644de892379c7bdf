//! `/v1/environments`: names for policy files.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use policies::Policy;
use serde_json::{Value, json};

use super::ApiState;
use super::attempt::{self, Failed};
use super::body::JsonBody;
use super::edge::Owner;
use super::environment::Environment;
use super::error::ApiError;
use super::page;
use super::query::Parameters;
use super::sessions;
use crate::log::objects::{Change, ListQuery, NewObject, Object};

pub const KIND: &str = "environment";

pub async fn create(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let environment = Environment::create(&body)?;
    bind(&state, &environment).await?;
    let object = NewObject {
        kind: KIND,
        id: format!("env_{}", ipc::id::random_text(24)),
        owner: owner.0,
        unique_name: Some(environment.name.clone()),
        body: environment.document(),
    };
    let object = state.engine.log().insert_object(object).await?;
    Ok(Json(wire(&object)))
}

pub async fn list(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let parameters = Parameters::of(&uri, &["limit", "page", "include_archived"])?;
    let asked = page::asked(KIND, &owner.0, &parameters, page::MAX_LARGE)?;
    let page = page::read(&state, asked, &parameters).await?;
    Ok(Json(page::body(page.objects.iter().map(wire).collect(), page.next)))
}

pub async fn retrieve(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let object = state.engine.log().object(KIND, &owner.0, &id, None).await?;
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
    let object = state.engine.log().object(KIND, &owner.0, id, None).await?;
    let old = of_object(&object)?;
    let new = old.updated(body)?;
    refuse_archived(&object)?;
    bind(state, &new).await?;
    if new == old {
        return Ok(Json(wire(&object)));
    }
    let (body, unique_name) = (new.document(), Some(new.name.clone()));
    let change = Change { from: object, body, unique_name, new_version: false };
    Ok(Json(wire(&state.engine.log().change_object(change).await?)))
}

pub async fn archive(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let object = state.engine.log().archive_object(KIND, &owner.0, &id).await?;
    Ok(Json(wire(&object)))
}

pub async fn delete(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let log = state.engine.log();
    log.object(KIND, &owner.0, &id, None).await?;
    let mut users = ListQuery::new(sessions::KIND, &owner.0, 1);
    users.include_archived = true;
    users.fields = vec![("environment_id".to_owned(), json!(id))];
    if let Some(session) = log.list_objects(users).await?.objects.first() {
        let message = format!("environment {id}: session {} uses it", session.id);
        return Err(ApiError::conflict(message));
    }
    log.remove_object(KIND, &owner.0, &id).await?;
    Ok(Json(json!({ "id": id, "type": "environment_deleted" })))
}

/// The stored environment. One that cannot be read is a failure of ours.
pub fn of_object(object: &Object) -> Result<Environment, ApiError> {
    Environment::of_document(&object.body).ok_or_else(|| {
        tracing::error!(environment = object.id, "environment is not readable");
        let message = format!("environment {}: the stored document is not readable", object.id);
        ApiError::unavailable(message)
    })
}

pub fn refuse_archived(object: &Object) -> Result<(), ApiError> {
    if object.archived_at.is_none() {
        return Ok(());
    }
    let error = ApiError::invalid(format!("environment {}: archived", object.id));
    Err(error.with_code("environment_archived"))
}

/// Finds the policy file of an environment as it is now, and checks the environment against it.
pub async fn bind(state: &ApiState, environment: &Environment) -> Result<Arc<Policy>, ApiError> {
    let set = state.policies.current().await?;
    let default = &state.config.default_environment;
    let name = environment.policy(default);
    if name == policies::HARNESS {
        let why = format!("{name:?} is for harnessd's own model calls: no sandbox is made in it");
        return Err(ApiError::field("metadata.policy", why));
    }
    let Some(policy) = set.environment(name) else {
        let dir = state.policies.dir().display();
        let shown: String = name.chars().take(128).collect();
        let known: Vec<&str> = set.names().filter(|name| *name != policies::HARNESS).collect();
        let known = known.join(", ");
        let why = format!("no policy file {shown}.toml in {dir}; there are: {known}");
        return Err(ApiError::field("metadata.policy", why));
    };
    environment.check(policy)?;
    Ok(Arc::clone(policy))
}

fn wire(object: &Object) -> Value {
    let mut out = json!({ "id": object.id, "type": "environment" });
    if let (Some(out), Some(document)) = (out.as_object_mut(), object.body.as_object()) {
        out.extend(document.clone());
    }
    out["created_at"] = json!(object.created_at);
    out["updated_at"] = json!(object.updated_at);
    out["archived_at"] = json!(object.archived_at);
    out
}
