//! HTTP/2 on the `h2` crate: the two legs, and the form heads take there.

pub mod client;
pub mod convert;
pub mod server;

use crate::lease::share::{Share, Taken};

/// What waits in one stream to be sent. The peer that reads nothing has no more than this held
/// back for each of its streams; one that reads is on the other side of a socket's buffers.
pub const SEND_BYTES_MAX: usize = 64 * 1024;
/// What a window is that cannot be smaller (RFC 9113 section 6.9.2).
const LEAST_WINDOW_BYTES: u32 = 65_535;

/// How much a peer may send before it is read: that much is held here when nobody reads it.
pub struct Windows {
    /// On one stream.
    pub stream: u32,
    /// On all streams of the connection together.
    pub connection: u32,
    /// What it is of the lease's share.
    _taken: Option<Taken>,
}

impl Windows {
    /// Those of a connection, as large as wanted while the share has room for them.
    pub fn of(share: &Share, stream: u32, connection: u32) -> Self {
        match share.take(connection as usize) {
            Ok(taken) => Self { stream, connection, _taken: Some(taken) },
            Err(_) => {
                Self { stream: LEAST_WINDOW_BYTES, connection: LEAST_WINDOW_BYTES, _taken: None }
            }
        }
    }
}

/// What an error says, without the debug data of a GOAWAY: that is the peer's free text, which may
/// repeat what it was sent, to whoever else has streams on the connection.
pub fn describe(error: &h2::Error) -> String {
    match error.reason() {
        Some(reason) if error.is_go_away() => format!("connection ended: {reason}"),
        Some(reason) => format!("stream ended: {reason}"),
        None => error.to_string(),
    }
}
