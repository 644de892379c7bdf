//! The audit on real files: order, filters, tampering, a disk that refuses, a power cut, floods.

use std::fs::OpenOptions;
use std::path::PathBuf;

use super::*;

pub(super) fn line(path: &str) -> Line {
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

pub(super) fn open(dir: &tempfile::TempDir) -> Audit {
    Audit::open(dir.path()).unwrap()
}

pub(super) async fn all(audit: &Audit) -> Vec<ipc::vault::AuditRecord> {
    audit.page(Filter { limit: PAGE_RECORDS_MAX, ..Filter::default() }).await.unwrap().records
}

/// The first segment.
fn file(dir: &tempfile::TempDir) -> PathBuf {
    read::segment_path(dir.path(), 1)
}

/// Where each record of the first segment begins, and where the last ends.
fn offsets(dir: &tempfile::TempDir) -> Vec<usize> {
    let bytes = std::fs::read(file(dir)).unwrap();
    let mut at = vec![journal::HEADER_BYTES];
    while let Some(frame) = record::frame(&bytes, at[at.len() - 1]) {
        at.push(frame.end);
    }
    at
}

#[tokio::test]
async fn records_are_numbered_chained_and_found_again_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    audit.allow(&line("/a?token=SECRET-CANARY")).await.unwrap();
    audit.outcome(&Line { status: Some(200), ..line("/a") }).unwrap();
    audit.close().await;
    assert_eq!(audit.allow(&line("/late")).await, Err(AuditError::Gone));

    let audit = open(&dir);
    audit.deny(&line("/b")).await.unwrap();

    let records = all(&audit).await;
    let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
    assert_eq!(kinds, [AuditKind::Allowed, AuditKind::Outcome, AuditKind::Denied]);
    assert_eq!(records.iter().map(|record| record.seq).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(records[0].path.as_deref(), Some("/a"));
    assert_eq!(records[1].status, Some(200));
    assert_eq!(records[2].calls, [CallId::parse("call_1").unwrap()]);
    let report = audit.verify().await.unwrap();
    assert_eq!((report.records, report.problems.len()), (3, 0));
    assert_eq!(report.head, records[2].hash);
    assert!(!std::fs::read(file(&dir)).unwrap().windows(13).any(|w| w == b"SECRET-CANARY"));
}

#[tokio::test]
async fn a_decision_is_in_the_file_when_it_is_made_and_on_disk_when_a_note_returns() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);

    audit.allow(&line("/a")).await.unwrap();
    let handed_over = offsets(&dir).len() - 1;
    let number = audit.note(&line("/b")).await.unwrap();

    assert_eq!((handed_over, number), (1, 2));
    assert!(audit.0.synced.borrow().last >= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_at_the_same_time_get_each_a_number_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    let tasks: Vec<_> = (0..500)
        .map(|i| {
            let audit = audit.clone();
            tokio::spawn(async move { audit.allow(&line(&format!("/{i}"))).await.unwrap() })
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
async fn pages_are_filtered_and_bounded_within_and_across_segments() {
    for segments in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let audit = open(&dir);
        for i in 0..6 {
            let id = if i % 2 == 0 { "even" } else { "odd" };
            let calls = vec![CallId::parse(id).unwrap(), CallId::parse(&format!("c{i}")).unwrap()];
            let session = Some(SessionId::parse(id).unwrap());
            let lease = Some(LeaseId::parse(&format!("lease_{}", i / 3)).unwrap());
            audit.note(&Line { calls, session, lease, ..line("/") }).await.unwrap();
            if segments {
                audit.0.state().journal.fill_segment();
            }
        }
        let call = |id: &str| Some(CallId::parse(id).unwrap());
        for (filter, expected) in [
            (Filter { limit: 100, ..Filter::default() }, vec![1, 2, 3, 4, 5, 6]),
            (Filter { limit: 2, after: 3, ..Filter::default() }, vec![4, 5]),
            (Filter { limit: 2, after: 5, ..Filter::default() }, vec![6]),
            (Filter { limit: 9, after: 6, ..Filter::default() }, vec![]),
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
            assert_eq!(found, expected, "in several segments: {segments}");
        }
        let found = read::segments(dir.path()).unwrap().len();
        assert_eq!(found, if segments { 6 } else { 1 });
        assert!(audit.verify().await.unwrap().problems.is_empty());
    }
}

#[tokio::test]
async fn every_filter_counts_within_and_across_segments_and_pages_go_on_behind_what_was_read() {
    for segments in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let audit = open(&dir);
        for (host, rule) in [("a.example", "one"), ("b.example", "two"), ("a.example", "two")] {
            let line = Line {
                host: Some(host.into()),
                rule: Some(rule.into()),
                credential: (rule == "one").then(|| "key".into()),
                environment: Some(rule.into()),
                ..line("/")
            };
            audit.allow(&line).await.unwrap();
            audit.deny(&line).await.unwrap();
            if segments {
                audit.0.state().journal.fill_segment();
            }
        }
        let moment: jiff::Timestamp = all(&audit).await[0].time.parse().unwrap();
        let moment = moment.as_millisecond();
        let text = |text: &str| Some(text.to_owned());
        let none = Filter { limit: 9, ..Filter::default() };
        for (filter, expected) in [
            (Filter { kind: Some(AuditKind::Denied), ..none.clone() }, vec![2, 4, 6]),
            (Filter { host: text("a.example"), ..none.clone() }, vec![1, 2, 5, 6]),
            (Filter { rule: text("two"), ..none.clone() }, vec![3, 4, 5, 6]),
            (Filter { credential: text("key"), ..none.clone() }, vec![1, 2]),
            (Filter { environment: text("one"), after: 1, ..none.clone() }, vec![2]),
            (Filter { since: Some(moment), ..none.clone() }, vec![1, 2, 3, 4, 5, 6]),
            (Filter { since: Some(moment + 3_600_000), ..none.clone() }, vec![]),
            (Filter { until: Some(moment), ..none.clone() }, vec![]),
            (
                Filter {
                    rule: text("two"),
                    host: text("a.example"),
                    kind: Some(AuditKind::Allowed),
                    until: Some(moment + 3_600_000),
                    ..none.clone()
                },
                vec![5],
            ),
        ] {
            let page = audit.page(filter).await.unwrap();
            let found: Vec<u64> = page.records.iter().map(|record| record.seq).collect();
            assert_eq!(found, expected, "in several segments: {segments}");
            assert_eq!((page.last, page.newest), (6, 6));
        }
    }
}

#[tokio::test]
async fn a_second_daemon_cannot_write_to_the_same_audit() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);

    let second = Audit::open(dir.path());
    audit.close().await;
    let third = Audit::open(dir.path());

    assert!(matches!(second, Err(AuditError::Write(text)) if text.contains("in use")));
    assert!(third.is_ok());
}

