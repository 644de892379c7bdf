//! Image registries: what a request wants of one, and what it must not bring along.

use bytes::Bytes;
use policies::Credential;

use super::InjectError;
use crate::head::RequestHead;
use crate::vault::registry::Access;

/// The access that the request takes. A blob that an upload would have from another repository is
/// asked for in no query any more: nobody has judged whether that one may be read. The registry
/// then answers as if it had not got the blob, and the client sends it.
pub(super) fn access(
    credential: &Credential,
    port: u16,
    head: &mut RequestHead,
) -> Result<Access, InjectError> {
    let Some(access) = Access::of(port, &head.method, head.path()) else {
        let reason = "the path is none of a registry's API".to_owned();
        return Err(InjectError::Refused { credential: credential.name.clone(), reason });
    };
    if head.query().is_some() {
        strip(head);
    }
    Ok(access)
}

/// Takes `mount` and `from` out of the query, however they are written.
fn strip(head: &mut RequestHead) {
    let query = head.query().unwrap_or_default();
    let names = |piece: &[u8]| {
        let name = piece.split(|byte| *byte == b'=').next().unwrap_or_default();
        let name = super::stray::percent_decoded(name);
        name.eq_ignore_ascii_case(b"mount") || name.eq_ignore_ascii_case(b"from")
    };
    let pieces = || query.split(|byte| matches!(byte, b'&' | b';'));
    if !pieces().any(names) {
        return;
    }
    let kept: Vec<&[u8]> = pieces().filter(|piece| !names(piece)).collect();
    let mut target = head.path().to_vec();
    if !kept.is_empty() {
        target.push(b'?');
        target.extend_from_slice(&kept.join(&b'&'));
    }
    head.target = Bytes::from(target);
}

#[cfg(test)]
mod tests {
    use super::super::head;
    use super::*;

    #[test]
    fn no_upload_mounts_a_blob_of_a_repository_that_nobody_judged() {
        for (before, after) in [
            ("/v2/a/blobs/uploads/", "/v2/a/blobs/uploads/"),
            ("/v2/a/blobs/uploads/?mount=sha256:0&from=b", "/v2/a/blobs/uploads/"),
            ("/v2/a/blobs/uploads/?%66rom=b&digest=x", "/v2/a/blobs/uploads/?digest=x"),
            ("/v2/a/blobs/uploads/?a=1;FROM=b", "/v2/a/blobs/uploads/?a=1"),
            ("/v2/a/tags/list?n=5&last=from", "/v2/a/tags/list?n=5&last=from"),
        ] {
            let mut head = head(before, &[]);
            strip(&mut head);
            assert_eq!(head.target, after, "{before}");
        }
    }
}
