//! Replies that proxyd makes itself: denials and failures, readable by whoever asked.
//!
//! A program finds the code in a header, a person or a model finds rule, reason and hint in the
//! body, in the form that its client prints ([`form`]). Clients that print no body print the
//! reason phrase.

pub mod form;

use bytes::Bytes;
use ipc::id::RequestId;
use policies::{Denial, DenialCode};

use crate::audit::AuditError;
use crate::head::ResponseHead;
use crate::inject::InjectError;
use crate::lease::budgets::{Spent, What};
use crate::lease::notes::End;
use crate::lease::share::Exhausted;
use crate::relay::answer::AnswerError;
use crate::relay::body::{ReadError, WriteError};
use crate::relay::exchange::ExchangeError;
use crate::relay::h1::framing::Framing;
use crate::relay::responder::Responder;
use crate::upstream::UpstreamError;
use form::Form;

/// Longest reason phrase: some clients read a status line into a small buffer.
const REASON_BYTES_MAX: usize = 200;

/// What usual servers record of a request whose client left. Nobody is there to receive it.
const CLIENT_GONE: u16 = 499;

/// Codes of refusals that another try may not meet, soon after.
pub const LEASE_BUSY: &str = "lease_busy";
pub const BODIES_BUSY: &str = "bodies_busy";
pub const BUSY_HINT: &str = "send it again when others have ended";
const CERTIFICATE_REFUSED_HINT: &str = "the operator checks that the host knows this \
     certificate, and that it has not ended: cleanhands secret list";
const CERTIFICATE_WANTED_HINT: &str = "if this is meant, the operator gives the rule a \
     credential with inject = { client-certificate = true }";
/// When a client may try again after [`LEASE_BUSY`] and [`BODIES_BUSY`].
const RETRY_SECONDS: u64 = 1;

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
    /// When to try again, as `Retry-After` says it.
    pub retry_seconds: Option<u64>,
}

impl Refusal {
    /// A refusal that policy has no code for.
    pub fn denied(status: u16, code: &'static str, reason: impl Into<String>) -> Self {
        let (reason, retry_seconds) = (reason.into(), None);
        Self { status, code, rule: None, reason, hint: None, denied: true, retry_seconds }
    }

    pub fn failed(status: u16, code: &'static str, reason: impl Into<String>) -> Self {
        Self { denied: false, ..Self::denied(status, code, reason) }
    }

    /// What to call it where the results of a call are read.
    pub fn end(&self) -> End {
        match (self.denied, self.status) {
            (true, _) => End::Refused,
            (false, CLIENT_GONE) => End::GivenUp,
            (false, _) => End::Failed,
        }
    }

    /// The refusal as a person reads it.
    fn lines(&self, request: &RequestId) -> String {
        let what = if self.denied { "denied" } else { "failed" };
        let mut text = format!("cleanhands: {what} ({}): {}\n", self.code, self.reason);
        if let Some(hint) = &self.hint {
            text.push_str(&format!("cleanhands: {hint}\n"));
        }
        text.push_str(&format!("cleanhands: request {request}\n"));
        text
    }

    /// What stands after the status: many clients print this and nothing of the body.
    fn reason_phrase(&self) -> Bytes {
        let text = format!("cleanhands: {}: {}", self.code, self.reason);
        let plain = |c: char| if (' '..='~').contains(&c) { c } else { '?' };
        text.chars().map(plain).take(REASON_BYTES_MAX).collect::<String>().into()
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
            retry_seconds: None,
        }
    }
}

impl From<Spent> for Refusal {
    fn from(spent: Spent) -> Self {
        let code = match spent.what {
            What::Requests => "rate_exceeded",
            What::Bytes => "bytes_exceeded",
        };
        let retry_seconds = spent.seconds();
        Self {
            hint: retry_seconds.map(|seconds| format!("there is room again in {seconds} s")),
            rule: Some(spent.rule.clone()),
            retry_seconds,
            ..Self::denied(429, code, spent.to_string())
        }
    }
}

impl From<Exhausted> for Refusal {
    fn from(error: Exhausted) -> Self {
        Self::failed(503, LEASE_BUSY, error.to_string()).with_hint(BUSY_HINT)
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
            retry_seconds: None,
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
            UpstreamError::CertificateRefused { .. } => {
                return Self::failed(502, "credential_refused_upstream", error.to_string())
                    .with_hint(CERTIFICATE_REFUSED_HINT);
            }
            UpstreamError::CertificateWanted { .. } => {
                return Self::failed(502, "upstream_certificate", error.to_string())
                    .with_hint(CERTIFICATE_WANTED_HINT);
            }
            UpstreamError::Send { .. } => (502, "upstream_closed"),
            UpstreamError::Full { .. } | UpstreamError::Busy { .. } => (503, "upstream_busy"),
            UpstreamError::Proxy { hint, .. } => {
                let failed = Self::failed(502, "upstream_proxy", error.to_string());
                return Self { hint: hint.clone(), ..failed };
            }
        };
        Self::failed(status, code, error.to_string())
    }
}

impl From<&ExchangeError> for Refusal {
    fn from(error: &ExchangeError) -> Self {
        let (status, code) = match error {
            ExchangeError::Token => (502, "credential_refused_upstream"),
            ExchangeError::ClientBody(ReadError::Busy(_)) => {
                return Self::failed(503, BODIES_BUSY, error.to_string()).with_hint(BUSY_HINT);
            }
            ExchangeError::ClientBody(_) => (400, "request_body"),
            ExchangeError::Client(_) | ExchangeError::ClientGone => (CLIENT_GONE, "client_gone"),
            ExchangeError::Answer(AnswerError::ProxyAuthentication) => {
                return Self::failed(502, "upstream_proxy", error.to_string())
                    .with_hint("check user and password in [upstream-proxy] of proxyd.toml");
            }
            ExchangeError::Answer(_) | ExchangeError::UpstreamBody(_) => (502, "upstream_answer"),
            ExchangeError::Scrub(_) => (502, "answer_unsearchable"),
            ExchangeError::Idle(_) => (504, "upstream_silent"),
            ExchangeError::Message(_) => {
                return Self::denied(403, "message_refused", error.to_string());
            }
            ExchangeError::Spent(spent) => return spent.clone().into(),
        };
        Self::failed(status, code, error.to_string())
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
    let (status, mut headers, body) = form.print(refusal, request, environment);
    let name = if refusal.denied { "x-cleanhands-denial" } else { "x-cleanhands-failure" };
    headers.append(name, Bytes::from_static(refusal.code.as_bytes()));
    headers.append("x-cleanhands-request", Bytes::copy_from_slice(request.as_str().as_bytes()));
    headers.append("content-length", body.len().to_string().into());
    headers.append("cache-control", Bytes::from_static(b"no-store"));
    let busy = [LEASE_BUSY, BODIES_BUSY].contains(&refusal.code).then_some(RETRY_SECONDS);
    if let Some(seconds) = refusal.retry_seconds.or(busy) {
        headers.append("retry-after", seconds.to_string().into());
    }
    if refusal.status == 407 {
        // Some clients send their credentials only after being asked (RFC 9110 section 15.5.8).
        headers.append("proxy-authenticate", Bytes::from_static(b"Basic realm=\"cleanhands\""));
    }
    let reason = if status == refusal.status { refusal.reason_phrase() } else { Bytes::new() };
    (ResponseHead { status, reason, headers }, body)
}

#[cfg(test)]
mod tests;
