//! A body whose chunks are signed one by one, each over the one before: signed again as it passes.
//!
//! A chunk's signature stands before its data, so one chunk is held back at a time, in the lease's
//! share of memory for that. Every signature has 64 hex digits: sizes and the announced length stay
//! as they are.

use bytes::{Buf, Bytes, BytesMut};

use super::sigv4::{hex_mac, sha256};
use crate::lease::share::Taken;
use crate::relay::body::ReadError;
use crate::vault::Secret;

/// Longest chunk; the SDKs' have 64 KiB to 8 MiB.
const CHUNK_BYTES_MAX: usize = 16 << 20;
/// Longest line before a chunk, and longest trailer.
const LINE_BYTES_MAX: usize = 512;
const TRAILER_BYTES_MAX: usize = 16 * 1024;
const SIGNATURE: &[u8] = b";chunk-signature=";
const TRAILER_SIGNATURE: &[u8] = b"x-amz-trailer-signature:";

/// With what the chunks of one body are signed.
pub(super) struct Signer {
    pub key: Secret,
    pub stamp: String,
    pub scope: String,
    /// The signature before: the request's at first.
    pub last: String,
    /// Whether fields follow the last chunk, signed too.
    pub trailer: bool,
}

impl Signer {
    fn sign(&mut self, text: &str) -> &str {
        self.last = hex_mac(self.key.expose_secret(), text.as_bytes());
        &self.last
    }

    /// The line before a chunk, with its new signature.
    fn head(&mut self, size: usize, data: &[u8]) -> Bytes {
        let Self { stamp, scope, last, .. } = self;
        let (nothing, hash) = (sha256(b""), sha256(data));
        let text = format!("AWS4-HMAC-SHA256-PAYLOAD\n{stamp}\n{scope}\n{last}\n{nothing}\n{hash}");
        format!("{size:x};chunk-signature={}\r\n", self.sign(&text)).into()
    }

    /// The signature of the fields after the last chunk.
    fn trailer(&mut self, canonical: &[u8]) -> Bytes {
        let Self { stamp, scope, last, .. } = self;
        let hash = sha256(canonical);
        let text = format!("AWS4-HMAC-SHA256-TRAILER\n{stamp}\n{scope}\n{last}\n{hash}");
        self.sign(&text).to_owned().into()
    }
}

/// Signs the chunks of one body.
pub struct Chunks {
    signer: Signer,
    /// What is held back, and its part of the share: until the body ends, the most that it was.
    held: BytesMut,
    room: Taken,
    state: State,
}

enum State {
    Line,
    /// Size of the chunk whose data is still to come whole.
    Data(usize),
    Trailer,
    Done,
}

impl Chunks {
    pub(super) fn new(signer: Signer, room: Taken) -> Self {
        Self { signer, held: BytesMut::new(), room, state: State::Line }
    }

    /// Takes what came, gives what may go on.
    pub fn push(&mut self, data: &Bytes) -> Result<Vec<Bytes>, ReadError> {
        self.room.grow_to(self.held.len() + data.len())?;
        self.held.extend_from_slice(data);
        let mut out = Vec::new();
        while self.step(&mut out).map_err(ReadError::Framing)? {}
        Ok(out)
    }

    /// Whether the body ended where its own framing says that it ends.
    pub fn finish(&self) -> Result<(), ReadError> {
        match self.state {
            State::Done if self.held.is_empty() => Ok(()),
            _ => Err(ReadError::Framing("the signed chunks break off")),
        }
    }

    fn step(&mut self, out: &mut Vec<Bytes>) -> Result<bool, &'static str> {
        match self.state {
            State::Line => {
                let Some(line) = self.line(LINE_BYTES_MAX)? else { return Ok(false) };
                let at = line.windows(SIGNATURE.len()).position(|w| w == SIGNATURE);
                let size = at.and_then(|at| std::str::from_utf8(&line[..at]).ok());
                let plain = |size: &&str| size.bytes().all(|b| b.is_ascii_hexdigit());
                let size = size.filter(plain).and_then(|size| usize::from_str_radix(size, 16).ok());
                let size = size.ok_or("a signed chunk has no size and signature")?;
                if size > CHUNK_BYTES_MAX {
                    return Err("a signed chunk is longer than 16 MiB");
                }
                self.state = State::Data(size);
            }
            State::Data(0) => {
                if self.signer.trailer {
                    out.push(self.signer.head(0, b""));
                    self.state = State::Trailer;
                } else if self.held.len() < 2 {
                    return Ok(false);
                } else {
                    self.end_of_line()?;
                    out.push(self.signer.head(0, b""));
                    out.push(Bytes::from_static(b"\r\n"));
                    self.state = State::Done;
                }
            }
            State::Data(size) => {
                if self.held.len() < size + 2 {
                    return Ok(false);
                }
                let data = self.held.split_to(size).freeze();
                self.end_of_line()?;
                out.push(self.signer.head(size, &data));
                out.push(data);
                out.push(Bytes::from_static(b"\r\n"));
                self.state = State::Line;
            }
            State::Trailer => return self.trailers(out),
            State::Done if self.held.is_empty() => return Ok(false),
            State::Done => return Err("something follows the last signed chunk"),
        }
        Ok(true)
    }

    /// Fields after the last chunk, the last of them their signature, and an empty line.
    fn trailers(&mut self, out: &mut Vec<Bytes>) -> Result<bool, &'static str> {
        let Some(end) = self.held.windows(4).position(|window| window == b"\r\n\r\n") else {
            return match self.held.len() > TRAILER_BYTES_MAX {
                true => Err("the trailer of the signed chunks is too long"),
                false => Ok(false),
            };
        };
        let section = self.held.split_to(end + 4).freeze();
        let mut canonical = Vec::new();
        let mut signed = None;
        let mut at = 0;
        for line in section[..end].split(|byte| *byte == b'\n') {
            let begins = at;
            at += line.len() + 1;
            if line.to_ascii_lowercase().starts_with(TRAILER_SIGNATURE) {
                signed =
                    Some(begins + TRAILER_SIGNATURE.len()..begins + line.trim_ascii_end().len());
                continue;
            }
            let colon = line.iter().position(|byte| *byte == b':');
            let (name, value) = line.split_at(colon.ok_or("a signed trailer is no field")?);
            canonical.extend_from_slice(&name.trim_ascii().to_ascii_lowercase());
            canonical.push(b':');
            canonical.extend_from_slice(value[1..].trim_ascii());
            canonical.push(b'\n');
        }
        let signed = signed.filter(|signed| signed.len() == 64);
        let signed = signed.ok_or("the trailer of the signed chunks has no signature")?;
        // Every other byte stays, so that the announced length does.
        out.push(section.slice(..signed.start));
        out.push(self.signer.trailer(&canonical));
        out.push(section.slice(signed.end..));
        self.state = State::Done;
        Ok(true)
    }

    fn line(&mut self, bytes_max: usize) -> Result<Option<Bytes>, &'static str> {
        let Some(at) = self.held.iter().position(|byte| *byte == b'\n') else {
            return match self.held.len() > bytes_max {
                true => Err("the line before a signed chunk is too long"),
                false => Ok(None),
            };
        };
        let line = self.held.split_to(at + 1).freeze();
        let line = line.strip_suffix(b"\r\n").ok_or("a line before a signed chunk ends oddly")?;
        Ok(Some(Bytes::copy_from_slice(line)))
    }

    fn end_of_line(&mut self) -> Result<(), &'static str> {
        if !self.held.starts_with(b"\r\n") {
            return Err("a signed chunk is longer than its size");
        }
        self.held.advance(2);
        Ok(())
    }
}
