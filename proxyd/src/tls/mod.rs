//! Ends TLS of sandboxes and issues what that takes.

pub mod ca;
pub mod hello;
pub mod intercept;
pub mod leaf;
