//! One thread connects; another changes the address, and the socket behind the descriptor's number,
//! at every moment.

use std::io::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// A `sockaddr_un` that a thread writes while the kernel reads it.
struct Address(*mut libc::sockaddr_un);

// SAFETY: every access is a volatile copy of the whole; what a torn one holds is the point.
unsafe impl Send for Address {}

fn address(path: &str) -> libc::sockaddr_un {
    // SAFETY: a sockaddr_un is numbers only, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (place, byte) in address.sun_path.iter_mut().zip(path.bytes()) {
        *place = byte as libc::c_char;
    }
    address
}

fn checked(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}

/// Connects `rounds` times to `own` or `other`, whichever is there when somebody looks. How many
/// connections there were.
pub fn connect_while_swapping(own: &str, other: &str, rounds: u32) -> Result<u32> {
    let addresses = [address(own), address(other)];
    let shared = Box::into_raw(Box::new(addresses[0]));
    let stop: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    // SAFETY: socket(2) takes three numbers.
    let number = checked(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) })?;
    let written = Address(shared);
    let thread = std::thread::spawn(move || {
        let written = written;
        for at in 0usize.. {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the address is never freed; dup2 and close take numbers of this program's,
            // and `number` is owned by nobody.
            unsafe {
                written.0.write_volatile(addresses[at % 2]);
                let family = if at % 3 == 0 { libc::AF_INET } else { libc::AF_UNIX };
                let made = libc::socket(family, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0);
                if made >= 0 {
                    libc::dup2(made, number);
                    libc::close(made);
                }
            }
        }
    });
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    let mut connected = 0;
    for _ in 0..rounds {
        // SAFETY: the address is never freed.
        let result = unsafe { libc::connect(number, shared.cast(), length) };
        connected += u32::from(result == 0);
    }
    stop.store(true, Ordering::Relaxed);
    thread.join().map_err(|_| Error::other("the thread that swaps failed"))?;
    Ok(connected)
}
