//! `/v1/sessions`: create, read, change, archive, delete.

use axum::extract::{Path, State};
use axum::{Extension, Json};
use http::Uri;
use ipc::id::SessionId;
use ipc::session::METADATA_WORKSPACE;
use serde_json::{Value, json};

use super::agent::{Agent, patched_servers, patched_tools};
use super::attempt::{self, Failed};
use super::body::JsonBody;
use super::edge::Owner;
use super::error::ApiError;
use super::fields::{Fields, Patch};
use super::query::Parameters;
use super::resource::{self, Given, RESOURCES_MAX};
use super::{ApiState, agents, budget, environments, history, mcp, page, resources, send, session};
use crate::log::Guard;
use crate::log::event::{self, Body, Created, NewEvent, Status};
use crate::log::objects::{Change, NewObject, Object};

pub const KIND: &str = "session";
/// The wire API states no limit for titles.
const TITLE_CHARS_MAX: usize = 1_024;
const ID_CHARS_MAX: usize = ipc::id::ID_BYTES_MAX;
const INITIAL_EVENTS_MAX: usize = 50;

pub async fn create(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let mut fields = Fields::of("", &body)?;
    let (agent, base) = resolve_agent(&state, &owner, fields.required("agent")?).await?;
    let environment_id = fields.required_text("environment_id", ID_CHARS_MAX)?;
    let title = fields.text("title", TITLE_CHARS_MAX)?.value();
    let metadata = fields.metadata()?;
    fields.unsupported("vault_ids")?;
    let given = match fields.array("resources", RESOURCES_MAX)?.value() {
        Some(items) => read_resources(items)?,
        None => Vec::new(),
    };
    let budget = fields.any("budget").filter(|value| !value.is_null());
    let budget_cents = budget.map(budget::read).transpose()?;
    let initial = match fields.array("initial_events", INITIAL_EVENTS_MAX)?.value() {
        Some(items) => send::read_initial("initial_events", items)?,
        None => Vec::new(),
    };
    fields.finish()?;
    agents::check_model(&state, "agent.model", &agent)?;
    if budget_cents.is_some() {
        budget::check_price(&state, &agent.model.id)?;
    }
    let environment =
        state.engine.log().object(environments::KIND, &owner.0, &environment_id, None).await?;
    environments::refuse_archived(&environment)?;
    let policy = environments::bind(&state, &environments::of_object(&environment)?).await?;

    let session = SessionId::random();
    let effective = session::effective(&agent, &base.id, base.version);
    let workspace = session::workspace(&metadata)?;
    let document = json!({
        "title": title,
        "metadata": metadata,
        "agent": effective.snapshot,
        "agent_id": base.id,
        "agent_version": base.version,
        "environment_id": environment_id,
        "budget": budget::wire(budget_cents),
        "given": !given.is_empty(),
    });
    let object = NewObject {
        kind: KIND,
        id: session.as_str().to_owned(),
        owner: owner.0.clone(),
        unique_name: None,
        body: document,
    };
    let created = Created {
        owner: owner.0.clone(),
        policy: policy.name.clone(),
        workspace,
        agent: effective,
        budget_cents,
    };
    let mut events = vec![NewEvent::new(Body::SessionCreated(created))];
    events.extend(initial.into_iter().map(NewEvent::new));
    resources::to_the_end(establish(state, owner, session, object, events, given)).await
}

/// Gives a session its files and makes it.
async fn establish(
    state: ApiState,
    owner: Owner,
    session: SessionId,
    mut object: NewObject,
    events: Vec<NewEvent>,
    given: Vec<Given>,
) -> Result<Json<Value>, ApiError> {
    let delivered = resources::deliver(&state, &owner, &session, &given).await?;
    object.body["resources"] = json!(delivered.resources);
    if let Err(error) = state.engine.create_session(&session, object, events).await {
        if !given.is_empty() {
            resources::take_back(&state, &owner, &session).await;
        }
        return Err(error.into());
    }
    answer(&state, &owner, &session).await
}

