//! The log itself: append-only, fenced, chained, durable under many writers.

use std::process::Command;

use harnessd::log::objects::{Change, ListQuery, NewObject, Object, Order};
use harnessd::log::{Agent, Body, Created, Guard, Log, LogError, NewEvent, Note, Status};
use ipc::id::SessionId;
use serde_json::{Value, json};

/// Set in the processes that a test starts from itself: the state directory, and what to do.
const CHILD: &str = "HARNESSD_LOG_TEST_CHILD";

fn created() -> NewEvent {
    let agent = Agent {
        model: "m".into(),
        system: None,
        tools: vec![],
        mcp: vec![],
        snapshot: Value::Null,
    };
    let created = Created {
        owner: "uid:1".into(),
        policy: "dev".into(),
        workspace: None,
        agent,
        budget_cents: None,
    };
    Body::SessionCreated(created).into()
}

fn object(kind: &'static str, id: &str, body: Value) -> NewObject {
    NewObject { kind, id: id.to_owned(), owner: "uid:1".to_owned(), unique_name: None, body }
}

async fn session(log: &Log) -> SessionId {
    let session = SessionId::random();
    let object = object("session", session.as_str(), json!({}));
    log.create_session(&session, object, vec![created()]).await.unwrap();
    session
}

fn note(number: u64) -> NewEvent {
    Body::Note(Note::Recovered { fence: number, pid: 1 }).into()
}

fn said() -> NewEvent {
    Body::UserMessage { content: vec![json!({"type": "text", "text": "hi"})] }.into()
}

#[tokio::test]
async fn an_owner_of_before_cannot_append_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    let session = session(&log).await;
    let first = log.acquire(&session).await.unwrap().unwrap();

    let second = log.acquire(&session).await.unwrap();
    let old = first.fence;
    drop(first);
    let third = log.acquire(&session).await.unwrap().unwrap();
    let guard = |fence| Guard { fence: Some(fence), ..Guard::default() };
    let stale = log.append(&session, guard(old), vec![note(1)]).await;
    let fresh = log.append(&session, guard(third.fence), vec![note(2)]).await;

    assert!(second.is_none(), "two owners at once");
    assert!(matches!(stale, Err(LogError::Fenced { .. })), "{stale:?}");
    assert!(fresh.is_ok());
    assert_eq!(log.all(&session).await.unwrap().len(), 2, "the stale append left a trace");
}

#[tokio::test]
async fn an_append_that_assumes_an_older_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    let session = session(&log).await;
    log.append(&session, Guard::default(), vec![said()]).await.unwrap();

    let guard = Guard { last: Some(1), settles: true, ..Guard::default() };
    let outcome = log.append(&session, guard, vec![]).await;

    assert!(matches!(outcome, Err(LogError::Moved(_))), "{outcome:?}");
    assert_eq!(log.unsettled().await.unwrap(), [session], "a waiting message was forgotten");
}

#[tokio::test]
async fn events_can_neither_be_changed_nor_removed_and_who_forces_it_is_seen() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    let session = session(&log).await;
    log.append(&session, Guard::default(), vec![note(2), note(3), note(4)]).await.unwrap();
    let raw = rusqlite::Connection::open(dir.path().join("sessions.db")).unwrap();

    let change = raw.execute("UPDATE events SET body = '{}' WHERE seq = 2", []);
    let removal = raw.execute("DELETE FROM events WHERE seq = 4", []);
    let problems = async |sql: &str| {
        let copy = tempfile::tempdir().unwrap();
        let target = copy.path().join("sessions.db");
        raw.execute("VACUUM INTO ?1", [target.to_str().unwrap()]).unwrap();
        let forced = rusqlite::Connection::open(&target).unwrap();
        forced.execute_batch("DROP TRIGGER events_are_not_changed").unwrap();
        forced.execute_batch("DROP TRIGGER events_are_not_removed").unwrap();
        forced.execute_batch(sql).unwrap();
        drop(forced);
        Log::open(copy.path()).unwrap().verify(&session).await.unwrap().problems
    };

    assert!(change.unwrap_err().to_string().contains("never changed"));
    assert!(removal.unwrap_err().to_string().contains("only with their whole session"));
    assert_eq!(problems("").await, Vec::<String>::new());
    assert_eq!(
        problems("UPDATE events SET time = 'x' WHERE seq = 2").await,
        ["event 2 was rewritten"]
    );
    assert_eq!(problems("DELETE FROM events WHERE seq = 2").await, ["events 2 to 2 are missing"]);
    assert_eq!(
        problems("DELETE FROM events WHERE seq = 4").await,
        ["the log ends at event 3, but 4 were appended"]
    );
}

