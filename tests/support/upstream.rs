//! An HTTPS upstream with a CA of its own, which demands a token and tells what reached it.
//!
//! | path | answer |
//! |---|---|
//! | `/hello` | 200 `hello` when the right Authorization came, else 401 |
//! | `/echo` | 200 with the request's head, Authorization and all |
//! | anything else | 404 |

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// A running upstream; its tasks end with the test's runtime.
pub struct Upstream {
    pub port: u16,
    pub ca_pem: String,
    /// What it shows, DER.
    pub certificate: Vec<u8>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

/// One request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl Upstream {
    /// Serves `hosts` with one certificate; `authorization` is what `/hello` demands.
    pub async fn start(hosts: &[&str], authorization: &str) -> Self {
        let Tls { config, ca_pem, certificate } = tls(hosts);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let demanded = authorization.to_owned();
        let log = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, demanded, log) =
                    (acceptor.clone(), demanded.clone(), Arc::clone(&log));
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = hyper::service::service_fn(move |request| {
                        let answer = answer(&request, &demanded, &log);
                        async move { Ok::<_, Infallible>(answer) }
                    });
                    let builder =
                        hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { port, ca_pem, certificate, seen }
    }

    /// What has arrived so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

fn answer(
    request: &Request<Incoming>,
    demanded: &str,
    log: &Mutex<Vec<Seen>>,
) -> Response<Full<Bytes>> {
    let headers: Vec<(String, String)> = request
        .headers()
        .iter()
        .map(|(n, v)| (n.to_string(), String::from_utf8_lossy(v.as_bytes()).into_owned()))
        .collect();
    let path = request.uri().path().to_owned();
    log.lock().unwrap().push(Seen {
        method: request.method().to_string(),
        path: path.clone(),
        headers: headers.clone(),
    });
    let authorized = headers.iter().any(|(n, v)| n == "authorization" && v == demanded);
    let (status, body) = match path.as_str() {
        "/hello" if authorized => (200, "hello".to_owned()),
        "/hello" => (401, "who are you?".to_owned()),
        "/echo" => (200, headers.iter().map(|(n, v)| format!("{n}: {v}\n")).collect()),
        _ => (404, "no such page".to_owned()),
    };
    Response::builder().status(status).body(Full::new(Bytes::from(body))).unwrap()
}

/// What a server of ours needs for TLS.
pub(crate) struct Tls {
    pub config: ServerConfig,
    pub ca_pem: String,
    /// DER.
    pub certificate: Vec<u8>,
}

/// A CA and a certificate for `hosts` issued by it.
pub(crate) fn tls(hosts: &[&str]) -> Tls {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
    let ca_key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
    let issuer = Issuer::new(ca, ca_key);
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = hosts.iter().map(|h| (*h).to_owned()).collect();
    let leaf = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
    let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(tokio_rustls::rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], private)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Tls { config, ca_pem, certificate: leaf.der().to_vec() }
}
