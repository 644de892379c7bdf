//! Promise: a log that nobody can read ends no daemon and fails no call.
use std::process::{Command, Stdio};

use cleanhands_tests::installation::{DAEMONS, Installation, Setup, program};
use serde_json::json;

/// What is on a full disk.
fn full() -> Stdio {
    std::fs::File::options().write(true).open("/dev/full").unwrap().into()
}

/// A pipe whose reader has gone.
fn broken() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn a_session_runs_and_all_end_well(unheard: fn() -> Stdio) {
    let command = json!({ "command": "echo one > here; cat here; exit 3" });
    let script = json!([
        { "text": "I look.", "tools": [{ "name": "bash", "input": command }] },
        { "text": "Done all the same." },
    ]);
    let policy = "[sandbox]\nroot = \"host\"\n";
    let setup = Setup::default().policy("dev", policy).script(script);
    let mut installation = Installation::prepare(&setup);
    for daemon in DAEMONS {
        installation.start_speaking_to(daemon, unheard());
    }

    let direct = installation.shell("dev", "curl -so gone https://denied.example; echo two");
    let run = installation.command(&["run", "--environment", "dev", "--model", "m", "go"]);
    let run = { run }.stdin(Stdio::null()).output().unwrap();

    assert_eq!((direct.0, direct.1.as_str()), (Some(0), "two\n"), "{}", direct.2);
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("Done all the same."), "{run:?}");
    for daemon in DAEMONS.iter().rev() {
        let status = installation.stop(daemon);
        assert_eq!(status.code(), Some(0), "{daemon} ended with {status}");
    }
}

#[test]
fn daemons_whose_log_is_on_a_full_disk_run_a_session_and_end_with_0() {
    a_session_runs_and_all_end_well(full);
}

#[test]
fn daemons_whose_log_has_lost_its_reader_run_a_session_and_end_with_0() {
    a_session_runs_and_all_end_well(broken);
}

#[test]
fn a_daemon_that_cannot_say_why_it_does_not_start_ends_with_its_own_status() {
    for daemon in DAEMONS {
        let mut command = Command::new(program());
        command.args([daemon, "--config", "/nonexistent/daemon.toml"]);

        let status = command.stdin(Stdio::null()).stderr(full()).status().unwrap();

        assert_eq!(status.code(), Some(78), "{daemon}");
    }
}