#[tokio::test]
async fn a_deleted_session_leaves_a_tombstone_and_its_id_is_never_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    let session = session(&log).await;
    let head = log.chain(&session).await.unwrap().head;

    let stone = log.delete(&session, "uid:7").await.unwrap();
    let again = object("session", session.as_str(), json!({}));
    let again = log.create_session(&session, again, vec![created()]).await;

    assert_eq!((stone.events, stone.head, stone.deleted_by.as_str()), (1, head, "uid:7"));
    assert!(log.tombstone(&session).await.unwrap().is_some());
    assert!(again.is_err(), "a deleted session came back");
    assert!(matches!(log.chain(&session).await, Err(LogError::NoSession(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_sees_every_event_once_and_in_order_whoever_appends() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Log::open(dir.path()).unwrap();
    let theirs = Log::open(dir.path()).unwrap();
    let session = session(&ours).await;
    let mut follower = ours.subscribe(&session, 1);

    let writers = [ours.clone(), theirs].map(|log| {
        let session = session.clone();
        tokio::spawn(async move {
            for number in 0..100 {
                log.append(&session, Guard::default(), vec![note(number)]).await.unwrap();
            }
        })
    });
    let mut seen = Vec::new();
    while seen.len() < 200 {
        seen.extend(follower.next().await.unwrap().unwrap().into_iter().map(|e| e.seq));
    }
    for writer in writers {
        writer.await.unwrap();
    }

    assert_eq!(seen, (2..=201).collect::<Vec<u64>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn four_processes_append_at_once_and_nothing_is_lost() {
    if let Ok(state) = std::env::var(CHILD) {
        return append_as_child(&state).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    let session = session(&log).await;
    let child = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "log::four_processes_append_at_once_and_nothing_is_lost"])
            .env(CHILD, format!("{}\n{session}", dir.path().display()))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };

    let mut children: Vec<_> = (0..4).map(|_| child()).collect();
    let ended = children.iter_mut().all(|child| child.wait().unwrap().success());

    assert!(ended, "a process could not append");
    let report = log.verify(&session).await.unwrap();
    assert_eq!((report.records, report.problems), (401, vec![]));
}

async fn append_as_child(state: &str) {
    let (dir, session) = state.split_once('\n').unwrap();
    let log = Log::open(dir.as_ref()).unwrap();
    let session = SessionId::parse(session).unwrap();
    for number in 0..100 {
        log.append(&session, Guard::default(), vec![note(number)]).await.unwrap();
    }
}

#[test]
fn many_processes_may_open_a_new_log_at_once() {
    if let Ok(dir) = std::env::var(CHILD) {
        Log::open(dir.as_ref()).unwrap();
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let child = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "log::many_processes_may_open_a_new_log_at_once"])
            .env(CHILD, dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };

    let mut children: Vec<_> = (0..12).map(|_| child()).collect();

    assert!(children.iter_mut().all(|child| child.wait().unwrap().success()));
    assert!(dir.path().join("sessions.db").exists(), "no process opened the log");
}

#[tokio::test]
async fn acknowledged_events_survive_the_death_of_the_writer() {
    if let Ok(state) = std::env::var(CHILD) {
        let (dir, session) = state.split_once('\n').unwrap();
        let log = Log::open(dir.as_ref()).unwrap();
        let session = SessionId::parse(session).unwrap();
        loop {
            let appended = log.append(&session, Guard::default(), vec![note(0)]).await.unwrap();
            println!("acknowledged {}", appended[0].seq);
        }
    }
    use std::io::BufRead;
    let dir = tempfile::tempdir().unwrap();
    let session = session(&Log::open(dir.path()).unwrap()).await;
    for round in 0..10 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "log::acknowledged_events_survive_the_death_of_the_writer",
                "--nocapture",
            ])
            .env(CHILD, format!("{}\n{session}", dir.path().display()))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let mut acknowledged = lines.map_while(Result::ok).filter_map(|line| {
            line.strip_prefix("acknowledged ").and_then(|seq| seq.parse::<u64>().ok())
        });
        acknowledged.nth(5 + round).expect("the child appends");
        child.kill().unwrap();
        let last = acknowledged.last().unwrap_or(0);
        child.wait().unwrap();

        let log = Log::open(dir.path()).unwrap();
        let report = log.verify(&session).await.unwrap();
        assert_eq!(report.problems, Vec::<String>::new());
        assert!(report.records >= last, "event {last} was acknowledged and is gone");
    }
}

