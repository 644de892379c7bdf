//! Ends a sandbox's TLS with a leaf certificate of ours.

use std::time::Duration;

use policies::Host;
use tokio::time::timeout;

use super::hello::Hello;
use super::leaf::{LeafError, Leaves};
use crate::relay::stream::Stream;

const DEADLINE: Duration = Duration::from_secs(10);

/// Why there is no connection in the clear.
#[derive(Debug, thiserror::Error)]
pub enum InterceptError {
    #[error("{0}")]
    Leaf(#[from] LeafError),
    #[error("TLS with the client: {0}")]
    Handshake(std::io::Error),
    #[error("TLS with the client: not done within {} s", DEADLINE.as_secs())]
    Slow,
}

/// The protocols offered to clients, in our order.
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// A connection whose TLS ends here.
pub struct Intercepted {
    pub stream: Stream,
    pub speaks_h2: bool,
}

/// Answers the hello as `host`.
pub async fn accept(
    leaves: &Leaves,
    hello: Hello,
    host: &Host,
) -> Result<Intercepted, InterceptError> {
    let config = leaves.server_config(host, &ALPN).await?;
    let stream = timeout(DEADLINE, hello.handshake.into_stream(config))
        .await
        .map_err(|_| InterceptError::Slow)?
        .map_err(InterceptError::Handshake)?;
    let speaks_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok(Intercepted { stream: Stream::new(stream), speaks_h2 })
}
