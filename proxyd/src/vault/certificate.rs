//! A client's certificate and its key, kept as one secret: what is shown of it, and what is signed.
//!
//! The vault's side. The certificates go to the traffic process, which shows them; the key does
//! not. It signs what a client signs in a TLS handshake ([`handshake`]) and nothing else, so that a
//! traffic process under foreign control can open connections as this client while it lasts, and
//! take nothing away that serves later or elsewhere.

mod handshake;

use std::sync::Arc;

use ipc::vault::SecretInfo;
use policies::{Backend, Host};
use rustls::SignatureScheme;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::sign::SigningKey;
use rustls_pki_types::pem::{PemObject, SectionKind};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};

use super::VaultError;
use super::child::{Answer, Child, now_unsigned};
use super::secret::Secret;
use super::store::rfc3339;
use super::wire::{Form, Named, Reply};

/// What a key may sign with, the most widely understood first.
const SCHEMES: [SignatureScheme; 10] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ECDSA_NISTP521_SHA512,
    SignatureScheme::ED25519,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
    SignatureScheme::RSA_PKCS1_SHA256,
    SignatureScheme::RSA_PKCS1_SHA384,
    SignatureScheme::RSA_PKCS1_SHA512,
];

/// A question for a signature.
pub(super) struct Wanted<'a> {
    pub credential: &'a Named,
    pub host: &'a str,
    pub scheme: u16,
    /// [`print`] of the certificates that were shown.
    pub shown: &'a str,
    pub message: &'a [u8],
}

/// Tells certificates apart.
pub(super) fn print<'a>(chain: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut digest = Sha256::new();
    for certificate in chain {
        digest.update((certificate.len() as u64).to_be_bytes());
        digest.update(certificate);
    }
    hex::encode(digest.finalize())
}

/// A certificate with its chain, and its key.
pub(super) struct Pair {
    chain: Vec<CertificateDer<'static>>,
    key: Arc<dyn SigningKey>,
}

impl Pair {
    /// Reads a stored value; no reason says anything of the key.
    pub fn read(value: &Secret) -> Result<Self, VaultError> {
        let (chain, key) = sections(value.expose_secret())?;
        let key = any_supported_type(&key)
            .map_err(|_| unusable("its private key is of no kind that TLS signs with"))?;
        // Not as rustls compares them: it reads no version 1, which many own authorities issue.
        let (_, own) = x509_parser::parse_x509_certificate(&chain[0])
            .map_err(|_| unusable("its first certificate cannot be read"))?;
        if key.public_key().is_none_or(|public| *public != *own.public_key().raw) {
            return Err(unusable(
                "its private key does not belong to its first certificate, which is to be the \
                 client's own",
            ));
        }
        Ok(Self { chain, key })
    }

    /// The same, for use at that time (seconds since 1970).
    pub fn valid(value: &Secret, now: u64) -> Result<Self, VaultError> {
        let pair = Self::read(value)?;
        let (begin, end) = pair.validity()?;
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        let at = |time| jiff::Timestamp::from_second(time).unwrap_or_default();
        if now > end {
            return Err(unusable(&format!("it ended at {}", at(end))));
        }
        if now < begin {
            return Err(unusable(&format!("it begins to be valid at {}", at(begin))));
        }
        Ok(pair)
    }

    fn validity(&self) -> Result<(i64, i64), VaultError> {
        let own = self.chain.first().map(AsRef::as_ref).unwrap_or_default();
        let (_, read) = x509_parser::parse_x509_certificate(own)
            .map_err(|_| unusable("its first certificate cannot be read"))?;
        let validity = read.validity();
        Ok((validity.not_before.timestamp(), validity.not_after.timestamp()))
    }

    fn print(&self) -> String {
        print(self.chain.iter().map(AsRef::as_ref))
    }

    /// What the traffic process gets: the schemes of the key, two bytes each, and the chain.
    pub fn shown(&self) -> Vec<Secret> {
        let able = |scheme: &SignatureScheme| self.key.choose_scheme(&[*scheme]).is_some();
        let schemes = SCHEMES.into_iter().filter(able);
        let schemes = schemes.flat_map(|scheme| u16::from(scheme).to_be_bytes()).collect();
        let chain = self.chain.iter().map(|certificate| Secret::new(certificate.to_vec()));
        std::iter::once(Secret::new(schemes)).chain(chain).collect()
    }

    fn sign(&self, host: &Host, scheme: u16, message: &[u8]) -> Result<Vec<u8>, VaultError> {
        let scheme = SignatureScheme::from(scheme);
        let refused = |reason: &str| {
            VaultError::Refused(format!("a client's certificate signs handshakes only: {reason}"))
        };
        handshake::check(message, scheme, host, &self.chain).map_err(refused)?;
        let signer = self.key.choose_scheme(&[scheme]);
        let signer = signer.ok_or_else(|| refused("its key has no such scheme"))?;
        signer.sign(message).map_err(|error| VaultError::Failed(format!("cannot sign: {error}")))
    }
}

