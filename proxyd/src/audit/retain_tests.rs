//! What retention removes, and what `verify` says of what is left.

use std::time::{Duration, SystemTime};

use super::retain::Removal;
use super::tests::{all, line, open};
use super::*;

/// An audit with so many segments of one record each, and an empty one that is written to.
async fn segments(dir: &tempfile::TempDir, count: u64) -> Audit {
    let audit = open(dir);
    for number in 1..=count {
        audit.note(&line(&format!("/{number}"))).await.unwrap();
        audit.0.state().journal.fill_segment();
    }
    audit
}

/// Limits by which just so many segments are to go.
fn beyond(dir: &tempfile::TempDir, count: usize) -> Retention {
    let sizes = read::segments(dir.path()).unwrap();
    let sizes: Vec<u64> = sizes.iter().map(|(_, p)| p.metadata().unwrap().len()).collect();
    Retention { keep: None, bytes: Some(sizes[count..].iter().sum()) }
}

async fn prune(audit: &Audit, limits: Retention) -> usize {
    audit.prune(limits, 1, SystemTime::now()).await.unwrap()
}

#[tokio::test]
async fn the_oldest_segments_go_and_the_rest_is_verified_from_there_on() {
    let dir = tempfile::tempdir().unwrap();
    let audit = segments(&dir, 4).await;
    assert_eq!(prune(&audit, Retention::default()).await, 0);
    assert_eq!(prune(&audit, beyond(&dir, 0)).await, 0);

    assert_eq!(prune(&audit, beyond(&dir, 2)).await, 2);

    let numbers: Vec<u64> = all(&audit).await.iter().map(|record| record.seq).collect();
    assert_eq!(numbers, [3, 4, 5]);
    let report = audit.verify().await.unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let removed = report.removed.unwrap();
    assert_eq!((report.records, removed.last), (3, 2));
    assert_eq!(removed.time, all(&audit).await[2].time);
    // Nothing of them is left, and a new start finds the same.
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(names.iter().all(|path| *path >= read::segment_path(dir.path(), 3)), "{names:?}");
    audit.close().await;
    let audit = open(&dir);
    assert_eq!(audit.note(&line("/next")).await.unwrap(), 6);
    assert!(audit.verify().await.unwrap().problems.is_empty());
}

#[tokio::test]
async fn records_go_when_they_are_older_than_is_to_be_kept_and_not_before() {
    let dir = tempfile::tempdir().unwrap();
    let audit = segments(&dir, 2).await;
    let day = Duration::from_secs(24 * 3600);
    let limits = Retention { keep: Some(day), bytes: None };
    let now = SystemTime::now();

    assert_eq!(audit.prune(limits, 1, now + day / 2).await.unwrap(), 0);
    let young = all(&audit).await.len();
    let gone = audit.prune(limits, 1, now + 2 * day).await.unwrap();

    assert_eq!((young, gone), (2, 2));
    let left = all(&audit).await;
    assert_eq!(left.iter().map(|record| record.seq).collect::<Vec<_>>(), [3]);
    assert!(audit.verify().await.unwrap().problems.is_empty());
}

#[tokio::test]
async fn a_file_that_somebody_else_removed_is_a_gap_before_and_after() {
    let dir = tempfile::tempdir().unwrap();
    let audit = segments(&dir, 5).await;
    assert_eq!(prune(&audit, beyond(&dir, 2)).await, 2);
    let third = read::segment_path(dir.path(), 3);
    let bytes = std::fs::read(&third).unwrap();

    std::fs::remove_file(&third).unwrap();
    let first = audit.verify().await.unwrap().problems;
    std::fs::write(&third, bytes).unwrap();
    std::fs::remove_file(read::segment_path(dir.path(), 4)).unwrap();
    let within = audit.verify().await.unwrap().problems;
    // What retention removes then, it says of.
    assert_eq!(prune(&audit, beyond(&dir, 2)).await, 2);
    let after = audit.verify().await.unwrap().problems;

    assert_eq!(first, ["record 3 is missing"]);
    assert_eq!(within, ["record 4 is missing"]);
    let said = "records 3 to 5, removed by retention, were not whole: record 4 is missing";
    assert_eq!(after, [said]);
}

#[tokio::test]
async fn a_removal_that_was_broken_off_leaves_a_whole_chain_and_is_taken_up_again() {
    let dir = tempfile::tempdir().unwrap();
    let audit = segments(&dir, 4).await;
    let path = |first| read::segment_path(dir.path(), first);
    let kept = [1, 2, 3].map(|first| std::fs::read(path(first)).unwrap());
    let limits = beyond(&dir, 3);
    assert_eq!(prune(&audit, limits).await, 3);
    let back = |numbers: &[usize]| {
        for number in 1..=3 {
            // Not there is as good as removed.
            let _ = std::fs::remove_file(path(number as u64));
            if numbers.contains(&number) {
                std::fs::write(path(number as u64), &kept[number - 1]).unwrap();
            }
        }
    };
    let verified = async |numbers: &[usize]| {
        back(numbers);
        let report = audit.verify().await.unwrap();
        (report.removed.map(|removed| removed.last), report.problems)
    };

    // They go from the first on, so any of them with all that follow it may be left.
    assert_eq!(verified(&[1, 2, 3]).await, (None, vec![]));
    assert_eq!(verified(&[2, 3]).await, (Some(1), vec![]));
    let gap = vec!["record 2 is missing".to_owned()];
    assert_eq!(verified(&[1, 3]).await, (None, gap));
    let gap = vec!["record 3 is missing".to_owned()];
    assert_eq!(verified(&[2]).await, (Some(1), gap));
    back(&[2, 3]);
    audit.close().await;
    let audit = open(&dir);
    assert_eq!(prune(&audit, beyond(&dir, 2)).await, 2);
    let report = audit.verify().await.unwrap();
    assert_eq!((report.removed.unwrap().last, report.problems), (3, vec![]));
}

#[tokio::test]
async fn only_a_record_of_retention_itself_excuses_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let audit = segments(&dir, 2).await;
    let hash = all(&audit).await[0].hash.clone();
    let mut bytes = [0; 32];
    hex::decode_to_slice(hash, &mut bytes).unwrap();
    let removal = Removal { first: 1, last: 1, hash: bytes, broken: None };
    let reason = Some(removal.to_string());

    audit.note(&Line { reason: reason.clone(), ..Line::default() }).await.unwrap();
    let denied = Line { reason, entry: Some("retention".into()), ..Line::default() };
    audit.deny(&denied).await.unwrap();
    std::fs::remove_file(read::segment_path(dir.path(), 1)).unwrap();

    let report = audit.verify().await.unwrap();
    assert_eq!((report.removed, &report.problems[..]), (None, &["record 1 is missing".into()][..]));
}

#[tokio::test]
async fn an_index_that_is_lost_or_damaged_hides_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let audit = segments(&dir, 3).await;
    audit.close().await;
    let index = |first| read::segment_path(dir.path(), first).with_extension("index");
    std::fs::remove_file(index(1)).unwrap();
    let whole = std::fs::read(index(2)).unwrap();
    std::fs::write(index(2), &whole[..whole.len() - 8]).unwrap();

    let filter = Filter {
        limit: 9,
        lease: LeaseId::parse("lease_a").ok(),
        since: Some(0),
        ..Filter::default()
    };
    let page = open(&dir).page(filter).await.unwrap();

    let found: Vec<u64> = page.records.iter().map(|record| record.seq).collect();
    assert_eq!(found, [1, 2, 3]);
}