#[tokio::test]
async fn verify_names_what_was_changed_and_what_is_missing() {
    type Tamper = fn(&mut Vec<u8>, &[usize]);
    let cases: [(Tamper, &str); 6] = [
        (|bytes, at| bytes[at[2] - 40] ^= 1, "record 2 was changed"),
        (|bytes, at| bytes[at[3] + 4 + 16] = 9, "record 4 is not readable"),
        (|bytes, at| bytes[at[4] - 1] ^= 1, "record 4 was changed"),
        (|bytes, at| drop(bytes.drain(at[2]..at[3])), "record 3 is missing"),
        (|bytes, at| drop(bytes.drain(at[0]..at[2])), "records 1 to 2 are missing"),
        (|bytes, at| bytes.truncate(at[3]), "records 4 to 5 are missing"),
    ];
    for (tamper, problem) in cases {
        let dir = tempfile::tempdir().unwrap();
        let audit = open(&dir);
        for i in 0..5 {
            audit.allow(&line(&format!("/{i}"))).await.unwrap();
        }
        let at = offsets(&dir);

        let mut bytes = std::fs::read(file(&dir)).unwrap();
        tamper(&mut bytes, &at);
        std::fs::write(file(&dir), bytes).unwrap();

        let report = audit.verify().await.unwrap();
        assert!(
            report.problems.iter().any(|found| found.starts_with(problem)),
            "{problem}: {:?}",
            report.problems
        );
    }
}

