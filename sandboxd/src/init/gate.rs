//! The connections of one command, made by its guard in its place.
//!
//! A Unix socket of the host that lies in a directory which the sandbox is shown must not be
//! connected to, and no filter can see the path. So each connect(2) of a command waits here: the
//! guard duplicates the socket, copies the address once, and connects the duplicate, which is the
//! command's own socket. For a path it opens the file first and goes on only where a process of the
//! sandbox has a socket that is bound to that very file and was made in the sandbox's network
//! namespace, as the kernel says. Nothing that was looked at is looked at again by anybody else.
//!
//! A connection may wait for its listener, so threads serve the calls, made with the first one; one
//! of them always listens. Each has two capabilities and no others. When this process ends, so
//! does whatever it held: then connect(2) fails.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::sys::supervision::{self, ADDRESS_BYTES_MAX, Call, Interruption};

/// Connections that may wait for their listeners at once; more than a program that waits in
/// earnest makes. One more fails with EAGAIN, as with a socket that does not wait.
const THREADS_MAX: usize = 256;
/// What a thread needs: no recursion, no large buffer.
const STACK_BYTES: usize = 128 * 1024;
/// How often a waiting connection looks whether its command still lives.
const LOOK: Duration = Duration::from_millis(200);
/// Files of the sandbox's own sockets that are remembered, each an open file.
const KNOWN_MAX: usize = 64;
/// Descriptors of the sandbox's processes that one search looks at: what two hundred programs have.
const LOOKED_AT_MAX: usize = 65_536;
/// Descriptors of a process that does not list them which are tried: the usual limit.
const UNLISTED_MAX: i32 = 1024;
/// Where the path begins in an address: after the family.
const PATH_AT: usize = 2;

/// The listener of a command's calls.
pub struct Gate {
    shared: Arc<Shared>,
    open: bool,
}

struct Shared {
    listener: OwnedFd,
    threads: AtomicUsize,
    listening: AtomicUsize,
    /// Files by device and inode. Each is held open, so that its number stays its own; a file that
    /// one socket was bound to never gets another.
    known: Mutex<HashMap<(u64, u64), OwnedFd>>,
}

impl Gate {
    pub fn new(listener: OwnedFd) -> Self {
        let shared = Shared {
            listener,
            threads: AtomicUsize::new(0),
            listening: AtomicUsize::new(0),
            known: Mutex::default(),
        };
        Self { shared: Arc::new(shared), open: false }
    }

    /// Readable when the first call waits; none when threads serve them.
    pub fn unopened(&self) -> Option<&OwnedFd> {
        (!self.open).then_some(&self.shared.listener)
    }

    /// Has threads serve the calls from now on; none: there will be no calls. Where there can be no
    /// thread for now, the call that waits fails and the next one tries again.
    pub fn open(self) -> Option<Self> {
        if has_hung_up(&self.shared.listener) {
            return None;
        }
        supervision::wake_at_once(self.shared.listener.as_fd());
        if add_thread(&self.shared).is_ok() {
            return Some(Self { open: true, ..self });
        }
        if let Ok(call) = supervision::receive(self.shared.listener.as_fd()) {
            supervision::answer(self.shared.listener.as_fd(), call.id, Some(libc::EAGAIN));
        }
        Some(self)
    }
}

