//! Completes a layer that a build cell has filled: what was made only so that it could be written
//! into goes, what is left is counted.
//!
//! Runs inside a cell of its own, after the build's, which holds the layer at its workspace and the
//! same root: the layer is what commands of others made, and no overlay is mounted over it now.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::place::{names_in, remove_tree};

/// Below a layer's directory: its files, and what the kernel keeps beside them meanwhile.
pub const UPPER: &str = "upper";
pub const WORK: &str = "work";
/// Marks a directory that hides what lower layers have there (overlayfs with `userxattr`).
const OPAQUE: &str = "user.overlay.opaque";
/// Deeper trees than this are not packages.
const DEPTH_MAX: usize = 256;

/// What a layer holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    pub entries: u64,
    pub bytes: u64,
}

/// Completes the layer in `directory`, which was made over the programs of `root`.
pub fn seal(directory: &Path, root: &Path) -> io::Result<Sealed> {
    let top = open(CWD, directory.as_os_str())?;
    match open(&top, OsStr::new(WORK)) {
        Ok(work) => {
            // The kernel's own directory in there has no rights at all.
            for name in names_in(&work)? {
                let inner = open(&work, &name)?;
                for below in names_in(&inner)? {
                    rustix::fs::chmodat(&inner, &below, Mode::RWXU, AtFlags::empty())?;
                }
            }
            remove_tree(&top, OsStr::new(WORK), 0)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let upper = open(&top, OsStr::new(UPPER))?;
    let mut sealed = Sealed::default();
    for name in names_in(&upper)? {
        let lower = open(CWD, root.join(&name).as_os_str()).ok();
        let inner = open(&upper, &name)?;
        walk(&inner, lower.as_ref(), &mut sealed, 0)?;
    }
    Ok(sealed)
}

/// Whether nothing is left in `directory`, which lies over `lower`.
fn walk(
    directory: &OwnedFd,
    lower: Option<&OwnedFd>,
    sealed: &mut Sealed,
    depth: usize,
) -> io::Result<bool> {
    if depth > DEPTH_MAX {
        return Err(io::Error::other("its directories are too deep"));
    }
    let mut empty = true;
    for name in names_in(directory)? {
        let stat = rustix::fs::statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            sealed.entries += 1;
            sealed.bytes += stat.st_blocks.cast_unsigned() * 512;
            empty = false;
            continue;
        }
        let inner = open(directory, &name)?;
        let below = lower.and_then(|lower| open(lower, &name).ok());
        let nothing = walk(&inner, below.as_ref(), sealed, depth + 1)?;
        if nothing && below.is_some() && !is_opaque(&inner)? {
            rustix::fs::unlinkat(directory, &name, AtFlags::REMOVEDIR)?;
        } else {
            sealed.entries += 1;
            empty = false;
        }
    }
    Ok(empty)
}

fn open(at: impl std::os::fd::AsFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, name, flags, Mode::empty())?)
}

fn is_opaque(directory: &OwnedFd) -> io::Result<bool> {
    let mut value = [0u8; 8];
    match rustix::fs::fgetxattr(directory, OPAQUE, &mut value) {
        Ok(_) | Err(Errno::RANGE) => Ok(true),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::XattrFlags;

    use super::*;

    fn make(top: &Path, directories: &[&str]) {
        for name in directories {
            std::fs::create_dir_all(top.join(name)).unwrap();
        }
    }

    #[test]
    fn only_what_was_made_to_be_written_into_goes() {
        let dir = tempfile::tempdir().unwrap();
        let (layer, root) = (dir.path().join("layer"), dir.path().join("root"));
        make(&root, &["usr/local/bin", "usr/local/lib/a", "usr/share"]);
        make(&layer, &["upper/usr/local/bin", "upper/usr/local/lib/a", "upper/usr/share"]);
        make(&layer, &["upper/opt/empty", "upper/usr/local/new", "work/usr/work"]);
        std::fs::write(layer.join("upper/usr/local/bin/tool"), "x").unwrap();
        let opaque = open(CWD, layer.join("upper/usr/share").as_os_str()).unwrap();
        rustix::fs::fsetxattr(&opaque, OPAQUE, b"y", XattrFlags::empty()).unwrap();

        let sealed = seal(&layer, &root).unwrap();

        let there = |name: &str| layer.join(name).exists();
        assert!(there("upper/usr/local/bin/tool") && there("upper/opt/empty"));
        assert!(there("upper/usr/local/new"), "commands made it");
        assert!(there("upper/usr/share"), "it hides what the root has");
        assert!(!there("upper/usr/local/lib") && !there("work"));
        assert!(sealed.entries >= 4 && sealed.bytes > 0, "{sealed:?}");
    }

    #[test]
    fn a_name_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (layer, outside) = (dir.path().join("layer"), dir.path().join("outside"));
        make(&layer, &["upper/usr"]);
        make(&outside, &["kept"]);
        std::os::unix::fs::symlink(&outside, layer.join("work")).unwrap();

        let outcome = seal(&layer, Path::new("/"));

        assert!(outcome.is_err());
        assert!(outside.join("kept").exists());
    }
}
