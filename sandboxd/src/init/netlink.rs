//! Netlink messages as bytes (netlink(7)): a header, a fixed part, attributes that may nest.
//!
//! Pure but for [`Netlink`], the socket that carries them and reads the kernel's answers.

use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

pub const REQUEST: u16 = 0x1;
pub const ACKNOWLEDGE: u16 = 0x4;
pub const CREATE: u16 = 0x400;
pub const APPEND: u16 = 0x800;

const HEADER_BYTES: usize = 16;
const NESTED: u16 = 0x8000;
const TYPE_ERROR: u16 = 2;

/// Messages, one behind the other.
#[derive(Clone, Debug, Default)]
pub struct Messages {
    bytes: Vec<u8>,
}

/// The inside of one message or of a nested attribute, under construction.
#[derive(Debug)]
pub struct Body<'a> {
    bytes: &'a mut Vec<u8>,
}

impl Messages {
    /// Adds a message: `fixed` is what its type has before the attributes.
    pub fn push(
        &mut self,
        kind: u16,
        flags: u16,
        sequence: u32,
        fixed: &[u8],
        attributes: impl FnOnce(&mut Body<'_>),
    ) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&0u32.to_ne_bytes());
        self.bytes.extend_from_slice(fixed);
        pad(&mut self.bytes);
        attributes(&mut Body { bytes: &mut self.bytes });
        let length = (self.bytes.len() - start) as u32;
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Body<'_> {
    pub fn bytes(&mut self, kind: u16, value: &[u8]) {
        self.attribute(kind, |bytes| bytes.extend_from_slice(value));
    }

    /// A C string.
    pub fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, |bytes| {
            bytes.extend_from_slice(value.as_bytes());
            bytes.push(0);
        });
    }

    /// A number in network order, as nfnetlink has them.
    pub fn number(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    pub fn nested(&mut self, kind: u16, inner: impl FnOnce(&mut Body<'_>)) {
        self.attribute(kind | NESTED, |bytes| inner(&mut Body { bytes }));
    }

    fn attribute(&mut self, kind: u16, value: impl FnOnce(&mut Vec<u8>)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        value(self.bytes);
        let length = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        pad(self.bytes);
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// A socket to one of the kernel's netlink families.
#[derive(Debug)]
pub struct Netlink(OwnedFd);

impl Netlink {
    /// `None`: routes and links.
    pub fn open(family: Option<Protocol>) -> rustix::io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let domain = AddressFamily::NETLINK;
        let socket = rustix::net::socket_with(domain, SocketType::RAW, flags, family)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self(socket))
    }

    /// Sends messages, exactly one of which asks for an acknowledgement, and reads the answer: an
    /// error of any of them, or the acknowledgement.
    pub fn request(&self, messages: &Messages) -> rustix::io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.0, messages.bytes(), SendFlags::empty(), &kernel)?;
        let mut answer = [0u8; 8192];
        let (received, _) = rustix::net::recv(&self.0, &mut answer, RecvFlags::empty())?;
        match errno_of(&answer[..received]) {
            Some(0) => Ok(()),
            Some(errno) => Err(rustix::io::Errno::from_raw_os_error(-errno)),
            None => Err(rustix::io::Errno::PROTO),
        }
    }
}

/// The error number of an acknowledgement: 0, or negative.
fn errno_of(answer: &[u8]) -> Option<i32> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let number = answer.get(HEADER_BYTES..HEADER_BYTES + 4)?;
    (kind == TYPE_ERROR).then(|| i32::from_ne_bytes([number[0], number[1], number[2], number[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_count_the_header_and_values_are_padded() {
        let mut messages = Messages::default();

        messages.push(7, REQUEST, 1, &[9], |body| body.text(3, "ab"));

        let bytes = messages.bytes();
        assert_eq!(bytes.len(), 16 + 4 + 8);
        assert_eq!(bytes[..4], 28u32.to_ne_bytes());
        assert_eq!(bytes[20..], [7, 0, 3, 0, b'a', b'b', 0, 0]);
    }

    #[test]
    fn an_answer_that_is_too_short_or_of_another_kind_is_no_acknowledgement() {
        assert_eq!(errno_of(&[]), None);
        assert_eq!(errno_of(&[0; 20]), None);
    }
}
