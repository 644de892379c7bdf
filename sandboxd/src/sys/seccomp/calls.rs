//! The table: every system call that a command may make: those of ordinary programs
//! ([`ipc::calls`]), those of debuggers, and some that their arguments decide.
//!
//! What is not here fails with EPERM: mounting, namespaces, modules, kexec, reboot, swap, quota,
//! accounting, keys, bpf, perf, userfaultfd, file handles, clocks, raw I/O ports. Calls that
//! libraries try and do without (clone3, io_uring) fail with ENOSYS, so that they fall back.
//! ptrace and process_vm_* are allowed: debuggers are wanted, and the pid namespace, Landlock and
//! the missing capabilities bound them to the sandbox's own processes.

use ipc::calls::{
    NAMESPACES, PACKETS, PROBED, PROGRAMS, PROGRAMS_HERE, SOCKET_KIND, TERMINAL_INPUT,
};

use super::filter::{Node, Verdict};

#[cfg(target_arch = "x86_64")]
pub const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub const ARCHITECTURE: u32 = 0xc000_00b7;

/// The highest number that this table was written with knowledge of (Linux 6.18, `file_setattr`).
/// Higher ones are to a sandbox what they are to an older kernel.
pub const NUMBER_MAX: u32 = 469;

/// `CLONE_NEWTIME`, for unshare(2).
const NEWTIME_FLAG: u32 = 0x80;

/// The set-user-ID and set-group-ID bits of a file's mode, inode(7).
const SET_ID: u32 = 0o6000;
/// `O_CREAT`, and `O_TMPFILE`'s own bit: only with these does open(2) look at its mode.
const CREATES: u32 = 0x40 | 0x40_0000;
/// fchmodat2(2), which libc does not name on both architectures.
const SYS_FCHMODAT2: i64 = 452;

fn number(call: i64) -> u32 {
    u32::try_from(call).expect("call numbers are small and positive")
}

/// Every call that a command may make and what becomes of it. A command makes no set-id file:
/// inside it would do nothing, but in a directory of the host that the sandbox writes, it would be
/// a way into its owner's account for whoever can reach it there.
pub fn commands() -> Vec<(u32, Node)> {
    let mut table = files();
    let mut judged: Vec<(u32, Node)> = set_id_calls().collect();
    judged.push((number(libc::SYS_connect), Node::Give(Verdict::Supervise)));
    judged.push((number(libc::SYS_socket), socket(connecting_unix(fail(libc::EAFNOSUPPORT)))));
    table.retain(|(call, _)| judged.iter().all(|(other, _)| other != call));
    table.extend(judged);
    table
}

/// The calls that take a mode. openat2(2) has its own behind a pointer, where no filter can look:
/// programs fall back to openat.
fn set_id_calls() -> impl Iterator<Item = (u32, Node)> {
    let modes = [(libc::SYS_fchmod, 1), (libc::SYS_fchmodat, 2), (SYS_FCHMODAT2, 2)];
    let modes = modes.into_iter().chain([(libc::SYS_mknodat, 2)]).chain(modes_here());
    let judged = modes.map(|(call, mode)| (number(call), no_bits(mode, SET_ID)));
    let opens = [(libc::SYS_openat, 2)].into_iter().chain(opens_here());
    let opens = opens.map(|(call, flags)| (number(call), creating(flags)));
    judged.chain(opens).chain([(number(libc::SYS_openat2), fail(libc::ENOSYS))])
}

#[cfg(target_arch = "x86_64")]
fn modes_here() -> Vec<(i64, u8)> {
    vec![(libc::SYS_chmod, 1), (libc::SYS_creat, 1), (libc::SYS_mknod, 1)]
}

#[cfg(target_arch = "x86_64")]
fn opens_here() -> Vec<(i64, u8)> {
    vec![(libc::SYS_open, 1)]
}

#[cfg(target_arch = "aarch64")]
fn modes_here() -> Vec<(i64, u8)> {
    Vec::new()
}

#[cfg(target_arch = "aarch64")]
fn opens_here() -> Vec<(i64, u8)> {
    Vec::new()
}

/// open(2) and openat(2): the mode follows the flags.
fn creating(flags: u8) -> Node {
    Node::IfAnyBit {
        argument: flags,
        mask: CREATES,
        then: Box::new(no_bits(flags + 1, SET_ID)),
        otherwise: allow(),
    }
}

