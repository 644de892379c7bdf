//! Two spellings of one host never get two answers: whatever way a name or an address is written,
//! it is the same host to every rule, or no host at all.
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use policies::{ConnectDecision, Decision, EgressRequest, Host, Policy, PolicySet, Scheme};

/// A small generator with a fixed seed, so that a failure can be seen again (xorshift64).
struct Dice(u64);

impl Dice {
    fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn roll(&mut self, sides: usize) -> usize {
        usize::try_from(self.number() >> 11).unwrap() % sides
    }

    fn heads(&mut self) -> bool {
        self.roll(2) == 0
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.roll(from.len())]
    }
}

/// A label in its canonical form, and in the form that people write.
const LABELS: &[(&str, &str)] = &[
    ("api", "api"),
    ("a-b", "a-b"),
    ("_dmarc", "_dmarc"),
    ("1and1", "1and1"),
    ("x", "x"),
    ("github", "github"),
    ("xn--bcher-kva", "bücher"),
    ("xn--fiqs8s", "中国"),
    ("xn--strae-oqa", "straße"),
    ("xn--e1afmkfd", "пример"),
    ("xn--r8jz45g", "例え"),
];

/// One of the ways to write a label that UTS 46 folds into its canonical form.
fn spell(dice: &mut Dice, canonical: &str, written: &str) -> String {
    let base = if dice.heads() { canonical } else { written };
    let mut out = String::new();
    for char in base.chars() {
        match dice.roll(6) {
            0 => out.extend(char.to_uppercase().filter(|_| char != 'ß')),
            // Full-width forms of ASCII stand 0xfee0 above it.
            1 if ('!'..='~').contains(&char) => {
                out.extend(char::from_u32(u32::from(char) + 0xfee0));
            }
            // A soft hyphen, a variation selector and a word joiner are passed over.
            2 => out.extend([*dice.pick(&['\u{ad}', '\u{fe0f}', '\u{2060}']), char]),
            _ => out.push(char),
        }
        if out.is_empty() || char == 'ß' && !out.ends_with('ß') {
            out.push(char);
        }
    }
    out
}

fn name(dice: &mut Dice) -> (String, String) {
    let (mut canonical, mut spelled) = (String::new(), String::new());
    for number in 0..=dice.roll(3) {
        let (ascii, written) = dice.pick(LABELS);
        if number > 0 {
            canonical.push('.');
            spelled.push(*dice.pick(&['.', '.', '。', '．', '｡']));
        }
        canonical += ascii;
        spelled += &spell(dice, ascii, written);
    }
    canonical += ".test";
    spelled += *dice.pick(&[".test", ".TEST", ".test.", "。ｔｅｓｔ", ".te\u{ad}st。"]);
    (canonical, spelled)
}

#[test]
fn every_spelling_of_a_name_is_that_name() {
    let mut dice = Dice(0x5eed_0011);
    for _ in 0..20_000 {
        let (canonical, spelled) = name(&mut dice);

        let host = Host::parse(&spelled);

        assert_eq!(host, Ok(Host::Name(canonical)), "{spelled:?}");
    }
}

/// One number in one of the bases that `inet_aton` reads.
fn number(dice: &mut Dice, value: u32) -> String {
    match dice.roll(5) {
        0 => format!("0x{value:x}"),
        1 => format!("0X{value:08X}"),
        2 => format!("0{value:o}"),
        3 => format!("000{value:o}"),
        _ => value.to_string(),
    }
}

fn v4(dice: &mut Dice, ip: Ipv4Addr) -> String {
    let bits = u32::from(ip);
    let [a, b, c, d] = ip.octets().map(u32::from);
    let parts = match dice.roll(4) {
        0 => vec![bits],
        1 => vec![a, bits & 0xff_ffff],
        2 => vec![a, b, bits & 0xffff],
        _ => vec![a, b, c, d],
    };
    let parts: Vec<String> = parts.into_iter().map(|part| number(dice, part)).collect();
    let mut text = parts.join(*dice.pick(&[".", ".", "。", "．"]));
    if dice.heads() {
        text = text.chars().map(|c| wide(dice, c)).collect();
    }
    text + *dice.pick(&["", "", "."])
}

fn wide(dice: &mut Dice, char: char) -> char {
    let full = char.is_ascii_digit() && dice.roll(3) == 0;
    if full { char::from_u32(u32::from(char) + 0xfee0).unwrap() } else { char }
}

