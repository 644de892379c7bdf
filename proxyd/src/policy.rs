//! The policies in force, and how a changed file takes effect.
//!
//! A set is replaced whole. A file that does not parse changes nothing and is reported.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};

use policies::{Diagnostic, Policy, PolicySet};

/// One state of all policies.
pub struct Generation {
    pub number: u64,
    set: PolicySet,
}

impl Generation {
    pub fn environment(&self, name: &str) -> Option<&Arc<Policy>> {
        self.set.environment(name)
    }

    /// What is legal but most likely not meant.
    pub fn warnings(&self) -> &[Diagnostic] {
        self.set.warnings()
    }
}

/// The policies in force.
pub struct Policies {
    dir: PathBuf,
    current: RwLock<Arc<Generation>>,
    seen: Mutex<Snapshot>,
}

/// What stands for the state of the files, to notice a change without reading them: their inodes
/// and when anything about these changed. Sizes and rights tell changes within one clock tick.
type Snapshot = BTreeMap<PathBuf, (u64, i64, i64, u64, u32)>;

/// The mistakes of a set that did not load.
#[derive(Debug)]
pub struct Mistakes(pub Vec<Diagnostic>);

impl std::fmt::Display for Mistakes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, diagnostic) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            diagnostic.fmt(f)?;
        }
        Ok(())
    }
}

impl Policies {
    /// Loads the first generation.
    pub fn load(dir: &Path) -> Result<Self, Mistakes> {
        let seen = snapshot(dir);
        let set = PolicySet::load(dir).map_err(Mistakes)?;
        let first = Arc::new(Generation { number: 1, set });
        Ok(Self { dir: dir.to_owned(), current: RwLock::new(first), seen: Mutex::new(seen) })
    }

    pub fn current(&self) -> Arc<Generation> {
        Arc::clone(&self.current.read().expect("no holder of this lock panics"))
    }

    /// Loads the files again and puts them in force; says the new generation.
    pub fn reload(&self) -> Result<u64, Mistakes> {
        *self.seen.lock().expect("no holder of this lock panics") = snapshot(&self.dir);
        let set = PolicySet::load(&self.dir).map_err(Mistakes)?;
        let mut current = self.current.write().expect("no holder of this lock panics");
        let number = current.number + 1;
        *current = Arc::new(Generation { number, set });
        Ok(number)
    }

    /// Whether a file was changed, added or removed since the last look.
    pub fn have_changed(&self) -> bool {
        *self.seen.lock().expect("no holder of this lock panics") != snapshot(&self.dir)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

fn snapshot(dir: &Path) -> Snapshot {
    let Ok(entries) = std::fs::read_dir(dir) else { return Snapshot::new() };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.path().extension().is_some_and(|ext| ext == "toml"))
        .filter_map(|entry| {
            let meta = std::fs::metadata(entry.path()).ok()?;
            let changed = (meta.ino(), meta.ctime(), meta.ctime_nsec(), meta.len(), meta.mode());
            Some((entry.path(), changed))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_was_refused_for_its_rights_is_looked_at_again_once_they_are_right() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dev.toml");
        let permit = |mode| {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        std::fs::write(&file, "").unwrap();
        permit(0o600);
        let policies = Policies::load(dir.path()).unwrap();
        assert!(!policies.have_changed());

        permit(0o666);
        assert!(policies.have_changed() && policies.reload().is_err());
        assert!(!policies.have_changed());
        permit(0o600);

        assert!(policies.have_changed() && policies.reload().is_ok());
    }
}
