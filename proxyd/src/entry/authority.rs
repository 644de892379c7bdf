//! Host and port as a request names them.

use std::borrow::Cow;

use policies::{Host, Scheme};

/// Reads `host`, `host:port` or `[v6]:port`; user information is refused, because what stands
/// before an `@` is read as the host by some.
pub fn parse(text: &str) -> Option<(Host, Option<u16>)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (v6, after) = rest.split_once(']')?;
            let port = match after.strip_prefix(':') {
                Some(port) => Some(port),
                None if after.is_empty() => None,
                None => return None,
            };
            (v6, port)
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if text.starts_with('[') && !host.contains(':') {
        return None;
    }
    let port = match port {
        Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
            Some(digits.parse().ok().filter(|port| *port != 0)?)
        }
        Some(_) => return None,
        None => None,
    };
    Some((Host::parse(host).ok()?, port))
}

/// The authority as it may go on, if it names this host and port; a port that is left out is the
/// connection's. What is written in another way than the judged name, but for the case of letters,
/// goes on as the judged name: what was judged is what the upstream reads.
pub fn settle<'a>(text: &'a str, host: &Host, port: u16) -> Option<Cow<'a, str>> {
    if is_as_judged(text, host, port) {
        return Some(Cow::Borrowed(text));
    }
    let (named, named_port) = parse(text)?;
    if named != *host || named_port.is_some_and(|named| named != port) {
        return None;
    }
    let mut canonical = host.authority(port);
    if named_port.is_none() {
        canonical.truncate(canonical.rfind(':').unwrap_or(canonical.len()));
    }
    if text.eq_ignore_ascii_case(&canonical) {
        return Some(Cow::Borrowed(text));
    }
    Some(Cow::Owned(canonical))
}

/// Whether it is written as nearly all are: the judged name, in any case of letters, and no port or
/// the connection's.
fn is_as_judged(text: &str, host: &Host, port: u16) -> bool {
    let Some(name) = host.name() else { return false };
    let Some((named, after)) = text.split_at_checked(name.len()) else { return false };
    let same_port = |digits: &str| {
        let plain = !digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit());
        plain && digits.parse() == Ok(port)
    };
    named.eq_ignore_ascii_case(name)
        && (after.is_empty() || after.strip_prefix(':').is_some_and(same_port))
}

/// Whether two authorities of one request, each of that scheme, name the same.
pub fn agree(one: &str, other: &str, scheme: Scheme) -> bool {
    let whole = |text: &str| {
        let (host, port) = parse(text)?;
        Some((host, port.unwrap_or(default_port(scheme))))
    };
    one.eq_ignore_ascii_case(other) || whole(one).is_some_and(|w| whole(other) == Some(w))
}

/// The port of a scheme where none is named.
pub fn default_port(scheme: Scheme) -> u16 {
    match scheme {
        Scheme::Http => 80,
        Scheme::Https => 443,
    }
}

/// A request target in absolute form (RFC 9112 section 3.2.2).
#[derive(Debug, PartialEq, Eq)]
pub struct Absolute<'a> {
    pub scheme: Scheme,
    pub authority: &'a str,
    /// The target that goes on, at least `/`.
    pub target: String,
}

/// Takes a target in absolute form apart.
pub fn absolute(target: &str) -> Option<Absolute<'_>> {
    let (scheme, rest) = target.split_once("://")?;
    let scheme = match scheme.to_ascii_lowercase().as_str() {
        "http" => Scheme::Http,
        "https" => Scheme::Https,
        _ => return None,
    };
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, target) = rest.split_at(end);
    let slash = if target.starts_with('/') { "" } else { "/" };
    Some(Absolute { scheme, authority, target: format!("{slash}{target}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_are_read_in_one_way_only() {
        let host = |name: &str| Host::parse(name).unwrap();

        assert_eq!(parse("A.Test:8443"), Some((host("a.test"), Some(8443))));
        assert_eq!(parse("a.test"), Some((host("a.test"), None)));
        assert_eq!(parse("[::1]:443"), Some((host("::1"), Some(443))));
        assert_eq!(parse("[::1]"), Some((host("::1"), None)));
        for bad in [
            "",
            ":443",
            "a.test:",
            "a.test:0",
            "a.test:65536",
            "a.test:+1",
            "b@a.test",
            "::1",
            "[::1",
            "[::1]x",
            "[a.test]:1",
            "a.test:443:443",
            "a.test/x",
        ] {
            let outcome = parse(bad);
            assert!(outcome.is_none(), "{bad:?} gave {outcome:?}");
        }
    }

    #[test]
    fn what_goes_on_is_what_was_judged() {
        let settle = |text: &'static str, name: &str| {
            settle(text, &Host::parse(name).unwrap(), 443).map(Cow::into_owned)
        };
        for (text, name, expected) in [
            ("Api.Test", "api.test", "Api.Test"),
            ("api.test:443", "api.test", "api.test:443"),
            ("API.test:443", "api.test", "API.test:443"),
            ("api.test:0443", "api.test", "api.test:443"),
            ("api.test.", "api.test", "api.test"),
            ("api.test.:0443", "api.test", "api.test:443"),
            ("ａｐｉ.test", "api.test", "api.test"),
            ("a\u{ad}pi.test", "api.test", "api.test"),
            ("bücher.test", "xn--bcher-kva.test", "xn--bcher-kva.test"),
            ("XN--bcher-kva.test", "xn--bcher-kva.test", "XN--bcher-kva.test"),
            ("0x0a.9.2055", "10.9.8.7", "10.9.8.7"),
            ("[::ffff:10.9.8.7]:443", "10.9.8.7", "10.9.8.7:443"),
            ("[2001:DB8::7]", "2001:db8::7", "[2001:DB8::7]"),
            ("[2001:db8:0::7]:443", "2001:db8::7", "[2001:db8::7]:443"),
        ] {
            assert_eq!(settle(text, name).as_deref(), Some(expected), "{text}");
        }
        for (text, name) in [
            ("api.test:444", "api.test"),
            ("api.test:+443", "api.test"),
            ("api.test:", "api.test"),
            ("api.test443", "api.test"),
            ("api.tést", "api.test"),
            ("api.test..", "api.test"),
            ("[2001:db8::7%25eth0]", "2001:db8::7"),
            ("2001:db8::7", "2001:db8::7"),
            ("x@api.test", "api.test"),
            ("", "api.test"),
        ] {
            assert_eq!(settle(text, name), None, "{text}");
        }
    }

    #[test]
    fn two_authorities_of_one_request_agree_in_meaning() {
        for (one, other, expected) in [
            ("a.test", "A.TEST:443", true),
            ("a.test.", "a.test", true),
            ("a.test:80", "a.test", false),
            ("a.test", "b.test", false),
            ("", "", true),
            ("x@a.test", "a.test", false),
        ] {
            assert_eq!(agree(one, other, Scheme::Https), expected, "{one} {other}");
        }
    }

    #[test]
    fn absolute_targets_come_apart() {
        let taken = absolute("HTTP://a.test:80?x=/").unwrap();

        assert_eq!((taken.scheme, taken.authority), (Scheme::Http, "a.test:80"));
        assert_eq!(taken.target, "/?x=/");
        assert_eq!(absolute("ftp://a.test/"), None);
        assert_eq!(absolute("/a"), None);
    }
}
