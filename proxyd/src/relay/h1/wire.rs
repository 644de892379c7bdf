//! The two halves of an HTTP/1.1 connection, and where a head ends in its bytes.

use std::cell::RefCell;
use std::future::{pending, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::time::sleep;

use crate::relay::stream::Stream;

/// Longest head. Eight times what common servers accept by default, so the relay is rarely the
/// one to refuse fat cookies, and still small enough to hold for every connection.
pub const HEAD_BYTES_MAX: usize = 128 * 1024;
/// Most fields of a head.
pub const FIELDS_MAX: usize = 512;
/// How much is read at once: little, which is a small request or answer, and more while all of it
/// comes filled.
const READ_BYTES_MIN: usize = 4 * 1024;
const READ_BYTES_MAX: usize = 64 * 1024;
/// What is written waits in a buffer of this size for more to go with it.
const HELD_BYTES_MAX: usize = 8 * 1024;
/// How much of the next requests is read ahead while one is under way.
const AHEAD_BYTES_MAX: usize = 16 * 1024;
/// How often to look whether a peer that said its last has gone.
const LOOK: Duration = Duration::from_secs(1);
/// Empty lines passed over before a request (RFC 9112 section 2.2 asks for at least one).
const EMPTY_LINES_MAX: usize = 2;

thread_local! {
    /// What connections without a byte to keep are read into, one after the other: most rest most
    /// of the time, and none of those has a buffer of its own. It is wiped after each read.
    static SHARED: RefCell<[u8; READ_BYTES_MIN]> = const { RefCell::new([0; READ_BYTES_MIN]) };
}

/// Why no head could be taken from a connection.
#[derive(Debug, thiserror::Error)]
pub enum HeadError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("connection ended in the middle of a head")]
    Truncated,
    #[error("head is longer than {HEAD_BYTES_MAX} bytes")]
    TooLong,
    #[error("head has more than {FIELDS_MAX} fields")]
    TooManyFields,
    #[error("head is not plain HTTP: {0}")]
    Malformed(&'static str),
}

/// The reading half and what was read ahead.
pub struct Reader {
    io: ReadHalf<Stream>,
    pub(super) buffer: BytesMut,
    ended: bool,
    /// See [`Stream::is_plain`].
    is_plain: bool,
    /// See [`Stream::watch`].
    hung_up: Option<Arc<AtomicBool>>,
    room: usize,
}

/// How a peer ended that was waiting for an answer.
pub enum End {
    /// Nobody reads the answer.
    Closed,
    /// Its direction has ended; it may have closed, or wait for the answer and say no more.
    Half,
}

/// The writing half.
pub struct Writer {
    io: WriteHalf<Stream>,
    /// Written and not sent yet.
    held: BytesMut,
}

/// Splits a connection into its halves.
pub fn split(mut stream: Stream) -> (Reader, Writer) {
    let (is_plain, hung_up) = (stream.is_plain(), stream.watch());
    let (read, write) = tokio::io::split(stream);
    let (buffer, room) = (BytesMut::new(), READ_BYTES_MIN);
    let reader = Reader { io: read, buffer, ended: false, is_plain, hung_up, room };
    (reader, Writer { io: write, held: BytesMut::new() })
}

/// Puts the halves of one connection together again.
pub fn join(reader: Reader, writer: Writer) -> Stream {
    let stream = reader.io.unsplit(writer.io);
    if reader.buffer.is_empty() { stream } else { stream.resumed(reader.buffer.freeze()) }
}

impl Reader {
    /// Reads more; false at the end of the stream. Safe to cancel.
    pub async fn fill(&mut self) -> io::Result<bool> {
        self.fill_into(self.room).await
    }

