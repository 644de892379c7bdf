//! Searches for many needles in one pass, byte by byte, across any splits of the input.
//!
//! This is Aho and Corasick's machine: a tree of all needles whose failure links lead to the
//! longest tail that is again the beginning of a needle. It is ours because it must be wiped after
//! use and must say how much of the input a later byte could still turn into a match. Where no
//! match is open it is spared most of the input by [`Skip`]. Letters count in either case.

use zeroize::{Zeroize, Zeroizing};

use super::escape::Reading;
use super::pairs::Pairs;
use super::skip::Skip;
use crate::vault::Secret;

/// A shorter beginning never counts: too much else begins like it.
const BEGINNING_BYTES_MIN: usize = 8;

/// One node of the tree; numbers are indices of nodes, 0 is the root and stands for none.
#[derive(Clone, Copy, Default, Zeroize)]
struct Node {
    /// The first of the nodes one byte further.
    child: u32,
    /// The next node below the same parent.
    sibling: u32,
    /// Where to go on when no child fits.
    fail: u32,
    /// Length of the longest needle, or beginning of one that counts, that ends here.
    longest: u32,
    /// How many of the last bytes could still become a match.
    live: u32,
    byte: u8,
}

/// The machine. Wiped on drop.
pub(super) struct Automaton {
    nodes: Vec<Node>,
    /// The root's children by byte: most input never leaves the root.
    first: [u32; 256],
    skip: Skip,
    pairs: Pairs,
}

impl Automaton {
    /// The state before any byte.
    pub(super) const ROOT: u32 = 0;

    /// A machine that finds whole needles.
    pub(super) fn new(needles: &[Secret]) -> Self {
        Self::build(needles, |length| length)
    }

    /// A machine that finds needles and their beginnings that are longer than half: where a text
    /// was cut short, or a cut is at the reader's choice, little of a needle is left to be seen.
    pub(super) fn with_beginnings(needles: &[Secret]) -> Self {
        Self::build(needles, |length| (length / 2 + 1).max(BEGINNING_BYTES_MIN))
    }

    /// `counts` says from which length on the beginning of a needle of that length counts.
    fn build(needles: &[Secret], counts: fn(usize) -> usize) -> Self {
        let needles = all_readings(needles);
        let bytes: usize = needles.iter().map(|n| n.expose_secret().len()).sum();
        // The whole room at once: a vector that grows would leave copies behind.
        let mut nodes = Vec::with_capacity(bytes + 1);
        nodes.push(Node::default());
        let skip = Skip::new(&needles, |length| counts(length).min(length));
        let pairs = Pairs::new(&needles, skip.window());
        let mut automaton = Self { nodes, first: [0; 256], skip, pairs };
        for needle in &needles {
            let needle = needle.expose_secret();
            automaton.insert(needle, counts(needle.len()));
        }
        automaton.link();
        automaton
    }

    pub(super) fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Length of the shortest text that can be a match.
    pub(super) fn shortest(&self) -> usize {
        self.skip.window()
    }

    /// Which neighbours can stand in the first [`Self::shortest`] bytes of a match.
    pub(super) fn pairs(&self) -> &Pairs {
        &self.pairs
    }

    /// Length of the longest needle that ended with the last byte; 0 when none did.
    pub(super) fn longest(&self, state: u32) -> usize {
        self.nodes[state as usize].longest as usize
    }

    /// How many of the last bytes could still be the beginning of a match.
    pub(super) fn live(&self, state: u32) -> usize {
        self.nodes[state as usize].live as usize
    }

    /// Goes on from `at` until a needle ends, and gives the index after its last byte; none when
    /// the text ended first. `state` and `at` stand after the last byte taken.
    pub(super) fn next_match(&self, state: &mut u32, text: &[u8], at: &mut usize) -> Option<usize> {
        while *at < text.len() {
            if *state == Self::ROOT {
                *at = self.skip.next(text, *at);
                let byte = text.get(*at)?;
                // Too little is left for a look at the shortest match; what has come may part.
                if text.len() - *at < self.skip.window()
                    && let Some(parting) = self.pairs.last_parting(&text[*at..])
                {
                    *at += parting;
                    continue;
                }
                if self.first[usize::from(byte.to_ascii_lowercase())] == 0 {
                    *at += 1;
                    continue;
                }
            }
            *state = self.step(*state, text[*at]);
            *at += 1;
            if self.longest(*state) != 0 {
                return Some(*at);
            }
        }
        None
    }

    /// The state after one more byte.
    pub(super) fn step(&self, mut state: u32, byte: u8) -> u32 {
        let byte = byte.to_ascii_lowercase();
        loop {
            if state == Self::ROOT {
                return self.first[usize::from(byte)];
            }
            match self.child(state, byte) {
                Self::ROOT => state = self.nodes[state as usize].fail,
                child => return child,
            }
        }
    }

    #[inline]
    fn child(&self, state: u32, byte: u8) -> u32 {
        let mut child = self.nodes[state as usize].child;
        while child != 0 && self.nodes[child as usize].byte != byte {
            child = self.nodes[child as usize].sibling;
        }
        child
    }

    fn insert(&mut self, needle: &[u8], counts: usize) {
        let mut at = Self::ROOT;
        for (before, byte) in needle.iter().enumerate() {
            let next = match at {
                Self::ROOT => self.first[usize::from(*byte)],
                _ => self.child(at, *byte),
            };
            at = if next == 0 { self.grow(at, *byte) } else { next };
            let length = before + 1;
            if length >= counts.min(needle.len()) {
                self.nodes[at as usize].longest =
                    u32::try_from(length).expect("the vault bounds the length of secrets");
            }
        }
    }

