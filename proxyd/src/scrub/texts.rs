//! Searches whole texts a step at a time, by one machine after the other: for more needles than
//! one machine should hold, and for whoever has other work in between.

use std::ops::Range;

use zeroize::Zeroizing;

use super::lens::Search;
use super::{MASK, Patterns};
use crate::vault::Secret;

/// What a text costs at least: there may be many empty ones.
const TEXT_BYTES_MIN: usize = 16;

/// Texts, and how far the search in them has come.
pub struct Texts {
    texts: Vec<Text>,
    /// Which text is searched, and from where on.
    text: usize,
    at: usize,
    search: Option<Search>,
}

struct Text {
    bytes: Zeroizing<Vec<u8>>,
    /// What the searches have found, in order and apart.
    found: Vec<Range<usize>>,
}

impl Texts {
    pub fn new(texts: &[Secret]) -> Self {
        let text = |text: &Secret| Text {
            bytes: Zeroizing::new(text.expose_secret().to_vec()),
            found: Vec::new(),
        };
        Self { texts: texts.iter().map(text).collect(), text: 0, at: 0, search: None }
    }

    /// The length of all of them.
    pub fn bytes(&self) -> usize {
        self.texts.iter().map(|text| text.bytes.len()).sum()
    }

    /// Goes on by so many bytes, which are taken from the room; says whether these patterns have
    /// been looked for everywhere. Others may be looked for then.
    pub fn step(&mut self, patterns: &Patterns, room: &mut usize) -> bool {
        while *room > 0 {
            let Some(text) = self.texts.get_mut(self.text) else {
                self.text = 0;
                return true;
            };
            let search = self.search.get_or_insert_with(|| Search::new(patterns.0.clone()));
            let to = text.bytes.len().min(self.at + *room);
            text.note(search.push(&text.bytes[self.at..to]));
            *room = room.saturating_sub((to - self.at).max(TEXT_BYTES_MIN));
            self.at = to;
            if to == text.bytes.len() {
                (self.text, self.at, self.search) = (self.text + 1, 0, None);
            }
        }
        false
    }

    /// The masked texts, and how many values were masked.
    pub fn masked(self) -> (Vec<Secret>, u64) {
        let mut count = 0;
        let mask = |mut text: Text| {
            count += text.found.len() as u64;
            for range in text.found {
                text.bytes[range].fill(MASK);
            }
            Secret::new(std::mem::take(&mut *text.bytes))
        };
        (self.texts.into_iter().map(mask).collect(), count)
    }
}

impl Text {
    /// Values that overlap are one to the reader.
    fn note(&mut self, found: Vec<Range<u64>>) {
        if found.is_empty() {
            return;
        }
        let at = |number| usize::try_from(number).expect("the text is in memory");
        self.found.extend(found.into_iter().map(|range| at(range.start)..at(range.end)));
        self.found.sort_by_key(|range| range.start);
        self.found.dedup_by(|next, kept| {
            let overlap = next.start < kept.end;
            if overlap {
                kept.end = kept.end.max(next.end);
            }
            overlap
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::forms;
    use super::*;

    const STEP_BYTES: usize = 64 * 1024;

    fn patterns(values: &[&str]) -> Patterns {
        let needles: Vec<_> = values.iter().flat_map(|v| forms(v.as_bytes())).collect();
        Patterns::whole(&needles)
    }

    fn masked(texts: &[&str], searches: &[Patterns]) -> (Vec<String>, u64) {
        let secrets: Vec<_> = texts.iter().map(|t| Secret::new(t.as_bytes().to_vec())).collect();
        let mut texts = Texts::new(&secrets);
        for patterns in searches {
            while !texts.step(patterns, &mut { STEP_BYTES }) {}
        }
        let (clean, found) = texts.masked();
        let text = |clean: &Secret| String::from_utf8(clean.expose_secret().to_vec()).unwrap();
        (clean.iter().map(text).collect(), found)
    }

    #[test]
    fn a_value_is_found_across_the_end_of_a_step_and_never_across_texts() {
        let value = "SECRET-CANARY-0123456789";
        let searches = [patterns(&[value])];
        for before in [0, STEP_BYTES - 30, STEP_BYTES - 24, STEP_BYTES - 7, STEP_BYTES, 200_000] {
            let noise = "-".repeat(before);
            let text = format!("{noise}{value} and");

            let (clean, found) = masked(&["", &text, &value[..12], &value[12..]], &searches);

            let expected = format!("{noise}{} and", "*".repeat(value.len()));
            assert_eq!(clean, ["", &expected, &value[..12], &value[12..]], "{before}");
            assert_eq!(found, 1);
        }
    }

    #[test]
    fn what_several_searches_find_is_masked_as_if_it_were_one() {
        let searches = [
            patterns(&["first-part-of-it", "another-value-1"]),
            patterns(&["part-of-it-and-more"]),
        ];

        let (clean, found) = masked(&["a first-part-of-it-and-more another-value-1"], &searches);

        assert_eq!(clean, ["a ************************* ***************"]);
        assert_eq!(found, 2);
    }
}
