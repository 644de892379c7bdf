//! What becomes of a connection, by name and port alone: read where some rule needs to see its
//! requests, passed on unread where none does, whatever shapes the rules have and however they
//! overlap.
use policies::{ConnectDecision, Decision, EgressRequest, Host, PolicySet, Scheme};

const CREDENTIAL: &str = "[credentials.c]\nsecret = \"local:c\"\ninject = { bearer = true }\n";

/// Rules, and what a connection to each of these is: `tunnel RULE`, `inspect` or `deny`.
const TABLE: &[(&str, &[(&str, &str)])] = &[
    // Every key that names no request leaves a rule opaque.
    (
        r#"
        [[egress.allow]]
        hosts = ["a.example"]
        [[egress.allow]]
        hosts = ["db.example"]
        ports = [5432, 6432]
        addresses = ["10.0.0.0/8"]
        [[egress.allow]]
        hosts = ["plain.example"]
        plaintext = true
        [[egress.allow]]
        hosts = ["10.1.2.3", "2001:db8::1", "*.low.example", "@mirror"]
        "#,
        &[
            ("a.example:443", "tunnel 0"),
            ("a.example:80", "deny"),
            ("b.a.example:443", "deny"),
            ("db.example:5432", "tunnel 1"),
            ("db.example:6432", "tunnel 1"),
            ("db.example:443", "deny"),
            ("plain.example:80", "tunnel 2"),
            ("plain.example:443", "tunnel 2"),
            ("10.1.2.3:443", "tunnel 3"),
            ("[2001:db8::1]:443", "tunnel 3"),
            ("10.1.2.4:443", "deny"),
            ("x.low.example:443", "tunnel 3"),
            ("x.y.low.example:443", "tunnel 3"),
            ("low.example:443", "deny"),
            ("mirror.example:443", "tunnel 3"),
        ],
    ),
    // Every key that names a request or gives a credential makes it read.
    (
        r#"
        [[egress.allow]]
        hosts = ["methods.example"]
        methods = ["GET"]
        [[egress.allow]]
        hosts = ["paths.example"]
        paths = ["/**"]
        [[egress.allow]]
        hosts = ["git.example"]
        git = { repositories = ["a/b"], push = false }
        [[egress.allow]]
        hosts = ["secret.example"]
        credential = "c"
        "#,
        &[
            ("methods.example:443", "inspect"),
            ("paths.example:443", "inspect"),
            ("git.example:443", "inspect"),
            ("secret.example:443", "inspect"),
            ("secret.example:8443", "deny"),
        ],
    ),
    // One host of a wildcard has a credential: it is read, its neighbours are not.
    (
        r#"
        [[egress.allow]]
        hosts = ["secret.example.org"]
        credential = "c"
        [[egress.allow]]
        hosts = ["*.example.org"]
        "#,
        &[
            ("secret.example.org:443", "inspect"),
            ("x.secret.example.org:443", "tunnel 1"),
            ("other.example.org:443", "tunnel 1"),
            ("example.org:443", "deny"),
        ],
    ),
    // And the other way round: one host of a wildcard that is read is listed as opaque first.
    (
        r#"
        [[egress.allow]]
        hosts = ["open.example.org"]
        [[egress.allow]]
        hosts = ["*.example.org"]
        methods = ["GET"]
        "#,
        &[("open.example.org:443", "inspect"), ("other.example.org:443", "inspect")],
    ),
    // Ports are apart: what is read on one is passed on at another.
    (
        r#"
        [[egress.allow]]
        hosts = ["host.corp.example"]
        credential = "c"
        [[egress.allow]]
        hosts = ["host.corp.example"]
        ports = [5432]
        [[egress.allow]]
        hosts = ["host.corp.example"]
        ports = [8443]
        methods = ["GET"]
        [[egress.allow]]
        hosts = ["*.corp.example"]
        ports = [22, 8443]
        "#,
        &[
            ("host.corp.example:443", "inspect"),
            ("host.corp.example:5432", "tunnel 1"),
            ("host.corp.example:22", "tunnel 3"),
            ("host.corp.example:8443", "inspect"),
            ("other.corp.example:8443", "tunnel 3"),
            ("other.corp.example:5432", "deny"),
        ],
    ),
];

/// The credential may go wherever a rule that uses it goes.
fn file(rules: &str) -> String {
    if !rules.contains("credential") {
        return rules.to_owned();
    }
    let hosts = ["secret.example", "secret.example.org", "host.corp.example"];
    let used: Vec<_> = hosts.iter().filter(|h| rules.contains(&format!("[\"{h}\"]"))).collect();
    format!("{rules}\n{CREDENTIAL}hosts = {used:?}\n")
}

#[test]
fn a_connection_is_read_where_a_rule_needs_it_and_passed_on_where_none_does() {
    for (number, (rules, connections)) in TABLE.iter().enumerate() {
        let groups = "[groups]\nmirror = [\"mirror.example\"]\n";
        let files = [("dev.toml".into(), file(rules)), ("groups.toml".into(), groups.into())];
        let set = PolicySet::parse(&files).unwrap_or_else(|found| panic!("{number}: {found:?}"));
        let policy = set.environment("dev").unwrap();
        for (authority, expected) in *connections {
            let (host, port) = authority.rsplit_once(':').unwrap();
            let (host, port) = (Host::parse(host).unwrap(), port.parse().unwrap());

            let decision = policy.at_connect(&host, port);

            let found = match &decision {
                ConnectDecision::Deny(_) => "deny".to_owned(),
                ConnectDecision::Inspect => "inspect".to_owned(),
                ConnectDecision::Tunnel(permit) => {
                    assert!(permit.credential().is_none(), "a credential goes into a tunnel");
                    permit.rule().replace("egress.allow[", "tunnel ").replace(']', "")
                }
            };
            assert_eq!(found, *expected, "{authority} in policy {number}");
            // No request on a denied connection would be allowed, if one were read.
            if found == "deny" {
                for (scheme, method) in [(Scheme::Https, "GET"), (Scheme::Http, "GET")] {
                    let host = &host;
                    let request =
                        EgressRequest { scheme, host, port, method, path: "/", query: None };
                    let decision = policy.decide(&request);
                    assert!(matches!(decision, Decision::Denied(_)), "{authority}");
                }
            }
        }
    }
}
