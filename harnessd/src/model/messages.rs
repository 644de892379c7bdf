//! The provider `messages`: a server that speaks the Messages API with streaming.
//!
//! Anthropic's, or another that speaks it (llama.cpp's server does). The key is not here: proxyd
//! adds it on the way.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Response, Uri};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::answer::{Assembly, failure, incomplete};
use super::sse::SseParser;
use super::{Answer, Egress, Model, Sink};
use crate::context::Prompt;
use crate::log::{ErrorKind, Failure};

/// A stream that is silent for so long has stalled. Servers send pings far more often; a local
/// model that reads a long prompt may not.
const STALL: Duration = Duration::from_secs(300);
/// An error's body is read up to this length.
const ERROR_BYTES_MAX: usize = 64 * 1024;
/// What the API accepts in one request.
const REQUEST_BYTES_MAX: usize = 32 * 1024 * 1024;

/// One model at one server.
pub struct Messages {
    pub(super) egress: Arc<Egress>,
    /// The server's address up to and including `/v1/messages`.
    pub(super) endpoint: Uri,
    /// The model's name there.
    pub(super) model: String,
    pub(super) max_tokens: u32,
    pub(super) temperature: Option<f64>,
}

impl Model for Messages {
    fn ask<'a>(&'a self, prompt: Prompt, sink: Sink<'a>) -> BoxFuture<'a, Result<Answer, Failure>> {
        self.ask_once(prompt, sink).boxed()
    }
}

impl Messages {
    async fn ask_once(&self, prompt: Prompt, sink: Sink<'_>) -> Result<Answer, Failure> {
        let body = self.body(prompt).to_string();
        if body.len() > REQUEST_BYTES_MAX {
            return Err(Failure {
                error: ErrorKind::ModelRequestFailed,
                message: format!(
                    "the session is too long for one request: {} bytes, the limit is 32 MiB",
                    body.len()
                ),
                retryable: false,
                retry_after_ms: None,
            });
        }
        let headers = [
            ("content-type", "application/json"),
            ("accept", "text/event-stream"),
            ("anthropic-version", "2023-06-01"),
        ];
        let response = self.egress.post(&self.endpoint, &headers, body.into()).await?;
        if !response.status().is_success() {
            return Err(refused(response).await);
        }
        read(response.into_body(), sink).await
    }

    fn body(&self, prompt: Prompt) -> Value {
        let mut body = json!({ "model": self.model, "max_tokens": self.max_tokens });
        if let Some(temperature) = self.temperature {
            body["temperature"] = temperature.into();
        }
        let mut tools = prompt.tools;
        match prompt.system {
            // A mark on the system text covers the tools as well: they come before it.
            Some(text) => {
                let block = json!({ "type": "text", "text": text, "cache_control": mark() });
                body["system"] = json!([block]);
            }
            None => {
                if let Some(last) = tools.last_mut() {
                    last["cache_control"] = mark();
                }
            }
        }
        if !tools.is_empty() {
            body["tools"] = Value::Array(tools);
        }
        let mut messages = prompt.messages;
        mark_messages(&mut messages);
        body["messages"] = Value::Array(messages);
        body["stream"] = true.into();
        body
    }
}

fn mark() -> Value {
    json!({ "type": "ephemeral" })
}

/// Marks the ends of the last two user messages for the provider's cache: the last is written now,
/// the one before it was written by the request before and is found again, however many blocks
/// this turn added (a lookup reaches back 20 blocks only).
fn mark_messages(messages: &mut [Value]) {
    let of_user = messages.iter_mut().rev().filter(|m| m["role"] == "user");
    for message in of_user.take(2) {
        let blocks = message["content"].as_array_mut();
        if let Some(block) = blocks.and_then(|b| b.last_mut()) {
            block["cache_control"] = mark();
        }
    }
}

const DENIED: &str = "denied";
/// Header fields that only proxyd's own answers have, with what proxyd did.
const BY_PROXYD: [(&str, &str); 2] =
    [("x-cleanhands-denial", DENIED), ("x-cleanhands-failure", "could not send")];
/// Codes of failures that last until an operator has mended something.
const FOR_AN_OPERATOR: [&str; 2] = ["credential_missing", "credential_unusable"];

