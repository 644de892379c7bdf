//! The upstream leg of HTTP/1.1: one connection, one request after the other.

use std::io;

use bytes::{BufMut, Bytes, BytesMut};

use super::body::{Reading, Writing};
use super::framing::{self, Framing, Version};
use super::head;
use super::wire::{self, Reader, Writer};
use crate::head::{RequestHead, ResponseHead};
use crate::relay::answer::AnswerError;
use crate::relay::body::{BodyIn, BodyOut};
use crate::relay::h2::convert;
use crate::relay::hop;
use crate::relay::stream::Stream;

/// A connection to an upstream.
pub struct Connection {
    reader: Reader,
    writer: Writer,
    request_done: bool,
    stays_open: bool,
}

impl Connection {
    pub fn new(stream: Stream) -> Self {
        let (reader, writer) = wire::split(stream);
        Self { reader, writer, request_done: true, stays_open: true }
    }

    /// Sends a head; gives the way for the body and the way of the answer.
    pub async fn send<'a>(
        &'a mut self,
        head: &RequestHead,
        framing: Framing,
        upgrade: Option<&Bytes>,
    ) -> io::Result<(BodyOut<'a>, Awaited<'a>)> {
        let bytes = print(head, framing, upgrade);
        self.stays_open = false;
        self.writer.send(&bytes).await?;
        let out = BodyOut::H1(Writing::new(&mut self.writer, framing, &mut self.request_done));
        let awaited = Awaited {
            reader: &mut self.reader,
            method: head.method.clone(),
            stays_open: &mut self.stays_open,
            upgrade: upgrade.cloned(),
            from_proxy: false,
        };
        Ok((out, awaited))
    }

    /// Whether nothing of its last request is left on it, so that another one can be sent.
    pub fn is_reusable(&mut self) -> bool {
        self.reader.rest();
        self.request_done && self.stays_open && self.reader.buffer.is_empty()
    }

    /// Whether it is still of use after a rest.
    pub fn is_quiet(&mut self) -> bool {
        self.reader.is_quiet()
    }
}

fn print(head: &RequestHead, framing: Framing, upgrade: Option<&Bytes>) -> BytesMut {
    let mut joined = None;
    if head.headers.all("cookie").nth(1).is_some() {
        convert::join_cookies(joined.insert(head.headers.clone()));
    }
    let headers = joined.as_ref().unwrap_or(&head.headers);
    let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
    // Room for all of it: what holds a credential is not moved about.
    let room = bytes + head.method.len() + head.target.len() + head.authority.len() + 256;
    let mut out = BytesMut::with_capacity(room);
    head::print_request_line(&mut out, &head.method, &head.target);
    if !headers.contains("host") {
        head::print_field(&mut out, b"Host", head.authority.as_bytes());
    }
    let mut delimited = false;
    for (name, value) in headers.iter().filter(|(name, _)| !name.eq_ignore_ascii_case(b"te")) {
        match delimits(framing, name, value) {
            Some(false) => continue,
            Some(true) => delimited = true,
            None => {}
        }
        head::print_field(&mut out, name, value);
    }
    let expects_body = matches!(&head.method[..], b"POST" | b"PUT" | b"PATCH");
    match framing {
        _ if delimited => {}
        Framing::Chunked => head::print_field(&mut out, b"Transfer-Encoding", b"chunked"),
        Framing::Length(length) => {
            head::print_field(&mut out, b"Content-Length", length.to_string().as_bytes());
        }
        Framing::None if expects_body => head::print_field(&mut out, b"Content-Length", b"0"),
        Framing::None | Framing::UntilClose => {}
    }
    if let Some(protocol) = upgrade {
        head::print_field(&mut out, b"Connection", b"Upgrade");
        head::print_field(&mut out, b"Upgrade", protocol);
    }
    out.put_slice(b"\r\n");
    out
}

/// Whether a field that says where the body ends says what is so; nothing for any other field. The
/// upstream must not wait for another body than the one that follows: the next request on the
/// connection would be taken for it.
fn delimits(framing: Framing, name: &[u8], value: &[u8]) -> Option<bool> {
    if name.eq_ignore_ascii_case(b"content-length") {
        let said = std::str::from_utf8(value).ok().and_then(|text| text.parse::<u64>().ok());
        return Some(match framing {
            Framing::None => said == Some(0),
            Framing::Length(length) => said == Some(length),
            Framing::Chunked | Framing::UntilClose => false,
        });
    }
    name.eq_ignore_ascii_case(b"transfer-encoding").then_some(framing == Framing::Chunked)
}

