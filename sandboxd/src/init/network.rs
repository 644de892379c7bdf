//! The cell's network: loopback, every address local, every TCP port on one listener.
//!
//! Nothing here reaches a network: the namespace has `lo` and will never have more. The sockets
//! made here are handed out and are all that proxyd sees of the cell.

use std::os::fd::OwnedFd;

use rustix::net::netlink;

use super::netlink::{ACKNOWLEDGE, CREATE, Messages, Netlink, REQUEST};
use super::nftables::{Redirection, batch};
use crate::sys::sockets::{Reach, datagram, listener};

/// Where the transparent listener is bound. Above the range that outgoing connections draw from
/// (32768 to 60999), and no service of a development server's.
const LISTENER_PORT: u16 = 64_999;
const DNS_PORT: u16 = 53;
/// Listened on beside the policy's where TPROXY is missing: plain HTTP gets a readable denial.
const HTTP_PORT: u16 = 80;

// linux/rtnetlink.h, linux/if.h
const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const ROUTE_OUT_INTERFACE: u16 = 4;
const ADDRESS_LOCAL: u16 = 2;
const LOOPBACK_INDEX: u32 = 1;
const INTERFACE_UP: u32 = 1;
const TABLE_LOCAL: u8 = 255;
const PROTOCOL_STATIC: u8 = 4;
const SCOPE_HOST: u8 = 254;
const TYPE_LOCAL: u8 = 2;
const FAMILY_IPV4: u8 = 2;
const FAMILY_IPV6: u8 = 10;
const SCOPE_UNIVERSE: u8 = 0;

/// Addresses of `lo` beside its own, from the ranges for documentation. They are there to be seen:
/// a program that asks only for the families that its host has (`AI_ADDRCONFIG`) does not count
/// 127.0.0.1 and ::1, and would find no name at all.
const OWN_IPV4: [u8; 4] = [192, 0, 2, 1];
const OWN_IPV6: [u8; 16] = [0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

/// The way out of a cell.
#[derive(Debug)]
pub struct Egress {
    pub tcp: Vec<OwnedFd>,
    pub dns: OwnedFd,
    pub ports: Ports,
}

/// Which TCP ports reach proxyd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    Every,
    /// TPROXY is not to be had; the text says why.
    These(Vec<u16>, String),
}

/// Brings `lo` up and makes every address the cell's own (AnyIP).
pub fn loopback() -> rustix::io::Result<()> {
    let socket = Netlink::open(None)?;
    let mut link = Vec::from([0u8; 4]);
    link.extend(LOOPBACK_INDEX.to_ne_bytes());
    link.extend(INTERFACE_UP.to_ne_bytes());
    link.extend(INTERFACE_UP.to_ne_bytes());
    let mut up = Messages::default();
    up.push(NEW_LINK, REQUEST | ACKNOWLEDGE, 1, &link, |_| {});
    socket.request(&up)?;
    for family in [FAMILY_IPV4, FAMILY_IPV6] {
        let route =
            [family, 0, 0, 0, TABLE_LOCAL, PROTOCOL_STATIC, SCOPE_HOST, TYPE_LOCAL, 0, 0, 0, 0];
        let mut add = Messages::default();
        add.push(NEW_ROUTE, REQUEST | ACKNOWLEDGE | CREATE, 1, &route, |body| {
            body.bytes(ROUTE_OUT_INTERFACE, &LOOPBACK_INDEX.to_ne_bytes());
        });
        socket.request(&add)?;
    }
    for (family, bits, own) in [(FAMILY_IPV4, 32, &OWN_IPV4[..]), (FAMILY_IPV6, 128, &OWN_IPV6)] {
        let mut address = vec![family, bits, 0, SCOPE_UNIVERSE];
        address.extend(LOOPBACK_INDEX.to_ne_bytes());
        let mut add = Messages::default();
        add.push(NEW_ADDRESS, REQUEST | ACKNOWLEDGE | CREATE, 1, &address, |body| {
            body.bytes(ADDRESS_LOCAL, own);
        });
        socket.request(&add)?;
    }
    Ok(())
}

/// Makes the sockets. Where the kernel has no TPROXY for us there is a listener for each port
/// that the policy names; to every other port a connection is refused.
pub fn egress(fallback: &[u16]) -> std::io::Result<Egress> {
    let dns = datagram(DNS_PORT)?;
    let (tcp, ports) = match redirect() {
        Ok(()) => (vec![listener(LISTENER_PORT, Reach::Transparent)?], Ports::Every),
        Err(error) => {
            let mut wanted: Vec<u16> =
                fallback.iter().copied().chain([HTTP_PORT, DNS_PORT]).collect();
            wanted.sort_unstable();
            wanted.dedup();
            // A message carries 16 descriptors, one of which is DNS.
            wanted.truncate(ipc::fd::DESCRIPTORS_MAX - 1);
            let open = |port: &u16| listener(*port, Reach::OwnPort);
            let tcp = wanted.iter().map(open).collect::<Result<Vec<_>, _>>()?;
            (tcp, Ports::These(wanted, error.to_string()))
        }
    };
    Ok(Egress { tcp, dns, ports })
}

fn redirect() -> rustix::io::Result<()> {
    let wanted = Redirection { table: "cleanhands", chain: "egress", port: LISTENER_PORT };
    Netlink::open(Some(netlink::NETFILTER))?.request(&batch(&wanted))
}
