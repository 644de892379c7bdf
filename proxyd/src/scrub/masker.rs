//! Masks values in one plain stream, at equal length, holding back only an open match.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use zeroize::Zeroizing;

use super::MASK;
use super::automaton::Automaton;
use super::lens::Search;

/// One stream's position in the search.
pub(super) struct Masker {
    search: Search,
    held: Held,
}

/// The last bytes of a stream, while they may still be the beginning of a value.
#[derive(Default)]
pub(super) struct Held {
    bytes: Zeroizing<Vec<u8>>,
    /// How many bytes came.
    taken: u64,
    /// Where the last mask ended, to tell a new value from one that overlaps it.
    masked_to: u64,
    found: u64,
}

impl Masker {
    pub(super) fn new(automaton: Arc<Automaton>) -> Self {
        Self { search: Search::new(automaton), held: Held::default() }
    }

    pub(super) fn found(&self) -> u64 {
        self.held.found
    }

    /// Takes what came, gives what can no longer be part of a value. Without a match the chunk
    /// goes on as it is, uncopied.
    pub(super) fn push(&mut self, chunk: Bytes) -> Vec<Bytes> {
        let found = self.search.push(&chunk);
        let mut mask = self.held.mask(&chunk);
        for range in found {
            mask.value(range.clone());
            mask.bytes(range, |_| MASK);
        }
        let chunk = mask.finish().map_or(chunk, Bytes::from);
        self.held.release(chunk, self.search.open_from())
    }

    /// After which silence what is held may go, if it is little enough.
    pub(super) fn pause(&self) -> Option<Duration> {
        if self.held.is_empty() { None } else { super::pause(self.search.live()) }
    }

    /// Lets go what is held although a value may still follow, all but the little of which would
    /// be masked.
    pub(super) fn let_go(&mut self) -> Vec<Bytes> {
        if self.pause().is_some() { self.held.let_go() } else { Vec::new() }
    }

    /// The stream has ended: an open match stays open, so what was held is no value.
    pub(super) fn finish(mut self) -> Vec<Bytes> {
        self.held.let_go()
    }
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn found(&self) -> u64 {
        self.found
    }

    pub(super) fn let_go(&mut self) -> Vec<Bytes> {
        match self.bytes.is_empty() {
            true => Vec::new(),
            false => vec![Bytes::from(std::mem::take(&mut *self.bytes))],
        }
    }

    /// To mask what was found when `chunk` came.
    pub(super) fn mask<'a>(&'a mut self, chunk: &'a [u8]) -> Mask<'a> {
        Mask { held: self, chunk, masked: None }
    }

    /// Gives what stands before the byte of the number `open_from`, keeps the rest.
    pub(super) fn release(&mut self, chunk: Bytes, open_from: u64) -> Vec<Bytes> {
        self.taken += chunk.len() as u64;
        let open = usize::try_from(self.taken - open_from).expect("what is open was in memory");
        let mut out = Vec::with_capacity(2);
        if open >= chunk.len() {
            // Everything new stays, with the end of what was held.
            let free = self.bytes.len() - (open - chunk.len()).min(self.bytes.len());
            if free > 0 {
                out.push(Bytes::copy_from_slice(&self.bytes[..free]));
            }
            self.keep_from(free, &chunk);
            return out;
        }
        if !self.bytes.is_empty() {
            out.push(Bytes::copy_from_slice(&self.bytes));
        }
        let free = chunk.len() - open;
        out.push(chunk.slice(..free));
        self.keep_from(self.bytes.len(), &chunk[free..]);
        out
    }

    /// Keeps what was held from `from` on, then `more`. A new vector, so that growth leaves no
    /// unwiped copy behind.
    fn keep_from(&mut self, from: usize, more: &[u8]) {
        let mut held = Zeroizing::new(Vec::with_capacity(self.bytes.len() - from + more.len()));
        held.extend_from_slice(&self.bytes[from..]);
        held.extend_from_slice(more);
        self.bytes = held;
    }
}

/// Masks values in what is held and in the chunk that follows it.
pub(super) struct Mask<'a> {
    held: &'a mut Held,
    chunk: &'a [u8],
    masked: Option<Vec<u8>>,
}

impl Mask<'_> {
    /// Counts a value that stands there, if it is not one with the value before.
    pub(super) fn value(&mut self, Range { start, end }: Range<u64>) {
        if self.held.found == 0 || start >= self.held.masked_to {
            self.held.found += 1;
        }
        self.held.masked_to = self.held.masked_to.max(end);
    }

    /// Overwrites bytes; `mask` gives what stands in place of the byte of some number. Of a match
    /// that began in an earlier chunk, the beginning is held, but for what was let go in a lull.
    pub(super) fn bytes(&mut self, Range { start, end }: Range<u64>, mask: impl Fn(u64) -> u8) {
        let taken = self.held.taken;
        let first = taken - self.held.bytes.len() as u64;
        let held = place(start, first, &self.held.bytes)..place(end, first, &self.held.bytes);
        for at in held {
            self.held.bytes[at] = mask(first + at as u64);
        }
        let fresh = place(start, taken, self.chunk)..place(end, taken, self.chunk);
        if !fresh.is_empty() {
            let masked = self.masked.get_or_insert_with(|| self.chunk.to_vec());
            for at in fresh {
                masked[at] = mask(taken + at as u64);
            }
        }
    }

    /// The masked copy of the chunk, if something in it was masked.
    pub(super) fn finish(self) -> Option<Vec<u8>> {
        self.masked
    }
}

