//! What one process has to itself, and who has it when somebody else does.
//!
//! The lock is flock(2)'s: the kernel drops it with the process, however that dies, and says whose
//! it is in /proc/locks.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, fstat, major, minor};
use rustix::io::Errno;

/// How much of a command's arguments is shown: more than enough to know it by.
const COMMAND_CHARS_MAX: usize = 160;

/// Why something could not be held.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    #[error(
        "{} is in use by {holder}\nend that first, or give this one a --state-dir of its own",
        place.display()
    )]
    InUse { place: PathBuf, holder: Holder },
    #[error("{} cannot be locked: {source}", place.display())]
    Failed { place: PathBuf, source: std::io::Error },
}

/// The process that has something, where the kernel says which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder(Option<i32>);

impl Holder {
    pub(super) fn of(pid: Option<i32>) -> Self {
        // 0 stands for a process that cannot be seen from here.
        Self(pid.filter(|pid| *pid > 0))
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(pid) = self.0 else {
            return f.write_str("a process that cannot be seen from here");
        };
        let read = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        match command(&read) {
            words if words.is_empty() => write!(f, "process {pid}"),
            words => write!(f, "process {pid} ({words})"),
        }
    }
}

/// A command's arguments as one line.
fn command(arguments: &[u8]) -> String {
    let text = String::from_utf8_lossy(arguments);
    let words: Vec<&str> = text.split('\0').filter(|word| !word.is_empty()).collect();
    let words = words.join(" ");
    let plain = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut shown: String = words.chars().take(COMMAND_CHARS_MAX).map(plain).collect();
    if words.chars().count() > COMMAND_CHARS_MAX {
        shown.push('\u{2026}');
    }
    shown
}

/// A file or directory that this process has to itself until this is dropped.
#[derive(Debug)]
pub struct Held(File);

impl Held {
    /// Makes what was created in a held directory findable after a loss of power.
    pub fn sync(&self) -> std::io::Result<()> {
        self.0.sync_all()
    }

    /// The same directory for another thread to sync. It is held until that is closed as well.
    pub fn to_sync(&self) -> std::io::Result<File> {
        self.0.try_clone()
    }
}

/// Takes a file or directory for this process alone, or says at once who has it.
pub fn hold(place: &Path) -> Result<Held, HoldError> {
    let failed = |source| HoldError::Failed { place: place.to_owned(), source };
    let file = File::open(place).map_err(failed)?;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Held(file)),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(HoldError::InUse { place: place.to_owned(), holder: holder(&file) });
            }
            Err(error) => return Err(failed(error.into())),
        }
    }
}

fn holder(file: impl AsFd) -> Holder {
    let found = fstat(file).ok().and_then(|stat| {
        let locks = std::fs::read_to_string(Path::new("/proc/locks")).ok()?;
        let device = (major(stat.st_dev), minor(stat.st_dev));
        named(&locks, &format!("{:02x}:{:02x}:{}", device.0, device.1, stat.st_ino))
    });
    Holder::of(found)
}

/// The process in the line of that file, of those like
/// `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`.
fn named(locks: &str, file: &str) -> Option<i32> {
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, of, ..] = words[..] else { return None };
        pid.parse().ok().filter(|pid| of == file && *pid > 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_comes_second_is_told_at_once_which_process_has_which_place() {
        let dir = tempfile::tempdir().unwrap();

        let first = hold(dir.path()).unwrap();
        let refused = hold(dir.path()).unwrap_err().to_string();
        drop(first);

        let (place, own) = (dir.path().display(), std::process::id());
        let expected = format!("{place} is in use by process {own} (");
        assert!(refused.starts_with(&expected), "{refused}");
        let program = std::env::args().next().unwrap();
        assert!(refused.contains(&program[program.len() - 20..]), "{refused}");
        assert!(refused.ends_with("--state-dir of its own"), "{refused}");
        hold(dir.path()).unwrap();
    }

    #[test]
    fn a_command_is_one_short_line_whatever_stands_in_its_arguments() {
        assert_eq!(command(b"proxyd\0--state-dir\0/x\0"), "proxyd --state-dir /x");
        assert_eq!(command(b"a\x1b[2J\nb\0"), "a\u{fffd}[2J\u{fffd}b");
        assert_eq!(command(&[b'x'; 5000]).chars().count(), COMMAND_CHARS_MAX + 1);
        assert_eq!(command(b""), "");
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
