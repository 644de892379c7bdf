//! The forms in which a value may come back: raw and in the usual encodings.
//!
//! | form | variants |
//! |---|---|
//! | base64 | three alignments, standard and URL alphabet; of the value in UTF-16 too |
//! | base32 | five alignments, standard and hex alphabet |
//! | hex | |
//! | form fields | plus signs for blanks |
//!
//! The search takes letters in either case, and undoes escapes, wrapping and UTF-16 by itself; no
//! form here is one of those. A form of base64 or base32 leaves out the characters that neighbours
//! of the value have a part in: up to one at each end, which tell less than one byte of the value.
//! Where those neighbours are the usual ones, base64 is looked for with these characters too: the
//! text ends with the value, or goes on with an end of a line, a blank or a quotation mark; before
//! the value stands what does in its header ([`forms_behind`]).

use zeroize::Zeroizing;

use crate::vault::Secret;

type Text = Zeroizing<Vec<u8>>;

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const BASE64_URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const BASE32: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
const BASE32_HEX: &[u8; 32] = b"0123456789ABCDEFGHIJKLMNOPQRSTUV";
const HEX: &[u8; 16] = b"0123456789abcdef";

/// What ends the digits of a value where it ends the text or a line, and where a quotation mark or
/// a blank follows: of these only the first bits count.
const USUAL_ENDS: [u8; 2] = [0, b'"'];

/// Every form of `value`, the value itself first, none twice.
pub fn forms(value: &[u8]) -> Vec<Secret> {
    forms_behind(None, value)
}

