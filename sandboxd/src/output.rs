//! What is kept of a command's output: everything is counted, the last part is shown, the first
//! part of a long output is spilled to a file in the workspace.
//!
//! A [`Capture`] holds a bounded number of bytes whatever the command writes (`yes`, a gigabyte of
//! NUL, one endless line). It does no I/O: whoever reads the pipe also writes what
//! [`Capture::due`] says is due. Text is made readable only at the end: escape sequences go,
//! invalid UTF-8 and control characters are replaced.

/// Most text shown, in bytes: what the toolset's reference worker keeps.
pub const SHOWN_BYTES_MAX: usize = 100 * 1024;
/// Most of an output that is spilled. A log of this size can still be searched in the sandbox;
/// more would let one command fill the workspace's disk.
pub const SPILL_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// How much is collected before it is written to the spill file: few enough writes, little memory.
const SPILL_CHUNK_BYTES: usize = 1024 * 1024;
/// Opens the text of an output of which only the end is shown.
const TRUNCATED: &str = "[output truncated]";

/// The output of one command while it runs.
#[derive(Debug, Default)]
pub struct Capture {
    /// The end of the output: at least the last [`SHOWN_BYTES_MAX`] bytes of it.
    tail: Vec<u8>,
    /// What is to be spilled and was not taken yet.
    pending: Vec<u8>,
    /// Bytes taken for the spill file so far.
    spilled: u64,
    total: u64,
    spill_failed: bool,
}

/// What the caller of a command gets to see.
#[derive(Debug, PartialEq, Eq)]
pub struct Shown {
    pub text: String,
    /// Bytes written by the command.
    pub total: u64,
    /// Whether `text` is a part only and the spill file holds more.
    pub spilled: bool,
}

impl Capture {
    /// Takes in the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if !self.spill_failed {
            let room = SPILL_BYTES_MAX.saturating_sub(self.spilled + self.pending.len() as u64);
            let room = usize::try_from(room).unwrap_or(usize::MAX);
            self.pending.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        let last = &bytes[bytes.len().saturating_sub(SHOWN_BYTES_MAX)..];
        self.tail.extend_from_slice(last);
        if self.tail.len() > 2 * SHOWN_BYTES_MAX {
            self.tail.drain(..self.tail.len() - SHOWN_BYTES_MAX);
        }
    }

    /// The next piece for the spill file, once the output is too long to be shown and enough of
    /// it has come; at the end (`last`) whatever is left.
    pub fn due(&mut self, last: bool) -> Option<Vec<u8>> {
        let long = self.total > SHOWN_BYTES_MAX as u64;
        let enough = if last { 1 } else { SPILL_CHUNK_BYTES };
        if !long || self.pending.len() < enough {
            return None;
        }
        self.spilled += self.pending.len() as u64;
        Some(std::mem::take(&mut self.pending))
    }

    /// The spill file cannot be written: nothing more is collected for it.
    pub fn spill_failed(&mut self) {
        self.spill_failed = true;
        self.pending = Vec::new();
    }

    /// Whether a piece was taken already, so that the next one continues the file.
    pub fn spill_begun(&self) -> bool {
        self.spilled > 0
    }

    /// The text to show. `spill` is where the file lies, as the sandbox sees it.
    pub fn finish(self, spill: &str) -> Shown {
        let spilled = self.spilled > 0 && !self.spill_failed;
        let start = self.tail.len().saturating_sub(SHOWN_BYTES_MAX);
        let (text, cut) = readable(&self.tail[start..]);
        let truncated = cut || self.total > SHOWN_BYTES_MAX as u64;
        if !truncated {
            return Shown { text, total: self.total, spilled: false };
        }
        let whereabouts = match (spilled, self.total > SPILL_BYTES_MAX) {
            (true, false) => format!(", all of it in {spill}"),
            (true, true) => format!(", the first {SPILL_BYTES_MAX} of them in {spill}"),
            (false, _) => String::new(),
        };
        let text =
            format!("{TRUNCATED} ({} bytes{whereabouts}; this is the end)\n{text}", self.total);
        Shown { text, total: self.total, spilled }
    }
}

/// Makes text of bytes: no escape sequences, no control characters but tab, newline and carriage
/// return, valid UTF-8, at most [`SHOWN_BYTES_MAX`] bytes. Says whether the beginning was cut.
fn readable(bytes: &[u8]) -> (String, bool) {
    let decoded = String::from_utf8_lossy(bytes);
    let mut text = String::with_capacity(decoded.len());
    let mut escape = Escape::default();
    for c in decoded.chars() {
        if escape.takes(c) {
            continue;
        }
        let legal = !c.is_control() || matches!(c, '\t' | '\n' | '\r');
        text.push(if legal { c } else { char::REPLACEMENT_CHARACTER });
    }
    if text.len() <= SHOWN_BYTES_MAX {
        return (text, false);
    }
    let mut start = text.len() - SHOWN_BYTES_MAX;
    while !text.is_char_boundary(start) {
        start += 1;
    }
    (text.split_off(start), true)
}

