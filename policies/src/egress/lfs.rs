//! The one request of git's large-file storage (LFS) whose answer is made of credentials.
//!
//! `POST …/objects/batch` asks where objects are. What comes back tells the client for each of them
//! an address, and often the header to show there: real and short-lived, made by the server, so
//! that proxyd knows none of them and could mask none.

use crate::path::CanonicalPath;

/// How often servers undo escapes, and once more.
const ROUNDS: usize = 3;

/// Whether a server could take the raw path, without its query, for that of the batch request.
pub(crate) fn is_batch(raw: &str) -> bool {
    match CanonicalPath::parse(raw) {
        Ok(path) => {
            let mut names = path.segments().iter().map(|segment| name(segment));
            let mut last = || names.by_ref().rfind(|name| !name.is_empty());
            let (last, before) = (last(), last());
            last.is_some_and(|name| name.eq_ignore_ascii_case("batch"))
                && before.is_some_and(|name| name.eq_ignore_ascii_case("objects"))
        }
        // Rules that list no paths take these too, and each server reads them its own way.
        Err(_) => could_be(raw),
    }
}

/// A segment without its parameters (RFC 3986, section 3.3).
fn name(segment: &str) -> &str {
    segment.split(';').next().unwrap_or_default().trim()
}

fn could_be(raw: &str) -> bool {
    let mut text = raw.as_bytes().to_ascii_lowercase();
    for _ in 0..ROUNDS {
        text = decoded(&text);
    }
    let text = String::from_utf8_lossy(&text).to_ascii_lowercase();
    let mut names = text.split(['/', '\\', '?', '#']).map(name);
    names.any(|name| name == "objects") && names.any(|name| name == "batch")
}

fn decoded(text: &[u8]) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((byte, after)) = rest.split_first() {
        let escape = match (byte, after) {
            (b'%', [high, low, ..]) => digit(*high).zip(digit(*low)),
            _ => None,
        };
        out.push(escape.map_or(*byte, |(high, low)| high << 4 | low));
        rest = if escape.is_some() { &after[2..] } else { after };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_batch_request_is_known_however_a_server_could_read_its_path() {
        for path in [
            "/acme/widget.git/info/lfs/objects/batch",
            "/acme/widget/info/lfs/objects/batch/",
            "/objects/batch",
            "/Objects/BATCH",
            "/a/%6fbjects/b%61tch",
            "/a/objects;v=1/batch;x",
            "/a//objects//batch//",
            "/a/objects/./batch",
            "/a/objects/x/../batch",
            "/a/objects%2fbatch",
            "/a/objects%252Fbatch",
            "/a%25252fobjects/ba%2574ch",
            "/a\\objects\\batch",
            "objects/batch",
        ] {
            assert!(is_batch(path), "{path}");
        }
        for path in [
            "/",
            "",
            "/acme/widget.git/info/lfs/locks",
            "/acme/widget.git/info/lfs/locks/verify",
            "/batch/objects",
            "/objects",
            "/batch",
            "/objects/batch/4711",
            "/my-objects/batch",
            "/objects/batches",
            "//objects/batches",
            "/%zz/batch/objects",
        ] {
            assert!(!is_batch(path), "{path}");
        }
    }
}
