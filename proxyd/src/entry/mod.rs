//! The ways in. Each fixes who asks (a lease) and whom for (a verified name), then hands over to
//! [`crate::request`].

pub mod authority;
pub mod explicit;
pub mod http;
pub mod transparent;
