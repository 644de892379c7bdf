//! HTTP/1.1 over a Unix socket: serving an axum router with the peer's identity, and calling.
//!
//! Serving bounds connections and the time a head may take; a handler reads the caller from the
//! request's extensions as a [`Principal`]. Answers to failed calls are a [`Fault`] with its
//! status. Calling gives back the fault that the other side sent.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::fault::{Code, Fault};
use crate::peer::Principal;

/// Connections served at once on one socket; more wait in the backlog.
pub const CONNECTIONS_MAX: usize = 1024;
/// A head must arrive within this time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer a caller reads, in bytes.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        let status = http::StatusCode::from_u16(self.code.status())
            .unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(self)).into_response()
    }
}

/// Serves `router` on `listener` until `shutdown`, then lets running requests end for as long as
/// `drain` says. Each request carries its [`Principal`] as an extension.
pub async fn serve(
    listener: UnixListener,
    router: Router,
    shutdown: CancellationToken,
    drain: Duration,
) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let tracker = TaskTracker::new();
    loop {
        let permit = tokio::select! {
            () = shutdown.cancelled() => break,
            permit = Arc::clone(&permits).acquire_owned() => permit,
        };
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors or memory: the next try may find some.
                tracing::warn!(%error, "cannot accept on a unix socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let router = router.clone();
        let shutdown = shutdown.clone();
        tracker.spawn(async move {
            serve_connection(stream, router, shutdown).await;
            drop(permit);
        });
    }
    tracker.close();
    let _ = tokio::time::timeout(drain, tracker.wait()).await;
}

