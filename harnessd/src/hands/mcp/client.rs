//! One MCP server over streamable HTTP: the handshake, questions, streams taken up again where they
//! broke, the end. proxyd judges every request and puts the token in; none is here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::rpc::{self, Message};
use crate::model::Egress;
use crate::model::sse::SseParser;

/// How long a server may take for the handshake or a page of its tools.
const SHORT: Duration = Duration::from_secs(20);
/// How long a call may be silent; each event of its stream, progress above all, begins it anew.
const SILENCE_MAX: Duration = Duration::from_secs(300);
/// An answer is read up to this length.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
const ERROR_BYTES_MAX: usize = 64 * 1024;
/// Times that a broken stream is taken up again.
const RESUMES_MAX: u32 = 5;
const PAGES_MAX: usize = 64;
/// Most tools of one server: the limit of the wire API for all of them.
const TOOLS_MAX: usize = 256;
/// Most bytes of all tools of one server: they stand in the log and in every request.
const LIST_BYTES_MAX: usize = 1024 * 1024;
const SESSION_CHARS_MAX: usize = 1_024;
const LIST_CHANGED: &str = "notifications/tools/list_changed";

/// Why a server gave no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{text}")]
pub struct Trouble {
    pub kind: TroubleKind,
    /// Whether the server may have begun what it was asked for.
    pub begun: bool,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TroubleKind {
    /// Not reached, not allowed, or no MCP server.
    Connection,
    /// It wants another credential than proxyd gives.
    Authentication,
    /// It does not know our session any more: what was asked was not begun.
    SessionGone,
    /// It answered, with an error of its own.
    Answered,
}

impl Trouble {
    fn new(kind: TroubleKind, begun: bool, text: impl Into<String>) -> Self {
        Self { kind, begun, text: text.into() }
    }

    fn connection(begun: bool, text: impl Into<String>) -> Self {
        Self::new(TroubleKind::Connection, begun, text)
    }
}

/// What the handshake settled.
struct Session {
    id: Option<String>,
    revision: &'static str,
}

/// A server as one run of a session uses it.
pub struct Client {
    egress: Arc<Egress>,
    url: Uri,
    session: Mutex<Option<Arc<Session>>>,
    next: AtomicU64,
    changed: AtomicBool,
}

/// A tool as a server describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Listed {
    pub name: String,
    pub description: String,
    pub input_schema: Value,
}

impl Client {
    pub fn new(egress: Arc<Egress>, url: Uri) -> Self {
        let (session, next) = (Mutex::default(), AtomicU64::new(1));
        Self { egress, url, session, next, changed: AtomicBool::new(false) }
    }

