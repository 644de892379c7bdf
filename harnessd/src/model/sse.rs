//! Splits a stream of server-sent events into events (WHATWG HTML, section 9.2.6), within limits.
//!
//! Only what the Messages API and MCP use: `event`, `data` and `id`; comments and retry times are
//! passed over. An event that the stream's end cuts off is not delivered.

/// Longest single event. An answer's largest delta is far below; the limit bounds our memory.
const EVENT_BYTES_MAX: usize = 8 * 1024 * 1024;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SseEvent {
    pub name: String,
    pub data: String,
    /// Where a stream that broke can be taken up again, if the server says so.
    pub id: String,
}

/// An event longer than the limit.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {EVENT_BYTES_MAX} bytes")]
pub struct TooLong;

/// Takes bytes as they come, gives events as they are complete.
#[derive(Default)]
pub struct SseParser {
    line: Vec<u8>,
    /// The last byte was a carriage return: a line feed right after it belongs to it.
    after_return: bool,
    event: SseEvent,
    has_data: bool,
}

impl SseParser {
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<SseEvent>, TooLong> {
        let mut events = Vec::new();
        for &byte in bytes {
            let after_return = std::mem::take(&mut self.after_return);
            match byte {
                b'\n' if after_return => {}
                b'\r' | b'\n' => {
                    self.after_return = byte == b'\r';
                    self.end_line(&mut events);
                }
                _ => self.line.push(byte),
            }
            if self.line.len() + self.event.data.len() > EVENT_BYTES_MAX {
                return Err(TooLong);
            }
        }
        Ok(events)
    }

    fn end_line(&mut self, events: &mut Vec<SseEvent>) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if std::mem::take(&mut self.has_data) {
                events.push(event);
            }
            return;
        }
        let line = String::from_utf8_lossy(&line);
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.event.name),
            "id" => value.clone_into(&mut self.event.id),
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.has_data = true;
                self.event.data.push_str(value);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(chunks: &[&str]) -> Vec<(String, String)> {
        let mut parser = SseParser::default();
        let mut all = Vec::new();
        for chunk in chunks {
            all.extend(parser.push(chunk.as_bytes()).unwrap());
        }
        all.into_iter().map(|e| (e.name, e.data)).collect()
    }

    #[test]
    fn events_are_the_same_however_the_stream_is_cut() {
        let stream = ": hello\r\nevent: a\r\ndata: 1\r\ndata: 2\r\n\r\ndata:x\n\n\nevent: b\r\r\
                      event: c\ndata: é\n\n";
        let whole = events(&[stream]);

        let expected = [("a", "1\n2"), ("", "x"), ("c", "é")];
        assert_eq!(whole, expected.map(|(n, d)| (n.to_owned(), d.to_owned())));
        let mut parser = SseParser::default();
        let mut single = Vec::new();
        for byte in stream.as_bytes() {
            single.extend(parser.push(&[*byte]).unwrap());
        }
        let single: Vec<_> = single.into_iter().map(|e| (e.name, e.data)).collect();
        assert_eq!(single, whole);
    }

    #[test]
    fn an_event_cut_off_by_the_end_is_not_delivered() {
        assert_eq!(events(&["event: a\ndata: {\"x\":"]), []);
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = SseParser::default();
        let block = vec![b'x'; 1024 * 1024];

        let outcome = (0..10).try_for_each(|_| parser.push(&block).map(drop));

        assert_eq!(outcome, Err(TooLong));
    }
}
