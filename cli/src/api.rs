//! harnessd's HTTP API as calls: agents, environments, sessions, events, the live stream.
//!
//! Errors are the wire API's envelope; its message becomes the failure's text.

use std::collections::VecDeque;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use ipc::fault::Code;
use ipc::http::{ANSWER_BYTES_MAX, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::sse;
use crate::wire::{Named, Page, Received, text_at};

/// Most pages of one list that are read: an end to a server that never says "last".
const PAGES_MAX: usize = 10_000;

/// harnessd, over its socket.
#[derive(Clone, Debug)]
pub struct Harness {
    client: Client,
}

/// What a session is made from.
pub struct NewSession<'a> {
    pub agent: &'a str,
    pub environment: &'a str,
    pub title: &'a str,
    /// A workspace that sandboxd knows, or the session's own.
    pub workspace: Option<&'a str>,
}

impl Harness {
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: http::Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T, Failure> {
        let kind = body.map(|_| "application/json");
        let body = body.map(|b| Bytes::from(b.to_string())).unwrap_or_default();
        let response = self.client.send(method, path, kind, body).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| Failure::new(format!("harnessd broke off its answer: {error}")))?
            .to_bytes();
        if !status.is_success() {
            return Err(refusal(status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| {
            Failure::new(format!("harnessd: answer to {path} is not as documented: {error}"))
        })
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.call(http::Method::GET, path, None).await
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, Failure> {
        self.call(http::Method::POST, path, Some(body)).await
    }

    pub async fn health(&self) -> Result<ipc::session::Health, Failure> {
        self.get("/cleanhands/v1/health").await
    }

    /// Every object of a list, page by page.
    async fn all<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>, Failure> {
        let mut found = Vec::new();
        let mut cursor: Option<String> = None;
        for _ in 0..PAGES_MAX {
            let join = if path.contains('?') { '&' } else { '?' };
            let page = cursor.map(|c| format!("{join}page={}", segment(&c))).unwrap_or_default();
            let page: Page<T> = self.get(&format!("{path}{page}")).await?;
            found.extend(page.data);
            cursor = page.next_page.filter(|c| !c.is_empty());
            if cursor.is_none() {
                break;
            }
        }
        Ok(found)
    }

    /// The environment of that name bound to that policy, made when there is none.
    pub async fn environment(&self, name: &str, policy: &str) -> Result<String, Failure> {
        if let Some(id) = self.known_environment(name, policy).await? {
            return Ok(id);
        }
        let body = json!({ "name": name, "metadata": { ipc::session::METADATA_POLICY: policy } });
        match self.post::<Named>("/v1/environments", &body).await {
            Ok(made) => Ok(made.id),
            // Another command made it since the list was read; or it is bound to another policy.
            Err(taken) if taken.code == Code::Conflict => {
                self.known_environment(name, policy).await?.ok_or(taken)
            }
            Err(error) => Err(error),
        }
    }

    async fn known_environment(&self, name: &str, policy: &str) -> Result<Option<String>, Failure> {
        let known: Vec<Named> = self.all("/v1/environments").await?;
        let bound = |e: &Named| {
            let to = e.metadata.get(ipc::session::METADATA_POLICY).and_then(Value::as_str);
            e.archived_at.is_none() && e.name == name && to == Some(policy)
        };
        Ok(known.into_iter().find(bound).map(|environment| environment.id))
    }

    /// The agent of that name and model with the built-in tools, made when there is none.
    pub async fn agent(&self, name: &str, model: &str) -> Result<String, Failure> {
        let known: Vec<Named> = self.all("/v1/agents").await?;
        let same = |a: &Named| {
            a.archived_at.is_none() && a.name == name && text_at(&a.model, &["id"]) == model
        };
        if let Some(agent) = known.into_iter().find(same) {
            return Ok(agent.id);
        }
        let tools = json!([{ "type": "agent_toolset_20260401" }]);
        let body = json!({ "name": name, "model": model, "tools": tools });
        let made: Named = self.post("/v1/agents", &body).await?;
        Ok(made.id)
    }

    pub async fn create_session(&self, new: &NewSession<'_>) -> Result<String, Failure> {
        let mut body = json!({
            "agent": new.agent,
            "environment_id": new.environment,
            "title": new.title,
        });
        if let Some(workspace) = new.workspace {
            body["metadata"] = json!({ ipc::session::METADATA_WORKSPACE: workspace });
        }
        let made: Value = self.post("/v1/sessions", &body).await?;
        Ok(text_at(&made, &["id"]))
    }

    pub async fn sessions(&self, archived: bool) -> Result<Vec<Value>, Failure> {
        let filter = if archived { "?include_archived=true" } else { "" };
        self.all(&format!("/v1/sessions{filter}")).await
    }

    pub async fn session(&self, id: &str) -> Result<Value, Failure> {
        self.get(&format!("/v1/sessions/{}", segment(id))).await
    }

    pub async fn say(&self, session: &str, text: &str) -> Result<(), Failure> {
        let content = json!([{ "type": "text", "text": text }]);
        self.send(session, json!({ "type": "user.message", "content": content })).await
    }

    pub async fn interrupt(&self, session: &str) -> Result<(), Failure> {
        self.send(session, json!({ "type": "user.interrupt" })).await
    }

    async fn send(&self, session: &str, event: Value) -> Result<(), Failure> {
        let path = format!("/v1/sessions/{}/events", segment(session));
        self.post::<Value>(&path, &json!({ "events": [event] })).await.map(|_| ())
    }

    /// The whole history, oldest first.
    pub async fn events(&self, session: &str) -> Result<Vec<Received>, Failure> {
        let path = format!("/v1/sessions/{}/events", segment(session));
        Ok(self.all(&path).await?.into_iter().map(Received::of).collect())
    }

    /// The log itself, as it is stored.
    pub async fn log(&self, session: &str) -> Result<Vec<ipc::session::LogEvent>, Failure> {
        #[derive(serde::Deserialize)]
        struct Slice {
            events: Vec<ipc::session::LogEvent>,
        }
        let mut found: Vec<ipc::session::LogEvent> = Vec::new();
        loop {
            let after = found.last().map_or(0, |event| event.seq);
            let session = segment(session);
            let path = format!("/cleanhands/v1/sessions/{session}/log?after={after}&limit=1000");
            let slice: Slice = self.get(&path).await?;
            if slice.events.is_empty() {
                return Ok(found);
            }
            found.extend(slice.events);
        }
    }

    pub async fn verify(&self, session: &str) -> Result<ipc::vault::ChainReport, Failure> {
        self.get(&format!("/cleanhands/v1/sessions/{}/verify", segment(session))).await
    }

    /// An answer while it still streams.
    pub async fn stream_of(
        &self,
        path: &str,
    ) -> Result<http::Response<hyper::body::Incoming>, Failure> {
        let response = self.client.send(http::Method::GET, path, None, Bytes::new()).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        Err(refusal(status, &body.map(|body| body.to_bytes()).unwrap_or_default()))
    }

    pub async fn export(
        &self,
        session: &str,
    ) -> Result<http::Response<hyper::body::Incoming>, Failure> {
        self.stream_of(&format!("/cleanhands/v1/sessions/{}/export", segment(session))).await
    }

    pub async fn import(&self, session: &str, step: &Value) -> Result<Value, Failure> {
        self.post(&format!("/cleanhands/v1/sessions/{}/import", segment(session)), step).await
    }

    pub async fn choose_profile(&self, session: &str, profile: &str) -> Result<Value, Failure> {
        let path = format!("/cleanhands/v1/sessions/{}/profile", segment(session));
        self.post(&path, &json!({ "profile": profile })).await
    }

    pub async fn replay(&self, session: &str, profile: &str) -> Result<Value, Failure> {
        let (session, profile) = (segment(session), segment(profile));
        self.get(&format!("/cleanhands/v1/sessions/{session}/replay?profile={profile}")).await
    }

    pub async fn add_key(&self, name: &str) -> Result<ipc::session::NewKey, Failure> {
        self.post("/cleanhands/v1/keys", &json!({ "name": name })).await
    }

    pub async fn keys(&self) -> Result<ipc::session::KeyList, Failure> {
        self.get("/cleanhands/v1/keys").await
    }

    pub async fn remove_key(&self, name: &str) -> Result<(), Failure> {
        let path = format!("/cleanhands/v1/keys/{}", segment(name));
        self.call::<Value>(http::Method::DELETE, &path, None).await.map(|_| ())
    }

    /// The live stream from now on, with the running text of messages.
    pub async fn stream(&self, session: &str) -> Result<EventStream, Failure> {
        let deltas = "event_deltas%5B%5D=agent.message";
        let path = format!("/v1/sessions/{}/events/stream?{deltas}", segment(session));
        let response = self.client.send(http::Method::GET, &path, None, Bytes::new()).await?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let body = Limited::new(&mut body, ANSWER_BYTES_MAX).collect().await;
            return Err(refusal(status, &body.map(|b| b.to_bytes()).unwrap_or_default()));
        }
        Ok(EventStream { body, parser: sse::Parser::default(), ready: VecDeque::new() })
    }
}

/// Events as they happen, until harnessd ends the stream.
pub struct EventStream {
    body: hyper::body::Incoming,
    parser: sse::Parser,
    ready: VecDeque<Received>,
}

impl EventStream {
    /// The next event; none when the stream ended or broke. Cancel-safe.
    pub async fn next(&mut self) -> Option<Received> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let frame = self.body.frame().await?.ok()?;
            let Ok(bytes) = frame.into_data() else { continue };
            let frames = self.parser.push(&bytes).ok()?;
            let events = frames.iter().filter_map(|f| serde_json::from_str(&f.data).ok());
            self.ready.extend(events.map(Received::of));
        }
    }
}

