//! Ends a sandbox's TLS with a leaf certificate of ours.

use std::time::Duration;

use policies::Host;
use rustls::AlertDescription;
use tokio::time::timeout;

use super::authority::AuthorityId;
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
    #[error(
        "the client does not trust proxyd's certificate for this host (TLS alert {0:?}): it has \
         a list of roots of its own, or was told of another"
    )]
    Untrusted(AlertDescription),
    /// Node and Java say nothing to a server that they do not trust.
    #[error(
        "the client broke off the TLS handshake without a word, as some do that do not trust \
         proxyd's certificate"
    )]
    BrokenOff,
    #[error("TLS with the client: not done within {} s", DEADLINE.as_secs())]
    Slow,
}

/// The protocols offered to clients, in our order. Those that want HTTP/1.0 ask for nothing else.
const ALPN: [&[u8]; 3] = [b"h2", b"http/1.1", b"http/1.0"];

/// A connection whose TLS ends here.
pub struct Intercepted {
    pub stream: Stream,
    pub speaks_h2: bool,
}

/// Tells a client that has no trust in us from other trouble, by what libraries send then.
fn failed(error: std::io::Error) -> InterceptError {
    use AlertDescription::{BadCertificate, CertificateUnknown, UnknownCA};
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::AlertReceived(
            alert @ (BadCertificate | CertificateUnknown | UnknownCA),
        )) => InterceptError::Untrusted(*alert),
        _ if error.kind() == std::io::ErrorKind::UnexpectedEof => InterceptError::BrokenOff,
        _ => InterceptError::Handshake(error),
    }
}

/// Answers the hello as `host`, to a client that trusts that authority.
pub async fn accept(
    leaves: &Leaves,
    authority: AuthorityId,
    hello: Hello,
    host: &Host,
) -> Result<Intercepted, InterceptError> {
    let config = leaves.server_config(authority, host, &ALPN).await?;
    let handshake = async {
        match hello.handshake.into_stream(config).into_fallible().await {
            Ok(mut stream) => {
                stream.get_mut().0.open();
                Ok(stream)
            }
            Err((error, mut socket)) => {
                // Our reason may be among it; the client may have gone.
                let _ = socket.send_held().await;
                Err(failed(error))
            }
        }
    };
    let stream = timeout(DEADLINE, handshake).await.map_err(|_| InterceptError::Slow)??;
    let speaks_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok(Intercepted { stream: Stream::new(stream), speaks_h2 })
}
