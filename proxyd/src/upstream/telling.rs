//! A connection that failed to take bytes says why, if its peer has said so before it closed.
//!
//! A server that refuses a client of TLS 1.3 sends an alert and closes, while the client already
//! sends its request: what fails first may be the sending, which knows of a broken pipe only.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub struct Telling<T> {
    io: T,
    /// Read while looking for an alert.
    ahead: Option<u8>,
}

impl<T> Telling<T> {
    pub fn new(io: T) -> Self {
        Self { io, ahead: None }
    }
}

impl<T: AsyncRead + Unpin> Telling<T> {
    /// The alert instead of the failure that followed from it.
    fn why(&mut self, context: &mut Context<'_>, failure: io::Error) -> io::Error {
        let closed = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        if self.ahead.is_some() || !closed.contains(&failure.kind()) {
            return failure;
        }
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        match Pin::new(&mut self.io).poll_read(context, &mut buffer) {
            Poll::Ready(Err(alert)) if alert.kind() == io::ErrorKind::InvalidData => alert,
            Poll::Ready(Ok(())) => {
                self.ahead = buffer.filled().first().copied();
                failure
            }
            Poll::Ready(Err(_)) | Poll::Pending => failure,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Telling<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() > 0
            && let Some(byte) = self.ahead.take()
        {
            buffer.put_slice(&[byte]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_read(context, buffer)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Telling<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(context, bytes);
        written.map_err(|failure| self.why(context, failure))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(context);
        flushed.map_err(|failure| self.why(context, failure))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(context, parts);
        written.map_err(|failure| self.why(context, failure))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Takes nothing any more, and says that to its reader.
    struct Closed(Option<io::Result<u8>>);

    impl AsyncRead for Closed {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            match self.0.take() {
                Some(said) => Poll::Ready(said.map(|byte| buffer.put_slice(&[byte]))),
                None => Poll::Ready(Ok(())),
            }
        }
    }

    impl AsyncWrite for Closed {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn the_alert_is_told_and_what_else_was_said_is_still_read() {
        let alert = io::Error::new(io::ErrorKind::InvalidData, "received fatal alert: UnknownCA");
        let mut refused = Telling::new(Closed(Some(Err(alert))));
        let mut answered = Telling::new(Closed(Some(Ok(b'x'))));
        let mut silent = Telling::new(Closed(None));

        let failure = refused.write_all(b"GET").await.unwrap_err();
        assert_eq!(failure.to_string(), "received fatal alert: UnknownCA");
        for closed in [&mut answered, &mut silent] {
            let failure = closed.write_all(b"GET").await.unwrap_err();
            assert_eq!(failure.kind(), io::ErrorKind::BrokenPipe);
        }
        let mut said = Vec::new();
        answered.read_to_end(&mut said).await.unwrap();
        assert_eq!(said, b"x");
    }
}
