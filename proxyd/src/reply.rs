//! Replies that proxyd makes itself: denials and failures, readable by whoever asked.
//!
//! A program finds the code in a header, a person or a model finds rule, reason and hint in the
//! body. gRPC clients get a status of theirs, git gets plain lines, which it prints.

use bytes::Bytes;
use ipc::id::RequestId;
use policies::{Denial, DenialCode};
use serde_json::json;

use crate::audit::AuditError;
use crate::head::{Fields, ResponseHead};
use crate::inject::InjectError;
use crate::relay::body::WriteError;
use crate::relay::exchange::ExchangeError;
use crate::relay::h1::framing::Framing;
use crate::relay::responder::Responder;
use crate::upstream::UpstreamError;

/// Why a request is not answered by its upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: u16,
    /// For programs.
    pub code: &'static str,
    pub rule: Option<String>,
    pub reason: String,
    pub hint: Option<String>,
    /// Whether policy said no, rather than something having failed.
    pub denied: bool,
}

impl Refusal {
    /// A refusal that policy has no code for.
    pub fn denied(status: u16, code: &'static str, reason: impl Into<String>) -> Self {
        Self { status, code, rule: None, reason: reason.into(), hint: None, denied: true }
    }

    pub fn failed(status: u16, code: &'static str, reason: impl Into<String>) -> Self {
        Self { denied: false, ..Self::denied(status, code, reason) }
    }

    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl From<Denial> for Refusal {
    fn from(denial: Denial) -> Self {
        let status = match denial.code {
            DenialCode::MethodForbidden => 405,
            _ => 403,
        };
        Self {
            status,
            code: denial.code.as_str(),
            rule: denial.rule,
            reason: denial.reason,
            hint: denial.hint,
            denied: true,
        }
    }
}

impl From<InjectError> for Refusal {
    fn from(error: InjectError) -> Self {
        Self {
            status: error.status(),
            code: error.code(),
            rule: None,
            hint: error.hint(),
            denied: error.status() == 403,
            reason: error.to_string(),
        }
    }
}

impl From<AuditError> for Refusal {
    fn from(_: AuditError) -> Self {
        // The text of the error names files of this host; it goes to the log, not to the sandbox.
        Self::failed(503, "audit_unavailable", "the audit cannot be written, so nothing leaves")
            .with_hint("the operator finds the cause in proxyd's log: often a full disk")
    }
}

impl From<UpstreamError> for Refusal {
    fn from(error: UpstreamError) -> Self {
        let (status, code) = match &error {
            UpstreamError::Denied(denial) => return denial.clone().into(),
            UpstreamError::Resolve { .. } => (502, "upstream_name"),
            UpstreamError::Connect { .. } => (502, "upstream_connect"),
            UpstreamError::Timeout { .. } => (504, "upstream_timeout"),
            UpstreamError::Tls { .. } => (502, "upstream_tls"),
            UpstreamError::Send { .. } => (502, "upstream_closed"),
        };
        Self::failed(status, code, error.to_string())
    }
}

impl From<&ExchangeError> for Refusal {
    fn from(error: &ExchangeError) -> Self {
        let (status, code) = match error {
            ExchangeError::ClientBody(_) => (400, "request_body"),
            ExchangeError::Client(_) | ExchangeError::ClientGone => (499, "client_gone"),
            ExchangeError::Answer(_) | ExchangeError::UpstreamBody(_) => (502, "upstream_answer"),
            ExchangeError::Scrub(_) => (502, "answer_unsearchable"),
            ExchangeError::Idle => (504, "upstream_silent"),
        };
        Self::failed(status, code, error.to_string())
    }
}

/// In which form the client reads best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Json,
    Grpc,
    Text,
}

impl Form {
    /// Chosen by what the request says about its client.
    pub fn of(headers: &Fields) -> Self {
        let starts = |name: &str, prefix: &[u8]| {
            headers.first(name).is_some_and(|value| value.starts_with(prefix))
        };
        if starts("content-type", b"application/grpc") {
            Self::Grpc
        } else if starts("user-agent", b"git/") {
            Self::Text
        } else {
            Self::Json
        }
    }
}

