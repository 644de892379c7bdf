//! Ends TLS of sandboxes and issues what that takes.

pub mod authority;
pub mod ca;
pub mod hello;
pub mod intercept;
pub mod last_flight;
pub mod leaf;

use std::sync::{Arc, LazyLock};

use rustls::CipherSuite;
use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The cryptography of both legs: rustls's own choice, with the suites in another order.
///
/// A handshake hashes all its messages and derives a dozen keys. SHA-256 has instructions of its
/// own on the processors of the last years and SHA-384 has none: a tenth of a handshake, on either
/// side. Browsers offer AES-128 first too.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = aws_lc_rs::default_provider();
        provider.cipher_suites.sort_by_key(|suite| {
            use CipherSuite::{
                TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
                TLS13_AES_128_GCM_SHA256,
            };
            let quick = matches!(
                suite.suite(),
                TLS13_AES_128_GCM_SHA256
                    | TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
                    | TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
            );
            (suite.tls13().is_none(), !quick)
        });
        Arc::new(provider)
    });
    Arc::clone(&PROVIDER)
}
