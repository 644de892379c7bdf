//! Whose certificates count on the upstream leg, and by which certificate proxyd shows itself.
//!
//! The host's trust store is read from its usual places or from the one file that the operator
//! names. Variables of the environment have no say: whoever starts proxyd by hand may have some
//! that were meant for another program.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use policies::Host;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

use crate::config::{Identity, credentials};

/// Where distributions keep the bundle of the certificates they trust; the first that is there.
pub const BUNDLES: [&str; 6] = [
    // Debian, Ubuntu, Arch, Gentoo, NixOS.
    "/etc/ssl/certs/ca-certificates.crt",
    // Fedora, RHEL.
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    // openSUSE.
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    // Alpine.
    "/etc/ssl/cert.pem",
];

/// Why the operator's trust cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("cannot use {what} {path}: {reason}")]
    File { what: &'static str, path: PathBuf, reason: String },
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
}

impl TrustError {
    pub fn file(what: &'static str, path: &Path, reason: impl Into<String>) -> Self {
        Self::File { what, path: path.to_owned(), reason: reason.into() }
    }
}

/// The protocols offered to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alpn {
    Http1,
    Http2,
    Either,
}

/// The name that a certificate must be for.
pub fn server_name(host: &Host) -> Result<ServerName<'static>, String> {
    match host {
        Host::Ip(ip) => Ok(ServerName::IpAddress((*ip).into())),
        Host::Name(name) => ServerName::try_from(name.clone())
            .map_err(|_| "not a name that certificates can hold".to_owned()),
    }
}

/// Client configurations that differ in what they offer and in nothing else.
pub struct Offers {
    roots: Arc<RootCertStore>,
    http1: Arc<ClientConfig>,
    http2: Arc<ClientConfig>,
    either: Arc<ClientConfig>,
}

impl Offers {
    pub fn new(
        roots: &Arc<RootCertStore>,
        identity: Option<&Identity>,
    ) -> Result<Self, TrustError> {
        let shown = identity.map(Shown::read).transpose()?;
        Self::each(
            roots,
            &match &shown {
                Some(shown) => Identified::By(shown),
                None => Identified::Not,
            },
        )
    }

    /// The same in the name of a client.
    pub fn showing(&self, client: Arc<dyn ResolvesClientCert>) -> Result<Self, TrustError> {
        Self::each(&self.roots, &Identified::As(client))
    }

    fn each(roots: &Arc<RootCertStore>, client: &Identified<'_>) -> Result<Self, TrustError> {
        let config = |alpn: &[&[u8]]| config(roots, alpn, client);
        Ok(Self {
            roots: Arc::clone(roots),
            http1: config(&[b"http/1.1"])?,
            http2: config(&[b"h2"])?,
            either: config(&[b"h2", b"http/1.1"])?,
        })
    }

    pub fn of(&self, alpn: Alpn) -> Arc<ClientConfig> {
        Arc::clone(match alpn {
            Alpn::Http1 => &self.http1,
            Alpn::Http2 => &self.http2,
            Alpn::Either => &self.either,
        })
    }
}

/// Who proxyd says that it is, where an upstream asks.
enum Identified<'a> {
    Not,
    /// By what the operator's table names.
    By(&'a Shown),
    As(Arc<dyn ResolvesClientCert>),
}

