//! SEQPACKET sockets: one JSON object a message, with descriptors attached.
//!
//! unix(7), `SCM_RIGHTS`. A message longer than the limit, truncated, or with more descriptors
//! than expected is an error, and every descriptor that came with it is closed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::unix::AsyncFd;

/// Longest message. A SEQPACKET send is bounded by the socket's buffer (212,992 bytes by default);
/// nothing we say needs a third of that.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024;
/// Most descriptors on one message. No message of ours needs more.
pub const DESCRIPTORS_MAX: usize = 16;

/// Why a message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("socket: {0}")]
    Socket(#[from] std::io::Error),
    #[error("message is longer than {MESSAGE_BYTES_MAX} bytes")]
    TooLong,
    #[error("message carries more than {DESCRIPTORS_MAX} descriptors")]
    TooManyDescriptors,
    #[error("message is not as documented: {0}")]
    Malformed(serde_json::Error),
}

impl From<rustix::io::Errno> for MessageError {
    fn from(errno: rustix::io::Errno) -> Self {
        match errno {
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => Self::Closed,
            rustix::io::Errno::MSGSIZE => Self::TooLong,
            other => Self::Socket(other.into()),
        }
    }
}

/// Sends one message on a blocking or non-blocking socket; `EAGAIN` comes back as an error.
pub fn send<T: Serialize>(
    socket: impl AsFd,
    message: &T,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), MessageError> {
    let bytes = serde_json::to_vec(message).map_err(MessageError::Malformed)?;
    send_bytes(socket, &bytes, descriptors)
}

fn send_bytes(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), MessageError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong);
    }
    if descriptors.len() > DESCRIPTORS_MAX {
        return Err(MessageError::TooManyDescriptors);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, flags)
    })?;
    Ok(())
}

/// Receives one message and its descriptors (close-on-exec).
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> Result<(T, Vec<OwnedFd>), MessageError> {
    let (bytes, descriptors) = receive_bytes(socket)?;
    let message = serde_json::from_slice(&bytes).map_err(MessageError::Malformed)?;
    Ok((message, descriptors))
}

fn receive_bytes(socket: impl AsFd) -> Result<(Vec<u8>, Vec<OwnedFd>), MessageError> {
    let mut bytes = vec![0u8; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        rustix::net::recvmsg(socket.as_fd(), &mut parts, &mut control, flags)
    })?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(MessageError::TooLong);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(MessageError::TooManyDescriptors);
    }
    if received.bytes == 0 {
        return Err(MessageError::Closed);
    }
    bytes.truncate(received.bytes);
    Ok((bytes, descriptors))
}

/// Connects a blocking SEQPACKET socket.
pub fn connect(path: &Path) -> std::io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The same without waiting: `EAGAIN` where the peer's backlog is full.
pub fn connect_at_once(path: &Path) -> std::io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// A connected pair of blocking SEQPACKET sockets, close-on-exec.
pub fn pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let kind = SocketType::SEQPACKET;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?)
}

/// Registers a socket with the runtime. tokio deprecates `new` for types whose descriptor may
/// change under it; an `OwnedFd` keeps its own until it is dropped.
#[expect(deprecated, reason = "the replacement is unsafe, and OwnedFd meets what it asks")]
fn watched(socket: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(socket)
}

/// A connected SEQPACKET socket for use under tokio. Receiving and sending are cancel-safe.
#[derive(Debug)]
pub struct Channel(AsyncFd<OwnedFd>);

impl Channel {
    /// Takes a connected socket and makes it non-blocking.
    pub fn new(socket: OwnedFd) -> std::io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self(watched(socket)?))
    }

    /// Connects to `path`.
    pub fn connect(path: &Path) -> std::io::Result<Self> {
        Self::new(connect(path)?)
    }

    pub fn peer(&self) -> std::io::Result<crate::peer::Principal> {
        crate::peer::Principal::of(self.0.get_ref())
    }

    pub async fn send<T: Serialize>(
        &self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), MessageError> {
        let bytes = serde_json::to_vec(message).map_err(MessageError::Malformed)?;
        loop {
            let mut ready = self.0.writable().await?;
            match send_bytes(self.0.get_ref(), &bytes, descriptors) {
                Err(MessageError::Socket(e)) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    ready.clear_ready();
                }
                other => return other,
            }
        }
    }

    pub async fn receive<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>), MessageError> {
        loop {
            let mut ready = self.0.readable().await?;
            match receive(self.0.get_ref()) {
                Err(MessageError::Socket(e)) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    ready.clear_ready();
                }
                other => return other,
            }
        }
    }
}

/// A listening SEQPACKET socket under tokio.
#[derive(Debug)]
pub struct ChannelListener(AsyncFd<OwnedFd>);

impl ChannelListener {
    /// Takes a bound, listening socket.
    pub fn new(socket: OwnedFd) -> std::io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self(watched(socket)?))
    }

    /// The next connection. Errors of a single connection attempt are passed over; what is left
    /// (no descriptors, no memory) is for the caller to wait on.
    pub async fn accept(&self) -> std::io::Result<Channel> {
        use rustix::io::Errno;
        loop {
            let mut ready = self.0.readable().await?;
            match rustix::net::accept_with(self.0.get_ref(), SocketFlags::CLOEXEC) {
                Ok(socket) => return Channel::new(socket),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_whole_with_its_descriptors() {
        let (a, b) = pair().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();

        send(&a, &"hello", &[write.as_fd()]).unwrap();
        let (text, mut fds): (String, _) = receive(&b).unwrap();
        rustix::io::write(fds.remove(0), b"x").unwrap();

        let mut byte = [0u8; 1];
        rustix::io::read(read, &mut byte).unwrap();
        assert_eq!((text.as_str(), &byte), ("hello", b"x"));
    }

    #[test]
    fn garbage_an_end_and_too_long_a_message_are_told_apart() {
        let (a, b) = pair().unwrap();

        rustix::net::send(&a, b"{", SendFlags::empty()).unwrap();
        assert!(matches!(receive::<String>(&b), Err(MessageError::Malformed(_))));
        let long = vec![b'1'; MESSAGE_BYTES_MAX + 1];
        rustix::net::send(&a, &long, SendFlags::empty()).unwrap();
        assert!(matches!(receive::<String>(&b), Err(MessageError::TooLong)));
        drop(a);
        assert!(matches!(receive::<String>(&b), Err(MessageError::Closed)));
    }
}
