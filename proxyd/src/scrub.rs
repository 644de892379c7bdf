//! Finds injected values in what streams back and masks them at equal length.

use bytes::Bytes;

use crate::head::Fields;

/// What to search for. Clones share one automaton, wiped with the last of them.
#[derive(Clone)]
pub struct Patterns {}

impl Patterns {
    /// Whether there is nothing to search for.
    pub fn is_empty(&self) -> bool {
        todo!()
    }
}

/// Why a body cannot go on to the sandbox. The stream must be reset.
#[derive(Debug, thiserror::Error)]
pub enum ScrubError {
    #[error("the answer's encoding {0:?} cannot be searched for injected values")]
    Unknown(String),
    #[error("the answer's {0} body cannot be decoded")]
    Decode(&'static str),
    #[error("the answer holds an injected value inside a {0} body")]
    Found(&'static str),
    #[error("the answer's {0} body expands too far to be searched")]
    Bomb(&'static str),
}

/// The encodings that can be searched, as the value of an `Accept-Encoding` field.
pub const ACCEPTED_ENCODINGS: &str = "gzip, br, zstd, identity";

/// Searches one body as it streams.
pub struct BodyScrubber {}

impl BodyScrubber {
    /// For a body with this `Content-Encoding`.
    pub fn new(patterns: &Patterns, content_encoding: Option<&[u8]>) -> Result<Self, ScrubError> {
        let _ = (patterns, content_encoding);
        todo!()
    }

    /// Takes what came, gives what may go on.
    pub fn push(&mut self, chunk: Bytes) -> Result<Vec<Bytes>, ScrubError> {
        let _ = chunk;
        todo!()
    }

    /// Gives what was held back when the body has ended.
    pub fn finish(self) -> Result<Vec<Bytes>, ScrubError> {
        todo!()
    }

    /// How many values were masked so far.
    pub fn masked(&self) -> u64 {
        todo!()
    }
}

/// Masks values in fields of a head or a trailer; says how many.
pub fn scrub_fields(patterns: &Patterns, fields: &mut Fields) -> u64 {
    let _ = (patterns, fields);
    todo!()
}

/// Masks values in one text; says how many.
pub fn scrub_text(patterns: &Patterns, text: &str) -> (String, u64) {
    let _ = (patterns, text);
    todo!()
}
