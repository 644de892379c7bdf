//! Decisions over whole policies: requests in, permit or denial out, with the stated reason.

use std::sync::Arc;

use policies::{
    ConnectDecision, Credential, Decision, DenialCode, EgressRequest, Host, HostPattern, Permit,
    Policy, PolicySet, Scheme, explain,
};

const SAMPLE: &str = r#"
description = "sample"

[[egress.allow]]                       # 0
hosts = ["api.github.com"]
methods = ["GET", "POST"]
paths = ["/repos/acme/widget/**", "/user"]
credential = "github"

[[egress.allow]]                       # 1
hosts = ["github.com"]
git = { repositories = ["acme/widget", "acme/docs"], push = false }
credential = "github"

[[egress.allow]]                       # 2
hosts = ["db.corp.internal"]
ports = [5432]
addresses = ["10.2.0.0/16", "fd12::/32"]

[[egress.allow]]                       # 3
hosts = ["*.docs.example", "@mirror"]

[[egress.allow]]                       # 4
hosts = ["plain.example"]
plaintext = true
methods = ["GET"]

[[egress.allow]]                       # 5
hosts = ["192.168.7.7", "2001:db8::7"]

[[egress.allow]]                       # 6
hosts = ["push.example"]
git = { repositories = ["acme/widget"], push = true }

[credentials.github]
secret = "local:github"
inject = { bearer = true }
hosts = ["api.github.com", "github.com"]
env = "GITHUB_TOKEN"
"#;

const GROUPS: &str = "[groups]\nmirror = [\"mirror.example\", \"*.files.mirror.example\"]\n";

