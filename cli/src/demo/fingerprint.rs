//! Recognises a token without having it.
//!
//! The process that draws the token writes down the hash of every piece, half the token long, of
//! every form the token could appear in. Whoever has these hashes can find the token, or half of
//! it, in any pile of bytes, and can make neither the token nor a piece of it: a piece has at least
//! 120 bits that nobody else knows.

use std::collections::HashSet;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// Characters of a raw piece: 24 of base 32 are 120 bits.
const RAW: usize = 24;
/// The same 24 characters in base 64, in hex, and percent-encoded one by one.
const BASE64: usize = RAW * 4 / 3;
const HEX: usize = RAW * 2;
const PERCENT: usize = RAW * 3;
/// Every length of a piece, ascending.
const PIECES: [usize; 4] = [RAW, BASE64, HEX, PERCENT];

/// Hashes of the pieces of all forms.
#[derive(Debug, PartialEq, Eq)]
pub struct Fingerprints(HashSet<[u8; 16]>);

impl Fingerprints {
    /// Takes the fingerprints of a token.
    pub fn of(token: &[u8]) -> Self {
        let forms = forms(token);
        Self(forms.iter().flat_map(|(form, piece)| form.windows(*piece)).map(print_of).collect())
    }

    /// As text, to be handed to another process.
    pub fn to_lines(&self) -> Vec<String> {
        self.0.iter().map(hex::encode).collect()
    }

    /// From that text.
    pub fn from_lines(lines: &[String]) -> Option<Self> {
        let prints = lines.iter().map(|line| hex::decode(line).ok()?.try_into().ok());
        prints.collect::<Option<HashSet<_>>>().map(Self)
    }

    /// A search through one pile of bytes.
    pub fn search(&self) -> Searcher<'_> {
        Searcher { prints: self, carried: Vec::new() }
    }
}

fn print_of(piece: &[u8]) -> [u8; 16] {
    let digest = Sha256::digest(piece);
    let mut print = [0; 16];
    print.copy_from_slice(&digest[..16]);
    print
}

/// Raw, hex, percent-encoded, and base 64 at each of its three alignments; each with the length
/// of its pieces.
fn forms(token: &[u8]) -> Vec<(Zeroizing<Vec<u8>>, usize)> {
    let mut forms = vec![(Zeroizing::new(token.to_vec()), RAW)];
    let lower = Zeroizing::new(hex::encode(token));
    let upper = Zeroizing::new(hex::encode_upper(token));
    for hex in [&lower, &upper] {
        forms.push((Zeroizing::new(hex.as_bytes().to_vec()), HEX));
        let pairs = hex.as_bytes().chunks(2);
        let percent = pairs.flat_map(|pair| [b'%', pair[0], pair[1]]).collect();
        forms.push((Zeroizing::new(percent), PERCENT));
    }
    for before in 0..3 {
        let mut shifted = Zeroizing::new(vec![0; before]);
        shifted.extend_from_slice(token);
        // The characters at the edges mix with whatever stands around the token.
        let edge = (before * 8).div_ceil(6);
        let whole = (before + token.len()) * 8 / 6;
        for engine in [STANDARD, URL_SAFE] {
            let text = Zeroizing::new(engine.encode(&shifted[..]));
            forms.push((Zeroizing::new(text.as_bytes()[edge..whole].to_vec()), BASE64));
        }
    }
    forms
}

/// Takes bytes as they come and says whether the token, or a piece of it, went by.
pub struct Searcher<'a> {
    prints: &'a Fingerprints,
    carried: Vec<u8>,
}

impl Searcher<'_> {
    /// Looks at the next bytes. True: found.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        let mut all = std::mem::take(&mut self.carried);
        all.extend_from_slice(bytes);
        // Only runs of characters that a form can consist of are worth a hash.
        let mut found = false;
        for run in all.split(|byte| !written(*byte)) {
            for piece in PIECES.iter().take_while(|piece| **piece <= run.len()) {
                found |= run.windows(*piece).any(|piece| self.prints.0.contains(&print_of(piece)));
            }
        }
        self.carried = all.split_off(all.len().saturating_sub(PERCENT - 1));
        found
    }
}

fn written(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+/-_%=".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &[u8] = b"qv7mk2xk4tzs6rjw3hdb5ncyl7gfp2aeiou5x3zq6vm4tk2r";

    fn found(pile: &[u8], size: usize) -> bool {
        let prints = Fingerprints::of(TOKEN);
        let mut search = prints.search();
        pile.chunks(size).fold(false, |found, piece| search.push(piece) | found)
    }

    #[test]
    fn every_form_is_found_however_the_bytes_are_cut() {
        let mut piles: Vec<Vec<u8>> = forms(TOKEN).iter().map(|(form, _)| form.to_vec()).collect();
        piles.push(STANDARD.encode([b"user:", TOKEN, b"!"].concat()).into_bytes());
        piles.push([b"Bearer ", TOKEN, b"\r\n"].concat());
        piles.push([b"\0\xff", &TOKEN[10..10 + RAW], b"\0"].concat());

        for pile in piles {
            for size in [1, 7, RAW, 4096] {
                assert!(found(&pile, size), "{} in {size}", String::from_utf8_lossy(&pile));
            }
        }
    }

    #[test]
    fn other_text_and_too_short_a_piece_are_not_found() {
        let masked = [b"Bearer ", &[b'*'; 48][..]].concat();
        for pile in [&masked[..], &TOKEN[..RAW - 1], b"", &[b'a'; 100]] {
            assert!(!found(pile, 16), "{}", String::from_utf8_lossy(pile));
        }
    }

    #[test]
    fn fingerprints_survive_being_handed_over() {
        let prints = Fingerprints::of(TOKEN);

        assert_eq!(Fingerprints::from_lines(&prints.to_lines()), Some(prints));
        assert_eq!(Fingerprints::from_lines(&["zz".into()]), None);
    }
}
