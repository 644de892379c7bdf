//! Puts files into a living cell: CA bundles, which exist only after the lease was opened.
//!
//! A file of the root's own file system is replaced through a descriptor that only this process
//! holds, so there is no moment at which commands could write there. A file of a read-only mount
//! is covered by one.

use std::collections::HashMap;
use std::io::{Error, Result};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::root::{cover, mount_of};
use crate::sys::mount::{NO_DEV, NO_EXEC, NO_SUID, READ_ONLY};

/// Where the files lie that cover others.
const STORE: &str = ".installed";
/// What commands may write, or what is the kernel's: nothing is installed there.
const REFUSED: &[&str] = &["/workspace", "/tmp", "/home", "/dev", "/proc"];

/// The root's own file system, and what was put into it.
#[derive(Debug)]
pub struct Installer {
    private: OwnedFd,
    /// Covered path to the file that covers it.
    covers: HashMap<PathBuf, PathBuf>,
}

impl Installer {
    pub fn new(private: OwnedFd) -> Self {
        Self { private, covers: HashMap::new() }
    }

    pub fn install(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        let fail = |text: &str| Error::other(format!("{}: {text}", path.display()));
        if !path.is_absolute() || path.components().any(|c| c.as_os_str() == "..") {
            return Err(fail("must be absolute and without `..`"));
        }
        let target = match std::fs::canonicalize(path) {
            Ok(target) => target,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => self.absent(path)?,
            Err(error) => return Err(error),
        };
        if REFUSED.iter().any(|refused| target.starts_with(refused)) {
            return Err(fail("lies where commands may write"));
        }
        if let Some(file) = self.covers.get(&target) {
            return self.replace(file, bytes);
        }
        // A target that is not there yet will be made in the root, and so counts as the root's.
        let covered = target.exists() && mount_of(&target)? != mount_of(Path::new("/"))?;
        if !covered {
            return self.replace(target.strip_prefix("/").unwrap_or(&target), bytes);
        }
        let file = Path::new(STORE).join(self.covers.len().to_string());
        self.replace(&file, bytes)?;
        // The source lies on the root's mount, which is read-only, and so is every view of it.
        let source = Path::new("/").join(&file);
        cover(&source, &target, READ_ONLY | NO_SUID | NO_DEV | NO_EXEC)?;
        self.covers.insert(target, file);
        Ok(())
    }

    /// The path of a file that is not there: its directories are made in the root; in a read-only
    /// mount that fails.
    fn absent(&self, path: &Path) -> Result<PathBuf> {
        let parent = path.parent().unwrap_or(Path::new("/"));
        let mut made = PathBuf::from("/");
        for name in parent.components().skip(1) {
            made.push(name);
            if !made.exists() {
                let inside = made.strip_prefix("/").unwrap_or(&made);
                rustix::fs::mkdirat(&self.private, inside, Mode::from_raw_mode(0o755))?;
            }
        }
        let parent = std::fs::canonicalize(parent)?;
        Ok(parent.join(path.file_name().unwrap_or_default()))
    }

    /// Writes a file of the root's own file system in place: covers keep their inode.
    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&self.private, path, flags, Mode::from_raw_mode(0o444))?;
        let mut left = bytes;
        while !left.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::write(&file, left))?;
            left = &left[written..];
        }
        Ok(())
    }
}
