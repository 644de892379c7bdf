//! Whose certificates count on the upstream leg.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use policies::Host;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

use crate::config::UpstreamRow;

/// Why the operator's trust cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("cannot read CA file {path}: {reason}")]
    File { path: PathBuf, reason: String },
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// The protocols offered to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpn {
    Http1,
    Http2,
    Either,
}

struct Offers {
    http1: Arc<ClientConfig>,
    http2: Arc<ClientConfig>,
    either: Arc<ClientConfig>,
}

/// Client configurations: the host's trust store for everyone, and one of its own for each name
/// to which the upstream table gives a CA. There only that CA counts.
pub struct Trust {
    public: Offers,
    private: HashMap<Host, Offers>,
}

impl Trust {
    pub fn load(table: &HashMap<Host, UpstreamRow>) -> Result<Self, TrustError> {
        let mut roots = RootCertStore::empty();
        let native = rustls_native_certs::load_native_certs();
        for error in &native.errors {
            tracing::warn!(%error, "part of the host's trust store is not readable");
        }
        let (_, unusable) = roots.add_parsable_certificates(native.certs);
        if roots.is_empty() {
            // Names with a CA of their own still work; every other verification fails and says so.
            tracing::warn!(unusable, "the host's trust store holds no certificate");
        }
        let mut private = HashMap::new();
        for (host, row) in table {
            if let Some(path) = &row.ca {
                private.insert(host.clone(), Offers::new(read(path)?)?);
            }
        }
        Ok(Self { public: Offers::new(roots)?, private })
    }

    pub fn client_config(&self, host: &Host, alpn: Alpn) -> Arc<ClientConfig> {
        let offers = self.private.get(host).unwrap_or(&self.public);
        Arc::clone(match alpn {
            Alpn::Http1 => &offers.http1,
            Alpn::Http2 => &offers.http2,
            Alpn::Either => &offers.either,
        })
    }
}

fn read(path: &PathBuf) -> Result<RootCertStore, TrustError> {
    let failed = |reason: String| TrustError::File { path: path.clone(), reason };
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(path).map_err(|e| failed(e.to_string()))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|e| failed(e.to_string()))?;
        roots.add(certificate).map_err(|e| failed(e.to_string()))?;
    }
    if roots.is_empty() {
        return Err(failed("holds no certificate".to_owned()));
    }
    Ok(roots)
}

impl Offers {
    fn new(roots: RootCertStore) -> Result<Self, TrustError> {
        let roots = Arc::new(roots);
        Ok(Self {
            http1: config(&roots, &[b"http/1.1"])?,
            http2: config(&roots, &[b"h2"])?,
            either: config(&roots, &[b"h2", b"http/1.1"])?,
        })
    }
}

fn config(roots: &Arc<RootCertStore>, alpn: &[&[u8]]) -> Result<Arc<ClientConfig>, TrustError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(Arc::clone(roots))
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}
