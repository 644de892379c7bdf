//! The one unsafe function of this crate: taking over descriptors that the starter passed.

#![allow(unsafe_code)]

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Takes ownership of inherited descriptor `raw` and marks it close-on-exec, so that no child of
/// this process ever sees it.
pub fn adopt(raw: RawFd) -> std::io::Result<OwnedFd> {
    // SAFETY: the number comes from systemd's protocol or from our own starter's argument, both of
    // which hand the descriptor over for good; the caller asks for each number once, at start, when
    // nothing else in the process owns a descriptor of that number. A number that is not open is
    // caught by the fcntl below, before anything relies on it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    match rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC) {
        Ok(()) => Ok(fd),
        Err(error) => {
            // The number was not open: dropping it would close somebody's later descriptor.
            std::mem::forget(fd);
            Err(error.into())
        }
    }
}
