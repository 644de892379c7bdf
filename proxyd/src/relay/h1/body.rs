//! HTTP/1.1 bodies, piece by piece: as they arrive they go on, in the framing they came in.

use bytes::{Buf, Bytes, BytesMut};

use super::framing::Framing;
use super::head;
use super::wire::{End, Reader, Writer};
use crate::head::Fields;
use crate::relay::body::{Piece, ReadError, WriteError};

/// Longest line that starts a chunk: a size and whatever extensions. Extensions are dropped.
const CHUNK_LINE_BYTES_MAX: usize = 256;
/// Longest trailer section.
const TRAILER_BYTES_MAX: usize = 16 * 1024;

/// A body on its way in.
pub struct Reading<'a> {
    reader: &'a mut Reader,
    state: State,
}

enum State {
    /// Bytes left of a known length.
    Length(u64),
    ChunkLine,
    /// Bytes left of the current chunk.
    Chunk(u64),
    ChunkEnd,
    Trailers,
    UntilClose,
    Done,
}

impl<'a> Reading<'a> {
    pub fn new(reader: &'a mut Reader, framing: Framing) -> Self {
        let state = match framing {
            Framing::None => State::Done,
            Framing::Length(length) => State::Length(length),
            Framing::Chunked => State::ChunkLine,
            Framing::UntilClose => State::UntilClose,
        };
        Self { reader, state }
    }

    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// See [`Reader::ends`]; only after the body was read.
    pub async fn ends(&mut self) -> End {
        debug_assert!(self.is_done(), "what comes is the body's");
        self.reader.ends().await
    }

    /// The same before the body was read; it is found where it was read ahead to.
    pub async fn leaves(&mut self) -> End {
        self.reader.ends().await
    }

    /// See [`Reader::hangs_up`].
    pub async fn hangs_up(&mut self) {
        self.reader.hangs_up().await;
    }

    /// After an upgrade: everything up to the end of the connection is one body.
    pub fn become_raw(&mut self) {
        self.state = State::UntilClose;
    }

    /// The next piece. Safe to cancel: what was read stays with the connection.
    pub async fn next(&mut self) -> Result<Option<Piece>, ReadError> {
        loop {
            match self.state {
                State::Done => return Ok(None),
                State::Length(left) => return self.part(left, State::Length).await,
                State::Chunk(left) => return self.part(left, State::Chunk).await,
                State::UntilClose => return self.rest().await,
                State::ChunkLine => self.chunk_line().await?,
                State::ChunkEnd => self.chunk_end().await?,
                State::Trailers => return self.trailers().await,
            }
        }
    }

    async fn part(
        &mut self,
        left: u64,
        state: fn(u64) -> State,
    ) -> Result<Option<Piece>, ReadError> {
        self.need(1).await?;
        let here = self.reader.buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let data = self.reader.buffer.split_to(here).freeze();
        let left = left - here as u64;
        self.state = match (left, state(0)) {
            (0, State::Chunk(_)) => State::ChunkEnd,
            (0, _) => State::Done,
            (left, _) => state(left),
        };
        Ok(Some(Piece::Data(data)))
    }

    async fn rest(&mut self) -> Result<Option<Piece>, ReadError> {
        if self.reader.buffer.is_empty() && !self.reader.fill().await? {
            self.state = State::Done;
            return Ok(None);
        }
        let data = self.reader.buffer.split().freeze();
        Ok(Some(Piece::Data(data)))
    }

    async fn chunk_line(&mut self) -> Result<(), ReadError> {
        let line = self.line(CHUNK_LINE_BYTES_MAX).await?;
        let size = chunk_size(&line).ok_or(ReadError::Framing("chunk size"))?;
        self.state = if size == 0 { State::Trailers } else { State::Chunk(size) };
        Ok(())
    }

    async fn chunk_end(&mut self) -> Result<(), ReadError> {
        self.need(2).await?;
        if !self.reader.buffer.starts_with(b"\r\n") {
            return Err(ReadError::Framing("chunk is longer than its size"));
        }
        self.reader.buffer.advance(2);
        self.state = State::ChunkLine;
        Ok(())
    }

