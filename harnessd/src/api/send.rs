//! `POST /v1/sessions/ID/events`: what a client says to a session.
//!
//! All events of a request are checked before any is stored. An answer to a tool call must name a
//! call of this session that waits for that kind of answer; the same answer again is no error and
//! stores nothing, since clients repeat requests whose connection broke.

use axum::extract::{Path, State};
use axum::{Extension, Json};
use serde_json::{Value, json};

use super::body::JsonBody;
use super::edge::Owner;
use super::error::ApiError;
use super::fields::Fields;
use super::{ApiState, history, session, sessions, wire, wire_blocks};
use crate::log::Log;
use crate::log::event::{Body, Event, HandKind, NewEvent, Permission, Status, ToolUse};
use ipc::id::SessionId;

/// Most events of one request. The wire API states no number; a turn needs a handful.
const EVENTS_MAX: usize = 1_000;
const ID_CHARS_MAX: usize = ipc::id::ID_BYTES_MAX;
const DENY_CHARS_MAX: usize = 10_000;
/// The kinds of events that answer a call or close it.
const OF_CALLS: &[&str] = &["user_tool_confirmation", "user_custom_tool_result", "tool_result"];

pub async fn send(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let log = state.engine.log();
    let object = log.object(sessions::KIND, &owner.0, &id, None).await?;
    let session = session::id(&id)?;
    let mut fields = Fields::of("", &body)?;
    let items = fields.array("events", EVENTS_MAX)?.value();
    let items = items.filter(|items| !items.is_empty());
    let items = items.ok_or_else(|| ApiError::field("events", "must have at least one event"))?;
    fields.finish()?;
    let mut bodies = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        bodies.push(read_one(&format!("events[{at}]"), item, id.as_str())?);
    }
    let chain = log.chain(&session).await?;
    if chain.status == Status::Terminated {
        return Err(ApiError::invalid(format!(
            "session {id}: archived or terminated: cannot send events"
        )));
    }

    let speaks = bodies.iter().any(|body| matches!(body, Body::UserMessage { .. }));
    if speaks && !object.body["budget"].is_null() {
        let fold = history::fold_after(log, &session, chain.events).await?;
        if fold.spending().is_at_budget() {
            return Err(ApiError::invalid(format!(
                "session {id}: its budget is reached: raise or remove it; until then only \
                 user.tool_confirmation, user.custom_tool_result and user.interrupt are accepted"
            )));
        }
    }

    let answers = bodies.iter().any(|body| answered(body).is_some());
    let _alone = if answers { Some(state.answers.lock().await) } else { None };
    let history = if answers { about(log, &session, &bodies).await? } else { Vec::new() };
    let plan = plan(bodies, &history)?;
    let new: Vec<NewEvent> = plan.iter().filter_map(Planned::new_event).collect();
    let stored = match new.is_empty() {
        true => Vec::new(),
        false => state.engine.send(&session, new).await?,
    };
    Ok(Json(json!({ "data": echo(plan, stored, &history, &id) })))
}

/// What the log says about the calls that are answered: the calls, and what came of them since.
async fn about(log: &Log, session: &SessionId, bodies: &[Body]) -> Result<Vec<Event>, ApiError> {
    let mut calls: Vec<Event> = Vec::new();
    for id in bodies.iter().filter_map(answered) {
        if !calls.iter().any(|call| call.id == id) {
            calls.extend(log.event_of_id(session, id).await?);
        }
    }
    let Some(first) = calls.iter().map(|call| call.seq).min() else { return Ok(Vec::new()) };
    calls.extend(log.of_kinds(session, OF_CALLS, first, u64::MAX).await?);
    Ok(calls)
}

/// Reads the events that a session may begin with.
pub fn read_initial(path: &str, items: &[Value]) -> Result<Vec<Body>, ApiError> {
    let mut bodies = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        let path = format!("{path}[{at}]");
        let body = read_one(&path, item, "")?;
        if !matches!(body, Body::UserMessage { .. }) {
            let why = "only user.message can begin a session";
            return Err(ApiError::field(&format!("{path}.type"), why));
        }
        bodies.push(body);
    }
    Ok(bodies)
}

