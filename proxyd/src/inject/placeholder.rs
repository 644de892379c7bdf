//! Replaces a lease's own placeholder, where the policy lists the place.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use policies::Place;

use super::stray::basic_pair;
use crate::head::RequestHead;
use crate::vault::{Secret, placeholder};

/// Whether the placeholder stands in one of the places.
pub(super) fn stands_in(
    head: &RequestHead,
    body: Option<&[u8]>,
    own: &str,
    places: &[Place],
) -> bool {
    let stands = |text: &[u8]| starts(text, own).next().is_some();
    places.iter().any(|place| match place {
        Place::Header => head.headers.iter().any(|(_, value)| stands(value)),
        Place::Basic => {
            head.headers.all("authorization").any(|v| basic_pair(v).is_some_and(|p| stands(&p)))
        }
        Place::Path => stands(head.path()),
        Place::Query => head.query().is_some_and(stands),
        Place::Body => body.is_some_and(stands),
    })
}

/// Puts the value in its place, encoded as the place demands.
pub(super) fn replace(
    head: &mut RequestHead,
    own: &str,
    value: &[u8],
    places: &[Place],
) -> Result<(), &'static str> {
    for place in places {
        match place {
            Place::Header => in_headers(head, own, value)?,
            Place::Basic => in_basic(head, own, value)?,
            Place::Path => in_path(head, own, value)?,
            Place::Query => in_query(head, own, value),
            // The body is not part of the head: see `in_body`.
            Place::Body => {}
        }
    }
    Ok(())
}

/// The body with the value in place of every `own`, written as its kind demands; none when there
/// is none. In text and XML the value stands as it is, where none of its characters means anything
/// there; in all other kinds nothing is replaced, and a body with an `own` in it is refused.
pub(super) fn in_body(
    body: &[u8],
    content_type: Option<&[u8]>,
    own: &str,
    value: &[u8],
) -> Result<Option<Secret>, &'static str> {
    let kind = content_type.unwrap_or_default().to_ascii_lowercase();
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    if kind == b"application/x-www-form-urlencoded" {
        return Ok(replaced(body, own, percent_encoded(value).expose_secret()));
    }
    if kind == b"application/json" || kind.ends_with(b"+json") {
        let text = std::str::from_utf8(value).map_err(|_| "its value cannot stand in JSON")?;
        let quoted = Secret::new(serde_json::to_vec(text).map_err(|_| "its value is no text")?);
        let quoted = quoted.expose_secret();
        return Ok(replaced(body, own, &quoted[1..quoted.len() - 1]));
    }
    match starts(body, own).next() {
        None => Ok(None),
        Some(_) if kind.starts_with(b"text/") || kind == b"application/xml" => {
            let plain = |byte: &u8| byte.is_ascii_graphic() && !b"<>&\"'".contains(byte);
            match value.iter().all(plain) {
                true => Ok(replaced(body, own, value)),
                false => Err("its value cannot stand in a body of that kind"),
            }
        }
        Some(_) => Err("nothing is replaced in a body of that kind"),
    }
}

/// The greatest length that [`in_body`] can come to. A byte takes six at most, as JSON writes it.
pub(super) fn in_body_max(body: &[u8], own: &str, value: &[u8]) -> usize {
    let found = starts(body, own).count();
    body.len().saturating_add(found.saturating_mul(value.len()).saturating_mul(6))
}

fn in_headers(head: &mut RequestHead, own: &str, value: &[u8]) -> Result<(), &'static str> {
    for (_, text) in head.headers.iter_mut() {
        if let Some(replaced) = replaced(text, own, value) {
            // RFC 9110, section 5.5: a line end would begin a header of the value's choosing.
            if value.iter().any(|byte| (*byte < 0x20 && *byte != b'\t') || *byte == 0x7f) {
                return Err("its value holds control characters, which no header can carry");
            }
            *text = replaced.into_bytes();
        }
    }
    Ok(())
}

fn in_basic(head: &mut RequestHead, own: &str, value: &[u8]) -> Result<(), &'static str> {
    for (name, text) in head.headers.iter_mut() {
        if !name.eq_ignore_ascii_case(b"authorization") {
            continue;
        }
        let pair = basic_pair(text).and_then(|pair| replaced(&pair, own, value));
        if let Some(pair) = pair {
            let pair = pair.expose_secret();
            let mut encoded = vec![0; pair.len().div_ceil(3) * 4];
            STANDARD
                .encode_slice(pair, &mut encoded)
                .map_err(|_| "its value is too long for Basic credentials")?;
            let encoded = Secret::new(encoded);
            *text = Secret::concat(&[b"Basic ", encoded.expose_secret()]).into_bytes();
        }
    }
    Ok(())
}

