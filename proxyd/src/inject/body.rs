//! A request's body where the credential has a part in it.

use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::InjectError;
use crate::head::{Fields, RequestHead, ResponseHead};
use crate::lease::share::{Share, Taken};
use crate::relay::body::{BodyIn, Piece, Signed};
use crate::relay::h1::framing::Framing;
use crate::relay::responder::Responder;
use crate::vault::Secret;

use super::chunks::{Chunks, Signer};

/// The most of a body that is held back.
const HELD_BYTES_MAX: usize = 10 << 20;

/// A request's body on its way, and how it is framed.
pub struct Payload<'a, 'b> {
    pub body: &'a mut BodyIn<'b>,
    pub framing: &'a mut Framing,
    /// The way back to a client that waits for leave to send its body.
    pub responder: Option<&'a mut Responder<'b>>,
    /// The lease's share of memory for what is held back.
    pub room: &'a Share,
    /// How long a body that is held back may rest: it keeps a part of the share meanwhile.
    pub idle: Duration,
}

/// A body that is held back, and its part of the share: given back with the memory.
struct Kept<T> {
    body: T,
    _room: Taken,
}

impl AsRef<[u8]> for Kept<BytesMut> {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl AsRef<[u8]> for Kept<Secret> {
    fn as_ref(&self) -> &[u8] {
        self.body.expose_secret()
    }
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
        let announced = match *self.framing {
            Framing::Length(length) if length > HELD_BYTES_MAX as u64 => return Err(too_long),
            // It fits: it is no more than the bound above.
            Framing::Length(length) => length as usize,
            _ => 0,
        };
        // All that was announced at once: bodies that are let begin can come to their end.
        let mut room = self.room.take(announced)?;
        if head.headers.remove_all("expect") > 0
            && let Some(responder) = &mut self.responder
        {
            let leave = ResponseHead { status: 100, reason: Bytes::new(), headers: Fields::new() };
            let sent = responder.interim(&leave).await;
            sent.map_err(|error| InjectError::Body(error.to_string()))?;
        }
        let mut whole = BytesMut::with_capacity(announced);
        loop {
            let next = tokio::time::timeout(self.idle, self.body.next()).await;
            let silent = |_| InjectError::Body("nothing more of it came".to_owned());
            match next.map_err(silent)? {
                Ok(Some(Piece::Data(data))) if whole.len() + data.len() > HELD_BYTES_MAX => {
                    return Err(too_long);
                }
                Ok(Some(Piece::Data(data))) => {
                    make_room(&mut whole, data.len(), &mut room)?;
                    whole.extend_from_slice(&data);
                }
                // Fields that nobody has asked for, after a body that is sent with its length.
                Ok(Some(Piece::Trailers(_))) => {}
                Ok(None) => break,
                Err(error) => return Err(InjectError::Body(error.to_string())),
            }
        }
        if *self.framing != Framing::None {
            self.set(head, Bytes::from_owner(Kept { body: whole, _room: room }));
        }
        Ok(())
    }

    /// The body that is held back.
    pub(super) fn held(&self) -> &[u8] {
        self.body.held().map(|body| &body[..]).unwrap_or_default()
    }

    /// Puts a body with a secret in it in the place of the one that is held back.
    pub(super) fn replace(&mut self, head: &mut RequestHead, body: Secret, room: Taken) {
        self.set(head, Bytes::from_owner(Kept { body, _room: room }));
    }

    /// Room for the body that will stand in the place of the one that is held back: a value that
    /// is longer than its placeholder makes a body of many placeholders much longer.
    pub(super) fn room_for(&self, credential: &str, bytes: usize) -> Result<Taken, InjectError> {
        let bytes_max = 2 * HELD_BYTES_MAX;
        if bytes > bytes_max {
            return Err(InjectError::TooLong { credential: credential.to_owned(), bytes_max });
        }
        Ok(self.room.take(bytes)?)
    }

    /// Signs the chunks of the body as they pass. What is held back of them has its part of the
    /// share, as a whole body would.
    pub(super) fn sign(&mut self, signer: Signer) -> Result<(), InjectError> {
        let chunks = Chunks::new(signer, self.room.take(0)?);
        let body = std::mem::replace(self.body, BodyIn::Empty);
        *self.body = BodyIn::Signed(Signed::new(body, chunks));
        Ok(())
    }

    fn set(&mut self, head: &mut RequestHead, body: Bytes) {
        head.headers.remove_all("transfer-encoding");
        head.headers.remove_all("trailer");
        head.headers.set("Content-Length", body.len().to_string().into());
        *self.framing = Framing::Length(body.len() as u64);
        let sent = match std::mem::replace(self.body, BodyIn::Empty) {
            BodyIn::Held { sent, .. } => sent,
            sent => Box::new(sent),
        };
        *self.body = BodyIn::Held { body: Some(body), sent };
    }
}

/// Makes room for more of a body, after taking it from the share. Twice as much each time, so that
/// a body in many pieces is not copied for each.
fn make_room(whole: &mut BytesMut, more: usize, room: &mut Taken) -> Result<(), InjectError> {
    let needed = whole.len() + more;
    if needed > whole.capacity() {
        let next = (whole.capacity() * 2).clamp(needed, HELD_BYTES_MAX);
        room.grow_to(next)?;
        whole.reserve(next - whole.len());
    }
    Ok(())
}
