//! What the kernel says about this host's own addresses, and how long it minds a silent peer.

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with, sockopt,
};

thread_local! {
    /// A socket to ask the kernel by; a question and its answer leave nothing on it.
    static ROUTES: RefCell<Option<OwnedFd>> = const { RefCell::new(None) };
}

/// Whether a packet to this address would stay on this host: an address of an interface, also of
/// one that came up a moment ago, or a route that makes it local. The kernel is asked each time,
/// so no list grows old. What it does not say counts as own: refused rather than missed.
pub fn is_own(ip: IpAddr) -> bool {
    ROUTES.with_borrow_mut(|kept| match ask(kept, ip) {
        Ok(own) => own,
        Err(error) => {
            tracing::warn!(%ip, %error, "cannot ask the kernel whose address this is");
            *kept = None;
            true
        }
    })
}

// Of rtnetlink(7), linux/netlink.h and linux/rtnetlink.h.
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTN_UNICAST: u8 = 1;
/// `struct nlmsghdr`, then `struct rtmsg`, in which the route's type has this place.
const HEADER_BYTES: usize = 16;
const ROUTE_TYPE_AT: usize = HEADER_BYTES + 7;

fn ask(kept: &mut Option<OwnedFd>, ip: IpAddr) -> io::Result<bool> {
    let socket = match kept {
        Some(socket) => socket,
        None => kept.insert(socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            // NETLINK_ROUTE.
            None,
        )?),
    };
    send(&*socket, &question(ip), SendFlags::empty())?;
    // The kernel has answered by the time that the question is sent.
    let mut answer = [0u8; 4096];
    let (length, _) = recv(&*socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    let answer = &answer[..length];
    let kind = answer.get(4..6).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    match (kind, answer.get(HEADER_BYTES..HEADER_BYTES + 4), answer.get(ROUTE_TYPE_AT)) {
        (Some(RTM_NEWROUTE), _, Some(kind)) => Ok(*kind != RTN_UNICAST),
        (Some(NLMSG_ERROR), Some(code), _) => {
            let code = i32::from_ne_bytes([code[0], code[1], code[2], code[3]]).wrapping_neg();
            // Nowhere at all, so not here either; the dial will say so.
            let nowhere = [Errno::NETUNREACH, Errno::HOSTUNREACH].map(Errno::raw_os_error);
            if nowhere.contains(&code) {
                Ok(false)
            } else {
                Err(io::Error::from_raw_os_error(code))
            }
        }
        _ => Err(io::Error::other("an answer of another kind")),
    }
}

/// `RTM_GETROUTE` for one address.
fn question(ip: IpAddr) -> Vec<u8> {
    let (family, bytes) = match ip {
        IpAddr::V4(v4) => (AddressFamily::INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (AddressFamily::INET6, v6.octets().to_vec()),
    };
    let family = u8::try_from(family.as_raw()).expect("address families are small numbers");
    let prefix = if ip.is_ipv4() { 32 } else { 128 };
    let mut message = vec![0u8; 4];
    message.extend_from_slice(&RTM_GETROUTE.to_ne_bytes());
    message.extend_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    // struct rtmsg: the family, the length of the prefix, and ten bytes that the answer fills.
    message.extend_from_slice(&[family, prefix, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let attribute = u16::try_from(4 + bytes.len()).expect("an address has at most 16 bytes");
    message.extend_from_slice(&attribute.to_ne_bytes());
    message.extend_from_slice(&RTA_DST.to_ne_bytes());
    message.extend_from_slice(&bytes);
    let length = u32::try_from(message.len()).expect("the message is short");
    message[..4].copy_from_slice(&length.to_ne_bytes());
    message
}

/// Has the kernel probe a silent peer, so that a connection to a host that vanished ends within
/// minutes instead of never. A socket without the option still works.
pub fn keep_alive(socket: impl AsFd) {
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, Duration::from_secs(60));
    let _ = sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(20));
    let _ = sockopt::set_tcp_keepcnt(&socket, 5);
}

/// Whether this is a TCP socket, of either address family, that listens.
pub fn listens_for_tcp(socket: impl AsFd) -> std::io::Result<bool> {
    let family = sockopt::socket_domain(&socket)?;
    Ok(matches!(family, AddressFamily::INET | AddressFamily::INET6)
        && sockopt::socket_type(&socket)? == SocketType::STREAM
        && sockopt::socket_acceptconn(&socket)?)
}

/// Whether this is a listening Unix stream socket.
pub fn listens_on_unix(socket: impl AsFd) -> std::io::Result<bool> {
    Ok(sockopt::socket_domain(&socket)? == AddressFamily::UNIX
        && sockopt::socket_type(&socket)? == SocketType::STREAM
        && sockopt::socket_acceptconn(&socket)?)
}

/// Whether nobody is at the other end of a socket any more: a peer that ended its direction alone
/// still is. Over TCP a peer that has closed shows only when it resets the connection.
pub fn hung_up(socket: impl AsFd) -> bool {
    shows(socket, PollFlags::HUP | PollFlags::ERR)
}

/// Whether the peer has ended its direction, whatever of what it sent is still to be read.
pub fn has_ended(socket: impl AsFd) -> bool {
    shows(socket, PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

fn shows(socket: impl AsFd, flags: PollFlags) -> bool {
    let mut polled = [PollFd::new(&socket, flags)];
    // The call asks and does not wait. One that fails says nothing.
    let said = poll(&mut polled, Some(&Timespec::default()));
    said.is_ok() && polled[0].revents().intersects(flags)
}

/// Has closing the socket reset the connection instead of ending it in order.
pub fn reset_on_close(socket: impl AsFd) {
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
}

/// Takes [`reset_on_close`] back.
pub fn close_in_order(socket: impl AsFd) {
    let _ = sockopt::set_socket_linger(&socket, None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_this_hosts_own_and_a_documentation_address_is_not() {
        let own = |text: &str| is_own(text.parse().unwrap());

        assert!(own("127.0.0.1") && own("127.1.2.3") && own("::1"));
        assert!(!own("192.0.2.77") && !own("2001:db8::77"));
    }
}
