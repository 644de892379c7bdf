//! What a request asks to be taken for, besides what it is.
//!
//! Many frameworks carry a request out by another method or path than those of its request line,
//! where a field or a parameter of the query says so. A rule that lists methods or paths would be
//! walked around: so such a request is judged as everything that it may be taken for.

use std::borrow::Cow;

use crate::head::RequestHead;

/// Fields that name another method, in lower case.
const METHOD_FIELDS: [&str; 3] = ["x-http-method-override", "x-http-method", "x-method-override"];
/// Fields that name another path, or a whole URI.
const PATH_FIELDS: [&str; 5] =
    ["x-original-url", "x-original-uri", "x-rewrite-url", "x-override-url", "x-http-path-override"];
/// The parameter of the query that names another method.
const METHOD_PARAMETER: &[u8] = b"_method";
/// Others that one request may name of either. No framework looks at more than one.
const NAMES_MAX: usize = 4;

/// The method and the path of a request, as they may be taken for something else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Where it says so, as a person reads it.
    pub by: String,
    pub method: String,
    pub path: String,
    pub query: Option<String>,
}

/// Why a request cannot be judged as what it may be taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than {NAMES_MAX} fields or parameters ask for another method or path")]
pub struct TooMany;

/// What else a request may be taken for; empty for nearly all.
pub fn of(head: &RequestHead) -> Result<Vec<Taken>, TooMany> {
    let (mut methods, mut paths) = (Vec::new(), Vec::new());
    for (name, value) in head.headers.iter() {
        let list = match () {
            () if is_one(name, &METHOD_FIELDS) => &mut methods,
            () if is_one(name, &PATH_FIELDS) => &mut paths,
            () => continue,
        };
        let value = String::from_utf8_lossy(value.trim_ascii());
        if !value.is_empty() {
            list.push((String::from_utf8_lossy(name).into_owned(), value.into_owned()));
        }
    }
    for value in head.query().into_iter().flat_map(method_parameters) {
        methods.push(("_method in the query".to_owned(), value));
    }
    if methods.is_empty() && paths.is_empty() {
        return Ok(Vec::new());
    }
    if methods.len() > NAMES_MAX || paths.len() > NAMES_MAX {
        return Err(TooMany);
    }
    Ok(every(head, &methods, &paths))
}

/// Whether a field has one of these names. CGI and what came of it do not tell `_` from `-`.
fn is_one(name: &[u8], names: &[&str]) -> bool {
    let same = |(a, b): (&u8, &u8)| a.eq_ignore_ascii_case(b) || *a == b'_' && *b == b'-';
    name.first().is_some_and(|first| first.eq_ignore_ascii_case(&b'x'))
        && names
            .iter()
            .any(|known| known.len() == name.len() && name.iter().zip(known.as_bytes()).all(same))
}

/// Every combination: whoever honours one of them may honour another, or not.
fn every(
    head: &RequestHead,
    methods: &[(String, String)],
    paths: &[(String, String)],
) -> Vec<Taken> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let own_method = (String::new(), text(&head.method));
    let own_path = (String::new(), text(head.path()), head.query().map(text));
    let paths = paths.iter().map(|(by, uri)| {
        let (path, query) = path_of(uri);
        (by.clone(), path, query)
    });
    let paths: Vec<_> = std::iter::once(own_path).chain(paths).collect();
    let mut all = Vec::new();
    for (by_method, method) in std::iter::once(&own_method).chain(methods) {
        for (by_path, path, query) in &paths {
            let by: Vec<_> = [by_method, by_path].into_iter().filter(|by| !by.is_empty()).collect();
            if by.is_empty() {
                continue;
            }
            // Frameworks take a method in any case.
            let method = method.to_ascii_uppercase();
            let by = by.into_iter().map(String::as_str).collect::<Vec<_>>().join(" and ");
            all.push(Taken { by, method, path: path.clone(), query: query.clone() });
        }
    }
    all
}

/// Path and query of a whole URI, or of what is one without scheme and host.
fn path_of(uri: &str) -> (String, Option<String>) {
    let rest = match uri.split_once("://") {
        Some((scheme, rest)) if scheme.bytes().all(|b| b.is_ascii_alphanumeric()) => {
            rest.find(['/', '?']).map_or("/", |at| &rest[at..])
        }
        _ => uri,
    };
    let (path, query) = match rest.split_once('?') {
        Some((path, query)) => (path, Some(query.to_owned())),
        None => (rest, None),
    };
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    (path, query)
}

