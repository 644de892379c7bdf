//! A network namespace of a test's own, in which it may give the host addresses (rtnetlink(7)).

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

use std::future::Future;
use std::net::IpAddr;
use std::process::Command;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const INSIDE: &str = "CLEANHANDS_TEST_NETWORK";
const LOOPBACK: u32 = 1;

/// What becomes of an address.
#[derive(Clone, Copy)]
pub enum Change {
    Add,
    Remove,
}

/// Runs a test, of that name, in a network that has loopback and nothing else: this program is
/// started again inside of one.
pub fn in_one_of_our_own(test: &str, body: impl Future<Output = ()>) {
    if std::env::var_os(INSIDE).is_some() {
        loopback_up();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        return runtime.block_on(body);
    }
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--net", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && shown.contains("1 passed"), "{shown}\n{errors}");
}

fn loopback_up() {
    // RTM_NEWLINK with struct ifinfomsg: the flag IFF_UP set, and nothing else changed.
    let mut body = vec![0u8; 16];
    body[4..8].copy_from_slice(&LOOPBACK.to_ne_bytes());
    body[8..12].copy_from_slice(&1u32.to_ne_bytes());
    body[12..16].copy_from_slice(&1u32.to_ne_bytes());
    ask(16, 0, &body);
}

/// Gives loopback an address, or takes it away.
pub fn address(change: Change, ip: IpAddr, prefix: u8) {
    let (family, bytes) = parts(ip);
    // struct ifaddrmsg, then IFA_LOCAL and IFA_ADDRESS. No duplicate is looked for (IFA_F_NODAD).
    let mut body = vec![family, prefix, 0x02, 0];
    body.extend_from_slice(&LOOPBACK.to_ne_bytes());
    for attribute in [2u16, 1] {
        push(&mut body, attribute, &bytes);
    }
    match change {
        Change::Add => ask(20, 0x400 | 0x100, &body),
        Change::Remove => ask(21, 0, &body),
    }
}

/// Makes a whole range local, as `ip route add local RANGE dev lo` does.
pub fn local_route(base: IpAddr, prefix: u8) {
    let (family, bytes) = parts(base);
    // struct rtmsg in the table "local": by the administrator, for this host, of type "local".
    let mut body = vec![family, prefix, 0, 0, 255, 4, 254, 2, 0, 0, 0, 0];
    push(&mut body, 1, &bytes);
    push(&mut body, 4, &LOOPBACK.to_ne_bytes());
    ask(24, 0x400, &body);
}

fn parts(ip: IpAddr) -> (u8, Vec<u8>) {
    match ip {
        IpAddr::V4(v4) => (2, v4.octets().to_vec()),
        IpAddr::V6(v6) => (10, v6.octets().to_vec()),
    }
}

fn push(body: &mut Vec<u8>, attribute: u16, value: &[u8]) {
    body.extend_from_slice(&u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
    body.extend_from_slice(&attribute.to_ne_bytes());
    body.extend_from_slice(value);
}

/// One request that the kernel acknowledges.
fn ask(kind: u16, flags: u16, body: &[u8]) {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let length = u32::try_from(16 + body.len()).unwrap();
    let mut message = length.to_ne_bytes().to_vec();
    message.extend_from_slice(&kind.to_ne_bytes());
    // NLM_F_REQUEST and NLM_F_ACK.
    message.extend_from_slice(&(flags | 5).to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(body);
    rustix::net::send(&socket, &message, SendFlags::empty()).unwrap();
    let mut answer = [0u8; 1024];
    let (length, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty()).unwrap();
    let code = i32::from_ne_bytes(answer[16..20].try_into().unwrap());
    assert!(length >= 20 && code == 0, "the kernel says {code} to message {kind}");
}