pub async fn list(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let known = [
        "limit",
        "page",
        "order",
        "include_archived",
        "created_at[op]",
        "statuses[]",
        "agent_id",
        "agent_version",
        "deployment_id",
        "memory_store_id",
    ];
    let parameters = Parameters::of(&uri, &known)?;
    let mut asked = page::asked(KIND, &owner.0, &parameters, page::MAX_LARGE)?;
    for text in parameters.many("statuses") {
        let why = "must be idle, running, rescheduling or terminated";
        let status = Status::parse(text).ok_or_else(|| ApiError::field("statuses", why))?;
        asked.query.statuses.push(status);
    }
    let agent = parameters.one("agent_id")?;
    if let Some(agent) = agent {
        asked.query.fields.push(("agent_id".to_owned(), json!(agent)));
    }
    if let Some(text) = parameters.one("agent_version")? {
        if agent.is_none() {
            return Err(ApiError::field("agent_version", "only together with agent_id"));
        }
        let bad = |_| ApiError::field("agent_version", "must be a whole number from 1");
        let version: u32 = text.parse().map_err(bad)?;
        asked.query.fields.push(("agent_version".to_owned(), json!(version)));
    }
    for key in ["deployment_id", "memory_store_id"] {
        if parameters.one(key)?.is_some() {
            return Err(ApiError::unsupported(key));
        }
    }
    let page = page::read(&state, asked, &parameters).await?;
    let mut data = Vec::with_capacity(page.objects.len());
    for object in &page.objects {
        match session::wire(&state, object).await {
            Ok(session) => data.push(session),
            // Deleted since the list was read.
            Err(error) if error.status == http::StatusCode::NOT_FOUND => {}
            Err(error) => return Err(error),
        }
    }
    let mut body = page::body(data, page.next);
    body["prev_page"] = json!(page.prev);
    Ok(Json(body))
}

pub async fn retrieve(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let object = state.engine.log().object(KIND, &owner.0, &id, None).await?;
    Ok(Json(session::wire(&state, &object).await?))
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
    let session = session::id(id)?;
    let chain = log.chain(&session).await?;
    let mut fields = Fields::of("", body)?;
    let title = fields.text("title", TITLE_CHARS_MAX)?;
    let metadata = patched_metadata(&mut fields, &object)?;
    let agent = patched_agent(&mut fields, &object)?;
    if fields.any("vault_ids").is_some() {
        return Err(ApiError::unsupported("vault_ids").into());
    }
    let budget = match fields.any("budget") {
        Some(value) => {
            let spending = history::fold_after(log, &session, chain.events).await?.spending();
            let changed = budget::changed(state, &spending, &model(&object)?, value)?;
            changed.map(|cents| (cents, spending.is_at_budget()))
        }
        None => None,
    };
    fields.finish()?;
    if chain.status == Status::Terminated {
        let why = format!("session {id}: terminated sessions cannot change");
        return Err(ApiError::invalid(why).into());
    }
    let idle = session::status(&chain) == Status::Idle;
    if agent.is_some() && !idle {
        let why = format!("agent: session {id} is running: wait for idle");
        return Err(ApiError::conflict(why).into());
    }

    let title = match title {
        Patch::Keep => None,
        Patch::Clear => Some(Value::Null),
        Patch::Set(title) => Some(json!(title)),
    };
    let title = title.filter(|title| *title != object.body["title"]);
    let metadata = metadata.filter(|metadata| *metadata != object.body["metadata"]);
    let agent = agent.filter(|agent| agent.snapshot != object.body["agent"]);
    if title.is_none() && metadata.is_none() && agent.is_none() && budget.is_none() {
        return Ok(Json(session::wire(state, &object).await?));
    }
    // A turn that stopped at the budget goes on under another. One that runs looks again itself,
    // but may be about to stop.
    let wakes = budget.is_some_and(|(_, stopped)| stopped || !idle);
    // A new agent must not come between the events of a turn, nor a budget unseen behind its end:
    // the log must not have grown.
    let still = agent.is_some() || (budget.is_some() && !wakes);
    let guard = Guard { last: still.then_some(chain.events), wakes, ..Guard::default() };
    let budget_cents = budget.map(|(cents, _)| cents);
    let body = document(&object, title.as_ref(), metadata.as_ref(), agent.as_ref(), budget_cents);
    let change = Change { from: object, body, unique_name: None, new_version: false };
    let event = Body::SessionUpdated { agent, title, metadata, budget_cents };
    let object = state.engine.update(&session, guard, event.into(), change).await?;
    Ok(Json(session::wire(state, &object).await?))
}

fn read_resources(items: &[Value]) -> Result<Vec<Given>, ApiError> {
    let one = |(at, item)| resource::read(&format!("resources[{at}]"), item);
    items.iter().enumerate().map(one).collect()
}

/// The session's document after an update.
fn document(
    object: &Object,
    title: Option<&Value>,
    metadata: Option<&Value>,
    agent: Option<&event::Agent>,
    budget_cents: Option<Option<u64>>,
) -> Value {
    let mut document = object.body.clone();
    let budget = budget_cents.map(budget::wire);
    let snapshot = agent.map(|agent| &agent.snapshot);
    let changes = [
        ("title", title),
        ("metadata", metadata),
        ("agent", snapshot),
        ("budget", budget.as_ref()),
    ];
    for (key, value) in changes {
        if let Some(value) = value {
            document[key] = value.clone();
        }
    }
    document
}

