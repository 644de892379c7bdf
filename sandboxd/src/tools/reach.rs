//! Opens the paths that a model names, and no others: only what lies below the session's roots.
//!
//! The kernel does the confining (openat2(2), `RESOLVE_BENEATH`), so a symbolic link, a `..` or a
//! directory swapped between look and use leads nowhere else. A link that leaves a root and comes
//! back into one, such as an absolute link within the workspace, is resolved first and then opened
//! without following anything. This is a guardrail for the model; what confines the sandbox's
//! own commands is the sandbox.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// How often an open that lost a race with a rename is tried again (openat2(2), `EAGAIN`).
const TRIES_MAX: u32 = 64;

/// Why a path is not opened.
#[derive(Debug, PartialEq, Eq)]
pub enum ReachError {
    /// It, or what it leads to, is below no root.
    Outside,
    Os(Errno),
}

impl From<Errno> for ReachError {
    fn from(errno: Errno) -> Self {
        Self::Os(errno)
    }
}

impl ReachError {
    /// The reason as the model reads it, for a path as the model gave it.
    pub fn text(&self, path: &str) -> String {
        match self {
            Self::Outside => format!("path '{path}' is outside the session's working directory"),
            Self::Os(errno) => format!("{path}: {}", reason(*errno)),
        }
    }
}

/// What an error number means, in words.
pub fn reason(errno: Errno) -> String {
    let text = match errno {
        Errno::NOENT => "no such file or directory",
        Errno::ACCESS => "permission denied",
        Errno::PERM => "operation not permitted",
        Errno::ISDIR => "is a directory",
        Errno::NOTDIR => "a part of the path is not a directory",
        Errno::NOSPC => "no space left",
        Errno::DQUOT => "disk quota exceeded",
        Errno::FBIG => "the file would be larger than the limit",
        Errno::ROFS => "read-only file system",
        Errno::LOOP => "too many symbolic links",
        Errno::NAMETOOLONG => "the name is too long",
        Errno::NXIO => "not a regular file",
        other => return std::io::Error::from(other).to_string(),
    };
    text.to_owned()
}

/// The roots below which paths may be opened; relative paths start at the first.
#[derive(Clone, Copy, Debug)]
pub struct Reach<'a>(pub &'a [PathBuf]);

impl Reach<'_> {
    /// Opens what `path` names. Never waits for the other end of a FIFO.
    pub fn open(&self, path: &str, flags: OFlags) -> Result<OwnedFd, ReachError> {
        let wanted = self.absolute(path);
        let first = match self.split(&wanted) {
            Some((root, below)) => beneath(&directory(root)?, &below, flags, ResolveFlags::empty()),
            None => Err(Errno::XDEV),
        };
        match first {
            Err(Errno::XDEV) => self.open_resolved(&wanted, flags),
            other => Ok(other?),
        }
    }

    /// Opens a file for writing, making it and its missing parents.
    pub fn create(&self, path: &str) -> Result<OwnedFd, ReachError> {
        let wanted = self.absolute(path);
        match self.split(&wanted) {
            Some((root, below)) => match create_below(&directory(root)?, &below) {
                Err(Errno::XDEV) => self.create_resolved(&wanted),
                other => Ok(other?),
            },
            None => self.create_resolved(&wanted),
        }
    }

    fn absolute(&self, path: &str) -> PathBuf {
        let start = self.0.first().map_or(Path::new("/"), PathBuf::as_path);
        start.join(path)
    }

    /// The root that a path begins with, and the rest.
    fn split(&self, path: &Path) -> Option<(&Path, PathBuf)> {
        self.0.iter().find_map(|root| {
            let rest = path.strip_prefix(root).ok()?;
            let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
            Some((root.as_path(), rest.to_owned()))
        })
    }

    fn open_resolved(&self, wanted: &Path, flags: OFlags) -> Result<OwnedFd, ReachError> {
        let real = canonical(wanted)?;
        let (root, below) = self.split(&real).ok_or(ReachError::Outside)?;
        Ok(beneath(&directory(root)?, &below, flags, ResolveFlags::NO_SYMLINKS)?)
    }

    /// As [`Reach::create`], for a path whose existing part must be resolved first.
    fn create_resolved(&self, wanted: &Path) -> Result<OwnedFd, ReachError> {
        let mut rest: Vec<&OsStr> = Vec::new();
        let mut existing = wanted;
        let real = loop {
            match canonical(existing) {
                Ok(real) => break real,
                Err(ReachError::Os(Errno::NOENT)) => {}
                Err(error) => return Err(error),
            }
            // A `..` below something that does not exist leads nowhere that could be checked.
            let name = existing.file_name().ok_or(ReachError::Outside)?;
            rest.push(name);
            existing = existing.parent().ok_or(ReachError::Outside)?;
        };
        let full = rest.iter().rev().fold(real, |path, name| path.join(name));
        let (root, below) = self.split(&full).ok_or(ReachError::Outside)?;
        match create_below(&directory(root)?, &below) {
            Err(Errno::XDEV) => Err(ReachError::Outside),
            other => Ok(other?),
        }
    }
}

/// Where an open descriptor's file lies now (proc(5), `/proc/self/fd`).
pub fn place(fd: &OwnedFd) -> std::io::Result<PathBuf> {
    use std::os::fd::AsRawFd;
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Opens `path` below `root`: no way leads out, no magic link is followed.
pub fn beneath(
    root: impl AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | harmless(flags);
    let resolve = resolve | ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let mode =
        if flags.contains(OFlags::CREATE) { Mode::from_raw_mode(0o666) } else { Mode::empty() };
    for _ in 0..TRIES_MAX {
        match rustix::fs::openat2(&root, path, flags, mode, resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// Keeps an open from waiting or from taking a terminal; `O_PATH` does neither and takes no other
/// flag beside it (openat2(2), `EINVAL`).
fn harmless(flags: OFlags) -> OFlags {
    if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NONBLOCK | OFlags::NOCTTY }
}

fn directory(root: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(root, flags, Mode::empty())
}

fn canonical(path: &Path) -> Result<PathBuf, ReachError> {
    std::fs::canonicalize(path)
        .map_err(|e| ReachError::Os(Errno::from_io_error(&e).unwrap_or(Errno::IO)))
}

/// Opens a file for writing below `root`, making its missing parents one by one. Each step opens
/// the path so far from the root anew, so that none of them can have left it.
fn create_below(root: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE;
    match beneath(root, path, flags, ResolveFlags::empty()) {
        Err(Errno::NOENT) => {}
        other => return other,
    }
    let parent = path.parent().unwrap_or(Path::new(""));
    let mut so_far = PathBuf::new();
    for part in parent.components() {
        let walk = OFlags::PATH | OFlags::DIRECTORY;
        let next = so_far.join(part);
        match (beneath(root, &next, walk, ResolveFlags::empty()), part) {
            (Ok(_), _) => {}
            (Err(Errno::NOENT), Component::Normal(name)) => {
                let above = if so_far.as_os_str().is_empty() { Path::new(".") } else { &so_far };
                let above = beneath(root, above, walk, ResolveFlags::empty())?;
                match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error),
                }
            }
            (Err(error), _) => return Err(error),
        }
        so_far = next;
    }
    beneath(root, path, flags, ResolveFlags::empty())
}
