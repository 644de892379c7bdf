//! `/v1/sessions/{session}/resources`: the files that a session may read.
//!
//! A file goes to sandboxd before the session names it, so that no sandbox lacks what its session
//! says it has. Each session has a copy of its own: what becomes of the file later changes nothing.

use axum::extract::{Path, State};
use axum::{Extension, Json};
use futures_util::TryStreamExt;
use http::{Method, Uri};
use http_body_util::StreamBody;
use hyper::body::Frame;
use ipc::id::SessionId;
use serde_json::{Value, json};

use super::attempt::{self, Failed};
use super::body::JsonBody;
use super::cursor::{Direction, Listing};
use super::edge::Owner;
use super::error::ApiError;
use super::query::{Order, Parameters};
use super::resource::{Given, RESOURCES_MAX, check_place, read};
use super::{ApiState, files, page, session, sessions};
use crate::log::objects::{Change, NewObject, Object};
use crate::log::{FILE, now};

/// Does to its end what was begun at sandboxd, though its client goes away: what is there is named,
/// or gone.
pub async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::spawn(work).await.map_err(|error| ApiError::internal(&error))?
}

/// What a session that is to be has been given.
pub struct Delivered {
    /// As the session's document holds them.
    pub resources: Vec<Value>,
}

/// Gives a new session its files; on a failure it has none.
pub async fn deliver(
    state: &ApiState,
    owner: &Owner,
    session: &SessionId,
    given: &[Given],
) -> Result<Delivered, ApiError> {
    let mut resources: Vec<Value> = Vec::with_capacity(given.len());
    for one in given {
        check_place(one, &places(&resources))?;
        resources.push(resource_of(one));
    }
    // All are looked up before the first is sent.
    let mut sources = Vec::with_capacity(given.len());
    for one in given {
        sources.push(source(state, owner, one).await?);
    }
    for ((one, resource), source) in given.iter().zip(&resources).zip(&sources) {
        if let Err(error) = send(state, owner, session, one, resource, source).await {
            take_back(state, owner, session).await;
            return Err(error);
        }
    }
    Ok(Delivered { resources })
}

/// Removes what a session was given that did not come to be.
pub async fn take_back(state: &ApiState, owner: &Owner, session: &SessionId) {
    let path = format!("/v1/sessions/{session}");
    if let Err(fault) = state.config.sandboxd.delete::<Value>(&path).await {
        tracing::warn!(%session, %fault, "what it was given stays in sandboxd's state");
    }
    if let Err(error) = state.engine.log().remove_files_of(&owner.0, session.as_str()).await {
        tracing::warn!(%session, %error, "its files stay in the log");
    }
}

pub async fn add(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let given = read("", &body)?;
    to_the_end(add_to(state, owner, id, given)).await
}

async fn add_to(
    state: ApiState,
    owner: Owner,
    id: String,
    given: Given,
) -> Result<Json<Value>, ApiError> {
    let session = session::id(&id)?;
    let _gifts = state.gifts.lock().await;
    let object = state.engine.log().object(sessions::KIND, &owner.0, &id, None).await?;
    let resources = resources_of(&object);
    check_room(&object, &given, &resources)?;
    let source = source(&state, &owner, &given).await?;
    let resource = resource_of(&given);
    send(&state, &owner, &session, &given, &resource, &source).await?;
    let added = change(&state, &owner, &id, |resources, object| {
        check_room(object, &given, resources)?;
        resources.push(resource.clone());
        Ok(())
    })
    .await;
    match added {
        Ok(()) => Ok(Json(resource)),
        Err(error) => {
            forget(&state, &owner, &session, &resource).await?;
            Err(error)
        }
    }
}

pub async fn list(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let parameters = Parameters::of(&uri, &["limit", "page"])?;
    let limit = parameters.limit(page::MAX_LARGE, page::MAX_LARGE)?;
    let object = state.engine.log().object(sessions::KIND, &owner.0, &id, None).await?;
    let resources = resources_of(&object);
    let listing = Listing { kind: "resources", scope: &id, order: Order::Asc };
    let start = match parameters.one("page")? {
        None => 0,
        Some(text) => {
            let last = listing.position(text)?.key;
            let at = resources.iter().position(|one| one["id"] == *last);
            at.ok_or_else(|| ApiError::field("page", "its resource is there no more"))? + 1
        }
    };
    let part: Vec<Value> = resources[start..].iter().take(limit).cloned().collect();
    let last = part.last().filter(|_| start + limit < resources.len());
    let key = last.and_then(|one| one["id"].as_str());
    let next = key.map(|key| listing.cursor(Direction::After, key));
    Ok(Json(page::body(part, next)))
}

