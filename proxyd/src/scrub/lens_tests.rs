//! What encoders of several languages write, cut in every place.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

use super::*;
use crate::scrub::masker::Masker;
use crate::scrub::{MASK, forms};

const CANARY: &str = "SECRET-CANARY/7f3a+b=&c";

fn automaton() -> Arc<Automaton> {
    Arc::new(Automaton::new(&forms(CANARY.as_bytes())))
}

fn through(automaton: &Arc<Automaton>, pieces: &[&[u8]]) -> (Vec<u8>, u64) {
    let mut masker = Masker::new(automaton.clone());
    let mut out = Vec::new();
    for piece in pieces {
        out.extend(masker.push(Bytes::copy_from_slice(piece)));
    }
    let found = masker.found();
    out.extend(masker.finish());
    (out.concat(), found)
}

fn each(encode: impl Fn(u8) -> String) -> String {
    CANARY.bytes().map(encode).collect()
}

fn wrapped(end: &str) -> String {
    let text = STANDARD.encode(format!("{}{CANARY}", "x".repeat(45)));
    format!("{}{end}{}", &text[..76], &text[76..])
}

/// What encoders of several languages write.
fn written() -> Vec<String> {
    let u = |byte: u8| format!("\\u{:04x}", u32::from(byte));
    vec![
        // Python's quote, JavaScript's escape, Go's PathEscape, and percent twice.
        "SECRET-CANARY/7f3a%2Bb%3D%26c".into(),
        "SECRET-CANARY/7f3a+b%3D%26c".into(),
        "SECRET-CANARY%2F7f3a+b=&c".into(),
        "SECRET-CANARY%252f7f3a%252Bb%253d%2526c".into(),
        "SECRET%2DCANARY%2f7f3a%2Bb%3d%26c".into(),
        "SECRET-CANARY&#47;7f3a&#43;b&#61;&amp;c".into(),
        "SECRET-CANARY&sol;7f3a&#x2B;b&#x3d;&amp;c".into(),
        "SECRET-CANARY&#x2f;7f3a&plus;b&equals;&#038;c".into(),
        "SECRET-CANARY&amp;#x2f;7f3a&amp;#43;b&amp;equals;&amp;amp;c".into(),
        each(|byte| format!("&#{byte};")),
        each(u),
        each(|byte| u(byte).to_uppercase().replace('U', "u")),
        each(|byte| format!("\\{}", u(byte))),
        each(|byte| format!("\\x{byte:02x}")),
        "SECRET-CANARY\\\\/7f3a\\\\u002bb\\\\u003d\\\\u0026c".into(),
        each(|byte| format!("{byte:02x}:")),
        each(|byte| format!("{byte:02X} ")),
        each(|byte| format!("{}\0", char::from(byte))),
        each(|byte| format!("\0{}", char::from(byte))),
        // Letters of another case.
        CANARY.to_lowercase(),
        CANARY.to_uppercase(),
        STANDARD.encode(CANARY)[..30].to_uppercase(),
        each(|byte| format!("%{byte:02x}")).to_uppercase(),
        // Python's byte strings, JavaScript's and Rust's characters, what shells print.
        each(|byte| format!("\\u{{{byte:x}}}")),
        each(|byte| format!("\\U{:08X}", u32::from(byte))),
        each(|byte| format!("\\{byte:03o}")),
        // Entities without their semicolons, which readers take all the same.
        each(|byte| format!("&#x{byte:x}")) + ";",
        // Several kinds beside each other.
        "SECRET\\u002dC%41NARY&sol;7f&#51;a\\x2bb%3D&amp;c".into(),
        // And one inside another: HTML in JSON, JSON in a query, a query in HTML.
        "SECRET-CANARY\\u0026#47;7f3a\\u0026#43;b\\u0026#61;\\u0026amp;c".into(),
        "SECRET-CANARY%5Cu002f7f3a%5Cu002bb%5cu003d%5Cu0026c".into(),
        "SECRET-CANARY&#37;2f7f3a&percnt;2bb&#x25;3D&#37;26c".into(),
        "SECRET-CANARY%26%2347%3B7f3a%26plus%3Bb%26%2361%3B%26amp%3Bc".into(),
        // Quoted-printable, with a line that ends within, and all of it.
        "SECRET-CANARY/7f3a+b=3D&c".into(),
        "SECRET-CAN=\r\nARY/7f=\n3a+b=3d&c".into(),
        each(|byte| format!("={byte:02X}")),
        // Characters and escapes with two bytes each.
        each(|byte| format!("\\u{byte:04x}\0")),
    ]
}