fn read_one(path: &str, item: &Value, session: &str) -> Result<Body, ApiError> {
    let mut fields = Fields::of(path, item)?;
    let body = match fields.kind()? {
        "user.message" => {
            let content = fields.required("content")?;
            let content = wire_blocks::read(&fields.path("content"), content)?;
            if content.is_empty() {
                return Err(ApiError::field(&fields.path("content"), "must not be empty"));
            }
            Body::UserMessage { content }
        }
        "user.interrupt" => {
            let thread = fields.text("session_thread_id", ID_CHARS_MAX)?.value();
            if thread.is_some_and(|thread| thread != wire::thread_id(session)) {
                let why = "this session has no such thread";
                return Err(ApiError::field(&fields.path("session_thread_id"), why));
            }
            Body::UserInterrupt {}
        }
        "user.tool_confirmation" => confirmation(&mut fields)?,
        "user.custom_tool_result" => Body::UserCustomToolResult {
            tool_use: fields.required_text("custom_tool_use_id", ID_CHARS_MAX)?,
            content: match fields.any("content").filter(|content| !content.is_null()) {
                Some(content) => wire_blocks::read_result(&fields.path("content"), content)?,
                None => Vec::new(),
            },
            is_error: fields.flag("is_error")?.unwrap_or(false),
        },
        known @ ("user.tool_result" | "user.define_outcome" | "system.message") => {
            return Err(ApiError::unsupported(&format!("{path}.type: {known}")));
        }
        _ => return Err(ApiError::field(&format!("{path}.type"), "is no event that clients send")),
    };
    fields.finish()?;
    Ok(body)
}

fn confirmation(fields: &mut Fields<'_>) -> Result<Body, ApiError> {
    let tool_use = fields.required_text("tool_use_id", ID_CHARS_MAX)?;
    let result = fields.required_text("result", ID_CHARS_MAX)?;
    let deny_message = fields.text("deny_message", DENY_CHARS_MAX)?.value();
    let allow = match result.as_str() {
        "allow" => true,
        "deny" => false,
        _ => return Err(ApiError::field(&fields.path("result"), "must be allow or deny")),
    };
    if allow && deny_message.is_some() {
        return Err(ApiError::field(&fields.path("deny_message"), "only with result deny"));
    }
    // Whoever read the event fills this in with what it said; there is one thread.
    fields.text("session_thread_id", ID_CHARS_MAX)?;
    Ok(Body::UserToolConfirmation { tool_use, allow, deny_message })
}

/// What becomes of one event of the request.
enum Planned {
    Append(Box<NewEvent>),
    /// The same answer is in the log, under this id.
    Stored(String),
}

impl Planned {
    fn new_event(&self) -> Option<NewEvent> {
        match self {
            Self::Append(event) => Some(NewEvent::clone(event)),
            Self::Stored(_) => None,
        }
    }

    fn id(&self) -> &str {
        match self {
            Self::Append(event) => &event.id,
            Self::Stored(id) => id,
        }
    }
}

/// The call that a body answers.
fn answered(body: &Body) -> Option<&str> {
    match body {
        Body::UserToolConfirmation { tool_use, .. }
        | Body::UserCustomToolResult { tool_use, .. } => Some(tool_use),
        _ => None,
    }
}

fn plan(bodies: Vec<Body>, history: &[Event]) -> Result<Vec<Planned>, ApiError> {
    let mut plan: Vec<Planned> = Vec::with_capacity(bodies.len());
    for (at, body) in bodies.into_iter().enumerate() {
        let Some(tool_use) = answered(&body) else {
            plan.push(Planned::Append(Box::new(NewEvent::new(body))));
            continue;
        };
        check_call(at, &body, find_call(history, tool_use))?;
        let before = history.iter().map(|event| (event.id.as_str(), &event.body));
        let within = plan.iter().filter_map(|planned| match planned {
            Planned::Append(event) => Some((event.id.as_str(), &event.body)),
            Planned::Stored(_) => None,
        });
        let earlier = before.chain(within).find(|(_, other)| answered(other) == Some(tool_use));
        match earlier {
            Some((id, other)) if *other == body => plan.push(Planned::Stored(id.to_owned())),
            Some(_) => {
                let message = format!("events[{at}]: {tool_use} was answered otherwise before");
                return Err(ApiError::conflict(message));
            }
            // An interrupt or a failure closed the call; nobody waits for this answer.
            None if closed(history, tool_use) => {
                let message = format!("events[{at}]: {tool_use} no longer waits for an answer");
                return Err(ApiError::conflict(message));
            }
            None => plan.push(Planned::Append(Box::new(NewEvent::new(body)))),
        }
    }
    Ok(plan)
}

fn find_call<'a>(history: &'a [Event], tool_use: &str) -> Option<&'a ToolUse> {
    history.iter().find(|event| event.id == tool_use).and_then(|event| match &event.body {
        Body::ToolUse(call) => Some(call),
        _ => None,
    })
}

fn closed(history: &[Event], tool_use: &str) -> bool {
    let closes = |body: &Body| matches!(body, Body::ToolResult(r) if r.tool_use == tool_use);
    history.iter().any(|event| closes(&event.body))
}

