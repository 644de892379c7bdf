//! HTTP/1.1 heads: from bytes to fields and back, with nothing changed on the way.

use bytes::{BufMut, Bytes, BytesMut};
use httparse::{EMPTY_HEADER, Header};

use super::framing::Version;
use super::wire::{FIELDS_MAX, HeadError};
use crate::head::{Fields, ResponseHead};

/// A request's head as it stands on the wire.
pub struct RawRequest {
    pub method: Bytes,
    pub target: Bytes,
    pub version: Version,
    pub headers: Fields,
}

/// Fields of most heads fit here; larger heads are parsed again with more room.
const FIELDS_FEW: usize = 64;

/// Parses a request's head; `bytes` ends with its empty line.
pub fn parse_request(bytes: &Bytes) -> Result<RawRequest, HeadError> {
    let mut few = [EMPTY_HEADER; FIELDS_FEW];
    match parse_request_into(bytes, &mut few) {
        Err(HeadError::TooManyFields) => {
            parse_request_into(bytes, &mut vec![EMPTY_HEADER; FIELDS_MAX])
        }
        other => other,
    }
}

fn parse_request_into<'a>(
    bytes: &'a Bytes,
    room: &mut [Header<'a>],
) -> Result<RawRequest, HeadError> {
    let mut parsed = httparse::Request::new(room);
    complete(parsed.parse(bytes), bytes)?;
    let (Some(method), Some(target)) = (parsed.method, parsed.path) else {
        return Err(HeadError::Malformed("no request line"));
    };
    check_start_line(bytes, method.len() + 1 + target.len() + " HTTP/1.1\r\n".len())?;
    if target.contains('#') || !target.is_ascii() {
        return Err(HeadError::Malformed("request target is not a URI"));
    }
    Ok(RawRequest {
        method: bytes.slice_ref(method.as_bytes()),
        target: bytes.slice_ref(target.as_bytes()),
        version: version(parsed.version)?,
        headers: fields(bytes, parsed.headers)?,
    })
}

/// The start line holds single spaces and nothing after the version: its length is that of its
/// parts. A parser that splits at any white space would see another target.
fn check_start_line(bytes: &[u8], expected: usize) -> Result<(), HeadError> {
    if bytes.get(..expected).is_some_and(|line| line.ends_with(b"\r\n")) {
        return Ok(());
    }
    Err(HeadError::Malformed("request line has extra white space"))
}

/// Parses a response's head.
pub fn parse_response(bytes: &Bytes) -> Result<(ResponseHead, Version), HeadError> {
    let mut few = [EMPTY_HEADER; FIELDS_FEW];
    match parse_response_into(bytes, &mut few) {
        Err(HeadError::TooManyFields) => {
            parse_response_into(bytes, &mut vec![EMPTY_HEADER; FIELDS_MAX])
        }
        other => other,
    }
}

fn parse_response_into<'a>(
    bytes: &'a Bytes,
    room: &mut [Header<'a>],
) -> Result<(ResponseHead, Version), HeadError> {
    let mut parsed = httparse::Response::new(room);
    complete(parsed.parse(bytes), bytes)?;
    let (Some(status), reason) = (parsed.code, parsed.reason.unwrap_or_default()) else {
        return Err(HeadError::Malformed("no status line"));
    };
    if !(100..=599).contains(&status) {
        return Err(HeadError::Malformed("status is out of range"));
    }
    let head = ResponseHead {
        status,
        reason: slice(bytes, reason.as_bytes()),
        headers: fields(bytes, parsed.headers)?,
    };
    Ok((head, version(parsed.version)?))
}

/// Parses trailers; `bytes` holds whole lines and the empty line that ends them.
pub fn parse_trailers(bytes: &Bytes) -> Result<Fields, HeadError> {
    let mut room = [EMPTY_HEADER; FIELDS_FEW];
    match httparse::parse_headers(bytes, &mut room) {
        Ok(httparse::Status::Complete((length, headers))) if length == bytes.len() => {
            fields(bytes, headers)
        }
        Ok(_) => Err(HeadError::Malformed("trailers do not end where they should")),
        Err(error) => Err(malformed(error)),
    }
}

fn complete(outcome: httparse::Result<usize>, bytes: &[u8]) -> Result<(), HeadError> {
    match outcome {
        Ok(httparse::Status::Complete(length)) if length == bytes.len() => Ok(()),
        Ok(_) => Err(HeadError::Malformed("head does not end where it should")),
        Err(error) => Err(malformed(error)),
    }
}

fn malformed(error: httparse::Error) -> HeadError {
    HeadError::Malformed(match error {
        httparse::Error::HeaderName => "field name",
        httparse::Error::HeaderValue => "field value",
        httparse::Error::NewLine => "line ending",
        httparse::Error::Status => "status",
        httparse::Error::Token => "token",
        httparse::Error::TooManyHeaders => return HeadError::TooManyFields,
        httparse::Error::Version => "version",
    })
}

fn version(minor: Option<u8>) -> Result<Version, HeadError> {
    match minor {
        Some(0) => Ok(Version::Http10),
        Some(1) => Ok(Version::Http11),
        _ => Err(HeadError::Malformed("version")),
    }
}

