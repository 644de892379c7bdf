//! The error envelope of the wire API: one status, one type, one message that names the field.
//!
//! A handler gives back an [`ApiError`]; the edge renders it, because only the edge knows the id of
//! the request. A 409 says `x-should-retry: false`: clients would send it twice again otherwise.

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use ipc::fault::{Code, Fault};
use serde_json::{Value, json};

use crate::log::LogError;

/// A failed call, as its caller sees it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// `error.details.error_code`, where the wire API names one.
    pub error_code: Option<&'static str>,
}

impl ApiError {
    fn of(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None }
    }

    /// A field that is not as documented: its path, then what is wrong.
    pub fn field(path: &str, why: impl std::fmt::Display) -> Self {
        Self::of(StatusCode::BAD_REQUEST, format!("{path}: {why}"))
    }

    /// A field that the wire API has and this version does not act on.
    pub fn unsupported(path: &str) -> Self {
        Self::field(path, "not supported by this version")
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::of(StatusCode::BAD_REQUEST, message)
    }

    pub fn unauthenticated(message: impl Into<String>) -> Self {
        Self::of(StatusCode::UNAUTHORIZED, message)
    }

    pub fn denied(message: impl Into<String>) -> Self {
        Self::of(StatusCode::FORBIDDEN, message)
    }

    /// The same text for what does not exist and what is somebody else's, so that ids of others
    /// cannot be told from guesses.
    pub fn not_found(what: &str, id: &str) -> Self {
        let shown: String = id.chars().take(ipc::id::ID_BYTES_MAX).collect();
        Self::of(StatusCode::NOT_FOUND, format!("{what} {shown:?}: not found"))
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::of(StatusCode::CONFLICT, message)
    }

    pub fn too_large(limit: usize) -> Self {
        Self::of(StatusCode::PAYLOAD_TOO_LARGE, format!("request body: longer than {limit} bytes"))
    }

    pub fn too_many_values(limit: usize) -> Self {
        Self::of(StatusCode::PAYLOAD_TOO_LARGE, format!("request body: more than {limit} values"))
    }

    pub fn too_slow(limit: std::time::Duration) -> Self {
        let why = format!("request body: not here after {} s", limit.as_secs());
        Self::of(StatusCode::REQUEST_TIMEOUT, why)
    }

    /// A stated number of things is in use; trying again later can help.
    pub fn busy(what: &str, limit: usize) -> Self {
        Self::of(StatusCode::TOO_MANY_REQUESTS, format!("{what}: {limit} are open already"))
    }

    /// Our own failure. What happened goes to the log; the caller learns only that it did.
    pub fn internal(error: &dyn std::error::Error) -> Self {
        tracing::error!(%error, "api call failed");
        Self::of(StatusCode::INTERNAL_SERVER_ERROR, "internal error: see harnessd's log")
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::of(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    #[must_use]
    pub fn with_code(mut self, error_code: &'static str) -> Self {
        self.error_code = Some(error_code);
        self
    }

    /// The envelope of an answer that carries no error of ours: what the router itself refused.
    pub fn of_status(status: StatusCode, method: &http::Method, path: &str) -> Self {
        let message = match status {
            StatusCode::NOT_FOUND => format!("no such endpoint: {path}"),
            StatusCode::METHOD_NOT_ALLOWED => format!("{path}: does not take {method}"),
            _ => format!("{method} {path}: {status}"),
        };
        Self::of(status, message)
    }

    /// `error.type` by status; the documented table.
    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            409 => "conflict_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 | 529 => "overloaded_error",
            504 => "timeout_error",
            400..=499 => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// The body of the answer.
    pub fn envelope(&self, request_id: &str) -> Value {
        let mut error = json!({ "type": self.kind(), "message": self.message });
        if let Some(code) = self.error_code {
            error["details"] = json!({ "error_code": code });
        }
        json!({ "type": "error", "error": error, "request_id": request_id })
    }

    /// Whether repeating the same request can help; `None` leaves it to the client's own table.
    pub fn should_retry(&self) -> Option<bool> {
        match self.status.as_u16() {
            409 | 500 => Some(false),
            503 => Some(true),
            _ => None,
        }
    }
}

impl From<Fault> for ApiError {
    fn from(fault: Fault) -> Self {
        let status = match fault.code {
            // A client of the wire API reads a missing policy as its own bad request.
            Code::Missing => StatusCode::BAD_REQUEST,
            code => StatusCode::from_u16(code.status()).unwrap_or(StatusCode::BAD_GATEWAY),
        };
        let message = match fault.hint {
            Some(hint) => format!("{}: {hint}", fault.text),
            None => fault.text,
        };
        Self::of(status, message)
    }
}

impl From<LogError> for ApiError {
    fn from(error: LogError) -> Self {
        match error {
            LogError::NoSession(id) => Self::not_found("session", id.as_str()),
            LogError::NoObject { kind, id } => Self::not_found(&kind, &id),
            LogError::Unreadable { .. } => Self::internal(&error),
            LogError::Conflict(_)
            | LogError::Overtaken { .. }
            | LogError::Fenced { .. }
            | LogError::Moved(_) => Self::conflict(error.to_string()),
            LogError::Database(_) | LogError::Lock(_) | LogError::Closed => {
                tracing::error!(%error, "session log not usable");
                Self::unavailable(format!("the session log is not usable: {}", error.advice()))
            }
        }
    }
}

/// An answer without a body, with the error in its extensions: the edge writes the body.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(axum::body::Body::empty());
        *response.status_mut() = self.status;
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_the_documented_type() {
        for (status, kind) in [
            (400, "invalid_request_error"),
            (401, "authentication_error"),
            (403, "permission_error"),
            (404, "not_found_error"),
            (405, "invalid_request_error"),
            (409, "conflict_error"),
            (413, "request_too_large"),
            (429, "rate_limit_error"),
            (500, "api_error"),
            (504, "timeout_error"),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            let error = ApiError::of(status, "m");

            let envelope = error.envelope("req_1");

            assert_eq!(envelope["error"]["type"], kind, "{status}");
            assert_eq!(envelope["type"], "error");
            assert_eq!(envelope["request_id"], "req_1");
        }
    }

    #[test]
    fn a_conflict_is_not_to_be_repeated() {
        assert_eq!(ApiError::conflict("x").should_retry(), Some(false));
        assert_eq!(ApiError::invalid("x").should_retry(), None);
    }
}
