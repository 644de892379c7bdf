//! The system calls that the standard library has no safe way for; nothing else here is unsafe.
#![allow(unsafe_code)]

pub mod apart;
pub mod attempts;
pub mod enter;
pub mod swap;
pub mod works;

use std::ffi::CString;
use std::io::{Error, Result};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The result of a call, as the C library gives it.
fn checked(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}

pub fn socket(family: i32, kind: i32, protocol: i32) -> std::result::Result<OwnedFd, i32> {
    // SAFETY: socket(2) takes three numbers, whatever they are.
    let made = checked(unsafe { libc::socket(family, kind, protocol) });
    // SAFETY: the descriptor is new, and this is its only owner.
    made.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
        .map_err(|error| error.raw_os_error().unwrap_or_default())
}

/// Connects a socket of the kind to a path, or to an abstract name that is written with `@`.
pub fn connect_unix(path: &str, kind: i32) -> Result<()> {
    let socket = socket(libc::AF_UNIX, kind, 0).map_err(Error::from_raw_os_error)?;
    // SAFETY: a sockaddr_un is numbers only, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if path.len() >= address.sun_path.len() {
        return Err(Error::other(format!("{path} is longer than an address can be")));
    }
    for (place, byte) in address.sun_path.iter_mut().zip(path.bytes()) {
        *place = byte as libc::c_char;
    }
    if path.starts_with('@') {
        address.sun_path[0] = 0;
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + path.len();
    let pointer = (&raw const address).cast::<libc::sockaddr>();
    // SAFETY: the pointer is to a live address of at least that length.
    checked(unsafe { libc::connect(socket.as_raw_fd(), pointer, length as libc::socklen_t) })
        .map(drop)
}

/// How many connections wait for a listener; the kernel lets one more.
pub fn set_backlog(listener: &impl AsRawFd, backlog: i32) -> Result<()> {
    // SAFETY: listen(2) takes two numbers, whatever they are.
    checked(unsafe { libc::listen(listener.as_raw_fd(), backlog) }).map(drop)
}

/// The user at the other end, as the kernel says.
pub fn peer_uid(stream: &impl AsRawFd) -> Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, name, value) = (libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast());
    // SAFETY: both pointers are to live values, and the length is the value's.
    checked(unsafe { libc::getsockopt(stream.as_raw_fd(), level, name, value, &raw mut length) })
        .map(|_| peer.uid)
}

pub fn reset_on_close(stream: &TcpStream) -> Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let length = size_of::<libc::linger>() as libc::socklen_t;
    let value = (&raw const linger).cast();
    // SAFETY: the value is a live `linger` of that length, as this option takes.
    checked(unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, length)
    })
    .map(drop)
}

pub fn signal(pid: i32, number: i32) -> Result<()> {
    // SAFETY: kill(2) takes two numbers, whatever they are.
    checked(unsafe { libc::kill(pid, number) }).map(drop)
}

pub fn process_group() -> i32 {
    // SAFETY: getpgrp(2) takes nothing and cannot fail.
    unsafe { libc::getpgrp() }
}

pub fn ignore_termination() {
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
}

pub fn new_session() -> Result<()> {
    // SAFETY: setsid(2) takes nothing.
    checked(unsafe { libc::setsid() }).map(drop)
}

unsafe extern "C" {
    /// gethostbyname(3), which old programs call.
    #[link_name = "gethostbyname"]
    fn host_by_name(name: *const libc::c_char) -> *const Host;
}

/// `struct hostent`.
#[repr(C)]
struct Host {
    name: *const libc::c_char,
    aliases: *const *const libc::c_char,
    family: libc::c_int,
    length: libc::c_int,
    addresses: *const *const u8,
}

pub fn gethostbyname(name: &str) -> Result<Ipv4Addr> {
    let name = CString::new(name)?;
    // SAFETY: the name is a live C string. The answer lies in memory of the library that stays
    // until the next such call, and this program has one thread.
    let host = unsafe { host_by_name(name.as_ptr()).as_ref() };
    let host = host.ok_or_else(|| Error::other("gethostbyname found nothing"))?;
    if (host.family, host.length) != (libc::AF_INET, 4) {
        return Err(Error::other("gethostbyname found another kind of address"));
    }
    // SAFETY: the list ends with a null pointer; one before it leads to `length` bytes.
    let first = unsafe { (*host.addresses).cast::<[u8; 4]>().as_ref() };
    first.map(|bytes| Ipv4Addr::from(*bytes)).ok_or_else(|| Error::other("no address"))
}
