//! The upstream leg of HTTP/2: one connection, many streams.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::{convert, describe};
use crate::head::RequestHead;
use crate::relay::answer::Answer;
use crate::relay::body::BodyOut;
use crate::relay::h1::framing::Framing;
use crate::relay::stream::Stream;

/// Flow control windows: with less, one stream over a long way is slower than HTTP/1.1.
const WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
/// How long to wait for the upstream to allow another stream.
const TURN: Duration = Duration::from_secs(30);

/// Why a request could not be put on its way.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    #[error("{0}")]
    Unsayable(#[from] convert::Unsayable),
    #[error("{}", describe(.0))]
    Connection(#[from] h2::Error),
    #[error("upstream allows no further stream")]
    Full,
}

/// Opens HTTP/2 on a connection. A task carries its frames until the last user is gone.
pub async fn open(stream: Stream) -> Result<h2::client::SendRequest<Bytes>, h2::Error> {
    let mut builder = h2::client::Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(64 * 1024);
    let (sender, connection) = builder.handshake(stream).await?;
    tokio::spawn(async move {
        // Its streams see the same error; there is nobody else to tell.
        let _ = connection.await;
    });
    Ok(sender)
}

/// Sends a head; gives the way for the body and the way of the answer.
pub async fn send(
    sender: h2::client::SendRequest<Bytes>,
    head: &RequestHead,
    framing: Framing,
) -> Result<(BodyOut<'static>, Answer<'static>), SendError> {
    let request = convert::request(head)?;
    let mut sender = match timeout(TURN, sender.ready()).await {
        Ok(sender) => sender?,
        Err(_) => return Err(SendError::Full),
    };
    let ends = framing == Framing::None;
    let (response, stream) = sender.send_request(request, ends)?;
    let out = if ends { BodyOut::None } else { BodyOut::H2(stream) };
    Ok((out, Answer::H2(response)))
}
