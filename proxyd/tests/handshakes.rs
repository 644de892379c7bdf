//! The TLS that proxyd ends, as clients of both versions meet it: sessions resume, and nobody waits
//! for words that are held back.

use std::sync::Arc;

use crate::support::*;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CipherSuite, HandshakeKind, ProtocolVersion, SupportedProtocolVersion};
use tokio::io::AsyncWriteExt;
use tokio_rustls::TlsConnector;

async fn api() -> (Proxyd, Upstream) {
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    (proxyd, upstream)
}

fn client(lease: &Lease, version: &'static SupportedProtocolVersion) -> TlsConnector {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(lease.opened.ca_pem.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

/// One request on a connection of its own; how its handshake went.
async fn visit(lease: &Lease, connector: &TlsConnector) -> (HandshakeKind, ProtocolVersion) {
    let stream = lease.connect("api.test:443").await;
    let name = ServerName::try_from("api.test").unwrap();
    let mut stream = timely(connector.connect(name, stream)).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, _) = timely(response(&mut stream)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let session = stream.get_ref().1;
    (session.handshake_kind().unwrap(), session.protocol_version().unwrap())
}

#[tokio::test]
async fn a_client_resumes_by_the_ticket_that_came_with_its_first_answer() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let connector = client(&lease, &rustls::version::TLS13);

    let first = visit(&lease, &connector).await;
    let second = visit(&lease, &connector).await;

    assert_eq!(first, (HandshakeKind::Full, ProtocolVersion::TLSv1_3));
    assert_eq!(second, (HandshakeKind::Resumed, ProtocolVersion::TLSv1_3));
}

#[tokio::test]
async fn a_client_of_tls_1_2_gets_the_last_words_that_it_waits_for_and_resumes() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;
    let connector = client(&lease, &rustls::version::TLS12);

    let first = visit(&lease, &connector).await;
    let second = visit(&lease, &connector).await;

    assert_eq!(first, (HandshakeKind::Full, ProtocolVersion::TLSv1_2));
    assert_eq!(second, (HandshakeKind::Resumed, ProtocolVersion::TLSv1_2));
}

#[tokio::test]
async fn the_suite_is_the_one_that_processors_hash_quickly_whatever_the_client_likes_best() {
    let (proxyd, _upstream) = api().await;
    let lease = proxyd.lease().await;

    let stream = lease.h1("api.test").await;

    let suite = stream.get_ref().1.negotiated_cipher_suite().unwrap().suite();
    assert_eq!(suite, CipherSuite::TLS13_AES_128_GCM_SHA256);
}
