//! `/v1/files`: upload, list, read what is known of one, delete.
//!
//! An upload is taken part by part and stored as it comes, so that its length costs no memory.
//! What was uploaded is for sessions to read ([`super::resources`]) and not given out again, as the
//! wire API has it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::multipart::{Field, Multipart};
use axum::extract::{FromRequest, Path, Request, State};
use axum::{Extension, Json};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::Uri;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::edge::Owner;
use super::error::ApiError;
use super::query::Parameters;
use super::{ApiState, page};
use crate::log::FILE;
use crate::log::objects::{NewObject, Object};

/// Files on their way here at once.
pub const UPLOADS_MAX: usize = 8;
/// The documented limit of one file, and what all of an owner's may take.
const FILE_BYTES_MAX: u64 = 500 * 1000 * 1000;
const OWNER_BYTES_MAX: u64 = 10 * FILE_BYTES_MAX;
/// One row of the database.
const PART_BYTES: usize = 1024 * 1024;
/// How long a client may take for the next piece.
const PIECE_TIME_MAX: Duration = Duration::from_secs(60);
/// What may wait in memory for the end of a part's head, or of a piece: the reader of multipart
/// bodies has no limit of its own.
const UNREAD_BYTES_MAX: usize = 4 * 1024 * 1024;
const NAME_CHARS_MAX: usize = 255;
const IDS_MAX: usize = 100;
/// The documented bounds, an hour and ninety days.
const LIFE_SECONDS: std::ops::RangeInclusive<i64> = 3_600..=7_776_000;

pub async fn upload(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let unread = Unread::default();
    let body = Multipart::from_request(unread.bounds(request), &()).await;
    let mut body = body.map_err(|_| {
        ApiError::invalid("request body: must be multipart/form-data with a part named file")
    })?;
    let _room = state.uploads.try_acquire().map_err(|_| ApiError::busy("uploads", UPLOADS_MAX))?;
    let log = state.engine.log();
    log.expire_files().await?;
    let id = new_id();
    let stored = take(&state, &owner, &id, &mut body, &unread).await;
    if stored.is_err() {
        log.drop_file_parts(&id).await?;
    }
    Ok(Json(wire(&stored?)))
}

/// A new file's id.
pub fn new_id() -> String {
    format!("file_{}", ipc::id::random_text(24))
}

/// What is said of a file beside its bytes.
struct Named {
    filename: String,
    mime_type: String,
    bytes: u64,
}

async fn take(
    state: &ApiState,
    owner: &Owner,
    id: &str,
    body: &mut Multipart,
    unread: &Unread,
) -> Result<Object, ApiError> {
    let (mut named, mut expires_at) = (None, None);
    while let Some(mut field) = unread.in_time(body.next_field()).await? {
        match field.name() {
            Some("file") if named.is_none() => {
                let filename = filename(field.file_name())?;
                let mime_type = mime_type(field.content_type())?;
                let bytes = store(state, owner, id, &mut field, unread).await?;
                named = Some(Named { filename, mime_type, bytes });
            }
            Some("expires_in_seconds") if expires_at.is_none() => {
                expires_at = Some(expiry(&mut field, unread).await?);
            }
            Some(name @ ("file" | "expires_in_seconds")) => {
                return Err(ApiError::field(name, "given more than once"));
            }
            name => {
                let shown: String = name.unwrap_or_default().chars().take(64).collect();
                return Err(ApiError::field(&format!("{shown:?}"), "unknown field"));
            }
        }
    }
    let Named { filename, mime_type, bytes } =
        named.ok_or_else(|| ApiError::field("file", "required"))?;
    let object = NewObject {
        kind: FILE,
        id: id.to_owned(),
        owner: owner.0.clone(),
        unique_name: None,
        body: json!({
            "filename": filename,
            "mime_type": mime_type,
            "size_bytes": bytes,
            "downloadable": false,
            "expires_at": expires_at,
            "scope": null,
        }),
    };
    Ok(state.engine.log().insert_file(object, bytes).await?)
}

