//! The edge that every request passes: whose it is, its id, and the form of its errors.
//!
//! On the Unix socket the kernel says who calls, and keys that clients send there are not looked
//! at. On the loopback port anybody on the host, and any page in a browser, can connect: Host and
//! Origin must name this host (DNS rebinding, cross-site requests), and a key says who calls. A
//! request that came by neither way is refused.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ipc::fault::{Code, Fault};
use ipc::id::RequestId;
use ipc::peer::Principal;

use super::ApiState;
use super::body::Room;
use super::error::ApiError;
use super::loopback::Loopback;

const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// On whose behalf a request is, as it is stored with what the request makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner(pub String);

/// A request's way in and out.
pub async fn pass(State(state): State<ApiState>, mut request: Request, next: Next) -> Response {
    let id = RequestId::random();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let started = std::time::Instant::now();
    let mut response = match owner(&state, &request) {
        Ok(owner) => {
            // What a body takes is free again when its answer has been made.
            let room = Room::default();
            request.extensions_mut().insert(owner);
            request.extensions_mut().insert(room.clone());
            let response = next.run(request).await;
            room.leave();
            response
        }
        Err(error) => axum::response::IntoResponse::into_response(error),
    };
    let status = response.status();
    if status.is_client_error() || status.is_server_error() {
        let error = response.extensions_mut().remove::<ApiError>();
        let error = error.unwrap_or_else(|| ApiError::of_status(status, &method, &path));
        render(&mut response, &error, &id, path.starts_with("/cleanhands/"));
    }
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::debug!(request = %id, %method, path, status = status.as_u16(), took_ms, "api call");
    response
}

pub async fn no_endpoint(request: Request) -> ApiError {
    ApiError::of_status(StatusCode::NOT_FOUND, request.method(), request.uri().path())
}

pub async fn no_method(request: Request) -> ApiError {
    ApiError::of_status(StatusCode::METHOD_NOT_ALLOWED, request.method(), request.uri().path())
}

/// Writes an error's body: the wire API's envelope, or the fault that the operator's client reads.
fn render(response: &mut Response, error: &ApiError, id: &RequestId, operator: bool) {
    let body = if operator {
        serde_json::to_vec(&fault(error)).unwrap_or_default()
    } else {
        error.envelope(id.as_str()).to_string().into_bytes()
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.remove(http::header::CONTENT_LENGTH);
    if let Some(again) = error.should_retry() {
        let value = HeaderValue::from_static(if again { "true" } else { "false" });
        headers.insert(SHOULD_RETRY, value);
    }
    *response.body_mut() = body.into();
}

fn fault(error: &ApiError) -> Fault {
    let code = match error.status.as_u16() {
        401 | 403 => Code::Denied,
        404 => Code::NotFound,
        409 => Code::Conflict,
        413 => Code::TooLarge,
        503 => Code::Unavailable,
        400..=499 => Code::Invalid,
        _ => Code::Internal,
    };
    Fault::new(code, error.message.clone())
}

fn owner(state: &ApiState, request: &Request) -> Result<Owner, ApiError> {
    if let Some(principal) = request.extensions().get::<Principal>() {
        return Ok(Owner(principal.owner()));
    }
    if request.extensions().get::<Loopback>().is_none() {
        return Err(ApiError::unauthenticated("nobody vouches for this request"));
    }
    let headers = request.headers();
    check_origin(headers)?;
    let key = key(headers).ok_or_else(|| {
        ApiError::unauthenticated("this port asks for a key: Authorization: Bearer, or x-api-key")
    })?;
    match state.keys.owner_of(key) {
        Some(owner) => Ok(Owner(owner)),
        None => Err(ApiError::unauthenticated("invalid key")),
    }
}

fn key(headers: &HeaderMap) -> Option<&str> {
    let bearer =
        headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|text| {
            let (scheme, key) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
        });
    bearer.or_else(|| headers.get(API_KEY).and_then(|value| value.to_str().ok()))
}

/// Refuses what a name that an attacker rebound to this host, or a foreign page, would send.
fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next().and_then(|value| value.to_str().ok()).unwrap_or_default();
    if hosts.next().is_some() || !is_this_host(host) {
        return Err(ApiError::denied("host: must be localhost, 127.0.0.1 or [::1]"));
    }
    for origin in headers.get_all(ORIGIN) {
        let local = origin.to_str().ok().and_then(|text| {
            text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"))
        });
        if !local.is_some_and(is_this_host) {
            return Err(ApiError::denied("origin: pages of other hosts may not call this port"));
        }
    }
    Ok(())
}

fn is_this_host(authority: &str) -> bool {
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => authority,
    };
    host.eq_ignore_ascii_case("localhost") || host == "127.0.0.1" || host == "[::1]"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(n, v)| (n.clone(), HeaderValue::from_static(v)));
        pairs.collect()
    }

    #[test]
    fn only_this_hosts_names_pass() {
        for good in ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:65535", "[::1]"] {
            assert!(check_origin(&headers(&[(HOST, good)])).is_ok(), "{good} was refused");
        }
        for bad in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.nip.example:80",
            "[::2]",
            "localhost:",
            "localhost:8080@evil.example",
            "user@localhost",
        ] {
            assert!(check_origin(&headers(&[(HOST, bad)])).is_err(), "{bad} was accepted");
        }
    }

    #[test]
    fn foreign_pages_are_refused_and_programs_pass() {
        let with = |origin| check_origin(&headers(&[(HOST, "localhost"), (ORIGIN, origin)]));

        assert!(with("http://localhost:3000").is_ok());
        for bad in ["https://evil.example", "null", "http://localhost.evil.example", "file://"] {
            assert!(with(bad).is_err(), "{bad} was accepted");
        }
    }

    #[test]
    fn both_forms_of_a_key_are_read() {
        assert_eq!(key(&headers(&[(AUTHORIZATION, "Bearer k1")])), Some("k1"));
        assert_eq!(key(&headers(&[(AUTHORIZATION, "bearer k1")])), Some("k1"));
        assert_eq!(key(&headers(&[(API_KEY, "k2")])), Some("k2"));
        assert_eq!(key(&headers(&[(AUTHORIZATION, "Basic abc")])), None);
        assert_eq!(key(&headers(&[])), None);
    }
}