    async fn trailers(&mut self) -> Result<Option<Piece>, ReadError> {
        let length = loop {
            if let Some(length) = section_end(&self.reader.buffer)? {
                break length;
            }
            if self.reader.buffer.len() > TRAILER_BYTES_MAX {
                return Err(ReadError::Framing("trailers are too long"));
            }
            self.need(self.reader.buffer.len() + 1).await?;
        };
        let bytes = self.reader.buffer.split_to(length).freeze();
        // A body whose trailers are refused is never done: nothing after it is a request.
        let trailers = match bytes.len() {
            2 => None,
            _ => {
                let fields = head::parse_trailers(&bytes);
                Some(Piece::trailers(fields.map_err(|_| ReadError::Framing("trailers"))?)?)
            }
        };
        self.state = State::Done;
        Ok(trailers)
    }

    /// Takes one line without its ending.
    async fn line(&mut self, bytes_max: usize) -> Result<BytesMut, ReadError> {
        loop {
            if let Some(at) = self.reader.buffer.iter().position(|b| *b == b'\n') {
                let mut line = self.reader.buffer.split_to(at + 1);
                if at == 0 || at > bytes_max || line[at - 1] != b'\r' {
                    return Err(ReadError::Framing("chunk line"));
                }
                line.truncate(at - 1);
                return Ok(line);
            }
            if self.reader.buffer.len() > bytes_max {
                return Err(ReadError::Framing("chunk line is too long"));
            }
            self.need(self.reader.buffer.len() + 1).await?;
        }
    }

    async fn need(&mut self, bytes: usize) -> Result<(), ReadError> {
        while self.reader.buffer.len() < bytes {
            if !self.reader.fill().await? {
                return Err(ReadError::Truncated);
            }
        }
        Ok(())
    }
}

/// The size in a chunk line: hexadecimal digits, then the end or an extension.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.iter().take_while(|b| b.is_ascii_hexdigit()).count();
    if digits == 0 || digits > 15 {
        return None;
    }
    let rest = line[digits..].trim_ascii_start();
    let plain = rest.iter().all(|b| *b == b'\t' || (b' '..=b'~').contains(b));
    if !(rest.is_empty() && line.len() == digits || rest.first() == Some(&b';')) || !plain {
        return None;
    }
    let text = std::str::from_utf8(&line[..digits]).ok()?;
    u64::from_str_radix(text, 16).ok()
}

/// Where a trailer section ends: after the first empty line. Its lines end in CR LF only.
fn section_end(bytes: &[u8]) -> Result<Option<usize>, ReadError> {
    let mut start = 0;
    while let Some(at) = bytes[start..].iter().position(|b| *b == b'\n') {
        let end = start + at;
        if end == start || bytes[end - 1] != b'\r' || bytes[start..end - 1].contains(&b'\r') {
            return Err(ReadError::Framing("trailer line"));
        }
        if end == start + 1 {
            return Ok(Some(end + 1));
        }
        start = end + 1;
    }
    Ok(None)
}

/// A body on its way out.
pub struct Writing<'a> {
    writer: &'a mut Writer,
    framing: Framing,
    /// Bytes still owed of a known length.
    owed: u64,
    /// Set once the body ended as announced; only then can the connection go on.
    finished: &'a mut bool,
    /// Whether pieces wait for [`Writing::flush`].
    gathers: bool,
}

impl<'a> Writing<'a> {
    pub fn new(writer: &'a mut Writer, framing: Framing, finished: &'a mut bool) -> Self {
        let owed = if let Framing::Length(length) = framing { length } else { 0 };
        *finished = false;
        Self { writer, framing, owed, finished, gathers: false }
    }

    /// Has pieces wait for more to go with them, until they are flushed or the body ends.
    #[must_use]
    pub fn gathering(mut self) -> Self {
        self.gathers = true;
        self
    }

    /// Sends off what was written. Safe to cancel.
    pub async fn flush(&mut self) -> Result<(), WriteError> {
        Ok(self.writer.flush().await?)
    }

    /// After an upgrade: bytes go out as they are.
    pub fn become_raw(&mut self) {
        self.framing = Framing::UntilClose;
        *self.finished = false;
    }

    pub async fn data(&mut self, data: Bytes) -> Result<(), WriteError> {
        if data.is_empty() {
            return Ok(());
        }
        match self.framing {
            Framing::None => Err(WriteError::Length),
            Framing::UntilClose => {
                self.writer.add(&data).await?;
                self.unless_gathering().await
            }
            Framing::Length(_) => {
                let length = data.len() as u64;
                self.owed = self.owed.checked_sub(length).ok_or(WriteError::Length)?;
                self.writer.add(&data).await?;
                self.unless_gathering().await
            }
            Framing::Chunked => {
                self.writer.add(format!("{:x}\r\n", data.len()).as_bytes()).await?;
                self.writer.add(&data).await?;
                self.writer.add(b"\r\n").await?;
                self.unless_gathering().await
            }
        }
    }

