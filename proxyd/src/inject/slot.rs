//! The authentication slot of a request: every header and query parameter that could name an
//! account, whichever of them this credential uses.
//!
//! Servers take a key from several places, and which one wins is theirs to say. So the slot is
//! cleared as a whole: otherwise a key of the sandbox's own would stand beside ours.

use bytes::Bytes;
use policies::Inject;

use crate::head::RequestHead;

/// Headers that carry keys. An underscore counts as a hyphen: gateways that hand headers to
/// programs as variables cannot tell them apart.
const HEADERS: &[&str] = &[
    "authorization",
    "x-authorization",
    "x-api-key",
    "api-key",
    "apikey",
    "x-auth-token",
    "x-auth-key",
    "x-access-token",
    "private-token",
    "job-token",
    "x-github-token",
    "x-gitlab-token",
    "x-goog-api-key",
];

/// Query parameters that carry keys, without hyphens and underscores.
const PARAMETERS: &[&str] = &[
    "accesstoken",
    "apikey",
    "xapikey",
    "authtoken",
    "privatetoken",
    "jobtoken",
    "oauthtoken",
    "bearertoken",
    "xamzcredential",
    "xamzsignature",
    "xamzsecuritytoken",
];

/// What the sandbox itself put into the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    /// Its placeholder and nothing else.
    Placeholder,
    /// A key of its own.
    Key,
}

/// What stands in the slot of a credential of that kind.
pub(super) fn found(inject: &Inject, head: &RequestHead, own: &[String]) -> Found {
    let (Some(header), Some(parameter)) = (header_of(inject), parameter_of(inject)) else {
        return Found::Nothing;
    };
    let fields = head.headers.iter().filter(|(name, _)| is_key(name, header));
    let values = fields.map(|(_, value)| &value[..]);
    let parameters = pieces(head.query().unwrap_or_default())
        .filter(|(name, _)| is_key_parameter(name, parameter))
        .map(|(_, value)| value);
    let mut found = Found::Nothing;
    for value in values.chain(parameters) {
        match super::stray::holds(value, own) {
            true if found == Found::Nothing => found = Found::Placeholder,
            true => {}
            false => return Found::Key,
        }
    }
    found
}

/// Clears the slot of a credential of that kind. One that replaces placeholders owns no slot: what
/// else the sandbox sends is its own affair there.
pub(super) fn clear(inject: &Inject, head: &mut RequestHead) {
    let (Some(header), Some(parameter)) = (header_of(inject), parameter_of(inject)) else { return };
    head.headers.retain(|(name, _)| !is_key(name, header));
    // A presigned address is signed again by what stands in it.
    if !matches!(inject, Inject::AwsSigV4 { .. }) {
        clear_query(head, parameter);
    }
}

fn header_of(inject: &Inject) -> Option<&str> {
    match inject {
        Inject::Placeholder { .. } => None,
        Inject::Header { name, .. } => Some(name),
        _ => Some("authorization"),
    }
}

fn parameter_of(inject: &Inject) -> Option<&str> {
    match inject {
        Inject::Query { name } => Some(name),
        other => header_of(other),
    }
}

fn is_key(name: &[u8], own: &str) -> bool {
    let fold = |byte: &u8| if *byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    let same = |known: &str| name.iter().map(fold).eq(known.bytes().map(|b| fold(&b)));
    same(own) || HEADERS.iter().any(|header| same(header))
}

fn is_key_parameter(name: &[u8], own: &str) -> bool {
    let (name, own) = (parameter_name(name), parameter_name(own.as_bytes()));
    name == own
        || PARAMETERS.iter().any(|known| known.as_bytes() == name)
        || (own == b"xgoogapikey" && name == b"key")
}

/// Names and values of a query's parameters. Some servers end one at a semicolon too.
fn pieces(query: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    query.split(|byte| matches!(byte, b'&' | b';')).map(|piece| {
        match piece.iter().position(|byte| *byte == b'=') {
            Some(at) => (&piece[..at], &piece[at + 1..]),
            None => (piece, &b""[..]),
        }
    })
}