/// What an answer that is no success says.
fn refusal(status: http::StatusCode, body: &[u8]) -> Failure {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let mut text = text_at(&json, &["error", "message"]);
    if text.is_empty() {
        text = text_at(&json, &["text"]);
    }
    if text.is_empty() {
        text = format!("harnessd answered with status {status}");
    }
    let code = match status.as_u16() {
        400 => Code::Invalid,
        401 | 403 => Code::Denied,
        404 => Code::NotFound,
        409 => Code::Conflict,
        413 => Code::TooLarge,
        422 => Code::Missing,
        429 => Code::Busy,
        503 | 529 => Code::Unavailable,
        _ => Code::Internal,
    };
    let hint = Some(text_at(&json, &["hint"])).filter(|hint| !hint.is_empty());
    Failure { code, hint, ..Failure::new(text) }
}

/// One path segment or query value, with everything but unreserved characters percent-encoded
/// (RFC 3986, section 2.3).
pub fn segment(text: &str) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_path_segment() {
        assert_eq!(segment("a-b_c.d~9"), "a-b_c.d~9");
        assert_eq!(segment("../x?y#z é"), "..%2Fx%3Fy%23z%20%C3%A9");
    }

    #[test]
    fn a_refusal_says_what_the_server_said() {
        let envelope = br#"{"type":"error","error":{"type":"not_found_error","message":"no x"}}"#;

        let failure = refusal(http::StatusCode::NOT_FOUND, envelope);
        let empty = refusal(http::StatusCode::BAD_GATEWAY, b"<html>");

        assert_eq!((failure.code, failure.text.as_str()), (Code::NotFound, "no x"));
        assert_eq!(empty.text, "harnessd answered with status 502 Bad Gateway");
    }
}
