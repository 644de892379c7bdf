//! What may be known of a certificate authority outside the vault child.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Which authority: the first eight bytes of its certificate's SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AuthorityId(u64);

impl AuthorityId {
    pub fn of(certificate: &[u8]) -> Self {
        let digest = Sha256::digest(certificate);
        Self(digest[..8].iter().fold(0, |id, byte| id << 8 | u64::from(*byte)))
    }

    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Option<Self> {
        let id = Self(u64::from_str_radix(text, 16).ok()?);
        (id.to_string() == text).then_some(id)
    }
}

impl fmt::Display for AuthorityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// All but the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Public {
    pub id: AuthorityId,
    pub pem: String,
    /// Of the certificate, hex.
    pub sha256: String,
    /// Seconds since 1970.
    pub not_before: u64,
    pub not_after: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_is_written_and_in_no_other_way() {
        let id = AuthorityId(0xab);
        assert_eq!(id.to_string(), "00000000000000ab");
        assert_eq!(AuthorityId::parse("00000000000000ab"), Some(id));
        for text in ["", "ab", "00000000000000AB", "+0000000000000ab", "00000000000000ab "] {
            assert_eq!(AuthorityId::parse(text), None, "{text:?}");
        }
        assert_eq!(AuthorityId::of(b"abc").to_string(), "ba7816bf8f01cfea");
    }
}
