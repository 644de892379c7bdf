//! The audit outlives a killed proxyd, and denials cannot fill the disk.

use crate::support::*;
use ipc::vault::{AuditKind, ChainReport};
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

#[tokio::test]
async fn requests_on_a_connection_that_is_refused_as_a_whole_have_each_one_record() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let lease = proxyd.lease().await;

    let mut told = Vec::new();
    let mut stream = lease.h1("one.test").await;
    for at in 0..3 {
        let asked = format!("PUT /one/{at}?q=1 HTTP/1.1\r\nHost: one.test\r\n\r\n");
        stream.write_all(asked.as_bytes()).await.unwrap();
        let (head, body) = timely(response(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        told.push(body["error"]["request_id"].as_str().map(str::to_owned));
    }
    let mut sender = lease.h2("two.test").await;
    for at in 0..3 {
        let uri = format!("https://two.test/two/{at}");
        let asked = http::Request::get(uri).body(()).unwrap();
        let (answer, _) = sender.send_request(asked, true).unwrap();
        assert_eq!(timely(answer).await.unwrap().status(), 403);
    }
    // Nothing comes on this one, and what comes on the next cannot be read.
    drop(lease.h1("three.test").await);
    let silent = proxyd.record(|record| record.host.as_deref() == Some("three.test")).await;
    let mut stream = lease.h1("four.test").await;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let (head, _) = timely(response(&mut stream)).await;
    assert!(head.starts_with("HTTP/1.1 400 "), "{head}");
    drop(stream);
    lease.close().await;

    let records = proxyd.audit().await;
    let of = |host: &str| {
        let of = records.iter().filter(|record| record.host.as_deref() == Some(host));
        of.filter(|record| record.kind == AuditKind::Denied).collect::<Vec<_>>()
    };
    for (host, method, prefix) in [("one.test", "PUT", "/one/"), ("two.test", "GET", "/two/")] {
        let found = of(host);
        assert_eq!(found.len(), 3, "{found:?}");
        for (at, record) in found.iter().enumerate() {
            assert_eq!(record.method.as_deref(), Some(method));
            assert_eq!(record.path.as_deref(), Some(&format!("{prefix}{at}")[..]));
            assert!(record.reason.as_deref().unwrap().starts_with("host_not_listed: "));
        }
    }
    let ids: Vec<_> =
        of("one.test").iter().map(|r| r.request.as_ref().map(|id| id.to_string())).collect();
    assert_eq!(ids, told);
    assert_eq!((of("three.test").len(), silent.entry.as_deref()), (1, Some("connect")));
    assert_eq!(of("four.test").len(), 1);
}

#[tokio::test]
async fn old_records_go_while_proxyd_runs_and_the_rest_is_verified() {
    let proxyd = Proxyd::configured(POLICY, &[], "audit-keep = \"1s\"\n").await;
    proxyd.put_secret("api").await;

    until("the first record is removed", || async {
        verified(&proxyd).await.removed.is_some_and(|removed| removed.last >= 1)
    })
    .await;

    let report = verified(&proxyd).await;
    assert!(report.problems.is_empty(), "{:?}", report.problems);
}

#[tokio::test]
async fn records_are_found_by_what_they_say_and_a_wrong_query_is_told_what_is_wrong() {
    let proxyd = Proxyd::start(POLICY, &[]).await;
    let lease = proxyd.lease().await;
    for host in ["one.test", "two.test"] {
        let mut stream = lease.h1(host).await;
        let asked = format!("GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n");
        stream.write_all(asked.as_bytes()).await.unwrap();
        timely(response(&mut stream)).await;
    }
    let page = async |query: &str| {
        let asked = format!("/v1/audit?{query}");
        proxyd.control().get::<ipc::vault::AuditPage>(&asked).await
    };

    for (query, hosts) in [
        ("kind=denied&since=1h", &["one.test", "two.test"][..]),
        ("host=TWO.test.&environment=dev&since=2020-01-31", &["two.test"]),
        ("kind=denied&until=2020-01-31T00:00:00Z", &[]),
        ("host=one.test&credential=api", &[]),
    ] {
        let found = page(query).await.unwrap().records;
        let found: Vec<_> = found.iter().filter_map(|record| record.host.as_deref()).collect();
        assert_eq!(found, hosts, "{query}");
    }
    let fault = page("session=bad%20id!").await.unwrap_err().to_string();
    assert!(fault.contains("session: \"bad id!\" is no id"), "{fault}");
}