fn clear_query(head: &mut RequestHead, own: &str) {
    let Some(query) = head.query() else { return };
    let mut kept: Vec<u8> = Vec::with_capacity(query.len());
    let mut removed = false;
    // Some servers end a parameter at a semicolon too; both ends stay as they were.
    for piece in query.split_inclusive(|byte| matches!(byte, b'&' | b';')) {
        let parameter = piece.strip_suffix(b"&").or(piece.strip_suffix(b";")).unwrap_or(piece);
        let name = parameter.split(|byte| *byte == b'=').next().unwrap_or_default();
        match is_key_parameter(name, own) {
            true => removed = true,
            false => kept.extend_from_slice(piece),
        }
    }
    if !removed {
        return;
    }
    if !query.ends_with(b"&") && !query.ends_with(b";") {
        while matches!(kept.last(), Some(b'&' | b';')) {
            kept.pop();
        }
    }
    let mut target = head.path().to_vec();
    if !kept.is_empty() {
        target.push(b'?');
        target.extend_from_slice(&kept);
    }
    head.target = Bytes::from(target);
}

/// A parameter's name without what servers do not tell apart: escapes, case, `-`, `_`, and the
/// brackets of lists.
fn parameter_name(name: &[u8]) -> Vec<u8> {
    super::stray::percent_decoded(name)
        .iter()
        .filter(|byte| byte.is_ascii_alphanumeric())
        .map(u8::to_ascii_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::{head, lines};
    use super::*;

    #[test]
    fn every_copy_of_every_key_header_goes_and_the_rest_stays_in_order() {
        let mut head = head(
            "/",
            &[
                ("Host", "api.example"),
                ("AUTHORIZATION", "Bearer attacker"),
                ("x-api-key", "attacker"),
                ("X_Api_Key", "attacker"),
                ("Accept", "*/*"),
                ("authorization", "again"),
                ("PRIVATE-TOKEN", "attacker"),
                ("X-Custom", "kept"),
            ],
        );

        clear(&Inject::Bearer, &mut head);

        assert_eq!(lines(&head), ["/", "Host: api.example", "Accept: */*", "X-Custom: kept"]);
    }

    #[test]
    fn a_header_of_the_policys_own_is_part_of_the_slot() {
        let mut head = head("/?x-custom=1&xcustom=2&a=3", &[("X_CUSTOM", "attacker"), ("a", "b")]);
        let inject = Inject::Header { name: "x-custom".into(), template: "{}".into() };

        clear(&inject, &mut head);

        assert_eq!(lines(&head), ["/?a=3", "a: b"]);
    }

    #[test]
    fn key_parameters_go_and_every_other_byte_of_the_query_stays() {
        for (before, after) in [
            ("/p", "/p"),
            ("/p?", "/p?"),
            ("/p?a=1&&b=%2f+;c", "/p?a=1&&b=%2f+;c"),
            ("/p?access_token=x", "/p"),
            ("/p?a=1&access_token=x", "/p?a=1"),
            ("/p?access_token=x&a=1", "/p?a=1"),
            ("/p?a=1;Access-Token=x;b=2", "/p?a=1;b=2"),
            ("/p?a=1&%61ccess_token=x&b", "/p?a=1&b"),
            ("/p?api_key=x&apikey=y&API-KEY[]=z&k=1", "/p?k=1"),
            ("/p?access_token", "/p"),
            ("/p?not_access_token_list=1&a", "/p?not_access_token_list=1&a"),
            ("/p?a=access_token", "/p?a=access_token"),
        ] {
            let mut head = head(before, &[]);
            clear(&Inject::Bearer, &mut head);
            assert_eq!(lines(&head), [after], "{before}");
        }
    }

    #[test]
    fn a_placeholder_credential_leaves_the_sandboxs_own_headers_alone() {
        let mut head = head("/?api_key=own", &[("Authorization", "Bearer own")]);

        clear(&Inject::Placeholder { places: vec![] }, &mut head);

        assert_eq!(lines(&head), ["/?api_key=own", "Authorization: Bearer own"]);
    }
}
