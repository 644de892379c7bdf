//! Bodies in passage: pieces read from one leg and written to the other.

use std::collections::VecDeque;
use std::future::{pending, poll_fn};

use bytes::Bytes;

use super::h1;
use super::h1::wire::End;
use super::h2::{convert, describe};
use crate::head::Fields;
use crate::inject::chunks::Chunks;
use crate::lease::share::Exhausted;

/// Fields that must not come as trailers: they would change what was judged already
/// (RFC 9110 section 6.5.1).
const NEVER_TRAILERS: [&str; 12] = [
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "proxy-authorization",
    "te",
    "transfer-encoding",
    "upgrade",
];

/// What a body is made of, in the order it arrives; trailers are last.
pub enum Piece {
    Data(Bytes),
    Trailers(Fields),
}

impl Piece {
    /// Trailers, whichever protocol brought them, if all may be such.
    pub fn trailers(fields: Fields) -> Result<Self, ReadError> {
        if NEVER_TRAILERS.iter().any(|name| fields.contains(name)) {
            return Err(ReadError::Framing("a field that may not be a trailer"));
        }
        Ok(Self::Trailers(fields))
    }
}

/// Why a body could not be read to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("connection ended in the middle of the body")]
    Truncated,
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("body framing: {0}")]
    Framing(&'static str),
    #[error("stream was reset: {}", describe(.0))]
    Reset(h2::Error),
    /// Too much is held back already.
    #[error("the body would have to be held back: {0}")]
    Busy(#[from] Exhausted),
}

/// Why a body could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("body does not have the announced length")]
    Length,
    #[error("stream was reset: {}", describe(.0))]
    Reset(h2::Error),
    #[error("peer takes no more of the body")]
    Stopped,
}

/// A body being read.
pub enum BodyIn<'a> {
    Empty,
    H1(h1::body::Reading<'a>),
    H2 {
        stream: h2::RecvStream,
        /// Bytes handed out and not yet given back to the flow control window.
        held: usize,
    },
    /// A body that was held back until it was whole.
    Held {
        body: Option<Bytes>,
        /// Where it came from, read to its end.
        sent: Box<BodyIn<'a>>,
    },
    /// A body whose chunks are signed again as they pass.
    Signed(Box<Signed<'a>>),
    /// A stream whose content belongs to another protocol, once the upstream has switched.
    Waiting(Option<h2::RecvStream>),
}

impl BodyIn<'_> {
    pub fn h2(stream: h2::RecvStream) -> Self {
        if stream.is_end_stream() { Self::Empty } else { Self::H2 { stream, held: 0 } }
    }

    /// After a switch of protocols: everything up to the end of the connection is one body.
    pub fn become_raw(&mut self) {
        match self {
            Self::H1(reading) => reading.become_raw(),
            Self::Waiting(stream) => {
                if let Some(stream) = stream.take() {
                    *self = Self::h2(stream);
                }
            }
            Self::Empty | Self::Held { .. } | Self::Signed(_) | Self::H2 { .. } => {}
        }
    }

    /// The whole of a body that is held back.
    pub fn held(&self) -> Option<&Bytes> {
        match self {
            Self::Held { body, .. } => body.as_ref(),
            _ => None,
        }
    }

    /// The next piece; nothing after the end. Asking again gives the room of the piece before
    /// back to the sender, so a slow reader slows the sender. Safe to cancel.
    pub async fn next(&mut self) -> Result<Option<Piece>, ReadError> {
        match self {
            Self::Empty | Self::Waiting(_) => Ok(None),
            Self::Held { body, .. } => {
                Ok(body.take().filter(|body| !body.is_empty()).map(Piece::Data))
            }
            Self::Signed(signed) => signed.next().await,
            Self::H1(reading) => reading.next().await,
            Self::H2 { stream, held } => next_h2(stream, held).await,
        }
    }

    /// Reads and drops what still comes, up to a bound.
    pub async fn linger(&mut self, mut bytes_max: usize) {
        while let Ok(Some(Piece::Data(data))) = self.next().await {
            match bytes_max.checked_sub(data.len()) {
                Some(left) => bytes_max = left,
                None => return,
            }
        }
    }

    /// Resolves when the client has ended its connection, or its direction of it, all of the body
    /// being read. Only HTTP/1.1 is told by this; HTTP/2 has resets. Safe to cancel.
    pub async fn ends(&mut self) -> End {
        match self {
            Self::H1(reading) if reading.is_done() => reading.ends().await,
            Self::Held { sent, .. } => Box::pin(sent.ends()).await,
            Self::Signed(signed) => Box::pin(signed.body.ends()).await,
            _ => pending().await,
        }
    }

    /// The same while nobody reads the body: some of it is read ahead. Safe to cancel.
    pub async fn leaves(&mut self) -> End {
        match self {
            Self::H1(reading) => reading.leaves().await,
            _ => pending().await,
        }
    }

    /// Resolves when a client that has ended its direction has closed its connection, where that
    /// can be told. Safe to cancel.
    pub async fn hangs_up(&mut self) {
        match self {
            Self::H1(reading) => reading.hangs_up().await,
            Self::Held { sent, .. } => Box::pin(sent.hangs_up()).await,
            Self::Signed(signed) => Box::pin(signed.body.hangs_up()).await,
            _ => pending().await,
        }
    }

    /// Whether nothing is left to read.
    pub fn is_done(&self) -> bool {
        match self {
            Self::Empty | Self::Waiting(_) => true,
            Self::Held { body, .. } => body.is_none(),
            Self::Signed(signed) => signed.ready.is_empty() && signed.body.is_done(),
            Self::H1(reading) => reading.is_done(),
            Self::H2 { stream, .. } => stream.is_end_stream(),
        }
    }
}

