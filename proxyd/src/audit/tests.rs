//! The audit on a real file: order, groups, filters, tampering, and a disk that refuses.

use super::*;

fn line(path: &str) -> Line {
    Line {
        lease: Some(LeaseId::parse("lease_a").unwrap()),
        session: Some(SessionId::parse("sesn_a").unwrap()),
        calls: vec![CallId::parse("call_1").unwrap()],
        environment: Some("dev".into()),
        generation: 3,
        host: Some("billing.example".into()),
        port: Some(443),
        method: Some("GET".into()),
        path: Some(path.into()),
        credential: Some("billing".into()),
        ..Line::default()
    }
}

fn open(dir: &tempfile::TempDir) -> Audit {
    Audit::open(&dir.path().join("audit.sqlite")).unwrap()
}

/// Somebody with the file in hand, triggers out of the way.
fn tamper(dir: &tempfile::TempDir, sql: &str) {
    let db = Connection::open(dir.path().join("audit.sqlite")).unwrap();
    db.execute_batch("DROP TRIGGER record_is_never_changed; DROP TRIGGER record_is_never_deleted")
        .unwrap();
    db.execute_batch(sql).unwrap();
}

#[tokio::test]
async fn records_are_numbered_chained_and_found_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    audit.decide(true, line("/a?token=SECRET-CANARY")).await.unwrap();
    audit.outcome(Line { status: Some(200), ..line("/a") }).await.unwrap();
    audit.close().await;
    assert_eq!(audit.decide(true, line("/late")).await, Err(AuditError::Gone));

    let audit = open(&dir);
    let third = audit.decide(false, line("/b")).await.unwrap();

    assert_eq!(third, 3);
    let page = audit.page(Filter { limit: 10, ..Filter::default() }).await.unwrap();
    let kinds: Vec<_> = page.records.iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [AuditKind::Allowed, AuditKind::Outcome, AuditKind::Denied]);
    assert_eq!(page.records[0].path.as_deref(), Some("/a"));
    assert_eq!(page.last, 3);
    let report = audit.verify().await.unwrap();
    assert_eq!((report.records, report.problems.len()), (3, 0));
    assert_eq!(report.head, page.records[2].hash);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_at_the_same_time_get_each_a_number_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    let tasks: Vec<_> = (0..500)
        .map(|i| {
            let audit = audit.clone();
            tokio::spawn(async move { audit.decide(true, line(&format!("/{i}"))).await.unwrap() })
        })
        .collect();

    let mut numbers = Vec::new();
    for task in tasks {
        numbers.push(task.await.unwrap());
    }

    numbers.sort_unstable();
    assert_eq!(numbers, (1..=500).collect::<Vec<u64>>());
    assert!(audit.verify().await.unwrap().problems.is_empty());
}

#[tokio::test]
async fn pages_are_filtered_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    for i in 0..6 {
        let id = if i % 2 == 0 { "even" } else { "odd" };
        let calls = vec![CallId::parse(id).unwrap(), CallId::parse(&format!("c{i}")).unwrap()];
        let session = Some(SessionId::parse(id).unwrap());
        let lease = Some(LeaseId::parse(&format!("lease_{}", i / 3)).unwrap());
        audit.note(Line { calls, session, lease, ..line("/") }).await.unwrap();
    }
    let call = |id: &str| Some(CallId::parse(id).unwrap());
    for (filter, expected) in [
        (Filter { limit: 100, ..Filter::default() }, vec![1, 2, 3, 4, 5, 6]),
        (Filter { limit: 2, after: 3, ..Filter::default() }, vec![4, 5]),
        (Filter { limit: 9, call: call("odd"), ..Filter::default() }, vec![2, 4, 6]),
        (Filter { limit: 9, call: call("c3"), ..Filter::default() }, vec![4]),
        (Filter { limit: 9, call: call("none"), ..Filter::default() }, vec![]),
        (
            Filter { limit: 9, session: SessionId::parse("even").ok(), ..Filter::default() },
            vec![1, 3, 5],
        ),
        (
            Filter { limit: 9, lease: LeaseId::parse("lease_1").ok(), ..Filter::default() },
            vec![4, 5, 6],
        ),
    ] {
        let page = audit.page(filter).await.unwrap();
        let found: Vec<u64> = page.records.iter().map(|record| record.seq).collect();
        assert_eq!(found, expected);
    }
}

#[tokio::test]
async fn records_cannot_be_changed_or_deleted_through_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    audit.decide(true, line("/a")).await.unwrap();
    let db = Connection::open(dir.path().join("audit.sqlite")).unwrap();

    for sql in ["UPDATE record SET host = 'x'", "DELETE FROM record"] {
        let error = db.execute(sql, []).unwrap_err().to_string();
        assert!(error.contains("audit records are never"), "{error}");
    }
}

#[tokio::test]
async fn verify_names_what_was_changed_and_what_is_missing() {
    for (sql, problem) in [
        ("UPDATE record SET host = 'evil.example' WHERE seq = 2", "record 2 was changed"),
        ("UPDATE record SET bytes_up = 1 WHERE seq = 4", "record 4 was changed"),
        ("UPDATE record SET kind = 'other' WHERE seq = 3", "record 3 is not readable"),
        ("DELETE FROM record WHERE seq = 3", "record 3 is missing"),
        ("DELETE FROM record WHERE seq IN (1, 2)", "records 1 to 2 are missing"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let audit = open(&dir);
        for i in 0..5 {
            audit.decide(true, line(&format!("/{i}"))).await.unwrap();
        }

        tamper(&dir, sql);

        let report = audit.verify().await.unwrap();
        assert!(report.problems[0].starts_with(problem), "{sql}: {:?}", report.problems);
        assert_eq!(report.problems.len(), 1, "{sql}: {:?}", report.problems);
    }
}

#[tokio::test]
async fn nothing_is_decided_while_the_store_refuses_and_lost_outcomes_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    audit.decide(true, line("/before")).await.unwrap();
    let blocker = Connection::open(dir.path().join("audit.sqlite")).unwrap();
    blocker.execute_batch("BEGIN IMMEDIATE").unwrap();

    audit.outcome(line("/lost")).await.unwrap();
    let refused = audit.decide(true, line("/refused")).await;
    blocker.execute_batch("ROLLBACK").unwrap();
    audit.decide(true, line("/after")).await.unwrap();

    assert!(matches!(refused, Err(AuditError::Write(_))), "{refused:?}");
    let page = audit.page(Filter { limit: 10, ..Filter::default() }).await.unwrap();
    let reasons: Vec<_> = page.records.iter().filter_map(|r| r.reason.as_deref()).collect();
    assert_eq!(reasons, ["1 outcomes could not be written before this"]);
    let paths: Vec<_> = page.records.iter().filter_map(|r| r.path.as_deref()).collect();
    assert_eq!(paths, ["/before", "/after"]);
    assert!(audit.verify().await.unwrap().problems.is_empty());
}

#[test]
fn what_a_sandbox_chose_is_cut() {
    let record = Line {
        path: Some(format!("/{}?q#f", "é".repeat(3000))),
        method: Some("M".repeat(100)),
        ..Line::default()
    }
    .into_record(AuditKind::Denied);

    assert_eq!(record.path.unwrap().len(), 2047 + "…".len());
    assert_eq!(record.method.unwrap().chars().count(), 65);
}
