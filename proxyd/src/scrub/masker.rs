//! Masks values in one plain stream, at equal length, holding back only an open match.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use zeroize::Zeroizing;

use super::automaton::Automaton;
use super::lens::Search;
use super::{LET_GO_BYTES_MAX, MASK};

/// One stream's position in the search.
pub(super) struct Masker {
    search: Search,
    /// The last bytes that came, while they may still be the beginning of a value.
    held: Zeroizing<Vec<u8>>,
    /// How many bytes came.
    taken: u64,
    /// Where the last mask ended, to tell a new value from one that overlaps it.
    masked_to: u64,
    found: u64,
}

impl Masker {
    pub(super) fn new(automaton: Arc<Automaton>) -> Self {
        let held = Zeroizing::new(Vec::new());
        Self { search: Search::new(automaton), held, taken: 0, masked_to: 0, found: 0 }
    }

    pub(super) fn found(&self) -> u64 {
        self.found
    }

    /// Takes what came, gives what can no longer be part of a value. Without a match the chunk
    /// goes on as it is, uncopied.
    pub(super) fn push(&mut self, chunk: Bytes) -> Vec<Bytes> {
        let mut masked: Option<Vec<u8>> = None;
        let first = self.taken;
        let first_held = first - self.held.len() as u64;
        for Range { start, end } in self.search.push(&chunk) {
            if self.found == 0 || start >= self.masked_to {
                self.found += 1;
            }
            self.masked_to = self.masked_to.max(end);
            // A match that began in an earlier chunk has its beginning among what is held, but for
            // what was let go in a lull.
            let held = place(start, first_held, &self.held)..place(end, first_held, &self.held);
            self.held[held].fill(MASK);
            let fresh = place(start, first, &chunk)..place(end, first, &chunk);
            masked.get_or_insert_with(|| chunk.to_vec())[fresh].fill(MASK);
        }
        self.taken += chunk.len() as u64;
        let chunk = masked.map_or(chunk, Bytes::from);
        self.release(chunk)
    }

    fn release(&mut self, chunk: Bytes) -> Vec<Bytes> {
        let open = usize::try_from(self.taken - self.search.open_from())
            .expect("what is open was in memory");
        let mut out = Vec::with_capacity(2);
        if open >= chunk.len() {
            // Everything new stays, with the end of what was held.
            let free = self.held.len() - (open - chunk.len()).min(self.held.len());
            if free > 0 {
                out.push(Bytes::copy_from_slice(&self.held[..free]));
            }
            self.keep_from(free, &chunk);
            return out;
        }
        if !self.held.is_empty() {
            out.push(Bytes::copy_from_slice(&self.held));
        }
        let free = chunk.len() - open;
        out.push(chunk.slice(..free));
        self.keep_from(self.held.len(), &chunk[free..]);
        out
    }

    /// Keeps what was held from `from` on, then `more`. A new vector, so that growth leaves no
    /// unwiped copy behind.
    fn keep_from(&mut self, from: usize, more: &[u8]) {
        let mut held = Zeroizing::new(Vec::with_capacity(self.held.len() - from + more.len()));
        held.extend_from_slice(&self.held[from..]);
        held.extend_from_slice(more);
        self.held = held;
    }

    /// Whether what is held is little enough to be let go when nothing follows.
    pub(super) fn waits(&self) -> bool {
        !self.held.is_empty() && self.search.live() <= LET_GO_BYTES_MAX
    }

    /// Lets go what is held although a value may still follow, all but the little of which would
    /// be masked.
    pub(super) fn let_go(&mut self) -> Vec<Bytes> {
        if !self.waits() {
            return Vec::new();
        }
        vec![Bytes::from(std::mem::take(&mut *self.held))]
    }

    /// The stream has ended: an open match stays open, so what was held is no value.
    pub(super) fn finish(self) -> Vec<Bytes> {
        match self.held.is_empty() {
            true => Vec::new(),
            false => vec![Bytes::copy_from_slice(&self.held)],
        }
    }
}

/// The index in `bytes`, the first of which has the number `first`, of the byte of that number.
fn place(number: u64, first: u64, bytes: &[u8]) -> usize {
    usize::try_from(number.saturating_sub(first)).unwrap_or(usize::MAX).min(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scrub::forms;
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
