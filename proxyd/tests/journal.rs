//! The audit outlives a killed proxyd, and denials cannot fill the disk.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

mod support;

use ipc::vault::{AuditKind, ChainReport};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

const H1: &[&[u8]] = &[b"http/1.1"];

async fn verified(proxyd: &Proxyd) -> ChainReport {
    proxyd.control().get("/v1/audit/verify").await.unwrap()
}

#[tokio::test]
async fn a_killed_proxyd_has_forgotten_no_decision_whose_request_left() {
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let upstream = Upstream::tls("api.test", H1, move |mut stream| {
        let arrived = arrived.clone();
        async move {
            // It never answers: all that there is of the request is its decision.
            let Some((head, _)) = request(&mut stream).await else { return };
            arrived.send(head).unwrap();
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    })
    .await;
    let mut proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;

    for round in 0..5 {
        let lease = proxyd.lease().await;
        let mut stream = lease.h1("api.test").await;
        let asked = format!("GET /killed/{round} HTTP/1.1\r\nHost: api.test\r\n\r\n");
        stream.write_all(asked.as_bytes()).await.unwrap();
        timely(arrivals.recv()).await.unwrap();
        proxyd.restart().await;

        let path = format!("/killed/{round}");
        let records = proxyd.audit().await;
        let decided = records.iter().filter(|record| record.path.as_deref() == Some(&path[..]));
        assert_eq!(decided.map(|record| record.kind).next(), Some(AuditKind::Allowed), "{path}");
    }
    let report = verified(&proxyd).await;
    assert!(report.problems.is_empty(), "{:?}", report.problems);
}

#[tokio::test]
async fn a_request_that_is_denied_again_and_again_is_recorded_a_few_times_and_then_counted() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;

    for _ in 0..300 {
        stream.write_all(b"DELETE /x HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
        let (head, _) = timely(response(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    }

    let denied = || async {
        let records = proxyd.audit().await.into_iter();
        let denied = records.filter(|record| record.kind == AuditKind::Denied);
        denied.map(|record| record.repeated).partition::<Vec<_>, _>(Option::is_none)
    };
    // A count is written when its ten seconds are over.
    until("each denial is recorded or counted", || async {
        let (singly, counts) = denied().await;
        singly.len() as u64 + counts.iter().flatten().sum::<u64>() >= 300
    })
    .await;
    let (singly, counts) = denied().await;
    // On a slow machine the requests take longer than one count.
    assert!((20..=120).contains(&singly.len()), "{} single records", singly.len());
    assert!(!counts.is_empty() && !counts.contains(&Some(0)), "{counts:?}");
    assert_eq!(singly.len() as u64 + counts.iter().flatten().sum::<u64>(), 300);
    assert_eq!(upstream.connections(), 0);
}
