//! Whose the files of a cell's mounts are, where the cell has a uid of its own.
//!
//! With CAP_SYS_ADMIN each mount is idmapped: files stay their owner's on disk and are the cell's
//! inside, both ways, whoever they belong to. With CAP_CHOWN alone, sandboxd's own workspaces are
//! given to the cell's uid, file by file; a directory of somebody else's is refused.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

use super::ids::Mappings;
use super::message::Failure;
use crate::apart::Apart;
use crate::init;
use crate::plan::Mount;

/// How the cell comes to own its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owners {
    Mapped,
    Given,
}

impl Owners {
    /// What this process may do.
    pub fn detect() -> Self {
        let able =
            capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        if able { Self::Mapped } else { Self::Given }
    }

    /// Makes mounts the cell's; returns those that it has taken, by target.
    pub fn prepare(
        self,
        mounts: &[Mount],
        apart: &Apart,
        uid: u32,
        range: Option<(u32, u32)>,
        mappings: &mut Mappings,
    ) -> Result<Vec<(PathBuf, OwnedFd)>, Failure> {
        match self {
            Self::Mapped => mounts
                .iter()
                .map(|mount| Ok((mount.target.clone(), take_mapped(mount, apart, uid, mappings)?)))
                .collect(),
            Self::Given => {
                let ours = Ours { own: rustix::process::geteuid().as_raw(), range };
                for mount in mounts.iter().filter(|mount| !mount.read_only) {
                    give(mount, apart, uid, &ours)?;
                }
                Ok(Vec::new())
            }
        }
    }
}

fn take_mapped(
    mount: &Mount,
    apart: &Apart,
    uid: u32,
    mappings: &mut Mappings,
) -> Result<OwnedFd, Failure> {
    let tree = init::detach_checked(mount, apart).map_err(failed("take mounts", &mount.source))?;
    let owner = init::owner(&tree).map_err(failed("take mounts", &mount.source))?;
    let namespace = mappings.of(owner, uid).map_err(failed("owner map", &mount.source))?;
    init::map_owner(&tree, &namespace).map_err(failed("owner map", &mount.source))?;
    Ok(tree)
}

/// The uids that files of sandboxd's own workspaces can have.
struct Ours {
    own: u32,
    range: Option<(u32, u32)>,
}

impl Ours {
    fn has(&self, uid: u32) -> bool {
        let in_range = |(first, count)| uid >= first && uid - first < count;
        uid == self.own || self.range.is_some_and(in_range)
    }
}

fn give(mount: &Mount, apart: &Apart, uid: u32, ours: &Ours) -> Result<(), Failure> {
    let root = init::open_checked(mount, apart).map_err(failed("take mounts", &mount.source))?;
    let owner = init::owner(&root).map_err(failed("take mounts", &mount.source))?;
    if !ours.has(owner.0) {
        return Err(Failure {
            step: "owner map".to_owned(),
            errno: None,
            text: format!(
                "{} belongs to uid {}: mapping owners needs CAP_SYS_ADMIN",
                mount.source.display(),
                owner.0
            ),
        });
    }
    give_tree(&root, uid, ours).map_err(|error| failed("give files", &mount.source)(error.into()))
}

/// Gives every file below `root` that is sandboxd's or another cell's to `uid`. What lies there was
/// made by commands: no link is followed, and the depth is bounded by the length of a path.
fn give_tree(root: &OwnedFd, uid: u32, ours: &Ours) -> Result<(), Errno> {
    let mut waiting = vec![PathBuf::from(".")];
    while let Some(directory) = waiting.pop() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let opened = rustix::fs::openat2(root, &directory, flags, Mode::empty(), resolve)?;
        give_one(&opened, Path::new(""), uid, ours)?;
        for entry in Dir::read_from(&opened)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            use std::os::unix::ffi::OsStrExt;
            let name = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
            if give_one(&opened, name, uid, ours)? {
                waiting.push(directory.join(name));
            }
        }
    }
    Ok(())
}

/// One entry of a directory, or with an empty name the directory itself; whether it is one.
fn give_one(directory: &OwnedFd, name: &Path, uid: u32, ours: &Ours) -> Result<bool, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
    let stat = rustix::fs::statat(directory, name, flags)?;
    if stat.st_uid != uid && ours.has(stat.st_uid) {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
        rustix::fs::chownat(directory, name, Some(uid), Some(gid), flags)?;
    }
    Ok(rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

fn failed(step: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| {
        let errno = init::errno_of(&error);
        let text = error.to_string();
        let text = if text.contains(&path) { text } else { format!("{path}: {text}") };
        Failure { step: step.to_owned(), errno, text }
    }
}