fn set(text: &str) -> PolicySet {
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let parsed = PolicySet::parse(&[file("sample.toml", text), file("groups.toml", GROUPS)]);
    parsed.unwrap_or_else(|found| {
        panic!("{}", found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n\n"))
    })
}

fn sample() -> Arc<Policy> {
    Arc::clone(set(SAMPLE).environment("sample").expect("set names the file sample.toml"))
}

fn host(text: &str) -> Host {
    Host::parse(text).expect("tests name valid hosts")
}

/// Decides `METHOD URL`.
fn decide(policy: &Policy, method: &str, url: &str) -> Decision {
    let (scheme, rest, port) = match url.split_once("://").expect("tests write a scheme") {
        ("https", rest) => (Scheme::Https, rest, 443),
        (_, rest) => (Scheme::Http, rest, 80),
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (name, port) = match authority.rsplit_once('#') {
        Some((name, port)) => (name, port.parse().expect("tests write a number behind #")),
        None => (authority, port),
    };
    let (path, query) = match path.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (path, None),
    };
    let host = host(name);
    policy.decide(&EgressRequest { scheme, host: &host, port, method, path, query })
}

fn allowed(policy: &Policy, method: &str, url: &str) -> Permit {
    match decide(policy, method, url) {
        Decision::Allowed(permit) => permit,
        Decision::Denied(denial) => panic!("{method} {url}: {denial}"),
    }
}

#[test]
fn first_matching_rule_gives_the_permit_and_its_credential() {
    let policy = sample();
    for (method, url, rule, credential) in [
        ("GET", "https://api.github.com/repos/acme/widget/issues", 0, Some("github")),
        ("POST", "https://api.github.com/repos/acme/widget", 0, Some("github")),
        ("GET", "https://api.github.com/repos/acme/%77idget/", 0, Some("github")),
        ("GET", "https://API.github.com./user", 0, Some("github")),
        (
            "GET",
            "https://github.com/acme/widget.git/info/refs?service=git-upload-pack",
            1,
            Some("github"),
        ),
        ("POST", "https://github.com/Acme/Widget/git-upload-pack", 1, Some("github")),
        ("PUT", "https://db.corp.internal#5432/", 2, None),
        ("DELETE", "https://a.b.docs.example/x/../y", 3, None),
        ("GET", "https://mirror.example/", 3, None),
        ("GET", "https://eu.files.mirror.example/", 3, None),
        ("GET", "http://plain.example/x", 4, None),
        ("GET", "https://plain.example/x", 4, None),
        ("GET", "https://192.168.7.7/", 5, None),
        ("GET", "https://0xc0a80707/", 5, None),
        ("POST", "https://push.example/acme/widget.git/git-receive-pack", 6, None),
    ] {
        let permit = allowed(&policy, method, url);

        assert_eq!(permit.rule(), format!("egress.allow[{rule}]"), "{method} {url}");
        assert_eq!(permit.credential().map(|c| c.name.as_str()), credential, "{method} {url}");
    }
}

#[test]
fn what_no_rule_matches_is_denied_for_the_stated_reason() {
    use DenialCode::*;
    let policy = sample();
    for (method, url, code, rule) in [
        ("GET", "https://evil.example/", HostNotListed, None),
        ("GET", "https://docs.example/", HostNotListed, None),
        ("GET", "https://uploads.github.com/", HostNotListed, None),
        ("GET", "https://api.github.com.evil.example/user", HostNotListed, None),
        ("GET", "https://127.0.0.1/", HostNotListed, None),
        ("GET", "https://0xa9fea9fe/", HostNotListed, None),
        ("GET", "https://api.github.com#8443/user", PortNotListed, Some(0)),
        ("GET", "http://api.github.com/user", PortNotListed, Some(0)),
        ("GET", "http://api.github.com#443/user", PlaintextNotAllowed, Some(0)),
        ("DELETE", "https://api.github.com/repos/acme/widget", MethodNotListed, Some(0)),
        ("get", "https://api.github.com/user", MethodNotListed, Some(0)),
        ("TRACE", "https://api.github.com/user", MethodForbidden, None),
        ("trace", "https://a.docs.example/", MethodForbidden, None),
        ("CONNECT", "https://a.docs.example/", MethodForbidden, None),
        ("GET", "https://api.github.com/repos/acme/widgets", PathNotListed, Some(0)),
        ("GET", "https://api.github.com/User", PathNotListed, Some(0)),
        ("GET", "https://api.github.com/user/", PathNotListed, Some(0)),
        ("GET", "https://api.github.com/repos/acme/widget/../other", PathAmbiguous, Some(0)),
        ("GET", "https://api.github.com/repos/acme/widget%2f..%2fother", PathAmbiguous, Some(0)),
        ("GET", "https://api.github.com/repos/acme/widget/%2e%2e/x", PathAmbiguous, Some(0)),
        ("GET", "https://api.github.com//user", PathAmbiguous, Some(0)),
        ("GET", "https://api.github.com", PathAmbiguous, Some(0)),
        (
            "GET",
            "https://github.com/acme/other/info/refs?service=git-upload-pack",
            RepositoryNotListed,
            Some(1),
        ),
        (
            "GET",
            "https://github.com/acme/widget/info/refs?service=git-receive-pack",
            PushNotAllowed,
            Some(1),
        ),
        ("POST", "https://github.com/acme/widget/git-receive-pack", PushNotAllowed, Some(1)),
        ("GET", "https://github.com/acme/widget", PathNotListed, Some(1)),
        (
            "GET",
            "https://github.com/acme/widget/../other/info/refs?service=git-upload-pack",
            PathAmbiguous,
            Some(1),
        ),
        ("POST", "http://plain.example/", MethodNotListed, Some(4)),
    ] {
        match decide(&policy, method, url) {
            Decision::Allowed(permit) => panic!("{method} {url} allowed by {}", permit.rule()),
            Decision::Denied(denial) => {
                assert_eq!(denial.code, code, "{method} {url}: {denial}");
                let rule = rule.map(|n| format!("egress.allow[{n}]"));
                assert_eq!(denial.rule, rule, "{method} {url}: {denial}");
            }
        }
    }
}

#[test]
fn a_rule_with_a_credential_has_no_batch_of_lfs_unless_it_says_so() {
    let rule = |rest: &str| format!("[[egress.allow]]\nhosts = [\"a.example\"]\n{rest}\n");
    let key = "[credentials.key]\nsecret = \"local:key\"\ninject = { bearer = true }\n\
               hosts = [\"a.example\"]\n";
    let batch = "https://a.example/acme/w.git/info/lfs/objects/batch";
    for (rest, allows) in [
        ("credential = \"key\"", false),
        ("credential = \"key\"\npaths = [\"/acme/**\"]", false),
        ("credential = \"key\"\npaths = [\"/acme/w.git/info/lfs/objects/batch\"]", false),
        ("credential = \"key\"\nlfs = true", true),
        ("methods = [\"POST\"]", true),
    ] {
        let text = rule(rest) + if allows && !rest.contains("key") { "" } else { key };
        let set = set(&text);
        let policy = set.environment("sample").unwrap();
        match decide(policy, "POST", batch) {
            Decision::Allowed(_) => assert!(allows, "{rest}"),
            Decision::Denied(denial) => {
                assert!(!allows, "{rest}: {denial}");
                assert_eq!(denial.code, DenialCode::LfsNotAllowed);
                assert_eq!(denial.rule.as_deref(), Some("egress.allow[0]"));
                assert!(denial.hint.unwrap().contains("lfs = true"));
            }
        }
        let locks = batch.replace("objects/batch", "locks");
        assert_eq!(allowed_or_not(policy, &locks), !rest.contains("objects"), "{rest}");
    }
    let odd = "https://a.example//acme/w.git/info/lfs/objects%2fbatch";
    let set = set(&(rule("credential = \"key\"") + key));
    assert!(!allowed_or_not(set.environment("sample").unwrap(), odd));
}

fn allowed_or_not(policy: &Policy, url: &str) -> bool {
    matches!(decide(policy, "POST", url), Decision::Allowed(_))
}

#[test]
fn hints_point_to_what_would_be_allowed() {
    let policy = sample();
    for (method, url, hint) in [
        ("GET", "https://docs.example/", "\"*.docs.example\" covers what is below docs.example"),
        ("GET", "https://uploads.github.com/", "it lists api.github.com, github.com"),
        ("GET", "https://8.8.8.8/", "it lists api.github.com"),
        ("GET", "https://api.github.com#8443/user", "it allows port 443"),
        ("GET", "http://api.github.com/user", "plain http needs plaintext = true"),
        ("DELETE", "https://api.github.com/user", "it allows GET, POST"),
        ("GET", "https://api.github.com/x", "it allows /repos/acme/widget/**, /user"),
        ("POST", "https://github.com/acme/widget/git-receive-pack", "push = true"),
    ] {
        let Decision::Denied(denial) = decide(&policy, method, url) else { panic!("{url}") };

        assert!(denial.hint.as_ref().unwrap().contains(hint), "{url}: {denial:?}");
    }
}

#[test]
fn at_connect_tunnels_what_nobody_needs_to_see_and_inspects_the_rest() {
    let policy = sample();
    for (name, port, expected) in [
        ("api.github.com", 443, "inspect"),
        ("github.com", 443, "inspect"),
        ("db.corp.internal", 5432, "tunnel egress.allow[2]"),
        ("x.docs.example", 443, "tunnel egress.allow[3]"),
        ("plain.example", 80, "inspect"),
        ("2001:db8::7", 443, "tunnel egress.allow[5]"),
        ("evil.example", 443, "deny host_not_listed"),
        ("db.corp.internal", 443, "deny port_not_listed"),
        ("x.docs.example", 80, "deny port_not_listed"),
    ] {
        let found = match policy.at_connect(&host(name), port) {
            ConnectDecision::Inspect => "inspect".to_owned(),
            ConnectDecision::Tunnel(permit) => format!("tunnel {}", permit.rule()),
            ConnectDecision::Deny(denial) => format!("deny {}", denial.code),
        };
        assert_eq!(found, expected, "{name}:{port}");
    }
}

#[test]
fn a_tunnel_never_passes_by_a_rule_that_needs_to_see_requests() {
    let text = "[[egress.allow]]\nhosts = [\"a.t.example\"]\nmethods = [\"GET\"]\n\
                [[egress.allow]]\nhosts = [\"*.t.example\"]\n";
    let set = set(text);
    let policy = set.environment("sample").unwrap();

    assert!(matches!(policy.at_connect(&host("a.t.example"), 443), ConnectDecision::Inspect));
    assert!(matches!(policy.at_connect(&host("b.t.example"), 443), ConnectDecision::Tunnel(_)));
    assert_eq!(allowed(policy, "POST", "https://a.t.example/").rule(), "egress.allow[1]");
}

#[test]
fn only_listed_names_are_resolved() {
    let policy = sample();
    for (name, expected) in [
        ("api.github.com", true),
        ("x.docs.example", true),
        ("docs.example", false),
        ("c2VjcmV0.evil.example", false),
    ] {
        assert_eq!(policy.resolvable(&host(name)), expected, "{name}");
    }
    assert_eq!(policy.ports(), [80, 443, 5432].into());
}

#[test]
fn addresses_are_judged_before_the_dial() {
    let policy = sample();
    let db = allowed(&policy, "GET", "https://db.corp.internal#5432/");
    let docs = allowed(&policy, "GET", "https://a.docs.example/");
    let literal = allowed(&policy, "GET", "https://192.168.7.7/");
    use DenialCode::{AddressForbidden, AddressPrivate};
    for (permit, address, host_owned, expected) in [
        (&docs, "93.184.216.34", false, None),
        (&docs, "93.184.216.34", true, Some(AddressPrivate)),
        (&docs, "127.0.0.1", false, Some(AddressPrivate)),
        (&docs, "::ffff:10.2.0.1", false, Some(AddressPrivate)),
        (&docs, "10.2.0.1", false, Some(AddressPrivate)),
        (&docs, "::1", false, Some(AddressPrivate)),
        (&docs, "169.254.169.254", false, Some(AddressForbidden)),
        (&docs, "0.0.0.0", false, Some(AddressForbidden)),
        (&docs, "64:ff9b::5db8:d822", false, None),
        (&docs, "64:ff9b::7f00:1", false, Some(AddressPrivate)),
        (&docs, "2002:7f00:1::", false, Some(AddressPrivate)),
        (&db, "10.2.3.4", false, None),
        (&db, "::ffff:10.2.3.4", false, None),
        (&db, "10.2.3.4", true, None),
        (&db, "fd12::9", false, None),
        (&db, "10.3.0.1", false, Some(AddressPrivate)),
        (&db, "64:ff9b::a02:304", false, Some(AddressPrivate)),
        (&db, "fd00:ec2::254", false, Some(AddressForbidden)),
        (&literal, "192.168.7.7", false, None),
        (&literal, "192.168.7.8", false, Some(AddressPrivate)),
    ] {
        let found = permit.address_allowed(address.parse().unwrap(), host_owned);
        let code = found.as_ref().err().map(|denial| denial.code);
        assert_eq!(code, expected, "{} {address}", permit.host());
    }
}

#[test]
fn a_metadata_address_needs_a_rule_that_names_it_and_no_other() {
    let permit = |rule: &str| {
        let text = format!("[[egress.allow]]\nports = [80]\nplaintext = true\n{rule}\n");
        let set = PolicySet::parse(&[("dev.toml".into(), text)]).expect("a right file");
        let name = if rule.contains("meta.example") { "meta.example" } else { "169.254.169.254" };
        let policy = Arc::clone(set.environment("dev").expect("the file's own"));
        match policy.at_connect(&host(name), 80) {
            ConnectDecision::Tunnel(permit) => permit,
            other => panic!("{other:?}"),
        }
    };
    let metadata = "169.254.169.254".parse().unwrap();
    let allowed = |rule: &str| permit(rule).address_allowed(metadata, false).is_ok();

    assert!(allowed("hosts = [\"169.254.169.254\"]"));
    assert!(allowed("hosts = [\"meta.example\"]\naddresses = [\"169.254.169.254\"]"));
    assert!(!allowed("hosts = [\"meta.example\"]\naddresses = [\"169.254.169.253\"]"));
    assert!(!allowed("hosts = [\"meta.example\"]\naddresses = [\"168.0.0.0/7\"]"));
    assert!(!allowed("hosts = [\"meta.example\"]"));
}

#[test]
fn explain_names_every_rule_and_agrees_with_the_decision() {
    let policy = sample();
    let host = host("api.github.com");
    for (method, path, allowed) in [("GET", "/user", true), ("PUT", "/user", false)] {
        let request = EgressRequest {
            scheme: Scheme::Https,
            host: &host,
            port: 443,
            method,
            path,
            query: None,
        };

        let explanation = explain(&policy, &request);

        assert_eq!(explanation.allowed, allowed, "{explanation}");
        assert_eq!(explanation.steps.len(), 7);
        assert_eq!(allowed, explanation.steps[0].verdict == "matches", "{explanation}");
        assert_eq!(allowed, explanation.steps[6].verdict == "not reached", "{explanation}");
    }
}

#[test]
fn an_environment_may_narrow_to_hosts_that_a_rule_covers() {
    let policy = sample();
    let covering =
        |text: &str| policy.covering_rule(&HostPattern::parse(text).unwrap()).map(str::to_owned);

    assert_eq!(covering("api.github.com").as_deref(), Some("egress.allow[0]"));
    assert_eq!(covering("*.x.docs.example").as_deref(), Some("egress.allow[3]"));
    assert_eq!(covering("*.github.com"), None);
    assert_eq!(covering("evil.example"), None);
}

#[test]
fn harness_reaches_mcp_servers_at_their_path_and_nothing_else() {
    let mcp = "[mcp.tracker]\nurl = \"https://mcp.tracker.example:8443/mcp\"\n";
    let text = format!("{SAMPLE}\n{mcp}");
    let policy = set(&text).environment("sample").unwrap().for_mcp();

    let permit = allowed(&policy, "POST", "https://mcp.tracker.example#8443/mcp");
    assert_eq!(permit.rule(), "mcp.tracker");
    for url in ["https://mcp.tracker.example#8443/other", "https://api.github.com/user"] {
        assert!(matches!(decide(&policy, "GET", url), Decision::Denied(_)), "{url}");
    }
}

#[test]
fn access_lists_admit_by_name_or_number() {
    let text = "[access]\nusers = [\"alice\", \"uid:1001\"]\ngroups = [\"dev\", \"gid:50\"]\n";
    let set = set(text);
    let access = &set.environment("sample").unwrap().access;

    assert!(access.admits(7, Some("alice"), &[], &[]));
    assert!(access.admits(1001, None, &[], &[]));
    assert!(access.admits(7, None, &[50], &[]));
    assert!(access.admits(7, Some("bob"), &[], &["dev"]));
    assert!(!access.admits(7, Some("bob"), &[51], &["ops"]));
    assert!(!access.admits(0, Some("root"), &[0], &["root"]));
    assert!(sample().access.admits(7, None, &[], &[]));
}

#[test]
fn a_rule_gives_a_certificate_and_what_goes_into_the_request_each_for_its_own_hosts() {
    let text = r#"
        [[egress.allow]]
        hosts = ["both.example"]
        credential = ["corp", "token"]
        [[egress.allow]]
        hosts = ["one.example"]
        credential = "corp"
        [mcp.tracker]
        url = "https://both.example/mcp"
        credential = ["token", "corp"]
        [credentials.corp]
        secret = "local:corp"
        inject = { client-certificate = true }
        hosts = ["both.example", "one.example"]
        [credentials.token]
        secret = "local:token"
        inject = { bearer = true }
        hosts = ["both.example"]
    "#;
    let policy = Arc::clone(set(text).environment("sample").unwrap());
    let name = |credential: Option<&Arc<Credential>>| credential.map(|c| c.name.clone());
    let both = allowed(&policy, "GET", "https://both.example/");
    let one = allowed(&policy, "GET", "https://one.example/");
    let mcp = allowed(&policy.for_mcp(), "POST", "https://both.example/mcp");

    for (permit, put_in, shown, all) in [
        (&both, Some("token"), "corp", "token, corp"),
        (&one, None, "corp", "corp"),
        (&mcp, Some("token"), "corp", "token, corp"),
    ] {
        assert_eq!(name(permit.credential()).as_deref(), put_in);
        assert_eq!(name(permit.certificate()).as_deref(), Some(shown));
        assert_eq!(permit.carries().as_deref(), Some(all));
    }
    // The connection is opened here, or there would be nothing to show the certificate on.
    for host in [host("both.example"), host("one.example")] {
        assert!(matches!(policy.at_connect(&host, 443), ConnectDecision::Inspect));
    }
}
