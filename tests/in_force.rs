//! Promise: the command says which state of the files each daemon goes by, and when that is not the
//! state in which they are.
use cleanhands_tests::installation::{DAEMONS, Installation, Setup};
use cleanhands_tests::wait;
use serde_json::Value;

/// What `cleanhands doctor` finds about the files in force: grade and text of each.
fn in_force(installation: &Installation) -> Vec<(String, String)> {
    let output = installation.command(&["doctor", "--json"]).output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let findings = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    findings
        .filter(|finding| finding["what"] == "in force")
        .map(|finding| (text(&finding, "grade"), text(&finding, "text")))
        .collect()
}

fn append(path: &std::path::Path, text: &str) {
    let old = std::fs::read_to_string(path).unwrap();
    std::fs::write(path, old + text).unwrap();
}

/// The finding about one daemon.
fn of<'a>(found: &'a [(String, String)], daemon: &str) -> &'a (String, String) {
    found.iter().find(|(_, text)| text.starts_with(&format!("{daemon}: "))).unwrap()
}

#[test]
fn the_command_shows_what_each_daemon_goes_by_and_says_when_the_files_are_others() {
    let mut installation = Installation::start(&Setup::default().policy("dev", ""));
    let layout = installation.layout.clone();

    let first = wait::until("the daemons to have read their files", || {
        let found = in_force(&installation);
        (found.len() == DAEMONS.len()).then_some(found)
    });
    let policies = |found: &[(String, String)]| {
        let digest = |text: &str| text.split([' ', ',']).nth(2).unwrap().to_owned();
        DAEMONS.map(|daemon| digest(&of(found, daemon).1))
    };
    assert!(first.iter().all(|(grade, _)| grade == "good"), "{first:?}");
    let [proxyd, sandboxd, harnessd] = policies(&first);
    assert!(proxyd == sandboxd && proxyd == harnessd && proxyd.len() == 12, "{first:?}");

    append(&layout.policies.join("dev.toml"), "description = \"another\"\n");
    let second = wait::until("the daemons to go by the changed policy", || {
        let found = in_force(&installation);
        found.iter().all(|(grade, _)| grade == "good").then_some(found)
    });
    assert!(policies(&second).iter().all(|digest| *digest != proxyd), "{second:?}");

    for daemon in DAEMONS {
        append(&layout.config.join(format!("{daemon}.toml")), "# changed\n");
        let found = in_force(&installation);
        let (grade, text) = of(&found, daemon);
        assert!(grade == "bad" && text.contains(&format!("{daemon}.toml is ")), "{found:?}");
        installation.stop(daemon);
        installation.start_daemon(daemon);
        assert_eq!(of(&in_force(&installation), daemon).0, "good", "{daemon} started again");
    }
}

#[test]
fn daemons_that_go_by_different_policies_are_told_of() {
    let mut installation = Installation::start(&Setup::default().policy("dev", ""));
    let layout = installation.layout.clone();

    // A socket that takes connections may belong to a daemon that has not read its files yet.
    wait::until("the daemons to have read their files", || {
        (in_force(&installation).len() == DAEMONS.len()).then_some(())
    });
    // proxyd has read good files and keeps them; sandboxd starts before files that do not parse.
    append(&layout.policies.join("dev.toml"), "nonsense\n");
    installation.stop("sandboxd");
    installation.start_daemon("sandboxd");

    let found = in_force(&installation);
    let different = found.iter().find(|(_, text)| text.contains("goes by other policies"));
    assert!(different.is_some_and(|(grade, _)| grade == "bad"), "{found:?}");
}
