//! One request to a model's server and its answer, whatever it speaks: the way out, limits,
//! failures and what they mean, the stream.
//!
//! The key is not here: proxyd adds it on the way.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response, Uri};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::Value;

use super::answer::{failure, incomplete, overflow};
use super::sse::SseParser;
use super::{Answer, Delta, Egress, Sink};
use crate::log::{ErrorKind, Failure};

/// An error's body is read up to this length.
const ERROR_BYTES_MAX: usize = 64 * 1024;
/// An answer that came in one piece is read up to this length.
const WHOLE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// What the usual servers accept in one request.
const REQUEST_BYTES_MAX: usize = 32 * 1024 * 1024;

/// One model at one server.
pub struct Server {
    pub egress: Arc<Egress>,
    /// The address of the call itself.
    pub endpoint: Uri,
    /// The model's name there.
    pub model: String,
    pub max_tokens: u32,
    pub temperature: Option<f64>,
    /// How long a stream may be silent.
    pub stall: Duration,
}

/// Puts an answer together from what a server of one kind sends.
pub trait Decoder {
    /// Takes the data of one event; says what a listener may see of it.
    fn take(&mut self, data: &str) -> Result<Vec<Delta>, Failure>;
    /// Takes an answer that came in one piece. `None`: it is none.
    fn take_whole(&mut self, body: &Value) -> Result<Option<Vec<Delta>>, Failure>;
    /// Whether nothing more need be read.
    fn is_complete(&self) -> bool;
    fn finish(self) -> Result<Answer, Failure>;
}

impl Server {
    /// Asks once.
    pub async fn ask(
        &self,
        headers: &[(&'static str, &str)],
        body: &Value,
        mut decoder: impl Decoder,
        sink: Sink<'_>,
    ) -> Result<Answer, Failure> {
        let body = body.to_string();
        if body.len() > REQUEST_BYTES_MAX {
            let bytes = body.len();
            return Err(overflow(format!(
                "the session is too long for one request: {bytes} bytes, the limit is 32 MiB"
            )));
        }
        let mut all = vec![("content-type", "application/json"), ("accept", "text/event-stream")];
        all.extend_from_slice(headers);
        let response = self.egress.post(&self.endpoint, &all, body.into()).await?;
        if !response.status().is_success() {
            return Err(refused(response).await);
        }
        match kind(response.headers()) {
            Kind::Stream => read(response.into_body(), &mut decoder, self.stall, sink).await?,
            Kind::Json => self.read_whole(response, &mut decoder, sink).await?,
            Kind::Other(kind) => return Err(self.no_model(&kind)),
        }
        decoder.finish()
    }

    /// Some servers answer in one piece whatever they were asked for.
    async fn read_whole(
        &self,
        response: Response<Incoming>,
        decoder: &mut impl Decoder,
        sink: Sink<'_>,
    ) -> Result<(), Failure> {
        let body = Limited::new(response.into_body(), WHOLE_BYTES_MAX);
        let bytes = tokio::time::timeout(self.stall, body.collect())
            .await
            .map_err(|_| self.silent())?
            .map_err(|e| incomplete(&format!("the model's answer broke: {e}")))?
            .to_bytes();
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|_| self.no_model("broken JSON"))?;
        if value.get("error").is_some_and(|error| !error.is_null()) {
            return Err(failure(None, &value));
        }
        let Some(deltas) = decoder.take_whole(&value)? else {
            return Err(self.no_model("JSON that is no answer"));
        };
        deltas.into_iter().for_each(sink);
        Ok(())
    }

    /// The address is not one of a model, which asking again does not change.
    fn no_model(&self, what: &str) -> Failure {
        let what: String = what.chars().take(80).collect();
        let message = format!(
            "{} answered with {what} and not with a model's answer\nis the url of this model in \
             harnessd's configuration right?",
            self.endpoint
        );
        Failure::new(ErrorKind::ModelRequestFailed, message, false)
    }

    fn silent(&self) -> Failure {
        incomplete(&format!("the model's server was silent for {} s", self.stall.as_secs()))
    }
}

enum Kind {
    Stream,
    Json,
    Other(String),
}

/// Servers that say nothing of the kind stream, as they were asked to.
fn kind(headers: &HeaderMap) -> Kind {
    let text = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match kind.as_str() {
        "" | "text/event-stream" => Kind::Stream,
        "application/json" => Kind::Json,
        _ => Kind::Other(kind),
    }
}

async fn read(
    mut body: Incoming,
    decoder: &mut impl Decoder,
    stall: Duration,
    sink: Sink<'_>,
) -> Result<(), Failure> {
    let mut parser = SseParser::default();
    while !decoder.is_complete() {
        let frame = tokio::time::timeout(stall, body.frame()).await.map_err(|_| {
            incomplete(&format!("the model's stream was silent for {} s", stall.as_secs()))
        })?;
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|e| incomplete(&format!("the model's stream broke: {e}")))?;
        let Ok(bytes) = frame.into_data() else { continue };
        for event in parser.push(&bytes).map_err(|e| incomplete(&e.to_string()))? {
            decoder.take(&event.data)?.into_iter().for_each(sink);
        }
    }
    Ok(())
}

const DENIED: &str = "denied";
/// Header fields that only proxyd's own answers have, with what proxyd did.
const BY_PROXYD: [(&str, &str); 2] =
    [("x-cleanhands-denial", DENIED), ("x-cleanhands-failure", "could not send")];
/// Codes of failures that last until an operator has mended something.
const FOR_AN_OPERATOR: [&str; 2] = ["credential_missing", "credential_unusable"];

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
    let message = format!("proxyd {verdict} the model request ({code}): {reason}{hint}");
    let retryable = verdict != DENIED && !FOR_AN_OPERATOR.contains(&code);
    Failure::new(ErrorKind::ModelRequestFailed, message, retryable)
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
}
