//! The command's own behaviour without any daemon: usage, statuses, policy checks, hints.

use std::process::{Command, Output, Stdio};

fn cleanhands(args: &[&str]) -> Output {
    let home = tempfile::tempdir().expect("a temporary directory");
    Command::new(env!("CARGO_BIN_EXE_cleanhands"))
        .args(args)
        .env_clear()
        .env("HOME", home.path())
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::null())
        .output()
        .expect("the built command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn wrong_use_is_status_2_and_help_documents_the_statuses() {
    for bad in [&["nonsense"][..], &["exec"], &["run", "task"], &["doctor", "stray"], &[]] {
        assert_eq!(cleanhands(bad).status.code(), Some(2), "{bad:?}");
    }
    for (args, word) in [
        (&["--help"][..], "77"),
        (&["run", "--help"], "130"),
        (&["exec", "--help"], "125"),
        (&["exec", "--help"], "tool-timeout"),
        (&["policy", "check", "--help"], "--here"),
    ] {
        let help = cleanhands(args);
        assert!(help.status.success() && text(&help.stdout).contains(word), "{args:?}");
    }
}

#[test]
fn the_commands_of_every_day_show_an_example() {
    for (line, example) in [
        (&["run", "--help"][..], "cleanhands run --environment dev"),
        (&["exec", "--help"], "cleanhands exec --environment dev"),
        (&["secret", "set", "--help"], "cleanhands secret set github < token.txt"),
        (&["lease", "open", "--help"], "cleanhands lease open dev -- "),
    ] {
        assert!(text(&cleanhands(line).stdout).contains(example), "{line:?}");
    }
}

#[test]
fn an_empty_task_is_refused_before_anything_is_made() {
    for task in ["", " ", "-"] {
        let output = cleanhands(&["run", "-e", "dev", task]);

        assert_eq!(output.status.code(), Some(1), "{task:?}");
        assert!(text(&output.stderr).contains("task is empty"), "{}", text(&output.stderr));
    }
    assert_eq!(cleanhands(&["up", "--log", "loud"]).status.code(), Some(2));
}

#[test]
fn a_missing_daemon_is_named_by_its_socket_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = dir.path().to_str().unwrap();
    for args in [
        &["--runtime-dir", runtime, "secret", "list"][..],
        &["--runtime-dir", runtime, "session", "list"],
        &["--runtime-dir", runtime, "audit"],
        &["--runtime-dir", runtime, "run", "-e", "dev", "task"],
    ] {
        let output = cleanhands(args);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {errors}");
        assert!(errors.contains(runtime) && errors.contains("cleanhands doctor"), "{errors}");
    }
}

#[test]
fn exec_without_sandboxd_has_a_status_that_no_command_of_ours_uses() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = dir.path().to_str().unwrap();

    let output = cleanhands(&["--runtime-dir", runtime, "exec", "-e", "dev", "--", "true"]);

    assert_eq!(output.status.code(), Some(125), "{}", text(&output.stderr));
}

#[test]
fn failures_are_json_when_asked_for() {
    let output = cleanhands(&["--json", "--runtime-dir", "/nonexistent", "secret", "list"]);

    let json: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(json["error"]["code"], "unavailable");
}

#[test]
fn wrong_use_is_json_too_when_asked_for_anywhere_and_of_secret_repeats_nothing() {
    for args in [
        &["--json", "nonsense"][..],
        &["doctor", "--json", "--wrong"],
        &["exec", "--wrong", "--json", "--", "ls"],
        &["lease", "open", "dev", "--shell", "--json"],
        &["--json"],
        &["secret", "--json"],
        &["secret", "set", "s1", "SECRETARG", "--json"],
        &["--json", "SECRETARG", "secret"],
    ] {
        let errors = misused(args);

        let json: serde_json::Value = serde_json::from_str(&errors).expect(&errors);
        assert_eq!(json["error"]["code"], "invalid", "{args:?}");
        assert!(!json["error"]["text"].as_str().unwrap().is_empty(), "{errors}");
        assert!(json["error"]["hint"].as_str().unwrap().contains("Usage:"), "{errors}");
        assert!(!errors.contains("SECRETARG"), "{errors}");
    }
    let errors = misused(&["exec", "--wrong", "--", "ls", "--json"]);
    assert!(errors.starts_with("error: "), "that --json is the command's: {errors}");
}