/// Stores the bytes as they come; gives how many there are.
async fn store(
    state: &ApiState,
    owner: &Owner,
    id: &str,
    field: &mut Field<'_>,
    unread: &Unread,
) -> Result<u64, ApiError> {
    let log = state.engine.log();
    let room = OWNER_BYTES_MAX.saturating_sub(log.files_bytes(&owner.0).await?);
    let (mut part, mut number, mut bytes) = (BytesMut::with_capacity(PART_BYTES), 0, 0u64);
    loop {
        let piece = unread.in_time(field.chunk()).await?;
        let ended = piece.is_none();
        let mut piece = piece.unwrap_or_default();
        bytes += piece.len() as u64;
        if bytes > FILE_BYTES_MAX {
            return Err(ApiError::too_large(usize::try_from(FILE_BYTES_MAX).unwrap_or(usize::MAX)));
        }
        if bytes > room {
            let why = format!("your files may take {OWNER_BYTES_MAX} bytes in all: delete some");
            return Err(ApiError::field("file", why));
        }
        while !piece.is_empty() || (ended && !part.is_empty()) {
            let fits = piece.len().min(PART_BYTES - part.len());
            part.extend_from_slice(&piece.split_to(fits));
            if part.len() == PART_BYTES || ended {
                let whole = std::mem::replace(&mut part, BytesMut::with_capacity(PART_BYTES));
                log.put_file_part(id, number, whole.freeze()).await?;
                number += 1;
            }
        }
        if ended {
            return Ok(bytes);
        }
    }
}

/// How many bytes have come since something of a body was taken.
#[derive(Clone, Default)]
struct Unread(Arc<AtomicUsize>);

impl Unread {
    /// The request, whose body breaks off where too much of it waits.
    fn bounds(&self, request: Request) -> Request {
        let unread = self.clone();
        request.map(|body| {
            Body::from_stream(body.into_data_stream().map(move |piece| {
                let piece = piece?;
                let waits = unread.0.fetch_add(piece.len(), Ordering::Relaxed) + piece.len();
                if waits > UNREAD_BYTES_MAX {
                    return Err(axum::Error::new(std::io::Error::other(
                        "a part's head is too long",
                    )));
                }
                Ok(piece)
            }))
        })
    }

    /// The next thing of a body, if the client does not dawdle.
    async fn in_time<T>(
        &self,
        next: impl Future<Output = Result<T, axum::extract::multipart::MultipartError>>,
    ) -> Result<T, ApiError> {
        let next = tokio::time::timeout(PIECE_TIME_MAX, next).await;
        self.0.store(0, Ordering::Relaxed);
        let next = next.map_err(|_| ApiError::too_slow(PIECE_TIME_MAX))?;
        next.map_err(|_| ApiError::invalid("request body: not whole, or no multipart/form-data"))
    }
}

fn filename(given: Option<&str>) -> Result<String, ApiError> {
    let name = given.unwrap_or_default();
    let bad = |c: char| c.is_control() || "<>:\"|?*\\/".contains(c);
    if name.is_empty() || name.chars().count() > NAME_CHARS_MAX || name.chars().any(bad) {
        let why = format!(
            "must have a filename of 1 to {NAME_CHARS_MAX} characters, none of < > : \" | ? * \\ / \
             and no control characters"
        );
        return Err(ApiError::field("file", why));
    }
    Ok(name.to_owned())
}

fn mime_type(given: Option<&str>) -> Result<String, ApiError> {
    let text = given.unwrap_or("application/octet-stream");
    let plain = text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    if text.is_empty() || text.len() > NAME_CHARS_MAX || !plain {
        return Err(ApiError::field("file", "its content type is none"));
    }
    Ok(text.to_owned())
}

async fn expiry(field: &mut Field<'_>, unread: &Unread) -> Result<String, ApiError> {
    let mut text = Vec::new();
    while let Some(piece) = unread.in_time(field.chunk()).await? {
        text.extend_from_slice(&piece);
        if text.len() > 16 {
            break;
        }
    }
    let seconds = std::str::from_utf8(&text).ok().and_then(|text| text.parse::<i64>().ok());
    let seconds = seconds.filter(|seconds| LIFE_SECONDS.contains(seconds)).ok_or_else(|| {
        let (least, most) = (LIFE_SECONDS.start(), LIFE_SECONDS.end());
        ApiError::field("expires_in_seconds", format!("must be from {least} to {most}"))
    })?;
    let end = Timestamp::now().checked_add(SignedDuration::from_secs(seconds));
    let end = end.map_err(|error| ApiError::internal(&error))?;
    Ok(crate::log::time_text(end))
}

