//! The HTTP API on `sandboxd.sock`, as the `ipc::sandbox` module documents it.
//!
//! Each function is one route: who asks, is it theirs, do it. What belongs to somebody else is
//! answered as what does not exist.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::routing::{delete, get, post, put};
use axum::{Extension, Json, Router};
use ipc::fault::{Code, Fault};
use ipc::id::{CallId, SandboxId, SessionId};
use ipc::in_force::InForce;
use ipc::peer::Principal;
use ipc::sandbox::{CallReport, Execute, Health, Receipt, Upload};
use serde_json::{Value, json};

use crate::execute::Service;
use crate::journal::Fenced;
use crate::probe::HostFacts;

/// Longest body: a file to be written, as JSON, with room to spare.
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How long ending a sandbox may hold up its caller.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// What the routes share.
#[derive(Clone, Debug)]
pub struct Control {
    pub service: Arc<Service>,
    pub host: Arc<HostFacts>,
    /// The configuration's file and the digest of its text.
    pub config: Arc<(PathBuf, Option<String>)>,
}

/// The routes of `sandboxd.sock`.
pub fn router(control: Control) -> Router {
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/execute", post(execute))
        .route("/v1/calls/{call}", get(report))
        .route("/v1/calls/{call}/cancel", post(cancel))
        .route("/v1/sandboxes", get(sandboxes))
        .route("/v1/sandboxes/{sandbox}", delete(end_sandbox))
        .route("/v1/sessions/{session}", delete(end_session))
        .route("/v1/sessions/{session}/uploads", put(upload).delete(take_away))
        .fallback(nothing_here)
        .method_not_allowed_fallback(nothing_here)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(control)
}

async fn nothing_here() -> Fault {
    Fault::new(Code::NotFound, "there is no such call on this socket")
}

async fn health(State(control): State<Control>) -> Json<Health> {
    Json(Health {
        daemon: "sandboxd".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        journal: control.service.journal.identity().into(),
        mode: control.host.mode.into(),
        layers: control.host.layers.clone(),
        notes: control.host.notes.clone(),
        in_force: in_force(&control),
        ready: control.service.sandboxes.ready(),
    })
}

fn in_force(control: &Control) -> InForce {
    let environments = &control.service.sandboxes.environments;
    InForce {
        policies: Some(environments.directory().to_owned()),
        policies_sha256: environments.digest(),
        config: Some(control.config.0.clone()),
        config_sha256: control.config.1.clone(),
    }
}

async fn execute(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
    body: Result<Json<Execute>, JsonRejection>,
) -> Result<Json<Receipt>, Fault> {
    let Json(request) = body.map_err(|rejection| {
        let too_large = rejection.status() == http::StatusCode::PAYLOAD_TOO_LARGE;
        if too_large {
            let text = format!("the body is longer than {BODY_BYTES_MAX} bytes");
            return Fault::new(Code::TooLarge, text);
        }
        Fault::new(Code::Invalid, rejection.body_text())
    })?;
    control.service.execute(&peer, request).await.map(Json)
}

async fn report(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
    Path(call): Path<String>,
) -> Result<Json<CallReport>, Fault> {
    let call = id(CallId::parse(&call))?;
    control.service.report(&peer, &call).await.map(Json)
}

async fn cancel(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
    Path(call): Path<String>,
) -> Result<Json<Value>, Fault> {
    let call = id(CallId::parse(&call))?;
    control.service.cancel(&peer, &call).await?;
    Ok(Json(json!({})))
}

async fn sandboxes(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
) -> Json<Value> {
    let mut found: Vec<_> = control
        .service
        .sandboxes
        .living()
        .iter()
        .filter(|sandbox| control.service.owners.speaks_for(&peer, &sandbox.owner))
        .map(|sandbox| sandbox.describe())
        .collect();
    found.sort_by(|a, b| a.created_at.cmp(&b.created_at).then(a.sandbox.cmp(&b.sandbox)));
    Json(json!({ "sandboxes": found }))
}