/// The index in `bytes`, the first of which has the number `first`, of the byte of that number.
fn place(number: u64, first: u64, bytes: &[u8]) -> usize {
    usize::try_from(number.saturating_sub(first)).unwrap_or(usize::MAX).min(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scrub::{LET_GO_BYTES_MAX, forms};
    use crate::vault::Secret;

    const CANARY: &str = "SECRET-CANARY/7f3a+b=";

    fn automaton(values: &[&str]) -> Arc<Automaton> {
        let needles: Vec<Secret> = values.iter().flat_map(|v| forms(v.as_bytes())).collect();
        Arc::new(Automaton::new(&needles))
    }

    /// What comes out when `text` arrives in these pieces.
    fn through(automaton: &Arc<Automaton>, pieces: &[&[u8]]) -> (Vec<u8>, u64) {
        let mut masker = Masker::new(automaton.clone());
        let mut out = Vec::new();
        for piece in pieces {
            masker
                .push(Bytes::copy_from_slice(piece))
                .iter()
                .for_each(|b| out.extend_from_slice(b));
        }
        let found = masker.found();
        masker.finish().iter().for_each(|b| out.extend_from_slice(b));
        (out, found)
    }

    #[test]
    fn masks_every_form_at_every_split() {
        let automaton = automaton(&[CANARY]);
        for form in forms(CANARY.as_bytes()) {
            let form = form.expose_secret();
            let text = [b"SECRET-before ", form, b" after SECRET"].concat();
            let want = [b"SECRET-before ", &vec![MASK; form.len()][..], b" after SECRET"].concat();
            for cut in 0..=text.len() {
                let (out, found) = through(&automaton, &[&text[..cut], &text[cut..]]);
                assert!(out == want, "{:?} cut at {cut}", String::from_utf8_lossy(&out));
                assert_eq!(found, 1);
            }
        }
    }

    #[test]
    fn the_first_bytes_of_a_value_are_let_go_in_silence_and_no_more_of_it_however_it_dribbles() {
        let automaton = automaton(&[CANARY]);
        let mut masker = Masker::new(automaton);
        let mut out = Vec::new();
        for byte in CANARY.bytes().chain(*b" ends with S") {
            out.extend(masker.push(Bytes::from(vec![byte])));
            out.extend(masker.let_go());
            assert!(masker.let_go().is_empty());
        }
        // Nothing is left waiting for what may never come.
        let out = out.concat();
        let hidden = CANARY.len() - LET_GO_BYTES_MAX;
        let want = [&CANARY.as_bytes()[..LET_GO_BYTES_MAX], &vec![MASK; hidden], b" ends with S"];

        assert_eq!(out, want.concat(), "{}", String::from_utf8_lossy(&out));
        assert_eq!(masker.found(), 1);
    }

    #[test]
    fn masks_in_chunks_of_every_size() {
        let automaton = automaton(&[CANARY]);
        let text = format!("x{CANARY}{CANARY}y SECRET-CANARY/7f {CANARY}");
        let want = text.replace(CANARY, &"*".repeat(CANARY.len()));
        for size in 1..=text.len() {
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
            let (out, found) = through(&automaton, &pieces);
            assert_eq!(String::from_utf8_lossy(&out), want, "chunks of {size}");
            assert_eq!(found, 3);
        }
    }

    #[test]
    fn overlapping_values_are_one_mask() {
        let automaton = Arc::new(Automaton::new(&[
            Secret::new(b"abcdef".to_vec()),
            Secret::new(b"cd".to_vec()),
            Secret::new(b"efgh".to_vec()),
        ]));
        for size in 1..9 {
            let pieces: Vec<&[u8]> = b"-abcdefgh-cd".chunks(size).collect();
            let (out, found) = through(&automaton, &pieces);
            assert_eq!(out, b"-********-**");
            assert_eq!(found, 2, "chunks of {size}");
        }
    }

    #[test]
    fn nothing_waits_when_no_match_is_open() {
        let mut masker = Masker::new(automaton(&[CANARY]));
        let chunk = Bytes::from_static(b"data: one event\n\n");

        let out = masker.push(chunk.clone());

        assert_eq!(out, vec![chunk.clone()]);
        assert_eq!(out[0].as_ptr(), chunk.as_ptr(), "the chunk was copied");
    }

    #[test]
    fn only_the_open_match_waits() {
        let mut masker = Masker::new(automaton(&[CANARY]));

        let first = masker.push(Bytes::from_static(b"hello SECRET-CAN"));
        let second = masker.push(Bytes::from_static(b"DLE"));

        assert_eq!(first, vec![Bytes::from_static(b"hello ")]);
        assert_eq!(second.concat(), b"SECRET-CANDLE");
        assert_eq!(masker.finish(), Vec::<Bytes>::new());
    }
}
