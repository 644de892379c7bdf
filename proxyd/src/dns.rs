//! Answers a lease's DNS questions with the addresses that stand for names inside its sandbox.
//!
//! Nothing is ever asked outside on behalf of a question, so names cannot carry anything out. A
//! host name that policy does not list still gets an address: the connection to it is denied with
//! a reason that a program or model can read, which a refused lookup cannot give. What cannot be a
//! public host (one label, odd characters) does not exist, nor does the name after the last that a
//! lease may bind: that is the answer which every resolver passes on at once. `localhost` and what
//! is below it is the sandbox itself (RFC 6761 section 6.3).

pub mod message;
pub mod serve;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use policies::{Host, Policy};

use crate::lease::names::{BindError, Names};
use message::{Answer, Question};

/// IPv4 and IPv6 address records: a name has no others.
const TYPE_A: u16 = 1;
const TYPE_AAAA: u16 = 28;
const CLASS_IN: u16 = 1;

/// What a question gets. Its last two are refusals.
#[derive(Debug)]
pub enum Verdict {
    Address(IpAddr),
    /// The name exists and has nothing of that type: HTTPS and SVCB would name other addresses.
    NoRecord,
    NoName(RefusedReason),
    /// A question of another class than the Internet's.
    Refused(RefusedReason),
}

#[derive(Debug, thiserror::Error)]
pub enum RefusedReason {
    #[error("not a question for an Internet host name")]
    NotAHost,
    #[error("{0}")]
    Bind(#[from] BindError),
}

/// Judges one question.
pub fn judge(policy: &Policy, names: &Names, question: &Question) -> Verdict {
    if question.class != CLASS_IN {
        return Verdict::Refused(RefusedReason::NotAHost);
    }
    let Ok(Host::Name(name)) = Host::parse(&question.name) else {
        return Verdict::NoName(RefusedReason::NotAHost);
    };
    if name == "localhost" || name.ends_with(".localhost") {
        return match question.kind {
            TYPE_A => Verdict::Address(Ipv4Addr::LOCALHOST.into()),
            TYPE_AAAA => Verdict::Address(Ipv6Addr::LOCALHOST.into()),
            _ => Verdict::NoRecord,
        };
    }
    let qualified = name.contains('.');
    let host = Host::Name(name);
    if !qualified && !policy.resolvable(&host) {
        return Verdict::NoName(RefusedReason::NotAHost);
    }
    if question.kind != TYPE_A && question.kind != TYPE_AAAA {
        return Verdict::NoRecord;
    }
    match names.bind(&host) {
        Ok(addresses) if question.kind == TYPE_A => Verdict::Address(addresses.v4.into()),
        Ok(addresses) => Verdict::Address(addresses.v6.into()),
        Err(error) => Verdict::NoName(error.into()),
    }
}

/// The answer to one packet; none for what is no question at all. Refusals are shown to `refused`.
pub fn respond(
    policy: &Policy,
    names: &Names,
    packet: &[u8],
    refused: impl FnOnce(&str, &RefusedReason),
) -> Option<Vec<u8>> {
    let question = match message::parse(packet) {
        Ok(question) => question,
        Err(message::ParseError::Ignore) => return None,
        Err(message::ParseError::Reply(bytes)) => return Some(bytes),
    };
    let answer = match judge(policy, names, &question) {
        Verdict::Address(ip) => Answer::Address(ip),
        Verdict::NoRecord => Answer::NoRecord,
        Verdict::NoName(reason) => {
            refused(&question.name, &reason);
            Answer::NoName
        }
        Verdict::Refused(reason) => {
            refused(&question.name, &reason);
            Answer::Refused
        }
    };
    Some(message::reply(&question, answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> std::sync::Arc<Policy> {
        let text = "[[egress.allow]]\nhosts = [\"api.test\"]\n";
        let set = policies::PolicySet::parse(&[("dev.toml".into(), text.into())]).unwrap();
        std::sync::Arc::clone(set.environment("dev").unwrap())
    }

    fn verdict(name: &str, kind: u16) -> Verdict {
        let dir = tempfile::tempdir().unwrap();
        let names = Names::open(&dir.path().join("l"), "x").unwrap();
        let question = Question::for_test(name, kind);
        judge(&policy(), &names, &question)
    }

    #[test]
    fn host_names_get_synthetic_addresses_and_nothing_else_does() {
        assert!(matches!(verdict("api.test", TYPE_A), Verdict::Address(IpAddr::V4(_))));
        assert!(matches!(verdict("API.test", TYPE_AAAA), Verdict::Address(IpAddr::V6(_))));
        assert!(matches!(verdict("evil.example", TYPE_A), Verdict::Address(_)));
        assert!(matches!(verdict("api.test", 65), Verdict::NoRecord));
        assert!(matches!(verdict("api.test", 16), Verdict::NoRecord));
        assert!(matches!(verdict("1.0.18.198.in-addr.arpa", 12), Verdict::NoRecord));
        for name in ["db", "", "1.2.3.4", "0x7f000001", "a.1", "*.api.test", "api.test\u{fffd}"] {
            assert!(matches!(verdict(name, TYPE_A), Verdict::NoName(_)), "{name}");
        }
    }

    #[test]
    fn localhost_and_all_below_it_is_the_sandbox_itself() {
        for name in ["localhost", "LOCALHOST", "app.localhost", "a.b.localhost"] {
            for (kind, expected) in [(TYPE_A, "127.0.0.1"), (TYPE_AAAA, "::1")] {
                let Verdict::Address(ip) = verdict(name, kind) else { panic!("{name}") };
                assert_eq!(ip.to_string(), expected);
            }
        }
        let Verdict::Address(ip) = verdict("localhost.test", TYPE_A) else { panic!() };
        assert!(!ip.is_loopback());
    }

    #[test]
    fn other_classes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names::open(&dir.path().join("l"), "x").unwrap();
        let mut question = Question::for_test("version.bind", 16);
        question.class = 3;

        assert!(matches!(judge(&policy(), &names, &question), Verdict::Refused(_)));
    }

    #[test]
    fn a_name_beyond_the_bound_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names::open(&dir.path().join("l"), "x").unwrap();
        let policy = policy();
        let ask = |number: u32| {
            let question = Question::for_test(&format!("n{number}.evil.test"), TYPE_A);
            judge(&policy, &names, &question)
        };

        let all = (0..4096).all(|number| matches!(ask(number), Verdict::Address(_)));

        assert!(all);
        assert!(matches!(ask(4096), Verdict::NoName(RefusedReason::Bind(BindError::Full))));
    }
}
