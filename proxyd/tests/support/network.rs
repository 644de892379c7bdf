//! A network namespace of a test's own, in which it may give the host addresses (rtnetlink(7)).
//!
//! Namespaces are left and entered by a process with one thread only, so tests that need one bring
//! their own `main` (`harness = false`), which runs each in a process of its own.

#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

use std::net::IpAddr;
use std::process::{Command, ExitCode};

use nix::sched::{CloneFlags, unshare};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// The argument in front of the name of a test to run in this process.
const INSIDE: &str = "--in-a-network-of-its-own";
const LOOPBACK: u32 = 1;

/// What becomes of an address.
#[derive(Clone, Copy)]
pub enum Change {
    Add,
    Remove,
}

/// The `main` of such tests. Says what the usual one says; an argument that is no flag picks the
/// tests whose names hold it.
pub fn main(tests: &[(&str, fn())]) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name] = &arguments[..]
        && flag == INSIDE
    {
        enter();
        let (_, test) = tests.iter().find(|(known, _)| known == name).unwrap();
        test();
        return ExitCode::SUCCESS;
    }
    let picks: Vec<&String> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let picked = |name: &str| picks.is_empty() || picks.iter().any(|pick| name.contains(*pick));
    let (mut passed, mut failed, mut left_out) = (0, 0, 0);
    for (name, _) in tests {
        if !picked(name) {
            left_out += 1;
            continue;
        }
        let program = std::env::current_exe().unwrap();
        let output = Command::new(program).args([INSIDE, name]).output().unwrap();
        if output.status.success() {
            passed += 1;
            println!("test {name} ... ok");
        } else {
            failed += 1;
            println!("test {name} ... FAILED\n{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {word}. {passed} passed; {failed} failed; 0 ignored; 0 measured; \
         {left_out} filtered out\n"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Leaves for a network that has loopback and nothing else, as its administrator.
fn enter() {
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET).unwrap();
    std::fs::write("/proc/self/setgroups", "deny").unwrap();
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1")).unwrap();
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1")).unwrap();
    loopback_up();
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
