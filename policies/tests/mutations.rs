//! Damaged input of every kind ends in an answer, never in a panic, and canonical forms are fixed
//! points: what is canonical once stays as it is.

use policies::path::CanonicalPath;
use policies::{
    AddressRange, Decision, EgressRequest, Host, HostPattern, PolicySet, SHIPPED, Scheme,
};

/// A small generator with a fixed seed, so that a failure can be seen again (xorshift64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap_or(usize::MAX) % sides
    }

    fn text(&mut self, pieces: &[&str], count_max: usize) -> String {
        let count = self.roll(count_max + 1);
        (0..count).map(|_| pieces[self.roll(pieces.len())]).collect()
    }
}

const HOST_PIECES: &[&str] = &[
    "a",
    "example",
    ".",
    ".",
    "com",
    "127",
    "0x7f",
    "0177",
    "1",
    "0",
    "255",
    ":",
    "::",
    "[",
    "]",
    "ffff",
    "xn--",
    "xn--bcher-kva",
    "ü",
    "。",
    "１",
    "-",
    "_",
    "*",
    "%",
    "\0",
    " ",
    "localhost",
];

#[test]
fn a_canonical_host_stays_as_it_is() {
    let mut dice = Dice(0x5eed_0001);
    let mut hosts = 0;
    for _ in 0..50_000 {
        let text = dice.text(HOST_PIECES, 9);
        let Ok(host) = Host::parse(&text) else { continue };
        hosts += 1;

        let shown = host.to_string();
        assert_eq!(Host::parse(&shown).as_ref(), Ok(&host), "{text:?}");
        assert!(shown.is_ascii() && shown == shown.to_ascii_lowercase(), "{text:?}");
        if let Some(name) = host.name() {
            // No resolver takes a canonical name for an address.
            let last = name.rsplit('.').next().unwrap_or_default();
            assert!(
                !last.starts_with(|c: char| c.is_ascii_digit()) || last.parse::<u64>().is_err()
            );
            assert!(name.parse::<core::net::IpAddr>().is_err(), "{text:?}");
        }
        let pattern = HostPattern::parse(&shown).expect("a host is a pattern");
        assert!(pattern.matches(&host), "{text:?}");
    }
    assert!(hosts > 1_000, "{hosts}");
}

const PATH_PIECES: &[&str] = &[
    "/", "/", "/", "repos", "acme", "widget", ".", "..", "%2e", "%2f", "%5C", "%25", "%00", "%zz",
    "%", ";", "\\", "ü", "%c3%bc", "%c0%af", "?", "#", " ", "%20", "2e",
];

#[test]
fn a_canonical_path_holds_nothing_that_a_server_could_read_otherwise() {
    let mut dice = Dice(0x5eed_0002);
    let mut paths = 0;
    for _ in 0..50_000 {
        let text = dice.text(PATH_PIECES, 10);
        let Ok(path) = CanonicalPath::parse(&text) else { continue };
        paths += 1;

        for segment in path.segments() {
            assert!(!segment.contains(['/', '\\', '\0']), "{text:?}");
            assert!(segment != "." && segment != "..", "{text:?}");
        }
        let inner = &path.segments()[..path.segments().len() - 1];
        assert!(inner.iter().all(|segment| !segment.is_empty()), "{text:?}");
    }
    assert!(paths > 1_000, "{paths}");
}

#[test]
fn no_path_leaves_the_prefix_that_a_rule_lists() {
    let files: Vec<_> = SHIPPED.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned())).collect();
    let set = PolicySet::parse(&files).expect("shipped files are right");
    let dev = set.environment("dev").expect("dev is shipped");
    let host = Host::parse("api.github.com").expect("a host");
    let mut dice = Dice(0x5eed_0003);
    for _ in 0..50_000 {
        let path = format!("/repos/acme/widget{}", dice.text(PATH_PIECES, 8));
        let request = EgressRequest {
            scheme: Scheme::Https,
            host: &host,
            port: 443,
            method: "GET",
            path: &path,
            query: None,
        };
        if let Decision::Allowed(_) = dev.decide(&request) {
            let below = path.strip_prefix("/repos/acme/widget").unwrap_or_default();
            assert!(below.is_empty() || below.starts_with('/'), "{path:?}");
            let lower = path.to_ascii_lowercase();
            assert!(!lower.contains("%2f") && !lower.contains("%5c"), "{path:?}");
            assert!(lower.split('/').all(|s| s.replace("%2e", ".") != ".."), "{path:?}");
        }
    }
}

#[test]
fn damaged_policies_end_in_an_answer() {
    let mut dice = Dice(0x5eed_0004);
    let junk: Vec<char> = "\"[]{}=.\n@*/\\\0é9'".chars().collect();
    for (name, text) in SHIPPED {
        for _ in 0..1_500 {
            let mut chars: Vec<char> = text.chars().filter(|c| *c != '#').collect();
            for _ in 0..=dice.roll(3) {
                let at = dice.roll(chars.len());
                match dice.roll(3) {
                    0 => drop(chars.remove(at)),
                    1 => drop(chars.drain(at..(at + dice.roll(40)).min(chars.len()))),
                    _ => chars.push(junk[dice.roll(junk.len())]),
                }
                let inserted = junk[dice.roll(junk.len())];
                chars.insert(dice.roll(chars.len()), inserted);
            }
            let damaged: String = chars.into_iter().collect();
            if let Err(found) = PolicySet::parse(&[((*name).to_owned(), damaged)]) {
                assert!(found.iter().all(|diagnostic| !diagnostic.to_string().is_empty()));
            }
        }
    }
}

#[test]
fn a_mistake_after_another_ends_in_an_answer() {
    // Made up by a fuzzer: dotted keys that extend what is no value.
    let pieces = ["a", ".", "b", "=", "_", "[", "]", "\n", "\"", "\u{1}", "x", ",", "{", "}", " "];
    let mut dice = Dice(0x5eed_0006);
    for _ in 0..200_000 {
        let text = dice.text(&pieces, 24);
        if let Err(found) = PolicySet::parse(&[("dev.toml".to_owned(), text)]) {
            assert!(!found.is_empty());
        }
    }
}

#[test]
fn damaged_ranges_end_in_an_answer() {
    let mut dice = Dice(0x5eed_0005);
    let pieces = ["10", ".", "0", "/", "8", "::", "fd", ":", "32", "129", "-", "+", "ffff"];
    for _ in 0..20_000 {
        let text = dice.text(&pieces, 9);
        if let Ok(range) = AddressRange::parse(&text) {
            assert_eq!(AddressRange::parse(&range.to_string()), Ok(range), "{text}");
        }
    }
}