async fn read(mut body: Incoming, sink: Sink<'_>) -> Result<Answer, Failure> {
    let mut parser = SseParser::default();
    let mut assembly = Assembly::default();
    while !assembly.is_complete() {
        let frame = tokio::time::timeout(STALL, body.frame())
            .await
            .map_err(|_| incomplete("the model's stream was silent for 300 s"))?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|e| incomplete(&format!("the model's stream broke: {e}")))?;
        let Ok(bytes) = frame.into_data() else { continue };
        for event in parser.push(&bytes).map_err(|e| incomplete(&e.to_string()))? {
            if let Some(delta) = assembly.take(&event.data)? {
                sink(delta);
            }
        }
    }
    assembly.finish()
}

/// Reads a response that is no answer.
async fn refused(response: Response<Incoming>) -> Failure {
    let status = response.status().as_u16();
    let headers = response.headers().clone();
    let body = Limited::new(response.into_body(), ERROR_BYTES_MAX);
    let bytes = match tokio::time::timeout(Duration::from_secs(30), body.collect()).await {
        Ok(Ok(collected)) => collected.to_bytes(),
        _ => Bytes::new(),
    };
    let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    for (field, verdict) in BY_PROXYD {
        if let Some(code) = headers.get(field).and_then(|v| v.to_str().ok()) {
            return by_proxyd(verdict, code, &body);
        }
    }
    let mut failure = failure(Some(status), &body);
    failure.retry_after_ms = retry_after(&headers);
    // Without a time to wait, this status is a spend limit: asking again does not help.
    if status == 429 && failure.retry_after_ms.is_none() {
        failure.retryable = false;
    }
    match headers.get("x-should-retry").map(http::HeaderValue::as_bytes) {
        Some(b"true") => failure.retryable = true,
        Some(b"false") => failure.retryable = false,
        _ => {}
    }
    failure
}

/// The failure of a request that proxyd answered itself. What the network did may be other in a
/// moment; what policy, or a vault without the secret, says does not change by asking again.
fn by_proxyd(verdict: &str, code: &str, body: &Value) -> Failure {
    let reason = body["error"]["reason"].as_str().unwrap_or("no reason given");
    let hint = body["error"]["hint"].as_str().map(|h| format!("; {h}")).unwrap_or_default();
    Failure {
        error: ErrorKind::ModelRequestFailed,
        message: format!("proxyd {verdict} the model request ({code}): {reason}{hint}"),
        retryable: verdict != DENIED && !FOR_AN_OPERATOR.contains(&code),
        retry_after_ms: None,
    }
}

fn retry_after(headers: &HeaderMap) -> Option<u64> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::trim);
    if let Some(ms) = text("retry-after-ms").and_then(|t| t.parse::<f64>().ok()) {
        return millis(ms);
    }
    let text = text("retry-after")?;
    if let Ok(seconds) = text.parse::<f64>() {
        return millis(seconds * 1000.0);
    }
    // An HTTP date (RFC 9110, section 5.6.7).
    let date = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?;
    let wait = date.as_millisecond() - jiff::Timestamp::now().as_millisecond();
    Some(u64::try_from(wait).unwrap_or(0))
}

fn millis(ms: f64) -> Option<u64> {
    // Saturating: the step that waits has a limit far below.
    (ms.is_finite() && ms >= 0.0).then_some(ms as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Pairs = &'static [(&'static str, &'static str)];

    fn headers(pairs: Pairs) -> HeaderMap {
        pairs.iter().map(|(n, v)| (n.parse().unwrap(), v.parse().unwrap())).collect()
    }

    #[test]
    fn reads_how_long_to_wait_in_each_form() {
        let cases: [(Pairs, Option<u64>); 5] = [
            (&[("retry-after", "2")], Some(2000)),
            (&[("retry-after", "9"), ("retry-after-ms", "150")], Some(150)),
            (&[("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")], Some(0)),
            (&[("retry-after", "soon")], None),
            (&[], None),
        ];

        for (pairs, expected) in cases {
            assert_eq!(retry_after(&headers(pairs)), expected, "{pairs:?}");
        }
    }

    #[test]
    fn marks_the_last_two_user_messages_and_nothing_of_the_assistant() {
        let user =
            |text: &str| json!({"role": "user", "content": [{"type": "text", "text": text}]});
        let agent = json!({"role": "assistant", "content": [{"type": "text", "text": "x"}]});
        let mut messages = vec![user("a"), agent.clone(), user("b"), agent.clone(), user("c")];

        mark_messages(&mut messages);

        let marked: Vec<bool> =
            messages.iter().map(|m| m["content"][0].get("cache_control").is_some()).collect();
        assert_eq!(marked, [false, false, true, false, true]);
    }
}
