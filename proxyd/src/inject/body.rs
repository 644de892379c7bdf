//! A request's body where the credential has a part in it.

use bytes::{Bytes, BytesMut};

use super::{InjectError, wiped};
use crate::head::{Fields, RequestHead, ResponseHead};
use crate::relay::body::{BodyIn, Piece, Signed};
use crate::relay::h1::framing::Framing;
use crate::relay::responder::Responder;
use crate::vault::Secret;

use super::chunks::Chunks;

/// The most of a body that is held back.
const HELD_BYTES_MAX: usize = 10 << 20;

/// A request's body on its way, and how it is framed.
pub struct Payload<'a, 'b> {
    pub body: &'a mut BodyIn<'b>,
    pub framing: &'a mut Framing,
    /// The way back to a client that waits for leave to send its body.
    pub responder: Option<&'a mut Responder<'b>>,
}

impl Payload<'_, '_> {
    /// Holds the body back until it is whole; one that is too long goes nowhere.
    pub(super) async fn hold(
        &mut self,
        credential: &str,
        head: &mut RequestHead,
    ) -> Result<(), InjectError> {
        let credential = credential.to_owned();
        let too_long = InjectError::TooLong { credential, bytes_max: HELD_BYTES_MAX };
        if let Framing::Length(length) = *self.framing
            && length > HELD_BYTES_MAX as u64
        {
            return Err(too_long);
        }
        if head.headers.remove_all("expect") > 0
            && let Some(responder) = &mut self.responder
        {
            let leave = ResponseHead { status: 100, reason: Bytes::new(), headers: Fields::new() };
            let sent = responder.interim(&leave).await;
            sent.map_err(|error| InjectError::Body(error.to_string()))?;
        }
        let mut whole = BytesMut::new();
        loop {
            match self.body.next().await {
                Ok(Some(Piece::Data(data))) if whole.len() + data.len() > HELD_BYTES_MAX => {
                    return Err(too_long);
                }
                Ok(Some(Piece::Data(data))) => whole.extend_from_slice(&data),
                // Fields that nobody has asked for, after a body that is sent with its length.
                Ok(Some(Piece::Trailers(_))) => {}
                Ok(None) => break,
                Err(error) => return Err(InjectError::Body(error.to_string())),
            }
        }
        if *self.framing != Framing::None {
            self.set(head, whole.freeze());
        }
        Ok(())
    }

    /// The body that is held back.
    pub(super) fn held(&self) -> &[u8] {
        self.body.held().map(|body| &body[..]).unwrap_or_default()
    }

    /// Puts a body with a secret in it in the place of the one that is held back.
    pub(super) fn replace(&mut self, head: &mut RequestHead, body: Secret) {
        self.set(head, wiped(body));
    }

    /// Signs the chunks of the body as they pass.
    pub(super) fn sign(&mut self, chunks: Chunks) {
        let body = std::mem::replace(self.body, BodyIn::Empty);
        *self.body = BodyIn::Signed(Signed::new(body, chunks));
    }

    fn set(&mut self, head: &mut RequestHead, body: Bytes) {
        head.headers.remove_all("transfer-encoding");
        head.headers.remove_all("trailer");
        head.headers.set("Content-Length", body.len().to_string().into());
        *self.framing = Framing::Length(body.len() as u64);
        *self.body = BodyIn::Held(Some(body));
    }
}
