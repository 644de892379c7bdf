//! The forms in which a value may come back: raw and in the usual encodings.
//!
//! | form | variants |
//! |---|---|
//! | base64 | three alignments, standard and URL alphabet, percent-encoded once more |
//! | hex | lower, upper |
//! | percent | as `encodeURIComponent`, RFC 3986, forms; hex digits of either case; every byte |
//! | JSON | plain, `\/`, `\u00xx` for what HTML-safe encoders escape, in either case |
//! | HTML | `&amp;` and its siblings |
//!
//! A base64 form leaves out the characters that neighbours of the value have a part in: up to one
//! at each end, which tell less than one byte of the value.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use zeroize::Zeroizing;

use crate::vault::Secret;

type Text = Zeroizing<Vec<u8>>;

/// Every form of `value`, the value itself first, none twice.
pub fn forms(value: &[u8]) -> Vec<Secret> {
    let mut forms: Vec<Text> = vec![text(value.len(), value.iter().copied())];
    for alignment in 0..3 {
        let standard = base64_at(&STANDARD_NO_PAD, value, alignment);
        forms.push(base64_at(&URL_SAFE_NO_PAD, value, alignment));
        forms.push(percent(&standard, is_unreserved, false));
        forms.push(percent(&standard, is_unreserved, true));
        forms.push(json(&standard, |byte| byte == b'/', false));
        forms.push(standard);
    }
    for upper in [false, true] {
        forms.push(hex(value, upper));
        forms.push(percent(value, is_unreserved, upper));
        forms.push(percent(value, is_uri_component, upper));
        forms.push(form(value, upper));
        forms.push(percent(value, |_| false, upper));
        forms.push(json(value, |_| false, upper));
        forms.push(json(value, |byte| byte == b'/', upper));
        forms.push(json(value, |byte| b"<>&'+\"`".contains(&byte), upper));
    }
    forms.push(html(value));
    forms.sort_by_key(|form| form.as_slice() != value);
    let mut seen: Vec<Secret> = Vec::with_capacity(forms.len());
    for mut form in forms {
        if !seen.iter().any(|known| known.expose_secret() == form.as_slice()) {
            seen.push(Secret::new(std::mem::take(&mut *form)));
        }
    }
    seen
}

/// Collects into room that never grows: growth would leave copies behind.
fn text(room: usize, bytes: impl IntoIterator<Item = u8>) -> Text {
    let mut out = Zeroizing::new(Vec::with_capacity(room));
    for byte in bytes {
        debug_assert!(out.len() < room, "the room is too small");
        out.push(byte);
    }
    out
}

/// The characters that the value alone decides when it begins `alignment` bytes into a group.
fn base64_at(engine: &impl Engine, value: &[u8], alignment: usize) -> Text {
    let padded = text(
        alignment + value.len(),
        std::iter::repeat_n(0, alignment).chain(value.iter().copied()),
    );
    let mut out = Zeroizing::new(vec![0; padded.len() * 4 / 3 + 4]);
    let written = engine
        .encode_slice(&padded, &mut out)
        .expect("four thirds of the input, rounded up, hold its base64");
    let (from, to) = ((alignment * 8).div_ceil(6), padded.len() * 8 / 6);
    text(to - from, out[from..to.min(written)].iter().copied())
}

fn hex(value: &[u8], upper: bool) -> Text {
    text(value.len() * 2, value.iter().flat_map(|byte| digits(*byte, upper)))
}

fn digits(byte: u8, upper: bool) -> [u8; 2] {
    let table: &[u8; 16] = if upper { b"0123456789ABCDEF" } else { b"0123456789abcdef" };
    [table[usize::from(byte >> 4)], table[usize::from(byte & 15)]]
}

/// RFC 3986, section 2.3.
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

fn is_uri_component(byte: u8) -> bool {
    is_unreserved(byte) || b"!*'()".contains(&byte)
}

fn percent(value: &[u8], plain: fn(u8) -> bool, upper: bool) -> Text {
    let encode = |byte: &u8| {
        let [high, low] = digits(*byte, upper);
        let (bytes, length) =
            if plain(*byte) { ([*byte, 0, 0], 1) } else { ([b'%', high, low], 3) };
        bytes.into_iter().take(length)
    };
    text(value.len() * 3, value.iter().flat_map(encode))
}