async fn serve_connection(stream: UnixStream, router: Router, shutdown: CancellationToken) {
    let Ok(principal) = Principal::of(&stream) else { return };
    let service = hyper::service::service_fn(move |mut request: http::Request<_>| {
        request.extensions_mut().insert(principal);
        let mut router = router.clone();
        async move {
            let request = request.map(axum::body::Body::new);
            tower_call(&mut router, request).await
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).half_close(true);
    let connection = builder.serve_connection(TokioIo::new(stream), service).with_upgrades();
    tokio::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    // A peer that breaks off is its own affair; handlers log their own failures.
    let _ = connection.await;
}

async fn tower_call(
    router: &mut Router,
    request: http::Request<axum::body::Body>,
) -> Result<Response, std::convert::Infallible> {
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;
    TowerToHyperService::new(router.clone()).call(request).await
}

/// Calls one daemon over its Unix socket. Each call is a connection of its own: they are cheap
/// (tens of microseconds) and never stale.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Fault> {
        decode(&self.call(http::Method::GET, path, None, Bytes::new()).await?)
    }

    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, Fault> {
        decode(&self.call(http::Method::DELETE, path, None, Bytes::new()).await?)
    }

    pub async fn post<B: Serialize, T: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<T, Fault> {
        let body = serde_json::to_vec(body)
            .map_err(|e| Fault::new(Code::Internal, format!("cannot encode a request: {e}")))?;
        let kind = Some("application/json");
        decode(&self.call(http::Method::POST, path, kind, body.into()).await?)
    }

    /// Any call with a raw body; gives the raw answer of a success.
    pub async fn call(
        &self,
        method: http::Method,
        path: &str,
        content_type: Option<&str>,
        body: Bytes,
    ) -> Result<Bytes, Fault> {
        self.whole(self.send(method, path, content_type, body).await?).await
    }

    /// [`Client::call`] with a body that is still to come.
    pub async fn call_body<B>(
        &self,
        method: http::Method,
        path: &str,
        body: B,
    ) -> Result<Bytes, Fault>
    where
        B: hyper::body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.whole(self.send_body(method, path, None, body).await?).await
    }

    async fn whole(&self, response: http::Response<hyper::body::Incoming>) -> Result<Bytes, Fault> {
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|e| self.unavailable("broke off its answer", &e.to_string()))?
            .to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        Err(serde_json::from_slice(&body).unwrap_or_else(|_| {
            Fault::new(Code::Internal, format!("{}: status {status}", self.socket.display()))
        }))
    }

    /// Any call; gives the response while its body still streams.
    pub async fn send(
        &self,
        method: http::Method,
        path: &str,
        content_type: Option<&str>,
        body: Bytes,
    ) -> Result<http::Response<hyper::body::Incoming>, Fault> {
        self.send_body(method, path, content_type, Full::new(body)).await
    }

    /// The same with a body that is still to come.
    pub async fn send_body<B>(
        &self,
        method: http::Method,
        path: &str,
        content_type: Option<&str>,
        body: B,
    ) -> Result<http::Response<hyper::body::Incoming>, Fault>
    where
        B: hyper::body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let stream =
            UnixStream::connect(&self.socket).await.map_err(|error| self.unreachable(&error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| self.unavailable("cannot connect", &e.to_string()))?;
        // The connection ends with its last user; its error reaches the request below.
        tokio::spawn(connection);
        let mut request = http::Request::builder()
            .method(method)
            .uri(path)
            .header(http::header::HOST, "localhost");
        if let Some(kind) = content_type {
            request = request.header(http::header::CONTENT_TYPE, kind);
        }
        let request = request
            .body(body)
            .map_err(|e| Fault::new(Code::Invalid, format!("cannot ask for {path}: {e}")))?;
        sender
            .send_request(request)
            .await
            .map_err(|e| self.unavailable("no answer", &e.to_string()))
    }

    fn unavailable(&self, what: &str, why: &str) -> Fault {
        Fault::new(Code::Unavailable, format!("{}: {what}: {why}", self.socket.display()))
            .with_hint(format!("is {} running? `cleanhands doctor` tells", self.daemon()))
    }

    fn unreachable(&self, error: &std::io::Error) -> Fault {
        self.unavailable("cannot connect", &error.to_string()).with_hint(crate::reach::hint(
            &self.socket,
            error.kind(),
            self.daemon(),
        ))
    }

    /// A socket is named after the daemon that serves it.
    fn daemon(&self) -> &str {
        self.socket.file_stem().and_then(|name| name.to_str()).unwrap_or("the daemon")
    }
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(body)
        .map_err(|e| Fault::new(Code::Internal, format!("the answer is not as documented: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Extension;
    use axum::routing::get;

    fn bound() -> (tempfile::TempDir, PathBuf, UnixListener) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.sock");
        let listener = UnixListener::bind(&path).unwrap();
        (dir, path, listener)
    }

    #[tokio::test]
    async fn a_handler_learns_its_caller_and_a_fault_comes_back_whole() {
        let (_dir, path, listener) = bound();
        let who = |Extension(p): Extension<Principal>| async move { axum::Json(p.owner()) };
        let no = || async { Fault::new(Code::NotFound, "no such thing").with_hint("look") };
        let router = Router::new().route("/who", get(who)).route("/no", get(no));
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, router, stop.clone(), Duration::from_secs(1)));
        let client = Client::new(path);

        let owner: String = client.get("/who").await.unwrap();
        let fault = client.get::<String>("/no").await.unwrap_err();
        stop.cancel();
        server.await.unwrap();

        assert_eq!(owner, Principal::own().owner());
        assert_eq!(fault, Fault::new(Code::NotFound, "no such thing").with_hint("look"));
    }

    #[tokio::test]
    async fn nobody_listening_is_a_fault_that_names_the_socket() {
        let fault = Client::new("/nonexistent/x.sock").get::<String>("/").await.unwrap_err();

        assert_eq!(fault.code, Code::Unavailable);
        assert!(fault.text.contains("/nonexistent/x.sock"), "{}", fault.text);
        assert_eq!(fault.hint.unwrap(), "is x running? `cleanhands doctor` tells");
    }

    #[tokio::test]
    async fn who_may_not_connect_is_told_whose_the_socket_is() {
        let fault =
            Client::new("/x.sock").unreachable(&std::io::ErrorKind::PermissionDenied.into());

        let hint = fault.hint.unwrap();
        assert!(hint.contains("--runtime-dir") && !hint.contains("running"), "{hint}");
    }
}