/// What the parameter of that name says, wherever and however it is written in the query.
fn method_parameters(query: &[u8]) -> impl Iterator<Item = String> + '_ {
    query.split(|b| matches!(b, b'&' | b';')).filter_map(|pair| {
        let mark = pair.iter().position(|b| *b == b'=').unwrap_or(pair.len());
        let name = decoded(&pair[..mark]);
        let name = name.trim_ascii_start();
        // PHP has `_` for a dot, a blank and a bracket in a name.
        let same = |(a, b): (&u8, &u8)| {
            a.eq_ignore_ascii_case(b) || *b == b'_' && matches!(a, b'.' | b' ' | b'[')
        };
        let is_it =
            name.len() == METHOD_PARAMETER.len() && name.iter().zip(METHOD_PARAMETER).all(same);
        let value = decoded(pair.get(mark + 1..).unwrap_or_default());
        let value = String::from_utf8_lossy(value.trim_ascii()).into_owned();
        (is_it && !value.is_empty()).then_some(value)
    })
}

/// Percent-encoding and plus signs undone, as forms have them; what is neither stays.
fn decoded(bytes: &[u8]) -> Cow<'_, [u8]> {
    if !bytes.iter().any(|b| matches!(b, b'%' | b'+')) {
        return Cow::Borrowed(bytes);
    }
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let pair = bytes.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        let byte =
            pair.and_then(|hex| hex::decode(hex).ok()).and_then(|byte| byte.first().copied());
        out.push(byte.unwrap_or(if bytes[at] == b'+' { b' ' } else { bytes[at] }));
        at += if byte.is_some() { 3 } else { 1 };
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use policies::Scheme;

    use super::*;
    use crate::head::Fields;

    fn taken(target: &'static str, fields: &[(&'static str, &'static str)]) -> Vec<Taken> {
        let headers: Fields = fields
            .iter()
            .map(|(n, v)| (Bytes::from_static(n.as_bytes()), Bytes::from_static(v.as_bytes())))
            .collect();
        let head = RequestHead {
            method: Bytes::from_static(b"POST"),
            target: Bytes::from_static(target.as_bytes()),
            scheme: Scheme::Https,
            authority: "a.test".into(),
            headers,
        };
        of(&head).unwrap()
    }

    #[test]
    fn a_field_that_names_a_method_is_found_in_any_spelling() {
        for name in [
            "X-HTTP-Method-Override",
            "x-http-method-override",
            "X_HTTP_METHOD_OVERRIDE",
            "X-Http_Method-Override",
            "X-HTTP-Method",
            "X-Method-Override",
        ] {
            let all = taken("/a", &[("Accept", "*/*"), (name, " delete ")]);

            let [one] = &all[..] else { panic!("{name}: {all:?}") };
            assert_eq!((one.method.as_str(), one.path.as_str()), ("DELETE", "/a"));
            assert_eq!(one.by, name);
        }
    }

    #[test]
    fn the_parameter_is_found_however_it_is_encoded_and_other_parameters_are_not() {
        for query in [
            "_method=DELETE",
            "a=1&_method=delete",
            "%5Fmethod=DELET%45",
            ".method=DELETE",
            "a;+_method=DELETE",
            "_METHOD=DELETE&_method=",
        ] {
            let all = taken(Box::leak(format!("/a?{query}").into_boxed_str()), &[]);

            assert_eq!(all.len(), 1, "{query}");
            assert_eq!(all[0].method, "DELETE", "{query}");
        }
        for query in ["", "method=DELETE", "_methods=x", "x_method=DELETE", "a=_method", "_method"]
        {
            let all = taken(Box::leak(format!("/a?{query}").into_boxed_str()), &[]);

            assert_eq!(all, [], "{query}");
        }
    }

    #[test]
    fn a_field_that_names_a_path_may_hold_a_whole_uri() {
        for (value, path, query) in [
            ("/admin", "/admin", None),
            ("/admin?x=1", "/admin", Some("x=1")),
            ("admin", "/admin", None),
            ("https://b.test/admin", "/admin", None),
            ("https://b.test", "/", None),
        ] {
            let all = taken("/a?b", &[("X-Original-URL", value)]);

            let [one] = &all[..] else { panic!("{value}: {all:?}") };
            assert_eq!((one.method.as_str(), one.path.as_str()), ("POST", path), "{value}");
            assert_eq!(one.query.as_deref(), query, "{value}");
        }
    }

    #[test]
    fn every_combination_is_judged_and_their_number_has_a_bound() {
        let fields = [("X-HTTP-Method-Override", "PUT"), ("X-Rewrite-URL", "/b")];

        let all = taken("/a?_method=PATCH", &fields);

        let seen: Vec<_> = all.iter().map(|t| (t.method.as_str(), t.path.as_str())).collect();
        let wanted =
            [("POST", "/b"), ("PUT", "/a"), ("PUT", "/b"), ("PATCH", "/a"), ("PATCH", "/b")];
        assert_eq!(seen, wanted);

        let headers =
            (0..5).map(|_| (Bytes::from_static(b"x-http-method"), Bytes::from_static(b"GET")));
        let head = RequestHead {
            method: Bytes::from_static(b"GET"),
            target: Bytes::from_static(b"/"),
            scheme: Scheme::Https,
            authority: "a.test".into(),
            headers: headers.collect(),
        };
        assert_eq!(of(&head), Err(TooMany));
    }
}
