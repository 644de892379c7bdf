//! The sandbox's leg of HTTP/1.1: requests in, one after the other, and replies out.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::body::{Reading, Writing};
use super::framing::{self, Ambiguous, Framing, Version};
use super::head::{self, RawRequest};
use super::wire::{self, HeadError, Reader, Writer};
use crate::head::ResponseHead;
use crate::relay::alarm::Alarm;
use crate::relay::body::{BodyIn, BodyOut, WriteError};
use crate::relay::hop;
use crate::relay::stream::Stream;

/// How long a connection may rest between two requests.
const IDLE: Duration = Duration::from_secs(120);
/// How long a head may take from its first byte to its last.
const HEAD: Duration = Duration::from_secs(30);
/// How long and how much is read and dropped after the last answer (see [`Reader::linger`]).
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 1024 * 1024;

/// A connection from a sandbox.
pub struct Connection {
    reader: Reader,
    writer: Writer,
    /// Of all limits on silence here, one after the other.
    pub alarm: Alarm,
}

/// One request, its head parsed and its body still to come.
pub struct Incoming {
    pub raw: RawRequest,
    pub framing: Framing,
    pub connection: hop::Connection,
    /// For us, never for an upstream.
    pub proxy_authorization: Option<Bytes>,
}

/// Why a connection takes no further request.
#[derive(Debug, thiserror::Error)]
pub enum NextError {
    /// Nobody is there to be answered.
    #[error("connection ended")]
    Ended,
    #[error("the head took longer than {} s", HEAD.as_secs())]
    Slow,
    #[error("{0}")]
    Head(HeadError),
    #[error("{0}")]
    Ambiguous(#[from] Ambiguous),
    #[error("{0}")]
    Hop(#[from] hop::Indispensable),
}

impl NextError {
    /// The status of the refusal; none where nobody listens any more.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Ended => None,
            Self::Slow => Some(408),
            Self::Head(HeadError::TooLong | HeadError::TooManyFields) => Some(431),
            Self::Head(_) | Self::Ambiguous(_) | Self::Hop(_) => Some(400),
        }
    }
}

impl Connection {
    pub fn new(stream: Stream) -> Self {
        let (reader, writer) = wire::split(stream);
        Self { reader, writer, alarm: Alarm::default() }
    }

    /// The next request.
    pub async fn next(&mut self) -> Result<Incoming, NextError> {
        let begins = tokio::select! {
            biased;
            begins = self.reader.begins() => begins,
            () = self.alarm.after(IDLE) => Ok(false),
        };
        if !matches!(begins, Ok(true)) {
            return Err(NextError::Ended);
        }
        let read = tokio::select! {
            // Most heads are there as a whole, and need no timer.
            biased;
            read = self.reader.head() => read,
            () = self.alarm.after(HEAD) => return Err(NextError::Slow),
        };
        let bytes = match read {
            Ok(Some(bytes)) => bytes,
            Ok(None) | Err(HeadError::Io(_) | HeadError::Truncated) => {
                return Err(NextError::Ended);
            }
            Err(error) => return Err(NextError::Head(error)),
        };
        let mut raw = head::parse_request(&bytes).map_err(NextError::Head)?;
        let framing = framing::of_request(raw.version, &raw.headers)?;
        let proxy_authorization = raw.headers.first("proxy-authorization").cloned();
        let connection = hop::strip_request(&mut raw.headers)?;
        Ok(Incoming { raw, framing, connection, proxy_authorization })
    }

    /// The two ways of one request: its body in, its reply out.
    pub fn parts(&mut self, incoming: &Incoming) -> (BodyIn<'_>, Reply<'_>) {
        let body = BodyIn::H1(Reading::new(&mut self.reader, incoming.framing));
        let reply = Reply {
            writer: &mut self.writer,
            method: incoming.raw.method.clone(),
            version: incoming.raw.version,
            stays_open: incoming.raw.version == Version::Http11 && !incoming.connection.close,
            started: false,
            open_ended: false,
            finished: false,
        };
        (body, reply)
    }

