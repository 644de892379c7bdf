//! The directories no workspace may touch: the daemons' own.
//!
//! A sandbox that could write its policy file, or read the vault's key beside it, would have no
//! policy. So a workspace that is one of these directories, lies in one, or holds one is refused,
//! by whatever path it was named: directories are compared by device and inode all the way up.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ipc::fault::{Code, Fault};

/// The directories of this installation.
#[derive(Clone, Debug, Default)]
pub struct Apart(Vec<PathBuf>);

impl Apart {
    /// Absolute paths; one that does not exist yet counts through the parents it has.
    pub fn new(directories: Vec<PathBuf>) -> Self {
        Self(directories)
    }

    /// Whether a workspace at `path` is clear of all of them. A workspace that is one of sandboxd's
    /// own making is not asked about.
    pub fn check(&self, path: &Path) -> Result<(), Fault> {
        let workspace = ways_up(path);
        for kept in &self.0 {
            let above = ways_up(kept);
            // `kept` may not exist; then its first entry is the nearest parent, which is not it.
            let exists = kept.exists();
            let inside = exists && above.first().is_some_and(|kept| workspace.contains(kept));
            let holds = workspace.first().is_some_and(|workspace| above.contains(workspace));
            if inside || holds {
                let text = format!(
                    "workspace {}: it {} {}, which belongs to the daemons",
                    path.display(),
                    if inside { "is or lies in" } else { "holds" },
                    kept.display()
                );
                return Err(Fault::new(Code::Denied, text).with_hint(
                    "use another directory, or start the daemons with their policies, \
                     configuration and state outside of what agents work on",
                ));
            }
        }
        Ok(())
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
