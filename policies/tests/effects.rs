//! Two versions of a policy, compared by what they would do.

use policies::explain::effect::{Change, compare};
use policies::{Decision, EgressRequest, Host, PolicySet, Scheme};

fn set(text: &str) -> PolicySet {
    let found = PolicySet::parse(&[("dev.toml".to_owned(), text.to_owned())]);
    found.unwrap_or_else(|found| panic!("{}", found[0]))
}

fn changes(before: &str, after: &str) -> Vec<String> {
    let (before, after) = (set(before), set(after));
    let found =
        compare(before.environment("dev").map(|p| &**p), after.environment("dev").map(|p| &**p));
    found.expect("few classes").iter().map(Change::to_string).collect()
}

fn rule(rest: &str) -> String {
    format!("[[egress.allow]]\nhosts = [\"a.example\", \"*.b.example\"]\n{rest}\n")
}

const KEY: &str = "[credentials.key]\nsecret = \"local:key\"\ninject = { bearer = true }\n\
                   hosts = [\"a.example\", \"*.b.example\"]\n";

#[test]
fn the_same_effect_in_other_words_is_no_change() {
    let one = rule("methods = [\"GET\", \"HEAD\"]\npaths = [\"/a/**\", \"/b\"]");
    let two = rule("methods = [\"HEAD\"]\npaths = [\"/b\", \"/a/**\"]")
        + &rule("methods = [\"GET\"]\npaths = [\"/a/**\", \"/b\", \"/a/x\"]");

    assert_eq!(changes(&one, &two), [""; 0]);
    assert_eq!(changes(&one, &one), [""; 0]);
}

#[test]
fn what_lets_the_sandbox_read_an_lfs_servers_credentials_is_a_change() {
    let lfs = |rest: &str| rule(&format!("credential = \"key\"\n{rest}")) + KEY;
    for (paths, shown) in [("", "/**"), ("paths = [\"/a/*/**\"]", "/a/*/**")] {
        let told = changes(&lfs(paths), &lfs(&format!("{paths}\nlfs = true")));

        let expected = format!(
            "any method https://a.example:443{shown} (batches of LFS): denied -> allowed, \
             credential \"key\""
        );
        assert!(told.contains(&expected), "{told:?}");
        assert_eq!(told.len(), 2, "one for each host: {told:?}");
    }
}

#[test]
fn each_kind_of_change_is_told_by_what_it_does() {
    let get = rule("methods = [\"GET\"]\npaths = [\"/a/**\"]");
    for (before, after, expected) in [
        (
            get.clone(),
            rule("methods = [\"GET\"]\npaths = [\"/a/**\", \"/c/*/d\"]"),
            "GET https://a.example:443/c/*/d: denied -> allowed",
        ),
        (
            get.clone(),
            rule("methods = [\"GET\", \"POST\"]\npaths = [\"/a/**\"]"),
            "POST https://*.b.example:443/a/**: denied -> allowed",
        ),
        (
            get.clone(),
            rule("methods = [\"GET\"]\npaths = [\"/a\"]"),
            "GET https://a.example:443/a/**: allowed -> denied",
        ),
        (
            get.clone(),
            rule("paths = [\"/a/**\"]"),
            "any other method https://a.example:443/a/**: denied -> allowed",
        ),
        (
            get.clone(),
            rule("methods = [\"GET\"]"),
            "GET https://a.example:443 (any other): denied -> allowed",
        ),
        (
            get.clone(),
            rule("methods = [\"GET\"]"),
            "GET https://a.example:443 (ambiguous paths): denied -> allowed",
        ),
        (get.clone(), String::new(), "GET https://a.example:443/a/**: allowed -> denied"),
        (
            get.clone(),
            rule("methods = [\"GET\"]\npaths = [\"/a/**\"]\naddresses = [\"10.0.0.0/8\"]"),
            "GET https://a.example:443/a/**: allowed -> allowed, may lead to 10.0.0.0/8",
        ),
        (
            get.clone(),
            rule("methods = [\"GET\"]\npaths = [\"/a/**\"]\ncredential = \"key\"") + KEY,
            "GET https://a.example:443/a/**: allowed -> allowed, credential \"key\"",
        ),
        (
            rule(""),
            rule("methods = [\"GET\"]"),
            "connections to a.example:443: passed on unread -> allowed",
        ),
        (
            rule(""),
            rule("methods = [\"GET\"]"),
            "any other method https://a.example:443/**: allowed -> denied",
        ),
        (
            rule(""),
            rule("ports = [443, 5432]"),
            "connections to *.b.example:5432: denied -> passed on unread",
        ),
        (
            rule("git = { repositories = [\"acme/*\"] }"),
            rule("git = { repositories = [\"acme/*\"], push = true }"),
            "https://a.example:443 git push to acme/*: denied -> allowed",
        ),
        (
            rule("methods = [\"GET\"]\ncredential = \"key\"") + KEY,
            rule("methods = [\"GET\"]\ncredential = \"key\"")
                + &KEY.replace("local:key", "local:other"),
            "the credential is defined otherwise",
        ),
    ] {
        let found = changes(&before, &after);

        assert!(found.iter().any(|change| change.contains(expected)), "{expected}: {found:#?}");
    }
}