/// Refuses an answer to a call that asks for no such answer.
fn check_call(at: usize, body: &Body, call: Option<&ToolUse>) -> Result<(), ApiError> {
    let (field, fits, what) = match body {
        Body::UserToolConfirmation { .. } => (
            "tool_use_id",
            call.is_some_and(|c| c.hand != HandKind::Client && c.permission == Permission::Ask),
            "no tool call of this session asks for a confirmation under this id",
        ),
        _ => (
            "custom_tool_use_id",
            call.is_some_and(|c| c.hand == HandKind::Client),
            "no custom tool call of this session has this id",
        ),
    };
    if fits { Ok(()) } else { Err(ApiError::field(&format!("events[{at}].{field}"), what)) }
}

/// The stored events of a request, in its order, as the stream shows them first.
fn echo(plan: Vec<Planned>, stored: Vec<Event>, history: &[Event], session: &str) -> Vec<Value> {
    let find = |id: &str| stored.iter().chain(history).find(|event| event.id == id);
    let events = plan.iter().filter_map(|planned| find(planned.id()));
    let shown = events.filter_map(|event| wire::Fold::new(session).feed(event).pop());
    shown.map(|wire| wire.body).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::id::CallId;

    fn call(id: &str, hand: HandKind, permission: Permission) -> Event {
        let body = Body::ToolUse(ToolUse {
            request: "sevt_r".into(),
            call: CallId::random(),
            model_id: "toolu_1".into(),
            name: "x".into(),
            input: json!({}),
            hand,
            permission,
            reason: None,
            mcp: None,
        });
        Event { seq: 1, id: id.into(), time: "2026-01-01T00:00:00.000Z".into(), body }
    }

    fn answer(id: &str, text: &str) -> Body {
        let content = vec![json!({ "type": "text", "text": text })];
        Body::UserCustomToolResult { tool_use: id.into(), content, is_error: false }
    }

    #[test]
    fn the_same_answer_twice_is_stored_once_and_another_one_is_a_conflict() {
        let history = [call("sevt_c", HandKind::Client, Permission::Allow)];
        let twice = plan(vec![answer("sevt_c", "a"), answer("sevt_c", "a")], &history).unwrap();
        let error = plan(vec![answer("sevt_c", "a"), answer("sevt_c", "b")], &history);

        assert!(
            matches!(&twice[..], [Planned::Append(one), Planned::Stored(two)] if one.id == *two)
        );
        assert_eq!(error.err().map(|e| e.status.as_u16()), Some(409));
    }

    #[test]
    fn an_answer_must_fit_the_call() {
        let history = [
            call("sevt_c", HandKind::Client, Permission::Allow),
            call("sevt_s", HandKind::Sandbox, Permission::Allow),
            call("sevt_q", HandKind::Sandbox, Permission::Ask),
        ];
        let confirm = |id: &str| Body::UserToolConfirmation {
            tool_use: id.into(),
            allow: true,
            deny_message: None,
        };

        assert!(plan(vec![confirm("sevt_q")], &history).is_ok());
        for bad in [confirm("sevt_c"), confirm("sevt_s"), confirm("sevt_x"), answer("sevt_q", "a")]
        {
            let error = plan(vec![bad], &history).err().unwrap();
            assert_eq!(error.status.as_u16(), 400, "{error}");
            assert!(error.message.starts_with("events[0]."), "{error}");
        }
    }

    #[test]
    fn every_refusal_names_the_field() {
        let text = json!([{ "type": "text", "text": "x" }]);
        for (event, expected) in [
            (json!({}), "events[0].type: required"),
            (json!({ "type": "agent.message" }), "events[0].type: is no event"),
            (json!({ "type": "user.message" }), "events[0].content: required"),
            (json!({ "type": "user.message", "content": [] }), "events[0].content: must not be"),
            (
                json!({ "type": "user.message", "content": text, "id": "x" }),
                "events[0].id: unknown",
            ),
            (
                json!({ "type": "system.message", "content": text }),
                "events[0].type: system.message",
            ),
            (
                json!({ "type": "user.interrupt", "session_thread_id": "sthr_x" }),
                "events[0].session",
            ),
            (
                json!({ "type": "user.tool_confirmation", "tool_use_id": "a", "result": "maybe" }),
                "events[0].result",
            ),
            (
                json!({ "type": "user.tool_confirmation", "tool_use_id": "a", "result": "allow",
                    "deny_message": "no" }),
                "events[0].deny_message",
            ),
        ] {
            let error = read_one("events[0]", &event, "sesn_1").unwrap_err();
            assert!(error.message.starts_with(expected), "{event}: {error}");
        }
    }
}
