//! Searches one stream as it is and as its reader will see it once escapes are undone.
//!
//! A [`Lens`] undoes escapes, leaves out what stands for nothing, and goes over the rest by the
//! machine that knows the needles, which were read in the same way: so whatever mixture of escaped
//! and plain characters an encoder writes is found, and a known form below an escape too. It keeps
//! where in the stream its characters came from, so that what it finds is masked where it stands.
//! Escapes and gaps have bounds, so what waits for a match has one too.
//!
//! Little of a text is undone: what no match can go across (see [`super::pairs`]) is found first,
//! in the text as it is, and a lens begins anew behind it.

use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::automaton::Automaton;
use super::escape::{ESCAPE_BYTES_MAX, Reading, Unit, Written, is_gap};

/// More that stands for nothing is no wrapping, but an end.
const GAP_BYTES_MAX: u64 = 16;
/// How much is read by both lenses before they are compared again.
const APART_BYTES: usize = 32;
/// How many places of characters that are no part of a match are kept, beside as many as are.
const STALE_MAX: usize = 64;

/// One stream's position in the search.
pub(super) struct Search {
    automaton: Arc<Automaton>,
    state: u32,
    /// Bytes taken so far.
    taken: u64,
    escaped: Lens,
    quoted: Lens,
}

struct Lens {
    reading: Reading,
    state: u32,
    /// Where the last characters came from: all that the state stands for, at least.
    starts: Vec<u64>,
    /// The beginning of an escape.
    partial: Zeroizing<Vec<u8>>,
    /// Length of the gap at the end, and whether it holds an end of a line.
    gap: (u64, bool),
}

/// What one step of the search has to go by.
struct Step<'a> {
    automaton: &'a Automaton,
    chunk: &'a [u8],
    /// Number of the chunk's first byte.
    first: u64,
}

impl Search {
    pub(super) fn new(automaton: Arc<Automaton>) -> Self {
        let [escaped, quoted] = [Reading::Escaped, Reading::Quoted].map(Lens::new);
        Self { automaton, state: Automaton::ROOT, taken: 0, escaped, quoted }
    }

    /// Takes what came; gives where values stand, by the numbers of bytes in the stream, in order.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        let first = self.taken;
        let mut at = 0;
        while let Some(end) = self.automaton.next_match(&mut self.state, chunk, &mut at) {
            let end = first + end as u64;
            found.push(end - self.automaton.longest(self.state) as u64..end);
        }
        self.taken += chunk.len() as u64;
        self.read(chunk, first, &mut found);
        found.sort_by_key(|range| range.start);
        found
    }

    /// Through the lenses. Only where there may be quoted-printable they see something different.
    fn read(&mut self, chunk: &[u8], first: u64, found: &mut Vec<Range<u64>>) {
        let automaton = &self.automaton;
        let mut at = 0;
        while at < chunk.len() {
            let step = |from: usize, to: usize| Step {
                automaton,
                chunk: &chunk[from..to],
                first: first + from as u64,
            };
            if self.quoted.stands_as(&self.escaped, automaton) {
                let to = at + first_quoted(&chunk[at..]);
                self.escaped.push(&step(at, to), found);
                self.quoted.follow(&self.escaped);
                at = to;
            }
            let to = chunk.len().min(at + APART_BYTES);
            self.escaped.push(&step(at, to), found);
            self.quoted.push(&step(at, to), found);
            at = to;
        }
    }

    /// Number of the first byte that may still be part of a value; that of the next byte when none
    /// may.
    pub(super) fn open_from(&self) -> u64 {
        let plain = self.taken - self.automaton.live(self.state) as u64;
        [&self.escaped, &self.quoted]
            .into_iter()
            .filter_map(|lens| lens.open_from(&self.automaton, self.taken))
            .fold(plain, u64::min)
    }

    /// How many characters of a value may have come.
    pub(super) fn live(&self) -> usize {
        [&self.escaped, &self.quoted]
            .map(|lens| self.automaton.live(lens.state) + usize::from(!lens.partial.is_empty()))
            .into_iter()
            .fold(self.automaton.live(self.state), usize::max)
    }
}

/// Where quoted-printable may begin, or the end.
fn first_quoted(chunk: &[u8]) -> usize {
    let begins = |at: &usize| Reading::Quoted.unit(&chunk[*at..]) != Unit::Plain;
    memchr::memchr_iter(b'=', chunk).find(begins).unwrap_or(chunk.len())
}

impl Lens {
    fn new(reading: Reading) -> Self {
        let partial = Zeroizing::new(Vec::new());
        Self { reading, state: Automaton::ROOT, starts: Vec::new(), partial, gap: (0, false) }
    }

    /// Whether the other would go on alike.
    fn stands_as(&self, other: &Self, automaton: &Automaton) -> bool {
        self.state == other.state
            && self.partial == other.partial
            && (self.gap == other.gap || self.state == Automaton::ROOT)
            && self.live(automaton) == other.live(automaton)
    }

    fn follow(&mut self, other: &Self) {
        self.state = other.state;
        self.starts.clone_from(&other.starts);
        self.partial.clone_from(&other.partial);
        self.gap = other.gap;
    }

    /// Where the characters came from that may be the beginning of a match.
    fn live(&self, automaton: &Automaton) -> &[u64] {
        &self.starts[self.starts.len() - automaton.live(self.state)..]
    }

    fn open_from(&self, automaton: &Automaton, taken: u64) -> Option<u64> {
        let partial = self.partial.len() as u64;
        let first = self.live(automaton).first().copied();
        first.or_else(|| (partial > 0).then(|| taken - partial))
    }

