//! Request bodies: JSON within a limit, whatever their content type says.
//!
//! Clients send POSTs of length zero with `Content-Type: application/json`; they read as `{}`.

use axum::extract::{FromRequest, Request};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Map, Value};

use super::error::ApiError;

/// The documented limit for agents, environments, sessions and events.
pub const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The body of a request, parsed and not yet understood.
pub struct JsonBody(pub Value);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
        let bytes = body
            .map_err(|error| {
                if error.is::<LengthLimitError>() {
                    ApiError::too_large(BODY_BYTES_MAX)
                } else {
                    ApiError::invalid("request body: broken off")
                }
            })?
            .to_bytes();
        if bytes.is_empty() {
            return Ok(Self(Value::Object(Map::new())));
        }
        let value = serde_json::from_slice(&bytes).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            ApiError::invalid(format!("request body: not JSON at line {line}, column {column}"))
        })?;
        Ok(Self(value))
    }
}
