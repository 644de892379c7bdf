//! The certificate authority is replaced under open leases: real TLS clients that trust what they
//! were told when their lease began, and nothing else.

use crate::support::{Lease, POLICY, Proxyd, Upstream, client_config, echo_h1, timely, until};
use bytes::Bytes;
use ipc::id::LeaseId;
use ipc::vault::{AuditKind, CertificateAuthority};
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

async fn started() -> (Proxyd, Upstream) {
    let upstream = Upstream::tls("open.test", &[b"http/1.1"], echo_h1).await;
    (Proxyd::start(POLICY, &[("open.test", &upstream)]).await, upstream)
}

#[derive(serde::Deserialize)]
struct List {
    authorities: Vec<CertificateAuthority>,
}

async fn list(proxyd: &Proxyd) -> Vec<CertificateAuthority> {
    proxyd.control().get::<List>("/v1/authorities").await.unwrap().authorities
}

async fn rotate(proxyd: &Proxyd) -> Result<Vec<CertificateAuthority>, String> {
    let path = "/v1/authorities/rotate";
    let answer = proxyd.control().call(http::Method::POST, path, None, Bytes::new()).await;
    let list: List = serde_json::from_slice(&answer.map_err(|e| e.to_string())?).unwrap();
    Ok(list.authorities)
}

/// Whether a client of this lease that trusts `ca_pem` alone gets through a handshake with a host.
async fn verifies(lease: &Lease, ca_pem: &str, host: &str) -> bool {
    let stream = lease.connect(&format!("{host}:443")).await;
    let connector = TlsConnector::from(client_config(ca_pem, b"http/1.1"));
    let name = ServerName::try_from(host.to_owned()).unwrap();
    timely(connector.connect(name, stream)).await.is_ok()
}

#[tokio::test]
async fn each_lease_is_served_by_the_authority_that_it_began_with() {
    let (mut proxyd, _upstream) = started().await;
    let old = proxyd.lease().await;
    let (id, old_ca) = (old.opened.lease.clone(), old.opened.ca_pem.clone());
    assert!(verifies(&old, &old_ca, "open.test").await);
    let before = list(&proxyd).await;

    let after = rotate(&proxyd).await.unwrap();
    let new = proxyd.lease().await;
    let new_ca = new.opened.ca_pem.clone();

    assert_eq!((before.len(), after.len(), before[0].leases), (1, 2, 1));
    assert_eq!((after[0].issues, after[1].issues), (true, false));
    assert_eq!((&after[1].sha256, after[1].leases), (&before[0].sha256, 1));
    assert_eq!(proxyd.health().await.ca_sha256, after[0].sha256);
    assert_eq!(proxyd.ca_pem().await, format!("{new_ca}{old_ca}"));
    // The host that was served before and one that is new, to both; no leaf is taken for another's.
    for host in ["open.test", "api.test"] {
        for (lease, ca, right) in [
            (&old, &old_ca, true),
            (&new, &new_ca, true),
            (&old, &new_ca, false),
            (&new, &old_ca, false),
        ] {
            assert_eq!(verifies(lease, ca, host).await, right, "{host}");
        }
    }

    // What lived through proxyd's death knows the same authority as before.
    let new_id = new.opened.lease.clone();
    proxyd.restart().await;
    let old = proxyd.open(id).await.unwrap();
    let new = proxyd.open(new_id).await.unwrap();
    assert_eq!((&old.opened.ca_pem, &new.opened.ca_pem), (&old_ca, &new_ca));
    assert!(verifies(&old, &old_ca, "open.test").await);
    assert!(verifies(&new, &new_ca, "open.test").await);

    // With its last lease the former authority goes, and its key.
    old.close().await;
    until("retired", || async { list(&proxyd).await.len() == 1 }).await;
    assert_eq!(proxyd.ca_pem().await, new_ca);
    assert!(verifies(&new, &new_ca, "open.test").await);
    let [made, retired] = [&after[0], &before[0]].map(|authority| authority.sha256.clone());
    for wanted in [format!("{made} made by"), format!("{retired} retired")] {
        let found = |reason: &Option<String>| reason.as_ref().is_some_and(|r| r.contains(&wanted));
        proxyd.record(|r| r.kind == AuditKind::Note && found(&r.reason)).await;
    }
}

#[tokio::test]
async fn nobody_may_retire_an_authority_that_a_lease_needs_by_rotating_again() {
    let (proxyd, _upstream) = started().await;
    let mut leases = vec![proxyd.lease().await];
    // An authority that no lease began with is of use to nobody.
    rotate(&proxyd).await.unwrap();
    assert_eq!(rotate(&proxyd).await.unwrap().len(), 2);

    let refused = loop {
        leases.push(proxyd.lease().await);
        match rotate(&proxyd).await {
            Ok(list) => assert!(list.len() < 10, "without a bound"),
            Err(error) => break error,
        }
    };

    assert!(refused.contains("end the oldest leases first"), "{refused}");
    assert_eq!(leases.len(), list(&proxyd).await.len());
    for lease in &leases {
        assert!(verifies(lease, &lease.opened.ca_pem, "open.test").await);
    }
    leases.remove(0).close().await;
    until("retired", || async { list(&proxyd).await.len() == leases.len() }).await;
    rotate(&proxyd).await.unwrap();
}

#[tokio::test]
async fn an_authority_is_kept_for_a_lease_that_may_come_back() {
    let (mut proxyd, _upstream) = started().await;
    let lease = proxyd.lease().await;
    let (id, ca) = (lease.opened.lease.clone(), lease.opened.ca_pem.clone());
    rotate(&proxyd).await.unwrap();

    // Its connection breaks, and proxyd dies before it is back.
    drop(lease);
    assert_eq!(rotate(&proxyd).await.unwrap().len(), 2);
    proxyd.restart().await;
    assert_eq!(rotate(&proxyd).await.unwrap().len(), 2);
    let lease = proxyd.open(id).await.unwrap();

    assert_eq!(lease.opened.ca_pem, ca);
    assert!(verifies(&lease, &ca, "open.test").await);
}

#[tokio::test]
async fn leases_that_open_during_rotations_all_verify() {
    let (proxyd, _upstream) = started().await;
    let opening = async {
        let mut leases = Vec::new();
        for _ in 0..60 {
            leases.push(proxyd.open(LeaseId::random()).await.unwrap());
            // All but a few end again, so that authorities come and go.
            if leases.len() > 2 {
                let lease = leases.remove(0);
                assert!(verifies(&lease, &lease.opened.ca_pem, "open.test").await);
                lease.close().await;
            }
        }
        leases
    };
    let rotating = async {
        let mut made = 0;
        loop {
            // A refusal because leases use them all is one of the outcomes.
            made += u32::from(rotate(&proxyd).await.is_ok());
            if made >= 10 {
                return;
            }
        }
    };

    let (leases, ()) = tokio::join!(timely(opening), timely(rotating));

    for lease in &leases {
        assert!(verifies(lease, &lease.opened.ca_pem, "open.test").await);
    }
}
