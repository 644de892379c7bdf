//! One canonical form of a host, so that a policy and a request cannot mean different things.
//!
//! Names are lower case, without a final dot, in ASCII (IDNA by UTS 46, as browsers and curl do
//! it). Every spelling of an IPv4 address that `inet_aton` or a browser understands becomes that
//! address, so that `0x7f000001` is not a name. IPv4 in IPv6 (`::ffff:a.b.c.d`) becomes IPv4.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::borrow::Cow;

use idna::AsciiDenyList;

/// RFC 1035 section 2.3.4, without the final dot.
const NAME_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;

/// A host in canonical form. `Display` writes IPv6 without brackets; see [`Host::authority`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    Name(String),
    Ip(IpAddr),
}

/// Why a text is no host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error("a host cannot be empty")]
    Empty,
    #[error("a host has at most 253 characters, 63 between two dots")]
    TooLong,
    #[error("{0:?} cannot stand in a host name")]
    Character(char),
    #[error("not a name by the rules for international names (UTS 46)")]
    Idna,
    #[error("looks like an IP address but is none")]
    Address,
}

impl Host {
    /// Reads a host as it stands in a policy, a CONNECT line, a Host header or a client hello; an
    /// IPv6 address with or without brackets.
    pub fn parse(text: &str) -> Result<Self, HostError> {
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner.strip_suffix(']').ok_or(HostError::Address)?;
            return Self::parse_v6(inner);
        }
        if text.contains(':') {
            return Self::parse_v6(text);
        }
        if text.is_empty() {
            return Err(HostError::Empty);
        }
        // Four bytes a character, at most: bounds the work on hostile input.
        if text.len() > 4 * NAME_BYTES_MAX {
            return Err(HostError::TooLong);
        }
        let ascii = to_ascii(text)?;
        // One final dot, and by now a full stop of another script is a plain one too.
        let name = ascii.strip_suffix('.').unwrap_or(&ascii);
        check_labels(name)?;
        if ends_in_number(name) {
            return parse_v4(name).map(|v4| Self::Ip(v4.into())).ok_or(HostError::Address);
        }
        Ok(Self::Name(name.to_owned()))
    }

    fn parse_v6(text: &str) -> Result<Self, HostError> {
        // A zone (`fe80::1%eth0`) names an interface of this host; it is no part of an address.
        text.parse::<Ipv6Addr>()
            .map(|v6| Self::Ip(fold(IpAddr::V6(v6))))
            .map_err(|_| HostError::Address)
    }

    /// The host of an address, IPv4 in IPv6 folded.
    pub fn from_ip(ip: IpAddr) -> Self {
        Self::Ip(fold(ip))
    }

    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Name(name) => Some(name),
            Self::Ip(_) => None,
        }
    }

    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Name(_) => None,
            Self::Ip(ip) => Some(*ip),
        }
    }

    /// `host:port`, IPv6 in brackets.
    pub fn authority(&self, port: u16) -> String {
        match self {
            Self::Ip(IpAddr::V6(v6)) => format!("[{v6}]:{port}"),
            host => format!("{host}:{port}"),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Ip(ip) => ip.fmt(f),
        }
    }
}

/// `::ffff:a.b.c.d` is `a.b.c.d`: the kernel dials the IPv4 address for both.
pub(crate) fn fold(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

fn to_ascii(text: &str) -> Result<Cow<'_, str>, HostError> {
    let plain = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_');
    // `xn--` labels take the long way: they must decode to something legal.
    if text.bytes().all(plain) && !text.contains("xn--") {
        return Ok(Cow::Borrowed(text));
    }
    if let Some(bad) = text.chars().find(|c| c.is_ascii() && !plain(c.to_ascii_lowercase() as u8)) {
        return Err(HostError::Character(bad));
    }
    idna::domain_to_ascii_cow(text.as_bytes(), AsciiDenyList::URL).map_err(|_| HostError::Idna)
}

fn check_labels(name: &str) -> Result<(), HostError> {
    if name.len() > NAME_BYTES_MAX {
        return Err(HostError::TooLong);
    }
    for label in name.split('.') {
        match label.len() {
            0 => return Err(HostError::Empty),
            1..=LABEL_BYTES_MAX => {}
            _ => return Err(HostError::TooLong),
        }
        if let Some(bad) = label.chars().find(|c| !c.is_ascii_alphanumeric() && !"-_".contains(*c))
        {
            return Err(HostError::Character(bad));
        }
    }
    Ok(())
}