/// The model that the session's agent names.
fn model(object: &Object) -> Result<String, ApiError> {
    let agent = Agent::of_document(&object.body["agent"]);
    let unreadable = || ApiError::unavailable(format!("session {}: not readable", object.id));
    agent.map(|agent| agent.model.id).ok_or_else(unreadable)
}

pub async fn archive(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let log = state.engine.log();
    let object = log.object(KIND, &owner.0, &id, None).await?;
    let session = session::id(&id)?;
    if object.archived_at.is_none() {
        if log.chain(&session).await?.status != Status::Terminated {
            state.engine.archive(&session).await?;
        }
        log.archive_object(KIND, &owner.0, &id).await?;
    }
    answer(&state, &owner, &session).await
}

pub async fn delete(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    // One that is just being given would stay in sandboxd's state.
    let _gifts = state.gifts.lock().await;
    let object = state.engine.log().object(KIND, &owner.0, &id, None).await?;
    let given = object.body["given"] == true;
    state.engine.delete(&session::id(&id)?, &owner.0, given).await?;
    state.engine.log().remove_files_of(&owner.0, &id).await?;
    Ok(Json(json!({ "id": id, "type": "session_deleted" })))
}

async fn answer(
    state: &ApiState,
    owner: &Owner,
    session: &SessionId,
) -> Result<Json<Value>, ApiError> {
    let object = state.engine.log().object(KIND, &owner.0, session.as_str(), None).await?;
    Ok(Json(session::wire(state, &object).await?))
}

/// The agent a request names, with its overrides, and the stored version it comes from.
async fn resolve_agent(
    state: &ApiState,
    owner: &Owner,
    value: &Value,
) -> Result<(Agent, Object), ApiError> {
    let log = state.engine.log();
    if let Some(id) = value.as_str() {
        let object = log.object(agents::KIND, &owner.0, id, None).await?;
        refuse_archived(&object)?;
        return Ok((agents::of_object(&object)?, object));
    }
    let mut fields = Fields::of("agent", value)
        .map_err(|_| ApiError::field("agent", "must be an agent's id or an object with one"))?;
    let overrides = match fields.kind()? {
        "agent" => false,
        "agent_with_overrides" => true,
        _ => {
            let why = "must be agent or agent_with_overrides";
            return Err(ApiError::field("agent.type", why));
        }
    };
    let id = fields.required_text("id", ID_CHARS_MAX)?;
    let version = fields.version("version")?;
    let object = log.object(agents::KIND, &owner.0, &id, version).await?;
    refuse_archived(&object)?;
    let base = agents::of_object(&object)?;
    let agent = if overrides { base.overridden(&mut fields)? } else { base };
    fields.finish()?;
    Ok((agent, object))
}

fn refuse_archived(agent: &Object) -> Result<(), ApiError> {
    match agent.archived_at {
        None => Ok(()),
        Some(_) => Err(ApiError::field("agent", format!("agent {} is archived", agent.id))),
    }
}

/// The metadata after an update. The workspace is where the session's work lies: it stays.
fn patched_metadata(fields: &mut Fields<'_>, object: &Object) -> Result<Option<Value>, ApiError> {
    let mut old = std::collections::BTreeMap::new();
    if let Some(map) = object.body["metadata"].as_object() {
        for (key, value) in map {
            old.insert(key.clone(), value.as_str().unwrap_or_default().to_owned());
        }
    }
    let new = fields.metadata_over(&old)?;
    if new.get(METADATA_WORKSPACE) != old.get(METADATA_WORKSPACE) {
        let path = format!("metadata.{METADATA_WORKSPACE}");
        return Err(ApiError::field(&path, "can only be set when the session is created"));
    }
    Ok((new != old).then(|| json!(new)))
}

/// The agent after an update of its tools, which is all of it that can change.
fn patched_agent(
    fields: &mut Fields<'_>,
    object: &Object,
) -> Result<Option<event::Agent>, ApiError> {
    let Some(value) = fields.any("agent").filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let mut given = Fields::of("agent", value)?;
    let snapshot = &object.body["agent"];
    let unreadable = || ApiError::unavailable(format!("session {}: not readable", object.id));
    let mut agent = Agent::of_document(snapshot).ok_or_else(unreadable)?;
    agent.tools = patched_tools(&mut given, "agent.tools", &agent.tools)?;
    agent.mcp_servers = patched_servers(&mut given, "agent.mcp_servers", &agent.mcp_servers)?;
    mcp::check(&agent.mcp_servers, &agent.tools)?;
    given.finish()?;
    let id = snapshot["id"].as_str().ok_or_else(unreadable)?;
    let version = snapshot["version"].as_u64().ok_or_else(unreadable)?;
    Ok(Some(session::effective(&agent, id, version)))
}
