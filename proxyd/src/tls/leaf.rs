//! Leaf certificates for intercepted hosts: bounded, single flight, renewed ahead of expiry.

use std::sync::Arc;

use policies::Host;

use crate::vault::{Vault, VaultError};

/// Why a host cannot be intercepted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LeafError {
    #[error("cannot issue a certificate for {host}: {source}")]
    Issue { host: String, source: VaultError },
    #[error("cannot use the certificate issued for {host}: {reason}")]
    Unusable { host: String, reason: String },
    #[error("cannot make the key of the leaf certificates: {0}")]
    Key(String),
}

/// Issues and keeps leaf certificates. Clones share one cache.
#[derive(Clone)]
pub struct Leaves {}

impl Leaves {
    pub fn new(vault: Vault) -> Result<Leaves, LeafError> {
        let _ = vault;
        todo!()
    }

    /// The server configuration for a connection to `host` that may speak `alpn`, in our order of
    /// preference.
    pub async fn server_config(
        &self,
        host: &Host,
        alpn: &[&[u8]],
    ) -> Result<Arc<rustls::ServerConfig>, LeafError> {
        let _ = (host, alpn);
        todo!()
    }
}
