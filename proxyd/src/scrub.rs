//! Finds injected values in what streams back and masks them at equal length.
//!
//! Lengths stay as they are, so that framing and `Content-Length` stay right. A byte waits only
//! while it is part of a match that may still complete, and the first two of one only for a
//! moment. A compressed body is decoded in step and goes on, as it came, once its decoded form is
//! clear; a match there ends the stream, because a compressed body cannot be masked at equal
//! length. What cannot be decoded is refused.
//!
//! A value that was cut short is found while more than half of it is there: an upstream that
//! shortens what it echoes must not give out all but the last byte.
//!
//! [`forms`] lists the encodings that are searched, [`automaton`] does the search, [`lens`] also
//! below escapes and wrapping, [`masker`] streams plain bodies, [`encoded`] compressed ones,
//! [`messages`] those of WebSocket. [`reference`] says what must be found.

mod automaton;
mod encoded;
mod escape;
mod forms;
pub mod frames;
mod lens;
mod masker;
mod messages;
mod pairs;
pub mod reference;
mod skip;
mod texts;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::head::Fields;
use crate::vault::Secret;

use automaton::Automaton;
use encoded::Encoded;
pub use forms::{forms, forms_behind};
use lens::Search;
use masker::Masker;
use messages::Messages;
pub use texts::Texts;

/// What stands in the place of a found value.
const MASK: u8 = b'*';

/// How much of the beginning of a value may go on when nothing follows it for [`LULL`]. More of it
/// waits; what follows is masked.
const LET_GO_BYTES_MAX: usize = 2;
/// How long nothing must have followed.
const LULL: Duration = Duration::from_millis(20);
/// And for a single byte: many a text ends with one that some form of a value begins with.
const LULL_OF_ONE: Duration = Duration::from_millis(2);

/// The encodings that can be searched, as the value of an `Accept-Encoding` field.
pub const ACCEPTED_ENCODINGS: &str = "gzip, br, zstd, identity";

/// Longest name of a coding that messages show.
const CODING_SHOWN_BYTES_MAX: usize = 40;

/// What to search for. Clones share one automaton, which is wiped with the last of them.
#[derive(Clone)]
pub struct Patterns(Arc<Automaton>);

impl Patterns {
    /// Patterns that find any of `needles`, cut short too while more than half is left.
    pub fn new(needles: &[Secret]) -> Self {
        Self(Arc::new(Automaton::with_beginnings(needles)))
    }

    /// Patterns that find any of `needles` when the whole of it is there, and nothing less.
    pub fn whole(needles: &[Secret]) -> Self {
        Self(Arc::new(Automaton::new(needles)))
    }

