//! What the search must find, by trying everything everywhere: too slow for any stream, and plain
//! enough to be believed. Tests and the fuzzer hold the search against it.

use std::ops::Range;

use bytes::Bytes;

use super::escape::{Reading, Unit, Written, is_gap};
use super::{BodyScrubber, MASK, Patterns, forms};

/// As in the search.
const GAP_BYTES_MAX: usize = 16;
const BEGINNING_BYTES_MIN: usize = 8;

/// A character, none for where no match goes on, and where it comes from.
type Character = (Option<u8>, Range<usize>);

/// Whether each byte of the text must be masked where a credential has this value.
pub fn hidden(value: &[u8], text: &[u8]) -> Vec<bool> {
    let mut hidden = vec![false; text.len()];
    let plain: Vec<Character> =
        text.iter().enumerate().map(|(at, byte)| (Some(*byte), at..at + 1)).collect();
    let views = [plain, read(Reading::Escaped, text), read(Reading::Quoted, text)];
    for needle in needles(value) {
        for view in &views {
            for from in 0..view.len() {
                let alike = view[from..].iter().zip(&needle).take_while(|((seen, _), wanted)| {
                    seen.is_some_and(|seen| seen.eq_ignore_ascii_case(wanted))
                });
                let length = alike.count();
                let enough = (needle.len() / 2 + 1).max(BEGINNING_BYTES_MIN).min(needle.len());
                if length >= enough {
                    let place = view[from].1.start..view[from + length - 1].1.end;
                    hidden[place].fill(true);
                }
            }
        }
    }
    // What is the mask already does not change.
    hidden.iter().zip(text).map(|(hidden, byte)| *hidden && *byte != MASK).collect()
}

fn needles(value: &[u8]) -> Vec<Vec<u8>> {
    let mut needles = Vec::new();
    for form in forms(value) {
        let form = form.expose_secret();
        needles.push(form.to_vec());
        for reading in [Reading::Escaped, Reading::Quoted] {
            let read = reading.of(form).map(|read| read.to_vec());
            needles.extend(read.filter(|read| read.len() >= BEGINNING_BYTES_MIN));
        }
    }
    needles
}

/// The text as a reader sees it. What may be the beginning of an escape at its end is none.
fn read(reading: Reading, text: &[u8]) -> Vec<Character> {
    let (mut seen, mut at) = (Vec::new(), 0);
    let mut gap: Option<(usize, bool)> = None;
    while at < text.len() {
        let (written, length) = match reading.escapes_with(text[at]) {
            false => (Written::byte(text[at]), 1),
            true => match reading.unit(&text[at..]) {
                Unit::Stands(written, length) => (written, length),
                Unit::Plain => (Written::byte(text[at]), 1),
                Unit::More => break,
            },
        };
        for byte in written.bytes() {
            let place = at..at + length;
            if !is_gap(*byte) {
                seen.push((Some(*byte), place));
                gap = None;
                continue;
            }
            let (before, lines) = gap.unwrap_or_default();
            if before + length > GAP_BYTES_MAX || lines && *byte == b'\n' {
                seen.push((None, place));
            }
            gap = Some((before + length, lines || *byte == b'\n'));
        }
        at += length;
    }
    seen
}

/// What is masked of a text when it comes in pieces that begin at these places.
pub fn masked(patterns: &Patterns, text: &[u8], cuts: &[usize]) -> Vec<bool> {
    let mut scrubber = BodyScrubber::new(patterns, None).expect("a plain body can be searched");
    let (mut out, mut from) = (Vec::new(), 0);
    for to in cuts.iter().copied().chain([text.len()]) {
        let piece = Bytes::copy_from_slice(&text[from..to]);
        let parts = scrubber.push(piece).expect("a plain body can be searched");
        out.extend(parts.concat());
        from = to;
    }
    out.extend(scrubber.finish().expect("a plain body can be searched").concat());
    assert_eq!(out.len(), text.len(), "the length has changed");
    out.iter().zip(text).map(|(now, before)| now != before).collect()
}

/// What finds a value.
pub fn patterns(value: &[u8]) -> Patterns {
    Patterns::new(&forms(value))
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;
