//! What one process has to itself, and who has it when somebody else does.
//!
//! The lock is flock(2)'s: the kernel drops it with the process, however that dies, and says whose
//! it is in /proc/locks.

use std::fmt;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{FlockOperation, fstat, major, minor};
use rustix::io::Errno;

/// Why something could not be held.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    #[error("in use by {0}")]
    InUse(Holder),
    #[error("cannot be locked: {0}")]
    Failed(std::io::Error),
}

/// The process that holds it, where the kernel says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder(Option<i32>);

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("a process that cannot be seen from here"),
        }
    }
}

/// Locks an open file or directory until its last descriptor is closed, or says at once who has.
pub fn hold(file: impl AsFd) -> Result<(), HoldError> {
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => return Err(HoldError::InUse(holder(&file))),
            Err(error) => return Err(HoldError::Failed(error.into())),
        }
    }
}

fn holder(file: impl AsFd) -> Holder {
    let found = fstat(file).ok().and_then(|stat| {
        let locks = std::fs::read_to_string(Path::new("/proc/locks")).ok()?;
        let device = (major(stat.st_dev), minor(stat.st_dev));
        named(&locks, &format!("{:02x}:{:02x}:{}", device.0, device.1, stat.st_ino))
    });
    Holder(found)
}

/// The process in the line of that file, of those like
/// `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`.
fn named(locks: &str, file: &str) -> Option<i32> {
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, of, ..] = words[..] else { return None };
        // 0 stands for a process that cannot be seen from here.
        pid.parse().ok().filter(|pid| of == file && *pid > 0)
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn whoever_comes_second_is_told_at_once_which_process_was_first() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (File::open(dir.path()).unwrap(), File::open(dir.path()).unwrap());

        hold(&first).unwrap();
        let refused = hold(&second).unwrap_err();
        drop(first);

        let own = std::process::id();
        assert_eq!(refused.to_string(), format!("in use by process {own}"));
        hold(&second).unwrap();
    }

    #[test]
    fn locks_of_other_kinds_and_files_name_nobody() {
        let locks = "1: POSIX  ADVISORY  WRITE 1 fe:01:12 0 EOF\n\
            2: FLOCK  ADVISORY  WRITE 2 fe:01:123 0 EOF\n\
            2: -> FLOCK  ADVISORY  WRITE 3 fe:01:12 0 EOF\n\
            3: FLOCK  ADVISORY  WRITE 0 fe:01:12 0 EOF\n";
        assert_eq!(named(locks, "fe:01:12"), None);
        assert_eq!(named(locks, "fe:01:123"), Some(2));
    }
}
