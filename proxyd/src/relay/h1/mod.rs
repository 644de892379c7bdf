//! HTTP/1.1 (RFC 9112), strictly: what two parsers could read in two ways is refused.
//!
//! `wire` reads and writes bytes under limits, `head` parses and prints heads, `framing` decides
//! where a body ends, `body` passes it on piece by piece, `server` and `client` are the two legs.

pub mod body;
pub mod client;
pub mod framing;
pub mod head;
pub mod server;
pub mod wire;
