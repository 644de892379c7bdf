//! Passes over input in which no needle can begin.
//!
//! A match has at least as many bytes as the shortest of those that count: the window. The last two
//! bytes of a window say by how much it can be moved on before they could stand in the beginning of
//! any needle (Wu and Manber's shift table). So most bytes of an ordinary text are never looked at.

use zeroize::Zeroize;

use crate::vault::Secret;

/// Pairs of bytes are told apart by so many bits; two that fall together only cost time.
const PAIR_BITS: u32 = 13;
/// A window beyond this would spare little more.
const WINDOW_BYTES_MAX: usize = 64;
/// A window below this is not worth its look-ups.
const WINDOW_BYTES_MIN: usize = 4;

/// The shift table. Wiped on drop: it holds pairs of bytes of secrets.
pub(super) struct Skip {
    window: usize,
    shifts: Vec<u8>,
}

/// Letters fall together with those of the other case, and some signs with others.
fn pair(first: u8, second: u8) -> usize {
    (usize::from(first | 0x20) << (PAIR_BITS - 8)) ^ usize::from(second | 0x20)
}

impl Skip {
    /// `counts` says how many bytes of a needle of some length make a match.
    pub(super) fn new(needles: &[Secret], counts: impl Fn(usize) -> usize) -> Self {
        let lengths = needles.iter().map(|needle| counts(needle.expose_secret().len()));
        let window = lengths.min().unwrap_or(0).min(WINDOW_BYTES_MAX);
        if window < WINDOW_BYTES_MIN {
            return Self { window, shifts: Vec::new() };
        }
        let farthest = u8::try_from(window - 1).expect("the window is bounded");
        let mut shifts = vec![farthest; 1 << PAIR_BITS];
        for needle in needles {
            let beginning = &needle.expose_secret()[..window];
            for (shift, bytes) in (0..farthest).zip(beginning.windows(2).rev()) {
                let known = &mut shifts[pair(bytes[0], bytes[1])];
                *known = shift.min(*known);
            }
        }
        Self { window, shifts }
    }

    pub(super) fn window(&self) -> usize {
        self.window
    }

    /// The first place from `at` on where a needle may begin; no needle begins before it. What is
    /// shorter than a window is left to be searched.
    pub(super) fn next(&self, text: &[u8], at: usize) -> usize {
        if self.shifts.is_empty() {
            return at;
        }
        let mut last = at + self.window - 1;
        while let (Some(first), Some(second)) = (text.get(last - 1), text.get(last)) {
            match self.shifts[pair(*first, *second) & ((1 << PAIR_BITS) - 1)] {
                0 => break,
                shift => last += usize::from(shift),
            }
        }
        (last + 1 - self.window).min(text.len())
    }
}

impl Drop for Skip {
    fn drop(&mut self) {
        self.shifts.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(needles: &[&str]) -> Skip {
        let needles: Vec<_> = needles.iter().map(|n| Secret::new(n.as_bytes().to_vec())).collect();
        Skip::new(&needles, |length| length)
    }

    #[test]
    fn never_passes_over_the_beginning_of_a_needle() {
        let needles = ["abcdefgh", "bcdefghi", "xxxxxxxx", "a-b-c-d-e-f"];
        let skip = skip(&needles);
        let text = "xxxabcdefghixxxxxxxxxa-b-c-d-e-fxxabcdefg";
        for from in 0..text.len() {
            let next = skip.next(text.as_bytes(), from);

            let begins = |at: usize| needles.iter().any(|needle| text[at..].starts_with(needle));
            assert!(!(from..next).any(begins), "from {from} to {next}");
        }
    }

    #[test]
    fn leaves_an_end_that_is_shorter_than_the_window() {
        let skip = skip(&["abcdefgh"]);

        assert!(skip.next(b"0123456789abc", 0) <= 10);
        assert_eq!(skip.next(b"abc", 0), 0);
        assert_eq!(skip.next(b"", 0), 0);
    }

    #[test]
    fn short_needles_are_left_to_the_search() {
        assert_eq!(skip(&["abc"]).next(b"0123456789", 2), 2);
        assert_eq!(skip(&[]).next(b"0123456789", 2), 2);
    }
}