/// Whether resolvers would read the name as an IPv4 address (WHATWG URL, "ends in a number").
fn ends_in_number(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    last.bytes().all(|b| b.is_ascii_digit()) || parse_number(last).is_some()
}

/// One to four numbers, decimal, octal or hexadecimal; the last one fills what is left.
fn parse_v4(name: &str) -> Option<Ipv4Addr> {
    let parts: Vec<u64> = name.split('.').map(parse_number).collect::<Option<_>>()?;
    let (last, leading) = parts.split_last()?;
    if leading.len() > 3 || leading.iter().any(|part| *part > 255) {
        return None;
    }
    let free_bits = 32 - 8 * leading.len() as u32;
    if *last >= 1 << free_bits {
        return None;
    }
    let high = leading.iter().enumerate().map(|(i, part)| part << (24 - 8 * i)).sum::<u64>();
    u32::try_from(high | last).ok().map(Ipv4Addr::from)
}

fn parse_number(text: &str) -> Option<u64> {
    let (digits, radix) = match text.as_bytes() {
        [] => return None,
        [b'0', b'x', ..] => (&text[2..], 16),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    if digits.is_empty() {
        return Some(0);
    }
    // Signs are not digits here, though `from_str_radix` takes them.
    if !digits.bytes().all(|b| char::from(b).is_digit(radix)) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_an_address_is_that_address() {
        for text in [
            "127.0.0.1",
            "127.0.0.1.",
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "0X7F000001",
            "0x7f.1",
            "0177.0.0.1",
            "0177.0.0.01",
            "017700000001",
            "::ffff:127.0.0.1",
            "::ffff:7f00:1",
            "[::ffff:7f00:1]",
            "0:0:0:0:0:ffff:7f00:0001",
            "１２７.0.0.1",
            "127。0。0。1",
        ] {
            let host = Host::parse(text);
            assert_eq!(host, Ok(Host::Ip(Ipv4Addr::LOCALHOST.into())), "{text}");
        }
        let metadata = Host::parse("169.254.169.254");
        for text in ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "::ffff:a9fe:a9fe"] {
            assert_eq!(Host::parse(text), metadata, "{text}");
        }
        assert_eq!(Host::parse("0"), Ok(Host::Ip(Ipv4Addr::UNSPECIFIED.into())));
        assert_eq!(Host::parse("[::]"), Ok(Host::Ip(Ipv6Addr::UNSPECIFIED.into())));
    }

    #[test]
    fn names_become_lower_case_ascii_without_a_final_dot() {
        for (text, expected) in [
            ("API.GitHub.com", "api.github.com"),
            ("api.github.com.", "api.github.com"),
            ("bücher.example", "xn--bcher-kva.example"),
            ("BÜCHER.example", "xn--bcher-kva.example"),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("ｅｘａｍｐｌｅ.com", "example.com"),
            ("example。com", "example.com"),
            ("example.com。", "example.com"),
            ("_dmarc.example.com", "_dmarc.example.com"),
            ("1and1.com", "1and1.com"),
            ("0x7g", "0x7g"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(Host::parse(text), Ok(Host::Name(expected.into())), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_host() {
        let long_label = "a".repeat(64);
        let long_name = "a.".repeat(127) + "com";
        let huge = "ü".repeat(100_000);
        for text in [
            "",
            ".",
            "..",
            "a..",
            "a.。",
            "a..b",
            ".a",
            "a b",
            "a/b",
            "a@b",
            "a%2eb",
            "a\0b",
            "a\nb",
            "*",
            "*.com",
            "256.1.1.1",
            "1.2.3.4.5",
            "1.2.3.256",
            "4294967296",
            "0x1ffffffff",
            "1.2.3.09",
            "a.1",
            "[::1",
            "::1]",
            "[]",
            "fe80::1%eth0",
            "1::2::3",
            "a:80",
            "[1.2.3.4]",
            "xn--a",
            "xn--",
            &long_label,
            &long_name,
            &huge,
        ] {
            assert!(Host::parse(text).is_err(), "{text:.40}");
        }
    }

    #[test]
    fn what_is_shown_parses_to_the_same_host() {
        for text in ["example.com", "10.1.2.3", "2001:db8::1"] {
            let host = Host::parse(text).unwrap();

            assert_eq!(host.to_string(), text);
            assert_eq!(Host::parse(&host.to_string()), Ok(host));
        }
        assert_eq!(Host::parse("::1").unwrap().authority(443), "[::1]:443");
    }
}
