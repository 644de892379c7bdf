//! Carrying sessions and whole logs: backup while running, one session as a file, old formats.

use std::os::unix::fs::PermissionsExt;

use crate::rig::files::{bytes, chained, exported, import};
use crate::rig::{Rig, idle, kinds, say, session, turn, until};
use harnessd::log::{Body, CallOutcome, Log, Note};
use ipc::fault::Code;
use ipc::id::SessionId;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_taken_while_sessions_run_is_whole_and_leaves_nothing_behind() {
    let rig = Rig::new(json!([turn("One.", &["one"]), turn("Two.", &[])]));
    let daemon = rig.daemon().await;
    let first = session(&daemon.client).await;
    say(&daemon.client, &first, "go").await;
    idle(&rig.log(), &first, 1).await;
    let busy = session(&daemon.client).await;
    let client = daemon.client.clone();
    let talking = tokio::spawn(async move {
        loop {
            say(&client, &busy, "more").await;
        }
    });

    let mut copies = Vec::new();
    for _ in 0..5 {
        copies.push(bytes(&daemon.client, "/cleanhands/v1/backup").await);
    }
    talking.abort();

    let known = rig.log().all(&first).await.unwrap();
    for copy in copies {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("sessions.db"), copy).unwrap();
        let raw = rusqlite::Connection::open(dir.path().join("sessions.db")).unwrap();
        let check: String = raw.query_row("PRAGMA integrity_check", [], |r| r.get(0)).unwrap();
        assert_eq!(check, "ok");
        let sql = "SELECT session FROM chains";
        let mut statement = raw.prepare(sql).unwrap();
        let ids = statement.query_map([], |row| row.get::<_, String>(0)).unwrap();
        let ids: Vec<SessionId> = ids.map(|id| SessionId::parse(&id.unwrap()).unwrap()).collect();
        let log = Log::open(dir.path()).unwrap();
        assert_eq!(log.all(&first).await.unwrap(), known);
        for id in ids {
            assert_eq!(log.verify(&id).await.unwrap().problems, Vec::<String>::new());
        }
    }
    let state = std::fs::read_dir(rig.layout.state.join("harnessd")).unwrap();
    let names = state.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    assert_eq!(names.filter(|name| name.starts_with("backup")).count(), 0);
}

