//! The files of this folder, the samples of the manual, and the reading of a directory.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use policies::{
    ConnectDecision, Decision, EgressRequest, Host, Inject, KEYS, PolicySet, SHIPPED, Scheme,
};

const MANUAL: &str = include_str!("../policy.5.md");

fn shipped() -> PolicySet {
    let files: Vec<_> = SHIPPED.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned())).collect();
    PolicySet::parse(&files).unwrap_or_else(|found| panic!("{found:#?}"))
}

fn allows(set: &PolicySet, environment: &str, method: &str, host: &str, path: &str) -> bool {
    let host = Host::parse(host).expect("tests name valid hosts");
    let request =
        EgressRequest { scheme: Scheme::Https, host: &host, port: 443, method, path, query: None };
    let policy = set.environment(environment).expect("tests name shipped environments");
    matches!(policy.decide(&request), Decision::Allowed(_))
}

#[test]
fn shipped_files_are_right_and_without_warnings() {
    let set = shipped();

    assert_eq!(set.names().collect::<Vec<_>>(), ["demo", "dev", "harness", "locked", "packages"]);
    assert_eq!(set.warnings(), []);
}

#[test]
fn shipped_environments_allow_what_they_are_for_and_nothing_else() {
    let set = shipped();
    for (environment, method, host, path, expected) in [
        ("demo", "GET", "billing.example", "/invoices", true),
        ("demo", "GET", "evil.example", "/", false),
        ("dev", "GET", "api.github.com", "/repos/acme/widget/issues/1", true),
        ("dev", "DELETE", "api.github.com", "/repos/acme/widget", false),
        ("dev", "GET", "api.github.com", "/repos/acme/other", false),
        ("dev", "POST", "github.com", "/acme/widget.git/git-upload-pack", true),
        ("dev", "POST", "github.com", "/acme/widget.git/git-receive-pack", false),
        ("harness", "POST", "api.anthropic.com", "/v1/messages", true),
        ("harness", "GET", "api.anthropic.com", "/v1/files", false),
        ("locked", "GET", "example.com", "/", false),
        ("packages", "GET", "example.com", "/", false),
    ] {
        assert_eq!(
            allows(&set, environment, method, host, path),
            expected,
            "{method} {host}{path}"
        );
    }
    let locked = set.environment("locked").unwrap();
    assert!(locked.ports().is_empty() && locked.credentials.is_empty());
    let demo = set.environment("demo").unwrap();
    let billing = demo.credential("billing").unwrap();
    assert_eq!(
        (billing.secret.to_string(), &billing.inject),
        ("local:billing".into(), &Inject::Bearer)
    );
    assert_eq!(billing.env, ["BILLING_TOKEN"]);
    let host = Host::parse("billing.example").unwrap();
    assert!(matches!(demo.at_connect(&host, 443), ConnectDecision::Inspect));
}

#[test]
fn manual_names_every_key() {
    for (table, keys) in KEYS {
        for key in *keys {
            assert!(MANUAL.contains(&format!("**{key}**")), "{table}: {key}");
        }
    }
}

#[test]
fn samples_of_the_manual_are_right() {
    let mut samples = 0;
    for sample in MANUAL.split("```toml\n").skip(1) {
        let text = sample.split("```").next().unwrap();
        let (name, other) = match text.contains("[groups]") {
            true => ("groups.toml", "[sandbox]\n"),
            false => ("sample.toml", "[groups]\nregistries = []\n"),
        };
        let other_name = if name == "groups.toml" { "sample.toml" } else { "groups.toml" };
        let files = [(name, text), (other_name, other)].map(|(n, t)| (n.to_owned(), t.to_owned()));
        if let Err(found) = PolicySet::parse(&files) {
            panic!("{}\n\nin\n{text}", found[0]);
        }
        samples += 1;
    }
    assert!(samples >= 2);
}

fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("the temporary directory can be written");
    set_mode(dir.path(), 0o755);
    dir
}

fn write(dir: &Path, name: &str, text: &str, mode: u32) {
    fs::write(dir.join(name), text).expect("our own directory can be written");
    set_mode(&dir.join(name), mode);
}

/// Sets the mode whatever the umask is.
fn set_mode(path: &Path, mode: u32) {
    let mode = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, mode).expect("our own files can be changed");
}

#[test]
fn loads_a_directory_and_skips_what_is_no_policy() {
    let dir = directory();
    write(dir.path(), "dev.toml", "description = \"x\"\n", 0o644);
    write(dir.path(), "groups.toml", "[groups]\n", 0o644);
    write(dir.path(), "README.md", "not toml", 0o666);
    write(dir.path(), "Cargo.toml", "[package]", 0o666);
    write(dir.path(), ".dev.toml.swp.toml", "not toml", 0o644);

    let set = PolicySet::load(dir.path()).unwrap();

    assert_eq!(set.names().collect::<Vec<_>>(), ["dev"]);
    assert_eq!(set.environment("dev").unwrap().description, "x");
    assert!(set.environment("groups").is_none());
}

#[test]
fn refuses_files_and_directories_that_others_can_write() {
    for mode in [0o664, 0o646, 0o666] {
        let dir = directory();
        write(dir.path(), "dev.toml", "", mode);

        let found = PolicySet::load(dir.path()).unwrap_err();

        let shown = found[0].to_string();
        assert!(shown.contains("dev.toml: others can write it"), "{shown}");
        assert!(shown.contains("chmod go-w"), "{shown}");
    }
    let dir = directory();
    set_mode(dir.path(), 0o777);
    assert!(PolicySet::load(dir.path()).unwrap_err()[0].message.contains("others can write"));
}

#[test]
fn says_what_cannot_be_read_and_where_and_what_is_wrong_with_the_others() {
    let dir = directory();
    let missing = PolicySet::load(&dir.path().join("nowhere")).unwrap_err();
    assert!(missing[0].message.contains("no such file or directory"), "{}", missing[0]);

    fs::write(dir.path().join("a.toml"), b"# caf\xc3\xa9\ndescription = \"caf\xe9\"\n").unwrap();
    fs::write(dir.path().join("b.toml"), vec![b'#'; (1 << 20) + 1]).unwrap();
    fs::create_dir(dir.path().join("c.toml")).unwrap();
    fs::write(dir.path().join("d.toml"), "wrong = 1\n").unwrap();
    for name in ["a.toml", "b.toml", "c.toml", "d.toml"] {
        let mode = if name == "c.toml" { 0o755 } else { 0o644 };
        set_mode(&dir.path().join(name), mode);
    }
    let found = PolicySet::load(dir.path()).unwrap_err();
    let shown: Vec<_> = found.iter().map(|d| (d.line, d.column, d.message.as_str())).collect();
    assert_eq!(
        shown[..3],
        [
            (2, 19, "cannot read the policy: it is not UTF-8 from here on"),
            (0, 0, "cannot read the policy: larger than 1 MiB"),
            (0, 0, "cannot read the policy: not a regular file"),
        ]
    );
    assert!(shown.len() == 4 && shown[3].2.contains("wrong"), "{shown:?}");

    // What the others name of it may be right.
    fs::create_dir(dir.path().join("groups.toml")).unwrap();
    assert_eq!(PolicySet::load(dir.path()).unwrap_err().len(), 4);
}