/// The certificates and the one private key of a PEM text.
fn sections(
    text: &[u8],
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), VaultError> {
    let holds = |word: &[u8]| text.windows(word.len()).any(|part| part == word);
    if holds(b"-----BEGIN ENCRYPTED") || holds(b"Proc-Type: 4,ENCRYPTED") {
        return Err(unusable("its private key is encrypted: store it without a passphrase"));
    }
    let (mut chain, mut key) = (Vec::new(), None);
    for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(text) {
        // The parser's own words may quote what stands in the text.
        let (kind, der) = section.map_err(|_| unusable("it is no whole PEM text"))?;
        if kind == SectionKind::Certificate {
            chain.push(CertificateDer::from(der));
        } else if let Some(found) = PrivateKeyDer::from_pem(kind, der)
            && key.replace(found).is_some()
        {
            return Err(unusable("it holds several private keys"));
        }
    }
    match (chain.is_empty(), key) {
        (true, _) => Err(unusable(
            "it holds no certificate in PEM: store the certificate, its chain and its private key \
             one after the other",
        )),
        (false, None) => Err(unusable("it holds no private key in PEM beside its certificate")),
        (false, Some(key)) => Ok((chain, key)),
    }
}

fn unusable(reason: &str) -> VaultError {
    VaultError::Invalid(format!("the secret is no usable client certificate: {reason}"))
}

impl Child {
    /// Signs for a handshake in which the certificate was shown: with the kept value that holds it.
    pub(super) fn sign(&mut self, wanted: &Wanted<'_>) -> Answer {
        let (used, form) = self.permitted(wanted.credential, wanted.host, (None, None, None))?;
        if form != Form::Certificate {
            return Err(VaultError::Refused("what is no certificate signs no handshake".into()));
        }
        let host = Host::parse(wanted.host);
        let host = host.map_err(|error| VaultError::Invalid(error.to_string()))?;
        let read = |values: &[Secret]| {
            let mut pairs = values.iter().filter_map(|value| Pair::read(value).ok());
            pairs.find(|pair| pair.print() == wanted.shown)
        };
        let pair = match (used.key(), used.secret.backend) {
            (Some(key), _) => {
                let mut pairs = self.minted_values(&key).into_iter().map(Pair::read);
                pairs.find_map(|pair| pair.ok().filter(|pair| pair.print() == wanted.shown))
            }
            (None, Backend::File) => read(self.files.values(&used.secret.path)?),
            (None, _) => read(&self.store.values(&used.secret.path)?),
        };
        let gone = || VaultError::Unavailable("the certificate was replaced meanwhile".into());
        let signature = pair.ok_or_else(gone)?.sign(&host, wanted.scheme, wanted.message)?;
        Ok((Reply::Done, vec![Secret::new(signature)]))
    }

    /// Refuses a value that the policies' use of the secret could do nothing with.
    pub(super) fn check_value(&mut self, name: &str, value: &Secret) -> Result<(), VaultError> {
        match self.known.shows(name) {
            true => Pair::valid(value, (self.clock)()).map(drop),
            false => Ok(()),
        }
    }

    /// The secrets of the store, with the end of those that policies use as certificates and what
    /// is wrong with them.
    pub(super) fn stored(&mut self) -> Result<Vec<SecretInfo>, VaultError> {
        let mut secrets = self.store.list()?;
        for secret in &mut secrets {
            if self.known.shows(&secret.name) {
                let (_, value) = self.store.current(&secret.name)?;
                if let Some(state) = state(&value, (self.clock)()) {
                    state.clone_into(&mut secret.state);
                }
                secret.expires_at = Pair::read(&value)
                    .and_then(|pair| pair.validity())
                    .map_or(None, |(_, end)| Some(rfc3339(end)));
            }
        }
        Ok(secrets)
    }
}

fn state(value: &Secret, now: u64) -> Option<&'static str> {
    let Ok(pair) = Pair::read(value) else { return Some("unusable") };
    let ended = pair.validity().is_ok_and(|(_, end)| i64::try_from(now).is_ok_and(|now| now > end));
    match ended {
        true => Some("expired"),
        false => Pair::valid(value, now).is_err().then_some("unusable"),
    }
}

/// What is shown of a value, as parts of an answer.
pub(super) fn shown(value: &Secret) -> Result<Vec<Secret>, VaultError> {
    Ok(Pair::valid(value, now_unsigned())?.shown())
}

#[cfg(test)]
mod tests;
