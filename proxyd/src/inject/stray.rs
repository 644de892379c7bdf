//! Finds placeholders in a head, wherever they hide: raw, percent-encoded, inside Basic's base64.

use std::borrow::Cow;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use crate::head::RequestHead;
use crate::vault::placeholder;

/// Base64 as lenient servers read it.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// The place of the first placeholder, whosever it is.
pub(super) fn first(head: &RequestHead) -> Option<&'static str> {
    search(head, &|text| placeholder::marks(text).next().is_some())
}

/// The place of the first placeholder that is none of `own`.
pub(super) fn first_foreign(head: &RequestHead, own: &[String]) -> Option<&'static str> {
    search(head, &|text| !only(text, own))
}

/// Whether every placeholder in the text is one of `own`.
pub(super) fn only(text: &[u8], own: &[String]) -> bool {
    placeholder::marks(text)
        .all(|mark| own.iter().any(|own| placeholder::start_of(own, text, mark).is_some()))
}

/// Whether one of `own` stands in the text, raw, percent-encoded or inside Basic's base64.
pub(super) fn holds(text: &[u8], own: &[String]) -> bool {
    let stands = |text: &[u8]| {
        placeholder::marks(text)
            .any(|mark| own.iter().any(|own| placeholder::start_of(own, text, mark).is_some()))
    };
    stands(text)
        || stands(&percent_decoded(text))
        || basic_pair(text).is_some_and(|pair| stands(&pair))
}

fn search(head: &RequestHead, found: &dyn Fn(&[u8]) -> bool) -> Option<&'static str> {
    let either = |text: &[u8]| {
        found(text)
            || match percent_decoded(text) {
                Cow::Borrowed(_) => false,
                Cow::Owned(decoded) => found(&decoded),
            }
    };
    let query = head.query().unwrap_or_default();
    for (place, text) in [
        ("path", head.path()),
        ("query", query),
        ("authority", head.authority.as_bytes()),
        ("method", &head.method),
    ] {
        if either(text) {
            return Some(place);
        }
    }
    for (name, value) in head.headers.iter() {
        if either(name) || either(value) {
            return Some("headers");
        }
        if basic_pair(value).is_some_and(|pair| either(&pair)) {
            return Some("Basic credentials");
        }
    }
    None
}

/// What stands inside `Basic …`, whatever header it is in.
pub(super) fn basic_pair(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, token) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return None;
    }
    LENIENT.decode(token.trim_ascii()).ok()
}

/// With every valid escape resolved, once; borrowed when there is none.
pub fn percent_decoded(text: &[u8]) -> Cow<'_, [u8]> {
    if memchr::memchr(b'%', text).is_none() {
        return Cow::Borrowed(text);
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        let escape = match (byte, after) {
            (b'%', [high, low, ..]) => digit(high).zip(digit(low)),
            _ => None,
        };
        match escape {
            Some((high, low)) => {
                out.push(high << 4 | low);
                rest = &after[2..];
            }
            None => out.push(*byte),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::super::head;
    use super::*;
    use base64::engine::general_purpose::STANDARD as BASE64;

    const OWN: &str = "pxd_PXDmark1ownownown";
    const OTHER: &str = "pxd_PXDmark1someoneelse";

    fn encoded(text: &str) -> String {
        text.bytes().map(|byte| format!("%{byte:02x}")).collect()
    }

    #[test]
    fn finds_placeholders_in_every_place_and_tells_foreign_ones() {
        let basic = |text: &str| format!("bAsIc {}", BASE64.encode(text));
        let unpadded = basic(&format!("x:{OTHER}")).trim_end_matches('=').to_owned();
        for (target, header, place) in [
            (format!("/a/{OTHER}/b"), String::new(), Some("path")),
            (format!("/a?k={OTHER}"), String::new(), Some("query")),
            (format!("/{}", encoded(OTHER)), String::new(), Some("path")),
            (format!("/?a={}&b=%zz", encoded(OTHER)), String::new(), Some("query")),
            ("/".into(), format!("token {OTHER}"), Some("headers")),
            ("/".into(), format!("token {OWN}, {OTHER}"), Some("headers")),
            ("/".into(), basic(&format!("x:{OTHER}")), Some("Basic credentials")),
            ("/".into(), basic(&format!("{OTHER}:x")), Some("Basic credentials")),
            ("/".into(), unpadded, Some("Basic credentials")),
            ("/a?b=c%".into(), "Basic !!!".into(), None),
            (format!("/{OWN}?k={OWN}"), basic(&format!("x:{OWN}")), None),
        ] {
            let head = head(&target, &[("x-any", &header)]);
            assert_eq!(first_foreign(&head, &[OWN.to_owned()]), place, "{target} {header}");
            if place.is_some() {
                assert!(first(&head).is_some());
            }
        }
        assert_eq!(first(&head("/", &[("authorization", OWN)])), Some("headers"));
        assert_eq!(first(&head("/", &[(OWN, "name")])), Some("headers"));
        assert_eq!(first(&head("/", &[("authorization", "Bearer own key")])), None);
    }
}
