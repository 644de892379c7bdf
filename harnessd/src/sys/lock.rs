//! Open-file-description locks on single bytes of one file (fcntl(2), `F_OFD_SETLK`).
//!
//! They fall when the description is closed, thus with the process however it dies, and they hold
//! between two descriptions of one process as well. One file serves all sessions: a session's
//! number is its byte, so no lock files pile up.

use std::fs::File;
use std::path::Path;

use nix::fcntl::{FcntlArg, fcntl};

/// One locked byte; dropping it unlocks.
#[derive(Debug)]
pub struct RangeLock {
    /// Its description carries the lock.
    _file: File,
}

impl RangeLock {
    /// Locks byte `number` of `path`, or says `None` when somebody holds it.
    pub fn try_take(path: &Path, number: u64) -> std::io::Result<Option<Self>> {
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let start = libc::off_t::try_from(number).map_err(std::io::Error::other)?;
        let lock = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: start,
            l_len: 1,
            l_pid: 0,
        };
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => Ok(Some(Self { _file: file })),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_has_one_holder_and_is_free_when_it_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("owners.lock");

        let first = RangeLock::try_take(&path, 7).unwrap();
        let same = RangeLock::try_take(&path, 7).unwrap();
        let other = RangeLock::try_take(&path, 8).unwrap();
        drop(first);
        let again = RangeLock::try_take(&path, 7).unwrap();

        assert!(same.is_none(), "two holders of one byte");
        assert!(other.is_some());
        assert!(again.is_some());
    }
}
