//! What the kernel says about this host's own addresses, and how long it minds a silent peer.

use std::collections::HashSet;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, sockopt};

/// The addresses of all interfaces (getifaddrs(3)); none when they cannot be read.
pub fn addresses() -> Option<HashSet<IpAddr>> {
    let list = nix::ifaddrs::getifaddrs().ok()?;
    Some(list.filter_map(|interface| interface.address.and_then(|a| ip(&a))).collect())
}

fn ip(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(IpAddr::V4(v4.ip()));
    }
    address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()))
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

/// Has closing the socket reset the connection instead of ending it in order.
pub fn reset_on_close(socket: impl AsFd) {
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
}
