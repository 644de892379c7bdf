//! What the worker for commands, and the operator's commands, may ask of the kernel: what ordinary
//! programs do.
//!
//! Everything else is unknown to them, as it is to programs on an older kernel. Other processes'
//! memory, namespaces, mounts and the kernel's own machinery are refused. Files are Landlock's part
//! ([`super::command`]), and whose process it is decides the rest.

use ipc::calls::{
    NAMESPACES, PACKETS, PROBED, PROGRAMS, PROGRAMS_HERE, SOCKET_KIND, TERMINAL_INPUT,
};

use super::calls::ATTACKS;
use super::filter::{Argument, Job, When, when};

/// The job of a process that starts programs, which inherit it.
pub fn commands() -> Job<'static> {
    Job {
        unknown: vec![PROBED],
        refused: vec![ATTACKS],
        refused_when: refused_when(),
        allowed: vec![PROGRAMS, PROGRAMS_HERE, JUDGED],
        otherwise: libc::ENOSYS,
        ..Job::default()
    }
}

/// The families of socket(2) that programs of every kind have use for; netlink lists interfaces.
const FAMILIES: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

fn refused_when() -> Vec<When> {
    let flags = (0..u32::BITS).map(|bit| 1 << bit).filter(|flag| NAMESPACES & flag != 0);
    let namespaces = flags.map(|flag| when(libc::SYS_clone, [Argument::Masked(0, flag, flag)]));
    let input = TERMINAL_INPUT.iter();
    let input = input.map(|request| when(libc::SYS_ioctl, [Argument::Is(1, *request)]));
    let other: Vec<Argument> =
        FAMILIES.iter().map(|family| Argument::IsNot(0, family.cast_unsigned())).collect();
    let packets = PACKETS.iter().map(|kind| {
        let netlink = Argument::IsNot(0, libc::AF_NETLINK.cast_unsigned());
        when(libc::SYS_socket, [netlink, Argument::Masked(1, SOCKET_KIND, *kind)])
    });
    let sockets = packets.chain([when(libc::SYS_socket, other)]);
    // Whatever is readable would be code.
    let code = Argument::Masked(0, READ_IMPLIES_EXEC, READ_IMPLIES_EXEC);
    let code = when(libc::SYS_personality, [code, Argument::IsNot(0, u32::MAX)]);
    namespaces.chain(input).chain(sockets).chain([code]).collect()
}

/// linux/personality.h
const READ_IMPLIES_EXEC: u32 = 0x0040_0000;

/// What the conditions above leave of these.
const JUDGED: &[i64] = &[
    libc::SYS_clone,
    libc::SYS_ioctl,
    libc::SYS_personality,
    libc::SYS_socket,
    libc::SYS_socketpair,
];

#[cfg(test)]
mod tests {
    use super::super::filter::trial::{End, apart, call};
    use super::*;

    fn under(number: i64, arguments: [u64; 6]) -> End {
        apart(|| match commands().load() {
            Ok(()) => call(number, arguments),
            Err(_) => 255,
        })
    }

    #[test]
    fn a_command_runs_programs_and_threads_and_opens_ordinary_sockets() {
        let end = apart(|| {
            let own = commands().load().is_ok()
                && std::process::Command::new("sh")
                    .args(["-c", "test $(echo 7) = 7"])
                    .status()
                    .is_ok_and(|status| status.success())
                && std::thread::spawn(|| 7).join().is_ok_and(|seven| seven == 7)
                && std::net::TcpListener::bind("127.0.0.1:0").is_ok()
                && std::os::unix::net::UnixStream::pair().is_ok();
            i32::from(!own)
        });

        assert_eq!(end, End::Code(0));
    }

    #[test]
    fn a_command_looks_into_no_other_process_and_makes_no_namespace() {
        let none = [0; 6];
        let of = |number: i32| u64::from(number.cast_unsigned());
        let clone = |flag: i32| [of(flag | libc::SIGCHLD), 0, 0, 0, 0, 0];
        let socket = |family: i32, kind: i32| [of(family), of(kind), 0, 0, 0, 0];
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        const SOCK_PACKET: i32 = 10;
        for (number, arguments, errno) in [
            (libc::SYS_ptrace, none, libc::EPERM),
            (libc::SYS_process_vm_readv, none, libc::EPERM),
            (libc::SYS_pidfd_getfd, none, libc::EPERM),
            (libc::SYS_unshare, none, libc::EPERM),
            (libc::SYS_mount, none, libc::EPERM),
            (libc::SYS_fsopen, none, libc::EPERM),
            (libc::SYS_bpf, none, libc::EPERM),
            (libc::SYS_keyctl, none, libc::EPERM),
            (libc::SYS_clone, clone(libc::CLONE_NEWUSER), libc::EPERM),
            (libc::SYS_clone, clone(libc::CLONE_NEWNET), libc::EPERM),
            (libc::SYS_clone, clone(libc::CLONE_NEWNS | libc::CLONE_NEWPID), libc::EPERM),
            (libc::SYS_socket, socket(libc::AF_PACKET, libc::SOCK_RAW), libc::EPERM),
            (libc::SYS_socket, socket(libc::AF_INET, libc::SOCK_RAW), libc::EPERM),
            // The old way to a packet socket.
            (libc::SYS_socket, socket(libc::AF_INET, SOCK_PACKET), libc::EPERM),
            (libc::SYS_socket, socket(libc::AF_INET, SOCK_PACKET | flags), libc::EPERM),
            (libc::SYS_socket, socket(libc::AF_ALG, libc::SOCK_SEQPACKET), libc::EPERM),
            (libc::SYS_socket, socket(libc::AF_VSOCK, libc::SOCK_STREAM), libc::EPERM),
            (libc::SYS_ioctl, [0, 0x5412, 0, 0, 0, 0], libc::EPERM),
            (libc::SYS_personality, [0x0040_0000, 0, 0, 0, 0, 0], libc::EPERM),
            (libc::SYS_clone3, none, libc::ENOSYS),
            (libc::SYS_io_uring_setup, none, libc::ENOSYS),
            // One that there is not yet, and one that is of no use.
            (9999, none, libc::ENOSYS),
            (libc::SYS_memfd_secret, none, libc::ENOSYS),
        ] {
            assert_eq!(under(number, arguments), End::Code(errno), "{number} {arguments:?}");
        }
    }
}