fn in_path(head: &mut RequestHead, own: &str, value: &[u8]) -> Result<(), &'static str> {
    // Policy has judged a path with one segment here; the value must stay one, and no other.
    let Some(path) = replaced(head.path(), own, percent_encoded(value).expose_secret()) else {
        return Ok(());
    };
    if value.contains(&b'/') || value.contains(&b'\\') || value.windows(2).any(|w| w == b"..") {
        return Err("its value cannot be one segment of a path");
    }
    let target = match head.query() {
        None => path,
        Some(query) => Secret::concat(&[path.expose_secret(), b"?", query]),
    };
    head.target = target.into_bytes();
    Ok(())
}

fn in_query(head: &mut RequestHead, own: &str, value: &[u8]) {
    let encoded = percent_encoded(value);
    let query = head.query().and_then(|query| replaced(query, own, encoded.expose_secret()));
    if let Some(query) = query {
        head.target = Secret::concat(&[head.path(), b"?", query.expose_secret()]).into_bytes();
    }
}

/// Where `own` begins in `text`.
fn starts<'a>(text: &'a [u8], own: &'a str) -> impl Iterator<Item = usize> + 'a {
    placeholder::marks(text).filter_map(move |mark| placeholder::start_of(own, text, mark))
}

/// The text with every `own` replaced; none when there is none.
fn replaced(text: &[u8], own: &str, value: &[u8]) -> Option<Secret> {
    let mut pieces: Vec<&[u8]> = Vec::new();
    let mut from = 0;
    for start in starts(text, own) {
        pieces.extend([&text[from..start], value]);
        from = start + own.len();
    }
    if pieces.is_empty() {
        return None;
    }
    pieces.push(&text[from..]);
    Some(Secret::concat(&pieces))
}

/// RFC 3986, section 2.1: everything but unreserved characters.
pub(super) fn percent_encoded(value: &[u8]) -> Secret {
    let mut out = Vec::with_capacity(value.len() * 3);
    percent_encode(&mut out, value, b"");
    Secret::new(out)
}

/// The same at the end of `out`, with upper-case digits (section 2.3); `plain` stays too.
pub(super) fn percent_encode(out: &mut Vec<u8>, text: &[u8], plain: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text {
        match byte.is_ascii_alphanumeric() || b"-._~".contains(byte) || plain.contains(byte) {
            true => out.push(*byte),
            false => {
                out.extend([b'%', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{head, lines};
    use super::*;

    const OWN: &str = "pxd_PXDmark1ownownown";
    const VALUE: &str = "SECRET+CANARY=1";

    fn with(target: &str, header: &str, places: &[Place]) -> (Vec<String>, bool) {
        let target = target.replace("OWN", OWN);
        let header = header.replace("OWN", OWN);
        let mut head = head(&target, &[("Authorization", &header)]);
        let stood = stands_in(&head, None, OWN, places);
        replace(&mut head, OWN, VALUE.as_bytes(), places).unwrap();
        (lines(&head), stood)
    }

    #[test]
    fn replaces_in_the_listed_places_only_and_encodes_for_each() {
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text.replace("OWN", OWN)));
        let cases: Vec<(&str, String, Vec<Place>, [String; 2])> = vec![
            (
                "/a/OWN/b?k=OWN&j=OWN",
                "token OWN".into(),
                vec![Place::Header, Place::Path, Place::Query],
                [
                    "/a/SECRET%2BCANARY%3D1/b?k=SECRET%2BCANARY%3D1&j=SECRET%2BCANARY%3D1".into(),
                    format!("Authorization: token {VALUE}"),
                ],
            ),
            (
                "/OWN?OWN",
                "OWN".into(),
                vec![Place::Query],
                [format!("/{OWN}?SECRET%2BCANARY%3D1"), format!("Authorization: {OWN}")],
            ),
            (
                "/",
                basic("user:OWN"),
                vec![Place::Basic],
                ["/".into(), format!("Authorization: {}", basic(&format!("user:{VALUE}")))],
            ),
            (
                "/",
                basic("OWN:x-oauth"),
                vec![Place::Basic],
                ["/".into(), format!("Authorization: {}", basic(&format!("{VALUE}:x-oauth")))],
            ),
        ];
        for (target, header, places, expected) in cases {
            let (lines, stood) = with(target, &header, &places);
            assert_eq!(lines, expected);
            assert!(stood);
        }
        assert!(!with("/OWN", "", &[Place::Header, Place::Basic, Place::Query]).1);
    }

    #[test]
    fn a_value_that_would_change_its_place_is_refused() {
        for (value, place) in [
            ("two/segments", Place::Path),
            ("..value..", Place::Path),
            ("a\r\nb: c", Place::Header),
        ] {
            let mut head = head(&format!("/{OWN}"), &[("x", OWN)]);
            assert!(replace(&mut head, OWN, value.as_bytes(), &[place]).is_err(), "{value:?}");
        }
    }
}