#[test]
fn a_copy_that_a_dead_process_left_behind_is_cleared_away_and_a_fresh_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let day = std::time::Duration::from_secs(24 * 3600);
    for (name, age) in [("backup-old.db", day), ("backup-new.db", day / 24), ("other.db", day)] {
        let file = std::fs::File::create(dir.path().join(name)).unwrap();
        file.set_modified(std::time::SystemTime::now() - age).unwrap();
    }

    drop(Log::open(dir.path()).unwrap());

    let exists = |name: &str| dir.path().join(name).exists();
    assert_eq!(["backup-old.db", "backup-new.db", "other.db"].map(exists), [false, true, true]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_goes_through_a_file_to_another_host_and_goes_on_there() {
    let here = Rig::new(json!([turn("One.", &["one"]), turn("Two.", &[]), turn("Three.", &[])]));
    let daemon = here.daemon().await;
    let id = session(&daemon.client).await;
    say(&daemon.client, &id, "go").await;
    let events = idle(&here.log(), &id, 1).await;
    let (mut header, lines, end) = exported(&daemon.client, &id).await;
    // A file that it was given would stay behind.
    header["document"]["resources"] = json!([{ "id": "sesrsc_1", "mount_path": "/x" }]);
    let there = Rig::new(json!([turn("One.", &[]), turn("Two.", &[]), turn("Three.", &[])]));
    let other = there.daemon().await;

    let half = lines.len() / 2;
    import(&other.client, &header, &lines[..half], false).await.unwrap();
    let before = there.log().chain(&id).await;
    // A step that is sent again changes nothing.
    import(&other.client, &header, &lines[..half], false).await.unwrap();
    let whole = import(&other.client, &header, &lines[half..], true).await.unwrap();
    let twice = import(&other.client, &header, &lines, true).await.unwrap_err();
    say(&other.client, &id, "and on").await;
    let after = idle(&there.log(), &id, 2).await;

    assert_eq!(end, json!({ "end": events.len() }));
    assert!(before.is_err(), "half a session could be seen");
    assert_eq!(whole["whole"], true);
    assert_eq!(twice.code, Code::Conflict);
    assert_eq!(after[..events.len()], events);
    let note = Note::Imported {
        events: events.len() as u64,
        head: header["head"].as_str().unwrap().to_owned(),
    };
    assert_eq!(after[events.len()].body, Body::Note(note));
    let shown: Value = other.client.get(&format!("/v1/sessions/{id}")).await.unwrap();
    assert_eq!(shown["status"], "idle");
    assert_eq!(shown["resources"], json!([]));
    let report = there.log().verify(&id).await.unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_exported_in_mid_call_rests_there_and_the_call_is_not_run_again() {
    let here = Rig::new(json!([turn("", &["hold"]), turn("Done.", &[])]));
    let daemon = here.daemon().await;
    let id = session(&daemon.client).await;
    say(&daemon.client, &id, "go").await;
    until("the call to run", || async { here.sandboxd.runs().get("hold").copied() }).await;
    let (header, lines, _) = exported(&daemon.client, &id).await;
    let there = Rig::new(json!([turn("", &["hold"]), turn("I look.", &[])]));
    there.sandboxd.forget_all();
    let other = there.daemon().await;

    import(&other.client, &header, &lines, true).await.unwrap();
    let rests = there.log().chain(&id).await.unwrap();
    say(&other.client, &id, "go on").await;
    let events = idle(&there.log(), &id, 1).await;

    assert!(!rests.unsettled, "it would have gone on by itself");
    let outcome = events.iter().find_map(|event| match &event.body {
        Body::ToolResult(result) => Some(result.outcome),
        _ => None,
    });
    assert_eq!(outcome, Some(CallOutcome::OutcomeUnknown));
    assert_eq!(there.sandboxd.runs().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_changed_or_is_not_whole_is_refused_and_makes_no_session() {
    let here = Rig::new(json!([turn("One.", &["one"]), turn("Two.", &[])]));
    let daemon = here.daemon().await;
    let id = session(&daemon.client).await;
    say(&daemon.client, &id, "go").await;
    idle(&here.log(), &id, 1).await;
    let (header, lines, _) = exported(&daemon.client, &id).await;
    let with = |change: &dyn Fn(&mut Value, &mut Vec<Value>)| {
        let (mut header, mut lines) = (header.clone(), lines.clone());
        change(&mut header, &mut lines);
        (header, lines)
    };
    let rewritten = |_: &mut Value, lines: &mut Vec<Value>| lines[1]["body"] = json!("{}");
    let cases: [(&str, (Value, Vec<Value>)); 7] = [
        ("event 2 was rewritten", with(&rewritten)),
        ("event 4 does not follow", with(&|_, lines| drop(lines.remove(2)))),
        ("the log ends at event", with(&|_, lines| drop(lines.pop()))),
        ("the log ends at event", with(&|header, _| header["events"] = json!(3))),
        ("the last event is not", with(&|header, _| header["head"] = json!("0".repeat(64)))),
        ("no file of a session", with(&|header, _| header["version"] = json!(99))),
        ("the log ends at event 0", with(&|_, lines| lines.clear())),
    ];
    for (expected, (header, lines)) in cases {
        let there = Rig::new(json!([]));
        let other = there.daemon().await;

        let fault = import(&other.client, &header, &lines, true).await.unwrap_err();

        assert!(fault.text.contains(expected), "{expected}: {fault}");
        assert!(there.log().chain(&id).await.is_err(), "{expected}: a session was made");
    }
}

/// The lines with another last event, under a hash that fits: a file of somebody's own.
fn forged(session: &SessionId, lines: &[Value]) -> Vec<Value> {
    let mut lines = lines.to_vec();
    let last = lines.last_mut().unwrap();
    last["body"] = json!(format!("{} ", last["body"].as_str().unwrap()));
    chained(session, lines)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_that_failed_or_broke_off_does_not_keep_the_true_file_out() {
    let here = Rig::new(json!([turn("One.", &[]), turn("Two.", &[])]));
    let daemon = here.daemon().await;
    let id = session(&daemon.client).await;
    say(&daemon.client, &id, "go").await;
    idle(&here.log(), &id, 1).await;
    let (header, lines, _) = exported(&daemon.client, &id).await;
    say(&daemon.client, &id, "more").await;
    idle(&here.log(), &id, 2).await;
    let (later_header, longer, _) = exported(&daemon.client, &id).await;
    let origin: Value = daemon.client.get(&format!("/v1/sessions/{id}")).await.unwrap();
    let other_events = forged(&id, &lines);
    let mut other_header = header.clone();
    other_header["head"] = json!("0".repeat(64));
    // What came first, whether that was its last step, and whether it is refused.
    let cases = [
        ("a forged file, refused", &header, &other_events, true, true),
        ("a forged file, broken off", &header, &other_events, false, false),
        ("a later file, broken off", &later_header, &longer, false, false),
        ("a wrong first line", &other_header, &lines, true, true),
    ];
    for (case, first, events, last, refused) in cases {
        let there = Rig::new(json!([]));
        let other = there.daemon().await;
        assert_eq!(import(&other.client, first, events, last).await.is_err(), refused, "{case}");
        let raw = rusqlite::Connection::open(there.layout.state.join("harnessd/sessions.db"));
        let count = |table: &str| -> u64 {
            let sql = format!("SELECT count(*) FROM {table}");
            raw.as_ref().unwrap().query_row(&sql, [], |row| row.get(0)).unwrap()
        };
        assert_eq!(count("events"), 0, "{case}");
        assert_eq!(count("imports") == 0, refused, "{case}");

        let whole = import(&other.client, &header, &lines, true).await;

        assert!(whole.is_ok(), "{case}: {whole:?}");
        assert_eq!(count("imports"), 0, "{case}");
        let report = there.log().verify(&id).await.unwrap();
        assert_eq!(report.problems, Vec::<String>::new(), "{case}");
        let shown: Value = other.client.get(&format!("/v1/sessions/{id}")).await.unwrap();
        assert_eq!(shown["created_at"], origin["created_at"], "{case}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_session_does_not_come_back_through_a_file() {
    let rig = Rig::new(json!([turn("One.", &[])]));
    let daemon = rig.daemon().await;
    let id = session(&daemon.client).await;
    let (header, lines, _) = exported(&daemon.client, &id).await;
    let _: Value = daemon.client.delete(&format!("/v1/sessions/{id}")).await.unwrap();

    let fault = import(&daemon.client, &header, &lines, true).await.unwrap_err();

    assert!(fault.text.contains("was deleted here"), "{fault}");
}

/// A log of format 1 with one session of two turns, as the program of then wrote it.
const FORMAT_1: &str = include_str!("formats/1.sql");

#[tokio::test(flavor = "multi_thread")]
async fn a_log_of_every_earlier_format_is_taken_up_as_it_is_and_goes_on() {
    // The second is the first with a table more.
    let second = FORMAT_1.replace("user_version = 1", "user_version = 2")
        + "CREATE TABLE snapshots (session TEXT NOT NULL, kind TEXT NOT NULL,
           seq INTEGER NOT NULL, hash TEXT NOT NULL, body TEXT NOT NULL,
           PRIMARY KEY (session, kind, seq)) STRICT, WITHOUT ROWID;";
    for (format, text) in [(1, FORMAT_1), (2, &second)] {
        let rig = Rig::new(json!([turn("One.", &[]), turn("Two.", &[]), turn("Three.", &[])]));
        let state = rig.layout.state.join("harnessd");
        std::fs::create_dir_all(&state).unwrap();
        std::fs::set_permissions(&state, std::fs::Permissions::from_mode(0o700)).unwrap();
        let raw = rusqlite::Connection::open(state.join("sessions.db")).unwrap();
        // Its owner is whoever runs the test.
        let owner = ipc::peer::Principal::own().owner();
        raw.execute_batch(text).unwrap();
        raw.execute("UPDATE chains SET owner = ?1", [&owner]).unwrap();
        raw.execute("UPDATE objects SET owner = ?1", [&owner]).unwrap();
        // As an import that failed left them: in the way of the true file.
        let left = "INSERT INTO events SELECT 'left', seq, 'left' || id, time, kind, body,
                    previous, hash FROM events";
        raw.execute(left, []).unwrap();
        let version: u32 = raw.query_row("PRAGMA user_version", [], |r| r.get(0)).unwrap();
        assert_eq!(version, format);
        let id: String = raw.query_row("SELECT session FROM chains", [], |r| r.get(0)).unwrap();
        let id = SessionId::parse(&id).unwrap();
        drop(raw);

        let daemon = rig.daemon().await;
        let before = rig.log().all(&id).await.unwrap();
        say(&daemon.client, &id, "go on").await;
        let after = idle(&rig.log(), &id, 3).await;

        let raw = rusqlite::Connection::open(state.join("sessions.db")).unwrap();
        let left = "SELECT count(*) FROM events WHERE session = 'left'";
        assert_eq!(raw.query_row(left, [], |row| row.get::<_, u64>(0)).unwrap(), 0);
        let gone = raw.execute("DELETE FROM events", []).unwrap_err().to_string();
        assert!(gone.contains("only with their whole session"), "format {format}: {gone}");
        assert_eq!(after[..before.len()], before, "format {format}");
        assert!(kinds(&after).ends_with(&["usage".to_owned(), "status_idle".to_owned()]));
        let report = rig.log().verify(&id).await.unwrap();
        assert_eq!(report.problems, Vec::<String>::new(), "format {format}");
    }
}