/// Fields that say where a message ends or whom it is for: their white space must be plain.
const DECISIVE: [&str; 3] = ["content-length", "transfer-encoding", "host"];

fn fields(bytes: &Bytes, parsed: &[Header<'_>]) -> Result<Fields, HeadError> {
    let mut list = Fields::new();
    // Room for what is added on the way: mostly one credential.
    list.reserve(parsed.len() + 2);
    for header in parsed {
        let name = bytes.slice_ref(header.name.as_bytes());
        let value = slice(bytes, header.value);
        if DECISIVE.iter().any(|d| name.eq_ignore_ascii_case(d.as_bytes())) {
            check_spacing(bytes, header)?;
        }
        list.push((name, value));
    }
    Ok(list)
}

fn slice(bytes: &Bytes, part: &[u8]) -> Bytes {
    // An empty value is no part of `bytes` for httparse.
    if part.is_empty() { Bytes::new() } else { bytes.slice_ref(part) }
}

/// A decisive field is `name: value` with at most spaces around the value. Some parsers take
/// `transfer-encoding:\tchunked` for chunked and some do not.
fn check_spacing(bytes: &Bytes, header: &Header<'_>) -> Result<(), HeadError> {
    let start = bytes.slice_ref(header.name.as_bytes());
    let offset = start.as_ptr() as usize - bytes.as_ptr() as usize;
    let line = &bytes[offset + start.len()..];
    let end = line.iter().position(|b| *b == b'\r').unwrap_or(line.len());
    if line[..end].contains(&b'\t') {
        return Err(HeadError::Malformed("tab in a decisive field"));
    }
    Ok(())
}

/// Prints a request's head.
pub fn print_request(method: &[u8], target: &[u8], headers: &Fields) -> BytesMut {
    let mut out = BytesMut::with_capacity(512);
    print_request_line(&mut out, method, target);
    print_fields(&mut out, headers);
    out
}

/// Prints the first line of a request's head.
pub fn print_request_line(out: &mut BytesMut, method: &[u8], target: &[u8]) {
    out.put_slice(method);
    out.put_u8(b' ');
    out.put_slice(target);
    out.put_slice(b" HTTP/1.1\r\n");
}

/// Prints one field.
pub fn print_field(out: &mut BytesMut, name: &[u8], value: &[u8]) {
    out.put_slice(name);
    out.put_slice(b": ");
    out.put_slice(value);
    out.put_slice(b"\r\n");
}

/// Prints a response's head.
pub fn print_response(head: &ResponseHead) -> BytesMut {
    let mut out = BytesMut::with_capacity(512);
    out.put_slice(b"HTTP/1.1 ");
    // Three digits: other numbers were refused.
    out.put_slice(&[100, 10, 1].map(|unit| b'0' + (head.status / unit % 10) as u8));
    out.put_u8(b' ');
    if head.reason.is_empty() {
        out.put_slice(canonical_reason(head.status).as_bytes());
    } else {
        out.put_slice(&head.reason);
    }
    out.put_slice(b"\r\n");
    print_fields(&mut out, &head.headers);
    out
}

/// Prints fields and the empty line after them.
pub fn print_fields(out: &mut BytesMut, headers: &Fields) {
    for (name, value) in headers.iter() {
        print_field(out, name, value);
    }
    out.put_slice(b"\r\n");
}

fn canonical_reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &'static str) -> Result<RawRequest, HeadError> {
        parse_request(&Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn order_spelling_and_target_stay_as_sent() {
        let head = request("GET /a%2Fb;c?x=1+2&&y= HTTP/1.1\r\nhOsT: a\r\nX-B: 1\r\nx-b:2\r\n\r\n")
            .unwrap();

        assert_eq!(head.target, "/a%2Fb;c?x=1+2&&y=");
        let printed = print_request(&head.method, &head.target, &head.headers);
        let expected = "GET /a%2Fb;c?x=1+2&&y= HTTP/1.1\r\nhOsT: a\r\nX-B: 1\r\nx-b: 2\r\n\r\n";
        assert_eq!(printed, expected);
    }

    #[test]
    fn refuses_heads_that_parsers_read_in_different_ways() {
        let table = [
            "GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
            "GET /#x HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
            "GET / HTTP/1.1\r\n Host: a\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding:\tchunked\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 5\t\r\n\r\n",
            "GET / HTTP/2.0\r\nHost: a\r\n\r\n",
            "G@T{} / HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET / HTTP/1.1\r\n: a\r\n\r\n",
        ];
        for text in table {
            assert!(request(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn three_hundred_fields_pass_and_six_hundred_do_not() {
        let head = |count: usize| {
            let fields = "A: b\r\n".repeat(count);
            parse_request(&format!("GET / HTTP/1.1\r\n{fields}\r\n").into())
        };

        assert_eq!(head(300).unwrap().headers.len(), 300);
        assert!(matches!(head(600), Err(HeadError::TooManyFields)));
    }

    #[test]
    fn a_response_keeps_its_reason() {
        let bytes = Bytes::from_static(b"HTTP/1.1 299 As You Like\r\nA: b\r\n\r\n");

        let (head, version) = parse_response(&bytes).unwrap();

        assert_eq!(version, Version::Http11);
        assert_eq!(print_response(&head), bytes);
    }
}