#[test]
fn an_empty_secret_is_refused_before_anybody_is_asked() {
    let output = cleanhands(&["--runtime-dir", "/nonexistent", "secret", "set", "x"]);

    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("empty"), "{}", text(&output.stderr));
}

#[test]
fn no_wrong_use_of_secret_repeats_an_argument() {
    for args in [
        &["secret", "set", "s1", "SECRETARG"][..],
        &["secret", "set", "s1", "--value", "SECRETARG"],
        &["secret", "set", "s1", "--value=SECRETARG"],
        &["secret", "set", "s1", "--SECRETARG"],
        &["secret", "SECRETARG"],
        &["secret", "rotate", "SECRETARG"],
        &["secret", "remove", "s1", "SECRETARG"],
        &["--runtime-dir", "/nonexistent", "secret", "set", "s1", "SECRETARG"],
        &["--json", "secret", "set", "s1", "SECRETARG"],
    ] {
        let errors = misused(args);

        assert!(!errors.contains("SECRETARG"), "{args:?}: {errors}");
        assert!(errors.contains("Usage:") && errors.contains("secret set NAME < FILE"), "{errors}");
    }
    let help = cleanhands(&["secret", "set", "--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("NAME"), "help is no wrong use");
}

/// What wrong arguments bring to standard error, and nothing to standard output.
fn misused(args: &[&str]) -> String {
    let output = cleanhands(args);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
    assert!(output.stdout.is_empty(), "{args:?}");
    errors
}

#[test]
fn where_secret_may_have_been_meant_no_argument_is_repeated_and_elsewhere_errors_are_as_ever() {
    for args in [
        &["s1", "secret", "set", "SECRETARG"][..],
        &["SECRETARG", "secret", "set"],
        &["--SECRETARG", "secret", "set", "s1"],
        &["--runtime-dir", "secret", "set", "s1", "SECRETARG"],
    ] {
        let errors = misused(args);

        assert!(!errors.contains("SECRETARG"), "{args:?}: {errors}");
        assert!(errors.contains("Usage:") && !errors.contains("NAME < FILE"), "{args:?}: {errors}");
    }
    for args in [&["exec", "--wrong", "--", "secret"][..], &["run", "secret", "--wrong"]] {
        let errors = misused(args);

        assert!(errors.contains("--wrong") && !errors.contains("NAME < FILE"), "{errors}");
    }
}

#[test]
fn a_lease_on_a_unix_socket_has_no_variables_for_a_command_a_shell_or_a_container() {
    for more in [&["--shell"][..], &["--docker"], &["--tcp"], &["--", "true"]] {
        let errors = misused(&[&["lease", "open", "dev", "--unix"], more].concat());

        assert!(errors.contains("--unix"), "{more:?}: {errors}");
    }
    for ttl in ["0s", "1", "-1h", "8 hours", "99999999999999999999d"] {
        let errors = misused(&["lease", "open", "dev", &format!("--ttl={ttl}")]);

        assert!(errors.contains("--ttl"), "{ttl}: {errors}");
    }
}

#[test]
fn policy_check_shows_the_place_of_a_mistake_and_accepts_a_good_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let good = "description = \"x\"\n\n[[egress.allow]]\nhosts = [\"api.example\"]\n";
    std::fs::write(dir.path().join("dev.toml"), good).unwrap();
    private(&dir.path().join("dev.toml"));
    let first = cleanhands(&["policy", "check", path]);
    std::fs::write(dir.path().join("dev.toml"), good.replace("hosts", "host")).unwrap();
    let second = cleanhands(&["policy", "check", path]);
    let third = cleanhands(&["--json", "policy", "check", path]);

    assert!(first.status.success(), "{}{}", text(&first.stdout), text(&first.stderr));
    assert_eq!(second.status.code(), Some(78));
    assert!(text(&second.stdout).contains("dev.toml:4:1"), "{}", text(&second.stdout));
    let report: serde_json::Value = serde_json::from_slice(&third.stdout).unwrap();
    assert_eq!((&report["ok"], &report["diagnostics"][0]["line"]), (&false.into(), &4.into()));
}

#[test]
fn policy_check_tells_what_no_host_can_do_from_what_this_one_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let top = dir.path().canonicalize().unwrap();
    let check = |text: &str, more: &[&str]| {
        std::fs::write(top.join("dev.toml"), text).unwrap();
        private(&top.join("dev.toml"));
        cleanhands(&[&["policy", "check", top.to_str().unwrap()], more].concat())
    };
    let mount = |source: &str| {
        format!("[sandbox]\nmounts = [{{ source = \"{source}\", target = \"/x\" }}]\n")
    };

    let absent = mount("/nonexistent/models");
    let (anywhere, here) = (check(&absent, &[]), check(&absent, &["--here"]));
    assert_eq!((anywhere.status.code(), here.status.code()), (Some(0), Some(77)));
    for output in [&anywhere, &here] {
        let shown = text(&output.stdout);
        assert!(shown.contains("dev.toml: on this host: mount at /x: /nonexistent"), "{shown}");
    }
    let report = check(&absent, &["--json"]);
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!((&report["ok"], &report["here"][0]["environment"]), (&true.into(), &"dev".into()));

    let own = check(&mount(top.to_str().unwrap()), &["--here"]);
    assert_eq!(own.status.code(), Some(77));
    assert!(text(&own.stdout).contains("belongs to the daemons"), "{}", text(&own.stdout));

    let packages = check("[sandbox]\npackages = { apt = [\"x\"] }\n", &[]);
    assert_eq!(packages.status.code(), Some(78));
    let shown = text(&packages.stdout);
    assert!(shown.contains("no sandbox: apt packages") && !shown.contains("good"), "{shown}");

    assert_eq!(check(&mount("/usr"), &["--here"]).status.code(), Some(0));
}