    fn push(&mut self, step: &Step<'_>, found: &mut Vec<Range<u64>>) {
        let Some(mut at) = self.complete(step, found) else { return };
        let mut escapes = Escapes::default();
        while at < step.chunk.len() {
            if self.state == Automaton::ROOT && is_gap(step.chunk[at]) {
                at += gap_length(&step.chunk[at..]);
                continue;
            }
            let escape = escapes.next(self.reading, step.chunk, at);
            let to = self.reach(step, at).max(at + 1).min(escape);
            if let Some(parting) = step.automaton.pairs().last_parting(&step.chunk[at..to]) {
                at += parting;
                self.restart();
                continue;
            }
            while at < to {
                let number = step.first + at as u64;
                self.see(step.automaton, step.chunk[at], number..number + 1, found);
                at += 1;
            }
            if at == escape && at < step.chunk.len() {
                let rest = &step.chunk[at..];
                let Some(length) = self.take(step.automaton, rest, step.first + at as u64, found)
                else {
                    self.partial = Zeroizing::new(rest.to_vec());
                    return;
                };
                at += length;
            }
        }
    }

    /// Goes on from the beginning of an escape in the chunk before; gives where in this one its
    /// end is, none when it is not there yet.
    fn complete(&mut self, step: &Step<'_>, found: &mut Vec<Range<u64>>) -> Option<usize> {
        let partial = std::mem::take(&mut self.partial);
        if partial.is_empty() {
            return Some(0);
        }
        let more = &step.chunk[..step.chunk.len().min(ESCAPE_BYTES_MAX)];
        let joined = Zeroizing::new([&partial[..], more].concat());
        let number = step.first - partial.len() as u64;
        let mut at = 0;
        while at < partial.len() {
            match self.take(step.automaton, &joined[at..], number + at as u64, found) {
                Some(length) => at += length,
                None => {
                    self.partial = Zeroizing::new(joined[at..].to_vec());
                    return None;
                }
            }
        }
        Some(at - partial.len())
    }

    /// Up to where in the chunk the shortest match has to go that is open or begins at `at`.
    fn reach(&self, step: &Step<'_>, at: usize) -> usize {
        let start = self.live(step.automaton).first().copied();
        let start = start.unwrap_or(step.first + at as u64);
        let reach = (start + step.automaton.shortest() as u64).saturating_sub(step.first);
        usize::try_from(reach).unwrap_or(usize::MAX).min(step.chunk.len())
    }

    fn restart(&mut self) {
        self.state = Automaton::ROOT;
        self.starts.clear();
        self.gap = (0, false);
    }

    /// Takes the unit at the beginning of `rest`, which has that number; gives its length, none
    /// when what follows decides.
    fn take(
        &mut self,
        automaton: &Automaton,
        rest: &[u8],
        number: u64,
        found: &mut Vec<Range<u64>>,
    ) -> Option<usize> {
        let (written, length) = match self.reading.escapes_with(rest[0]) {
            false => (Written::byte(rest[0]), 1),
            true => match self.reading.unit(rest) {
                Unit::Stands(written, length) => (written, length),
                Unit::Plain => (Written::byte(rest[0]), 1),
                Unit::More => return None,
            },
        };
        for byte in written.bytes() {
            self.see(automaton, *byte, number..number + length as u64, found);
        }
        Some(length)
    }

    /// Goes on by a character that comes from that place.
    fn see(
        &mut self,
        automaton: &Automaton,
        byte: u8,
        place: Range<u64>,
        found: &mut Vec<Range<u64>>,
    ) {
        if is_gap(byte) {
            self.widen(place.end - place.start, byte == b'\n');
            return;
        }
        self.gap = (0, false);
        self.state = automaton.step(self.state, byte);
        if self.state == Automaton::ROOT {
            self.starts.clear();
            return;
        }
        self.starts.push(place.start);
        let longest = automaton.longest(self.state);
        if longest > 0 {
            found.push(self.starts[self.starts.len() - longest]..place.end);
        }
        let stale = self.starts.len() - automaton.live(self.state);
        if stale > STALE_MAX + automaton.live(self.state) {
            self.starts.drain(..stale);
        }
    }

    /// No wrapped text has an empty line, and none a gap that goes on.
    fn widen(&mut self, length: u64, line: bool) {
        let (before, lines) = self.gap;
        if before + length > GAP_BYTES_MAX || lines && line {
            self.restart();
        }
        self.gap = (before + length, lines || line);
    }
}

/// Where the next escape may begin.
#[derive(Default)]
struct Escapes {
    other: Option<usize>,
    quoted: Option<usize>,
}

impl Escapes {
    /// The first from `at` on, or the end. To be asked for places in order.
    fn next(&mut self, reading: Reading, chunk: &[u8], at: usize) -> usize {
        let known = |place: Option<usize>| place.filter(|place| *place >= at);
        let place = |found: Option<usize>| found.map_or(chunk.len(), |further| at + further);
        let rest = &chunk[at..];
        let other =
            known(self.other).unwrap_or_else(|| place(memchr::memchr3(b'%', b'\\', b'&', rest)));
        self.other = Some(other);
        if reading != Reading::Quoted {
            return other;
        }
        let quoted = known(self.quoted).unwrap_or_else(|| place(memchr::memchr(b'=', rest)));
        self.quoted = Some(quoted);
        other.min(quoted)
    }
}

/// How many bytes that stand for nothing `text` begins with, one at least.
fn gap_length(text: &[u8]) -> usize {
    let is_alike = |part: &&[u8; 16]| **part == [text[0]; 16];
    let alike = 16 * text.as_chunks::<16>().0.iter().take_while(is_alike).count();
    alike + text[alike..].iter().take_while(|byte| is_gap(**byte)).count()
}

#[cfg(test)]
#[path = "lens_tests.rs"]
mod tests;
