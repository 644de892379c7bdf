//! Sealing of values: XChaCha20-Poly1305, a random nonce in front, and bound to what it belongs to.

use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

use super::VaultError;
use super::key::KEY_BYTES;
use super::secret::Secret;

const NONCE_BYTES: usize = 24;

/// Random bytes from the kernel.
pub(super) fn fill(bytes: &mut [u8]) -> Result<(), VaultError> {
    getrandom::fill(bytes)
        .map_err(|error| VaultError::Failed(format!("cannot read random bytes: {error}")))
}

/// What a sealed row belongs to, without two ways to read it.
fn belonging(id: &[u8], place: &[&str], version: u64) -> Vec<u8> {
    let mut out = b"cleanhands vault 1".to_vec();
    for piece in std::iter::once(id).chain(place.iter().map(|text| text.as_bytes())) {
        out.extend_from_slice(&(piece.len() as u64).to_le_bytes());
        out.extend_from_slice(piece);
    }
    out.extend_from_slice(&version.to_le_bytes());
    out
}

/// The sealed value, its nonce in front. A random nonce of 192 bits never repeats, also after a
/// backup was restored.
pub(super) fn seal(
    key: &[u8; KEY_BYTES],
    id: &[u8],
    place: &[&str],
    version: u64,
    value: &[u8],
) -> Result<Vec<u8>, VaultError> {
    let mut nonce = [0u8; NONCE_BYTES];
    fill(&mut nonce)?;
    let aad = belonging(id, place, version);
    let sealed = XChaCha20Poly1305::new(key.into())
        .encrypt(&XNonce::from(nonce), Payload { msg: value, aad: &aad })
        .map_err(|_| VaultError::Failed("cannot seal a value".into()))?;
    Ok([&nonce[..], &sealed].concat())
}

/// The value; none when key, bytes or place are not those it was sealed with.
pub(super) fn unseal(
    key: &[u8; KEY_BYTES],
    id: &[u8],
    place: &[&str],
    version: u64,
    sealed: &[u8],
) -> Option<Secret> {
    let (nonce, sealed) = sealed.split_first_chunk::<NONCE_BYTES>()?;
    let aad = belonging(id, place, version);
    XChaCha20Poly1305::new(key.into())
        .decrypt(&XNonce::from(*nonce), Payload { msg: sealed, aad: &aad })
        .ok()
        .map(Secret::new)
}