    async fn unless_gathering(&mut self) -> Result<(), WriteError> {
        if self.gathers { Ok(()) } else { self.flush().await }
    }

    /// Ends the body. Trailers go out where the framing has a place for them.
    pub async fn finish(&mut self, trailers: Option<Fields>) -> Result<(), WriteError> {
        match self.framing {
            Framing::None => {}
            Framing::Length(_) if self.owed > 0 => return Err(WriteError::Length),
            Framing::Length(_) => self.flush().await?,
            Framing::UntilClose => self.writer.shutdown().await?,
            Framing::Chunked => {
                let mut out = BytesMut::from(&b"0\r\n"[..]);
                head::print_fields(&mut out, &trailers.unwrap_or_default());
                self.writer.send(&out).await?;
            }
        }
        *self.finished = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire;
    use super::*;
    use crate::relay::stream::Stream;
    use tokio::io::AsyncWriteExt;

    async fn read(framing: Framing, bytes: &[u8], step: usize) -> Result<(Vec<u8>, usize), String> {
        let (mut ours, theirs) = tokio::io::duplex(step.max(1));
        let (mut reader, _writer) = wire::split(Stream::new(theirs));
        let sent = bytes.to_vec();
        tokio::spawn(async move {
            let _ = ours.write_all(&sent).await;
        });
        let mut reading = Reading::new(&mut reader, framing);
        let (mut body, mut trailers) = (Vec::new(), 0);
        while let Some(piece) = reading.next().await.map_err(|e| e.to_string())? {
            match piece {
                Piece::Data(data) => body.extend_from_slice(&data),
                Piece::Trailers(fields) => trailers = fields.len(),
            }
        }
        Ok((body, trailers))
    }

    #[tokio::test]
    async fn a_chunked_body_is_read_whatever_its_packets() {
        let text = b"3\r\nabc\r\n5;x=\"y\"\r\ndefgh\r\n0\r\nX-Sum: 8\r\nX-B: 1\r\n\r\n";
        for step in [1, 2, 3, 7, 1000] {
            let outcome = read(Framing::Chunked, text, step).await;

            assert_eq!(outcome, Ok((b"abcdefgh".to_vec(), 2)), "steps of {step}");
        }
    }

    #[tokio::test]
    async fn broken_chunks_are_refused() {
        let table: &[&[u8]] = &[
            b"3\nabc\r\n0\r\n\r\n",
            b"3\r\nabcd\r\n0\r\n\r\n",
            b"g\r\n",
            b"\r\n",
            b"0x3\r\nabc\r\n0\r\n\r\n",
            b"-1\r\n",
            b"3 \r\nabc\r\n0\r\n\r\n",
            b"ffffffffffffffff\r\n",
            b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
            b"3\r\nabc\r\n0\r\nAuthorization: x\r\n\r\n",
            b"3\r\nabc\r\n0\r\nX: y\n\r\n",
            b"3\r\nab",
        ];
        for bytes in table {
            let outcome = read(Framing::Chunked, bytes, 1000).await;

            assert!(outcome.is_err(), "{:?} gave {outcome:?}", String::from_utf8_lossy(bytes));
        }
    }

    #[tokio::test]
    async fn a_length_is_kept_to_the_byte() {
        assert_eq!(read(Framing::Length(3), b"abcrest", 2).await, Ok((b"abc".to_vec(), 0)));
        assert!(read(Framing::Length(9), b"abc", 2).await.is_err());
    }

    #[tokio::test]
    async fn a_body_of_another_length_than_announced_is_an_error() {
        let (_ours, theirs) = tokio::io::duplex(1024);
        let (_reader, mut writer) = wire::split(Stream::new(theirs));
        let mut finished = false;
        let mut writing = Writing::new(&mut writer, Framing::Length(3), &mut finished);

        assert!(writing.data(Bytes::from_static(b"ab")).await.is_ok());
        assert!(matches!(writing.finish(None).await, Err(WriteError::Length)));
        assert!(matches!(writing.data(Bytes::from_static(b"cd")).await, Err(WriteError::Length)));
        assert!(!finished);
    }
}
