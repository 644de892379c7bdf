//! The table: every system call that a command may make.
//!
//! What is not here fails with EPERM: mounting, namespaces, modules, kexec, reboot, swap, quota,
//! accounting, keys, bpf, perf, userfaultfd, file handles, clocks, raw I/O ports. Calls that
//! libraries try and do without (clone3, io_uring) fail with ENOSYS, so that they fall back.
//! ptrace and process_vm_* are allowed: debuggers are wanted, and the pid namespace, Landlock and
//! the missing capabilities bound them to the sandbox's own processes.

use super::filter::{Node, Verdict};

#[cfg(target_arch = "x86_64")]
pub const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub const ARCHITECTURE: u32 = 0xc000_00b7;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("sandboxd has filter tables for x86_64 and aarch64 only");

/// The highest number that this table was written with knowledge of (Linux 6.18, `file_setattr`).
/// Higher ones are to a sandbox what they are to an older kernel.
pub const NUMBER_MAX: u32 = 469;

/// Flags of clone(2) that make namespaces (`CLONE_NEWTIME` shares its bit with the exit signal
/// and is refused by clone itself).
const NAMESPACE_FLAGS: u32 = 0x7e02_0000;
/// `CLONE_NEWTIME`, for unshare(2).
const NEWTIME_FLAG: u32 = 0x80;

/// `tty_ioctl(4)`: puts characters into a terminal's input, or replaces its driver.
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;
const TIOCSETD: u32 = 0x5423;

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
    let judged: Vec<(u32, Node)> = set_id_calls().collect();
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
/// beneath the workspace.
pub fn files() -> Vec<(u32, Node)> {
    let mut table: Vec<(u32, Node)> = ALLOWED
        .iter()
        .chain(ALLOWED_HERE)
        .map(|call| (number(*call), Node::Give(Verdict::Allow)))
        .collect();
    let absent = [
        libc::SYS_clone3,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
    ];
    table.extend(absent.map(|call| (number(call), fail(libc::ENOSYS))));
    table.push((number(libc::SYS_clone), no_bits(0, NAMESPACE_FLAGS)));
    table.push((number(libc::SYS_unshare), no_bits(0, NAMESPACE_FLAGS | NEWTIME_FLAG)));
    table.push((number(libc::SYS_ioctl), ioctl()));
    table.push((number(libc::SYS_socket), socket()));
    table.push((number(libc::SYS_socketpair), only(0, &[1], libc::EAFNOSUPPORT)));
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
        values: vec![TIOCSTI, TIOCLINUX, TIOCSETD],
        then: Box::new(fail(libc::EPERM)),
        otherwise: allow(),
    }
}

/// socket(domain, type, protocol): Unix; IPv4 and IPv6 but no raw or packet type and no protocol
/// besides TCP, UDP, ICMP echo and UDP-Lite (MPTCP, SCTP, SMC and DCCP reach code that nothing else
/// here guards); netlink for routes only, which listing interfaces needs.
fn socket() -> Node {
    const DOMAIN: u8 = 0;
    const KIND: u8 = 1;
    const PROTOCOL: u8 = 2;
    const KIND_MASK: u32 = 0xf;
    /// The old way to packet sockets, socket(2).
    const SOCK_PACKET: u32 = 10;
    let unix = libc::AF_UNIX as u32;
    let netlink = libc::AF_NETLINK as u32;
    let inet = vec![libc::AF_INET as u32, libc::AF_INET6 as u32];
    let raw = vec![libc::SOCK_RAW as u32, SOCK_PACKET];
    let protocols = only(PROTOCOL, &[0, 6, 17, 1, 58, 136], libc::EPROTONOSUPPORT);
    let by_kind = Node::If {
        argument: KIND,
        mask: KIND_MASK,
        values: raw,
        then: Box::new(fail(libc::EPERM)),
        otherwise: Box::new(protocols),
    };
    let other = Node::If {
        argument: DOMAIN,
        mask: u32::MAX,
        values: vec![netlink],
        then: Box::new(only(PROTOCOL, &[0], libc::EPROTONOSUPPORT)),
        otherwise: Box::new(only(DOMAIN, &[unix], libc::EAFNOSUPPORT)),
    };
    Node::If {
        argument: DOMAIN,
        mask: u32::MAX,
        values: inet,
        then: Box::new(by_kind),
        otherwise: Box::new(other),
    }
}

/// Allowed on both architectures.
const ALLOWED: &[i64] = &[
    // cachestat, fchmodat2, map_shadow_stack, futex_wake, futex_wait, futex_requeue: not named by
    // libc on both.
    451,
    452,
    453,
    454,
    455,
    456,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_chdir,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_flock,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_get_mempolicy,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getitimer,
    libc::SYS_getpeername,
    libc::SYS_getpgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_getxattr,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_kill,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_lgetxattr,
    libc::SYS_linkat,
    libc::SYS_listen,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_lremovexattr,
    libc::SYS_lseek,
    libc::SYS_lsetxattr,
    libc::SYS_madvise,
    libc::SYS_mbind,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mq_getsetattr,
    libc::SYS_mq_notify,
    libc::SYS_mq_open,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_timedsend,
    libc::SYS_mq_unlink,
    libc::SYS_mremap,
    libc::SYS_mseal,
    libc::SYS_msgctl,
    libc::SYS_msgget,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_pipe2,
    libc::SYS_pkey_alloc,
    libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect,
    libc::SYS_ppoll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_prlimit64,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pselect6,
    libc::SYS_ptrace,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readahead,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_removexattr,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_rr_get_interval,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield,
    libc::SYS_seccomp,
    libc::SYS_semctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_sendfile,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_mempolicy,
    libc::SYS_set_mempolicy_home_node,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setitimer,
    libc::SYS_setpgid,
    libc::SYS_setpriority,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setsid,
    libc::SYS_setsockopt,
    libc::SYS_setuid,
    libc::SYS_setxattr,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_shmget,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sync,
    libc::SYS_syncfs,
    libc::SYS_sysinfo,
    libc::SYS_tee,
    libc::SYS_tgkill,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime,
    libc::SYS_timer_settime,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    libc::SYS_times,
    libc::SYS_tkill,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_vmsplice,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_newfstatat,
];

#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[i64] = &[
    libc::SYS_getrlimit,
    libc::SYS_renameat,
    libc::SYS_setrlimit,
    libc::SYS_sync_file_range,
    libc::SYS_access,
    libc::SYS_alarm,
    libc::SYS_arch_prctl,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_creat,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_fork,
    libc::SYS_futimesat,
    libc::SYS_getdents,
    libc::SYS_getpgrp,
    libc::SYS_inotify_init,
    libc::SYS_lchown,
    libc::SYS_link,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_mknod,
    libc::SYS_open,
    libc::SYS_pause,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_signalfd,
    libc::SYS_stat,
    libc::SYS_symlink,
    libc::SYS_time,
    libc::SYS_unlink,
    libc::SYS_ustat,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_vfork,
];

#[cfg(target_arch = "aarch64")]
const ALLOWED_HERE: &[i64] = &[
    // renameat, sync_file_range, getrlimit, setrlimit: not named by libc here.
    38, 84, 163, 164,
];