fn private(path: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("a file of ours");
}

#[test]
fn up_without_policies_says_which_directory_and_what_to_do() {
    let output = cleanhands(&["up", "--policies", "/nonexistent/policies"]);

    assert_eq!(output.status.code(), Some(78));
    let errors = text(&output.stderr);
    assert!(errors.contains("/nonexistent/policies"), "{errors}");
}

#[test]
fn doctor_reports_missing_daemons_and_fails() {
    let output = cleanhands(&["--runtime-dir", "/nonexistent", "doctor"]);

    let found = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1));
    for name in ["proxyd", "sandboxd", "harnessd", "user namespaces"] {
        assert!(found.contains(name), "{found}");
    }
}

#[test]
fn completions_exist_for_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let output = cleanhands(&["completions", shell]);
        assert!(output.status.success() && text(&output.stdout).contains("cleanhands"), "{shell}");
    }
}

#[test]
fn no_colour_codes_without_a_terminal() {
    let output = cleanhands(&["--runtime-dir", "/nonexistent", "doctor"]);

    assert!(!output.stdout.contains(&0x1b));
}

#[test]
fn a_name_that_no_policy_can_use_is_refused_before_a_value_is_asked_for() {
    for name in ["a/b", "-a", ".a", "a b", "a:b", "\u{e9}", &"a".repeat(129)] {
        let line = ["--runtime-dir", "/nonexistent", "secret", "set", "--", name];
        let errors = misused(&line);

        assert!(errors.contains("A-Z a-z 0-9 . _ -") && !errors.contains(name), "{errors}");
    }
}
