//! Through a corporate proxy: reaching it, showing who we are, asking it for a tunnel.
//!
//! The proxy is the operator's choice, so its own address is not judged by any rule. What it says
//! is read as a head of bounded size and never passed on: a sandbox sees our words about it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes, BytesMut};
use policies::{Backend, Credential, Host, HostPattern, Inject, SecretRef, When};
use rustls::{ClientConfig, RootCertStore};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::UpstreamError;
use super::dial::Dialer;
use super::eyeballs::{self, Lost};
use super::pool::Key;
use super::resolve::Resolver;
use super::trust::{self, Alpn, Offers, TrustError};
use crate::config::{Login, PasswordPlace, ProxyRow, Resolve};
use crate::head::{RequestHead, ResponseHead};
use crate::relay::h1::{head, wire};
use crate::relay::stream::Stream;
use crate::sys::interfaces;
use crate::vault::{Vault, VaultError};

/// Interim answers that are passed over before the one that counts.
const INTERIM_MAX: usize = 8;

/// A proxy between this host and upstreams.
pub struct Proxy {
    row: ProxyRow,
    /// `host:port`, for people.
    pub label: Arc<str>,
    tls: Arc<ClientConfig>,
    /// Its password as the vault knows credentials: for this host alone.
    credential: Option<Arc<Credential>>,
}

impl Proxy {
    pub fn new(row: ProxyRow, roots: &Arc<RootCertStore>) -> Result<Self, TrustError> {
        if let Some(Login { password: PasswordPlace::File(path), .. }) = &row.login {
            // Said at the start, not by the first request.
            trust::private_file("password of the upstream proxy", path)?;
        }
        let credential = row.login.as_ref().and_then(|login| match &login.password {
            PasswordPlace::Vault(name) => Some(Arc::new(Credential {
                environment: None,
                name: "upstream-proxy".to_owned(),
                secret: SecretRef { backend: Backend::Local, path: name.clone() },
                grant: None,
                inject: Inject::Basic { user: Some(login.user.clone()) },
                when: When::Always,
                hosts: vec![HostPattern::Exact(row.host.clone())],
                env: Vec::new(),
                shape: None,
                allow_plaintext: !row.tls,
            })),
            PasswordPlace::File(_) => None,
        });
        let label = row.host.authority(row.port).into();
        Ok(Self { label, tls: Offers::new(roots, None)?.of(Alpn::Http1), credential, row })
    }

    pub fn resolves(&self) -> bool {
        self.row.resolve == Resolve::Proxy
    }

    /// Why the proxy is of no use, and what the operator can do.
    pub fn failed(&self, reason: impl Into<String>, hint: Option<String>) -> UpstreamError {
        UpstreamError::Proxy { proxy: self.label.to_string(), reason: reason.into(), hint }
    }

    /// The value of `Proxy-Authorization`, rendered for one use.
    pub async fn authorization(&self, vault: &Vault) -> Result<Option<Bytes>, UpstreamError> {
        let Some(login) = &self.row.login else { return Ok(None) };
        match (&login.password, &self.credential) {
            (PasswordPlace::File(path), _) => self.basic_of_file(&login.user, path).map(Some),
            (PasswordPlace::Vault(_), Some(credential)) => {
                let rendered = vault.render(credential, &self.row.host).await;
                let rendered = rendered.map_err(|error| self.without_password(&error))?;
                Ok(Some(Bytes::copy_from_slice(rendered.value.expose_secret())))
            }
            (PasswordPlace::Vault(_), None) => Ok(None),
        }
    }

    /// The same for a process that has no vault to ask.
    pub fn authorization_of_file(&self) -> Result<Option<Bytes>, UpstreamError> {
        match &self.row.login {
            None => Ok(None),
            Some(Login { password: PasswordPlace::File(path), user }) => {
                self.basic_of_file(user, path).map(Some)
            }
            Some(_) => Err(self.failed(
                "its password lies in the vault, which cannot be asked for on the way to a token",
                Some("let password in [upstream-proxy] of proxyd.toml name a file".to_owned()),
            )),
        }
    }

    fn basic_of_file(&self, user: &str, path: &Path) -> Result<Bytes, UpstreamError> {
        let what = "password of the upstream proxy";
        let password = trust::private_file(what, path).map_err(|error| {
            // The error names a file of this host; that is for the log.
            tracing::error!(%error, "upstream proxy");
            self.failed("its password cannot be read", Some("see proxyd's log".to_owned()))
        })?;
        let password = password.strip_suffix(b"\n").unwrap_or(&password);
        let pair = [user.as_bytes(), b":", password].concat();
        Ok(format!("Basic {}", STANDARD.encode(pair)).into())
    }

    fn without_password(&self, error: &VaultError) -> UpstreamError {
        match error {
            VaultError::Missing(name) => self.failed(
                format!("its password, secret {name:?}, is not in the vault"),
                Some(format!("an operator stores it with: cleanhands secret set {name}")),
            ),
            other => self.failed(format!("its password is not to be had: {other}"), None),
        }
    }

