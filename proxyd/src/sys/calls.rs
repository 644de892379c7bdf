//! What the vault child and its network worker may ask of the kernel: what their work needs.
//!
//! Everything else fails with EPERM. What only somebody would ask for who runs code of their own
//! in one of them ends the process, and with it proxyd, which its supervisor starts again.

use ipc::calls::{NAMESPACES, PROBED};

use super::filter::{Argument, Job, When, when};

/// Answers, the log, files to read, memory that holds no code, time, signals of its own, the end.
const OWN: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_pread64,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_lseek,
    libc::SYS_fcntl,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_ppoll,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Spellings of the same that only x86-64 has.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// The store: SQLite's writes, the key file that is replaced, memory for keys.
const STORE: &[i64] = &[
    libc::SYS_pwrite64,
    libc::SYS_openat2,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fchmod,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_memfd_secret,
    libc::SYS_mlock,
    libc::SYS_munlock,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_renameat,
    // Not named by libc there.
    #[cfg(target_arch = "aarch64")]
    38,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
];

/// Connections outwards, and the runtime that waits for them. No sendmsg and no recvmsg: no
/// descriptor is passed or taken.
const NETWORK: &[i64] = &[
    libc::SYS_connect,
    // Questions to name servers leave from a port of their own.
    libc::SYS_bind,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    // The beginning of a thread.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

/// What neither program nor library of theirs asks for: other programs, other processes' memory
/// and descriptors, namespaces and mounts, the kernel's own machinery.
pub const ATTACKS: &[i64] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_bpf,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_userfaultfd,
    libc::SYS_perf_event_open,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Another program in this one's place.
const PROGRAMS: &[i64] = &[libc::SYS_execve, libc::SYS_execveat];

/// The vault child: its store, its sockets, one thread.
pub fn vault() -> Job<'static> {
    Job {
        fatal: vec![ATTACKS, PROGRAMS],
        unknown: vec![PROBED],
        allowed: vec![OWN, STORE],
        allowed_when: own_when(),
        otherwise: libc::EPERM,
        ..Job::default()
    }
}

/// The worker that opens connections: TCP and UDP over IP, and threads of its own.
pub fn network() -> Job<'static> {
    let mut allowed_when = own_when();
    for family in [libc::AF_INET, libc::AF_INET6] {
        for (kind, protocol) in [
            (libc::SOCK_STREAM, 0),
            (libc::SOCK_STREAM, libc::IPPROTO_TCP),
            (libc::SOCK_DGRAM, 0),
            (libc::SOCK_DGRAM, libc::IPPROTO_UDP),
        ] {
            let how = (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK).cast_unsigned();
            let arguments = [
                Argument::Is(0, family.cast_unsigned()),
                Argument::Masked(1, !how, kind.cast_unsigned()),
                Argument::Is(2, protocol.cast_unsigned()),
            ];
            allowed_when.push(when(libc::SYS_socket, arguments));
        }
    }
    let thread = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND).cast_unsigned();
    let arguments = [Argument::Masked(0, thread | NAMESPACES, thread)];
    allowed_when.push(when(libc::SYS_clone, arguments));
    // The name of a thread; what it may have.
    allowed_when.push(when(libc::SYS_prctl, [Argument::Is(0, PR_SET_NAME)]));
    allowed_when.push(when(libc::SYS_prlimit64, [Argument::Null(2)]));
    allowed_when.push(when(libc::SYS_ioctl, [Argument::Is(1, FIONBIO)]));
    Job {
        fatal: vec![ATTACKS, PROGRAMS],
        unknown: vec![PROBED],
        allowed: vec![OWN, NETWORK],
        allowed_when,
        otherwise: libc::EPERM,
        ..Job::default()
    }
}

/// linux/prctl.h
const PR_SET_NAME: u32 = 15;
/// asm-generic/ioctls.h
const FIONBIO: u32 = 0x5421;

