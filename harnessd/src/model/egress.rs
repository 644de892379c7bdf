//! The way out: harnessd has no network, so it asks proxyd for the model's server.
//!
//! One lease for all model calls, held as long as this process lives, and one for each session that
//! talks to MCP servers; each is opened again when proxyd was restarted. A request goes
//! over `proxyd-egress.sock` in absolute form with the lease's token; proxyd judges it by
//! the policy of the environment, adds the key and does the TLS.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use ipc::fault::{Code, Fault};
use ipc::fd::Channel;
use ipc::id::{LeaseId, SessionId};
use ipc::lease::{Holder, LeaseReply, LeaseRequest, Open, VERSION};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::log::{ErrorKind, Failure};

/// proxyd answers a lease request from memory and its vault child; more is a hang.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a request that has not been sent waits for a proxyd that restarts.
const AWAY_MAX: Duration = Duration::from_secs(5);
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// Until the head of an answer: a local model may read a long prompt before its first byte.
const HEAD_TIMEOUT: Duration = Duration::from_secs(600);

/// harnessd's right to use proxyd, taken up when it is first needed.
pub struct Egress {
    lease_socket: PathBuf,
    egress_socket: PathBuf,
    environment: String,
    owner: String,
    /// Set: the lease is for this session's MCP servers and for nothing else.
    session: Option<SessionId>,
    lease: LeaseId,
    held: Mutex<Option<Held>>,
}

/// A request that got no answer.
#[derive(Debug)]
pub struct NoAnswer {
    /// Whether a server may have read it.
    pub sent: bool,
    pub failure: Failure,
}

struct Held {
    token: String,
    alive: Arc<AtomicBool>,
    /// Holds the connection, which is the lease; ending it gives the lease back.
    _watch: AbortOnDropHandle<()>,
}

impl Egress {
    /// `environment` names the policy file for model calls.
    pub fn new(lease_socket: PathBuf, egress_socket: PathBuf, environment: &str) -> Self {
        Self {
            lease_socket,
            egress_socket,
            environment: environment.to_owned(),
            owner: ipc::peer::Principal::own().owner(),
            session: None,
            lease: LeaseId::random(),
            held: Mutex::new(None),
        }
    }

    /// The way to the MCP servers of a session's environment, by the same proxyd.
    pub fn for_session(&self, environment: &str, owner: &str, session: &SessionId) -> Self {
        Self {
            lease_socket: self.lease_socket.clone(),
            egress_socket: self.egress_socket.clone(),
            environment: environment.to_owned(),
            owner: owner.to_owned(),
            session: Some(session.clone()),
            lease: LeaseId::random(),
            held: Mutex::new(None),
        }
    }

