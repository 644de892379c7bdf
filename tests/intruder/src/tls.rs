//! TLS as a client speaks it: with the roots that the sandbox shows, and any name in the hello.

use std::io::{Error, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};

use crate::net::connect;

pub type Stream = StreamOwned<ClientConnection, TcpStream>;

/// Whether the server's certificate must lead to a root.
#[derive(Clone, Copy)]
pub enum Trust {
    Roots,
    Anything,
}

pub fn config(trust: Trust) -> Result<Arc<ClientConfig>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(Error::other)?;
    let mut config = match trust {
        Trust::Roots => {
            let mut roots = rustls::RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            builder.with_root_certificates(roots).with_no_client_auth()
        }
        Trust::Anything => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Unverified(provider)))
            .with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Speaks TLS over a connection, as far as the end of the handshake.
pub fn over(mut plain: TcpStream, sni: &str, config: Arc<ClientConfig>) -> Result<Stream> {
    let name = ServerName::try_from(sni.to_owned()).map_err(Error::other)?;
    let mut connection = ClientConnection::new(config, name).map_err(Error::other)?;
    while connection.is_handshaking() {
        connection.complete_io(&mut plain)?;
    }
    let mut stream = StreamOwned::new(connection, plain);
    stream.flush()?;
    Ok(stream)
}

/// Prints the certificate that `host` shows when `sni` is asked for.
pub fn certificate(host: &str, sni: &str) -> Result<()> {
    let stream = over(connect(host, 443)?, sni, config(Trust::Anything)?)?;
    let shown = stream.conn.peer_certificates().and_then(<[_]>::first);
    let shown = shown.ok_or_else(|| Error::other("no certificate was shown"))?;
    println!("{}", shown.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    Ok(())
}

/// Takes every certificate; the signatures of the handshake must still be right.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