    fn grow(&mut self, parent: u32, byte: u8) -> u32 {
        let new = u32::try_from(self.nodes.len()).expect("the vault bounds the sum of needles");
        let sibling = self.nodes[parent as usize].child;
        self.nodes.push(Node { byte, sibling, ..Node::default() });
        self.nodes[parent as usize].child = new;
        if parent == Self::ROOT {
            self.first[usize::from(byte)] = new;
        }
        new
    }

    /// Sets failure links, level by level, and what hangs on them.
    fn link(&mut self) {
        let mut level: Vec<u32> = self.first.iter().copied().filter(|node| *node != 0).collect();
        let mut depth = 1;
        while !level.is_empty() {
            let mut next = Vec::new();
            for node in level {
                let fail = self.nodes[self.nodes[node as usize].fail as usize];
                let this = &mut self.nodes[node as usize];
                this.longest = this.longest.max(fail.longest);
                this.live = if this.child == 0 { fail.live } else { depth };
                let mut child = this.child;
                while child != 0 {
                    let from = self.nodes[node as usize].fail;
                    self.nodes[child as usize].fail =
                        self.step(from, self.nodes[child as usize].byte);
                    next.push(child);
                    child = self.nodes[child as usize].sibling;
                }
            }
            level = next;
            depth += 1;
        }
    }
}

/// The needles in small letters, each also as it is once escapes and gaps are taken from it: so is
/// the text that it is looked for in. What would become too short to tell stays as it is.
fn all_readings(needles: &[Secret]) -> Vec<Secret> {
    let mut all: Vec<Secret> = Vec::with_capacity(3 * needles.len());
    for needle in needles {
        let (needle, first) = (needle.expose_secret(), all.len());
        let read = [Reading::Escaped, Reading::Quoted].map(|reading| reading.of(needle));
        let read = read.into_iter().flatten().filter(|read| read.len() >= BEGINNING_BYTES_MIN);
        for mut text in std::iter::once(Zeroizing::new(needle.to_vec())).chain(read) {
            text.make_ascii_lowercase();
            if !all[first..].iter().any(|known| known.expose_secret() == text.as_slice()) {
                all.push(Secret::new(std::mem::take(&mut *text)));
            }
        }
    }
    all
}

impl Drop for Automaton {
    fn drop(&mut self) {
        self.nodes.zeroize();
        self.first.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(needles: &[&str]) -> Automaton {
        let needles: Vec<_> = needles.iter().map(|n| Secret::new(n.as_bytes().to_vec())).collect();
        Automaton::new(&needles)
    }

    type Found = Vec<(usize, usize)>;

    /// All (end, length of the longest needle) by the machine and by trying each needle.
    fn both(needles: &[&str], text: &str) -> (Found, Found) {
        let automaton = machine(needles);
        let (mut state, mut at, mut found) = (Automaton::ROOT, 0, Vec::new());
        while let Some(end) = automaton.next_match(&mut state, text.as_bytes(), &mut at) {
            found.push((end, automaton.longest(state)));
        }
        let tried = (1..=text.len())
            .filter_map(|end| {
                let ends = |n: &&&str| text.as_bytes()[..end].ends_with(n.as_bytes());
                needles.iter().filter(ends).map(|n| n.len()).max().map(|len| (end, len))
            })
            .collect();
        (found, tried)
    }

    #[test]
    fn finds_what_trying_each_needle_finds() {
        let cases: &[(&[&str], &str)] = &[
            (&["he", "she", "his", "hers"], "ushers and his heirs"),
            (&["aa", "aaaa"], "aaaaaaa"),
            (&["abcd", "bc", "cdx"], "abcdx abc bcdx"),
            (&["abab"], "abababab"),
            (&["x"], ""),
            (&[], "nothing to find"),
            (&["needle", "needle"], "a needle and a needle"),
        ];
        for (needles, text) in cases {
            let (found, tried) = both(needles, text);
            assert_eq!(found, tried, "{needles:?} in {text:?}");
        }
    }

    #[test]
    fn beginnings_longer_than_half_count_and_short_ones_never() {
        let needles = ["abcdefghijklmnopqrst", "0123456789"];
        let needles: Vec<_> = needles.iter().map(|n| Secret::new(n.as_bytes().to_vec())).collect();
        let automaton = Automaton::with_beginnings(&needles);
        for (text, longest) in [
            ("abcdefghij", 0),
            ("abcdefghijk", 11),
            ("abcdefghijklmnopqrs", 19),
            ("abcdefghijklmnopqrst", 20),
            ("abcdefghijk-", 0),
            ("0123456", 0),
            ("01234567", 8),
        ] {
            let (mut state, mut at) = (Automaton::ROOT, 0);
            while automaton.next_match(&mut state, text.as_bytes(), &mut at).is_some() {}
            assert_eq!(automaton.longest(state), longest, "{text:?}");
        }
    }

    #[test]
    fn says_how_many_bytes_a_match_may_still_need() {
        let automaton = machine(&["abcd", "cx"]);
        for (text, live) in
            [("", 0), ("z", 0), ("a", 1), ("ab", 2), ("abc", 3), ("abcd", 0), ("zzc", 1)]
        {
            let (mut state, mut at) = (Automaton::ROOT, 0);
            while automaton.next_match(&mut state, text.as_bytes(), &mut at).is_some() {}
            assert_eq!(automaton.live(state), live, "{text:?}");
        }
    }
}
