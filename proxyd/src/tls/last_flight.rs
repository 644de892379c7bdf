//! Session tickets that go with the first answer instead of a packet of their own.
//!
//! After a client's Finished a server has nothing to say in TLS 1.3 but session tickets, which
//! nobody waits for: whoever speaks HTTP/1.1 sends a request next, and HTTP/2 has settings to send
//! anyway. rustls would write them at once, which wakes the client in the middle of its request.
//!
//! In TLS 1.2 and before the server's last words are ones that the client waits for. They begin
//! with another kind of record, and are never held back.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// First byte of a record whose kind is encrypted (RFC 8446 section 5.2).
const ENCRYPTED: u8 = 0x17;
/// More than a few tickets need. What is longer goes at once.
const HELD_BYTES_MAX: usize = 4096;

enum State {
    /// Our first flight has not been written, or not whole.
    Opening,
    /// It has been: what the client says next may be its Finished.
    Answered,
    /// The client has spoken since.
    Replied,
    /// Whatever is written goes, after what is held.
    Open,
}

/// A connection below TLS, from the client's hello on.
pub struct LastFlight<T> {
    io: T,
    state: State,
    held: BytesMut,
}

impl<T> LastFlight<T> {
    pub fn new(io: T) -> Self {
        Self { io, state: State::Opening, held: BytesMut::new() }
    }

    /// The handshake is over: what is written from now on goes, after what is held.
    pub fn open(&mut self) {
        self.state = State::Open;
    }

    /// Whether these bytes are to wait, now that they are written.
    fn holds(&mut self, parts: &[IoSlice<'_>]) -> bool {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let first = parts.iter().find_map(|part| part.first());
        let tickets = matches!(self.state, State::Replied) && first == Some(&ENCRYPTED);
        if matches!(self.state, State::Replied) {
            self.state = State::Open;
        }
        tickets && length <= HELD_BYTES_MAX
    }
}

impl<T: AsyncWrite + Unpin> LastFlight<T> {
    fn poll_parts(
        &mut self,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.holds(parts) {
            parts.iter().for_each(|part| self.held.extend_from_slice(part));
            return Poll::Ready(Ok(self.held.len()));
        }
        while !self.held.is_empty() {
            let mut all = Vec::with_capacity(parts.len() + 1);
            all.push(IoSlice::new(&self.held));
            all.extend(parts.iter().map(|part| IoSlice::new(part)));
            let written = ready!(Pin::new(&mut self.io).poll_write_vectored(context, &all))?;
            if written == 0 {
                return Poll::Ready(Ok(0));
            }
            let of_held = written.min(self.held.len());
            self.held.advance(of_held);
            if self.held.is_empty() {
                self.held = BytesMut::new();
            }
            if written > of_held {
                return Poll::Ready(Ok(written - of_held));
            }
        }
        let written = match parts {
            [part] => ready!(Pin::new(&mut self.io).poll_write(context, part))?,
            _ => ready!(Pin::new(&mut self.io).poll_write_vectored(context, parts))?,
        };
        if matches!(self.state, State::Opening | State::Answered) {
            let length: usize = parts.iter().map(|part| part.len()).sum();
            // Half a record more would begin with any byte.
            self.state = if written == length { State::Answered } else { State::Open };
        }
        Poll::Ready(Ok(written))
    }

