//! Ends TLS of sandboxes and issues what that takes.

pub mod authority;
pub mod ca;
pub mod hello;
pub mod intercept;
pub mod leaf;
