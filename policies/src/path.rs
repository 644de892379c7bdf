//! One canonical form of a request's path, or the news that there is none.
//!
//! Servers differ in how they read encoded slashes, dot segments, doubled slashes and escapes of
//! escapes. A path that two of them could read differently is never matched against a pattern:
//! rules that list paths deny it.

/// A path whose segments every server reads the same way, percent-decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CanonicalPath {
    /// Without the leading slash; a trailing slash leaves an empty last segment.
    segments: Vec<String>,
}

/// What makes a path ambiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ambiguity {
    #[error("does not begin with a slash")]
    NoLeadingSlash,
    #[error("holds an encoded slash or a backslash")]
    Separator,
    #[error("holds a dot segment")]
    DotSegment,
    #[error("holds two slashes in a row")]
    EmptySegment,
    #[error("holds a control character")]
    Control,
    #[error("holds an escape that is broken, or an escape of an escape")]
    Escape,
    #[error("is not UTF-8 when decoded")]
    Encoding,
}

impl CanonicalPath {
    /// Reads a raw path, without its query.
    pub fn parse(raw: &str) -> Result<Self, Ambiguity> {
        let rest = raw.strip_prefix('/').ok_or(Ambiguity::NoLeadingSlash)?;
        let count = rest.split('/').count();
        let segments = rest
            .split('/')
            .enumerate()
            .map(|(i, segment)| match segment {
                "" if i + 1 < count => Err(Ambiguity::EmptySegment),
                segment => decode(segment),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { segments })
    }

    pub fn segments(&self) -> &[String] {
        &self.segments
    }
}

fn decode(segment: &str) -> Result<String, Ambiguity> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let (byte, tail) = match (first, tail) {
            (b'%', [high, low, tail @ ..]) => match (hex(*high), hex(*low)) {
                (Some(high), Some(low)) => (high << 4 | low, tail),
                _ => return Err(Ambiguity::Escape),
            },
            (b'%', _) => return Err(Ambiguity::Escape),
            // A query or fragment has no business here; whoever split the target missed it.
            (b'?' | b'#', _) => return Err(Ambiguity::Separator),
            (byte, tail) => (byte, tail),
        };
        bytes.push(byte);
        rest = tail;
    }
    let text = String::from_utf8(bytes).map_err(|_| Ambiguity::Encoding)?;
    if text.contains(['/', '\\']) {
        return Err(Ambiguity::Separator);
    }
    if text.chars().any(char::is_control) {
        return Err(Ambiguity::Control);
    }
    // Servers with path parameters (RFC 3986 section 3.3) cut `..;x` down to `..`.
    if matches!(text.split(';').next().unwrap_or_default().trim(), "." | "..") {
        return Err(Ambiguity::DotSegment);
    }
    if holds_escape(text.as_bytes()) {
        return Err(Ambiguity::Escape);
    }
    Ok(text)
}

/// A decoded text with an escape in it becomes another path when it is decoded once more.
fn holds_escape(text: &[u8]) -> bool {
    text.windows(3).any(|w| w[0] == b'%' && hex(w[1]).is_some() && hex(w[2]).is_some())
}

fn hex(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_what_is_plain() {
        for (raw, expected) in [
            ("/", vec![""]),
            ("/a", vec!["a"]),
            ("/a/", vec!["a", ""]),
            ("/a/b%20c", vec!["a", "b c"]),
            ("/%61/b", vec!["a", "b"]),
            ("/100%25", vec!["100%"]),
            ("/.well-known/x", vec![".well-known", "x"]),
            ("/a...b/...", vec!["a...b", "..."]),
            ("/a;v=1/b", vec!["a;v=1", "b"]),
            ("/b%C3%BCcher", vec!["bücher"]),
        ] {
            let path = CanonicalPath::parse(raw).unwrap();
            assert_eq!(path.segments(), expected, "{raw}");
        }
    }

    #[test]
    fn refuses_what_two_servers_could_read_differently() {
        for (raw, expected) in [
            ("", Ambiguity::NoLeadingSlash),
            ("*", Ambiguity::NoLeadingSlash),
            ("a/b", Ambiguity::NoLeadingSlash),
            ("/a%2fb", Ambiguity::Separator),
            ("/a%2Fb", Ambiguity::Separator),
            ("/a%5cb", Ambiguity::Separator),
            ("/a\\b", Ambiguity::Separator),
            ("/a?b", Ambiguity::Separator),
            ("/a/../b", Ambiguity::DotSegment),
            ("/a/%2e%2E/b", Ambiguity::DotSegment),
            ("/a/.%2e/b", Ambiguity::DotSegment),
            ("/a/./b", Ambiguity::DotSegment),
            ("/a/..", Ambiguity::DotSegment),
            ("/a/..;/b", Ambiguity::DotSegment),
            ("/a/..%3bx/b", Ambiguity::DotSegment),
            ("/a/..%20/b", Ambiguity::DotSegment),
            ("//a", Ambiguity::EmptySegment),
            ("/a//b", Ambiguity::EmptySegment),
            ("/a%00", Ambiguity::Control),
            ("/a%0d%0ab", Ambiguity::Control),
            ("/a%", Ambiguity::Escape),
            ("/a%2", Ambiguity::Escape),
            ("/a%zz", Ambiguity::Escape),
            ("/a%252fb", Ambiguity::Escape),
            ("/%252e%252e/b", Ambiguity::Escape),
            ("/a%c0%afb", Ambiguity::Encoding),
            ("/%ff", Ambiguity::Encoding),
        ] {
            assert_eq!(CanonicalPath::parse(raw), Err(expected), "{raw:?}");
        }
    }
}