    /// A reply to a head that could not be read; the connection ends after it.
    pub fn refusal(&mut self) -> Reply<'_> {
        Reply {
            writer: &mut self.writer,
            method: Bytes::from_static(b"GET"),
            version: Version::Http11,
            stays_open: false,
            started: false,
            open_ended: false,
            finished: false,
        }
    }

    /// Says that a CONNECT is accepted and gives the connection for what comes.
    pub async fn tunnel(mut self) -> std::io::Result<Stream> {
        self.writer.send(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
        Ok(wire::join(self.reader, self.writer))
    }

    /// Ends the connection so that what was sent does not look whole.
    pub fn reset(self) {
        wire::join(self.reader, self.writer).reset_on_close();
    }

    /// Ends the connection so that the peer still reads our last answer.
    pub async fn close(mut self) {
        if self.writer.shutdown().await.is_ok() {
            let _ = timeout(LINGER, self.reader.linger(LINGER_BYTES_MAX)).await;
        }
    }
}

/// The reply to one request.
pub struct Reply<'a> {
    writer: &'a mut Writer,
    method: Bytes,
    version: Version,
    stays_open: bool,
    started: bool,
    /// Whether only the end of the connection ends it.
    open_ended: bool,
    finished: bool,
}

impl Reply<'_> {
    pub fn has_started(&self) -> bool {
        self.started
    }

    /// Whether the connection can take another request, its last reply being whole.
    pub fn stays_open(&self) -> bool {
        self.stays_open && self.finished
    }

    /// Whether the reply was sent to its end, as far as its own framing shows.
    pub fn is_whole(&self) -> bool {
        self.finished
    }

    /// Whether an end of the connection in order would make a reply look whole that is not.
    pub fn needs_reset(&self) -> bool {
        self.open_ended && !self.finished
    }

    /// Ends the connection after this reply.
    pub fn close(&mut self) {
        self.stays_open = false;
    }

    pub fn abort(&mut self) {
        self.finished = false;
        self.stays_open = false;
    }

    pub async fn interim(&mut self, head: &ResponseHead) -> Result<(), WriteError> {
        // HTTP/1.0 knows no interim answers (RFC 9110 section 15.2).
        if self.version == Version::Http11 {
            self.writer.send(&head::print_response(head)).await?;
        }
        Ok(())
    }

    pub async fn start(
        &mut self,
        mut head: ResponseHead,
        framing: Framing,
    ) -> Result<BodyOut<'_>, WriteError> {
        let framing = self.frame(&mut head, framing);
        if !self.stays_open {
            head.headers.append("Connection", Bytes::from_static(b"close"));
        }
        self.started = true;
        self.open_ended = framing == Framing::UntilClose;
        let bytes = head::print_response(&head);
        if framing == Framing::None {
            self.writer.send(&bytes).await?;
            self.finished = true;
            return Ok(BodyOut::None);
        }
        // The head goes with what is there of the body.
        self.writer.add(&bytes).await?;
        let writing = Writing::new(self.writer, framing, &mut self.finished);
        Ok(BodyOut::H1(writing.gathering()))
    }

    /// The framing towards this client, with the fields that announce it.
    fn frame(&mut self, head: &mut ResponseHead, framing: Framing) -> Framing {
        if self.method == "HEAD" || framing::has_no_body(head.status) {
            return Framing::None;
        }
        match framing {
            Framing::None => {
                head.headers.remove_all("transfer-encoding");
                head.headers.set("Content-Length", Bytes::from_static(b"0"));
                Framing::None
            }
            Framing::Length(_) => framing,
            Framing::Chunked | Framing::UntilClose if self.version == Version::Http11 => {
                if !head.headers.contains("transfer-encoding") {
                    head.headers.append("Transfer-Encoding", Bytes::from_static(b"chunked"));
                }
                Framing::Chunked
            }
            Framing::Chunked | Framing::UntilClose => {
                head.headers.remove_all("transfer-encoding");
                self.stays_open = false;
                Framing::UntilClose
            }
        }
    }

    pub async fn switch(&mut self, head: &ResponseHead) -> Result<BodyOut<'_>, WriteError> {
        self.started = true;
        self.open_ended = true;
        self.stays_open = false;
        self.writer.send(&head::print_response(head)).await?;
        Ok(BodyOut::H1(Writing::new(self.writer, Framing::UntilClose, &mut self.finished)))
    }
}
