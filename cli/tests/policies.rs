//! `cleanhands policy explain`, `diff` and `replay`: what policies would do, without any daemon.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const RULES: &str = r#"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
paths = ["/repos/**"]
credential = "github"
[[egress.allow]]
hosts = ["git.example"]
git = { repositories = ["acme/*"], push = false }
[[egress.allow]]
hosts = ["db.example"]
ports = [5432]
addresses = ["10.0.0.0/8"]
[credentials.github]
secret = "local:github"
inject = { bearer = true }
hosts = ["api.example"]
env = "GITHUB_TOKEN"
"#;

fn cleanhands(args: &[&str], stdin: &str) -> Output {
    let home = tempfile::tempdir().expect("a temporary directory");
    let mut child = Command::new(env!("CARGO_BIN_EXE_cleanhands"))
        .args(args)
        .env_clear()
        .env("HOME", home.path())
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the built command runs");
    // One that reads nothing may have ended.
    let _ = child.stdin.take().expect("it is piped").write_all(stdin.as_bytes());
    child.wait_with_output().expect("it ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A directory that holds these policies as `dev.toml`.
fn directory(policy: &str) -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mode = |path: &Path, mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(path, mode).expect("our own files can be changed");
    };
    let file = dir.path().join("dev.toml");
    std::fs::write(&file, policy).expect("our own directory can be written");
    mode(&file, 0o600);
    mode(dir.path(), 0o700);
    dir
}

fn path(dir: &tempfile::TempDir) -> &str {
    dir.path().to_str().expect("a temporary directory has a plain name")
}

