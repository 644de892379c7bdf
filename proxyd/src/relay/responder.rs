//! The way back to the sandbox for one request, whichever protocol it came in.

use std::future::{pending, poll_fn};

use bytes::Bytes;

use super::body::{BodyOut, WriteError};
use super::h1;
use super::h1::framing::Framing;
use super::h2::convert;
use crate::head::ResponseHead;

/// Answers one request: interim heads, then one final head, then its body.
pub enum Responder<'a> {
    H1(h1::server::Reply<'a>),
    H2 { respond: h2::server::SendResponse<Bytes>, started: bool, interim_bytes: usize },
}

/// Interim heads of one answer that go on over HTTP/2, in bytes. They have no flow control there,
/// so a client that reads nothing has them pile up here; what is beyond is dropped, as an interim
/// head may be without loss of the answer.
const INTERIM_BYTES_MAX: usize = 16 * 1024;

impl Responder<'_> {
    /// Whether the final head was sent: from then on a failure can only break the answer off.
    pub fn has_started(&self) -> bool {
        match self {
            Self::H1(reply) => reply.has_started(),
            Self::H2 { started, .. } => *started,
        }
    }

    /// Whether the answer is one stream of many on its connection.
    pub fn has_streams(&self) -> bool {
        matches!(self, Self::H2 { .. })
    }

    /// Passes an interim head on.
    pub async fn interim(&mut self, head: &ResponseHead) -> Result<(), WriteError> {
        match self {
            Self::H1(reply) => reply.interim(head).await,
            Self::H2 { respond, interim_bytes, .. } => {
                let fields = head.headers.iter().map(|(name, value)| name.len() + value.len() + 32);
                *interim_bytes += 32 + fields.sum::<usize>();
                if *interim_bytes > INTERIM_BYTES_MAX {
                    return Ok(());
                }
                let response = convert::response(head).map_err(|_| WriteError::Stopped)?;
                respond.send_informational(response).map_err(WriteError::Reset)
            }
        }
    }

    /// Sends the final head; the body goes into what this returns. `framing` is how the upstream
    /// delimits it; the sandbox's protocol decides what becomes of that.
    pub async fn start(
        &mut self,
        head: ResponseHead,
        framing: Framing,
    ) -> Result<BodyOut<'_>, WriteError> {
        match self {
            Self::H1(reply) => reply.start(head, framing).await,
            Self::H2 { respond, started, .. } => {
                let response = convert::response(&head).map_err(|_| WriteError::Stopped)?;
                let ends = framing == Framing::None;
                *started = true;
                let stream = respond.send_response(response, ends).map_err(WriteError::Reset)?;
                Ok(if ends { BodyOut::None } else { BodyOut::H2(stream) })
            }
        }
    }

    /// Switches protocols: everything after this head is the other protocol's.
    pub async fn switch(&mut self, head: &ResponseHead) -> Result<BodyOut<'_>, WriteError> {
        match self {
            Self::H1(reply) => reply.switch(head).await,
            Self::H2 { respond, started, .. } => {
                // RFC 8441, section 5: the stream is the connection once 200 was said on it.
                let mut head = ResponseHead {
                    status: 200,
                    headers: head.headers.clone(),
                    reason: Bytes::new(),
                };
                for name in ["connection", "upgrade", "sec-websocket-accept"] {
                    head.headers.remove_all(name);
                }
                let response = convert::response(&head).map_err(|_| WriteError::Stopped)?;
                *started = true;
                let stream = respond.send_response(response, false).map_err(WriteError::Reset)?;
                Ok(BodyOut::H2(stream))
            }
        }
    }

    /// Resolves when the client has given the request up.
    pub async fn gone(&mut self) {
        match self {
            Self::H1(_) => pending().await,
            Self::H2 { respond, .. } => {
                let _ = poll_fn(|context| respond.poll_reset(context)).await;
            }
        }
    }

    /// Ends the connection after this answer, where that is this protocol's way.
    pub fn close(&mut self) {
        if let Self::H1(reply) = self {
            reply.close();
        }
    }

    /// Ends the request with a code of HTTP/2 instead of an answer, where its protocol has such.
    pub fn reset(&mut self, reason: h2::Reason) {
        if let Self::H2 { respond, started, .. } = self {
            respond.send_reset(reason);
            *started = true;
        }
    }

    /// Breaks the answer off, so that nobody takes it for whole.
    pub fn abort(&mut self) {
        match self {
            Self::H1(reply) => reply.abort(),
            // The stream is reset when its last handle is dropped, after what was sent before.
            Self::H2 { .. } => {}
        }
    }
}
