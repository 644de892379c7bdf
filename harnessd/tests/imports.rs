//! What an import may leave behind and what it may claim: nothing for long, and only what holds.

use crate::rig::files::{chained, exported, import};
use crate::rig::{Daemon, Rig, idle, say, session, turn};
use ipc::fault::Code;
use ipc::id::SessionId;
use serde_json::{Value, json};

/// A session of one turn as a file.
async fn file(daemon: &Daemon, rig: &Rig) -> (SessionId, Value, Vec<Value>) {
    let id = session(&daemon.client).await;
    say(&daemon.client, &id, "go").await;
    idle(&rig.log(), &id, 1).await;
    let (header, lines, _) = exported(&daemon.client, &id).await;
    (id, header, lines)
}

/// Events that imports have gathered.
fn gathered(rig: &Rig) -> Vec<String> {
    let path = rig.layout.state.join("harnessd/sessions.db");
    let raw = rusqlite::Connection::open(path).unwrap();
    let mut statement = raw.prepare("SELECT DISTINCT session FROM imports").unwrap();
    let rows = statement.query_map([], |row| row.get(0)).unwrap();
    rows.collect::<rusqlite::Result<_>>().unwrap()
}

fn talk() -> Rig {
    Rig::new(json!([turn("One.", &[]), turn("Two.", &[])]))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_has_one_import_under_way_and_a_start_of_the_daemon_ends_it() {
    let here = talk();
    let from = here.daemon().await;
    let (first, first_header, first_lines) = file(&from, &here).await;
    let (second, second_header, second_lines) = file(&from, &here).await;
    let there = talk();
    let mut daemon = there.daemon().await;
    let half = first_lines.len() / 2;

    import(&daemon.client, &first_header, &first_lines[..half], false).await.unwrap();
    assert_eq!(gathered(&there), [first.to_string()]);
    import(&daemon.client, &second_header, &second_lines[..half], false).await.unwrap();
    assert_eq!(gathered(&there), [second.to_string()]);
    let rest = import(&daemon.client, &first_header, &first_lines[half..], true).await;
    let fault = rest.unwrap_err();
    assert!(fault.text.contains("does not follow"), "{fault}");

    import(&daemon.client, &second_header, &second_lines[..half], false).await.unwrap();
    daemon.stop().await;
    let daemon = there.daemon().await;
    assert_eq!(gathered(&there), Vec::<String>::new());
    import(&daemon.client, &second_header, &second_lines, true).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn events_behind_the_end_that_a_file_states_are_not_gathered() {
    let rig = talk();
    let daemon = rig.daemon().await;
    let (id, mut header, lines) = file(&daemon, &rig).await;
    let there = talk();
    let other = there.daemon().await;
    header["events"] = json!(3);

    let fault = import(&other.client, &header, &lines, false).await.unwrap_err();

    assert!(fault.text.contains("the log ends at event 3"), "{fault}");
    assert_eq!(gathered(&there), Vec::<String>::new());
    assert!(there.log().chain(&id).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_does_not_begin_with_what_the_session_is_makes_none() {
    let here = talk();
    let from = here.daemon().await;
    let (id, header, lines) = file(&from, &here).await;
    let mut exchanged = lines.clone();
    exchanged.swap(0, 1);
    let mut twice = lines.clone();
    let again = json!(format!("{}_again", lines[0]["id"].as_str().unwrap()));
    twice.insert(2, lines[0].clone());
    twice[2]["id"] = again;
    let mut timeless = lines.clone();
    timeless[1]["time"] = json!("tomorrow");
    let mut unknown = lines.clone();
    unknown[1]["kind"] = json!("surprise");
    let cases = [
        ("its first event makes no session", exchanged),
        ("event 3 makes the session again", twice),
        ("the time of event 2 is none", timeless),
        ("event 2 is not readable", unknown),
    ];
    for (expected, lines) in cases {
        let there = talk();
        let other = there.daemon().await;
        let lines = chained(&id, lines);
        let mut header = header.clone();
        header["events"] = json!(lines.len());
        header["head"] = lines.last().unwrap()["hash"].clone();

        let fault = import(&other.client, &header, &lines, true).await.unwrap_err();

        assert!(fault.text.contains(expected), "{expected}: {fault}");
        assert_eq!(fault.code, Code::Invalid, "{expected}: {fault}");
        assert!(there.log().chain(&id).await.is_err(), "{expected}: a session was made");
        assert_eq!(gathered(&there), Vec::<String>::new(), "{expected}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn times_go_on_where_a_host_with_a_later_clock_left_them() {
    let here = talk();
    let from = here.daemon().await;
    let (id, mut header, mut lines) = file(&from, &here).await;
    let there = talk();
    let other = there.daemon().await;
    lines.last_mut().unwrap()["time"] = json!("2999-01-01T00:00:00.000Z");
    let lines = chained(&id, lines);
    header["head"] = lines.last().unwrap()["hash"].clone();

    import(&other.client, &header, &lines, true).await.unwrap();
    say(&other.client, &id, "and on").await;
    let events = idle(&there.log(), &id, 2).await;

    let times: Vec<&str> = events.iter().map(|event| event.time.as_str()).collect();
    assert!(events.len() > lines.len() && times.is_sorted(), "{times:?}");
    let chain = there.log().chain(&id).await.unwrap();
    assert_eq!(chain.updated_at, *times.last().unwrap());
}