#[test]
fn what_stays_is_not_told_and_the_order_of_rules_counts() {
    let open = rule("methods = [\"GET\"]\npaths = [\"/x\", \"/z/**\"]");
    let keyed = rule("methods = [\"GET\"]\npaths = [\"/x\", \"/y\"]\ncredential = \"key\"");
    let before = format!("{keyed}{open}{KEY}");
    let after = format!("{open}{keyed}{KEY}");

    let found = changes(&before, &after);

    assert_eq!(found.len(), 2, "{found:#?}");
    let told = "GET https://a.example:443/x: allowed, credential \"key\" -> allowed";
    assert!(found.iter().any(|change| change == told), "{found:#?}");
}

#[test]
fn too_many_classes_are_said_and_not_left_out() {
    let path = |literal: usize| {
        let segments: Vec<_> = (0..24).map(|at| if at == literal { "x" } else { "*" }).collect();
        format!("\"/{}\"", segments.join("/"))
    };
    let paths: Vec<_> = (0..24).map(path).collect();
    let text = rule(&format!("methods = [\"GET\"]\npaths = [{}]", paths.join(", ")));
    let (before, after) = (set(&text), set(&rule("methods = [\"GET\"]")));

    let found =
        compare(before.environment("dev").map(|p| &**p), after.environment("dev").map(|p| &**p));

    assert!(found.unwrap_err().contains("too many stars"));
}

/// Whatever request one asks: where the two versions differ, some change tells of it.
#[test]
fn no_difference_is_missed_over_many_small_policies() {
    let paths = ["/a", "/a/", "/a/*", "/a/**", "/*", "/*/b", "/**", "/a/b/c", "/*/*/c"];
    let asked = [
        "/", "/a", "/a/", "/z", "/z/", "/a/b", "/a/z", "/z/b", "/z/z", "/a/b/c", "/a/z/c",
        "/z/z/c", "/z/z/z", "/a/b/c/d",
    ];
    let host = Host::parse("a.example").expect("a name");
    for one in 0..paths.len() {
        for two in 0..paths.len() {
            for three in 0..paths.len() {
                let before = rule(&format!(
                    "methods = [\"GET\"]\npaths = [\"{}\", \"{}\"]",
                    paths[one], paths[two]
                ));
                let after = rule(&format!("methods = [\"GET\"]\npaths = [\"{}\"]", paths[three]));
                let (old, new) = (set(&before), set(&after));
                let (old, new) =
                    (old.environment("dev").expect("dev"), new.environment("dev").expect("dev"));
                let decided = |policy: &policies::Policy, path: &str| {
                    let (scheme, port, method) = (Scheme::Https, 443, "GET");
                    let request =
                        EgressRequest { scheme, host: &host, port, method, path, query: None };
                    matches!(policy.decide(&request), Decision::Allowed(_))
                };
                let differs = asked.iter().any(|path| decided(old, path) != decided(new, path));
                let told = !compare(Some(old), Some(new)).expect("few classes").is_empty();
                assert_eq!(differs, told, "{before}{after}");
            }
        }
    }
}