/// An answer that was asked for and has not come yet.
pub struct Awaited<'a> {
    reader: &'a mut Reader,
    method: Bytes,
    stays_open: &'a mut bool,
    /// The protocols that were offered, in a list.
    upgrade: Option<Bytes>,
    /// Whether a proxy between here and the upstream may be the one who answers.
    pub from_proxy: bool,
}

/// What follows a head: another head, or the body of this one.
pub enum Next<'a> {
    Interim(Awaited<'a>),
    /// The connection is the other protocol's from here on.
    Switched(BodyIn<'a>),
    Body(BodyIn<'a>, Framing),
}

impl<'a> Awaited<'a> {
    /// Reads one head.
    pub async fn head(self) -> Result<(ResponseHead, Next<'a>), AnswerError> {
        let bytes = self.reader.head().await?.ok_or(AnswerError::Closed)?;
        let (mut head, version) = head::parse_response(&bytes)?;
        // The challenge is meant for us: a sandbox must not be asked for the operator's password.
        if self.from_proxy && head.status == 407 {
            return Err(AnswerError::ProxyAuthentication);
        }
        let framing = framing::of_response(&self.method, head.status, version, &head.headers)?;
        let connection = hop::strip_response(&mut head.headers);
        if head.status == 101 {
            return self.switched(head, connection.upgrade);
        }
        if head.status < 200 || head.status == 204 {
            // No body follows, whatever is said of one (RFC 9110, section 8.6).
            head.headers.remove_all("content-length");
        }
        if head.status < 200 {
            return Ok((head, Next::Interim(self)));
        }
        // Who was offered another protocol and declined may still have begun to read for it.
        *self.stays_open = version == Version::Http11
            && !connection.close
            && framing != Framing::UntilClose
            && self.upgrade.is_none();
        if framing == Framing::None {
            return Ok((head, Next::Body(BodyIn::Empty, framing)));
        }
        let body = BodyIn::H1(Reading::new(self.reader, framing));
        Ok((head, Next::Body(body, framing)))
    }

    fn switched(
        self,
        mut head: ResponseHead,
        protocol: Option<Bytes>,
    ) -> Result<(ResponseHead, Next<'a>), AnswerError> {
        // Another protocol than the one that was let through is as bad as none.
        let offered = |protocol: &Bytes| {
            let list = self.upgrade.as_deref().unwrap_or_default();
            list.split(|b| *b == b',').any(|o| o.trim_ascii().eq_ignore_ascii_case(protocol))
        };
        let Some(protocol) = protocol.filter(offered) else {
            return Err(AnswerError::Unasked);
        };
        head.headers.append("Connection", Bytes::from_static(b"Upgrade"));
        head.headers.append("Upgrade", protocol);
        let body = BodyIn::H1(Reading::new(self.reader, Framing::UntilClose));
        Ok((head, Next::Switched(body)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use policies::Scheme;

    #[test]
    fn the_body_that_is_announced_is_the_body_that_follows() {
        type Fields = &'static [(&'static str, &'static str)];
        let table: [(Framing, Fields, &str); 9] = [
            (Framing::None, &[("Content-Length", "39")], ""),
            (Framing::None, &[("transfer-encoding", "chunked")], ""),
            (Framing::None, &[("Content-Length", "0")], "Content-Length: 0\r\n"),
            (Framing::Length(5), &[("content-length", "5")], "content-length: 5\r\n"),
            (Framing::Length(5), &[("content-length", "6")], "Content-Length: 5\r\n"),
            (Framing::Length(5), &[], "Content-Length: 5\r\n"),
            (Framing::Chunked, &[("content-length", "5")], "Transfer-Encoding: chunked\r\n"),
            (
                Framing::Chunked,
                &[("TRANSFER-ENCODING", "chunked")],
                "TRANSFER-ENCODING: chunked\r\n",
            ),
            (Framing::Chunked, &[], "Transfer-Encoding: chunked\r\n"),
        ];
        for (framing, fields, expected) in table {
            let bytes = |text: &'static str| Bytes::from_static(text.as_bytes());
            let head = RequestHead {
                method: bytes("GET"),
                target: bytes("/"),
                scheme: Scheme::Https,
                authority: "a.test".to_owned(),
                headers: fields.iter().map(|(n, v)| (bytes(n), bytes(v))).collect(),
            };

            let printed = print(&head, framing, None);

            let text = String::from_utf8(printed.to_vec()).unwrap();
            let whole = format!("GET / HTTP/1.1\r\nHost: a.test\r\n{expected}\r\n");
            assert_eq!(text, whole, "{framing:?} {fields:?}");
        }
    }
}
