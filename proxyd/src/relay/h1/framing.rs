//! Where a message's body ends (RFC 9112 section 6), and nothing left to interpretation.
//!
//! Request smuggling lives on two parsers that disagree about this. So a request with anything
//! but one plain length or one plain `chunked` is refused, even where the standard would allow a
//! repair, and an answer that is ambiguous is the upstream's failure.

use crate::head::Fields;

/// How a body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    None,
    Length(u64),
    Chunked,
    /// To the end of the connection: old responses, and everything after an upgrade.
    UntilClose,
}

/// The protocol versions that the relay speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    Http10,
    Http11,
}

/// A head whose body could be delimited in more than one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Ambiguous(pub &'static str);

/// How the body of a request is delimited.
pub fn of_request(version: Version, headers: &Fields) -> Result<Framing, Ambiguous> {
    let length = content_length(headers)?;
    match (transfer_encoding(headers)?, length) {
        (true, Some(_)) => Err(Ambiguous("both content-length and transfer-encoding")),
        (true, None) if version == Version::Http10 => {
            Err(Ambiguous("transfer-encoding in an HTTP/1.0 message"))
        }
        (true, None) => Ok(Framing::Chunked),
        (false, Some(0) | None) => Ok(Framing::None),
        (false, Some(length)) => Ok(Framing::Length(length)),
    }
}

/// How the body of a response to `method` is delimited.
pub fn of_response(
    method: &[u8],
    status: u16,
    version: Version,
    headers: &Fields,
) -> Result<Framing, Ambiguous> {
    let length = content_length(headers)?;
    let chunked = transfer_encoding(headers)?;
    if chunked && length.is_some() {
        return Err(Ambiguous("both content-length and transfer-encoding"));
    }
    if method == b"HEAD" || has_no_body(status) {
        return Ok(Framing::None);
    }
    if chunked && version == Version::Http10 {
        return Err(Ambiguous("transfer-encoding in an HTTP/1.0 message"));
    }
    Ok(match (chunked, length) {
        (true, _) => Framing::Chunked,
        (false, Some(0)) => Framing::None,
        (false, Some(length)) => Framing::Length(length),
        (false, None) => Framing::UntilClose,
    })
}

/// Whether a response of that status never has a body.
pub fn has_no_body(status: u16) -> bool {
    (100..200).contains(&status) || status == 204 || status == 304
}

/// The one length, digits only: no sign, no list, no second field.
pub fn content_length(headers: &Fields) -> Result<Option<u64>, Ambiguous> {
    let mut values = headers.all("content-length");
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(Ambiguous("more than one content-length"));
    }
    if value.is_empty() || value.len() > 18 || !value.iter().all(u8::is_ascii_digit) {
        return Err(Ambiguous("content-length is not a plain number"));
    }
    let digits = value.iter().map(|digit| u64::from(digit - b'0'));
    Ok(Some(digits.fold(0, |sum, digit| sum * 10 + digit)))
}

/// Whether the message is chunked; any other coding, list, or second field is refused.
fn transfer_encoding(headers: &Fields) -> Result<bool, Ambiguous> {
    let mut values = headers.all("transfer-encoding");
    let Some(value) = values.next() else { return Ok(false) };
    if values.next().is_some() {
        return Err(Ambiguous("more than one transfer-encoding"));
    }
    if !value.eq_ignore_ascii_case(b"chunked") {
        return Err(Ambiguous("transfer-encoding is not plain chunked"));
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn fields(list: &[(&'static str, &'static str)]) -> Fields {
        list.iter()
            .map(|(n, v)| (Bytes::from_static(n.as_bytes()), Bytes::from_static(v.as_bytes())))
            .collect()
    }

    #[test]
    fn refuses_every_request_that_two_parsers_could_cut_differently() {
        let cl = "Content-Length";
        let te = "Transfer-Encoding";
        let table: &[&[(&str, &str)]] = &[
            &[(cl, "5"), (cl, "6")],
            &[(cl, "5"), (cl, "5")],
            &[(cl, "5"), (te, "chunked")],
            &[(te, "chunked,")],
            &[(te, "\tchunked")],
            &[(te, "chunked, gzip")],
            &[(te, "gzip, chunked")],
            &[(te, "identity")],
            &[(te, "xchunked")],
            &[(te, "chunked"), (te, "chunked")],
            &[(cl, "+5")],
            &[(cl, "-5")],
            &[(cl, "5, 5")],
            &[(cl, "0x5")],
            &[(cl, "5 ")],
            &[(cl, "")],
            &[(cl, "99999999999999999999")],
        ];
        for row in table {
            let outcome = of_request(Version::Http11, &fields(row));

            assert!(outcome.is_err(), "{row:?} gave {outcome:?}");
        }
    }

    #[test]
    fn accepts_the_plain_forms() {
        let chunked = fields(&[("transfer-encoding", "Chunked")]);
        let length = fields(&[("content-length", "05")]);

        assert_eq!(of_request(Version::Http11, &chunked), Ok(Framing::Chunked));
        assert_eq!(of_request(Version::Http11, &length), Ok(Framing::Length(5)));
        assert_eq!(of_request(Version::Http11, &Fields::new()), Ok(Framing::None));
        assert!(of_request(Version::Http10, &chunked).is_err());
    }

    #[test]
    fn responses_without_a_body_have_none_whatever_they_announce() {
        let length = fields(&[("content-length", "5")]);
        for (method, status) in [("HEAD", 200), ("GET", 204), ("GET", 304), ("GET", 103)] {
            let framing = of_response(method.as_bytes(), status, Version::Http11, &length);

            assert_eq!(framing, Ok(Framing::None), "{method} {status}");
        }
        let open = of_response(b"GET", 200, Version::Http11, &Fields::new());
        assert_eq!(open, Ok(Framing::UntilClose));
    }
}
