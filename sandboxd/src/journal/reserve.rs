//! Room on the disk that is kept for receipts: a command that fills the disk must not cost its own.
//!
//! The commands' workspaces lie on the same file system as the journal. So no call begins unless a
//! file of some size is held there; it is given up when a receipt cannot be stored, and held again
//! before the next call.

use std::io::Result;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

/// Room for the receipts of the calls that run when the disk becomes full: each has some hundred
/// kilobytes at most, and a few of them are that long.
const RESERVE_BYTES: u64 = 1 << 20;

/// The file that is held.
#[derive(Clone, Debug)]
pub struct Reserve {
    path: PathBuf,
}

impl Reserve {
    pub fn new(directory: &Path) -> Self {
        Self { path: directory.join("reserve") }
    }

    /// Holds the room, if it is not held already.
    pub fn hold(&self) -> Result<()> {
        // Counted in blocks: a file's length says nothing of the room it has.
        if std::fs::metadata(&self.path).is_ok_and(|meta| meta.blocks() * 512 >= RESERVE_BYTES) {
            return Ok(());
        }
        let held = self.allocate();
        if held.is_err() {
            self.give_up();
        }
        held
    }

    fn allocate(&self) -> Result<()> {
        use std::io::Write;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::open(&self.path, flags, Mode::RUSR | Mode::WUSR)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES) {
            // A file system that cannot promise room has to be shown that it is used.
            Err(Errno::OPNOTSUPP) => {
                let bytes = vec![0xa5; RESERVE_BYTES as usize];
                Ok(std::fs::File::from(file).write_all(&bytes)?)
            }
            other => Ok(other?),
        }
    }

    /// Makes the room free.
    pub fn give_up(&self) {
        // Not there: then it was given up before.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_held_once_and_again_after_it_was_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let reserve = Reserve::new(dir.path());
        let held = || std::fs::metadata(dir.path().join("reserve")).map_or(0, |m| m.blocks() * 512);

        reserve.hold().unwrap();
        reserve.hold().unwrap();
        assert!(held() >= RESERVE_BYTES);
        reserve.give_up();
        assert_eq!(held(), 0);
        reserve.hold().unwrap();

        assert!(held() >= RESERVE_BYTES);
    }
}