/// Memory that is never code; signals to itself, as abort(3) sends them.
fn own_when() -> Vec<When> {
    let code = libc::PROT_EXEC.cast_unsigned();
    vec![
        when(libc::SYS_mmap, [Argument::Masked(2, code, 0)]),
        when(libc::SYS_mprotect, [Argument::Masked(2, code, 0)]),
        when(libc::SYS_tgkill, [Argument::Is(0, std::process::id())]),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::filter::trial::{End, apart, call};
    use super::*;

    /// Made in the process that it is for: some of it is about that very process.
    const JOBS: [fn() -> Job<'static>; 2] = [vault, network];

    fn under(job: fn() -> Job<'static>, number: i64, arguments: [u64; 6]) -> End {
        apart(|| match job().load() {
            Ok(()) => call(number, arguments),
            Err(_) => 255,
        })
    }

    fn socket(family: i32, kind: i32, protocol: i32) -> (i64, [u64; 6]) {
        let of = |number: i32| u64::from(number.cast_unsigned());
        (libc::SYS_socket, [of(family), of(kind), of(protocol), 0, 0, 0])
    }

    #[test]
    fn what_only_an_attack_asks_for_ends_the_vault_and_the_network_worker() {
        for number in [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_pidfd_getfd,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_mount,
            libc::SYS_fsopen,
            libc::SYS_open_by_handle_at,
            libc::SYS_bpf,
            libc::SYS_keyctl,
            libc::SYS_userfaultfd,
            libc::SYS_perf_event_open,
            libc::SYS_init_module,
            libc::SYS_kexec_load,
        ] {
            for job in JOBS {
                assert_eq!(under(job, number, [0; 6]), End::Signal(libc::SIGSYS), "{number}");
            }
        }
    }

    #[test]
    fn what_is_not_for_their_work_fails_and_what_libraries_try_is_unknown() {
        let [pages, code, private] = [4096, 7, 0x22];
        let none = [0; 6];
        for (number, arguments, errno) in [
            (libc::SYS_memfd_create, none, libc::EPERM),
            (libc::SYS_mmap, [0, pages, code, private, u64::MAX, 0], libc::EPERM),
            (libc::SYS_mprotect, [0, pages, 4, 0, 0, 0], libc::EPERM),
            (libc::SYS_kill, none, libc::EPERM),
            (libc::SYS_tkill, none, libc::EPERM),
            (libc::SYS_tgkill, [1, 1, 0, 0, 0, 0], libc::EPERM),
            (libc::SYS_pidfd_open, none, libc::EPERM),
            (libc::SYS_listen, none, libc::EPERM),
            (libc::SYS_accept4, none, libc::EPERM),
            (libc::SYS_socketpair, none, libc::EPERM),
            (libc::SYS_sendmsg, none, libc::EPERM),
            (libc::SYS_recvmsg, none, libc::EPERM),
            (libc::SYS_sendfile, none, libc::EPERM),
            (libc::SYS_seccomp, none, libc::EPERM),
            // PR_SET_DUMPABLE, PR_SET_PTRACER.
            (libc::SYS_prctl, [4, 1, 0, 0, 0, 0], libc::EPERM),
            (libc::SYS_prctl, [0x5961_6d61, 1, 0, 0, 0, 0], libc::EPERM),
            (libc::SYS_prlimit64, [0, 4, 8, 0, 0, 0], libc::EPERM),
            // TIOCSTI
            (libc::SYS_ioctl, [0, 0x5412, 0, 0, 0, 0], libc::EPERM),
            (libc::SYS_clone, [17, 0, 0, 0, 0, 0], libc::EPERM),
            (libc::SYS_clone3, none, libc::ENOSYS),
            (libc::SYS_io_uring_setup, none, libc::ENOSYS),
        ] {
            for job in JOBS {
                let end = under(job, number, arguments);
                assert_eq!(end, End::Code(errno), "{number} {arguments:?}");
            }
        }
    }

    #[test]
    fn the_network_worker_makes_sockets_of_tcp_and_udp_and_the_vault_none() {
        let with = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        for (family, kind, protocol) in [
            (libc::AF_INET, libc::SOCK_STREAM | with, 0),
            (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_TCP),
            (libc::AF_INET, libc::SOCK_DGRAM | with, libc::IPPROTO_UDP),
            (libc::AF_INET, libc::SOCK_DGRAM, 0),
        ] {
            let (number, arguments) = socket(family, kind, protocol);
            assert_eq!(under(network, number, arguments), End::Code(0), "{arguments:?}");
            assert_eq!(under(vault, number, arguments), End::Code(libc::EPERM));
        }
        const MPTCP: i32 = 262;
        for (family, kind, protocol) in [
            (libc::AF_UNIX, libc::SOCK_STREAM | with, 0),
            (libc::AF_UNIX, libc::SOCK_DGRAM, 0),
            (libc::AF_NETLINK, libc::SOCK_RAW, 0),
            (libc::AF_PACKET, libc::SOCK_RAW, 3),
            (libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
            (libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP),
            (libc::AF_INET6, libc::SOCK_SEQPACKET, 0),
            (libc::AF_INET, libc::SOCK_STREAM, MPTCP),
            (libc::AF_VSOCK, libc::SOCK_STREAM, 0),
            (libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
        ] {
            let (number, arguments) = socket(family, kind, protocol);
            for job in JOBS {
                let end = under(job, number, arguments);
                assert_eq!(end, End::Code(libc::EPERM), "{arguments:?}");
            }
        }
    }

    #[test]
    fn an_abort_still_ends_them_by_its_own_signal() {
        for job in JOBS {
            let end = apart(|| match job().load() {
                Ok(()) => std::process::abort(),
                Err(_) => 255,
            });
            assert_eq!(end, End::Signal(libc::SIGABRT));
        }
    }
}
