//! Host, path and repository patterns, and nothing cleverer.
//!
//! A star stands for whole labels or whole segments, never for a part of one: a pattern can be
//! read aloud, and two patterns can be compared.

use core::fmt;

use crate::host::Host;
use crate::path::CanonicalPath;

/// One host, or every host below a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    Exact(Host),
    /// `*.example.com`: any number of labels below it, not the name itself.
    Below(String),
}

impl HostPattern {
    /// Reads `example.com`, `*.example.com` or an address. The error is a reason for the operator.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Some(below) = text.strip_prefix("*.") else {
            if text.contains('*') {
                return Err("a star stands only in front: \"*.example.com\"".to_owned());
            }
            return Host::parse(text).map(Self::Exact).map_err(|error| error.to_string());
        };
        match Host::parse(below).map_err(|error| error.to_string())? {
            Host::Name(name) => Ok(Self::Below(name)),
            Host::Ip(_) => Err("a star cannot stand before an address".to_owned()),
        }
    }

    pub fn matches(&self, host: &Host) -> bool {
        match (self, host) {
            (Self::Exact(own), host) => own == host,
            (Self::Below(suffix), Host::Name(name)) => is_below(name, suffix),
            (Self::Below(_), Host::Ip(_)) => false,
        }
    }

    /// Whether every host that the other pattern matches is matched by this one.
    pub fn covers(&self, other: &HostPattern) -> bool {
        match (self, other) {
            (own, Self::Exact(host)) => own.matches(host),
            (Self::Below(own), Self::Below(other)) => own == other || is_below(other, own),
            (Self::Exact(_), Self::Below(_)) => false,
        }
    }
}

fn is_below(name: &str, suffix: &str) -> bool {
    name.strip_suffix(suffix).is_some_and(|front| front.len() > 1 && front.ends_with('.'))
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(host) => host.fmt(f),
            Self::Below(name) => write!(f, "*.{name}"),
        }
    }
}

/// A pattern's segments; none stands for any one that is not empty.
#[derive(Clone, Debug)]
pub(crate) struct Parts<'a> {
    pub segments: Vec<Option<&'a str>>,
    /// Takes whatever follows, and nothing at all.
    pub open: bool,
}

impl Parts<'_> {
    /// Whether the pattern takes that segment in that place.
    pub fn takes(&self, place: usize, segment: &str) -> bool {
        match self.segments.get(place) {
            Some(Some(literal)) => *literal == segment,
            Some(None) => !segment.is_empty(),
            None => self.open,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(String),
    /// `*`: any one segment that is not empty.
    Any,
}

impl Segment {
    fn literal(&self) -> Option<&str> {
        match self {
            Self::Literal(own) => Some(own),
            Self::Any => None,
        }
    }

    fn matches(&self, segment: &str) -> bool {
        match self {
            Self::Literal(own) => own == segment,
            Self::Any => !segment.is_empty(),
        }
    }

    fn covers(&self, other: &Self) -> bool {
        match other {
            Self::Literal(literal) => self.matches(literal),
            Self::Any => *self == Self::Any,
        }
    }
}

/// A path, `*` for one segment, `/**` at the end for the path itself and everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    text: String,
    segments: Vec<Segment>,
    /// Ends in `/**`.
    open: bool,
}

