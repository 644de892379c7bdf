//! `Authorization: Basic base64(USER:VALUE)` (RFC 7617). Sent at once, without waiting for a 401:
//! git would ask its user for a password then.

use bytes::Bytes;

use crate::head::RequestHead;

/// Puts in the rendered value; the slot is clear.
pub(super) fn put(head: &mut RequestHead, value: Bytes) {
    head.headers.append("Authorization", value);
}
