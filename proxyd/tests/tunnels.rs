//! Whose certificate a client sees: the upstream's own where no rule needs to see requests, one of
//! proxyd's where one does.

use crate::support::*;
use rustls::pki_types::ServerName;
use tokio::io::AsyncWriteExt;
use tokio_rustls::TlsConnector;

const H1: &[&[u8]] = &[b"http/1.1"];
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["secret.wide.test"]
addresses = ["127.0.0.1/32"]
credential = "api"

[[egress.allow]]
hosts = ["*.wide.test", "open.test"]
addresses = ["127.0.0.1/32"]

[[egress.allow]]
hosts = ["open.test"]
ports = [8443]
addresses = ["127.0.0.1/32"]
methods = ["GET"]

[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["secret.wide.test"]
"#;

/// The certificate that a client sees, if it verifies with these roots.
async fn seen(lease: &Lease, authority: &str, ca_pem: &str) -> Option<Vec<u8>> {
    let (host, _) = authority.split_once(':').unwrap();
    let stream = lease.connect(authority).await;
    let connector = TlsConnector::from(client_config(ca_pem, b"http/1.1"));
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let mut stream = timely(connector.connect(name, stream)).await.ok()?;
    let certificate = stream.get_ref().1.peer_certificates().unwrap()[0].to_vec();
    let request = format!("GET / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let (head, _) = timely(response(&mut stream)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    Some(certificate)
}

#[tokio::test]
async fn a_client_sees_the_upstreams_own_certificate_where_no_rule_needs_to_see_requests() {
    let hosts = ["open.test", "plain.wide.test", "secret.wide.test", "x.secret.wide.test"];
    let mut upstreams = Vec::new();
    for host in hosts {
        upstreams.push((host, Upstream::tls(host, H1, echo_h1).await));
    }
    let rows: Vec<_> = upstreams.iter().map(|(host, upstream)| (*host, upstream)).collect();
    let proxyd = Proxyd::start(POLICY, &rows).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let own = lease.opened.ca_pem.clone();

    for (authority, tunnelled) in [
        ("open.test:443", true),
        ("plain.wide.test:443", true),
        ("x.secret.wide.test:443", true),
        ("secret.wide.test:443", false),
        ("open.test:8443", false),
    ] {
        let (host, _) = authority.split_once(':').unwrap();
        let (_, upstream) = upstreams.iter().find(|(name, _)| *name == host).unwrap();
        let (right, wrong) =
            if tunnelled { (&upstream.ca_pem, &own) } else { (&own, &upstream.ca_pem) };

        let certificate = seen(&lease, authority, right).await;
        let refused = seen(&lease, authority, wrong).await;

        assert!(certificate.is_some(), "{authority} shows the other certificate");
        assert_eq!(refused, None, "{authority} shows both certificates");
    }
}
