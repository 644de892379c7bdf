//! A connection that failed to take bytes says why, if its peer has said so before it closed.
//!
//! A server that refuses a client of TLS 1.3 sends an alert and closes, while the client already
//! sends its request: what fails first may be the sending, which knows of a broken pipe only.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// How long a peer's last words are waited for, on a connection that takes nothing any more.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub struct Telling<T> {
    io: T,
    /// Read while looking for an alert.
    ahead: Option<u8>,
    /// A failure that the alert is still looked for.
    failed: Option<(io::Error, Pin<Box<Sleep>>)>,
}

impl<T> Telling<T> {
    pub fn new(io: T) -> Self {
        Self { io, ahead: None, failed: None }
    }
}

impl<T: AsyncRead + Unpin> Telling<T> {
    /// What an attempt to send gave, with the alert instead of the failure that followed from it.
    fn told<O>(
        &mut self,
        context: &mut Context<'_>,
        attempt: impl FnOnce(Pin<&mut T>, &mut Context<'_>) -> Poll<io::Result<O>>,
    ) -> Poll<io::Result<O>> {
        if self.failed.is_none() {
            match attempt(Pin::new(&mut self.io), context) {
                Poll::Ready(Err(failure)) if self.may_be_told(&failure) => {
                    self.failed = Some((failure, Box::pin(sleep(LAST_WORDS))));
                }
                other => return other,
            }
        }
        self.why(context).map(Err)
    }

    fn may_be_told(&self, failure: &io::Error) -> bool {
        let closed = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        self.ahead.is_none() && closed.contains(&failure.kind())
    }

    /// The alert, or else the failure. What has arrived may not have been noticed yet, so it is
    /// waited for.
    fn why(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        let read = Pin::new(&mut self.io).poll_read(context, &mut buffer);
        let waits = read.is_pending();
        if let Poll::Ready(Err(alert)) = read
            && alert.kind() == io::ErrorKind::InvalidData
        {
            self.failed = None;
            return Poll::Ready(alert);
        }
        self.ahead = self.ahead.or(buffer.filled().first().copied());
        let Some((failure, mut patience)) = self.failed.take() else {
            return Poll::Ready(io::ErrorKind::BrokenPipe.into());
        };
        if waits && patience.as_mut().poll(context).is_pending() {
            self.failed = Some((failure, patience));
            return Poll::Pending;
        }
        Poll::Ready(failure)
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
        self.told(context, |io, context| io.poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.told(context, |io, context| io.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.told(context, |io, context| io.poll_write_vectored(context, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Takes nothing any more, and says that to its reader once that has waited, if ever.
    struct Closed {
        waits: usize,
        says: Option<io::Result<u8>>,
    }

    impl AsyncRead for Closed {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if let Some(waits) = self.waits.checked_sub(1) {
                self.waits = waits;
                if waits == 0 {
                    context.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
            match self.says.take() {
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

    fn closed(waits: usize, says: Option<io::Result<u8>>) -> Telling<Closed> {
        Telling::new(Closed { waits, says })
    }

    #[tokio::test(start_paused = true)]
    async fn the_alert_is_told_and_what_else_was_said_is_still_read() {
        let alert =
            || io::Error::new(io::ErrorKind::InvalidData, "received fatal alert: UnknownCA");
        let mut answered = closed(0, Some(Ok(b'x')));

        // Also where its arrival has not been noticed when the sending fails.
        for waits in [0, 1] {
            let failure = closed(waits, Some(Err(alert()))).write_all(b"GET").await.unwrap_err();
            assert_eq!(failure.to_string(), "received fatal alert: UnknownCA");
        }
        // The last of these never says anything, nor ends.
        for closed in [&mut answered, &mut closed(0, None), &mut closed(usize::MAX, None)] {
            let failure = closed.write_all(b"GET").await.unwrap_err();
            assert_eq!(failure.kind(), io::ErrorKind::BrokenPipe);
        }
        let mut said = Vec::new();
        answered.read_to_end(&mut said).await.unwrap();
        assert_eq!(said, b"x");
    }
}
