//! Bytes that must not be seen: no Debug, Display, Serialize or Clone, wiped on drop.

use bytes::Bytes;
use zeroize::Zeroizing;

/// A secret value, or a text that contains one.
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Takes over bytes. Copies that the caller made before stay the caller's to wipe.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub fn expose_secret(&self) -> &[u8] {
        &self.0
    }

    /// The bytes without a copy: they are wiped when the last clone is dropped.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self.0)
    }

    /// The pieces in one new secret.
    pub fn concat(pieces: &[&[u8]]) -> Self {
        Self(Zeroizing::new(pieces.concat()))
    }
}
