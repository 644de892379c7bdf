//! How long nothing may move on what goes through proxyd.

use std::time::Duration;

/// Model servers have been seen to think for minutes before the first byte.
const EXCHANGE: Duration = Duration::from_secs(600);
/// Sessions of databases and shells rest between commands; peers that vanished are found by the
/// kernel's probes long before.
const TUNNEL: Duration = Duration::from_secs(24 * 3600);

/// Limits on silence in both directions; there is none on the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idle {
    /// For a request and its answer, and for an upgraded connection.
    pub exchange: Duration,
    /// For a connection that is passed on unread.
    pub tunnel: Duration,
}

impl Idle {
    /// From what the file says. The error is the key and the reason.
    pub fn check(exchange: Option<&str>, tunnel: Option<&str>) -> Result<Self, (String, String)> {
        let read = |key: &str, text: Option<&str>, default: Duration| {
            let Some(text) = text else { return Ok(default) };
            match policies::time_span(text) {
                Ok(time) if time.is_zero() => Err((key.to_owned(), "must not be 0".to_owned())),
                Ok(time) => Ok(time),
                Err(reason) => Err((key.to_owned(), reason)),
            }
        };
        Ok(Self {
            exchange: read("idle-timeout", exchange, EXCHANGE)?,
            tunnel: read("tunnel-idle-timeout", tunnel, TUNNEL)?,
        })
    }
}
