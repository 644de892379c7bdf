//! `Authorization: Bearer VALUE` (RFC 6750).

use bytes::Bytes;

use crate::head::RequestHead;

/// Puts in the rendered value; the slot is clear.
pub(super) fn put(head: &mut RequestHead, value: Bytes) {
    head.headers.append("Authorization", value);
}
