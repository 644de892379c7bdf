//! HTTP/2 on the `h2` crate: the two legs, and the form heads take there.

pub mod client;
pub mod convert;
pub mod server;

/// What an error says, without the debug data of a GOAWAY: that is the peer's free text, which may
/// repeat what it was sent, to whoever else has streams on the connection.
pub fn describe(error: &h2::Error) -> String {
    match error.reason() {
        Some(reason) if error.is_go_away() => format!("connection ended: {reason}"),
        Some(reason) => format!("stream ended: {reason}"),
        None => error.to_string(),
    }
}
