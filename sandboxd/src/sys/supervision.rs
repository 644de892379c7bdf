//! System calls of others that wait for this process's answer: seccomp_unotify(2), and what is
//! needed to make such a call in another's place.
//!
//! A waiting call is never let go on by itself (`SECCOMP_USER_NOTIF_FLAG_CONTINUE`): what was
//! looked at, memory and descriptors alike, another thread may change before the kernel looks.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

// linux/seccomp.h
const RECEIVE: libc::c_ulong = 0xc050_2100;
const ANSWER: libc::c_ulong = 0xc018_2101;
const IS_WAITING: libc::c_ulong = 0x4008_2102;
const SET_FLAGS: libc::c_ulong = 0x4008_2104;
const SYNC_WAKE_UP: libc::c_ulong = 1;
/// linux/pidfd.h, since Linux 6.9: the thread itself, whose descriptors may be its own.
const PIDFD_THREAD: libc::c_uint = libc::O_EXCL as libc::c_uint;
/// linux/un.h: the file that a Unix socket is bound to. The kernel gives it to those alone who rule
/// the network namespace that the socket was made in (`CAP_NET_ADMIN`).
const SIOCUNIXFILE: libc::c_ulong = 0x89e0;
/// Longest address of any family, `sockaddr_storage`.
pub const ADDRESS_BYTES_MAX: usize = 128;

/// A call that waits.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub id: u64,
    pub thread: libc::pid_t,
    pub arguments: [u64; 6],
}

fn checked(result: libc::c_long) -> std::io::Result<libc::c_long> {
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(result: libc::c_long) -> std::io::Result<OwnedFd> {
    // SAFETY: whoever calls this just got the number as a new descriptor, or an error.
    checked(result).map(|fd| unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// Waits for a call.
pub fn receive(listener: BorrowedFd<'_>) -> std::io::Result<Call> {
    // SAFETY: the structure is plain integers, and the kernel wants them to be zero.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: RECEIVE fills a live seccomp_notif, whose size is part of its number.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call) };
    checked(result.into())?;
    let thread = call.pid.cast_signed();
    Ok(Call { id: call.id, thread, arguments: call.data.args })
}

/// Ends a call with success or an error number. One that waits no more needs none.
pub fn answer(listener: BorrowedFd<'_>, id: u64, errno: Option<i32>) {
    let mut answer = libc::seccomp_notif_resp { id, val: 0, error: -errno.unwrap_or(0), flags: 0 };
    // SAFETY: ANSWER reads a live seccomp_notif_resp, whose size is part of its number.
    unsafe { libc::ioctl(listener.as_raw_fd(), ANSWER, &raw mut answer) };
}

/// Whether a call still waits: whoever made it is alive, and its number nobody else's.
pub fn is_waiting(listener: BorrowedFd<'_>, id: u64) -> bool {
    // SAFETY: IS_WAITING reads a live number.
    unsafe { libc::ioctl(listener.as_raw_fd(), IS_WAITING, &raw const id) == 0 }
}

/// Has whoever waits run on the processor that its answer comes from, which is quicker; a kernel
/// before 6.6 does without.
pub fn wake_at_once(listener: BorrowedFd<'_>) {
    // SAFETY: SET_FLAGS takes a number.
    unsafe { libc::ioctl(listener.as_raw_fd(), SET_FLAGS, SYNC_WAKE_UP) };
}

/// A duplicate of another process's descriptor, by its number there. A kernel before 6.9 opens no
/// thread but a process's first: there it is the process's descriptor, which all but odd threads
/// share. Either way what is duplicated is what is looked at and connected.
pub fn duplicate(thread: libc::pid_t, number: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: both calls take numbers, whatever they are, and give new descriptors.
    let open = |pid: libc::pid_t, flags: libc::c_uint| unsafe {
        owned(libc::syscall(libc::SYS_pidfd_open, pid, flags))
    };
    let process = match open(thread, PIDFD_THREAD) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => open(process_of(thread)?, 0)?,
        opened => opened?,
    };
    // SAFETY: as above.
    unsafe { owned(libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0)) }
}

/// The process that a thread belongs to.
fn process_of(thread: libc::pid_t) -> std::io::Result<libc::pid_t> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    line.and_then(|number| number.trim().parse().ok())
        .ok_or_else(|| std::io::Error::from_raw_os_error(libc::ESRCH))
}

/// Copies another process's memory, all of `into`.
pub fn copy_memory(thread: libc::pid_t, from: u64, into: &mut [u8]) -> std::io::Result<()> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: from as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: `local` is live memory that nothing else refers to; `remote` the kernel checks.
    let copied =
        unsafe { libc::process_vm_readv(thread, &raw const local, 1, &raw const remote, 1, 0) };
    match checked(copied as libc::c_long)? {
        all if all as usize == into.len() => Ok(()),
        _ => Err(std::io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// connect(2) with an address as its caller wrote it.
pub fn connect(socket: BorrowedFd<'_>, address: &[u8]) -> std::io::Result<()> {
    let length = address.len() as libc::socklen_t;
    // SAFETY: the address is live memory of that length; the kernel checks what it means.
    let result = unsafe { libc::connect(socket.as_raw_fd(), address.as_ptr().cast(), length) };
    checked(result.into()).map(drop)
}

/// `SO_DOMAIN` of a socket.
pub fn domain(socket: BorrowedFd<'_>) -> std::io::Result<i32> {
    let mut domain: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_DOMAIN);
    let value = (&raw mut domain).cast();
    // SAFETY: both pointers are to live values, and the length is the value's.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value, &raw mut length) };
    checked(result.into()).map(|_| domain)
}

/// The file that a Unix socket of this network namespace is bound to; no other socket has one to
/// this process.
pub fn bound_file(socket: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    // SAFETY: SIOCUNIXFILE takes nothing and gives a new descriptor.
    owned(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE, 0) }.into())
}

/// Interrupts the calling thread's system calls again and again while it is armed.
pub struct Interruption(libc::timer_t);

/// The signal does nothing but interrupt.
extern "C" fn nothing(_: libc::c_int) {}

impl Interruption {
    /// For the calling thread, which must drop it.
    pub fn new() -> std::io::Result<Self> {
        let mut timer: libc::timer_t = std::ptr::null_mut();
        // SAFETY: `nothing` is safe in a signal handler; without SA_RESTART calls end with EINTR.
        // Both structures are plain integers for which zero is a value, and the pointers live.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = libc::SIGUSR1;
            event.sigev_notify_thread_id = libc::gettid();
            libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer)
        };
        checked(result.into()).map(|_| Self(timer))
    }

    /// Begins with `every`, ends with none.
    pub fn arm(&self, every: Duration) {
        let time = libc::timespec {
            tv_sec: every.as_secs() as libc::time_t,
            tv_nsec: every.subsec_nanos().into(),
        };
        let times = libc::itimerspec { it_interval: time, it_value: time };
        // SAFETY: the timer is this value's own, and `times` lives.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, std::ptr::null_mut()) };
    }
}

impl Drop for Interruption {
    fn drop(&mut self) {
        // SAFETY: the timer is this value's own.
        unsafe { libc::timer_delete(self.0) };
    }
}
