//! A parameter of the query: `?key=VALUE`. The order and bytes of all others stay.

use super::placeholder::percent_encoded;
use crate::head::RequestHead;
use crate::vault::Secret;

/// Puts the value in; the slot is clear.
pub(super) fn put(head: &mut RequestHead, name: &str, value: &[u8]) {
    let encoded = percent_encoded(value);
    let query = head.query().unwrap_or_default();
    let between: &[u8] = if query.is_empty() || query.ends_with(b"&") { b"" } else { b"&" };
    let target = Secret::concat(&[
        head.path(),
        b"?",
        query,
        between,
        name.as_bytes(),
        b"=",
        encoded.expose_secret(),
    ]);
    head.target = target.into_bytes();
}