pub async fn retrieve(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path((id, resource)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let object = state.engine.log().object(sessions::KIND, &owner.0, &id, None).await?;
    find(&object, &resource).map(Json)
}

/// Only a repository's token can be changed, and there are no repositories.
pub async fn update(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path((id, resource)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let object = state.engine.log().object(sessions::KIND, &owner.0, &id, None).await?;
    find(&object, &resource)?;
    let why = "of type file, and only a github_repository's token can be changed";
    Err(ApiError::invalid(format!("resource {resource}: {why}")))
}

pub async fn remove(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path((id, resource)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    to_the_end(remove_from(state, owner, id, resource)).await
}

async fn remove_from(
    state: ApiState,
    owner: Owner,
    id: String,
    resource: String,
) -> Result<Json<Value>, ApiError> {
    let session = session::id(&id)?;
    let _gifts = state.gifts.lock().await;
    let object = state.engine.log().object(sessions::KIND, &owner.0, &id, None).await?;
    let found = find(&object, &resource)?;
    refuse_archived(&object)?;
    // In this order: one that cannot be taken away is still named.
    forget(&state, &owner, &session, &found).await?;
    change(&state, &owner, &id, |resources, _| {
        resources.retain(|one| one["id"] != *resource);
        Ok(())
    })
    .await?;
    Ok(Json(json!({ "id": resource, "type": "session_resource_deleted" })))
}

/// Changes a session's list, however often another change of the session comes between.
async fn change(
    state: &ApiState,
    owner: &Owner,
    id: &str,
    edit: impl Fn(&mut Vec<Value>, &Object) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    let log = state.engine.log();
    attempt::until_done(&state.turn, || async {
        let object = log.object(sessions::KIND, &owner.0, id, None).await?;
        let mut resources = resources_of(&object);
        edit(&mut resources, &object)?;
        let mut body = object.body.clone();
        body["resources"] = json!(resources);
        // sandboxd knows of it from now on, even if all of them go again.
        body["given"] = json!(true);
        let change = Change { from: object, body, unique_name: None, new_version: false };
        log.change_object(change).await?;
        Ok::<(), Failed>(())
    })
    .await
}

/// The list of a session, which one of an earlier version has not.
pub fn resources_of(object: &Object) -> Vec<Value> {
    object.body["resources"].as_array().cloned().unwrap_or_default()
}

fn find(object: &Object, resource: &str) -> Result<Value, ApiError> {
    let found = resources_of(object).into_iter().find(|one| one["id"] == *resource);
    found.ok_or_else(|| ApiError::not_found("resource", resource))
}

fn check_room(object: &Object, given: &Given, resources: &[Value]) -> Result<(), ApiError> {
    refuse_archived(object)?;
    if resources.len() >= RESOURCES_MAX {
        let why = format!("a session has at most {RESOURCES_MAX}");
        return Err(ApiError::field("resources", why));
    }
    check_place(given, &places(resources))
}

fn refuse_archived(object: &Object) -> Result<(), ApiError> {
    match object.archived_at {
        None => Ok(()),
        Some(_) => Err(ApiError::invalid(format!("session {}: archived", object.id))),
    }
}

fn places(resources: &[Value]) -> Vec<String> {
    let place = |one: &Value| one["mount_path"].as_str().unwrap_or_default().to_owned();
    resources.iter().map(place).collect()
}

fn resource_of(given: &Given) -> Value {
    let time = now();
    json!({
        "id": format!("sesrsc_{}", ipc::id::random_text(24)),
        "type": "file",
        "file_id": files::new_id(),
        "mount_path": given.mount_path(),
        "created_at": time,
        "updated_at": time,
    })
}

/// The file that is to be given, which must be one that was uploaded.
async fn source(state: &ApiState, owner: &Owner, given: &Given) -> Result<Object, ApiError> {
    let file = files::living(state, owner, &given.file_id).await?;
    if file.body["scope"].is_null() {
        return Ok(file);
    }
    let field = if given.path.is_empty() { "file_id" } else { &format!("{}.file_id", given.path) };
    Err(ApiError::field(field, format!("{} is a session's own copy", file.id)))
}

/// Sends a file to sandboxd and takes note of the session's copy.
async fn send(
    state: &ApiState,
    owner: &Owner,
    session: &SessionId,
    given: &Given,
    resource: &Value,
    source: &Object,
) -> Result<(), ApiError> {
    let bytes = files::bytes_of(state, source).map_ok(Frame::data);
    let path = upload_path(session, owner, &given.below);
    state.config.sandboxd.call_body(Method::PUT, &path, StreamBody::new(Box::pin(bytes))).await?;
    let mut body = source.body.clone();
    body["scope"] = json!({ "type": "session", "id": session });
    body["expires_at"] = Value::Null;
    let id = resource["file_id"].as_str().unwrap_or_default().to_owned();
    let copy = NewObject { kind: FILE, id, owner: owner.0.clone(), unique_name: None, body };
    state.engine.log().insert_object(copy).await?;
    Ok(())
}

/// Takes a file away from sandboxd, and the note of it.
async fn forget(
    state: &ApiState,
    owner: &Owner,
    session: &SessionId,
    resource: &Value,
) -> Result<(), ApiError> {
    let place = resource["mount_path"].as_str().unwrap_or_default();
    let below = place.strip_prefix(ipc::sandbox::UPLOADS).unwrap_or(place).trim_start_matches('/');
    state.config.sandboxd.delete::<Value>(&upload_path(session, owner, below)).await?;
    let id = resource["file_id"].as_str().unwrap_or_default();
    match state.engine.log().remove_file(&owner.0, id).await {
        Err(error) if !matches!(error, crate::log::LogError::NoObject { .. }) => Err(error.into()),
        _ => Ok(()),
    }
}

fn upload_path(session: &SessionId, owner: &Owner, below: &str) -> String {
    let (owner, below) = (encoded(&owner.0), encoded(below));
    format!("/v1/sessions/{session}/uploads?owner={owner}&path={below}")
}

/// A text as a value of a query.
fn encoded(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    };
    text.bytes().map(one).collect()
}
