//! The demo's billing API: another company's HTTPS server, in a process of its own.
//!
//! It is told the SHA-256 of the one token that may call it, nothing more. Two of its operations
//! take as long as the demo wants: it says on standard output when such a request has arrived and
//! answers when standard input says so, so that what happens in between happens in the middle of
//! a tool call, every time.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::demo::story;
use crate::failure::Failure;
use crate::term;

/// How long a slow operation waits to be let on: longer than any part of the demo takes.
const HOLD: Duration = Duration::from_secs(40);

/// What the server counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    /// Requests with the right token.
    pub admitted: u64,
    /// Requests with another or none.
    pub refused: u64,
    /// How often each operation that changes something was received.
    pub runs: BTreeMap<String, u64>,
}

struct Api {
    /// None: nobody may call yet.
    token_sha256: Mutex<Option<String>>,
    tally: Mutex<Tally>,
    released: watch::Sender<Vec<String>>,
}

/// Serves until standard input ends. Prints `ready PORT` first.
pub async fn main(ca: &Path) -> Result<ExitCode, Failure> {
    let fail = |what: &str| Failure::new(format!("billing API: {what}"));
    let acceptor = certificates(ca).map_err(|why| fail(&why))?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let listener = listener.map_err(|error| fail(&error.to_string()))?;
    let port = listener.local_addr().map_err(|error| fail(&error.to_string()))?.port();
    let api = Arc::new(Api {
        token_sha256: Mutex::default(),
        tally: Mutex::default(),
        released: watch::Sender::default(),
    });
    term::line(&format!("ready {port}"))?;
    let orders = rustix::io::dup(rustix::stdio::stdin()).map_err(std::io::Error::from);
    let orders = orders.and_then(pipe::Receiver::from_owned_fd);
    let orders = orders.map_err(|error| fail(&format!("standard input: {error}")))?;
    let mut orders = BufReader::new(orders).lines();
    loop {
        tokio::select! {
            order = orders.next_line() => match order {
                Ok(Some(order)) => api.obey(&order)?,
                _ => return Ok(ExitCode::SUCCESS),
            },
            Ok((stream, _)) = listener.accept() => {
                tokio::spawn(serve(acceptor.clone(), stream, Arc::clone(&api)));
            }
        }
    }
}

/// Makes a CA and a certificate for the API's name; the CA's goes to a file for proxyd to trust.
fn certificates(ca: &Path) -> Result<TlsAcceptor, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let ca_key = KeyPair::generate().map_err(|e| text(&e))?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, "Billing Example CA");
    let ca_certificate = params.self_signed(&ca_key).map_err(|e| text(&e))?;
    std::fs::write(ca, ca_certificate.pem()).map_err(|e| text(&e))?;
    let issuer = Issuer::new(params, ca_key);
    let key = KeyPair::generate().map_err(|e| text(&e))?;
    let mut leaf =
        CertificateParams::new(vec![story::BILLING_HOST.to_owned()]).map_err(|e| text(&e))?;
    leaf.use_authority_key_identifier_extension = true;
    let leaf = leaf.signed_by(&key, &issuer).map_err(|e| text(&e))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| text(&e))?
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], private)
        .map_err(|e| text(&e))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn serve(acceptor: TlsAcceptor, stream: TcpStream, api: Arc<Api>) {
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let service = hyper::service::service_fn(move |request| {
        let api = Arc::clone(&api);
        async move { Ok::<_, Infallible>(api.answer(request).await) }
    });
    // A client that breaks off is part of the story.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

impl Api {
    fn tally(&self) -> std::sync::MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn token(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.token_sha256.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn obey(&self, order: &str) -> Result<(), Failure> {
        match order.split_once(' ') {
            Some(("token", sha256)) => {
                *self.token() = Some(sha256.to_owned());
                Ok(())
            }
            Some(("release", what)) => {
                self.released.send_modify(|released| released.push(what.to_owned()));
                Ok(())
            }
            _ => {
                let tally = self.tally().clone();
                let text = serde_json::to_string(&tally)
                    .map_err(|error| Failure::new(format!("billing API: {error}")))?;
                term::line(&format!("tally {text}"))
            }
        }
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        if !self.admits(&request) {
            self.tally().refused += 1;
            return text(StatusCode::UNAUTHORIZED, "a valid token is needed\n".into());
        }
        self.tally().admitted += 1;
        let path = request.uri().path().to_owned();
        match (request.method(), path.as_str()) {
            (&Method::GET, "/invoices") => text(StatusCode::OK, story::INVOICES.into()),
            (&Method::GET, "/invoices/1044") => text(StatusCode::OK, story::POISONED.into()),
            (&Method::GET, "/echo") => text(StatusCode::OK, echo(&request)),
            (&Method::GET, "/runs") => text(StatusCode::OK, self.runs()),
            (&Method::POST, "/close-month" | "/reconcile") => self.slowly(&path[1..]).await,
            _ => text(StatusCode::NOT_FOUND, "no such thing\n".into()),
        }
    }

    fn admits(&self, request: &Request<Incoming>) -> bool {
        let mut values = request.headers().get_all(http::header::AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return false };
        let Some(token) = value.as_bytes().strip_prefix(b"Bearer ") else { return false };
        // Both sides are hashes, so comparing them early-out tells nobody anything.
        self.token().as_ref() == Some(&hex::encode(Sha256::digest(token)))
    }

    fn runs(&self) -> String {
        self.tally().runs.iter().map(|(what, count)| format!("{what}: {count}\n")).collect()
    }

    /// An operation that ends when the demo says so.
    async fn slowly(&self, what: &str) -> Response<Full<Bytes>> {
        *self.tally().runs.entry(what.to_owned()).or_default() += 1;
        let mut released = self.released.subscribe();
        if term::line(&format!("arrived {what}")).is_err() {
            return text(StatusCode::INTERNAL_SERVER_ERROR, "nobody listens\n".into());
        }
        let done = released.wait_for(|released| released.iter().any(|r| r == what));
        match tokio::time::timeout(HOLD, done).await {
            Ok(Ok(_)) => text(StatusCode::OK, format!("{what}: done, once\n")),
            _ => text(StatusCode::GATEWAY_TIMEOUT, format!("{what}: took too long\n")),
        }
    }
}

/// What the request carried, as a debugging endpoint would show it.
fn echo(request: &Request<Incoming>) -> String {
    let mut out = format!("{} {}\n", request.method(), request.uri());
    for (name, value) in request.headers() {
        out += &format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes()));
    }
    out
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = http::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}
