//! Java's own format of a store of certificates, which is all that a JVM reads.
//!
//! JKS version 2, because every JVM since the first reads it, also where it asks for PKCS #12 (the
//! providers tell the two apart by their first bytes). Its end is a digest over everything before
//! and a password that is public: it guards from damage, as it does in the stores of distributions.

use sha1::{Digest, Sha1};

/// The password of every store that a distribution ships.
const PASSWORD: &str = "changeit";
/// What the digest begins with, after the password: part of the format.
const SALT: &[u8] = b"Mighty Aphrodite";

const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
const TRUSTED_CERTIFICATE: u32 = 2;

/// Names of entries are what `keytool -list` shows.
const ROOTS_NAME: &str = "root";
const OURS_NAME: &str = "cleanhands";

/// A store that trusts `roots`, then `ours`; all in DER.
pub fn key_store(roots: &[Vec<u8>], ours: &[Vec<u8>]) -> Vec<u8> {
    let count = roots.len() + ours.len();
    let mut store = Vec::with_capacity(64 * count + total(roots) + total(ours) + 64);
    store.extend(MAGIC.to_be_bytes());
    store.extend(VERSION.to_be_bytes());
    store.extend(length(count));
    for (name, certificates) in [(ROOTS_NAME, roots), (OURS_NAME, ours)] {
        for (at, der) in certificates.iter().enumerate() {
            add(&mut store, &format!("{name}-{at}"), der);
        }
    }
    let mut digest = Sha1::new();
    // Two bytes a character, high byte first.
    digest.update(PASSWORD.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<u8>>());
    digest.update(SALT);
    digest.update(&store);
    store.extend(digest.finalize());
    store
}

fn add(store: &mut Vec<u8>, name: &str, der: &[u8]) {
    store.extend(TRUSTED_CERTIFICATE.to_be_bytes());
    string(store, name);
    // Milliseconds since 1970: the same bundle gives the same store.
    store.extend(0u64.to_be_bytes());
    string(store, "X.509");
    store.extend(length(der.len()));
    store.extend(der);
}

/// `DataOutput.writeUTF`, for ASCII.
fn string(store: &mut Vec<u8>, text: &str) {
    let length = u16::try_from(text.len()).expect("names are a word and a number");
    store.extend(length.to_be_bytes());
    store.extend(text.as_bytes());
}

fn length(length: usize) -> [u8; 4] {
    u32::try_from(length).expect("bundles are limited to megabytes").to_be_bytes()
}

fn total(certificates: &[Vec<u8>]) -> usize {
    certificates.iter().map(Vec::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_format() {
        // What keytool of OpenJDK writes for these entries, but for the date.
        let store = key_store(&[vec![0xaa, 0xbb]], &[vec![0xcc]]);

        let mut expected = b"\xfe\xed\xfe\xed\0\0\0\x02\0\0\0\x02".to_vec();
        for (name, der) in [("root-0", &b"\xaa\xbb"[..]), ("cleanhands-0", b"\xcc")] {
            expected.extend(b"\0\0\0\x02\0");
            expected.push(u8::try_from(name.len()).unwrap());
            expected.extend(name.as_bytes());
            expected.extend([0; 8]);
            expected.extend(b"\0\x05X.509\0\0\0");
            expected.push(u8::try_from(der.len()).unwrap());
            expected.extend(der);
        }
        assert_eq!(store[..expected.len()], expected);
        assert_eq!(store.len(), expected.len() + 20);
    }
}
