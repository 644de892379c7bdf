//! Files of memory that carry what is too long for a message (memfd_create(2)).

use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::MemfdFlags;

/// An empty one.
pub fn empty() -> Result<OwnedFd> {
    Ok(rustix::fs::memfd_create("cleanhands", MemfdFlags::CLOEXEC)?)
}

/// One that holds `bytes`.
pub fn holding(bytes: &[u8]) -> Result<OwnedFd> {
    let file = empty()?;
    fill(&file, bytes)?;
    Ok(file)
}

/// Writes `bytes` from the beginning.
pub fn fill(file: impl AsFd, bytes: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        done += rustix::io::retry_on_intr(|| {
            rustix::io::pwrite(file.as_fd(), &bytes[done..], done as u64)
        })?;
    }
    Ok(())
}

/// The whole content, which must not be longer than `bytes_max`.
pub fn read(file: impl AsFd, bytes_max: usize) -> Result<Vec<u8>> {
    let length = usize::try_from(rustix::fs::fstat(file.as_fd())?.st_size).map_err(Error::other)?;
    if length > bytes_max {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("longer than {bytes_max} bytes")));
    }
    let mut bytes = vec![0u8; length];
    let mut done = 0;
    while done < length {
        let read = rustix::io::retry_on_intr(|| {
            rustix::io::pread(file.as_fd(), &mut bytes[done..], done as u64)
        })?;
        if read == 0 {
            break;
        }
        done += read;
    }
    bytes.truncate(done);
    Ok(bytes)
}