#[tokio::test]
async fn a_lease_whose_records_are_alike_is_found_in_every_segment() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    let lease = LeaseId::parse("lease_1").ok();
    for number in 0..6 {
        audit.note(&Line { lease: lease.clone(), ..line("/") }).await.unwrap();
        if number % 2 == 1 {
            audit.0.state().journal.fill_segment();
        }
    }

    let page = audit.page(Filter { limit: 9, lease, ..Filter::default() }).await.unwrap();

    let found: Vec<u64> = page.records.iter().map(|record| record.seq).collect();
    assert_eq!(found, [1, 2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn verify_notices_a_segment_that_was_changed_removed_emptied_or_put_in_from_elsewhere() {
    let [dir, elsewhere] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (audit, another) = (open(&dir), open(&elsewhere));
    for i in 0..4 {
        for (journal, place) in [(&audit, "here"), (&another, "there")] {
            journal.allow(&line(&format!("/{place}/{i}"))).await.unwrap();
            journal.0.state().journal.fill_segment();
        }
    }
    let second = read::segment_path(dir.path(), 2);
    let third = read::segment_path(dir.path(), 3);
    let bytes = std::fs::read(&second).unwrap();

    let mut other = std::fs::read(&third).unwrap();
    let at = other.len() - record::HASH_BYTES - 8;
    other[at] ^= 1;
    std::fs::write(&third, other).unwrap();
    let changed = audit.verify().await.unwrap().problems;
    std::fs::remove_file(&second).unwrap();
    let removed = audit.verify().await.unwrap().problems;
    std::fs::write(&second, &bytes[..journal::HEADER_BYTES]).unwrap();
    let emptied = audit.verify().await.unwrap().problems;
    let foreign = std::fs::read(read::segment_path(elsewhere.path(), 2)).unwrap();
    std::fs::write(&second, foreign).unwrap();
    let foreign = audit.verify().await.unwrap().problems;
    // The same, with the beginning that it would need to have here.
    let mut forged = std::fs::read(&second).unwrap();
    forged[..journal::HEADER_BYTES].copy_from_slice(&bytes[..journal::HEADER_BYTES]);
    std::fs::write(&second, forged).unwrap();
    let forged = audit.verify().await.unwrap().problems;

    assert!(changed[0].starts_with("record 3 was changed"), "{changed:?}");
    assert!(removed[0].starts_with("record 2 is missing"), "{removed:?}");
    assert!(emptied[0].starts_with("record 2 is missing"), "{emptied:?}");
    assert!(foreign[0].contains("record 2 does not follow"), "{foreign:?}");
    assert!(forged[0].starts_with("record 2 was changed, or follows another"), "{forged:?}");
}

#[tokio::test]
async fn nothing_is_decided_while_the_disk_refuses_and_lost_outcomes_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    audit.allow(&line("/before")).await.unwrap();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let real = audit.0.state().journal.write_to(full);

    audit.outcome(&line("/lost")).unwrap();
    let refused = audit.allow(&line("/refused")).await;
    audit.0.state().journal.write_again_to(real);
    audit.0.state().failed = None;
    audit.allow(&line("/after")).await.unwrap();

    assert!(matches!(refused, Err(AuditError::Write(_))), "{refused:?}");
    let records = all(&audit).await;
    let reasons: Vec<_> = records.iter().filter_map(|r| r.reason.as_deref()).collect();
    assert!(reasons.contains(&"1 outcomes could not be written before this"), "{reasons:?}");
    let refused = "1 refused requests could not be recorded before this; nothing of them left";
    assert_eq!(reasons.iter().filter(|reason| **reason == refused).count(), 1, "{reasons:?}");
    let counts = audit.counts();
    assert_eq!((counts.allowed, counts.stopped), (2, 1));
    let paths: Vec<_> = records.iter().filter_map(|r| r.path.as_deref()).collect();
    assert_eq!(paths, ["/before", "/after"]);
    assert!(audit.verify().await.unwrap().problems.is_empty());
}

#[tokio::test]
async fn a_record_that_a_power_cut_left_half_is_set_aside_and_noted() {
    for (cut, whole) in [(1, 2), (40, 2), (0, 3)] {
        let dir = tempfile::tempdir().unwrap();
        let audit = open(&dir);
        for i in 0..3 {
            audit.allow(&line(&format!("/{i}"))).await.unwrap();
        }
        audit.close().await;
        let bytes = std::fs::read(file(&dir)).unwrap();
        std::fs::write(file(&dir), &bytes[..bytes.len() - cut]).unwrap();

        let audit = open(&dir);
        audit.allow(&line("/next")).await.unwrap();

        let records = all(&audit).await;
        let paths = records.iter().filter(|record| record.path.is_some()).count();
        assert_eq!(paths, whole + 1, "cut by {cut}");
        let noted = records.iter().any(|r| r.reason.as_deref().is_some_and(|r| r.contains("cut")));
        assert_eq!(noted, cut > 0);
        assert!(audit.verify().await.unwrap().problems.is_empty(), "cut by {cut}");
    }
}

#[tokio::test]
async fn a_record_changed_in_the_last_segment_is_not_mended_by_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    for i in 0..3 {
        audit.allow(&line(&format!("/{i}"))).await.unwrap();
    }
    audit.close().await;
    let (mut bytes, at) = (std::fs::read(file(&dir)).unwrap(), offsets(&dir));
    bytes[at[2] - 40] ^= 1;
    std::fs::write(file(&dir), bytes).unwrap();

    let report = open(&dir).verify().await.unwrap();

    assert_eq!(report.records, 3);
    assert!(report.problems[0].starts_with("record 2 was changed"), "{:?}", report.problems);
}