/// The same for a value before which that byte stands where it was sent.
pub fn forms_behind(before: Option<u8>, value: &[u8]) -> Vec<Secret> {
    let mut forms: Vec<Text> = vec![text(value.len(), value.iter().copied())];
    let wide = text(2 * value.len(), value.iter().flat_map(|byte| [*byte, 0]));
    let alone = Neighbours::default();
    for alphabet in [BASE64, BASE64_URL] {
        for alignment in 0..3 {
            forms.push(digits(value, alphabet, alignment, alone));
            forms.push(digits(&wide, alphabet, alignment, alone));
            for after in USUAL_ENDS.map(Some) {
                let before = None;
                forms.push(digits(value, alphabet, alignment, Neighbours { before, after }));
            }
            if before.is_some() {
                let after = None;
                forms.push(digits(value, alphabet, alignment, Neighbours { before, after }));
            }
        }
    }
    for alphabet in [BASE32, BASE32_HEX] {
        forms.extend((0..5).map(|alignment| digits(value, alphabet, alignment, alone)));
    }
    forms.push(digits(value, HEX, 0, alone));
    let plus = |byte: &u8| if *byte == b' ' { b'+' } else { *byte };
    forms.push(text(value.len(), value.iter().map(plus)));
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

/// The bytes that stand beside a value, where they are known.
#[derive(Clone, Copy, Default)]
struct Neighbours {
    before: Option<u8>,
    after: Option<u8>,
}

/// The digits that the value and its known neighbours decide, each of as many bits as the alphabet
/// takes, when the value begins `alignment` bytes into a group.
fn digits(value: &[u8], alphabet: &[u8], alignment: usize, beside: Neighbours) -> Text {
    let bits = alphabet.len().ilog2() as usize;
    let (begin, end) = (alignment * 8, (alignment + value.len()) * 8);
    let from = if beside.before.is_some() { begin / bits } else { begin.div_ceil(bits) };
    let to = if beside.after.is_some() { end.div_ceil(bits) } else { end / bits };
    // Of the whole text: a neighbour stands at each end.
    let byte = |at: usize| match (at + 1).checked_sub(alignment) {
        Some(0) => usize::from(beside.before.unwrap_or_default()),
        Some(at) => {
            let byte = value.get(at - 1).copied().or(beside.after.filter(|_| at > value.len()));
            usize::from(byte.unwrap_or_default())
        }
        None => 0,
    };
    let digit = |number: usize| {
        let at = number * bits;
        let two = byte(at / 8) << 8 | byte(at / 8 + 1);
        alphabet[two >> (16 - bits - at % 8) & (alphabet.len() - 1)]
    };
    text(to - from, (from..to).map(digit))
}

#[cfg(test)]
mod tests {
    use super::super::{Patterns, scrub_text};
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

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
    fn base64_is_found_at_every_alignment_and_with_any_neighbours() {
        let value = "SECRET-CANARY-??>>~~";
        let forms = list(value);
        for before in 0..7 {
            for after in 0..4 {
                let whole = format!("{}{value}{}", "x".repeat(before), "y".repeat(after));
                for (encoded, kind) in [
                    (STANDARD.encode(&whole), "standard"),
                    (URL_SAFE_NO_PAD.encode(&whole), "url"),
                    (STANDARD.encode(wide(&whole)), "UTF-16"),
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
    fn base64_of_a_whole_header_leaves_no_bit_of_the_value() {
        let value = "SECRET-CANARY-0123456789";
        for length in value.len() - 3..value.len() {
            let value = &value[..length];
            let patterns = Patterns::new(&forms_behind(Some(b' '), value.as_bytes()));
            for before in ["Bearer ", "authorization: Bearer ", "x: Bearer ", "{\"a\":\"Bearer "] {
                for after in ["", "\r\n", "\n\n", "\"}", "\",\"b\":1", " HTTP"] {
                    let whole = format!("{before}{value}{after}");
                    for encoded in [STANDARD.encode(&whole), URL_SAFE_NO_PAD.encode(&whole)] {
                        let (from, to) = (before.len() * 8 / 6, (before.len() + length) * 8);
                        let to = to.div_ceil(6);
                        let hidden = "*".repeat(to - from);
                        let expected = format!("{}{hidden}{}", &encoded[..from], &encoded[to..]);

                        let (clean, found) = scrub_text(&patterns, &encoded);

                        assert_eq!((clean, found), (expected, 1), "{whole}");
                    }
                }
            }
        }
    }

    fn wide(text: &str) -> Vec<u8> {
        text.encode_utf16().flat_map(u16::to_le_bytes).collect()
    }

    /// RFC 4648, section 6, without padding: by the text's bits, written out.
    fn base32(text: &str, alphabet: &[u8; 32]) -> String {
        let mut bits: String = text.bytes().map(|byte| format!("{byte:08b}")).collect();
        while !bits.len().is_multiple_of(5) {
            bits.push('0');
        }
        let digit = |at| usize::from_str_radix(&bits[at..at + 5], 2).unwrap();
        (0..bits.len()).step_by(5).map(|at| char::from(alphabet[digit(at)])).collect()
    }

    #[test]
    fn base32_is_found_at_every_alignment_and_with_any_neighbours() {
        // The examples of RFC 4648, section 10.
        assert_eq!(base32("foobar", BASE32), "MZXW6YTBOI");
        assert_eq!(base32("foobar", BASE32_HEX), "CPNMUOJ1E8");
        let value = "SECRET-CANARY-??>>~~";
        let forms = list(value);
        for before in 0..7 {
            for after in 0..4 {
                let whole = format!("{}{value}{}", "x".repeat(before), "y".repeat(after));
                for alphabet in [BASE32, BASE32_HEX] {
                    let encoded = base32(&whole, alphabet);
                    assert!(
                        forms.iter().any(|form| form.len() > 30 && encoded.contains(form)),
                        "{before} before and {after} after"
                    );
                }
            }
        }
    }

    #[test]
    fn blanks_may_be_plus_signs_and_bytes_pairs_of_digits() {
        let forms = list("two words.");

        assert!(forms.contains(&"two+words.".to_owned()));
        assert!(forms.contains(&"74776f20776f7264732e".to_owned()));
    }

    #[test]
    fn no_form_is_short_enough_to_match_by_chance() {
        for form in list("8bytes!!") {
            assert!(form.len() >= 8, "{form}");
        }
    }
}
