//! What multiprocessing libraries and terminals' programs need of the kernel.

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::checked;

/// What two processes share.
#[repr(C)]
struct Shared {
    ready: libc::sem_t,
    sum: i32,
}

/// A forked child adds the numbers up in memory of `/dev/shm` and says so with a semaphore there.
pub fn add_in_child(numbers: &[i32]) -> Result<i32> {
    let path = format!("/dev/shm/intruder-{}", std::process::id());
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path)?;
    file.set_len(size_of::<Shared>() as u64)?;
    std::fs::remove_file(path)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of a file that is long enough and that nobody else has.
    let mapped = unsafe {
        let length = size_of::<Shared>();
        let fd = file.as_raw_fd();
        libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, 0)
    };
    if mapped == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    let shared = mapped.cast::<Shared>();
    // SAFETY: the mapping is as long as a `Shared`, starts on a page, is zero, and is never
    // unmapped; the semaphore is made before the second process is.
    let child = unsafe {
        checked(libc::sem_init(&raw mut (*shared).ready, 1, 0))?;
        checked(libc::fork())?
    };
    if child == 0 {
        // SAFETY: only this process touches the sum until it has posted. This program's threads
        // have ended, so the child holds no lock that another one took.
        unsafe {
            (*shared).sum = numbers.iter().sum();
            libc::sem_post(&raw mut (*shared).ready);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: the semaphore is live; after it the child touches nothing; `status` is a number.
    unsafe {
        checked(libc::sem_wait(&raw mut (*shared).ready))?;
        checked(libc::waitpid(child, &raw mut status, 0))?;
        Ok((*shared).sum)
    }
}

/// Whether the other end of a new pseudoterminal is one.
pub fn terminal() -> Result<bool> {
    // SAFETY: makes a descriptor.
    let main = checked(unsafe { libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY) })?;
    // SAFETY: it is new, and this is its only owner.
    let main = unsafe { OwnedFd::from_raw_fd(main) };
    let mut name: [libc::c_char; 64] = [0; 64];
    // SAFETY: the descriptor is a terminal's; the name is live, of that length and ends with zero.
    let other = unsafe {
        checked(libc::grantpt(main.as_raw_fd()))?;
        checked(libc::unlockpt(main.as_raw_fd()))?;
        checked(-libc::ptsname_r(main.as_raw_fd(), name.as_mut_ptr(), name.len()))?;
        checked(libc::open(name.as_ptr(), libc::O_RDWR | libc::O_NOCTTY))?
    };
    // SAFETY: it is new, and this is its only owner.
    let other = unsafe { OwnedFd::from_raw_fd(other) };
    // SAFETY: the descriptor is open.
    Ok(unsafe { libc::isatty(other.as_raw_fd()) } == 1)
}
