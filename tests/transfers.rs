//! Promise: a session and the whole log can be carried off while everything runs, and read again.
use std::process::{Output, Stdio};

use cleanhands_tests::api::Api;
use cleanhands_tests::installation::{Installation, Setup};
use serde_json::{Value, json};

const POLICY: &str = "[sandbox]\nroot = \"host\"\n";

fn script() -> Value {
    let tool = |command: &str| json!([{ "name": "bash", "input": { "command": command } }]);
    json!([
        { "text": "I look.", "tools": tool("echo seen > here; cat here") },
        { "text": "Done." },
        { "text": "And again." },
    ])
}

fn started() -> Installation {
    let setup = Setup::default().policy("dev", POLICY).script(script());
    tokio::task::block_in_place(|| Installation::start(&setup))
}

fn run(installation: &Installation, verb: &str, arguments: &[&str]) -> Output {
    let mut command = installation.command(&["session", verb]);
    command.args(arguments).stdin(Stdio::null());
    tokio::task::block_in_place(|| command.output().unwrap())
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_exported_imported_elsewhere_and_goes_on_there() {
    let (here, there) = (started(), started());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("session.jsonl");
    let file = file.to_str().unwrap();
    let api = Api::new(&here.layout.harnessd());
    let session = api.session("dev").await;
    api.say(&session, "go").await;
    let events = api.until_idle(&session).await;

    said(&run(&here, "export", &[&session, file]));
    let again = run(&here, "export", &[&session, file]);
    let imported = said(&run(&there, "import", &[file]));
    let other = Api::new(&there.layout.harnessd());
    let shown = other.events(&session).await.unwrap();
    other.say(&session, "again").await;
    let after = other.until_idle(&session).await;
    let verified = said(&run(&there, "verify", &[&session]));

    assert!(!again.status.success(), "a file was written over");
    assert!(imported.contains(&session), "{imported}");
    assert_eq!(shown, events);
    let text = after.iter().rfind(|e| e["type"] == "agent.message").unwrap();
    assert_eq!(text["content"][0]["text"], "And again.");
    assert!(verified.contains("whole"), "{verified}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_lost_its_end_is_refused() {
    let (here, there) = (started(), started());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("session.jsonl");
    let api = Api::new(&here.layout.harnessd());
    let session = api.session("dev").await;
    api.say(&session, "go").await;
    api.until_idle(&session).await;
    let whole = said(&run(&here, "export", &[&session]));
    let lines: Vec<&str> = whole.lines().collect();
    std::fs::write(&file, lines[..lines.len() - 2].join("\n")).unwrap();

    let refused = run(&there, "import", &[file.to_str().unwrap()]);

    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("ends before its last line"), "{why}");
    assert!(Api::new(&there.layout.harnessd()).events(&session).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_holds_every_session_and_is_for_its_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let here = started();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sessions.db");
    let api = Api::new(&here.layout.harnessd());
    let session = api.session("dev").await;
    api.say(&session, "go").await;
    api.until_idle(&session).await;

    said(&run(&here, "backup", &[file.to_str().unwrap()]));

    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let copy = rusqlite::Connection::open(&file).unwrap();
    let sql = "SELECT count(*) FROM events WHERE session = ?1";
    let count: usize = copy.query_row(sql, [&session], |row| row.get(0)).unwrap();
    assert_eq!(count, api.log(&session).await.len());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a partial file was left");
}

#[tokio::test(flavor = "multi_thread")]
async fn profiles_are_compared_on_one_log_and_chosen_for_what_follows() {
    let here = started();
    let api = Api::new(&here.layout.harnessd());
    let session = api.session("dev").await;
    api.say(&session, "go").await;
    api.until_idle(&session).await;
    let before = api.log(&session).await;

    let profiles = ["--profile", "whole-log", "--profile", "last-n:1", "--json"];
    let mut arguments = vec![session.as_str()];
    arguments.extend(profiles);
    let compared = said(&run(&here, "replay", &arguments));
    let reports: Vec<Value> =
        compared.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let unknown = run(&here, "profile", &[&session, "some"]);
    said(&run(&here, "profile", &[&session, "reset:1000000"]));
    api.say(&session, "again").await;
    api.until_idle(&session).await;
    let after = api.log(&session).await;

    assert_eq!(reports[0]["profile"], "whole-log/1");
    assert_eq!((&reports[0]["requests"], &reports[1]["requests"]), (&json!(2), &json!(2)));
    assert!(reports[1]["last_begins_at"].as_u64() > reports[0]["last_begins_at"].as_u64());
    assert!(!unknown.status.success());
    let same = after.iter().zip(&before).all(|(now, then)| now.hash == then.hash);
    assert!(same, "the history was changed");
    let asked = |events: &[ipc::session::LogEvent]| -> Vec<Value> {
        let asked = events.iter().filter(|e| e.kind == "model_request_started");
        asked.map(|e| e.body["profile"].clone()).collect()
    };
    assert_eq!(asked(&after), ["whole-log/1", "whole-log/1", "reset/1:1000000"]);
}
