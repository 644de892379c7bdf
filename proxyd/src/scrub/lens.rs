//! Searches one stream as it is and as its reader will see it once escapes are undone.
//!
//! Each [`Lens`] undoes one kind of escape and goes over the rest by the same machine, so whatever
//! mixture of escaped and plain characters an encoder writes is found, and a known form below an
//! escape too. A lens keeps where in the stream its characters came from, so that what it finds is
//! masked where it stands. Escapes and gaps have bounds, so what waits for a match has one too.

use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::automaton::Automaton;
use super::escape::{ESCAPE_BYTES_MAX, Escape, Unit};

/// More that stands for nothing is no wrapping, but an end.
const GAP_BYTES_MAX: usize = 16;

/// One stream's position in the search, through all lenses.
pub(super) struct Search {
    automaton: Arc<Automaton>,
    state: u32,
    /// Bytes taken so far.
    taken: u64,
    lenses: [Lens; Escape::ALL.len()],
}

struct Lens {
    escape: Escape,
    state: u32,
    /// Characters seen so far.
    seen: u64,
    /// Places after an escape: the number of the next character and of the byte it comes from.
    marks: Vec<(u64, u64)>,
    /// The beginning of an escape.
    partial: Zeroizing<Vec<u8>>,
    /// Length of the gap at the end, and whether it holds an end of a line.
    gap: (usize, bool),
}

/// What one step of the search has to go by.
struct Step<'a> {
    automaton: &'a Automaton,
    chunk: &'a [u8],
    /// Number of the chunk's first byte.
    first: u64,
    /// States of the plain search.
    before: u32,
    after: u32,
}

impl Search {
    pub(super) fn new(automaton: Arc<Automaton>) -> Self {
        let lenses = Escape::ALL.map(Lens::new);
        Self { automaton, state: Automaton::ROOT, taken: 0, lenses }
    }

    /// Takes what came; gives where values stand, by the numbers of bytes in the stream, in order.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        let (first, before) = (self.taken, self.state);
        let mut at = 0;
        while let Some(end) = self.automaton.next_match(&mut self.state, chunk, &mut at) {
            let end = first + end as u64;
            found.push(end - self.automaton.longest(self.state) as u64..end);
        }
        self.taken += chunk.len() as u64;
        let after = self.state;
        let step = Step { automaton: &self.automaton, chunk, first, before, after };
        for lens in &mut self.lenses {
            lens.push(&step, &mut found);
        }
        found.sort_by_key(|range| range.start);
        found
    }

    /// Number of the first byte that may still be part of a value; that of the next byte when none
    /// may.
    pub(super) fn open_from(&self) -> u64 {
        let plain = self.taken - self.automaton.live(self.state) as u64;
        let lenses = self.lenses.iter().filter_map(|lens| lens.open_from(&self.automaton));
        lenses.fold(plain, u64::min)
    }

    /// How many characters of a value may have come.
    pub(super) fn live(&self) -> usize {
        let lenses = self.lenses.iter().map(|lens| self.automaton.live(lens.state));
        lenses.fold(self.automaton.live(self.state), usize::max)
    }
}

impl Lens {
    fn new(escape: Escape) -> Self {
        let partial = Zeroizing::new(Vec::new());
        Self {
            escape,
            state: Automaton::ROOT,
            seen: 0,
            marks: Vec::new(),
            partial,
            gap: (0, false),
        }
    }

    fn push(&mut self, step: &Step<'_>, found: &mut Vec<Range<u64>>) {
        let in_step = self.partial.is_empty() && self.state == step.before;
        if in_step && !self.escape.is_in(step.chunk) {
            // Nothing here that the plain search did not see.
            self.state = step.after;
            self.seen += step.chunk.len() as u64;
            self.gap = (0, false);
            return;
        }
        let before = self.seen;
        let text = self.read(step);
        let mut at = 0;
        while let Some(end) = step.automaton.next_match(&mut self.state, &text, &mut at) {
            let end = before + end as u64;
            let start = self.place(end - step.automaton.longest(self.state) as u64);
            let end = match self.escape.leaves_out() {
                true => self.place(end - 1) + 1,
                false => self.place(end),
            };
            found.push(start..end);
        }
        let open = self.seen - step.automaton.live(self.state) as u64;
        let past = self.marks.partition_point(|(seen, _)| *seen <= open);
        self.marks.drain(..past.saturating_sub(1));
    }

    /// The chunk's characters.
    fn read(&mut self, step: &Step<'_>) -> Zeroizing<Vec<u8>> {
        let first = step.first - self.partial.len() as u64;
        let partial = std::mem::take(&mut self.partial);
        let joined = Zeroizing::new(match partial.is_empty() {
            true => Vec::new(),
            false => [&partial[..], step.chunk].concat(),
        });
        let input = if partial.is_empty() { step.chunk } else { &joined[..] };
        let mut text = Zeroizing::new(Vec::with_capacity(input.len()));
        let mut at = 0;
        while at < input.len() {
            let rest = &input[at..];
            let plain = rest.iter().take_while(|byte| !self.escape.begins_with(**byte)).count();
            if plain > 0 {
                text.extend_from_slice(&rest[..plain]);
                self.gap = (0, false);
                at += plain;
                continue;
            }
            let length = match self.escape.unit(&rest[..rest.len().min(ESCAPE_BYTES_MAX)]) {
                Unit::More if rest.len() < ESCAPE_BYTES_MAX => {
                    self.partial = Zeroizing::new(rest.to_vec());
                    break;
                }
                Unit::Gap(length, line) if self.widen(length, line) => length,
                Unit::Byte(byte, length) => {
                    text.push(byte);
                    length
                }
                Unit::Gap(..) | Unit::Plain | Unit::More => {
                    text.push(rest[0]);
                    1
                }
            };
            at += length;
            self.mark(self.seen + text.len() as u64, first + at as u64);
        }
        self.seen += text.len() as u64;
        text
    }

    /// Whether the gap may go on so far. No wrapped text has an empty line.
    fn widen(&mut self, length: usize, line: bool) -> bool {
        let (before, lines) = self.gap;
        self.gap = (before + length, lines || line);
        before + length <= GAP_BYTES_MAX && !(lines && line)
    }

    fn mark(&mut self, seen: u64, byte: u64) {
        match self.marks.last_mut() {
            Some(last) if last.0 == seen => last.1 = byte,
            _ => self.marks.push((seen, byte)),
        }
    }

    /// Number of the byte that a character comes from.
    fn place(&self, character: u64) -> u64 {
        let past = self.marks.partition_point(|(seen, _)| *seen <= character);
        let (seen, byte) = past.checked_sub(1).map_or((0, 0), |last| self.marks[last]);
        byte + (character - seen)
    }

    fn open_from(&self, automaton: &Automaton) -> Option<u64> {
        match automaton.live(self.state) {
            0 => None,
            live => Some(self.place(self.seen - live as u64)),
        }
    }
}

#[cfg(test)]
mod tests {
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
                let inside = &out[14..14 + form.len()];
                let left = inside.iter().filter(|byte| **byte != MASK).count();
                assert!(left <= 1, "{form} cut at {cut}: {shown}");
            }
        }
    }

    #[test]
    fn base64_in_lines_is_masked_on_both_sides_of_the_end_of_a_line() {
        let automaton = automaton();
        for end in ["\n", "\r\n", "\r\n    ", "\\n", "\\r\\n", "\\\\n"] {
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
        for filler in ["\n", " ", "\0", "\\", "%25", "&amp;", ":", "\\n"] {
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
}
