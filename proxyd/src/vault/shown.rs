//! What the traffic process has of a client's certificate: its chain, and a key that is not there.
//!
//! rustls asks for a signature in the middle of a handshake and cannot wait for one as a task does.
//! So the signer blocks its thread until the vault has answered, for [`SIGN`] at most, and refuses
//! to on a thread that carries traffic: whoever opens such a connection polls the handshake
//! elsewhere ([`crate::upstream::elsewhere`]).

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use policies::{Credential, Host};
use rustls::client::ResolvesClientCert;
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{SignatureAlgorithm, SignatureScheme};
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::connection::Connection;
use super::secret::Secret;
use super::wire::{Named, Request};
use super::{Vault, VaultError, certificate, unexpected};
use crate::upstream::elsewhere;

/// How long a handshake waits for its signature: the vault has many to serve, but answers each in
/// milliseconds.
const SIGN: Duration = Duration::from_secs(5);

/// A certificate for handshakes with one host. Two are equal if they show the same certificate in
/// the name of the same credential.
pub struct Shown {
    /// The credential's name.
    pub credential: String,
    /// Of credential, its definition, host and certificates: connections are kept by it.
    pub id: [u8; 32],
    key: Arc<Remote>,
}

impl Shown {
    /// What a handshake asks for the certificate.
    pub fn resolver(&self) -> Arc<dyn ResolvesClientCert> {
        let key = Arc::new(Key(Arc::clone(&self.key)));
        Arc::new(Always(Arc::new(CertifiedKey::new(self.key.chain.clone(), key))))
    }
}

#[cfg(test)]
impl Shown {
    /// One that is known by that number and has no key.
    pub fn in_test(id: u8) -> Arc<Self> {
        let named = Named { environment: "dev".into(), name: "corp".into(), print: String::new() };
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let key = Remote {
            connection: Arc::new(Connection::over(socket, Vec::new()).unwrap()),
            credential: named,
            host: String::new(),
            print: String::new(),
            schemes: Vec::new(),
            chain: Vec::new(),
        };
        Arc::new(Self { credential: "corp".into(), id: [id; 32], key: Arc::new(key) })
    }
}

impl PartialEq for Shown {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Shown {}

impl Hash for Shown {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

impl Vault {
    /// The certificate of a credential, for connections to that host.
    pub async fn shown(
        &self,
        credential: &Arc<Credential>,
        host: &Host,
    ) -> Result<Shown, VaultError> {
        let rendered = self.render(credential, host).await?;
        let schemes = rendered.value.expose_secret().chunks_exact(2);
        let schemes =
            schemes.map(|pair| SignatureScheme::from(u16::from_be_bytes([pair[0], pair[1]])));
        let chain = rendered.more.iter();
        let chain: Vec<_> =
            chain.map(|part| CertificateDer::from(part.expose_secret().to_vec())).collect();
        if chain.is_empty() {
            return Err(unexpected());
        }
        let named = Named::clone(&self.named(credential));
        let print = certificate::print(chain.iter().map(AsRef::as_ref));
        let mut digest = Sha256::new();
        for text in [&named.environment, &named.name, &named.print, &host.to_string(), &print] {
            digest.update((text.len() as u64).to_be_bytes());
            digest.update(text);
        }
        let key = Remote {
            connection: Arc::clone(&self.connection),
            credential: named,
            host: host.to_string(),
            print,
            schemes: schemes.collect(),
            chain,
        };
        let (credential, id) = (credential.name.clone(), digest.finalize().into());
        Ok(Shown { credential, id, key: Arc::new(key) })
    }
}

/// A key that the vault has.
struct Remote {
    connection: Arc<Connection>,
    credential: Named,
    host: String,
    print: String,
    schemes: Vec<SignatureScheme>,
    chain: Vec<CertificateDer<'static>>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key of {:?}", self.credential.name)
    }
}

/// The key as rustls has it.
#[derive(Debug)]
struct Key(Arc<Remote>);

impl SigningKey for Key {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        let scheme = *self.0.schemes.iter().find(|scheme| offered.contains(scheme))?;
        Some(Box::new(Asker { key: Arc::clone(&self.0), scheme }))
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        use SignatureScheme::{ED25519, RSA_PSS_SHA256};
        match self.0.schemes.first() {
            Some(&ED25519) => SignatureAlgorithm::ED25519,
            Some(&RSA_PSS_SHA256) => SignatureAlgorithm::RSA,
            _ => SignatureAlgorithm::ECDSA,
        }
    }
}

/// One scheme of that key.
#[derive(Debug)]
struct Asker {
    key: Arc<Remote>,
    scheme: SignatureScheme,
}

impl Signer for Asker {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        let failed = |reason: String| rustls::Error::General(reason);
        let runtime = Handle::try_current().ok().filter(|_| elsewhere::may_block());
        let runtime = runtime.ok_or_else(|| failed("nobody may wait here for the vault".into()))?;
        let Remote { connection, credential, host, print, .. } = &*self.key;
        let request = Request::Sign {
            credential: credential.clone(),
            host: host.clone(),
            scheme: self.scheme.into(),
            shown: print.clone(),
        };
        let parts = [Secret::concat(&[message])];
        let signing = async { timeout(SIGN, connection.ask(&request, &parts)).await };
        match runtime.block_on(signing) {
            Ok(Ok((_, mut parts))) if parts.len() == 1 => {
                Ok(parts.pop().map(|part| part.expose_secret().to_vec()).unwrap_or_default())
            }
            Ok(Ok(_)) => Err(failed(unexpected().to_string())),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed(format!("the vault does not sign within {} s", SIGN.as_secs()))),
        }
    }

    fn scheme(&self) -> SignatureScheme {
        self.scheme
    }
}

/// The certificate whatever a server lists: it was chosen for that host.
#[derive(Debug)]
struct Always(Arc<CertifiedKey>);

impl ResolvesClientCert for Always {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }

    fn has_certs(&self) -> bool {
        true
    }
}
