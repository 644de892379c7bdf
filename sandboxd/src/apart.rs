//! The directories that no sandbox may be shown: the daemons' own, and the host's that hold no
//! files of anybody's but its services and its kernel.
//!
//! A sandbox that could write its policy file, or read the vault's key beside it, would have no
//! policy; one with `/run` could ask the host's services. So a workspace, or a directory that a
//! policy names, is refused where it is one of these directories, lies in one, or holds one, by
//! whatever path it was named: directories are compared by device and inode all the way up.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The host's own, on every host.
const HOST: [(&str, &str); 4] = [
    ("/run", "where the host's services have their sockets"),
    ("/dev", "the host's devices"),
    ("/proc", "the host's processes"),
    ("/sys", "the host's kernel"),
];
const DAEMONS: &str = "which belongs to the daemons";

/// The directories of this installation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Apart(Vec<PathBuf>);

impl Apart {
    /// Absolute paths; one that does not exist yet counts through the parents it has.
    pub fn new(directories: Vec<PathBuf>) -> Self {
        Self(directories)
    }

    /// Why the directory with this device and inode, opened by a path without links, is not clear
    /// of them.
    pub fn conflict(&self, path: &Path, identity: (u64, u64)) -> Option<String> {
        let mut ways = vec![identity];
        ways.extend(path.parent().map(ways_up).unwrap_or_default());
        self.conflict_of(path, &ways)
    }

    /// Why something mounted below a directory must not be shown with it: it is one of them, or
    /// holds one, at another place.
    pub fn shown_by(&self, identity: (u64, u64)) -> Option<String> {
        let (shown, what) = self.all().find(|(kept, _)| ways_up(kept).contains(&identity))?;
        Some(format!("it shows {}, {what}", shown.display()))
    }

    /// Each with what it is.
    fn all(&self) -> impl Iterator<Item = (&Path, &'static str)> {
        let own = self.0.iter().map(|path| (path.as_path(), DAEMONS));
        own.chain(HOST.iter().map(|&(path, what)| (Path::new(path), what)))
    }

    fn conflict_of(&self, path: &Path, ways: &[(u64, u64)]) -> Option<String> {
        let real_path = real(path);
        self.all().find_map(|(kept, what)| {
            let (above, real_kept) = (ways_up(kept), real(kept));
            // `kept` may not exist; then its first entry is the nearest parent, which is not it.
            let exists = kept.exists();
            let inside = real_path.starts_with(&real_kept)
                || exists && above.first().is_some_and(|kept| ways.contains(kept));
            let holds = real_kept.starts_with(&real_path)
                || ways.first().is_some_and(|directory| above.contains(directory));
            let how = match (inside, holds) {
                (true, _) => "is or lies in",
                (_, true) => "holds",
                _ => return None,
            };
            Some(format!("it {how} {}, {what}", kept.display()))
        })
    }
}

/// Device and inode of a directory and of each one above it, nearest first. What does not exist
/// is passed over.
fn ways_up(path: &Path) -> Vec<(u64, u64)> {
    let real = real(path);
    real.ancestors()
        .filter_map(|at| std::fs::metadata(at).ok())
        .map(|meta| (meta.dev(), meta.ino()))
        .collect()
}

/// The path without links, as far as it exists.
fn real(path: &Path) -> PathBuf {
    for at in path.ancestors() {
        if let Ok(real) = at.canonicalize() {
            let rest = path.strip_prefix(at).unwrap_or(Path::new(""));
            return real.join(rest);
        }
    }
    path.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of the directory that this path leads to.
    fn said(apart: &Apart, path: &Path) -> Option<String> {
        let path = path.canonicalize().unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        apart.conflict(&path, (meta.dev(), meta.ino()))
    }

    #[test]
    fn what_is_holds_or_lies_in_a_directory_of_the_daemons_is_refused_by_any_name() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("project");
        std::fs::create_dir_all(top.join("policies/more")).unwrap();
        std::fs::create_dir_all(top.join("src")).unwrap();
        std::os::unix::fs::symlink(top.join("policies"), dir.path().join("alias")).unwrap();
        let apart = Apart::new(vec![top.join("policies"), top.join("later/state")]);

        for refused in
            ["project", "project/policies", "project/policies/more", "alias", ".", "alias/.."]
        {
            let said = said(&apart, &dir.path().join(refused));
            assert!(said.is_some_and(|why| why.contains(DAEMONS)), "{refused}");
        }
        assert_eq!(said(&apart, &top.join("src")), None);
    }

    #[test]
    fn a_directory_that_is_not_there_yet_is_kept_apart_from_its_parents() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("beside")).unwrap();
        let apart = Apart::new(vec![dir.path().join("later/state")]);

        assert!(said(&apart, dir.path()).is_some());
        assert_eq!(said(&apart, &dir.path().join("beside")), None);
    }

    #[test]
    fn what_is_holds_or_lies_in_a_directory_of_the_hosts_own_is_refused() {
        let shared = tempfile::tempdir_in("/dev/shm").unwrap();
        let own = Path::new("/proc").join(std::process::id().to_string());

        for (path, part) in [
            (Path::new("/run"), "it is or lies in /run"),
            (Path::new("/"), "it holds /run"),
            (shared.path(), "it is or lies in /dev"),
            (&own, "it is or lies in /proc"),
            (Path::new("/sys/kernel"), "it is or lies in /sys"),
        ] {
            let said = said(&Apart::default(), path).unwrap_or_default();

            assert!(said.contains(part), "{}: {said}", path.display());
        }
    }
}