/// What the file tools' own code may call inside a cell: as commands, and openat2, which keeps it
/// beneath the workspace. They have no Unix sockets, so that nobody need supervise their way out.
pub fn files() -> Vec<(u32, Node)> {
    let allowed = [PROGRAMS, PROGRAMS_HERE, TRACING].into_iter().flatten();
    let mut table: Vec<(u32, Node)> =
        allowed.map(|call| (number(*call), Node::Give(Verdict::Allow))).collect();
    table.extend(PROBED.iter().map(|call| (number(*call), fail(libc::ENOSYS))));
    table.push((number(libc::SYS_clone), no_bits(0, NAMESPACES)));
    table.push((number(libc::SYS_unshare), no_bits(0, NAMESPACES | NEWTIME_FLAG)));
    table.push((number(libc::SYS_ioctl), ioctl()));
    table.push((number(libc::SYS_socket), socket(fail(libc::EAFNOSUPPORT))));
    let pair = connecting_unix(fail(libc::EAFNOSUPPORT));
    table.push((number(libc::SYS_socketpair), pair));
    table.push((number(libc::SYS_personality), only(0, PERSONALITIES, libc::EPERM)));
    table
}

/// Linux, 32-bit addresses, no address randomisation (debuggers), UNAME26, and "only ask".
const PERSONALITIES: &[u32] = &[0, 0x8, 0x4_0000, 0x2_0000, 0x2_0008, 0xffff_ffff];

fn fail(errno: i32) -> Node {
    Node::Give(Verdict::Fail(errno))
}

fn allow() -> Box<Node> {
    Box::new(Node::Give(Verdict::Allow))
}

fn no_bits(argument: u8, mask: u32) -> Node {
    Node::IfAnyBit { argument, mask, then: Box::new(fail(libc::EPERM)), otherwise: allow() }
}

fn only(argument: u8, values: &[u32], errno: i32) -> Node {
    Node::If {
        argument,
        mask: u32::MAX,
        values: values.to_vec(),
        then: allow(),
        otherwise: Box::new(fail(errno)),
    }
}

fn ioctl() -> Node {
    Node::If {
        argument: 1,
        mask: u32::MAX,
        values: TERMINAL_INPUT.to_vec(),
        then: Box::new(fail(libc::EPERM)),
        otherwise: allow(),
    }
}

/// A Unix socket that sends to whom it is connected to, so that connect(2) decides. A datagram
/// socket sends to any address that it is given, in memory where no filter can look.
fn connecting_unix(otherwise: Node) -> Node {
    let by_kind = Node::If {
        argument: 1,
        mask: SOCKET_KIND,
        // The kernel makes a datagram socket of a raw one.
        values: vec![libc::SOCK_DGRAM as u32, libc::SOCK_RAW as u32],
        then: Box::new(fail(libc::ESOCKTNOSUPPORT)),
        otherwise: allow(),
    };
    Node::If {
        argument: 0,
        mask: u32::MAX,
        values: vec![libc::AF_UNIX as u32],
        then: Box::new(by_kind),
        otherwise: Box::new(otherwise),
    }
}

/// socket(domain, type, protocol): what `others` lets; IPv4 and IPv6 but no raw or packet type and
/// no protocol besides TCP, UDP, ICMP echo and UDP-Lite (MPTCP, SCTP, SMC and DCCP reach code that
/// nothing else here guards); netlink for routes only, which listing interfaces needs.
fn socket(others: Node) -> Node {
    const DOMAIN: u8 = 0;
    const KIND: u8 = 1;
    const PROTOCOL: u8 = 2;
    let netlink = libc::AF_NETLINK as u32;
    let inet = vec![libc::AF_INET as u32, libc::AF_INET6 as u32];
    let protocols = only(PROTOCOL, &[0, 6, 17, 1, 58, 136], libc::EPROTONOSUPPORT);
    let by_kind = Node::If {
        argument: KIND,
        mask: SOCKET_KIND,
        values: PACKETS.to_vec(),
        then: Box::new(fail(libc::EPERM)),
        otherwise: Box::new(protocols),
    };
    let other = Node::If {
        argument: DOMAIN,
        mask: u32::MAX,
        values: vec![netlink],
        then: Box::new(only(PROTOCOL, &[0], libc::EPROTONOSUPPORT)),
        otherwise: Box::new(others),
    };
    Node::If {
        argument: DOMAIN,
        mask: u32::MAX,
        values: inet,
        then: Box::new(by_kind),
        otherwise: Box::new(other),
    }
}

/// What debuggers need.
const TRACING: &[i64] = &[
    libc::SYS_pidfd_getfd,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
];