    /// Whether there is nothing to search for.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Why a body cannot go on to the sandbox. The stream must be reset.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScrubError {
    #[error("the answer's encoding {0:?} cannot be searched for injected values")]
    Unknown(String),
    #[error("the answer's {0} body cannot be decoded, so it cannot be searched")]
    Decode(&'static str),
    #[error("the answer holds an injected value inside a {0} body")]
    Found(&'static str),
    #[error("the answer's {0} body expands too far to be searched")]
    Bomb(&'static str),
    #[error("the upstream's messages use an extension that was not agreed on")]
    Extension,
}

/// Searches one body as it streams.
pub struct BodyScrubber(Kind);

enum Kind {
    /// Nothing to search for.
    Off,
    Plain(Masker),
    Encoded(Encoded),
    Messages(Box<Messages>),
}

impl BodyScrubber {
    /// For a body with this `Content-Encoding`; of several fields, their values joined by commas.
    pub fn new(patterns: &Patterns, content_encoding: Option<&[u8]>) -> Result<Self, ScrubError> {
        if patterns.is_empty() {
            return Ok(Self(Kind::Off));
        }
        let named = content_encoding.unwrap_or_default();
        let mut codings = named
            .split(|byte| *byte == b',')
            .map(|coding| coding.trim_ascii().to_ascii_lowercase())
            .filter(|coding| !coding.is_empty() && coding != b"identity");
        let unknown = || ScrubError::Unknown(quotable(named));
        let kind = match (codings.next(), codings.next()) {
            (None, _) => Kind::Plain(Masker::new(patterns.0.clone())),
            (Some(one), None) => {
                Kind::Encoded(Encoded::new(&one, patterns.0.clone()).ok_or_else(unknown)?)
            }
            (Some(_), Some(_)) => return Err(unknown()),
        };
        Ok(Self(kind))
    }

    /// For what an upstream says over a connection that switched to `protocol`.
    pub fn switched(patterns: &Patterns, protocol: &[u8]) -> Self {
        let automaton = patterns.0.clone();
        Self(match protocol.eq_ignore_ascii_case(b"websocket") {
            _ if patterns.is_empty() => Kind::Off,
            true => Kind::Messages(Box::new(Messages::new(automaton))),
            false => Kind::Plain(Masker::new(automaton)),
        })
    }

    /// Takes what came, gives what may go on.
    pub fn push(&mut self, chunk: Bytes) -> Result<Vec<Bytes>, ScrubError> {
        match &mut self.0 {
            Kind::Off => Ok(vec![chunk]),
            Kind::Plain(masker) => Ok(masker.push(chunk)),
            Kind::Encoded(encoded) => encoded.push(chunk),
            Kind::Messages(messages) => messages.push(chunk),
        }
    }

    /// Resolves when what is held back should go although a value may still follow: whoever waits
    /// for the end of a line, an event or a message would wait for ever where its last byte happens
    /// to be the first of a value. Never resolves where nothing, or too much, is held.
    pub async fn lull(&self) {
        let pause = match &self.0 {
            Kind::Off => None,
            Kind::Plain(masker) => masker.pause(),
            Kind::Encoded(encoded) => encoded.pause(),
            Kind::Messages(messages) => messages.pause(),
        };
        match pause {
            Some(pause) => tokio::time::sleep(pause).await,
            None => std::future::pending().await,
        }
    }

    /// Gives what is held back after a lull.
    pub fn let_go(&mut self) -> Vec<Bytes> {
        match &mut self.0 {
            Kind::Off => Vec::new(),
            Kind::Plain(masker) => masker.let_go(),
            Kind::Encoded(encoded) => encoded.let_go(),
            Kind::Messages(messages) => messages.let_go(),
        }
    }

    /// Gives what was held back when the body has ended.
    pub fn finish(self) -> Result<Vec<Bytes>, ScrubError> {
        match self.0 {
            Kind::Off => Ok(Vec::new()),
            Kind::Plain(masker) => Ok(masker.finish()),
            Kind::Encoded(encoded) => encoded.finish(),
            Kind::Messages(messages) => Ok(messages.finish()),
        }
    }

    /// How many values were masked so far.
    pub fn masked(&self) -> u64 {
        match &self.0 {
            Kind::Plain(masker) => masker.found(),
            Kind::Messages(messages) => messages.found(),
            Kind::Off | Kind::Encoded(_) => 0,
        }
    }
}

/// See [`BodyScrubber::lull`]; without a search nothing is held.
pub async fn lull(scrubber: Option<&BodyScrubber>) {
    match scrubber {
        Some(scrubber) => scrubber.lull().await,
        None => std::future::pending().await,
    }
}

/// How long to wait with so much of a value; none when it waits for what follows.
fn pause(live: usize) -> Option<Duration> {
    match live {
        0 | 1 => Some(LULL_OF_ONE),
        LET_GO_BYTES_MAX => Some(LULL),
        _ => None,
    }
}

/// The name of a coding as a message may show it: whole, so that a value in it is found and masked,
/// or not at all.
fn quotable(named: &[u8]) -> String {
    match named.len() {
        0..=CODING_SHOWN_BYTES_MAX => String::from_utf8_lossy(named).into_owned(),
        length => format!("of {length} bytes"),
    }
}

/// Masks values in fields of a head or a trailer; says how many. The mask is legal in names too.
pub fn scrub_fields(patterns: &Patterns, fields: &mut Fields) -> u64 {
    if patterns.is_empty() {
        return 0;
    }
    let mut found = 0;
    for (name, value) in fields.iter_mut() {
        for text in [name, value] {
            if let Some((clean, count)) = mask_all(patterns, text) {
                *text = Bytes::from(clean);
                found += count;
            }
        }
    }
    found
}

/// Masks values in one text; says how many.
pub fn scrub_text(patterns: &Patterns, text: &str) -> (String, u64) {
    match mask_all(patterns, text.as_bytes()) {
        None => (text.to_owned(), 0),
        // A value of whole characters leaves whole characters; any other leaves a legible rest.
        Some((clean, count)) => (String::from_utf8_lossy(&clean).into_owned(), count),
    }
}

/// The masked copy and the number of matches; none when nothing matched.
fn mask_all(patterns: &Patterns, text: &[u8]) -> Option<(Vec<u8>, u64)> {
    if text.len() < patterns.0.shortest() {
        return None;
    }
    let mut clean: Option<Vec<u8>> = None;
    let (mut found, mut masked_to) = (0, 0);
    for Range { start, end } in Search::new(patterns.0.clone()).push(text) {
        let at = |number| usize::try_from(number).expect("the text is in memory");
        let (start, end) = (at(start), at(end));
        if found == 0 || start >= masked_to {
            found += 1;
        }
        masked_to = end.max(masked_to);
        clean.get_or_insert_with(|| text.to_vec())[start..end].fill(MASK);
    }
    clean.map(|clean| (clean, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(values: &[&str]) -> Patterns {
        let needles: Vec<_> = values.iter().flat_map(|v| forms(v.as_bytes())).collect();
        Patterns::new(&needles)
    }

    #[test]
    fn masks_values_in_fields_and_counts_them() {
        let patterns = patterns(&["SECRET-CANARY-1"]);
        let mut fields: Fields = [
            ("x-plain", "nothing here"),
            ("x-echo", "Bearer SECRET-CANARY-1; SECRET-CANARY-1"),
            ("x-other", "secrets are another thing"),
            ("secret-canary-1", "a name, in small letters"),
        ]
        .into_iter()
        .map(|(n, v)| (Bytes::from_static(n.as_bytes()), Bytes::from_static(v.as_bytes())))
        .collect();

        let found = scrub_fields(&patterns, &mut fields);

        assert_eq!(found, 3);
        assert_eq!(&fields[1].1[..], b"Bearer ***************; ***************");
        assert_eq!(&fields[3].0[..], b"***************");
    }

    #[test]
    fn a_value_cut_short_is_masked_at_every_split() {
        let patterns = patterns(&["SECRET-CANARY-7f3a9b"]);
        let text = b"/find?q=SECRET-CANARY-7f3a9... not found, SECRET-CANARY-7";
        let want = b"/find?q=*******************... not found, ***************";
        for cut in 0..=text.len() {
            let mut scrubber = BodyScrubber::new(&patterns, None).unwrap();
            let mut out = Vec::new();
            for piece in [&text[..cut], &text[cut..]] {
                out.extend(scrubber.push(Bytes::copy_from_slice(piece)).unwrap());
            }
            assert_eq!(scrubber.masked(), 2, "cut at {cut}");
            out.extend(scrubber.finish().unwrap());

            assert_eq!(out.concat(), want, "cut at {cut}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_less_of_a_value_there_is_the_less_it_waits_for_what_follows() {
        let patterns = patterns(&["~^SECRET-CANARY"]);
        for (text, waits) in [("ends with ~", LULL_OF_ONE), ("ends with ~^", LULL)] {
            let mut scrubber = BodyScrubber::new(&patterns, None).unwrap();
            let before = scrubber.push(Bytes::copy_from_slice(text.as_bytes())).unwrap();
            let since = tokio::time::Instant::now();
            scrubber.lull().await;
            let waited = since.elapsed();

            assert_eq!(waited, waits, "{text}");
            assert_eq!([before.concat(), scrubber.let_go().concat()].concat(), text.as_bytes());
        }
    }

    #[test]
    fn masks_text_at_equal_length() {
        let patterns = patterns(&["SECRET-CANARY-1", "ünïcode-secret"]);

        let (clean, found) = scrub_text(&patterns, "a SECRET-CANARY-1 b ünïcode-secret c");

        assert_eq!(clean, "a *************** b **************** c");
        assert_eq!(found, 2);
    }

    #[test]
    fn encodings_that_cannot_be_searched_are_refused_only_when_there_is_something_to_find() {
        let some = patterns(&["SECRET-CANARY-1"]);
        let nothing = Patterns::new(&[]);
        for (encoding, searchable) in [
            ("", true),
            ("identity", true),
            ("GZIP", true),
            ("x-gzip", true),
            ("br", true),
            ("zstd", true),
            ("deflate", true),
            ("identity, gzip", true),
            ("gzip, br", false),
            ("compress", false),
            ("dcb", false),
        ] {
            let encoding = encoding.as_bytes();
            assert_eq!(BodyScrubber::new(&some, Some(encoding)).is_ok(), searchable);
            assert!(BodyScrubber::new(&nothing, Some(encoding)).is_ok());
        }
        assert!(BodyScrubber::new(&some, None).is_ok());
    }
}
