//! The directories that no sandbox may be shown: the daemons' own.
//!
//! A sandbox that could write its policy file, or read the vault's key beside it, would have no
//! policy. So a workspace, or a directory that a policy names, is refused where it is one of these
//! directories, lies in one, or holds one, by whatever path it was named: directories are compared
//! by device and inode all the way up.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ipc::fault::{Code, Fault};
use serde::{Deserialize, Serialize};

/// The directories of this installation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Apart(Vec<PathBuf>);

impl Apart {
    /// Absolute paths; one that does not exist yet counts through the parents it has.
    pub fn new(directories: Vec<PathBuf>) -> Self {
        Self(directories)
    }

    /// Whether a workspace at `path` is clear of all of them. A workspace that is one of sandboxd's
    /// own making is not asked about.
    pub fn check(&self, path: &Path) -> Result<(), Fault> {
        match self.conflict_of(path, &ways_up(path)) {
            None => Ok(()),
            Some(why) => {
                Err(Fault::new(Code::Denied, format!("workspace {}: {why}", path.display()))
                    .with_hint(
                        "use another directory, or start the daemons with their policies, \
                         configuration and state outside of what agents work on",
                    ))
            }
        }
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
        let shown = self.0.iter().find(|kept| ways_up(kept).contains(&identity))?;
        Some(format!("it shows {}, which belongs to the daemons", shown.display()))
    }

    fn conflict_of(&self, path: &Path, ways: &[(u64, u64)]) -> Option<String> {
        let real_path = real(path);
        self.0.iter().find_map(|kept| {
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
            Some(format!("it {how} {}, which belongs to the daemons", kept.display()))
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
            let outcome = apart.check(&dir.path().join(refused));
            assert_eq!(outcome.unwrap_err().code, Code::Denied, "{refused}");
        }
        assert_eq!(apart.check(&top.join("src")), Ok(()));
    }

    #[test]
    fn a_directory_that_is_not_there_yet_is_kept_apart_from_its_parents() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("beside")).unwrap();
        let apart = Apart::new(vec![dir.path().join("later/state")]);

        assert!(apart.check(dir.path()).is_err());
        assert_eq!(apart.check(&dir.path().join("beside")), Ok(()));
    }
}