pub async fn list(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    uri: Uri,
) -> Result<Json<Value>, ApiError> {
    let parameters = Parameters::of(&uri, &["limit", "page", "scope_id", "ids[]"])?;
    let log = state.engine.log();
    log.expire_files().await?;
    let ids = parameters.many("ids");
    if !ids.is_empty() {
        if ids.len() > IDS_MAX {
            return Err(ApiError::field("ids", format!("must have at most {IDS_MAX} entries")));
        }
        for other in ["limit", "page"] {
            if parameters.one(other)?.is_some() {
                return Err(ApiError::field(other, "cannot be given together with ids"));
            }
        }
        let mut data = Vec::with_capacity(ids.len());
        for id in ids {
            match log.object(FILE, &owner.0, id, None).await {
                Ok(object) => data.push(wire(&object)),
                Err(crate::log::LogError::NoObject { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        return Ok(Json(page::body(data, None)));
    }
    let mut asked = page::asked(FILE, &owner.0, &parameters, page::MAX_LARGE)?;
    if let Some(scope) = parameters.one("scope_id")? {
        asked.query.fields.push(("scope.id".to_owned(), json!(scope)));
    }
    let page = page::read(&state, asked, &parameters).await?;
    Ok(Json(page::body(page.objects.iter().map(wire).collect(), page.next)))
}

pub async fn retrieve(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(wire(&living(&state, &owner, &id).await?)))
}

/// A file whose time is not over.
pub async fn living(state: &ApiState, owner: &Owner, id: &str) -> Result<Object, ApiError> {
    let object = state.engine.log().object(FILE, &owner.0, id, None).await?;
    match object.body["expires_at"].as_str() {
        Some(end) if *end <= *crate::log::now() => Err(ApiError::not_found("file", id)),
        _ => Ok(object),
    }
}

pub async fn delete(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let file = living(&state, &owner, &id).await?;
    if let Some(session) = file.body["scope"]["id"].as_str() {
        let message = format!("file {id}: it goes with its resource of session {session}");
        return Err(ApiError::conflict(message));
    }
    state.engine.log().remove_file(&owner.0, &id).await?;
    Ok(Json(json!({ "id": id, "type": "file_deleted" })))
}

pub async fn content(
    State(state): State<ApiState>,
    Extension(owner): Extension<Owner>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    living(&state, &owner, &id).await?;
    let why = "not downloadable: what was uploaded is read by sessions alone";
    Err(ApiError::invalid(format!("file {id}: {why}")))
}

/// The bytes of a file, as they are read: all of them, or an error. It may be deleted meanwhile.
pub fn bytes_of(
    state: &ApiState,
    file: &Object,
) -> impl futures_util::Stream<Item = Result<Bytes, crate::log::LogError>> + Send + 'static {
    let left = file.body["size_bytes"].as_u64().unwrap_or(u64::MAX);
    let start = (state.engine.log().clone(), file.id.clone(), 0, left);
    futures_util::stream::try_unfold(start, |(log, id, number, left)| async move {
        match log.file_part(&id, number).await? {
            Some(part) => {
                let left = left.saturating_sub(part.len() as u64);
                Ok(Some((part, (log, id, number + 1, left))))
            }
            None if left == 0 => Ok(None),
            None => {
                let text = format!("file {id}: deleted while it was given to a session");
                Err(crate::log::LogError::Conflict(text))
            }
        }
    })
}

fn wire(object: &Object) -> Value {
    let mut out = json!({ "id": object.id, "type": "file", "created_at": object.created_at });
    if let (Some(out), Some(document)) = (out.as_object_mut(), object.body.as_object()) {
        out.extend(document.clone());
    }
    out
}