    /// Sends what is held: for a connection that TLS gave up, whose last words may be why.
    pub async fn send_held(&mut self) -> io::Result<()> {
        std::future::poll_fn(|context| {
            while !self.held.is_empty() {
                let written = ready!(Pin::new(&mut self.io).poll_write(context, &self.held))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.held.advance(written);
            }
            Poll::Ready(Ok(()))
        })
        .await
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for LastFlight<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if matches!(self.state, State::Answered) && read.is_ready() {
            self.state = State::Replied;
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for LastFlight<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_parts(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_parts(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// What arrives of the writes of a server that answers a hello, hears from its client, writes
    /// `last` and then `more`: before `more`, and with it.
    async fn arrives(first: &[u8], last: &[u8], more: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (mut client, server) = tokio::io::duplex(1 << 16);
        let mut server = LastFlight::new(server);
        server.write_all(first).await.unwrap();
        client.write_all(b"finished").await.unwrap();
        server.read_exact(&mut [0; 8]).await.unwrap();
        server.write_all(last).await.unwrap();
        server.flush().await.unwrap();
        server.open();
        let mut before = vec![0; first.len() + last.len()];
        let context = &mut Context::from_waker(std::task::Waker::noop());
        let mut buffer = ReadBuf::new(&mut before);
        assert!(Pin::new(&mut client).poll_read(context, &mut buffer).is_ready());
        let length = buffer.filled().len();
        before.truncate(length);

        server.write_all(more).await.unwrap();
        drop(server);
        let mut after = Vec::new();
        client.read_to_end(&mut after).await.unwrap();
        (before, after)
    }

    #[tokio::test]
    async fn tickets_go_with_what_is_written_next() {
        let (before, after) = arrives(b"\x16hello\x17rest", b"\x17tickets", b"\x17answer").await;

        assert_eq!(before, b"\x16hello\x17rest");
        assert_eq!(after, b"\x17tickets\x17answer");
    }

    #[tokio::test]
    async fn last_words_that_a_client_waits_for_are_not_held_back() {
        for last in [&b"\x14change"[..], b"\x16ticket", b"\x15alert"] {
            let (before, after) = arrives(b"\x16hello", last, b"").await;

            assert_eq!(before, [b"\x16hello", last].concat());
            assert!(after.is_empty());
        }
    }

    #[tokio::test]
    async fn an_answer_after_a_handshake_without_tickets_is_not_held_back() {
        let (mut client, server) = tokio::io::duplex(64);
        let mut server = LastFlight::new(server);
        server.write_all(b"\x16hello").await.unwrap();
        client.write_all(b"finished").await.unwrap();
        server.read_exact(&mut [0; 8]).await.unwrap();

        server.open();
        server.write_all(b"\x17answer").await.unwrap();

        let mut seen = [0; 13];
        client.read_exact(&mut seen).await.unwrap();
        assert_eq!(&seen, b"\x16hello\x17answer");
    }

    #[tokio::test]
    async fn what_is_too_long_for_tickets_is_not_held_back() {
        let long = [&[ENCRYPTED][..], &[0; HELD_BYTES_MAX]].concat();

        let (before, _) = arrives(b"\x16hello", &long, b"").await;

        assert_eq!(before.len(), 6 + long.len());
    }

    #[tokio::test]
    async fn a_first_flight_that_went_in_parts_turns_the_wait_off() {
        let (mut client, server) = tokio::io::duplex(4);
        let mut server = LastFlight::new(server);
        let writing = async {
            server.write_all(b"\x16hello").await.unwrap();
            server.read_exact(&mut [0; 1]).await.unwrap();
            server.write_all(b"\x17ab").await.unwrap();
        };
        let mut seen = [0; 9];
        let reading = async {
            client.write_all(b"f").await.unwrap();
            client.read_exact(&mut seen).await.unwrap();
        };

        tokio::join!(writing, reading);

        assert_eq!(&seen, b"\x16hello\x17ab");
    }

    #[tokio::test]
    async fn held_words_of_a_failed_handshake_can_still_be_sent() {
        let (mut client, server) = tokio::io::duplex(64);
        let mut server = LastFlight::new(server);
        server.write_all(b"\x16hello").await.unwrap();
        client.write_all(b"bad").await.unwrap();
        server.read_exact(&mut [0; 3]).await.unwrap();
        server.write_all(b"\x17alert").await.unwrap();

        server.send_held().await.unwrap();

        drop(server);
        let mut seen = Vec::new();
        client.read_to_end(&mut seen).await.unwrap();
        assert_eq!(seen, b"\x16hello\x17alert");
    }
}
