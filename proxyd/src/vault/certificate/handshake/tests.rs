//! What rustls itself signs is taken, for that host and certificate; everything else is refused.

use std::sync::{Arc, Mutex};

use rustls::client::ResolvesClientCert;
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{ClientConnection, ServerConnection, SignatureAlgorithm, SupportedProtocolVersion};

use super::super::tests::{Made, made};
use super::*;
use crate::tls::provider;

/// A key that keeps what it is to sign.
#[derive(Debug)]
struct Keeping(Arc<dyn SigningKey>, Arc<Mutex<Vec<u8>>>);

#[derive(Debug)]
struct Kept(Box<dyn Signer>, Arc<Mutex<Vec<u8>>>);

impl SigningKey for Keeping {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        Some(Box::new(Kept(self.0.choose_scheme(offered)?, Arc::clone(&self.1))))
    }
    fn algorithm(&self) -> SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl Signer for Kept {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        message.clone_into(&mut self.1.lock().unwrap());
        self.0.sign(message)
    }
    fn scheme(&self) -> SignatureScheme {
        self.0.scheme()
    }
}

#[derive(Debug)]
struct Shows(Arc<CertifiedKey>);

impl ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
    fn has_certs(&self) -> bool {
        true
    }
}

/// What a client signs that shows the chain to `host`, in a handshake that comes to its end.
fn signed(made: &Made, host: &str, version: &'static SupportedProtocolVersion) -> Vec<u8> {
    let kept = Arc::default();
    let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&made.key()).unwrap();
    let key = Arc::new(Keeping(key, Arc::clone(&kept)));
    let own = Arc::new(Shows(Arc::new(CertifiedKey::new(made.chain(), key))));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.ca()).unwrap();
    let roots = Arc::new(roots);
    let verifier =
        rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider());
    let server = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[version])
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(made.chain(), made.key())
        .unwrap();
    let client = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_cert_resolver(own);
    let name = host.to_owned().try_into().unwrap();
    let mut client = ClientConnection::new(Arc::new(client), name).unwrap();
    let mut server = ServerConnection::new(Arc::new(server)).unwrap();
    while client.is_handshaking() || server.is_handshaking() {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        server.read_tls(&mut &bytes[..]).unwrap();
        server.process_new_packets().unwrap();
        bytes.clear();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        client.read_tls(&mut &bytes[..]).unwrap();
        client.process_new_packets().unwrap();
    }
    let message = kept.lock().unwrap().clone();
    assert!(!message.is_empty());
    message
}

const SCHEME: SignatureScheme = SignatureScheme::ECDSA_NISTP256_SHA256;

fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

#[test]
fn what_a_client_signs_in_a_handshake_is_taken_for_that_host_and_certificate() {
    let (made, other) = (made("a.test"), made("a.test"));
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let message = signed(&made, "a.test", version);

        assert_eq!(check(&message, SCHEME, &host("a.test"), &made.chain()), Ok(()));
    }
    // What TLS 1.3 hides, TLS 1.2 shows.
    let message = signed(&made, "a.test", &rustls::version::TLS12);
    for (name, chain, reason) in [
        ("b.test", made.chain(), "it is with another host"),
        ("127.0.0.1", made.chain(), "it is with another host"),
        ("a.test", other.chain(), "it shows another certificate"),
        ("a.test", [made.chain(), other.chain()].concat(), "it shows another certificate"),
        ("a.test", Vec::new(), "it shows another certificate"),
    ] {
        assert_eq!(check(&message, SCHEME, &host(name), &chain), Err(reason), "{name}");
    }
}

#[test]
fn nothing_but_a_whole_handshake_of_tls_1_2_is_taken_and_no_piece_of_one_panics() {
    let made = made("a.test");
    let message = signed(&made, "a.test", &rustls::version::TLS12);
    let taken = |message: &[u8]| check(message, SCHEME, &host("a.test"), &made.chain()).is_ok();
    assert!(taken(&message));

    for end in 0..message.len() {
        assert!(!taken(&message[..end]), "cut at {end}");
        assert!(!taken(&message[end + 1..]), "begun at {end}");
    }
    assert!(!taken(&[&message[..], &message[..]].concat()));
    assert!(!taken(&[&message[..], b"\x14\0\0\0"].concat()));
    for at in 0..message.len() {
        for bit in 0..8 {
            let mut changed = message.clone();
            changed[at] ^= 1 << bit;
            // Some of it is anybody's choice; what the check reads is not.
            let _ = taken(&changed);
        }
    }
    // The types and lengths of messages, the client's version, and all of its certificate.
    for (at, byte) in [(0, 2), (1, 1), (4, 2), (5, 4)] {
        let mut changed = message.clone();
        changed[at] = byte;
        assert!(!taken(&changed), "byte {at}");
    }
}

#[test]
fn what_a_server_signs_and_any_other_text_is_refused() {
    let made = made("a.test");
    let message = |context: &str, hash: usize| {
        [&[b' '; 64][..], context.as_bytes(), b"\0", &vec![7; hash]].concat()
    };
    let client = "TLS 1.3, client CertificateVerify";
    let good = [message(client, 32), message(client, 48)];
    for message in &good {
        assert_eq!(check(message, SCHEME, &host("a.test"), &made.chain()), Ok(()));
        let old = SignatureScheme::RSA_PKCS1_SHA256;
        assert!(check(message, old, &host("a.test"), &made.chain()).is_err());
    }
    for bad in [
        Vec::new(),
        message("TLS 1.3, server CertificateVerify", 32),
        message("TLS 1.3, client CertificateVerif", 32),
        message("TLS 1.3, client CertificateVerify extra", 32),
        message(client, 31),
        message(client, 0),
        message(client, 64),
        message("", 32),
        good[0][1..].to_vec(),
        [b" ", &good[0][..]].concat(),
        b"eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJyb290In0".to_vec(),
        // A request for another certificate, and what a server of TLS 1.2 signs.
        b"\x30\x81\xb3\x02\x01\x00\x30\x11".to_vec(),
        [&[1; 64][..], &[3, 0, 29, 32], &[9; 32]].concat(),
    ] {
        let refused = check(&bad, SCHEME, &host("a.test"), &made.chain());
        assert!(refused.is_err(), "{:?}", String::from_utf8_lossy(&bad));
    }
}
