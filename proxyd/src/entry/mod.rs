//! The ways in. Each fixes who asks (a lease) and whom for (a verified name), then hands over to
//! [`crate::request`].

pub mod authority;
pub mod explicit;
pub mod http;
mod ports;
pub mod transparent;

use std::time::Duration;

/// How long nobody is accepted after that failed: descriptors come back only as connections end.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