async fn end_sandbox(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
    Path(sandbox): Path<String>,
) -> Result<Json<Value>, Fault> {
    let wanted = id(SandboxId::parse(&sandbox))?;
    let sandbox = control
        .service
        .sandboxes
        .find(&wanted)
        .filter(|sandbox| control.service.owners.speaks_for(&peer, &sandbox.owner))
        .ok_or_else(|| Fault::new(Code::NotFound, format!("no sandbox {wanted}")))?;
    sandbox.close();
    let _ = tokio::time::timeout(END_TIMEOUT, sandbox.removed.cancelled()).await;
    Ok(Json(json!({})))
}

async fn end_session(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
    Path(session): Path<String>,
) -> Result<Json<Value>, Fault> {
    let service = &control.service;
    let session = id(SessionId::parse(&session))?;
    let owner = service.journal.session_owner(&session).await;
    let owner = owner.map_err(|e| Fault::new(Code::Unavailable, e.to_string()))?;
    if !owner.is_some_and(|owner| service.owners.speaks_for(&peer, &owner)) {
        return Err(Fault::new(Code::NotFound, format!("no session {session}")));
    }
    // First, so that no call makes a new sandbox meanwhile. On a full disk it may take the room of
    // the workspace to be able to write that it is gone.
    let forgotten = service.journal.delete_session(&session).await;
    for sandbox in service.sandboxes.living() {
        if sandbox.session.as_ref() == Some(&session) {
            sandbox.close();
            let _ = tokio::time::timeout(END_TIMEOUT, sandbox.removed.cancelled()).await;
        }
    }
    let (workspaces, name) = (service.sandboxes.workspaces.clone(), session.clone());
    let removed = tokio::task::spawn_blocking(move || {
        workspaces.end_of_uploads(&name)?;
        workspaces.end_of_session(&name)
    });
    let removed = removed.await;
    match removed {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(cannot_remove(&session, &error.to_string())),
        Err(error) => return Err(cannot_remove(&session, &error.to_string())),
    }
    if forgotten.is_err() {
        let again = service.journal.delete_session(&session).await;
        again.map_err(|e| Fault::new(Code::Unavailable, e.to_string()))?;
    }
    Ok(Json(json!({})))
}

async fn upload(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
    Path(session): Path<String>,
    Query(upload): Query<Upload>,
    body: Body,
) -> Result<Json<Value>, Fault> {
    let session = of_owner(&control, &peer, &session, &upload.owner).await?;
    control.service.sandboxes.workspaces.upload(&session, &upload.path, body).await?;
    Ok(Json(json!({})))
}

async fn take_away(
    State(control): State<Control>,
    Extension(peer): Extension<Principal>,
    Path(session): Path<String>,
    Query(upload): Query<Upload>,
) -> Result<Json<Value>, Fault> {
    let session = of_owner(&control, &peer, &session, &upload.owner).await?;
    control.service.sandboxes.workspaces.take_away(&session, &upload.path)?;
    Ok(Json(json!({})))
}

/// The session, which is this owner's from now on if nobody had it before.
async fn of_owner(
    control: &Control,
    peer: &Principal,
    session: &str,
    owner: &str,
) -> Result<SessionId, Fault> {
    let service = &control.service;
    let session = id(SessionId::parse(session))?;
    let absent = || Fault::new(Code::NotFound, format!("no session {session}"));
    if !service.owners.speaks_for(peer, owner) {
        return Err(absent());
    }
    let owned = service.journal.own_session(&session, owner).await;
    match owned.map_err(|e| Fault::new(Code::Unavailable, e.to_string()))? {
        Fenced::Current | Fenced::Stale { .. } => Ok(session),
        Fenced::Foreign => Err(absent()),
        Fenced::Deleted => {
            Err(Fault::new(Code::Conflict, format!("session {session} was deleted")))
        }
    }
}

fn cannot_remove(session: &SessionId, why: &str) -> Fault {
    Fault::new(Code::Internal, format!("cannot remove the workspace of session {session}: {why}"))
}

fn id<T>(parsed: Result<T, ipc::id::InvalidId>) -> Result<T, Fault> {
    parsed.map_err(|e| Fault::new(Code::Invalid, e.to_string()))
}
