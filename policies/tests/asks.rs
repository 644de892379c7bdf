//! Rules that ask an operator: what may be written, and what a change of it is.

use std::sync::Arc;
use std::time::Duration;

use policies::explain::effect::{Change, compare};
use policies::{
    ConnectDecision, Decision, EgressRequest, Host, Permit, Policy, PolicySet, Scheme, explain,
};

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

fn host() -> Host {
    Host::parse("a.example").expect("a name")
}

fn get(host: &Host) -> EgressRequest<'_> {
    let (scheme, port, method, path) = (Scheme::Https, 443, "GET", "/");
    EgressRequest { scheme, host, port, method, path, query: None }
}

fn permit(rest: &str) -> Permit {
    match policy(&rule(rest)).decide(&get(&host())) {
        Decision::Allowed(permit) => permit,
        Decision::Denied(denial) => panic!("{denial}"),
    }
}

#[test]
fn a_permit_says_whether_somebody_has_to_be_asked_and_how_long_that_may_take() {
    for (rest, asks) in [
        ("", None),
        ("ask = false", None),
        ("ask = true", Some(90)),
        ("ask = {}", Some(90)),
        ("ask = { within = \"5m\" }", Some(300)),
        ("ask = { within = \"24h\" }", Some(86_400)),
    ] {
        assert_eq!(permit(rest).asks(), asks.map(Duration::from_secs), "{rest}");
    }
    for wrong in [
        "ask = 1",
        "ask = \"5m\"",
        "ask = { within = 5 }",
        "ask = { within = \"0s\" }",
        "ask = { within = \"25h\" }",
        "ask = { until = \"5m\" }",
    ] {
        assert!(parse(&rule(wrong)).is_err(), "{wrong}");
    }
}

#[test]
fn asking_has_no_request_read() {
    let policy = policy(&rule("ask = true"));

    let ConnectDecision::Tunnel(permit) = policy.at_connect(&host(), 443) else {
        panic!("it is read");
    };

    assert!(permit.asks().is_some());
}

#[test]
fn a_rule_is_known_by_what_it_allows_and_not_by_its_place_or_its_patience() {
    let mark = permit("methods = [\"GET\"]\nask = true").mark();
    let moved = policy(&(rule("methods = [\"PUT\"]") + &rule("methods = [\"GET\"]\nask = {}")));
    let Decision::Allowed(moved) = moved.decide(&get(&host())) else { panic!("it is denied") };

    assert_eq!((moved.rule(), moved.mark()), ("egress.allow[1]", mark.clone()));
    assert_eq!(
        permit("methods = [\"GET\"]\nask = { within = \"5m\" }\nrate = \"1/day\"").mark(),
        mark
    );
    for other in [
        "methods = [\"GET\", \"POST\"]",
        "methods = [\"GET\"]\npaths = [\"/**\"]",
        "methods = [\"GET\"]\naddresses = [\"10.0.0.0/8\"]",
        "methods = [\"GET\"]\nplaintext = true",
        "methods = [\"GET\"]\nports = [443, 8443]",
        "methods = [\"GET\"]\nlfs = true",
    ] {
        assert_ne!(permit(&format!("{other}\nask = true")).mark(), mark, "{other}");
    }
}

#[test]
fn an_earlier_rule_that_does_not_ask_must_not_take_all_that_a_later_one_asks_about() {
    let both = |first: &str, second: &str| parse(&(rule(first) + &rule(second)));

    let wrong = both("methods = [\"GET\"]", "methods = [\"GET\"]\nask = true").unwrap_err();
    assert!(wrong.contains("egress.allow[1] never decides"), "{wrong}");
    assert!(both("methods = [\"GET\"]\nask = true", "methods = [\"GET\"]").is_ok());
    assert!(both("methods = [\"PUT\"]", "methods = [\"GET\"]\nask = true").is_ok());
}

#[test]
fn explanations_and_comparisons_say_that_somebody_is_asked() {
    let (asks, free) = (policy(&rule("ask = true")), policy(&rule("")));
    let slow = policy(&rule("ask = { within = \"5m\" }"));
    let told = |before: &Policy, after: &Policy| -> Vec<String> {
        let changes = compare(Some(before), Some(after)).unwrap();
        changes.iter().map(Change::to_string).collect()
    };
    let place = "connections to a.example:443: passed on unread";
    let once = |seconds| format!(", once an operator has said yes within {seconds} s");

    let explained = explain(&asks, &get(&host()));
    assert!(explained.allowed && explained.asks == Some(90));
    assert!(explained.outcome.ends_with(&once(90)), "{}", explained.outcome);
    assert!(explained.steps[0].summary.contains("asks an operator"));
    assert_eq!(told(&free, &asks), [format!("{place} -> passed on unread{}", once(90))]);
    assert_eq!(
        told(&asks, &slow),
        [format!("{place}{} -> passed on unread{}", once(90), once(300))]
    );
    assert_eq!(told(&asks, &asks), [""; 0]);
}