#[test]
fn a_value_is_masked_however_an_encoder_escapes_it_at_every_split() {
    let automaton = automaton();
    for form in written() {
        let text = format!("before % & \\ S{form}|after 100% S\\");
        for cut in 0..=text.len() {
            let pieces = [&text.as_bytes()[..cut], &text.as_bytes()[cut..]];
            let (out, found) = through(&automaton, &pieces);
            let shown = String::from_utf8_lossy(&out);
            assert_eq!(found, 1, "{form} cut at {cut}: {shown}");
            assert_eq!(out.len(), text.len());
            assert!(shown.starts_with("before % & \\ S"), "{form}: {shown}");
            assert!(shown.ends_with("|after 100% S\\"), "{form}: {shown}");
            // A separator before or after it is no part of it.
            let inside = form.trim_matches([':', ' ', '\0']);
            let from = text.find(inside).unwrap();
            let inside = &out[from..from + inside.len()];
            let left = inside.iter().filter(|byte| **byte != MASK).count();
            assert_eq!(left, 0, "{form} cut at {cut}: {shown}");
        }
    }
}

#[test]
fn base64_in_lines_is_masked_on_both_sides_of_the_end_of_a_line() {
    let automaton = automaton();
    for end in ["\n", "\r\n", "\r\n    ", "\\n", "\\r\\n", "\\\\n", "%0A", "&#10;", "=0D=0A"] {
        let text = format!("{}|\n\nrest", wrapped(end));
        for size in 1..=text.len() {
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
            let (out, found) = through(&automaton, &pieces);
            let shown = String::from_utf8_lossy(&out);
            assert_eq!(found, 1, "{end:?} in chunks of {size}: {shown}");
            assert!(shown[60..].starts_with("**************"), "{shown}");
            assert!(shown[76 + end.len()..].starts_with("**************"), "{shown}");
            assert!(shown.ends_with("|\n\nrest"), "{shown}");
        }
    }
}

#[test]
fn what_waits_has_a_bound() {
    let mut masker = Masker::new(automaton());
    for filler in ["\n", " ", "\0", "\\", "%25", "&amp;", ":", "\\n", "=", "=\n", "&#"] {
        let text = format!("SECRET-C{}", filler.repeat(2000));
        let out = masker.push(Bytes::from(text.clone())).concat();
        let waits = text.len().saturating_sub(out.len());
        assert!(waits < 200, "{filler:?} keeps {waits} bytes waiting");
    }
    assert_eq!(masker.found(), 0);
}

#[test]
fn an_event_that_ends_does_not_wait_for_the_next() {
    let mut masker = Masker::new(automaton());

    let out = masker.push(Bytes::from_static(b"data: SECRET\n\n")).concat();

    assert_eq!(out, b"data: SECRET\n\n");
}

#[test]
fn characters_beyond_ascii_are_found_below_escapes() {
    let value = "pässwörd-ünïcode";
    let automaton = Arc::new(Automaton::new(&forms(value.as_bytes())));
    let json: String = value
        .chars()
        .map(|c| if c.is_ascii() { c.to_string() } else { format!("\\u{:04x}", u32::from(c)) })
        .collect();
    let html: String = value.chars().map(|c| format!("&#{};", u32::from(c))).collect();
    let percent: String = value.bytes().map(|byte| format!("%{byte:02X}")).collect();
    for form in [json, html, percent] {
        let (out, found) = through(&automaton, &[form.as_bytes()]);
        assert_eq!(String::from_utf8_lossy(&out), "*".repeat(form.len()), "{form}");
        assert_eq!(found, 1);
    }
}

#[test]
fn a_value_that_looks_escaped_itself_is_found_as_it_is_and_escaped() {
    for value in ["C:\\new%41&amp;dir=3D", "two words: %25 &#65;!", "\\u0041=41%u0041-tail"] {
        let automaton = Arc::new(Automaton::new(&forms(value.as_bytes())));
        let percent: String = value.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let json = value.replace('\\', "\\\\");
        for form in [value.to_owned(), percent, json] {
            let text = format!("x{form}|");
            let want = format!("x{}|", "*".repeat(form.len()));
            for cut in 0..=text.len() {
                let pieces = [&text.as_bytes()[..cut], &text.as_bytes()[cut..]];
                let (out, _) = through(&automaton, &pieces);
                assert_eq!(String::from_utf8_lossy(&out), want, "{value} as {form}");
            }
        }
    }
}