/// Whether no process is left that the filter holds for.
fn has_hung_up(listener: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut ready = [PollFd::new(listener, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut ready, Some(&now)).is_ok() && ready[0].revents().contains(PollFlags::HUP)
}

fn add_thread(shared: &Arc<Shared>) -> std::io::Result<()> {
    if shared.threads.fetch_add(1, Ordering::SeqCst) >= THREADS_MAX {
        shared.threads.fetch_sub(1, Ordering::SeqCst);
        return Err(Errno::AGAIN.into());
    }
    shared.listening.fetch_add(1, Ordering::SeqCst);
    let its = shared.clone();
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    let made = thread.spawn(move || {
        serve(&its);
        its.listening.fetch_sub(1, Ordering::SeqCst);
        its.threads.fetch_sub(1, Ordering::SeqCst);
    });
    if made.is_err() {
        shared.listening.fetch_sub(1, Ordering::SeqCst);
        shared.threads.fetch_sub(1, Ordering::SeqCst);
    }
    made.map(drop)
}

/// What a thread needs: to duplicate descriptors of processes that cannot be traced, and to ask for
/// sockets' files. Without other capabilities, permissions count as they do for the command.
fn prepare_thread() -> std::io::Result<Interruption> {
    let needed = CapabilitySet::SYS_PTRACE | CapabilitySet::NET_ADMIN;
    let inheritable = CapabilitySet::empty();
    let sets = CapabilitySets { effective: needed, permitted: needed, inheritable };
    rustix::thread::set_capabilities(None, sets)?;
    Interruption::new()
}

/// Serves calls until none can come. A thread that lacks what it needs refuses them: nobody waits
/// for ever.
fn serve(shared: &Arc<Shared>) {
    let prepared = prepare_thread();
    let listener = shared.listener.as_fd();
    loop {
        let call = match supervision::receive(listener) {
            Ok(call) => call,
            Err(error) => match Errno::from_io_error(&error) {
                // Interrupted, or whoever called is gone.
                Some(Errno::INTR | Errno::NOENT) => continue,
                _ => return,
            },
        };
        shared.listening.fetch_sub(1, Ordering::SeqCst);
        let outcome = match &prepared {
            Ok(interruption) => make(shared, &call, interruption),
            Err(_) => Err(Errno::ACCESS),
        };
        // Listening again before the answer: the next call of the same program finds somebody.
        shared.listening.fetch_add(1, Ordering::SeqCst);
        supervision::answer(listener, call.id, outcome.err().map(Errno::raw_os_error));
    }
}

/// Makes one connect(2) in its caller's place.
fn make(shared: &Arc<Shared>, call: &Call, interruption: &Interruption) -> Result<(), Errno> {
    // The kernel takes an int, whatever the rest of the register holds.
    let [number, length] = [0, 2].map(|at: usize| call.arguments[at] as u32 as i32);
    let socket = supervision::duplicate(call.thread, number).map_err(refused)?;
    let length = usize::try_from(length).map_err(|_| Errno::INVAL)?;
    if length > ADDRESS_BYTES_MAX {
        return Err(Errno::INVAL);
    }
    let mut address = [0u8; ADDRESS_BYTES_MAX];
    let address = &mut address[..length];
    if length > 0 {
        let copied = supervision::copy_memory(call.thread, call.arguments[1], address);
        copied.map_err(refused)?;
    }
    let domain = supervision::domain(socket.as_fd()).map_err(refused)?;
    // Until here the numbers of the caller could have been another's since.
    if !supervision::is_waiting(shared.listener.as_fd(), call.id) {
        return Err(Errno::INTR);
    }
    let Some(path) = path_of(domain, address) else {
        return connect(shared, call, interruption, &socket, address);
    };
    let file = open(call.thread, path)?;
    admit(shared, &file)?;
    let address = address_of(&file);
    connect(shared, call, interruption, &socket, &address)
}

/// What a call of ours failed with, where the command's would not have: refused.
fn refused(error: std::io::Error) -> Errno {
    match Errno::from_io_error(&error) {
        Some(Errno::PERM) | None => Errno::ACCESS,
        Some(errno) => errno,
    }
}

/// The path that an address of a Unix socket names; none: an abstract name or nothing, of which the
/// network namespace has its own.
fn path_of(domain: i32, address: &[u8]) -> Option<&Path> {
    let family = address.get(..PATH_AT)?;
    let family = i32::from(u16::from_ne_bytes([family[0], family[1]]));
    let path = &address[PATH_AT..];
    let unix = domain == libc::AF_UNIX && family == libc::AF_UNIX;
    if !unix || path.first().is_none_or(|first| *first == 0) {
        return None;
    }
    let end = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
    Some(Path::new(OsStr::from_bytes(&path[..end])))
}

/// Opens the file that the path is to the thread, without any use of it.
fn open(thread: i32, path: &Path) -> Result<OwnedFd, Errno> {
    let of_thread = PathBuf::from(format!("/proc/{thread}"));
    let path = match path.strip_prefix("/proc/self").or(path.strip_prefix("/proc/thread-self")) {
        Ok(rest) => of_thread.join(rest),
        Err(_) => match path.strip_prefix("/dev/fd") {
            Ok(rest) => of_thread.join("fd").join(rest),
            Err(_) => path.to_owned(),
        },
    };
    let look = OFlags::PATH | OFlags::CLOEXEC;
    if path.is_absolute() {
        // The root of every process here is this one's: none may change it.
        return rustix::fs::openat(CWD, path, look, Mode::empty());
    }
    let flags = look | OFlags::DIRECTORY;
    let cwd = rustix::fs::openat(CWD, of_thread.join("cwd"), flags, Mode::empty())?;
    rustix::fs::openat(cwd, path, look, Mode::empty())
}

/// An address of the file itself, however it was called before.
fn address_of(file: &OwnedFd) -> Vec<u8> {
    let mut address = u16::try_from(libc::AF_UNIX).unwrap_or_default().to_ne_bytes().to_vec();
    address.extend(format!("/proc/self/fd/{}\0", file.as_raw_fd()).bytes());
    address
}

/// Passes the file of a socket that is the sandbox's own.
fn admit(shared: &Shared, file: &OwnedFd) -> Result<(), Errno> {
    let stat = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(Errno::CONNREFUSED);
    }
    let identity = (stat.st_dev, stat.st_ino);
    let known = || shared.known.lock().unwrap_or_else(PoisonError::into_inner);
    if known().contains_key(&identity) {
        return Ok(());
    }
    // What nobody listens on is told from what may not be used: programs remove the one and begin
    // anew.
    if !is_bound(file)? {
        return Err(Errno::CONNREFUSED);
    }
    let Some(found) = find(identity) else {
        // One of the sandbox's own that ended meanwhile is bound no more.
        return Err(if is_bound(file)? { Errno::ACCESS } else { Errno::CONNREFUSED });
    };
    let mut known = known();
    if known.len() >= KNOWN_MAX {
        known.clear();
    }
    known.insert(identity, found);
    Ok(())
}