    /// A connection to the proxy itself.
    pub async fn reach(
        &self,
        resolver: &Resolver,
        patience: Duration,
    ) -> Result<Stream, UpstreamError> {
        let addresses = match &self.row.host {
            Host::Ip(ip) => vec![(*ip, self.row.port).into()],
            Host::Name(name) => {
                resolver.addresses(name, self.row.port).await.map_err(|error| match error {
                    UpstreamError::Resolve { reason, .. } => self.failed(reason, None),
                    other => other,
                })?
            }
        };
        let (stream, _) =
            eyeballs::race(&addresses, patience).await.map_err(|lost| match lost {
                Lost::Refused(tried) => self.failed(format!("cannot connect: {tried}"), None),
                Lost::Silent(tried) => {
                    self.failed(format!("no answer within {} s: {tried}", patience.as_secs()), None)
                }
            })?;
        // As on every leg: pieces are whole messages already.
        let _ = stream.set_nodelay(true);
        interfaces::keep_alive(&stream);
        if !self.row.tls {
            return Ok(Stream::new(stream));
        }
        let name = trust::server_name(&self.row.host).map_err(|why| self.failed(why, None))?;
        let connecting = TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream);
        match timeout(patience, connecting).await {
            Ok(Ok(stream)) => Ok(Stream::new(stream)),
            Ok(Err(error)) => Err(self.failed(
                format!("cannot verify it: {error}"),
                Some("ca in [upstream-proxy] of proxyd.toml says whom to trust for it".to_owned()),
            )),
            Err(_) => {
                let seconds = patience.as_secs();
                Err(self.failed(format!("no TLS handshake within {seconds} s"), None))
            }
        }
    }

    /// Asks for a tunnel to `authority` (RFC 9110, section 9.3.6).
    pub async fn tunnel(
        &self,
        stream: Stream,
        authority: &str,
        authorization: Option<&Bytes>,
        patience: Duration,
    ) -> Result<Stream, UpstreamError> {
        let mut request = BytesMut::with_capacity(256);
        request.put_slice(format!("CONNECT {authority} HTTP/1.1\r\n").as_bytes());
        request.put_slice(format!("Host: {authority}\r\n").as_bytes());
        if let Some(value) = authorization {
            request.put_slice(b"Proxy-Authorization: ");
            request.put_slice(value);
            request.put_slice(b"\r\n");
        }
        request.put_slice(b"\r\n");
        let (mut reader, mut writer) = wire::split(stream);
        let talk = async {
            writer.send(&request).await.map_err(|error| error.to_string())?;
            for _ in 0..=INTERIM_MAX {
                let bytes = reader.head().await.map_err(|error| error.to_string())?;
                let bytes = bytes.ok_or("it closed the connection without an answer")?;
                let (head, _) = head::parse_response(&bytes).map_err(|error| error.to_string())?;
                if head.status >= 200 {
                    return Ok(head);
                }
            }
            Err::<ResponseHead, _>("it gives interim answers only".to_owned())
        };
        let head = match timeout(patience, talk).await {
            Ok(Ok(head)) => head,
            Ok(Err(reason)) => {
                let reason = format!("no sound answer to CONNECT {authority}: {reason}");
                return Err(self.failed(reason, None));
            }
            Err(_) => {
                let seconds = patience.as_secs();
                let reason = format!("no answer to CONNECT {authority} within {seconds} s");
                return Err(self.failed(reason, None));
            }
        };
        if (200..300).contains(&head.status) {
            return Ok(wire::join(reader, writer));
        }
        Err(self.refused(&head, &format!("CONNECT {authority}")))
    }

    /// A request of plain HTTP as the proxy takes it: the whole URI, of the verified name, and
    /// who we are (RFC 9112, section 3.2.2).
    pub async fn absolute(
        &self,
        head: &RequestHead,
        key: &Key,
        dialer: &Dialer,
    ) -> Result<RequestHead, UpstreamError> {
        let authority = key.host.authority(key.port);
        let authority = authority.strip_suffix(":80").unwrap_or(&authority);
        let path = if head.target == "*" { &b""[..] } else { &head.target };
        let target = [b"http://", authority.as_bytes(), path].concat();
        let mut headers = head.headers.clone();
        if let Some(value) = self.authorization(dialer.vault()).await? {
            headers.append("Proxy-Authorization", value);
        }
        Ok(RequestHead {
            method: head.method.clone(),
            target: target.into(),
            scheme: head.scheme,
            authority: head.authority.clone(),
            headers,
        })
    }

    /// What a refusal of the proxy means.
    pub fn refused(&self, head: &ResponseHead, what: &str) -> UpstreamError {
        if head.status != 407 {
            let word = http::StatusCode::from_u16(head.status).ok();
            let word = word.and_then(|status| status.canonical_reason()).unwrap_or_default();
            let shown = format!("{} {word}", head.status);
            return self.failed(format!("it answered {what} with {}", shown.trim_end()), None);
        }
        let asked = schemes(head);
        let listed = if asked.is_empty() { "none".to_owned() } else { asked.join(", ") };
        let basic = asked.iter().any(|scheme| scheme.eq_ignore_ascii_case("basic"));
        let (reason, hint) = match (basic, &self.row.login) {
            (false, _) => (
                format!("it asks for authentication that proxyd does not speak (407: {listed})"),
                "proxyd speaks Basic to upstream proxies",
            ),
            (true, None) => (
                "it asks for a user and password (407)".to_owned(),
                "set user and password in [upstream-proxy] of proxyd.toml",
            ),
            (true, Some(_)) => (
                "it does not accept proxyd's user and password (407)".to_owned(),
                "check user and password in [upstream-proxy] of proxyd.toml",
            ),
        };
        self.failed(reason, Some(hint.to_owned()))
    }
}

/// The schemes of a challenge, as far as they are plain words.
fn schemes(head: &ResponseHead) -> Vec<String> {
    let words = head.headers.all("proxy-authenticate").filter_map(|value| {
        let word = value.split(|byte| byte.is_ascii_whitespace()).next()?;
        let plain =
            word.len() <= 32 && word.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-');
        plain.then(|| String::from_utf8_lossy(word).into_owned())
    });
    words.filter(|word| !word.is_empty()).take(8).collect()
}
