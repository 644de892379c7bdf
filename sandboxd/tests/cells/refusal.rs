//! A host that cannot have sandboxes: the daemon does not start and says what to do.

use std::process::Command;

#[test]
fn without_user_namespaces_the_daemon_ends_with_77_and_the_command_that_enables_them() {
    let place = tempfile::tempdir().unwrap();
    let directories: Vec<String> = ["runtime", "state", "policies"]
        .map(|name| format!("--{name}-dir={}", place.path().join(name).display()))
        .into();
    // A user namespace of the test's own, in which no further one may be made.
    let mut daemon = Command::new(intruder::program());
    daemon.arg("without-namespaces").arg(env!("CARGO_BIN_EXE_sandboxd")).args(directories);

    let outcome = daemon.output().unwrap();

    let said = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!(outcome.status.code(), Some(77), "{said}");
    assert!(said.contains("cannot make a sandbox: clone"), "{said}");
    assert!(said.contains("sysctl -w user.max_user_namespaces="), "{said}");
}