/// Sends the refusal.
pub async fn send(
    responder: &mut Responder<'_>,
    refusal: &Refusal,
    form: Form,
    request: &RequestId,
    environment: &str,
) -> Result<(), WriteError> {
    let (head, body) = print(refusal, form, request, environment);
    if body.is_empty() {
        let mut out = responder.start(head, Framing::None).await?;
        return out.finish(None).await;
    }
    let mut out = responder.start(head, Framing::Length(body.len() as u64)).await?;
    if !matches!(out, crate::relay::body::BodyOut::None) {
        out.data(body).await?;
    }
    out.finish(None).await
}

fn print(
    refusal: &Refusal,
    form: Form,
    request: &RequestId,
    environment: &str,
) -> (ResponseHead, Bytes) {
    let mut headers = Fields::new();
    let name = if refusal.denied { "x-cleanhands-denial" } else { "x-cleanhands-failure" };
    headers.append(name, Bytes::from_static(refusal.code.as_bytes()));
    let (status, kind, body) = match form {
        Form::Json => (refusal.status, "application/json", json(refusal, request, environment)),
        Form::Text => (refusal.status, "text/plain; charset=utf-8", text(refusal, request)),
        Form::Grpc => {
            headers.append("grpc-status", Bytes::from_static(grpc_status(refusal).as_bytes()));
            headers.append("grpc-message", percent_encoded(&text(refusal, request)).into());
            (200, "application/grpc", String::new())
        }
    };
    headers.append("content-type", Bytes::from_static(kind.as_bytes()));
    headers.append("content-length", body.len().to_string().into());
    headers.append("cache-control", Bytes::from_static(b"no-store"));
    if refusal.status == 407 {
        // Some clients send their credentials only after being asked (RFC 9110 section 15.5.8).
        headers.append("proxy-authenticate", Bytes::from_static(b"Basic realm=\"cleanhands\""));
    }
    (ResponseHead { status, reason: Bytes::new(), headers }, body.into())
}

fn json(refusal: &Refusal, request: &RequestId, environment: &str) -> String {
    let mut text = json!({ "error": {
        "code": refusal.code,
        "rule": refusal.rule,
        "reason": refusal.reason,
        "hint": refusal.hint,
        "request_id": request,
        "environment": environment,
    }})
    .to_string();
    text.push('\n');
    text
}

fn text(refusal: &Refusal, request: &RequestId) -> String {
    let what = if refusal.denied { "denied" } else { "failed" };
    let mut text = format!("cleanhands: {what} ({}): {}\n", refusal.code, refusal.reason);
    if let Some(hint) = &refusal.hint {
        text.push_str(&format!("cleanhands: {hint}\n"));
    }
    text.push_str(&format!("cleanhands: request {request}\n"));
    text
}

/// PERMISSION_DENIED for denials, UNAVAILABLE for failures.
fn grpc_status(refusal: &Refusal) -> &'static str {
    if refusal.denied { "7" } else { "14" }
}

/// As the gRPC protocol over HTTP/2 writes `grpc-message`.
fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.trim_end().bytes() {
        if (b' '..=b'~').contains(&byte) && byte != b'%' {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal() -> Refusal {
        Refusal::denied(403, "host_not_listed", "no rule lists \"evil.example\"").with_hint("50%")
    }

    #[test]
    fn a_denial_says_the_same_in_every_form() {
        let id = RequestId::parse("req_x").unwrap();

        let (json_head, json) = print(&refusal(), Form::Json, &id, "dev");
        let (_, text) = print(&refusal(), Form::Text, &id, "dev");
        let (grpc_head, grpc) = print(&refusal(), Form::Grpc, &id, "dev");

        let value: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(value["error"]["code"], "host_not_listed");
        assert_eq!(value["error"]["request_id"], "req_x");
        assert_eq!(value["error"]["environment"], "dev");
        assert_eq!(json_head.headers.first("x-cleanhands-denial").unwrap(), "host_not_listed");
        let text = String::from_utf8(text.to_vec()).unwrap();
        assert!(text.contains("evil.example") && text.contains("req_x"), "{text}");
        assert_eq!((grpc_head.status, grpc.len()), (200, 0));
        assert_eq!(grpc_head.headers.first("grpc-status").unwrap(), "7");
        let message = grpc_head.headers.first("grpc-message").unwrap();
        assert!(message.ends_with(b"50%25%0Acleanhands: request req_x"), "{message:?}");
    }
}
