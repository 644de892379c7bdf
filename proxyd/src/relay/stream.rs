//! One byte stream of any make (TCP, Unix, TLS over either), with room to look ahead.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::io::poll_read_buf;

use crate::sys::interfaces;

/// What a connection must be able to do.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin + Any {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + Any> Io for T {}

/// A connection and the bytes that were read ahead of its reader.
pub struct Stream {
    io: Box<dyn Io>,
    ahead: Bytes,
    /// What was read at once for a reader that takes it in small parts.
    bulk: BytesMut,
    /// The reader's last buffer was filled: more is likely there.
    flows: bool,
    /// See [`Stream::watch`].
    hung_up: Option<Arc<AtomicBool>>,
}

/// How much is read at once while bytes flow. rustls reads 4 KiB at a time, which would be five
/// system calls for each full record.
const BULK_BYTES: usize = 64 * 1024;
/// Readers with buffers beyond this need no help.
const SMALL_BYTES: usize = 16 * 1024;
/// What rustls asks for at least.
const READER_BYTES: usize = 4 * 1024;

impl Stream {
    pub fn new(io: impl Io) -> Self {
        let (ahead, bulk) = (Bytes::new(), BytesMut::new());
        Self { io: Box::new(io), ahead, bulk, flows: false, hung_up: None }
    }

    /// The socket, where nothing lies between it and the reader.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        let io: &dyn Any = &*self.io;
        let tcp = io.downcast_ref::<TcpStream>().map(AsFd::as_fd);
        tcp.or_else(|| io.downcast_ref::<UnixStream>().map(AsFd::as_fd))
    }

    /// Whether its bytes are the socket's own. Such a peer may end its direction and still wait for
    /// ours; one that ends TLS has closed.
    pub fn is_plain(&self) -> bool {
        self.socket().is_some()
    }

    /// What becomes true when a read meets the end of a socket whose peer has closed it, as far as
    /// the kernel can tell that from one that has ended its direction alone.
    pub fn watch(&mut self) -> Option<Arc<AtomicBool>> {
        if self.hung_up.is_none() && self.is_plain() {
            self.hung_up = Some(Arc::default());
        }
        self.hung_up.clone()
    }

    fn look(&self) {
        if let (Some(hung_up), Some(socket)) = (&self.hung_up, self.socket()) {
            hung_up.store(interfaces::hung_up(socket), Ordering::Relaxed);
        }
    }

    /// Whether nobody is at the other end of a socket any more, as far as the kernel can tell.
    pub fn hung_up(&self) -> bool {
        self.socket().is_some_and(interfaces::hung_up)
    }

    /// Whether the peer of a socket has ended its direction.
    pub fn has_ended(&self) -> bool {
        self.socket().is_some_and(interfaces::has_ended)
    }

    /// Has dropping the connection reset it. TLS needs no such: without its goodbye no end of it
    /// looks proper. A Unix socket has no reset to send; its peer sees an end.
    pub fn reset_on_close(&self) {
        if let Some(socket) = self.socket() {
            interfaces::reset_on_close(socket);
        }
    }

    /// Takes [`Stream::reset_on_close`] back.
    pub fn close_in_order(&self) {
        if let Some(socket) = self.socket() {
            interfaces::close_in_order(socket);
        }
    }

    /// A connection of which `ahead` was already read.
    pub fn resumed(self, ahead: Bytes) -> Self {
        debug_assert!(self.ahead.is_empty(), "only one reader reads ahead");
        Self { ahead, ..self }
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

    /// Whether the peer begins with `word`; waits only while it still may, and takes nothing.
    pub async fn begins_with(&mut self, word: &[u8]) -> bool {
        let mut buffer = BytesMut::from(&self.ahead[..]);
        while buffer.len() < word.len() && word.starts_with(&buffer) {
            // A connection that ended begins with nothing more; its reader finds out again.
            if !matches!(self.io.read_buf(&mut buffer).await, Ok(1..)) {
                break;
            }
        }
        self.ahead = buffer.freeze();
        self.ahead.starts_with(word)
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
        if !self.ahead.is_empty() {
            let length = self.ahead.len().min(buffer.remaining());
            buffer.put_slice(&self.ahead[..length]);
            self.ahead.advance(length);
            if self.ahead.is_empty() {
                // Even an empty part of a buffer keeps the whole.
                self.ahead = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        if self.bulk.is_empty() {
            if !self.flows || buffer.remaining() > SMALL_BYTES {
                let room = buffer.remaining();
                let read = Pin::new(&mut self.io).poll_read(context, buffer).map_err(said);
                self.flows = read.is_ready() && buffer.remaining() == 0 && room >= READER_BYTES;
                if read.is_ready() && buffer.remaining() == room {
                    self.look();
                }
                return read;
            }
            self.bulk.reserve(BULK_BYTES);
            let Self { io, bulk, flows, .. } = &mut *self;
            let read = poll_read_buf(Pin::new(io), context, bulk).map_err(said);
            // A pause: a connection that rests keeps no such buffer.
            *flows = matches!(read, Poll::Ready(Ok(length)) if length >= READER_BYTES);
            if !matches!(read, Poll::Ready(Ok(1..))) {
                *bulk = BytesMut::new();
                return read.map_ok(drop);
            }
        }
        let length = self.bulk.len().min(buffer.remaining());
        buffer.put_slice(&self.bulk[..length]);
        self.bulk.advance(length);
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
    async fn what_flows_arrives_whole_whatever_the_sizes_of_buffers() {
        let sent: Vec<u8> = (0..700_000u32).map(|at| at.to_le_bytes()[at as usize % 3]).collect();
        for size in [1000, 4096, 5000, 20_000] {
            let (mut ours, theirs) = tokio::io::duplex(100_000);
            let mut stream = Stream::new(theirs);
            let text = sent.clone();
            let sending = tokio::spawn(async move { ours.write_all(&text).await.unwrap() });

            let (mut all, mut buffer) = (Vec::new(), vec![0; size]);
            loop {
                let length = stream.read(&mut buffer).await.unwrap();
                if length == 0 {
                    break;
                }
                all.extend_from_slice(&buffer[..length]);
            }

            sending.await.unwrap();
            assert!(all == sent, "buffers of {size}");
            assert_eq!(stream.bulk.capacity(), 0);
        }
    }
}