    /// Whether the server said since the last question that its tools have changed.
    pub fn take_changed(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel)
    }

    /// All tools, page by page, in an order that does not depend on the server's.
    pub async fn tools(&self) -> Result<Vec<Listed>, Trouble> {
        let mut found = BTreeMap::new();
        let mut bytes = 0;
        let mut cursor = None;
        for _ in 0..PAGES_MAX {
            let params = cursor.map_or_else(|| json!({}), |c: String| json!({ "cursor": c }));
            let page = self.ask("tools/list", &params, &AtomicU64::new(0)).await?;
            for tool in page["tools"].as_array().map(Vec::as_slice).unwrap_or_default() {
                if let Some(tool) = listed(tool) {
                    bytes += tool.description.len() + tool.input_schema.to_string().len();
                    found.insert(tool.name.clone(), tool);
                }
            }
            if bytes > LIST_BYTES_MAX {
                let text = format!("its list of tools is longer than {LIST_BYTES_MAX} bytes");
                return Err(Trouble::new(TroubleKind::Answered, false, text));
            }
            if found.len() > TOOLS_MAX {
                let text = format!("it has more than {TOOLS_MAX} tools");
                return Err(Trouble::new(TroubleKind::Answered, false, text));
            }
            cursor = page["nextCursor"].as_str().map(str::to_owned);
            if cursor.is_none() {
                return Ok(found.into_values().collect());
            }
        }
        let text = format!("its list of tools has more than {PAGES_MAX} pages");
        Err(Trouble::new(TroubleKind::Answered, false, text))
    }

    /// Calls a tool. `asked` gets the number of the request, by which it can be cancelled.
    pub async fn call(
        &self,
        tool: &str,
        input: &Value,
        asked: &AtomicU64,
    ) -> Result<Value, Trouble> {
        self.ask("tools/call", &json!({ "name": tool, "arguments": input }), asked).await
    }

    /// Tells the server that nobody waits for this request any more.
    pub async fn cancel(&self, asked: &AtomicU64) {
        let id = asked.load(Ordering::Acquire);
        let session = self.session.lock().await.clone();
        let Some(session) = session.filter(|_| id != 0) else { return };
        let params = json!({ "requestId": id, "reason": "interrupted by the user" });
        let note = rpc::notification("notifications/cancelled", &params);
        self.tell(&session, &note).await;
    }

    /// Ends the session at the server.
    pub async fn close(&self) {
        let session = self.session.lock().await.take();
        if let Some(session) = session.filter(|session| session.id.is_some()) {
            let sent = self.send(&Method::DELETE, &session, &[], Bytes::new());
            if let Ok(Err(error)) = tokio::time::timeout(SHORT, sent).await {
                tracing::debug!(%error, "an MCP session was not ended");
            }
        }
    }

    /// Asks; a session that the server has forgotten is begun again, once.
    async fn ask(&self, method: &str, params: &Value, asked: &AtomicU64) -> Result<Value, Trouble> {
        let session = self.open().await?;
        let outcome = self.ask_in(&session, method, params, asked).await;
        match outcome {
            Err(trouble) if trouble.kind == TroubleKind::SessionGone => {
                self.session.lock().await.take_if(|held| Arc::ptr_eq(held, &session));
                let session = self.open().await?;
                self.ask_in(&session, method, params, asked).await
            }
            outcome => outcome,
        }
    }

    /// The session, begun if there is none.
    async fn open(&self) -> Result<Arc<Session>, Trouble> {
        let mut held = self.session.lock().await;
        if let Some(session) = held.as_ref() {
            return Ok(Arc::clone(session));
        }
        let begin = async {
            let none = Session { id: None, revision: rpc::NEWEST };
            let id = self.next.fetch_add(1, Ordering::Relaxed);
            let version = env!("CARGO_PKG_VERSION");
            let params = json!({
                "protocolVersion": rpc::NEWEST,
                "capabilities": {},
                "clientInfo": { "name": "cleanhands", "version": version },
            });
            let body = rpc::request(id, "initialize", &params);
            let response = self.post(&none, &body).await?;
            let given = response.headers().get("mcp-session-id").map(|v| v.to_str());
            let given = match given {
                None => None,
                Some(Ok(id)) if id.len() <= SESSION_CHARS_MAX => Some(id.to_owned()),
                Some(_) => {
                    return Err(Trouble::connection(false, "its session id is no visible text"));
                }
            };
            let result = self.answer(&none, response, id).await?;
            let revision =
                rpc::revision(&result).map_err(|text| Trouble::connection(false, text))?;
            let session = Arc::new(Session { id: given, revision });
            let ready = rpc::notification("notifications/initialized", &json!({}));
            self.post(&session, &ready).await?;
            Ok(session)
        };
        let begun = tokio::time::timeout(SHORT, begin).await;
        let late = || Trouble::connection(false, "it did not finish the handshake in 20 s");
        let session = begun.map_err(|_| late())?.map_err(|trouble| Trouble {
            // Nothing but the handshake was asked for.
            begun: false,
            ..trouble
        })?;
        *held = Some(Arc::clone(&session));
        Ok(session)
    }

    async fn ask_in(
        &self,
        session: &Session,
        method: &str,
        params: &Value,
        asked: &AtomicU64,
    ) -> Result<Value, Trouble> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        asked.store(id, Ordering::Release);
        let calls = method == "tools/call";
        let limit = if calls { SILENCE_MAX } else { SHORT };
        let mut params = params.clone();
        if calls {
            params["_meta"] = json!({ "progressToken": id });
        }
        let body = rpc::request(id, method, &params);
        let whole = async {
            let response = tokio::time::timeout(limit, self.post(session, &body));
            let response = response.await.map_err(|_| silent(limit))??;
            self.answer(session, response, id).await
        };
        if calls {
            return whole.await;
        }
        tokio::time::timeout(limit, whole).await.map_err(|_| silent(limit))?
    }

    /// Reads until the answer to request `id` has come, over as many streams as it takes.
    async fn answer(
        &self,
        session: &Session,
        mut response: Response<Incoming>,
        id: u64,
    ) -> Result<Value, Trouble> {
        let mut place = String::new();
        for _ in 0..=RESUMES_MAX {
            let kind = response.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
            let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
            match kind.to_ascii_lowercase().as_str() {
                "application/json" => return self.whole(session, response, id).await,
                "text/event-stream" => {}
                other => {
                    let text = format!("it answered with {other:.80?} and not as an MCP server");
                    return Err(Trouble::connection(true, text));
                }
            }
            if let Some(result) = self.stream(session, response, id, &mut place).await? {
                return Ok(result);
            }
            if place.is_empty() {
                break;
            }
            let headers = [("last-event-id", place.as_str())];
            let again = self.send(&Method::GET, session, &headers, Bytes::new());
            let again = tokio::time::timeout(SHORT, again).await;
            let lost =
                || Trouble::connection(true, "its stream broke and cannot be taken up again");
            response = again.map_err(|_| lost())?.map_err(|_| lost())?;
        }
        Err(Trouble::connection(true, "its stream ended before the answer"))
    }

    async fn whole(
        &self,
        session: &Session,
        response: Response<Incoming>,
        id: u64,
    ) -> Result<Value, Trouble> {
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect();
        let body = tokio::time::timeout(SILENCE_MAX, body).await;
        let body = body.map_err(|_| silent(SILENCE_MAX))?;
        let broke = |e| Trouble::connection(true, format!("its answer broke: {e}"));
        let text = String::from_utf8_lossy(&body.map_err(broke)?.to_bytes()).into_owned();
        let found = self.take(session, &text, id).await?;
        found.ok_or_else(|| Trouble::connection(true, "its answer is to another request"))
    }

    /// Reads one stream. `None`: it ended before the answer; `place` says how far it came.
    async fn stream(
        &self,
        session: &Session,
        response: Response<Incoming>,
        id: u64,
        place: &mut String,
    ) -> Result<Option<Value>, Trouble> {
        let mut body = response.into_body();
        let mut parser = SseParser::default();
        loop {
            let frame = tokio::time::timeout(SILENCE_MAX, body.frame()).await;
            let Some(Ok(frame)) = frame.map_err(|_| silent(SILENCE_MAX))? else {
                return Ok(None);
            };
            let Ok(bytes) = frame.into_data() else { continue };
            let events =
                parser.push(&bytes).map_err(|e| Trouble::connection(true, e.to_string()))?;
            for event in events {
                if !event.id.is_empty() {
                    place.clone_from(&event.id);
                }
                // The first event of a stream may be there for its id alone.
                if event.data.is_empty() {
                    continue;
                }
                if let Some(result) = self.take(session, &event.data, id).await? {
                    return Ok(Some(result));
                }
            }
        }
    }

    /// Takes messages in; gives the answer to request `id` if it is among them.
    async fn take(&self, session: &Session, text: &str, id: u64) -> Result<Option<Value>, Trouble> {
        let messages = rpc::parse(text).map_err(|e| Trouble::connection(true, e.to_string()))?;
        let mut found = None;
        for message in messages {
            match message {
                Message::Result { id: of, result } if of == id => found = Some(result),
                Message::Error { id: of, code, message } if of.is_none_or(|of| of == id) => {
                    let text = format!("{message} (error {code})");
                    return Err(Trouble::new(TroubleKind::Answered, true, text));
                }
                Message::Request { id, method } => {
                    self.tell(session, &rpc::reply(&id, &method)).await;
                }
                Message::Notification { method } if method == LIST_CHANGED => {
                    self.changed.store(true, Ordering::Release);
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Sends what wants no answer.
    async fn tell(&self, session: &Session, message: &Value) {
        let sent = tokio::time::timeout(SHORT, self.post(session, message)).await;
        if !matches!(sent, Ok(Ok(_))) {
            tracing::debug!("an MCP server did not take a message");
        }
    }

    async fn post(
        &self,
        session: &Session,
        message: &Value,
    ) -> Result<Response<Incoming>, Trouble> {
        let headers = [("content-type", "application/json")];
        self.send(&Method::POST, session, &headers, message.to_string().into()).await
    }

    /// Sends one request; an answer that is not a success is a trouble.
    async fn send(
        &self,
        method: &Method,
        session: &Session,
        headers: &[(&'static str, &str)],
        body: Bytes,
    ) -> Result<Response<Incoming>, Trouble> {
        let accept = match *method {
            Method::POST => "application/json, text/event-stream",
            _ => "text/event-stream",
        };
        let mut all = vec![("accept", accept), ("mcp-protocol-version", session.revision)];
        all.extend(session.id.as_deref().map(|id| ("mcp-session-id", id)));
        all.extend_from_slice(headers);
        let response = self.egress.send(method, &self.url, &all, body).await;
        let response = response.map_err(|e| Trouble::connection(e.sent, e.failure.message))?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(refused(response, session.id.is_some()).await)
    }
}

async fn refused(response: Response<Incoming>, in_session: bool) -> Trouble {
    let status = response.status();
    let own = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
    let denial = own("x-cleanhands-denial").map(str::to_owned);
    let failure = own("x-cleanhands-failure").map(str::to_owned);
    let body = Limited::new(response.into_body(), ERROR_BYTES_MAX).collect();
    let body = match tokio::time::timeout(SHORT, body).await {
        Ok(Ok(body)) => String::from_utf8_lossy(&body.to_bytes()).chars().take(600).collect(),
        _ => String::new(),
    };
    let text = match (&denial, &failure) {
        (Some(code), _) => format!("proxyd denied the request ({code}): {body}"),
        (_, Some(code)) => format!("proxyd could not pass the request on ({code}): {body}"),
        _ => format!("it answered with {status}: {body}"),
    };
    let credential = failure.is_some_and(|code| code.starts_with("credential"));
    let from_server = denial.is_none() && !text.starts_with("proxyd");
    let kind = match status {
        _ if credential => TroubleKind::Authentication,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if from_server => {
            TroubleKind::Authentication
        }
        StatusCode::NOT_FOUND if from_server && in_session => TroubleKind::SessionGone,
        _ => TroubleKind::Connection,
    };
    // proxyd's own refusals and a server's 4xx say that nothing was begun.
    let begun = denial.is_none() && !credential && !status.is_client_error();
    Trouble::new(kind, begun, text)
}

fn silent(limit: Duration) -> Trouble {
    Trouble::connection(true, format!("it was silent for {} s", limit.as_secs()))
}

/// A tool of a list; one that no model could call is passed over.
fn listed(tool: &Value) -> Option<Listed> {
    let name = tool["name"].as_str().filter(|name| !name.is_empty() && name.len() <= 256)?;
    let schema = tool.get("inputSchema").filter(|schema| schema["type"] == "object")?;
    let description = tool["description"].as_str().or_else(|| tool["title"].as_str());
    Some(Listed {
        name: name.to_owned(),
        description: description.unwrap_or_default().chars().take(16_384).collect(),
        input_schema: schema.clone(),
    })
}