/// Whether any socket of the host is bound to the file. A datagram socket's connection tells its
/// peer nothing, and one of another type is told from none.
fn is_bound(file: &OwnedFd) -> Result<bool, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    match supervision::connect(probe.as_fd(), &address_of(file)).map_err(refused) {
        Err(Errno::CONNREFUSED) => Ok(false),
        // The command may not write to it, whoever's it is.
        Err(Errno::ACCESS) => Err(Errno::ACCESS),
        _ => Ok(true),
    }
}

/// Searches the sandbox's processes for a socket that is bound to the file; gives that file, open.
fn find(identity: (u64, u64)) -> Option<OwnedFd> {
    let ours = std::process::id().cast_signed();
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let mut descriptors = numbers
        .filter(|process| *process != ours)
        .flat_map(|process| descriptors_of(process).into_iter().map(move |fd| (process, fd)))
        .take(LOOKED_AT_MAX);
    descriptors.find_map(|(process, number)| {
        let socket = supervision::duplicate(process, number).ok()?;
        if supervision::domain(socket.as_fd()).ok()? != libc::AF_UNIX {
            return None;
        }
        // The kernel refuses that for a socket of any other network namespace.
        let file = supervision::bound_file(socket.as_fd()).ok()?;
        let stat = rustix::fs::fstat(&file).ok()?;
        ((stat.st_dev, stat.st_ino) == identity).then_some(file)
    })
}

/// The descriptors of a process that may be sockets. Of one that nobody may trace (an agent that
/// keeps keys), nothing is listed.
fn descriptors_of(process: i32) -> Vec<i32> {
    let Ok(list) = std::fs::read_dir(format!("/proc/{process}/fd")) else {
        return (0..UNLISTED_MAX).collect();
    };
    let is_socket = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path())
            .is_ok_and(|to| to.as_os_str().as_bytes().starts_with(b"socket:"))
    };
    let sockets = list.flatten().filter(is_socket);
    sockets.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn connect(
    shared: &Arc<Shared>,
    call: &Call,
    interruption: &Interruption,
    socket: &OwnedFd,
    address: &[u8],
) -> Result<(), Errno> {
    let result = |socket: BorrowedFd<'_>| {
        supervision::connect(socket, address)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::ACCESS))
    };
    if rustix::fs::fcntl_getfl(socket)?.contains(OFlags::NONBLOCK) {
        return result(socket.as_fd());
    }
    // It may wait: somebody must listen meanwhile.
    if shared.listening.load(Ordering::SeqCst) == 0 && add_thread(shared).is_err() {
        return Err(Errno::AGAIN);
    }
    // The kernel begins this anew with each connect(2), so what is interrupted must count it.
    let limit = rustix::net::sockopt::socket_timeout(socket, Timeout::Send)?;
    let began = Instant::now();
    interruption.arm(LOOK);
    let outcome = loop {
        let is_over = || limit.is_some_and(|limit| began.elapsed() >= limit);
        match result(socket.as_fd()) {
            // As the kernel has it for a connection that goes on, and for one that does not.
            Err(Errno::INTR) if is_over() => match supervision::domain(socket.as_fd()) {
                Ok(libc::AF_UNIX) => break Err(Errno::AGAIN),
                _ => break Err(Errno::INPROGRESS),
            },
            Err(Errno::INTR) if supervision::is_waiting(shared.listener.as_fd(), call.id) => {}
            other => break other,
        }
    };
    interruption.arm(Duration::ZERO);
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_told_from_other_addresses_by_the_sockets_own_domain() {
        let address = |family: i32, rest: &[u8]| {
            [&u16::try_from(family).unwrap().to_ne_bytes(), rest].concat()
        };
        let unix = address(libc::AF_UNIX, b"/tmp/s\0rest");
        let abstract_name = address(libc::AF_UNIX, b"\0name");
        let other = address(libc::AF_INET, b"/tmp/s");

        assert_eq!(path_of(libc::AF_UNIX, &unix), Some(Path::new("/tmp/s")));
        assert_eq!(path_of(libc::AF_INET, &unix), None);
        assert_eq!(path_of(libc::AF_UNIX, &abstract_name), None);
        assert_eq!(path_of(libc::AF_UNIX, &other), None);
        assert_eq!(path_of(libc::AF_UNIX, &unix[..2]), None);
        assert_eq!(path_of(libc::AF_UNIX, &unix[..1]), None);
    }
}