fn config(
    roots: &Arc<RootCertStore>,
    alpn: &[&[u8]],
    client: &Identified<'_>,
) -> Result<Arc<ClientConfig>, TrustError> {
    let builder = ClientConfig::builder_with_provider(crate::tls::provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(Arc::clone(roots));
    let mut config = match client {
        Identified::By(shown) => {
            builder.with_client_auth_cert(shown.chain.clone(), shown.key.clone_key())?
        }
        Identified::As(client) => builder.with_client_cert_resolver(Arc::clone(client)),
        Identified::Not => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

/// The host's own trust store. One without a certificate is no error: names with a CA of their
/// own still work, every other verification fails and says so.
pub fn public_roots(named: Option<&Path>) -> Result<Arc<RootCertStore>, TrustError> {
    if let Some(path) = named {
        return roots("trust store", path);
    }
    for variable in ["SSL_CERT_FILE", "SSL_CERT_DIR"] {
        if std::env::var_os(variable).is_some() {
            tracing::warn!(
                variable,
                "proxyd does not follow this variable: trust-store in proxyd.toml names another \
                 trust store"
            );
        }
    }
    let mut roots = RootCertStore::empty();
    let bundle = BUNDLES.iter().map(Path::new).find(|path| path.exists());
    if let Some(path) = bundle {
        let native = rustls_native_certs::load_certs_from_paths(Some(path), None);
        for error in &native.errors {
            tracing::warn!(%error, "part of the host's trust store is not readable");
        }
        roots.add_parsable_certificates(native.certs);
        // A store that cannot be read must not pass for one that trusts nobody.
        if let (true, Some(error)) = (roots.is_empty(), native.errors.first()) {
            return Err(TrustError::file("trust store", path, error.to_string()));
        }
    }
    if roots.is_empty() {
        tracing::warn!("the host's trust store holds no certificate: is ca-certificates there?");
    }
    Ok(Arc::new(roots))
}

/// The certificates of one file; every one of them must be good.
pub fn roots(what: &'static str, path: &Path) -> Result<Arc<RootCertStore>, TrustError> {
    let failed = |reason: String| TrustError::file(what, path, reason);
    let mut roots = RootCertStore::empty();
    for certificate in certificates(what, path)? {
        roots.add(certificate).map_err(|e| failed(e.to_string()))?;
    }
    Ok(Arc::new(roots))
}

fn certificates(
    what: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TrustError> {
    let failed = |reason: String| TrustError::file(what, path, reason);
    let bytes = std::fs::read(path).map_err(|error| failed(unreadable(&error)))?;
    let list: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let list = list.map_err(|error| failed(error.to_string()))?;
    if list.is_empty() {
        return Err(failed("it holds no certificate".to_owned()));
    }
    Ok(list)
}

/// What proxyd shows to an upstream that asks who it is.
struct Shown {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Shown {
    fn read(identity: &Identity) -> Result<Self, TrustError> {
        let chain = certificates("client certificate", &identity.certificate)?;
        let bytes = private_file("client key", &identity.key)?;
        let key = PrivateKeyDer::from_pem_slice(&bytes);
        // The parser's own words may quote what stands in the file.
        let key = key.map_err(|_| {
            TrustError::file("client key", &identity.key, "it holds no private key in PEM")
        })?;
        Ok(Self { chain, key })
    }
}

/// Reads a file that holds a secret: one that others can read is refused, since then it is none.
pub fn private_file(what: &'static str, path: &Path) -> Result<Vec<u8>, TrustError> {
    let failed = |reason: String| TrustError::file(what, path, reason);
    let meta = std::fs::metadata(path).map_err(|error| failed(unreadable(&error)))?;
    // systemd gives a service its credentials by an access list, which shows as group bits.
    let passed = credentials().is_some_and(|dir| path.starts_with(dir));
    let own = [0, rustix::process::geteuid().as_raw()].contains(&meta.uid());
    if !own || (meta.mode() & 0o077 != 0 && !passed) {
        let (mode, uid) = (meta.mode() & 0o777, meta.uid());
        return Err(failed(format!(
            "it can be read by others (mode {mode:03o}, uid {uid}); chmod 600 it"
        )));
    }
    std::fs::read(path).map_err(|error| failed(unreadable(&error)))
}

fn unreadable(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => "permission denied; a running proxyd reads the \
            files it was started with and those beside its proxyd.toml, so after a file elsewhere \
            was replaced it must be restarted"
            .to_owned(),
        std::io::ErrorKind::NotFound => "no such file".to_owned(),
        _ => error.to_string(),
    }
}