#[tokio::test]
async fn denials_that_repeat_are_counted_and_the_first_are_written_singly() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    let denied = |host: &str, path: &str| Line {
        host: Some(host.into()),
        reason: Some("host_not_listed: no rule lists it".into()),
        ..line(path)
    };

    let mut singly = 0;
    for i in 0..1000 {
        singly += u64::from(audit.deny(&denied("evil.example", &format!("/{i}"))).await.unwrap());
    }
    let other = audit.deny(&denied("other.example", "/")).await.unwrap();
    audit.close().await;

    let records = all(&open(&dir)).await;
    let counted: u64 = records.iter().filter_map(|record| record.repeated).sum();
    let paths = records.iter().filter(|record| record.path.is_some()).count() as u64;
    assert!(other && singly < 100, "{singly} were written singly");
    assert_eq!((paths, paths - 1 + counted), (singly + 1, 1000));
}

#[tokio::test]
async fn a_sandbox_that_varies_what_it_asks_for_cannot_fill_the_disk_with_denials() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);

    for i in 0..20_000 {
        let host = Some(format!("h{i}.example"));
        let reason = Some(format!("host_not_listed: no rule lists h{i}.example"));
        audit.deny(&Line { host, reason, ..line("/") }).await.unwrap();
    }
    audit.close().await;

    let records = all(&open(&dir)).await;
    let counted: u64 = records.iter().filter_map(|record| record.repeated).sum();
    assert!(records.len() < 200, "{} records", records.len());
    assert_eq!(counted + records.iter().filter(|r| r.repeated.is_none()).count() as u64, 20_000);
}

#[tokio::test]
async fn what_a_sandbox_chose_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let audit = open(&dir);
    let long = Line {
        path: Some(format!("/{}?q#f", "é".repeat(3000))),
        method: Some("M".repeat(100)),
        ..Line::default()
    };

    audit.deny(&long).await.unwrap();

    let record = all(&audit).await.remove(0);
    assert_eq!(record.path.unwrap().len(), 2047 + "…".len());
    assert_eq!(record.method.unwrap().chars().count(), 65);
}