#[tokio::test]
async fn objects_are_listed_by_owner_status_and_place() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    for number in 0..5 {
        let body = json!({ "agent": { "id": format!("agent_{}", number % 2) } });
        log.insert_object(object("agent", &format!("a{number}"), body)).await.unwrap();
    }
    let mut foreign = object("agent", "b", json!({}));
    foreign.owner = "uid:2".into();
    log.insert_object(foreign).await.unwrap();
    log.archive_object("agent", "uid:1", "a3").await.unwrap();
    let session = session(&log).await;

    let mut query = ListQuery::new("agent", "uid:1", 2);
    let first = log.list_objects(query.clone()).await.unwrap();
    query.after = Some(first.objects[1].position);
    let second = log.list_objects(query.clone()).await.unwrap();
    query.after = None;
    query.order = Order::Oldest;
    query.fields = vec![("agent.id".into(), json!("agent_1"))];
    let filtered = log.list_objects(query).await.unwrap();
    let mut sessions = ListQuery::new("session", "uid:1", 9);
    sessions.statuses = vec![Status::Idle];
    let idle = log.list_objects(sessions.clone()).await.unwrap();
    sessions.statuses = vec![Status::Running];
    let running = log.list_objects(sessions).await.unwrap();

    let ids = |page: harnessd::log::objects::ObjectPage| -> (Vec<String>, bool) {
        (page.objects.into_iter().map(|o| o.id).collect(), page.more)
    };
    assert_eq!(ids(first), (vec!["a4".into(), "a2".into()], true));
    assert_eq!(ids(second), (vec!["a1".into(), "a0".into()], false));
    assert_eq!(ids(filtered), (vec!["a1".into()], false));
    assert_eq!(ids(idle), (vec![session.to_string()], false));
    assert_eq!(ids(running), (vec![], false));
    let other = log.object("agent", "uid:2", "a1", None).await;
    assert!(matches!(other, Err(LogError::NoObject { .. })), "another owner's object was shown");
}

#[tokio::test]
async fn versions_are_kept_and_a_stale_change_is_a_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    let mut first = object("agent", "a", json!({ "v": 1 }));
    first.unique_name = Some("same".into());
    log.insert_object(first.clone()).await.unwrap();
    let change = |v: u64, from: &Object| Change {
        from: from.clone(),
        body: json!({ "v": v }),
        unique_name: None,
        new_version: true,
    };
    let one = log.object("agent", "uid:1", "a", None).await.unwrap();

    first.id = "b".into();
    let twice = log.insert_object(first).await;
    let second = log.change_object(change(2, &one)).await.unwrap();
    let stale = log.change_object(change(3, &one)).await;

    assert!(matches!(twice, Err(LogError::Conflict(_))), "{twice:?}");
    assert_eq!((second.version, second.body), (2, json!({ "v": 2 })));
    assert!(matches!(stale, Err(LogError::Overtaken { .. })), "{stale:?}");
    let old = log.object("agent", "uid:1", "a", Some(1)).await.unwrap();
    assert_eq!(old.body, json!({ "v": 1 }));
    let versions = log.object_versions("agent", "uid:1", "a", None, 1).await.unwrap();
    assert_eq!((versions.objects[0].version, versions.more), (2, true));
}

#[tokio::test]
async fn a_session_and_its_object_change_together_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::open(dir.path()).unwrap();
    let session = session(&log).await;
    let stored = async || log.object("session", "uid:1", session.as_str(), None).await.unwrap();
    let titled = |title: &str, from: Object| Change {
        from,
        body: json!({ "title": title }),
        unique_name: None,
        new_version: false,
    };
    let event = || note(1);
    let first = stored().await;

    let grown = Guard { last: Some(9), ..Guard::default() };
    let moved = log.change_session(&session, grown, event(), titled("a", first.clone())).await;
    let unmoved = (stored().await, log.chain(&session).await.unwrap().events);
    let done = titled("b", first.clone());
    let done = log.change_session(&session, Guard::default(), event(), done).await.unwrap();
    let stale = titled("c", first.clone());
    let stale = log.change_session(&session, Guard::default(), event(), stale).await;

    assert!(matches!(moved, Err(LogError::Moved(_))), "{moved:?}");
    assert_eq!(unmoved, (first, 1));
    assert!(matches!(stale, Err(LogError::Overtaken { .. })), "{stale:?}");
    assert_eq!(
        (stored().await.body, done.body),
        (json!({ "title": "b" }), json!({ "title": "b" }))
    );
    assert_eq!(log.chain(&session).await.unwrap().events, 2);
}
