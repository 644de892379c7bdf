//! What an operator sees of rules that decide nothing, and of credentials that no rule uses up.

use policies::{Diagnostic, PolicySet, Severity};

fn found_in(text: &str) -> Vec<Diagnostic> {
    match PolicySet::parse(&[("dev.toml".to_owned(), text.to_owned())]) {
        Ok(set) => set.warnings().to_vec(),
        Err(found) => found,
    }
}

/// Rules on `a.example`, as inline tables, and whether the last one is an error, a warning or
/// nothing.
const ORDERS: &[(&[&str], Option<Severity>)] = &[
    (&["methods = ['GET']", "methods = ['GET']"], Some(Severity::Warning)),
    (&["paths = ['/a/**']", "paths = ['/a/b', '/a/c/*']"], Some(Severity::Warning)),
    (&["paths = ['/a/*']", "paths = ['/a/*/b']"], None),
    (&["paths = ['/a/**']", "paths = ['/a/b', '/b']"], None),
    (&["paths = ['/a/**']\nmethods = ['GET']", "paths = ['/a/b']"], None),
    (&["paths = ['/**']", "methods = ['GET']"], None),
    (&["paths = ['/a/**']", "paths = ['/a/b']\ncredential = 'c'"], Some(Severity::Error)),
    (
        &["paths = ['/a/**']\ncredential = 'c'", "paths = ['/a/b']\ncredential = 'c'"],
        Some(Severity::Warning),
    ),
    // Two together.
    (&["paths = ['/a']", "paths = ['/b']", "paths = ['/b', '/a']"], Some(Severity::Warning)),
    (
        &["methods = ['GET']", "methods = ['PUT']", "methods = ['GET', 'PUT']\npaths = ['/a']"],
        Some(Severity::Warning),
    ),
    (&["methods = ['GET']", "methods = ['PUT']", "methods = ['GET', 'POST']"], None),
    (&["ports = [443]", "ports = [8443]", "ports = [443, 8443]"], Some(Severity::Warning)),
    (&["methods = ['GET']", "methods = ['GET']\nplaintext = true"], None),
    // Git.
    (
        &[
            "git = { repositories = ['a/*'], push = true }",
            "git = { repositories = ['a/b'], push = false }",
        ],
        Some(Severity::Error),
    ),
    (
        &[
            "git = { repositories = ['a/b'], push = false }",
            "git = { repositories = ['a/b'], push = true }",
        ],
        None,
    ),
    (
        &["git = { repositories = ['a/*'] }", "git = { repositories = ['a/B', 'a/c.git'] }"],
        Some(Severity::Warning),
    ),
    (&["git = { repositories = ['a/b'] }", "git = { repositories = ['a/*'] }"], None),
    (&["paths = ['/*/**']", "git = { repositories = ['a/b'] }"], Some(Severity::Warning)),
    (&["paths = ['/a/**']", "git = { repositories = ['a/b'] }"], None),
    (&["paths = ['/**']\nmethods = ['GET']", "git = { repositories = ['a/b'] }"], None),
    (&["git = { repositories = ['a/b'] }", "paths = ['/a/b/info/refs']"], None),
];

#[test]
fn a_rule_that_others_leave_nothing_to_is_found_in_whatever_shape() {
    for (rules, expected) in ORDERS {
        let rules: Vec<String> = rules
            .iter()
            .map(|rule| format!("[[egress.allow]]\nhosts = [\"a.example\"]\n{rule}\n"))
            .collect();
        let mut text = rules.concat();
        if text.contains("credential") {
            text += "[credentials.c]\nsecret = \"local:c\"\ninject = { bearer = true }\n\
                     hosts = [\"a.example\"]\n";
        }

        let found = found_in(&text);

        let last = format!("egress.allow[{}] never decides", rules.len() - 1);
        assert!(found.iter().all(|one| one.to_string().contains(&last)), "{text}: {found:#?}");
        assert_eq!(found.first().map(|one| one.severity), *expected, "{text}: {found:#?}");
    }
}

#[test]
fn a_credential_whose_own_hosts_lie_outside_its_rules_is_a_warning() {
    let text = "[[egress.allow]]\nhosts = [\"x.a.example\"]\ncredential = \"c\"\n\
                [[egress.allow]]\nhosts = [\"open.example\"]\n\
                [credentials.c]\nsecret = \"local:c\"\ninject = INJECT\nhosts = OWN\n";
    let bearer = "{ bearer = true }";
    for (inject, own, beyond) in [
        (bearer, "[\"x.a.example\"]", None),
        (bearer, "[\"*.a.example\"]", None),
        (bearer, "[\"x.a.example\", \"b.example\"]", Some("goes to b.example in no rule")),
        (bearer, "[\"*.a.example\", \"*.b.example\"]", Some("goes to *.b.example in no rule")),
        // A rule for that host is none that uses it.
        (bearer, "[\"*.a.example\", \"open.example\"]", Some("goes to open.example in no rule")),
        // The vault asks such a server itself.
        ("{ registry = \"u\" }", "[\"x.a.example\", \"login.example\"]", None),
    ] {
        let text = text.replace("INJECT", inject).replace("OWN", own);

        let found = found_in(&text);

        assert_eq!(found.len(), usize::from(beyond.is_some()), "{text}: {found:#?}");
        if let Some(part) = beyond {
            assert_eq!(found[0].severity, Severity::Warning);
            assert!(found[0].to_string().contains(part), "{}", found[0]);
        }
    }
}