impl PathPattern {
    /// Reads a pattern. The error is a reason for the operator.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix('/').ok_or("a path begins with a slash")?;
        if text.contains('%') {
            return Err("write characters as they are, without percent escapes".to_owned());
        }
        // What no canonical path can hold would be a pattern that never matches.
        CanonicalPath::parse(text).map_err(|ambiguity| format!("the path {ambiguity}"))?;
        let (rest, open) = match rest {
            "**" => ("", true),
            rest => rest.strip_suffix("/**").map_or((rest, false), |front| (front, true)),
        };
        let mut segments = Vec::new();
        if !(open && rest.is_empty()) {
            for segment in rest.split('/') {
                segments.push(match segment {
                    "*" => Segment::Any,
                    "**" => return Err("\"**\" stands only at the end".to_owned()),
                    part if part.contains('*') => {
                        return Err("a star stands for one whole segment".to_owned());
                    }
                    part => Segment::Literal(part.to_owned()),
                });
            }
        }
        Ok(Self { text: text.to_owned(), segments, open })
    }

    pub(crate) fn parts(&self) -> Parts<'_> {
        Parts { segments: self.segments.iter().map(Segment::literal).collect(), open: self.open }
    }

    /// A pattern for exactly this path.
    pub(crate) fn exact(path: &CanonicalPath) -> Self {
        let segments = path.segments();
        Self {
            text: format!("/{}", segments.join("/")),
            segments: segments.iter().cloned().map(Segment::Literal).collect(),
            open: false,
        }
    }

    pub fn matches(&self, path: &CanonicalPath) -> bool {
        let (own, other) = (&self.segments, path.segments());
        let long_enough =
            if self.open { other.len() >= own.len() } else { other.len() == own.len() };
        long_enough && own.iter().zip(other).all(|(own, other)| own.matches(other))
    }

    /// Whether every path that the other pattern matches is matched by this one.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let (own, others) = (&self.segments, &other.segments);
        let long_enough = match self.open {
            true => others.len() >= own.len(),
            false => !other.open && others.len() == own.len(),
        };
        long_enough && own.iter().zip(others).all(|(own, other)| own.covers(other))
    }

    /// Whether it matches every request of git for the repository, in whatever letters: only stars
    /// do.
    pub(crate) fn is_above(&self, repository: &RepositoryPattern) -> bool {
        self.open
            && self.segments.len() <= repository.segments.len()
            && self.segments.iter().all(|own| *own == Segment::Any)
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Git repositories over HTTPS: `owner/name`, `owner/*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryPattern {
    text: String,
    segments: Vec<Segment>,
}

/// What a git client asks of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GitService {
    /// Clone and fetch.
    Upload,
    /// Push.
    Receive,
}

impl RepositoryPattern {
    /// Reads a pattern. The error is a reason for the operator.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.to_ascii_lowercase();
        let text = text.strip_suffix(".git").unwrap_or(&text);
        if text.is_empty() || text.starts_with('/') || text.ends_with('/') {
            return Err("a repository is written as \"owner/name\"".to_owned());
        }
        let pattern = PathPattern::parse(&format!("/{text}"))?;
        if pattern.open {
            return Err("\"**\" cannot stand in a repository".to_owned());
        }
        Ok(Self { text: text.to_owned(), segments: pattern.segments })
    }

    pub(crate) fn parts(&self) -> Parts<'_> {
        Parts { segments: self.segments.iter().map(Segment::literal).collect(), open: false }
    }

    /// Whether every repository that the other pattern names is named by this one.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let (own, others) = (&self.segments, &other.segments);
        own.len() == others.len() && own.iter().zip(others).all(|(own, other)| own.covers(other))
    }

    /// Whether the segments before git's own name this repository; case-folded, with or without
    /// `.git`, as the servers read them.
    fn matches(&self, segments: &[String]) -> bool {
        self.segments.len() == segments.len()
            && self.segments.iter().zip(segments).enumerate().all(|(i, (own, segment))| {
                let folded = segment.to_ascii_lowercase();
                let last = i + 1 == segments.len();
                let name =
                    if last { folded.strip_suffix(".git").unwrap_or(&folded) } else { &folded };
                own.matches(name)
            })
    }
}

impl fmt::Display for RepositoryPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Which git service a request is for, if it is one of the three that the smart HTTP protocol
/// makes (gitprotocol-http), and whether the repository is among those listed.
pub(crate) fn git_request(
    repositories: &[RepositoryPattern],
    method: &str,
    path: &CanonicalPath,
    query: Option<&str>,
) -> Option<(GitService, bool)> {
    let (front, service) = match path.segments() {
        [front @ .., info, refs] if method == "GET" && info == "info" && refs == "refs" => {
            // The whole query, so that no second `service` can mean something else.
            (front, query?.strip_prefix("service=")?)
        }
        [front @ .., last] if method == "POST" && query.is_none_or(str::is_empty) => {
            (front, last.as_str())
        }
        _ => return None,
    };
    let service = match service {
        "git-upload-pack" => GitService::Upload,
        "git-receive-pack" => GitService::Receive,
        _ => return None,
    };
    Some((service, repositories.iter().any(|pattern| pattern.matches(front))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_patterns_match_hosts() {
        for (pattern, yes, no) in [
            ("example.com", "example.com EXAMPLE.com. ", "www.example.com example.com.evil.test"),
            ("*.gitlab.com", "a.gitlab.com a.b.gitlab.com", "gitlab.com xgitlab.com gitlab.com.x"),
            ("BÜCHER.example", "xn--bcher-kva.example bücher.example", "bucher.example"),
            ("*.bücher.example", "a.xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("127.0.0.1", "127.1 0x7f000001 ::ffff:7f00:1", "127.0.0.2 localhost ::1"),
            ("[2001:db8::1]", "2001:db8:0::1", "2001:db8::2"),
        ] {
            let pattern = HostPattern::parse(pattern).unwrap();
            for text in yes.split_whitespace() {
                assert!(pattern.matches(&Host::parse(text).unwrap()), "{pattern} {text}");
            }
            for text in no.split_whitespace() {
                assert!(!pattern.matches(&Host::parse(text).unwrap()), "{pattern} {text}");
            }
        }
    }

    #[test]
    fn refuses_stars_in_the_middle_of_a_host() {
        for text in ["*", "a.*.com", "*a.com", "*.*.com", "*.10.0.0.1", "*.", "", "a b"] {
            assert!(HostPattern::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_wider_host_pattern_covers_a_narrower_one() {
        for (wide, narrow, expected) in [
            ("a.test", "a.test", true),
            ("*.a.test", "b.a.test", true),
            ("*.a.test", "*.b.a.test", true),
            ("*.a.test", "*.a.test", true),
            ("*.a.test", "a.test", false),
            ("*.b.a.test", "*.a.test", false),
            ("b.a.test", "*.a.test", false),
            ("*.a.test", "*.ba.test", false),
        ] {
            let parse = |text| HostPattern::parse(text).unwrap();
            assert_eq!(parse(wide).covers(&parse(narrow)), expected, "{wide} {narrow}");
        }
    }

    #[test]
    fn a_wider_path_pattern_covers_a_narrower_one() {
        for (wide, narrow, expected) in [
            ("/**", "/a/*/**", true),
            ("/a/**", "/a", true),
            ("/a/**", "/a/", true),
            ("/a/*", "/a/b", true),
            ("/a/*", "/a/*", true),
            ("/*/b", "/a/b", true),
            ("/a/*", "/a/", false),
            ("/a/b", "/a/*", false),
            ("/a", "/a/**", false),
            ("/a/*/**", "/a/**", false),
            ("/a/**", "/**", false),
            ("/a/**", "/ab/**", false),
        ] {
            let parse = |text| PathPattern::parse(text).unwrap();
            assert_eq!(parse(wide).covers(&parse(narrow)), expected, "{wide} {narrow}");
        }
    }

    #[test]
    fn path_patterns_match_paths() {
        for (pattern, yes, no) in [
            ("/", "/", "/a"),
            ("/**", "/ /a /a/b/", ""),
            ("/a", "/a /%61", "/a/ /A /ab /a/b /"),
            ("/a/", "/a/", "/a /a/b"),
            ("/a/**", "/a /a/ /a/b /a/b/c", "/ab /b/a /"),
            ("/a/*", "/a/b /a/*", "/a /a/ /a/b/c /a/b/"),
            ("/a/*/c", "/a/b/c", "/a//c2 /a/b/d /a/c"),
            ("/a/*/**", "/a/b /a/b/c", "/a /a/"),
        ] {
            let pattern = PathPattern::parse(pattern).unwrap();
            let matches =
                |text| CanonicalPath::parse(text).is_ok_and(|path| pattern.matches(&path));
            for text in yes.split_whitespace() {
                assert!(matches(text), "{pattern} {text}");
            }
            for text in no.split_whitespace() {
                assert!(!matches(text), "{pattern} {text}");
            }
        }
    }

    #[test]
    fn refuses_path_patterns_that_look_cleverer_than_they_are() {
        for text in ["", "a", "/a*", "/**/a", "/a/../b", "/a//b", "/a%20b", "/a\\b", "/a?b", "/a**"]
        {
            assert!(PathPattern::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn recognises_the_three_requests_of_git() {
        use GitService::{Receive, Upload};
        let listed = [RepositoryPattern::parse("acme/Widget").unwrap()];
        for (method, path, query, expected) in [
            ("GET", "/acme/widget/info/refs", "service=git-upload-pack", Some((Upload, true))),
            ("GET", "/ACME/Widget.git/info/refs", "service=git-upload-pack", Some((Upload, true))),
            ("GET", "/acme/%77idget/info/refs", "service=git-receive-pack", Some((Receive, true))),
            ("POST", "/acme/widget.git/git-upload-pack", "", Some((Upload, true))),
            ("POST", "/acme/widget.git/git-receive-pack", "", Some((Receive, true))),
            ("GET", "/acme/other/info/refs", "service=git-upload-pack", Some((Upload, false))),
            ("GET", "/acme/info/refs", "service=git-upload-pack", Some((Upload, false))),
            ("GET", "/x/acme/widget/info/refs", "service=git-upload-pack", Some((Upload, false))),
            ("GET", "/acme/widget/info/refs", "", None),
            ("GET", "/acme/widget/info/refs", "service=git-upload-archive", None),
            ("GET", "/acme/widget/info/refs", "service=git-upload-pack&service=x", None),
            ("POST", "/acme/widget/info/refs", "service=git-upload-pack", None),
            ("GET", "/acme/widget/git-upload-pack", "", None),
            ("POST", "/acme/widget/git-upload-pack", "a=b", None),
            ("POST", "/acme/widget/info/lfs/objects/batch", "", None),
            ("GET", "/acme/widget/HEAD", "", None),
        ] {
            let path = CanonicalPath::parse(path).unwrap();
            let query = (!query.is_empty()).then_some(query);
            let found = git_request(&listed, method, &path, query);
            assert_eq!(found, expected, "{method} {path:?} {query:?}");
        }
    }
}
