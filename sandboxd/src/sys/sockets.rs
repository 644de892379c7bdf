//! The sockets that are a cell's only way out, with the options no safe wrapper but nix has.

use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::OwnedFd;

use nix::sys::socket::{setsockopt, sockopt};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Connections that may wait while proxyd restarts. A sandbox that fills it gets what any busy
/// server's client gets.
const BACKLOG: i32 = 1024;

/// Whose packets a listener takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Those that TPROXY brings, whatever their port.
    Transparent,
    /// Those to its own port.
    OwnPort,
}

/// A listening TCP socket for IPv4 and IPv6 on every address. What it accepts has, as its own
/// address, the one that was asked for.
pub fn listener(port: u16, reach: Reach) -> std::io::Result<OwnedFd> {
    let socket = dual(SocketType::STREAM)?;
    if reach == Reach::Transparent {
        setsockopt(&socket, sockopt::IpTransparent, &true)?;
    }
    rustix::net::bind(&socket, &everywhere(port))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A UDP socket on `port` of every address that says which address each datagram was sent to
/// (ipv6(7), `IPV6_RECVPKTINFO`; IPv4 ones arrive as mapped addresses).
pub fn datagram(port: u16) -> std::io::Result<OwnedFd> {
    let socket = dual(SocketType::DGRAM)?;
    setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
    rustix::net::bind(&socket, &everywhere(port))?;
    Ok(socket)
}

fn dual(kind: SocketType) -> std::io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::INET6, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::sockopt::set_ipv6_v6only(&socket, false)?;
    Ok(socket)
}

fn everywhere(port: u16) -> SocketAddrV6 {
    SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0)
}