    /// The same with room for at least so many bytes.
    async fn fill_into(&mut self, room: usize) -> io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        let length = if self.buffer.is_empty() && room <= READ_BYTES_MIN {
            poll_fn(|context| self.poll_shared(context)).await?
        } else {
            self.buffer.reserve(room);
            self.io.read_buf(&mut self.buffer).await?
        };
        if length == 0 {
            self.ended = true;
        }
        self.room = match length {
            _ if length >= self.room => (self.room * 2).min(READ_BYTES_MAX),
            _ if length < self.room / 8 => READ_BYTES_MIN,
            _ => self.room,
        };
        Ok(!self.ended)
    }

    /// Reads by way of the thread's buffer, so that waiting needs none.
    fn poll_shared(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        SHARED.with_borrow_mut(|shared| {
            let mut read = ReadBuf::new(shared);
            ready!(Pin::new(&mut self.io).poll_read(context, &mut read))?;
            let length = read.filled().len();
            self.buffer = BytesMut::from(read.filled());
            read.filled_mut().fill(0);
            Poll::Ready(Ok(length))
        })
    }

    /// Gives up what the last message was read into: the connection may rest for long now.
    pub fn rest(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
            self.room = READ_BYTES_MIN;
        }
    }

    /// Whether a resting connection is still of use: a peer that closed, or that said something
    /// nobody asked for, makes it useless.
    pub fn is_quiet(&mut self) -> bool {
        let mut byte = [0u8; 1];
        let mut buffer = ReadBuf::new(&mut byte);
        let mut context = Context::from_waker(Waker::noop());
        self.buffer.is_empty()
            && !self.ended
            && Pin::new(&mut self.io).poll_read(&mut context, &mut buffer).is_pending()
    }

    /// Waits until the first byte of a message is there; false if the peer ended instead.
    pub async fn begins(&mut self) -> io::Result<bool> {
        self.rest();
        while self.buffer.is_empty() {
            if !self.fill().await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Resolves when the peer ends while it waits for an answer. What it says meanwhile is kept for
    /// the next request. Safe to cancel.
    pub async fn ends(&mut self) -> End {
        loop {
            if self.buffer.len() >= AHEAD_BYTES_MAX {
                return pending().await;
            }
            // Mostly nothing comes, and what is left of the buffer behind the head would do.
            match self.fill_into(1).await {
                Ok(true) => {}
                Ok(false) if self.is_plain => return End::Half,
                Ok(false) | Err(_) => return End::Closed,
            }
        }
    }

    /// Resolves when a peer that has ended its direction has closed the connection, where the
    /// kernel tells: always over a Unix socket, over TCP when it was reset. Safe to cancel.
    pub async fn hangs_up(&mut self) {
        let Some(hung_up) = self.hung_up.clone() else { return pending().await };
        loop {
            // Nothing more can come; reading has the socket looked at.
            let _ = self.io.read(&mut [0]).await;
            if hung_up.load(Ordering::Relaxed) {
                return;
            }
            sleep(LOOK).await;
        }
    }

    /// Takes the bytes of one head, with the empty line that ends it; none if the peer ended
    /// before its first byte. Safe to cancel.
    pub async fn head(&mut self) -> Result<Option<Bytes>, HeadError> {
        let mut scanned = 0;
        loop {
            skip_empty_lines(&mut self.buffer, &mut scanned)?;
            if let Some(end) = head_end(&self.buffer, scanned)? {
                return Ok(Some(self.buffer.split_to(end).freeze()));
            }
            scanned = self.buffer.len();
            if scanned > HEAD_BYTES_MAX {
                return Err(HeadError::TooLong);
            }
            if !self.fill().await? {
                if self.buffer.is_empty() {
                    return Ok(None);
                }
                return Err(HeadError::Truncated);
            }
        }
    }

    /// Reads and drops what the peer still sends, up to a bound, so that closing does not reset
    /// the connection before the peer has read our answer.
    pub async fn linger(&mut self, mut bytes_max: usize) {
        loop {
            bytes_max = bytes_max.saturating_sub(self.buffer.len());
            self.buffer.clear();
            if bytes_max == 0 || !matches!(self.fill().await, Ok(true)) {
                return;
            }
        }
    }
}

/// Removes the few empty lines allowed before a message, when nothing else was scanned yet.
fn skip_empty_lines(buffer: &mut BytesMut, scanned: &mut usize) -> Result<(), HeadError> {
    for _ in 0..EMPTY_LINES_MAX {
        if buffer.starts_with(b"\r\n") {
            let _ = buffer.split_to(2);
            *scanned = 0;
        }
    }
    if buffer.starts_with(b"\r\n") {
        return Err(HeadError::Malformed("too many empty lines"));
    }
    Ok(())
}

/// Where the head in `bytes` ends, if its empty line is there. Every line must end in CR LF: a
/// peer's parser that also takes a bare LF or CR would see other lines than we judged.
fn head_end(bytes: &[u8], scanned: usize) -> Result<Option<usize>, HeadError> {
    let from = scanned.saturating_sub(3);
    for at in memchr::memchr3_iter(0, b'\r', b'\n', &bytes[from..]).map(|at| from + at) {
        match bytes[at] {
            0 => return Err(HeadError::Malformed("NUL byte")),
            b'\n' if at == 0 || bytes[at - 1] != b'\r' => {
                return Err(HeadError::Malformed("line feed without carriage return"));
            }
            b'\n' if bytes[..at].ends_with(b"\r\n\r") => {
                if at >= HEAD_BYTES_MAX {
                    return Err(HeadError::TooLong);
                }
                return Ok(Some(at + 1));
            }
            b'\r' if bytes.get(at + 1).is_some_and(|next| *next != b'\n') => {
                return Err(HeadError::Malformed("carriage return without line feed"));
            }
            _ => {}
        }
    }
    Ok(None)
}

impl Writer {
    /// Writes all bytes and sends them off.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.held.is_empty() {
            // Not by way of our buffer: heads of requests hold credentials.
            self.io.write_all(bytes).await?;
            return self.io.flush().await;
        }
        self.add(bytes).await?;
        self.flush().await
    }

    /// Writes without sending off yet: many small writes become one.
    pub async fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.held.len() + bytes.len() <= HELD_BYTES_MAX {
            self.held.extend_from_slice(bytes);
            return Ok(());
        }
        self.write_held().await?;
        if bytes.len() <= HELD_BYTES_MAX {
            self.held.extend_from_slice(bytes);
            return Ok(());
        }
        self.io.write_all(bytes).await
    }

    /// Sends off what was written. Safe to cancel.
    pub async fn flush(&mut self) -> io::Result<()> {
        self.write_held().await?;
        self.io.flush().await
    }

    async fn write_held(&mut self) -> io::Result<()> {
        while !self.held.is_empty() {
            let length = self.io.write(&self.held).await?;
            if length == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            let _ = self.held.split_to(length);
        }
        Ok(())
    }

    /// Ends our direction; the peer's may go on.
    pub async fn shutdown(&mut self) -> io::Result<()> {
        self.write_held().await?;
        self.io.shutdown().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(text: &str) -> Result<Option<usize>, HeadError> {
        head_end(text.as_bytes(), 0)
    }

    #[test]
    fn the_end_is_found_at_every_split() {
        let text = "GET / HTTP/1.1\r\nHost: a\r\n\r\nrest";
        let expected = text.len() - "rest".len();
        for split in 0..text.len() {
            let first = head_end(&text.as_bytes()[..split], 0).unwrap();
            let found = first.or_else(|| head_end(text.as_bytes(), split).unwrap());

            assert_eq!(found, Some(expected), "split at {split}");
        }
    }

    #[test]
    fn lines_that_two_parsers_would_cut_differently_are_refused() {
        for bad in
            ["GET / HTTP/1.1\n", "GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", "A\r\rB\r\n\r\n", "a\0b"]
        {
            assert!(matches!(end(bad), Err(HeadError::Malformed(_))), "{bad:?} was accepted");
        }
    }

    #[test]
    fn two_empty_lines_may_stand_before_a_request_and_no_third() {
        let mut scanned = 0;
        let mut few = BytesMut::from("\r\n\r\nGET");
        let mut many = BytesMut::from("\r\n\r\n\r\nGET");

        assert!(skip_empty_lines(&mut few, &mut scanned).is_ok());
        assert_eq!(&few[..], b"GET");
        assert!(skip_empty_lines(&mut many, &mut scanned).is_err());
    }

    #[tokio::test]
    async fn a_connection_that_rests_has_no_buffer_whatever_came_before() {
        for size in [1, 100, READ_BYTES_MIN, 300_000] {
            let (mut ours, theirs) = tokio::io::duplex(64 * 1024);
            let (mut reader, _writer) = split(Stream::new(theirs));
            let sent: Vec<u8> = (0..size).map(|at| at.to_le_bytes()[at % 3]).collect();
            let text = sent.clone();
            let sending = tokio::spawn(async move {
                ours.write_all(&text).await.unwrap();
                ours
            });
            let mut got = Vec::new();
            while got.len() < size {
                assert!(reader.begins().await.unwrap());
                got.extend_from_slice(&reader.buffer.split());
            }
            let _open = sending.await.unwrap();

            {
                let mut rests = std::pin::pin!(reader.begins());
                let mut context = Context::from_waker(Waker::noop());
                assert!(rests.as_mut().poll(&mut context).is_pending());
            }

            assert!(got == sent, "{size} bytes");
            assert_eq!(reader.buffer.capacity(), 0, "after {size} bytes");
            SHARED.with_borrow(|shared| assert!(shared.iter().all(|byte| *byte == 0)));
        }
    }

    #[tokio::test]
    async fn a_connection_that_ended_or_spoke_is_not_quiet() {
        let (mut speaks, one) = tokio::io::duplex(64);
        let (ends, other) = tokio::io::duplex(64);
        let (mut first, _keep) = split(Stream::new(one));
        let (mut second, _keep_too) = split(Stream::new(other));
        assert!(first.is_quiet() && second.is_quiet());

        speaks.write_all(b"x").await.unwrap();
        drop(ends);

        assert!(!first.is_quiet() && !second.is_quiet());
    }
}
