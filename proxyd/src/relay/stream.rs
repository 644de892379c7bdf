//! One byte stream of any make (TCP, Unix, TLS over either), with room to look ahead.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// What a connection must be able to do.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A connection and the bytes that were read ahead of its reader.
pub struct Stream {
    io: Box<dyn Io>,
    ahead: Bytes,
}

impl Stream {
    pub fn new(io: impl Io + 'static) -> Self {
        Self { io: Box::new(io), ahead: Bytes::new() }
    }

    /// A connection of which `ahead` was already read.
    pub fn resumed(self, ahead: Bytes) -> Self {
        debug_assert!(self.ahead.is_empty(), "only one reader reads ahead");
        Self { io: self.io, ahead }
    }

    /// Waits for at least one byte and shows what is there without taking it; empty at the end.
    pub async fn peek(&mut self) -> io::Result<Bytes> {
        if self.ahead.is_empty() {
            let mut buffer = BytesMut::with_capacity(4096);
            self.io.read_buf(&mut buffer).await?;
            self.ahead = buffer.freeze();
        }
        Ok(self.ahead.clone())
    }

    /// Whether an idle connection is still of use: a peer that closed, or that said something
    /// nobody asked for, makes it useless.
    pub fn is_quiet(&mut self) -> bool {
        if !self.ahead.is_empty() {
            return false;
        }
        let mut byte = [0u8; 1];
        let mut buffer = ReadBuf::new(&mut byte);
        let mut context = Context::from_waker(Waker::noop());
        Pin::new(&mut self.io).poll_read(&mut context, &mut buffer).is_pending()
    }
}

/// An end within TLS in words for an audit record: rustls gives the address of its manual.
fn said(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            io::Error::new(error.kind(), "the peer closed the connection without ending TLS")
        }
        _ => error,
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() {
            return Pin::new(&mut self.io).poll_read(context, buffer).map_err(said);
        }
        let length = self.ahead.len().min(buffer.remaining());
        buffer.put_slice(&self.ahead[..length]);
        self.ahead.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn peeked_bytes_are_read_again() {
        let (mut ours, theirs) = tokio::io::duplex(64);
        let mut stream = Stream::new(theirs);
        ours.write_all(b"abc").await.unwrap();
        drop(ours);

        let seen = stream.peek().await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();

        assert_eq!(seen, b"abc"[..]);
        assert_eq!(all, b"abc");
    }

    #[tokio::test]
    async fn a_stream_that_ended_or_spoke_is_not_quiet() {
        let (mut ours, theirs) = tokio::io::duplex(64);
        let mut stream = Stream::new(theirs);

        let before = stream.is_quiet();
        ours.write_all(b"x").await.unwrap();
        let after = stream.is_quiet();

        assert!(before);
        assert!(!after);
    }
}
