//! Masks values in the WebSocket messages of an upstream, in whatever frames they come.
//!
//! The messages' payloads are searched as one text, so a value is found also where it is cut into
//! fragments or messages, with control frames between them; control frames are searched each for
//! itself. Masked bytes stand where they stood, and no frame changes its length. A frame that uses
//! an extension cannot be read, and none was agreed on: it ends the connection.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use zeroize::Zeroizing;

use super::automaton::Automaton;
use super::frames::{Frames, Part};
use super::lens::Search;
use super::masker::{Held, Mask};
use super::{LULL, MASK, ScrubError};

/// One stream's position in the search.
pub(super) struct Messages {
    automaton: Arc<Automaton>,
    frames: Frames,
    text: Text,
    /// The control frame that is under way or was the last.
    control: Text,
    /// Whether the last message is whole.
    whole: bool,
    taken: u64,
    held: Held,
}

/// Payloads that are searched as one.
struct Text {
    search: Search,
    taken: u64,
    /// What of it may still be part of a value, in pieces.
    spans: VecDeque<Span>,
}

/// A piece of payload that came at once.
struct Span {
    /// The numbers of its bytes in the text.
    text: Range<u64>,
    /// Number of the first in the stream.
    stream: u64,
    /// What each of four bytes is masked with, from the first on.
    mask: [u8; 4],
}

impl Text {
    fn new(automaton: &Arc<Automaton>) -> Self {
        let search = Search::new(automaton.clone());
        Self { search, taken: 0, spans: VecDeque::new() }
    }

    fn push(&mut self, payload: &[u8], stream: u64, mask: [u8; 4]) -> Vec<Range<u64>> {
        let length = payload.len() as u64;
        self.spans.push_back(Span { text: self.taken..self.taken + length, stream, mask });
        self.taken += length;
        if mask == [0; 4] {
            return self.search.push(payload);
        }
        let plain = payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask);
        self.search.push(&Zeroizing::new(plain.collect::<Vec<u8>>()))
    }

    /// Masks what was found, in all its pieces.
    fn mask(&self, found: &Range<u64>, mask: &mut Mask<'_>) {
        let pieces = self.spans.iter().filter_map(|span| {
            let (from, to) = (found.start.max(span.text.start), found.end.min(span.text.end));
            let at = |number| span.stream + (number - span.text.start);
            (from < to).then(|| (at(from)..at(to), span))
        });
        let mut whole: Option<Range<u64>> = None;
        for (piece, span) in pieces {
            let key =
                |number: u64| span.mask[usize::from((number - span.stream).to_le_bytes()[0] % 4)];
            mask.bytes(piece.clone(), |number| MASK ^ key(number));
            whole = Some(whole.map_or(piece.start, |whole| whole.start)..piece.end);
        }
        if let Some(whole) = whole {
            mask.value(whole);
        }
    }

    /// Number in the stream of the first byte that may be part of a value; none when none may.
    fn open_from(&mut self) -> Option<u64> {
        let open = self.search.open_from();
        while self.spans.front().is_some_and(|span| span.text.end <= open) {
            self.spans.pop_front();
        }
        self.spans.front().map(|span| span.stream + (open - span.text.start))
    }
}

impl Messages {
    pub(super) fn new(automaton: Arc<Automaton>) -> Self {
        let [text, control] = [(); 2].map(|()| Text::new(&automaton));
        let (frames, held) = (Frames::default(), Held::default());
        Self { automaton, frames, text, control, whole: true, taken: 0, held }
    }

    pub(super) fn found(&self) -> u64 {
        self.held.found()
    }

    /// Takes what came, gives what can no longer be part of a value.
    pub(super) fn push(&mut self, chunk: Bytes) -> Result<Vec<Bytes>, ScrubError> {
        let mut mask = self.held.mask(&chunk);
        let mut rest = &chunk[..];
        while !rest.is_empty() {
            let (length, part) = self.frames.next(rest);
            match part {
                Part::Head => {}
                Part::Begun(head) if head.reserved => return Err(ScrubError::Extension),
                Part::Begun(head) if head.control => self.control = Text::new(&self.automaton),
                Part::Begun(head) => self.whole = head.last,
                Part::Payload { head, offset } => {
                    let text = if head.control { &mut self.control } else { &mut self.text };
                    let key = std::array::from_fn(|at| head.mask[(offset + at) % 4]);
                    for found in text.push(&rest[..length], self.taken, key) {
                        text.mask(&found, &mut mask);
                    }
                    if head.control && self.frames.is_between() {
                        // Nothing follows that would belong to it.
                        self.control = Text::new(&self.automaton);
                    }
                }
            }
            self.taken += length as u64;
            rest = &rest[length..];
        }
        let chunk = mask.finish().map_or(chunk, Bytes::from);
        let open = [self.text.open_from(), self.control.open_from()];
        let open_from = open.into_iter().flatten().fold(self.taken, u64::min);
        Ok(self.held.release(chunk, open_from))
    }

    /// After which silence what is held may go: little of a value, or what a whole message ends
    /// with. Of a value that is cut into messages with pauses between them, less than half gets
    /// out so; a client that waits for its message must not wait for ever.
    pub(super) fn pause(&self) -> Option<Duration> {
        if self.held.is_empty() {
            return None;
        }
        let between = self.whole && self.frames.is_between();
        let live = self.text.search.live().max(self.control.search.live());
        super::pause(live).or(between.then_some(LULL))
    }

    pub(super) fn let_go(&mut self) -> Vec<Bytes> {
        if self.pause().is_some() { self.held.let_go() } else { Vec::new() }
    }

    pub(super) fn finish(mut self) -> Vec<Bytes> {
        self.held.let_go()
    }
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;
