//! Reads server-sent events (WHATWG HTML, section 9.2) from the pieces in which they arrive.
//!
//! Bounded: a line or an event above the limit is an error, never a growing buffer.

/// Longest event, in bytes: a tool result is at most a few hundred kilobytes.
const EVENT_BYTES_MAX: usize = 32 * 1024 * 1024;

/// One event: its name and its lines of data joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub event: String,
    pub data: String,
}

/// An event grew beyond the limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {EVENT_BYTES_MAX} bytes")]
pub struct TooLong;

/// Collects bytes until events are whole.
#[derive(Debug, Default)]
pub struct Parser {
    line: Vec<u8>,
    event: String,
    data: Option<String>,
    after_cr: bool,
}

impl Parser {
    /// Takes the next piece and gives the events that it completes.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Frame>, TooLong> {
        let mut frames = Vec::new();
        for &byte in bytes {
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' => frames.extend(self.end_of_line()),
                _ => self.line.push(byte),
            }
            if self.line.len() + self.data.as_ref().map_or(0, String::len) > EVENT_BYTES_MAX {
                return Err(TooLong);
            }
        }
        Ok(frames)
    }

    fn end_of_line(&mut self) -> Option<Frame> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            return self.data.take().map(|data| Frame { event, data });
        }
        let line = String::from_utf8_lossy(&line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match (field, &mut self.data) {
            ("event", _) => value.clone_into(&mut self.event),
            ("data", Some(data)) => {
                data.push('\n');
                data.push_str(value);
            }
            ("data", none) => *none = Some(value.to_owned()),
            // Comments have an empty field name; ids and retry times mean nothing here.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(event: &str, data: &str) -> Frame {
        Frame { event: event.into(), data: data.into() }
    }

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let text =
            ": hello\n\nevent: a\ndata: {\"x\":\n data: \ndata:1}\n\r\ndata: é\r\n\r\nevent: q\n\n";
        let text = text.replace("\n data: \n", "\n");
        let expected = [frame("a", "{\"x\":\n1}"), frame("", "é")];

        for size in 1..text.len() {
            let mut parser = Parser::default();
            let mut seen = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                seen.extend(parser.push(piece).unwrap());
            }
            assert_eq!(seen, expected, "pieces of {size} bytes");
        }
    }

    #[test]
    fn an_unfinished_event_is_not_given_out() {
        let mut parser = Parser::default();

        assert_eq!(parser.push(b"event: a\ndata: 1\n"), Ok(vec![]));
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = Parser::default();
        let piece = vec![b'x'; 1024 * 1024];

        let refused = (0..64).any(|_| parser.push(&piece).is_err());

        assert!(refused);
    }
}
