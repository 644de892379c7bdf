//! Which lease a token stands for. Tokens themselves are nowhere kept: only their hashes.
//!
//! A hash is found by its first bytes and then compared as a whole in constant time. Neither tells
//! anything about a token: whoever chooses the input of SHA-256 does not choose its output.

use std::collections::HashMap;

use ipc::id::{LeaseId, random_text};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// 260 bits from the kernel's random source: five for each character.
const TOKEN_CHARACTERS: usize = 52;

/// SHA-256 of a token.
#[derive(Clone, Copy)]
pub struct Hash([u8; 32]);

impl Hash {
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// Reads the form in which a holder that comes back sends it.
    pub fn parse(hex: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(hex, &mut bytes).ok()?;
        Some(Self(bytes))
    }

    fn first(&self) -> [u8; 8] {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        first
    }
}

/// A token that nobody has had before.
pub fn fresh() -> String {
    random_text(TOKEN_CHARACTERS)
}

/// The tokens of all live leases.
#[derive(Default)]
pub struct Tokens(HashMap<[u8; 8], Vec<(Hash, LeaseId)>>);

impl Tokens {
    pub fn find(&self, hash: &Hash) -> Option<&LeaseId> {
        let near = self.0.get(&hash.first())?;
        near.iter().find(|(known, _)| bool::from(known.0.ct_eq(&hash.0))).map(|(_, lease)| lease)
    }

    pub fn insert(&mut self, hash: Hash, lease: LeaseId) {
        self.0.entry(hash.first()).or_default().push((hash, lease));
    }

    pub fn remove(&mut self, lease: &LeaseId) {
        self.0.retain(|_, near| {
            near.retain(|(_, of)| of != lease);
            !near.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_stands_for_its_lease_until_that_ends_and_no_other_does() {
        let (one, two) = (LeaseId::random(), LeaseId::random());
        let (token, other) = (fresh(), fresh());
        let mut tokens = Tokens::default();
        tokens.insert(Hash::of(&token), one.clone());
        tokens.insert(Hash::of(&other), two.clone());

        assert_eq!(tokens.find(&Hash::of(&token)), Some(&one));
        assert_eq!(tokens.find(&Hash::of(&token.to_uppercase())), None);
        assert_eq!(tokens.find(&Hash::of("")), None);
        tokens.remove(&one);

        assert_eq!(tokens.find(&Hash::of(&token)), None);
        assert_eq!(tokens.find(&Hash::of(&other)), Some(&two));
    }

    #[test]
    fn tokens_are_long_and_never_the_same() {
        let some: std::collections::HashSet<_> = (0..1000).map(|_| fresh()).collect();

        assert_eq!(some.len(), 1000);
        assert!(some.iter().all(|token| token.len() * 5 >= 256));
    }

    #[test]
    fn a_hash_is_read_from_hex_alone() {
        let hash = Hash::of("x");

        assert_eq!(Hash::parse(&hex::encode(hash.0)).map(|h| h.0), Some(hash.0));
        for bad in ["", "00", &"g".repeat(64), &"0".repeat(66)] {
            assert!(Hash::parse(bad).is_none(), "{bad:?}");
        }
    }
}