/// `application/x-www-form-urlencoded`: a space is a plus sign.
fn form(value: &[u8], upper: bool) -> Text {
    let mut out = percent(value, |byte| is_unreserved(byte) || byte == b' ' || byte == b'*', upper);
    out.iter_mut().filter(|byte| **byte == b' ').for_each(|byte| *byte = b'+');
    out
}

/// The inside of a JSON string (RFC 8259, section 7). What `escaped` names is escaped too: a slash
/// by a backslash, anything else by its number.
fn json(value: &[u8], escaped: fn(u8) -> bool, upper: bool) -> Text {
    let encode = |byte: &u8| {
        let short = |letter: u8| ([b'\\', letter, 0, 0, 0, 0], 2);
        let (bytes, length) = match *byte {
            b'/' if escaped(b'/') => short(b'/'),
            b'"' if !escaped(b'"') => short(b'"'),
            b'\\' => short(b'\\'),
            b'\n' => short(b'n'),
            b'\r' => short(b'r'),
            b'\t' => short(b't'),
            8 => short(b'b'),
            12 => short(b'f'),
            byte if byte < 32 || escaped(byte) => {
                let [high, low] = digits(byte, upper);
                ([b'\\', b'u', b'0', b'0', high, low], 6)
            }
            byte => ([byte, 0, 0, 0, 0, 0], 1),
        };
        bytes.into_iter().take(length)
    };
    text(value.len() * 6, value.iter().flat_map(encode))
}

fn html(value: &[u8]) -> Text {
    let encode = |byte: &u8| -> &[u8] {
        match byte {
            b'&' => b"&amp;",
            b'<' => b"&lt;",
            b'>' => b"&gt;",
            b'"' => b"&quot;",
            b'\'' => b"&#39;",
            _ => &[],
        }
    };
    text(
        value.len() * 6,
        value.iter().flat_map(|byte| match encode(byte) {
            [] => std::slice::from_ref(byte).iter().copied(),
            entity => entity.iter().copied(),
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD;

    fn list(value: &str) -> Vec<String> {
        forms(value.as_bytes())
            .iter()
            .map(|form| String::from_utf8_lossy(form.expose_secret()).into_owned())
            .collect()
    }

    #[test]
    fn the_value_comes_first_and_no_form_twice() {
        let forms = list("plain-token-123");

        assert_eq!(forms[0], "plain-token-123");
        let mut once = forms.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), forms.len());
    }

    #[test]
    fn holds_the_usual_encodings() {
        let forms = list("a/b+c\"d&e f=");
        for expected in [
            "612f622b632264266520663d",
            "612F622B632264266520663D",
            "a%2Fb%2Bc%22d%26e%20f%3D",
            "a%2fb%2bc%22d%26e%20f%3d",
            "a%2Fb%2Bc%22d%26e+f%3D",
            "%61%2F%62%2B%63%22%64%26%65%20%66%3D",
            "a/b+c\\\"d&e f=",
            "a\\/b+c\\\"d&e f=",
            "a/b\\u002bc\\u0022d\\u0026e f=",
            "a/b\\u002Bc\\u0022d\\u0026e f=",
            "a/b+c&quot;d&amp;e f=",
        ] {
            assert!(forms.iter().any(|form| form == expected), "{expected} is missing");
        }
    }

    #[test]
    fn base64_is_found_at_every_alignment_and_with_any_neighbours() {
        let value = "SECRET-CANARY-??>>~~";
        let forms = list(value);
        for before in 0..7 {
            for after in 0..4 {
                let whole = format!("{}{value}{}", "x".repeat(before), "y".repeat(after));
                for (encoded, kind) in [
                    (STANDARD.encode(&whole), "standard"),
                    (URL_SAFE_NO_PAD.encode(&whole), "url"),
                    (STANDARD.encode(&whole).replace('+', "%2B").replace('/', "%2F"), "percent"),
                ] {
                    assert!(
                        forms.iter().any(|form| form.len() > 20 && encoded.contains(form)),
                        "{kind} with {before} before and {after} after"
                    );
                }
            }
        }
    }

    #[test]
    fn no_form_is_short_enough_to_match_by_chance() {
        for form in list("8bytes!!") {
            assert!(form.len() >= 8, "{form}");
        }
    }
}