#[test]
fn explain_shows_every_rule_what_decided_and_what_goes_along() {
    let dir = directory(RULES);
    let explain = |rest: &[&str]| {
        let args = [&["policy", "explain", "dev", "--policies", path(&dir)], rest].concat();
        let output = cleanhands(&args, "");
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    for (rest, status, parts) in [
        (
            &["https://api.example/repos/x"][..],
            0,
            &["egress.allow[0]", "matches", "not reached", "local:github", "GITHUB_TOKEN"][..],
        ),
        (
            &["https://api.example/repos/x", "-m", "DELETE"],
            3,
            &["method DELETE", "it allows GET", "egress.allow[2]"],
        ),
        (&["https://api.example/repos/../x"], 3, &["dot segment"]),
        (&["https://uploads.api.example/"], 3, &["it lists"]),
        (
            &["https://git.example/acme/w.git/info/refs?service=git-upload-pack"],
            0,
            &["allowed by egress.allow[1]"],
        ),
        (
            &["https://git.example/acme/w.git/info/refs?service=git-receive-pack"],
            3,
            &["fetched, not pushed to"],
        ),
        (&["db.example:5432"], 0, &["passed on unread by egress.allow[2]"]),
        (&["db.example:22"], 3, &["not port 22"]),
        (&["http://api.example/repos/x"], 3, &["port 80"]),
    ] {
        let (code, shown) = explain(rest);

        assert_eq!(code, Some(status), "{rest:?}: {shown}");
        for part in parts {
            assert!(shown.contains(part), "{rest:?}: {part}: {shown}");
        }
    }
    let (code, shown) = explain(&["--json", "https://api.example/repos/x"]);
    let json: Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!((code, &json["allowed"]), (Some(0), &json!(true)));
    assert_eq!(json["rules"].as_array().expect("a list").len(), 3);
    assert_eq!(json["credentials"][0]["name"], "github");
    for wrong in [&["ftp://x/"][..], &["https://"]] {
        assert_eq!(explain(wrong).0, Some(2), "{wrong:?}");
    }
    let other =
        cleanhands(&["policy", "explain", "prod", "https://x/", "--policies", path(&dir)], "");
    assert_eq!(other.status.code(), Some(2));
    assert!(text(&other.stderr).contains("dev"), "{}", text(&other.stderr));
}

#[test]
fn diff_tells_what_would_be_otherwise_and_nothing_of_what_is_only_written_otherwise() {
    let before = directory(RULES);
    let written = RULES.replace("methods = [\"GET\"]", "# only this\nmethods = [ 'GET' ]");
    let wider =
        RULES.replace("[\"GET\"]", "[\"GET\", \"POST\"]").replace("push = false", "push = true");
    let same = cleanhands(&["policy", "diff", path(&before), path(&directory(&written))], "");
    let output = cleanhands(&["policy", "diff", path(&before), path(&directory(&wider))], "");
    let shown = text(&output.stdout);

    assert_eq!(same.status.code(), Some(0), "{}", text(&same.stdout));
    assert_eq!(output.status.code(), Some(3), "{shown}");
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(
        lines,
        [
            "+ dev: POST https://api.example:443/repos/**: \
             denied -> allowed, credential \"github\"",
            "+ dev: https://git.example:443 git push to acme/*: denied -> allowed",
        ]
    );
    let less = directory("[sandbox]\nmemory = \"1GiB\"\n");
    let output = cleanhands(&["--json", "policy", "diff", path(&before), path(&less)], "");
    let shown = text(&output.stdout);
    assert!(shown.contains("[sandbox] is another one"), "{shown}");
    assert!(shown.contains("connections to db.example:5432") || shown.contains("db.example:5432"));
}

fn record(more: &Value) -> String {
    let mut record = json!({"seq": 1, "time": "t", "kind": "allowed", "calls": [], "generation": 1,
        "hash": "h", "environment": "dev", "entry": "http", "port": 443});
    for (key, value) in more.as_object().expect("an object") {
        record[key] = value.clone();
    }
    record.to_string() + "\n"
}

#[test]
fn replay_shows_what_would_have_been_judged_otherwise() {
    let dir = directory(RULES);
    let denied = |code: &str| format!("{code}: for a reason");
    let records = [
        // As before.
        json!({"host": "api.example", "method": "GET", "path": "/repos/a", "credential": "github"}),
        json!({"host": "api.example", "method": "GET", "path": "/repos/a"}),
        json!({"entry": "tunnel", "host": "db.example", "port": 5432}),
        json!({"kind": "denied", "host": "api.example", "method": "PUT", "path": "/repos/a",
            "reason": denied("method_not_listed")}),
        json!({"host": "git.example", "method": "GET", "path": "/acme/w/info/refs"}),
        json!({"kind": "denied", "host": "git.example", "method": "GET",
            "path": "/acme/w/info/refs", "reason": denied("push_not_allowed")}),
        // Otherwise.
        json!({"host": "api.example", "method": "GET", "path": "/user", "credential": "github"}),
        json!({"host": "api.example", "method": "GET", "path": "/user", "credential": "github"}),
        json!({"kind": "denied", "host": "api.example", "method": "GET", "path": "/repos/b",
            "reason": denied("path_not_listed")}),
        json!({"host": "api.example", "method": "GET", "path": "/repos/a", "credential": "other"}),
        json!({"environment": "gone", "host": "api.example", "method": "GET", "path": "/"}),
        // Not a policy's, or not enough.
        json!({"kind": "denied", "host": "api.example", "method": "GET", "path": "/repos/a",
            "reason": denied("credential_missing")}),
        json!({"kind": "denied", "host": "api.example", "reason": denied("path_not_listed"),
            "repeated": 9}),
        // No decisions.
        json!({"kind": "outcome", "host": "api.example", "method": "GET", "path": "/user"}),
        json!({"kind": "note", "reason": "a note"}),
    ];
    let lines: String = records.iter().map(record).collect();

    let args = ["policy", "replay", "-", "--policies", path(&dir)];
    let output = cleanhands(&args, &lines);
    let shown = text(&output.stdout);

    assert_eq!(output.status.code(), Some(3), "{shown}{}", text(&output.stderr));
    for line in [
        "-      2  dev: GET api.example:443/user: allowed, credential github -> denied",
        "+      1  dev: GET api.example:443/repos/b: denied -> allowed, credential github",
        "~      1  dev: GET api.example:443/repos/a: allowed, credential other -> allowed, \
         credential github",
        "-      1  gone: GET api.example:443/: allowed -> denied: the environment is gone",
        "6 as before, 5 otherwise; 2 left out, which no policy decided or which do not say enough",
    ] {
        assert!(shown.lines().any(|found| found == line), "{line}: {shown}");
    }
    assert_eq!(shown.lines().count(), 5, "{shown}");
    let broken = cleanhands(&args, "{\"seq\": 1}\n");
    assert_eq!(broken.status.code(), Some(1));
    assert!(text(&broken.stderr).contains("line 1"), "{}", text(&broken.stderr));
}
