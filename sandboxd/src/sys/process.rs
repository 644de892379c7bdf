//! New processes: clone3(2) into new namespaces, fork(2), wait4(2), signal dispositions.
//!
//! Only the zygote and its descendants call these, and they have one thread each: so the child of
//! a fork may use the whole standard library, locks and allocator included.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::panic::AssertUnwindSafe;

use rustix::process::Pid;

/// Exit status of a child whose code panicked.
const PANICKED: i32 = 101;

/// Every kind of namespace a cell has of its own, made at once.
const NAMESPACES: libc::c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// linux/sched.h; the libc crate's constant is of too narrow a type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Which namespaces a clone gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// Those of a cell: all.
    All,
    /// A user namespace alone, whose mapping is wanted for an idmapped mount.
    User,
}

/// A child made by clone3.
#[derive(Debug)]
pub struct Cloned {
    pub pid: Pid,
    pub pidfd: OwnedFd,
}

/// Runs `body` in a child with namespaces of its own, in `cgroup` if given; what `body` returns is
/// its exit status.
pub fn clone_into(
    namespaces: Namespaces,
    cgroup: Option<BorrowedFd<'_>>,
    body: impl FnOnce() -> i32,
) -> std::io::Result<Cloned> {
    let mut pidfd: libc::c_int = -1;
    let spaces = match namespaces {
        Namespaces::All => NAMESPACES,
        Namespaces::User => libc::CLONE_NEWUSER,
    };
    // SAFETY: clone_args is plain integers, for which all bits zero means "not used".
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = u64::from((spaces | libc::CLONE_PIDFD).cast_unsigned());
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `args` is a valid clone_args of the size given, `pidfd` outlives the call, and no
    // stack is given, so the child goes on with a copy of this one, as after fork. This process
    // has one thread, so no lock is held by somebody who does not exist in the child.
    let pid =
        unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(std::io::Error::last_os_error()),
        0 => end(body),
        pid => {
            let pid =
                Pid::from_raw(pid as i32).expect("clone3 returned a process id to its caller");
            // SAFETY: the kernel stored a new descriptor here that nobody else knows.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Cloned { pid, pidfd })
        }
    }
}

/// Runs `body` in a child; what it returns is the exit status.
pub fn fork(body: impl FnOnce() -> i32) -> std::io::Result<Pid> {
    // SAFETY: this process has one thread, so the child may run any code.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => end(body),
        pid => Ok(Pid::from_raw(pid).expect("fork returned a process id to its caller")),
    }
}

/// Ends the child with what `body` returns. Neither a panic nor a destructor of the parent's
/// objects gets past this point.
fn end(body: impl FnOnce() -> i32) -> ! {
    let status = std::panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(PANICKED);
    // SAFETY: _exit has no preconditions; it runs no exit handlers of the parent's program.
    unsafe { libc::_exit(status) }
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub pid: Pid,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub maxrss_bytes: u64,
    pub cpu_us: u64,
}

/// What there is to reap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaped {
    Child(Ended),
    /// Children live, none has ended.
    NoneYet,
    /// There is no child at all.
    NoChildren,
}

/// Reaps one ended child, whichever it is, without waiting.
pub fn reap() -> std::io::Result<Reaped> {
    let mut status: libc::c_int = 0;
    // SAFETY: rusage is plain integers; wait4 fills it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live, properly sized values.
    let pid = unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage) };
    if pid == -1 {
        let error = std::io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ECHILD) => Ok(Reaped::NoChildren),
            _ => Err(error),
        };
    }
    let Some(pid) = Pid::from_raw(pid) else { return Ok(Reaped::NoneYet) };
    Ok(Reaped::Child(Ended {
        pid,
        code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
        signal: libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)),
        maxrss_bytes: usage.ru_maxrss.cast_unsigned() * 1024,
        cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
    }))
}

/// Processor time in microseconds of all children that were waited for, and of all that they had
/// waited for.
pub fn ended_children_us() -> u64 {
    // SAFETY: rusage is plain integers; getrusage fills it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live, properly sized value.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    micros(usage.ru_utime) + micros(usage.ru_stime)
}

/// The unit in which the kernel counts memory.
pub fn page_bytes() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

fn micros(time: libc::timeval) -> u64 {
    time.tv_sec.cast_unsigned() * 1_000_000 + time.tv_usec.cast_unsigned()
}

/// Lets the kernel reap this process's children: nobody will ask how they ended.
pub fn ignore_children() {
    // SAFETY: SIG_IGN installs no code; the disposition of SIGCHLD belongs to this process.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Gives every signal its default disposition and blocks none: what a program expects to be
/// started with (Rust's runtime ignores SIGPIPE, the zygote SIGCHLD).
pub fn default_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL installs no code. SIGKILL, SIGSTOP and the C library's own two refuse,
        // which changes nothing.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    block(&[]);
}

/// A descriptor that is readable when a child has ended.
pub type ChildEvents = nix::sys::signalfd::SignalFd;

/// Blocks SIGCHLD and returns a descriptor that is readable when one is pending.
pub fn child_events() -> std::io::Result<ChildEvents> {
    use nix::sys::signal::{SigSet, Signal};
    use nix::sys::signalfd::{SfdFlags, SignalFd};
    // SAFETY: SIG_DFL installs no code. Without it an ignored SIGCHLD would reap by itself.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    block(&[Signal::SIGCHLD]);
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    Ok(SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

fn block(signals: &[nix::sys::signal::Signal]) {
    use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
    let mask: SigSet = signals.iter().copied().collect();
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), None)
        .expect("a valid set and a valid `how` are never refused");
}

/// Gives freed memory back to the kernel. A process of a cell waits for most of its life, and a
/// thousand of them do; what the zygote holds, every cell would hold a copy of.
pub fn give_back_memory() {
    // SAFETY: it touches free memory of the allocator's only, under the allocator's own lock.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Replaces the command line that others read in `/proc/PID/cmdline`, and the name, by `title`: the
/// commands of a sandbox are not told how its first process was started. What is longer than the
/// command line was is cut.
pub fn set_title(title: &str) {
    let _ = nix::sys::prctl::set_name(&std::ffi::CString::new(title).unwrap_or_default());
    let Some((start, length)) = command_line() else { return };
    let shown = &title.as_bytes()[..title.len().min(length.saturating_sub(1))];
    // SAFETY: the kernel says that the arguments lie here, which the C library put nothing else
    // into; nothing reads them any more, since the arguments were parsed into owned strings.
    unsafe {
        std::ptr::write_bytes(start as *mut u8, 0, length);
        std::ptr::copy_nonoverlapping(shown.as_ptr(), start as *mut u8, shown.len());
    }
}

/// Where the arguments of this process lie: fields 48 and 49 of proc_pid_stat(5).
fn command_line() -> Option<(usize, usize)> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let mut after_name = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let start: usize = after_name.nth(45)?.parse().ok()?;
    let end: usize = after_name.next()?.parse().ok()?;
    (start != 0 && end > start).then(|| (start, end - start))
}

/// Executes `path`; returns only the error.
pub fn execute(
    path: &std::ffi::CStr,
    argv: &[std::ffi::CString],
    env: &[std::ffi::CString],
) -> std::io::Error {
    match nix::unistd::execve(path, argv, env) {
        Ok(never) => match never {},
        Err(errno) => errno.into(),
    }
}
