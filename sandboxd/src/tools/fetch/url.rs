//! The addresses that `web_fetch` asks for: http and https, nothing else.

use std::fmt;

/// Longest address: what servers take.
const BYTES_MAX: usize = 8 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    pub tls: bool,
    /// In ASCII, lower case; an IPv6 address without its brackets.
    pub host: String,
    pub port: u16,
    /// Path and query, as they go into the request.
    pub target: String,
}

impl Url {
    /// Reads an absolute address; the error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.len() > BYTES_MAX || text.chars().any(char::is_control) {
            return Err("is no address of the web".into());
        }
        let (scheme, rest) = text.split_once("://").ok_or("is no absolute address of the web")?;
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "https" => true,
            "http" => false,
            other => return Err(format!("{other} is neither http nor https")),
        };
        let end = rest.find(['/', '?', '#', '\\']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        if authority.contains('@') {
            return Err("an address with a user in it is not fetched".into());
        }
        let (host, port) = split(authority, tls)?;
        Ok(Self { tls, host, port, target: target_of(target) })
    }

    /// Where a redirection leads. Never from https to http: what follows would be readable, and
    /// changeable, on the way.
    pub fn join(&self, place: &str) -> Result<Self, String> {
        let scheme = if self.tls { "https" } else { "http" };
        let authority = self.authority();
        let path = self.target.split('?').next().unwrap_or_default();
        let absolute = match place.trim() {
            place if has_scheme(place) => place.to_owned(),
            place if place.starts_with("//") => format!("{scheme}:{place}"),
            place if place.starts_with('/') => format!("{scheme}://{authority}{place}"),
            place if place.starts_with(['?', '#']) => {
                format!("{scheme}://{authority}{path}{place}")
            }
            place => {
                let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
                format!("{scheme}://{authority}{folder}/{place}")
            }
        };
        let joined = Self::parse(&absolute).map_err(|why| format!("leads to {place}: {why}"))?;
        if self.tls && !joined.tls {
            return Err(format!("leads to {joined}, which is not https"));
        }
        Ok(joined)
    }

    /// Host and port, as the `Host` field has it.
    pub fn authority(&self) -> String {
        let host =
            if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match (self.tls, self.port) {
            (true, 443) | (false, 80) => host,
            (_, port) => format!("{host}:{port}"),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.target)
    }
}

fn has_scheme(place: &str) -> bool {
    let end = place.find([':', '/', '?', '#']);
    end.is_some_and(|end| {
        place[end..].starts_with(':')
            && place.starts_with(|c: char| c.is_ascii_alphabetic())
            && place[..end].bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    })
}

fn split(authority: &str, tls: bool) -> Result<(String, u16), String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("its host is not readable")?;
            host.parse::<std::net::Ipv6Addr>().map_err(|_| "its host is no IPv6 address")?;
            if !port.is_empty() && !port.starts_with(':') {
                return Err("its port is not readable".into());
            }
            (host.to_ascii_lowercase(), port.strip_prefix(':').unwrap_or(port))
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            (name(host)?, port)
        }
    };
    let port = match port {
        "" => {
            if tls {
                443
            } else {
                80
            }
        }
        port if port.bytes().all(|b| b.is_ascii_digit()) => {
            port.parse().map_err(|_| "its port is not readable")?
        }
        _ => return Err("its port is not readable".into()),
    };
    Ok((host, port))
}

/// A host name in the form in which it is asked for.
fn name(host: &str) -> Result<String, String> {
    let ascii = idna::domain_to_ascii(host).map_err(|_| "its host is no name")?;
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
    // A last dot says that the name is whole; no other label may be empty.
    let whole = ascii.strip_suffix('.').unwrap_or(&ascii);
    match whole.split('.').all(|label| !label.is_empty() && label.bytes().all(legal)) {
        true => Ok(ascii),
        false => Err("its host is no name".into()),
    }
}

/// Path and query with everything percent-encoded that may not stand in a request line.
fn target_of(text: &str) -> String {
    let text = text.split('#').next().unwrap_or_default();
    let mut target = String::with_capacity(text.len() + 1);
    if !text.starts_with(['/', '\\']) {
        target.push('/');
    }
    for byte in text.bytes() {
        match byte {
            b'!' | b'#'..=b';' | b'=' | b'?'..=b'[' | b']' | b'_' | b'a'..=b'z' | b'~' => {
                target.push(char::from(byte));
            }
            b'\\' => target.push('/'),
            _ => target.push_str(&format!("%{byte:02X}")),
        }
    }
    without_dots(&target)
}

/// Takes the segments `.` and `..` out of a path, as every client of the web does before it asks
/// (RFC 3986, section 5.2.4): redirections are often relative.
fn without_dots(target: &str) -> String {
    let (path, query) = match target.find('?') {
        Some(at) => target.split_at(at),
        None => (target, ""),
    };
    let mut kept: Vec<&str> = Vec::new();
    let mut folder = false;
    for segment in path.split('/').skip(1) {
        let plain = segment.to_ascii_lowercase().replace("%2e", ".");
        folder = plain == "." || plain == "..";
        match plain.as_str() {
            "." => {}
            ".." => {
                kept.pop();
            }
            _ => kept.push(segment),
        }
    }
    if folder {
        kept.push("");
    }
    format!("/{}{query}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_web_are_read_and_others_are_not() {
        let good = [
            ("https://Example.COM", "https://example.com/"),
            (" http://a.example:8080/x?y=1#z ", "http://a.example:8080/x?y=1"),
            ("https://a.example:443/ä b", "https://a.example/%C3%A4%20b"),
            ("https://b\u{fc}cher.example/", "https://xn--bcher-kva.example/"),
            ("http://[::1]:81/", "http://[::1]:81/"),
            ("https://a.example?q", "https://a.example/?q"),
            ("https://a.example./", "https://a.example./"),
            ("https://a.example/x/./y/../z?a/../b", "https://a.example/x/z?a/../b"),
            ("https://a.example/x/%2E%2e/y/..", "https://a.example/"),
            ("https://a.example/../../x//y/.", "https://a.example/x//y/"),
            ("https://a.example\\@b.example/", "https://a.example/@b.example/"),
        ];
        for (text, expected) in good {
            assert_eq!(Url::parse(text).unwrap().to_string(), expected, "{text}");
        }
        let bad = [
            "",
            "a.example",
            "file:///etc/passwd",
            "ftp://a.example/",
            "https://user:secret@a.example/",
            "https:///x",
            "https://a.example:x/",
            "https://a.example:+443/",
            "https://a.example:65536/",
            "https://[::1]443/",
            "https://a..example/",
            "https://.a.example/",
            "https://a.example../",
            "https://./",
            "https://a b/",
            "https://[::1",
            "https://a.example/\r\nX: y",
        ];
        for text in bad {
            assert!(Url::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn redirections_are_followed_wherever_they_lead_but_not_out_of_https() {
        let from = Url::parse("https://a.example/x/y?q").unwrap();
        let table = [
            ("z", "https://a.example/x/z"),
            ("../z", "https://a.example/z"),
            ("//user:x@b.example/z", "leads"),
            ("/z?w", "https://a.example/z?w"),
            ("?w", "https://a.example/x/y?w"),
            ("//b.example/z", "https://b.example/z"),
            ("HTTPS://b.example", "https://b.example/"),
            ("z:1/w", "leads"),
            ("http://b.example/", "leads"),
            ("file:///etc/passwd", "leads"),
        ];
        for (place, expected) in table {
            let joined = from.join(place).map_or_else(|why| why, |url| url.to_string());

            assert!(joined.starts_with(expected), "{place}: {joined}");
        }
    }
}
