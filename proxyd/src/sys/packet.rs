//! UDP with the address that was asked: DNS in a sandbox goes to any address, and the answer must
//! come back from that one (`IPV6_PKTINFO`, RFC 3542 section 6).

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn6, recvmsg, sendmsg,
};

/// Who asked, and at which of the sandbox's addresses.
pub struct Asked {
    from: SockaddrIn6,
    at: libc::in6_pktinfo,
    pub length: usize,
    /// The datagram was longer than the buffer.
    pub truncated: bool,
}

/// Receives one datagram; `WouldBlock` when there is none.
pub fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> std::io::Result<Option<Asked>> {
    let mut control = nix::cmsg_space!(libc::in6_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let raw = socket.as_fd().as_raw_fd();
    let received = recvmsg::<SockaddrIn6>(
        raw,
        &mut parts,
        Some(&mut control),
        MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let at = received.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(info),
        _ => None,
    });
    let (Some(from), Some(at)) = (received.address, at) else { return Ok(None) };
    let truncated = received.flags.contains(MsgFlags::MSG_TRUNC);
    Ok(Some(Asked { from, at, length: received.bytes, truncated }))
}

/// Answers from the address that was asked.
pub fn answer(socket: &OwnedFd, asked: &Asked, bytes: &[u8]) -> std::io::Result<()> {
    let control = [ControlMessage::Ipv6PacketInfo(&asked.at)];
    let raw = socket.as_fd().as_raw_fd();
    let parts = [IoSlice::new(bytes)];
    sendmsg(raw, &parts, &control, MsgFlags::MSG_DONTWAIT, Some(&asked.from))?;
    Ok(())
}
