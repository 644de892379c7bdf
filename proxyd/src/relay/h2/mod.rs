//! HTTP/2 on the `h2` crate: the two legs, and the form heads take there.

pub mod client;
pub mod convert;
pub mod server;