/// Where in an escape sequence the reader is (ECMA-48, sections 5.3 to 5.6).
#[derive(Default)]
enum Escape {
    #[default]
    Outside,
    /// After ESC.
    Begun,
    /// After ESC and an intermediate character: one final character ends it.
    Intermediate,
    /// After ESC `[`: ends with a character from `@` to `~`.
    Sequence,
    /// After ESC `]`, `P`, `X`, `^`, `_`: ends with BEL or ESC `\`.
    Text { escaped: bool },
}

impl Escape {
    /// Whether `c` belongs to an escape sequence.
    fn takes(&mut self, c: char) -> bool {
        use Escape::{Begun, Intermediate, Outside, Sequence, Text};
        *self = match (&*self, c) {
            (Outside, '\u{1b}') => Begun,
            (Outside, _) => return false,
            (Begun, '[') => Sequence,
            (Begun, ']' | 'P' | 'X' | '^' | '_') => Text { escaped: false },
            (Begun | Intermediate, ' '..='/') => Intermediate,
            (Begun | Intermediate | Sequence, '\u{1b}') => Begun,
            // A newline is never part of a short sequence: the sequence was cut.
            (Begun | Intermediate | Sequence | Text { .. }, '\n') => {
                *self = Outside;
                return false;
            }
            (Begun | Intermediate, _) => Outside,
            (Sequence, '@'..='~') => Outside,
            (Sequence, _) => Sequence,
            (Text { .. }, '\u{7}') | (Text { escaped: true }, '\\') => Outside,
            (Text { .. }, c) => Text { escaped: c == '\u{1b}' },
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(pieces: &[&[u8]]) -> Shown {
        let mut capture = Capture::default();
        for piece in pieces {
            capture.push(piece);
        }
        while capture.due(true).is_some() {}
        capture.finish("/workspace/out.txt")
    }

    #[test]
    fn short_output_is_shown_whole_and_nothing_is_spilled() {
        let shown = shown(&[b"one\n", b"two"]);

        assert_eq!(shown, Shown { text: "one\ntwo".into(), total: 7, spilled: false });
    }

    #[test]
    fn escape_sequences_go_and_bad_bytes_are_replaced() {
        let table: [(&[u8], &str); 8] = [
            (b"\x1b[1;31mred\x1b[0m", "red"),
            (b"\x1b]0;title\x07text", "text"),
            (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
            (b"\x1b(Bplain", "plain"),
            (b"a\x1b[", "a"),
            (b"\x1b]cut\nnext", "\nnext"),
            (b"\x00\xff", "\u{fffd}\u{fffd}"),
            (b"tab\there\r\n", "tab\there\r\n"),
        ];
        for (bytes, expected) in table {
            assert_eq!(readable(bytes).0, expected, "{bytes:?}");
        }
    }

    #[test]
    fn endless_output_is_bounded_counted_and_ends_with_its_end() {
        let piece = vec![0u8; 1024 * 1024];
        let mut capture = Capture::default();
        let mut spilled = 0u64;

        for _ in 0..100 {
            capture.push(&piece);
            while let Some(chunk) = capture.due(false) {
                spilled += chunk.len() as u64;
            }
            assert!(capture.tail.len() + capture.pending.len() < 4 * 1024 * 1024);
        }
        capture.push(b"the last words");
        let shown = capture.finish("/workspace/out.txt");

        assert_eq!(spilled, SPILL_BYTES_MAX);
        assert_eq!(shown.total, 100 * 1024 * 1024 + 14);
        assert!(shown.spilled && shown.text.starts_with("[output truncated] (104857614 bytes"));
        assert!(shown.text.ends_with("the last words"));
        assert!(shown.text.len() < SHOWN_BYTES_MAX + 200, "{}", shown.text.len());
    }

    #[test]
    fn a_spill_that_cannot_be_written_is_not_named() {
        let mut capture = Capture::default();
        capture.push(&vec![b'x'; SHOWN_BYTES_MAX + 1]);

        assert!(capture.due(true).is_some());
        capture.spill_failed();
        let shown = capture.finish("/workspace/out.txt");

        assert!(!shown.spilled && !shown.text.contains("/workspace"), "{}", &shown.text[..80]);
    }
}