/// See [`BodyIn::Signed`].
pub struct Signed<'a> {
    body: BodyIn<'a>,
    chunks: Chunks,
    ready: VecDeque<Bytes>,
}

impl<'a> Signed<'a> {
    pub fn new(body: BodyIn<'a>, chunks: Chunks) -> Box<Self> {
        Box::new(Self { body, chunks, ready: VecDeque::new() })
    }

    async fn next(&mut self) -> Result<Option<Piece>, ReadError> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Ok(Some(Piece::Data(part)));
            }
            match Box::pin(self.body.next()).await? {
                Some(Piece::Data(data)) => {
                    self.ready = self.chunks.push(&data)?.into();
                }
                Some(Piece::Trailers(_)) => {
                    return Err(ReadError::Framing("trailers besides the signed ones"));
                }
                None => {
                    self.chunks.finish()?;
                    return Ok(None);
                }
            }
        }
    }
}

async fn next_h2(
    stream: &mut h2::RecvStream,
    held: &mut usize,
) -> Result<Option<Piece>, ReadError> {
    // Giving back what a closed stream no longer counts is no error of this exchange.
    let _ = stream.flow_control().release_capacity(std::mem::take(held));
    if let Some(data) = stream.data().await {
        let data = data.map_err(ReadError::Reset)?;
        *held = data.len();
        return Ok(Some(Piece::Data(data)));
    }
    let trailers = stream.trailers().await.map_err(ReadError::Reset)?;
    trailers.map(|map| Piece::trailers(convert::fields(&map))).transpose()
}

/// A body being written.
pub enum BodyOut<'a> {
    /// The message has no body; data is refused.
    None,
    H1(h1::body::Writing<'a>),
    H2(h2::SendStream<Bytes>),
}

impl BodyOut<'_> {
    /// After a switch of protocols: bytes go out as they are.
    pub fn become_raw(&mut self) {
        if let Self::H1(writing) = self {
            writing.become_raw();
        }
    }

    pub async fn data(&mut self, data: Bytes) -> Result<(), WriteError> {
        match self {
            Self::None if data.is_empty() => Ok(()),
            Self::None => Err(WriteError::Length),
            Self::H1(writing) => writing.data(data).await,
            Self::H2(stream) => send_h2(stream, data).await,
        }
    }

    /// Ends the body properly, with trailers if there are any. A body that is dropped without
    /// this is seen by its reader as broken off, after what was sent before: HTTP/2 resets the
    /// stream then, and HTTP/1.1 misses its last chunk or bytes.
    pub async fn finish(&mut self, trailers: Option<Fields>) -> Result<(), WriteError> {
        match self {
            Self::None => Ok(()),
            Self::H1(writing) => writing.finish(trailers).await,
            Self::H2(stream) => match trailers {
                Some(fields) => stream.send_trailers(convert::map(&fields)),
                None => stream.send_data(Bytes::new(), true),
            }
            .map_err(WriteError::Reset),
        }
    }

    /// Sends what was written off, then resolves when the reader has given the body up. Whoever
    /// has nothing more to write for now waits for this.
    pub async fn gone(&mut self) {
        match self {
            Self::None => pending().await,
            // A write that fails is the only sign of a client that went.
            Self::H1(writing) => {
                if writing.flush().await.is_ok() {
                    pending().await
                }
            }
            Self::H2(stream) => {
                let _ = poll_fn(|context| stream.poll_reset(context)).await;
            }
        }
    }

    /// Sends off what was written of a body that goes no further: what came is passed on.
    pub async fn flush(&mut self) {
        if let Self::H1(writing) = self {
            // Whoever is gone gets nothing more.
            let _ = writing.flush().await;
        }
    }

    /// Ends the stream at once, with what is still queued in it: the body is of no use to anybody.
    pub fn abort(&mut self) {
        if let Self::H2(stream) = self {
            stream.send_reset(h2::Reason::CANCEL);
        }
    }
}

async fn send_h2(stream: &mut h2::SendStream<Bytes>, mut data: Bytes) -> Result<(), WriteError> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let room = loop {
            match poll_fn(|context| stream.poll_capacity(context)).await {
                None => return Err(WriteError::Stopped),
                Some(Err(error)) => return Err(WriteError::Reset(error)),
                // Spurious: the window shrank again before we were polled.
                Some(Ok(0)) => {}
                Some(Ok(room)) => break room,
            }
        };
        let part = data.split_to(room.min(data.len()));
        stream.send_data(part, false).map_err(WriteError::Reset)?;
    }
    Ok(())
}
