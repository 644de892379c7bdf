//! A header of the policy's choosing: `x-api-key: VALUE`.

use bytes::Bytes;

use crate::head::RequestHead;

/// Puts in the rendered value; the slot is clear.
pub(super) fn put(head: &mut RequestHead, name: &str, value: Bytes) {
    head.headers.append(name, value);
}
