//! Which two bytes can stand beside each other in a value.
//!
//! Most neighbours in an ordinary text stand in no value beside each other, and no match goes
//! across them, however much of the text is escaped or wrapped elsewhere. So a text is looked at
//! once for each shortest match that would have room in it.

use zeroize::Zeroize;

use super::escape::is_gap;
use crate::vault::Secret;

/// One bit for each two bytes. Wiped on drop: it holds pairs of bytes of secrets.
pub(super) struct Pairs(Vec<u64>);

fn place(first: u8, second: u8) -> (usize, u64) {
    let number = usize::from(first) << 8 | usize::from(second);
    (number / 64, 1 << (number % 64))
}

impl Pairs {
    /// The pairs in the first `window` bytes of needles, in letters of either case. What stands
    /// for nothing can stand anywhere.
    pub(super) fn new(needles: &[Secret], window: usize) -> Self {
        let mut pairs = Self(vec![0; (1 << 16) / 64]);
        for gap in (0..=u8::MAX).filter(|byte| is_gap(*byte)) {
            for other in 0..=u8::MAX {
                pairs.add(gap, other);
                pairs.add(other, gap);
            }
        }
        for needle in needles {
            let needle = needle.expose_secret();
            for pair in needle[..window.min(needle.len())].windows(2) {
                for first in [pair[0], pair[0].to_ascii_uppercase()] {
                    pairs.add(first, pair[1]);
                    pairs.add(first, pair[1].to_ascii_uppercase());
                }
            }
        }
        pairs
    }

    fn add(&mut self, first: u8, second: u8) {
        let (word, bit) = place(first, second);
        self.0[word] |= bit;
    }

    fn holds(&self, first: u8, second: u8) -> bool {
        let (word, bit) = place(first, second);
        self.0[word] & bit != 0
    }

    /// Where the last two neighbours that stand in no value part: the place of the second.
    pub(super) fn last_parting(&self, text: &[u8]) -> Option<usize> {
        text.windows(2).rposition(|pair| !self.holds(pair[0], pair[1])).map(|first| first + 1)
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_part_where_they_stand_in_no_value() {
        let pairs = Pairs::new(&[Secret::new(b"abcdef".to_vec())], 4);
        for (text, place) in [
            ("", None),
            ("x", None),
            ("abcd", None),
            ("aBCd", None),
            ("abxbcd", Some(3)),
            ("xab", Some(1)),
            ("a b:c\r\nd", None),
            ("bcde", Some(3)),
        ] {
            assert_eq!(pairs.last_parting(text.as_bytes()), place, "{text}");
        }
    }
}
