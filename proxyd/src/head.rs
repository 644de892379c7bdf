//! Heads of requests and responses: what the relay read, what policy judges, what goes on.
//!
//! Names, values, order and the raw target stay as the sender wrote them; nothing is normalised
//! here. Lookups ignore the case of names (RFC 9110 section 5.1). Trailers are [`Fields`] too.

use std::ops::{Deref, DerefMut};

use bytes::Bytes;
use policies::Scheme;

/// Header fields in the order and spelling of their sender.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Fields(Vec<(Bytes, Bytes)>);

impl Fields {
    pub fn new() -> Self {
        Self::default()
    }

    /// The value of the first field of that name.
    pub fn first(&self, name: &str) -> Option<&Bytes> {
        self.0.iter().find(|(n, _)| is(n, name)).map(|(_, value)| value)
    }

    /// The values of all fields of that name, in order.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Bytes> + 'a {
        self.0.iter().filter(move |(n, _)| is(n, name)).map(|(_, value)| value)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.first(name).is_some()
    }

    /// Removes every field of that name and says how many there were.
    pub fn remove_all(&mut self, name: &str) -> usize {
        let before = self.0.len();
        self.0.retain(|(n, _)| !is(n, name));
        before - self.0.len()
    }

    /// Puts `value` in the place of the first field of that name, or at the end, and removes
    /// every other field of that name.
    pub fn set(&mut self, name: &str, value: Bytes) {
        let Some(at) = self.0.iter().position(|(n, _)| is(n, name)) else {
            self.append(name, value);
            return;
        };
        self.0[at].1 = value;
        let mut index = 0;
        self.0.retain(|(n, _)| {
            index += 1;
            index - 1 == at || !is(n, name)
        });
    }

    /// Adds a field at the end.
    pub fn append(&mut self, name: &str, value: Bytes) {
        self.0.push((Bytes::copy_from_slice(name.as_bytes()), value));
    }

    /// The comma-separated members of all fields of that name, trimmed, in order
    /// (RFC 9110 section 5.6.1); empty members are passed over.
    pub fn members<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        self.all(name)
            .flat_map(|value| value.split(|b| *b == b','))
            .map(<[u8]>::trim_ascii)
            .filter(|member| !member.is_empty())
    }

    /// Whether a list field has that member, in any case.
    pub fn lists(&self, name: &str, member: &str) -> bool {
        self.members(name).any(|m| m.eq_ignore_ascii_case(member.as_bytes()))
    }
}

fn is(name: &[u8], wanted: &str) -> bool {
    name.eq_ignore_ascii_case(wanted.as_bytes())
}

impl Deref for Fields {
    type Target = Vec<(Bytes, Bytes)>;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Fields {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl FromIterator<(Bytes, Bytes)> for Fields {
    fn from_iter<I: IntoIterator<Item = (Bytes, Bytes)>>(fields: I) -> Self {
        Self(fields.into_iter().collect())
    }
}

/// The head of one request. It has no `Debug`: after injection it holds a secret.
pub struct RequestHead {
    /// As sent; methods are case-sensitive (RFC 9110 section 9.1).
    pub method: Bytes,
    /// The raw target as it goes upstream: path and query, or `*`.
    pub target: Bytes,
    pub scheme: Scheme,
    /// Host and port as the client asked for them.
    pub authority: String,
    /// Without pseudo-headers. An HTTP/1.1 request's `Host` is among them.
    pub headers: Fields,
}

impl RequestHead {
    /// The raw path, without the query.
    pub fn path(&self) -> &[u8] {
        match self.query_mark() {
            Some(mark) => &self.target[..mark],
            None => &self.target,
        }
    }

    /// The raw query, without the question mark.
    pub fn query(&self) -> Option<&[u8]> {
        self.query_mark().map(|mark| &self.target[mark + 1..])
    }

    fn query_mark(&self) -> Option<usize> {
        self.target.iter().position(|b| *b == b'?')
    }
}

/// The head of one response, interim or final.
pub struct ResponseHead {
    pub status: u16,
    /// The reason phrase of HTTP/1.1; empty in HTTP/2.
    pub reason: Bytes,
    pub headers: Fields,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(list: &[(&'static str, &'static str)]) -> Fields {
        list.iter()
            .map(|(n, v)| (Bytes::from_static(n.as_bytes()), Bytes::from_static(v.as_bytes())))
            .collect()
    }

    #[test]
    fn set_keeps_the_place_and_leaves_one_copy() {
        let mut headers = fields(&[("A", "1"), ("b", "2"), ("a", "3"), ("c", "4")]);

        headers.set("A", Bytes::from_static(b"new"));

        assert!(headers == fields(&[("A", "new"), ("b", "2"), ("c", "4")]));
    }

    #[test]
    fn removal_ignores_case_and_counts() {
        let mut headers = fields(&[("Authorization", "1"), ("x", "2"), ("AUTHORIZATION", "3")]);

        assert_eq!(headers.remove_all("authorization"), 2);
        assert!(headers == fields(&[("x", "2")]));
    }

    #[test]
    fn list_members_come_from_all_copies() {
        let headers = fields(&[("Connection", "close, X-A"), ("connection", " upgrade ,,")]);

        assert!(headers.lists("connection", "x-a"));
        assert!(headers.lists("connection", "UPGRADE"));
        assert_eq!(headers.members("connection").count(), 3);
    }

    #[test]
    fn path_and_query_are_cut_at_the_first_mark() {
        let head = RequestHead {
            method: Bytes::from_static(b"GET"),
            target: Bytes::from_static(b"/a%2Fb?x=1?y"),
            scheme: Scheme::Https,
            authority: String::new(),
            headers: Fields::new(),
        };

        assert_eq!(head.path(), b"/a%2Fb");
        assert_eq!(head.query(), Some(&b"x=1?y"[..]));
    }
}
