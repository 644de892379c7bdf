//! The demo as a person would run it: it ends by itself, every claim holds, nothing is left.

use std::process::{Command, Stdio};

#[test]
fn the_demo_ends_by_itself_with_every_claim_held_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();

    let output = Command::new(env!("CARGO_BIN_EXE_cleanhands"))
        .args(["demo", "--json"])
        .env("TMPDIR", dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();

    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let proof: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(proof["claims_failed"], serde_json::json!([]));
    assert_eq!(proof["found"], serde_json::json!([]));
    assert_eq!(proof["denied"], 1);
    assert!(proof["claims_held"].as_u64().unwrap() >= 20, "{proof}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_too_long_for_sockets_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("d".repeat(100));
    std::fs::create_dir(&deep).unwrap();

    let output = Command::new(env!("CARGO_BIN_EXE_cleanhands"))
        .arg("demo")
        .env("TMPDIR", &deep)
        .stdin(Stdio::null())
        .output()
        .unwrap();

    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("TMPDIR"), "{errors}");
}

#[test]
fn the_demo_offers_and_takes_no_directory_of_other_daemons() {
    let run = |line: &[&str]| Command::new(env!("CARGO_BIN_EXE_cleanhands")).args(line).output();

    let help = run(&["demo", "--help"]).unwrap();

    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains("--keep") && !help.contains("--runtime-dir"), "{help}");
    for line in [["--runtime-dir", "/tmp", "demo"], ["demo", "--runtime-dir", "/tmp"]] {
        let refused = run(&line).unwrap();
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(
            refused.status.code() == Some(2) && errors.contains("daemons of its own"),
            "{errors}"
        );
    }
}
