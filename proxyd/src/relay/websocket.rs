//! What a sandbox sends over an upgraded connection, searched for placeholders on its way.
//!
//! Nothing replaces a placeholder in there, and it must not go out raw either: a message that
//! holds one ends the connection, with a close code where the protocol has such. Everything else
//! goes on at once and as it came, in its frames and under its masks. All that can be out when a
//! placeholder is found is the beginning of the word that stands in every placeholder.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes, BytesMut};
use sha1::{Digest, Sha1};

use crate::scrub::frames::{Frames, Part};
use crate::vault::placeholder::MARK;

/// The close code for a message that policy forbids (RFC 6455 section 7.4.1).
const POLICY_VIOLATION: u16 = 1008;

/// Why what a sandbox sent does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("a message holds a placeholder, and no credential is put into messages")]
    Placeholder,
    #[error("a frame uses an extension that was not agreed on")]
    Extension,
}

/// Searches what goes up.
pub struct Guard {
    frames: Option<Frames>,
    /// Searches in the message that is under way, and in the control frame between its fragments.
    message: Search,
    control: Search,
    passed: Boundary,
}

impl Guard {
    /// For a connection that switched to `protocol`.
    pub fn new(protocol: &[u8]) -> Self {
        let websocket = protocol.eq_ignore_ascii_case(b"websocket");
        Self {
            frames: websocket.then(Frames::default),
            message: Search::default(),
            control: Search::default(),
            passed: Boundary::new(websocket),
        }
    }

    /// Whether the connection speaks in frames, so that one of ours can end it.
    pub fn reads_frames(&self) -> bool {
        self.frames.is_some()
    }

    /// Whether these bytes, which follow those before, may go on. After a refusal none may.
    pub fn check(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        match &mut self.frames {
            None => self.message.feed(bytes, [0; 4], 0)?,
            Some(frames) => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    let (length, part) = frames.next(rest);
                    match part {
                        Part::Head => {}
                        Part::Begun(head) if head.reserved => return Err(Refused::Extension),
                        // A new message has nothing to do with the one before.
                        Part::Begun(head) if head.control => self.control = Search::default(),
                        Part::Begun(head) if head.opcode != 0 => self.message = Search::default(),
                        Part::Begun(_) => {}
                        Part::Payload { head, offset } => {
                            let search =
                                if head.control { &mut self.control } else { &mut self.message };
                            search.feed(&rest[..length], head.mask, offset)?;
                        }
                    }
                    rest = &rest[length..];
                }
            }
        }
        self.passed.pass(bytes);
        Ok(())
    }

    /// The last word to the upstream after a refusal; none in the middle of a frame.
    pub fn farewell(&self) -> Option<Bytes> {
        self.passed.is_reached().then(|| close(POLICY_VIOLATION, "", true))
    }
}

/// Searches one message for the mark that stands in every placeholder.
#[derive(Default)]
struct Search {
    matched: usize,
}

impl Search {
    /// `offset` is where `bytes` begin in their frame's payload.
    fn feed(&mut self, bytes: &[u8], mask: [u8; 4], offset: usize) -> Result<(), Refused> {
        let mark = MARK.as_bytes();
        for (index, byte) in bytes.iter().enumerate() {
            let byte = byte ^ mask[(offset + index) % 4];
            if byte == mark[self.matched] {
                self.matched += 1;
                if self.matched == mark.len() {
                    return Err(Refused::Placeholder);
                }
            } else {
                // The first byte of the mark stands nowhere else in it.
                self.matched = usize::from(byte == mark[0]);
            }
        }
        Ok(())
    }
}

/// Knows whether a stream stands between two frames, where a frame of ours may come.
pub struct Boundary(Option<Frames>);

impl Boundary {
    pub fn new(websocket: bool) -> Self {
        Self(websocket.then(Frames::default))
    }

    pub fn pass(&mut self, bytes: &[u8]) {
        let Some(frames) = &mut self.0 else { return };
        let mut rest = bytes;
        while !rest.is_empty() {
            let (length, _) = frames.next(rest);
            rest = &rest[length..];
        }
    }

    pub fn is_reached(&self) -> bool {
        self.0.as_ref().is_some_and(Frames::is_between)
    }
}

/// The last frame to a client whose message was refused.
pub fn refusal(reason: Refused) -> Bytes {
    close(POLICY_VIOLATION, &format!("cleanhands: {reason}"), false)
}

fn close(code: u16, reason: &str, masked: bool) -> Bytes {
    // A control frame holds 125 bytes; all reasons are shorter, and ASCII.
    let reason = &reason.as_bytes()[..reason.len().min(123)];
    let length = u8::try_from(reason.len() + 2).unwrap_or(2);
    let mut frame = BytesMut::with_capacity(8 + reason.len());
    frame.put_slice(&[0x88, length | if masked { 0x80 } else { 0 }]);
    if masked {
        // There is nothing of a client's choosing in it that a mask would have to hide.
        frame.put_slice(&[0; 4]);
    }
    frame.put_u16(code);
    frame.put_slice(reason);
    frame.freeze()
}

/// A handshake's key, for a client whose protocol has none.
pub fn random_key() -> Option<Bytes> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).ok()?;
    Some(STANDARD.encode(bytes).into())
}

/// Whether an upstream's answer belongs to the handshake with that key (RFC 6455 section 4.1).
pub fn is_answer_to(key: &[u8], accept: Option<&Bytes>) -> bool {
    let mut hash = Sha1::new();
    hash.update(key);
    hash.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    accept.is_some_and(|accept| STANDARD.encode(hash.finalize()).as_bytes() == accept)
}

#[cfg(test)]
#[path = "websocket_tests.rs"]
mod tests;
