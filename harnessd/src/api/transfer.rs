//! The operator's routes that carry a session or the whole log out, and a session in.

use std::collections::VecDeque;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::response::Response;
use axum::{Extension, Json};
use http::HeaderValue;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use ipc::peer::Principal;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use super::body::JsonBody;
use super::edge::Owner;
use super::error::ApiError;
use super::{ApiState, session, sessions};
use crate::log::{Backup, Header, Import, ImportError, Line, Log, LogError};
use ipc::id::SessionId;

/// Events read at once.
const SLICE: usize = 500;
/// Bytes of a copy sent at once.
const CHUNK: usize = 256 * 1024;

/// A session as lines of JSON: what it is, its events as they are stored, the end.
pub async fn export(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let log = state.engine.log();
    let object = log.object(sessions::KIND, &owner.0, &id, None).await?;
    let session = session::id(&id)?;
    let header = log.export_header(&session, &object).await?;
    let end = header.events;
    let first = line(&header)?;
    let ready = VecDeque::from([Bytes::from(first)]);
    let out = Lines { log: log.clone(), session, after: 0, end, ready, ended: false };
    let stream = futures_util::stream::unfold(out, |mut out| async move {
        let piece = out.next().await?;
        Some((piece, out))
    });
    let mut response = Response::new(Body::from_stream(stream));
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

struct Lines {
    log: Log,
    session: SessionId,
    after: u64,
    end: u64,
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl Lines {
    /// The next piece of the file; an error breaks the transfer off, so that no file looks whole.
    async fn next(&mut self) -> Option<Result<Bytes, LogError>> {
        if let Some(ready) = self.ready.pop_front() {
            return Some(Ok(ready));
        }
        if self.ended {
            return None;
        }
        if self.after >= self.end {
            self.ended = true;
            return Some(Ok(Bytes::from(format!("{}\n", json!({ "end": self.end })))));
        }
        let left = usize::try_from(self.end - self.after).unwrap_or(SLICE);
        let events = match self.log.export(&self.session, self.after, SLICE.min(left)).await {
            Ok(events) => events,
            Err(error) => return Some(Err(error)),
        };
        // Deleted meanwhile: what is missing must not look like the end.
        let Some(last) = events.last() else {
            return Some(Err(LogError::NoSession(self.session.clone())));
        };
        self.after = last.seq;
        let lines: String = events.iter().filter_map(|event| line(event).ok()).collect();
        Some(Ok(Bytes::from(lines)))
    }
}

fn line(value: &impl serde::Serialize) -> Result<String, ApiError> {
    let text = serde_json::to_string(value).map_err(|error| ApiError::internal(&error))?;
    Ok(text + "\n")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    header: Header,
    events: Vec<Line>,
    last: bool,
}

/// One step of an import. The same step again changes nothing.
pub async fn import(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
    JsonBody(body): JsonBody,
) -> Result<Json<Value>, ApiError> {
    let step: Step = serde_json::from_value(body)
        .map_err(|error| ApiError::invalid(format!("not a step of an import: {error}")))?;
    if step.header.session.as_str() != id {
        return Err(ApiError::field("header.session", "is another session"));
    }
    let Step { header, events, last } = step;
    let taken = events.last().map_or(0, |event| event.seq);
    let imported = state.engine.log().import(&owner.0, Import { header, events, last }).await;
    let whole = imported.map_err(refused)?;
    Ok(Json(json!({ "session": id, "event": taken, "whole": whole })))
}

fn refused(error: ImportError) -> ApiError {
    match error {
        ImportError::Log(error) => error.into(),
        ImportError::Exists(_) | ImportError::Deleted(_) => ApiError::conflict(error.to_string()),
        ImportError::Form(_) | ImportError::Chain(_) => ApiError::invalid(error.to_string()),
    }
}

/// A copy of the whole log, for whoever could read its file anyway.
pub async fn backup(
    State(state): State<ApiState>,
    principal: Option<Extension<Principal>>,
) -> Result<Response, ApiError> {
    let own = Principal::own().uid;
    if !principal.is_some_and(|Extension(who)| who.uid == own || who.uid == 0) {
        let text = "the whole log goes to root and to harnessd's own user only";
        return Err(ApiError::denied(text));
    }
    let Backup { file, bytes } = state.engine.log().backup().await?;
    let file = tokio::fs::File::from_std(file);
    let stream = futures_util::stream::unfold(file, |mut file| async move {
        let mut piece = bytes::BytesMut::with_capacity(CHUNK);
        match file.read_buf(&mut piece).await {
            Ok(0) => None,
            Ok(_) => Some((Ok(piece.freeze()), file)),
            Err(error) => Some((Err(error), file)),
        }
    });
    let mut response = Response::new(Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/vnd.sqlite3"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes));
    Ok(response)
}
