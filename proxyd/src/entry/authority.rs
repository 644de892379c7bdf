//! Host and port as a request names them.

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
    fn absolute_targets_come_apart() {
        let taken = absolute("HTTP://a.test:80?x=/").unwrap();

        assert_eq!((taken.scheme, taken.authority), (Scheme::Http, "a.test:80"));
        assert_eq!(taken.target, "/?x=/");
        assert_eq!(absolute("ftp://a.test/"), None);
        assert_eq!(absolute("/a"), None);
    }
}
