//! Reads a client hello: whom the client means, before anything is decided or sent.
//!
//! rustls parses it, under its own bound on handshake messages; we bound the time.

use std::time::Duration;

use tokio::time::timeout;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake};

use super::last_flight::LastFlight;
use crate::relay::stream::Stream;

/// A client that opened a connection to speak TLS says so at once.
const DEADLINE: Duration = Duration::from_secs(10);
/// First byte of a TLS record that carries a handshake (RFC 8446 section 5.1).
pub const FIRST_BYTE: u8 = 0x16;

/// Why there is no hello.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    #[error("no client hello within {} s", DEADLINE.as_secs())]
    Slow,
    #[error("no client hello: {0}")]
    Malformed(std::io::Error),
}

/// A client hello, and the handshake waiting for our answer.
pub struct Hello {
    /// The name that the client asks for, if it says one.
    pub server_name: Option<String>,
    pub(super) handshake: StartHandshake<LastFlight<Stream>>,
}

/// Reads the hello.
pub async fn read(stream: Stream) -> Result<Hello, HelloError> {
    let stream = LastFlight::new(stream);
    let acceptor = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream);
    let handshake = timeout(DEADLINE, acceptor)
        .await
        .map_err(|_| HelloError::Slow)?
        .map_err(HelloError::Malformed)?;
    let server_name = handshake.client_hello().server_name().map(str::to_owned);
    Ok(Hello { server_name, handshake })
}