fn v6(dice: &mut Dice, ip: Ipv6Addr) -> String {
    let groups = ip.segments().map(|group| match dice.roll(3) {
        0 => format!("{group:x}"),
        1 => format!("{group:04x}"),
        _ => format!("{group:X}"),
    });
    let text = match dice.roll(3) {
        0 => ip.to_string(),
        1 => groups.join(":"),
        _ => {
            let [.., high, low] = ip.segments();
            let tail = Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
            format!("{}:{tail}", groups[..6].join(":"))
        }
    };
    if dice.heads() { format!("[{text}]") } else { text }
}

#[test]
fn every_spelling_of_an_address_is_that_address() {
    let mut dice = Dice(0x5eed_0012);
    for _ in 0..20_000 {
        let ip = Ipv4Addr::from(u32::try_from(dice.number() >> 32).unwrap());
        let text = match dice.roll(3) {
            0 => v6(&mut dice, ip.to_ipv6_mapped()),
            _ => v4(&mut dice, ip),
        };
        assert_eq!(Host::parse(&text), Ok(Host::Ip(IpAddr::V4(ip))), "{text:?}");

        let mut bits = u128::from(dice.number()) << 64 | u128::from(dice.number());
        if dice.heads() {
            // Long runs of zeros, as in most real ones.
            bits &= 0xffff_ffff_0000_0000_0000_0000_0000_ffff;
        }
        let ip = Ipv6Addr::from(bits);
        let text = v6(&mut dice, ip);
        assert_eq!(Host::parse(&text), Ok(Host::from_ip(IpAddr::V6(ip))), "{text:?}");
    }
}

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test", "*.github.test", "bücher.test", "*.straße.test", "10.1.2.3", "[2001:db8::1]"]
methods = ["GET"]
[[egress.allow]]
hosts = ["*.x.test", "x.test", "中国.test", "127.0.0.1"]
"#;

/// What a policy says about a host, for a connection and for a request.
fn said(policy: &Policy, host: &Host) -> [String; 2] {
    let connect = match policy.at_connect(host, 443) {
        ConnectDecision::Deny(denial) => format!("{denial:?}"),
        ConnectDecision::Tunnel(permit) => format!("tunnel by {}", permit.rule()),
        ConnectDecision::Inspect => "inspect".to_owned(),
    };
    let request = EgressRequest {
        scheme: Scheme::Https,
        host,
        port: 443,
        method: "GET",
        path: "/",
        query: None,
    };
    let request = match policy.decide(&request) {
        Decision::Allowed(permit) => format!("allowed by {}", permit.rule()),
        Decision::Denied(denial) => format!("{denial:?}"),
    };
    [connect, request]
}

#[test]
fn two_spellings_never_get_two_decisions() {
    let set = PolicySet::parse(&[("dev.toml".into(), POLICY.into())]).unwrap();
    let policy = Arc::clone(set.environment("dev").unwrap());
    let mut dice = Dice(0x5eed_0013);
    let mut allowed = 0;
    for _ in 0..20_000 {
        let (canonical, spelled) = match dice.roll(4) {
            0 => {
                let ip = *dice.pick(&[Ipv4Addr::new(10, 1, 2, 3), Ipv4Addr::LOCALHOST]);
                let spelled = v4(&mut dice, ip);
                (ip.to_string(), spelled)
            }
            _ => name(&mut dice),
        };
        let plain = said(&policy, &Host::parse(&canonical).unwrap());
        allowed += usize::from(plain[1].starts_with("allowed"));

        assert_eq!(said(&policy, &Host::parse(&spelled).unwrap()), plain, "{spelled:?}");
    }
    assert!((1_000..19_000).contains(&allowed), "{allowed} of 20000 were allowed");
}

#[test]
fn what_names_an_interface_or_hides_a_second_name_is_no_host() {
    for text in [
        "fe80::1%eth0",
        "[fe80::1%25eth0]",
        "[fe80::1%1]",
        "::1%lo",
        "api.test%00.evil.test",
        "api.test\u{0}.evil.test",
        "api.test#.evil.test",
        "api.test?.evil.test",
        "api.test\\.evil.test",
        "evil.test@api.test",
        "api.test:443",
        "api.test ",
        " api.test",
        "api.test..",
        "api..test",
        "api.test\t",
        "api.\u{200b}\u{2028}test",
        "api.test／x",
        "127.0.0.1.1",
        "127.0.0.1..",
        "1.2.3.4.test.1",
        "0x",
        "[0x7f000001]",
        "::ffff:0x7f.1",
        "[::1].",
        "[[::1]]",
        "1:2:3:4:5:6:7:8:9",
        "xn--bcher-kva-.test",
    ] {
        match Host::parse(text) {
            Err(_) => {}
            // A number is an address in every reading, as browsers have it.
            Ok(host) => assert_eq!((text, host.ip()), ("0x", Some(Ipv4Addr::UNSPECIFIED.into()))),
        }
    }
}
