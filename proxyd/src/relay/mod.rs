//! Moves one exchange between its two legs: HTTP/1.1 and HTTP/2 in any of four combinations.
//!
//! [`exchange`] is the part to read first. It sees bodies as [`body::BodyIn`] and
//! [`body::BodyOut`], whatever protocol carries them; nothing here holds a whole body. `h1` is a
//! strict relay of our own on `httparse`; `h2` is the crate of that name. No policy here.

pub mod alarm;
pub mod answer;
pub mod body;
pub mod exchange;
pub mod h1;
pub mod h2;
pub mod hop;
pub mod responder;
pub mod stream;
pub mod switched;
pub mod tunnel;
pub mod websocket;

#[cfg(test)]
mod differential_tests;