    /// Posts `body` to `url` and returns the answer's head, its body still streaming.
    pub async fn post(
        &self,
        url: &Uri,
        headers: &[(&'static str, &str)],
        body: Bytes,
    ) -> Result<Response<Incoming>, Failure> {
        self.send(&Method::POST, url, headers, body).await.map_err(|error| error.failure)
    }

    /// Sends a request and returns the answer's head, its body still streaming.
    pub async fn send(
        &self,
        method: &Method,
        url: &Uri,
        headers: &[(&'static str, &str)],
        body: Bytes,
    ) -> Result<Response<Incoming>, NoAnswer> {
        let response = self.send_once(method, url, headers, body.clone()).await?;
        if response.status() != StatusCode::PROXY_AUTHENTICATION_REQUIRED {
            return Ok(response);
        }
        // The token is of a proxyd that is gone, and we have not noticed yet.
        *self.held.lock().await = None;
        self.send_once(method, url, headers, body).await
    }

    async fn send_once(
        &self,
        method: &Method,
        url: &Uri,
        headers: &[(&'static str, &str)],
        body: Bytes,
    ) -> Result<Response<Incoming>, NoAnswer> {
        let unsent = |failure| NoAnswer { sent: false, failure };
        let (token, stream) = self.connect().await.map_err(|fault| unsent(failure(&fault)))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| unsent(unreachable(&format!("cannot speak to proxyd: {e}"))))?;
        // It ends with the request's last part; its error reaches the request.
        tokio::spawn(connection);
        let authority = url.authority().map_or("", |a| a.as_str());
        let mut request = Request::builder()
            .method(method)
            .uri(url.clone())
            .header(header::HOST, authority)
            .header(header::PROXY_AUTHORIZATION, format!("Bearer {token}"))
            .header(header::USER_AGENT, concat!("cleanhands/", env!("CARGO_PKG_VERSION")));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request
            .body(Full::new(body))
            .map_err(|e| unsent(unreachable(&format!("cannot build the request: {e}"))))?;
        let lost = |what: &str| NoAnswer { sent: true, failure: unreachable(what) };
        match tokio::time::timeout(HEAD_TIMEOUT, sender.send_request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(lost(&format!("proxyd broke off: {error}"))),
            Err(_) => Err(lost("the server did not answer in 600 s")),
        }
    }

    /// A connection to proxyd and the lease's token. Nothing has been sent yet, so a proxyd that
    /// is away for a moment is waited for.
    async fn connect(&self) -> Result<(String, UnixStream), Fault> {
        let deadline = Instant::now() + AWAY_MAX;
        let mut pause = PAUSE_MIN;
        loop {
            match self.connect_once().await {
                Err(fault)
                    if fault.code == Code::Unavailable && Instant::now() + pause < deadline =>
                {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                outcome => return outcome,
            }
        }
    }

    async fn connect_once(&self) -> Result<(String, UnixStream), Fault> {
        let token = self.token().await?;
        let stream = UnixStream::connect(&self.egress_socket).await.map_err(|e| {
            let text = format!("{}: {e}", self.egress_socket.display());
            Fault::new(Code::Unavailable, text).with_hint("is proxyd running?")
        })?;
        Ok((token, stream))
    }

    async fn token(&self) -> Result<String, Fault> {
        let mut held = self.held.lock().await;
        if let Some(held) = held.as_ref().filter(|h| h.alive.load(Ordering::Acquire)) {
            return Ok(held.token.clone());
        }
        let opened = tokio::time::timeout(LEASE_TIMEOUT, self.open());
        let fresh = opened.await.map_err(|_| {
            Fault::new(Code::Unavailable, "proxyd did not answer a lease request in 10 s")
        })??;
        let token = fresh.token.clone();
        *held = Some(fresh);
        Ok(token)
    }

    async fn open(&self) -> Result<Held, Fault> {
        let away = |what: String| {
            let text = format!("{}: {what}", self.lease_socket.display());
            Fault::new(Code::Unavailable, text).with_hint("is proxyd running?")
        };
        let channel = Channel::connect(&self.lease_socket).map_err(|e| away(e.to_string()))?;
        let open = Open {
            version: VERSION,
            lease: self.lease.clone(),
            holder: Holder::Harness,
            environment: self.environment.clone(),
            owner: self.owner.clone(),
            sandbox: None,
            session: self.session.clone(),
            descriptors: Vec::new(),
        };
        let request = LeaseRequest::Open(open);
        channel.send(&request, &[]).await.map_err(|e| away(e.to_string()))?;
        let (reply, _) = channel.receive().await.map_err(|e| away(e.to_string()))?;
        let opened = match reply {
            LeaseReply::Opened(opened) => opened,
            LeaseReply::Refused { fault } => return Err(fault),
            other => {
                let reason = match other {
                    LeaseReply::Revoked { reason } => reason,
                    _ => "answered out of turn".to_owned(),
                };
                return Err(away(reason));
            }
        };
        let token = opened.token.ok_or_else(|| away("gave no token".to_owned()))?;
        let alive = Arc::new(AtomicBool::new(true));
        let watch = tokio::spawn(watch(channel, Arc::clone(&alive)));
        tracing::info!(lease = %self.lease, environment = %self.environment, "lease opened");
        Ok(Held { token, alive, _watch: AbortOnDropHandle::new(watch) })
    }
}

async fn watch(channel: Channel, alive: Arc<AtomicBool>) {
    loop {
        match channel.receive::<LeaseReply>().await {
            Ok((LeaseReply::Revoked { reason }, _)) => {
                tracing::warn!(%reason, "proxyd ended a lease of harnessd");
                break;
            }
            Ok(_) => {}
            Err(error) => {
                tracing::info!(%error, "connection of a lease ended");
                break;
            }
        }
    }
    alive.store(false, Ordering::Release);
}

/// What a fault of proxyd means for the request.
fn failure(fault: &Fault) -> Failure {
    let retryable = matches!(fault.code, Code::Unavailable | Code::Busy | Code::Internal);
    Failure::new(ErrorKind::ModelRequestFailed, fault.lines(), retryable)
}

fn unreachable(message: &str) -> Failure {
    super::answer::incomplete(message)
}
