//! Budgets of rules: what may be written, what a permit says of them, what a change of them is.

use std::sync::Arc;

use policies::egress::budget::{Budget, Span};
use policies::explain::effect::{Change, compare};
use policies::{ConnectDecision, Decision, EgressRequest, Host, Policy, PolicySet, Scheme};

fn parse(text: &str) -> Result<Arc<Policy>, String> {
    let found = PolicySet::parse(&[("dev.toml".to_owned(), text.to_owned())]);
    let set = found.map_err(|found| found[0].to_string())?;
    Ok(Arc::clone(set.environment("dev").expect("the file is there")))
}

fn policy(text: &str) -> Arc<Policy> {
    parse(text).unwrap_or_else(|found| panic!("{found}"))
}

fn rule(rest: &str) -> String {
    format!("[[egress.allow]]\nhosts = [\"a.example\"]\n{rest}\n")
}

fn budget(policy: &Policy, method: &str) -> Arc<Budget> {
    let host = Host::parse("a.example").expect("a name");
    let (scheme, path, query) = (Scheme::Https, "/", None);
    let request = EgressRequest { scheme, host: &host, port: 443, method, path, query };
    match policy.decide(&request) {
        Decision::Allowed(permit) => Arc::clone(permit.budget().expect("the rule has a budget")),
        Decision::Denied(denial) => panic!("{denial}"),
    }
}

#[test]
fn a_permit_says_what_its_rule_allows_of_requests_and_bytes() {
    let policy =
        policy(&rule("methods = [\"GET\"]\nrate = \"60/minute\"\nbytes = \"100 MiB/day\""));

    let budget = budget(&policy, "GET");
    let (rate, bytes) = (budget.quotas.rate.unwrap(), budget.quotas.bytes.unwrap());

    assert_eq!((rate.amount, rate.span), (60, Span::Minute));
    assert_eq!((bytes.amount, bytes.span), (100 << 20, Span::Day));
    assert_eq!(budget.rule, "egress.allow[0]");
    assert_eq!(budget.quotas.to_string(), "at most 60 requests a minute and 100MiB a day");
}

#[test]
fn a_budget_alone_has_no_request_read() {
    let policy = policy(&rule("rate = \"1/hour\"\nbytes = \"5GB/day\""));
    let host = Host::parse("a.example").unwrap();

    let ConnectDecision::Tunnel(permit) = policy.at_connect(&host, 443) else {
        panic!("it is read");
    };

    let quotas = permit.budget().unwrap().quotas;
    assert_eq!(quotas.to_string(), "at most 1 request an hour and 5GB a day");
}

#[test]
fn a_budget_is_an_amount_above_nothing_in_one_of_four_times() {
    for (text, position, said) in [
        ("rate = \"60\"", "3:8", "a time is missing: one of second, minute, hour, day"),
        ("rate = \"60/fortnight\"", "3:8", "the time is one of second, minute, hour, day"),
        ("rate = \"0/minute\"", "3:8", "this allows nothing"),
        ("rate = \"-1/minute\"", "3:8", "a rate is a number of requests in a time"),
        ("rate = \"+1/minute\"", "3:8", "a rate is a number of requests in a time"),
        ("rate = \"99999999999999999999/day\"", "3:8", "a rate is a number of requests"),
        ("rate = \"9999999999999999999/day\"", "3:8", "this bounds nothing"),
        ("rate = \"/day\"", "3:8", "a rate is a number of requests"),
        ("rate = 60", "3:8", "is a string, not an integer"),
        ("bytes = \"100/day\"", "3:9", "a size is a number and a unit"),
        ("bytes = \"0KiB/day\"", "3:9", "this allows nothing"),
        ("bytes = \"100MiB\"", "3:9", "a time is missing"),
        ("bytes = \"2000TiB/day\"", "3:9", "this bounds nothing"),
        ("bites = \"1MiB/day\"", "3:1", "did you mean \"bytes\"?"),
    ] {
        let found = parse(&rule(text)).expect_err(text);

        assert!(found.starts_with(&format!("dev.toml:{position}: ")), "{text}: {found}");
        assert!(found.contains(said), "{text}: {found}");
    }
}

#[test]
fn a_rule_is_the_same_one_in_another_place_and_with_other_bounds_and_else_another_one() {
    let get = "methods = [\"GET\"]";
    let key = |text: &str| budget(&policy(text), "GET").key.clone();
    let first = key(&rule(&format!("{get}\nrate = \"1/day\"")));
    let other = rule("methods = [\"PUT\"]");

    assert_eq!(first, key(&(other + &rule(&format!("{get}\nrate = \"2/day\"")))));
    assert_eq!(first, key(&rule(&format!("{get}\nbytes = \"1MB/day\""))));
    for changed in [
        "methods = [\"GET\", \"PUT\"]",
        "methods = [\"GET\"]\nports = [443, 8443]",
        "methods = [\"GET\"]\npaths = [\"/**\"]",
        "methods = [\"GET\"]\naddresses = [\"10.0.0.0/8\"]",
        "methods = [\"GET\"]\nplaintext = true",
    ] {
        assert_ne!(first, key(&rule(&format!("{changed}\nrate = \"1/day\""))), "{changed}");
    }
}

#[test]
fn a_bound_behind_a_rule_that_takes_its_requests_is_a_mistake() {
    let (wide, bound) = (rule(""), rule("rate = \"1/day\""));

    let found = parse(&(wide.clone() + &bound)).expect_err("it bounds nothing");

    assert!(found.contains("egress.allow[1] never decides: egress.allow[0]"), "{found}");
    assert!(parse(&(bound + &wide)).is_ok());
}

#[test]
fn another_bound_is_a_change_of_effect_and_is_explained() {
    let before = policy(&rule("methods = [\"GET\"]\nrate = \"60/minute\""));
    let after = policy(&rule("methods = [\"GET\"]\nrate = \"60/hour\"\nbytes = \"1MiB/day\""));

    let changes = compare(Some(&before), Some(&after)).expect("few classes");
    let changes: Vec<String> = changes.iter().map(Change::to_string).collect();
    let host = Host::parse("a.example").unwrap();
    let (scheme, method, path, query) = (Scheme::Https, "GET", "/", None);
    let request = EgressRequest { scheme, host: &host, port: 443, method, path, query };
    let explained = policies::explain(&before, &request);

    assert_eq!(
        changes,
        ["GET https://a.example:443/**: allowed, at most 60 requests a minute -> allowed, at \
             most 60 requests an hour and 1MiB a day"]
    );
    assert_eq!(
        explained.outcome,
        "allowed by egress.allow[0], no credential, at most 60 requests a minute"
    );
    assert!(explained.steps[0].summary.ends_with("; at most 60 requests a minute"));
}

#[test]
fn sizes_are_shown_in_the_largest_unit_that_fits() {
    for (written, shown) in [
        ("1024KiB", "1MiB"),
        ("1000kB", "1MB"),
        ("3MB", "3MB"),
        ("1500MB", "1500MB"),
        ("2048GiB", "2TiB"),
    ] {
        let policy = policy(&rule(&format!("methods = [\"GET\"]\nbytes = \"{written}/day\"")));
        let quotas = budget(&policy, "GET").quotas;
        assert_eq!(quotas.to_string(), format!("at most {shown} a day"));
    }
}
