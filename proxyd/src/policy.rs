//! The policies in force, and how a changed file takes effect.
//!
//! A set is replaced whole. A file that does not parse changes nothing and is reported.
//!
//! A generation's number stands for the texts of all files. It is kept in proxyd's state, so a
//! number in the audit means one set of texts for ever: the same files have the same number after
//! a restart, others have a higher one.

mod record;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};

use policies::{Diagnostic, Policy, PolicySet};

use record::Record;

/// One state of all policies.
pub struct Generation {
    pub number: u64,
    set: PolicySet,
}

impl Generation {
    /// Stands for the texts of all files.
    pub fn digest(&self) -> &str {
        self.set.digest()
    }

    pub fn environment(&self, name: &str) -> Option<&Arc<Policy>> {
        self.set.environment(name)
    }
}

/// The policies in force.
pub struct Policies {
    dir: PathBuf,
    /// Which number stands for which texts.
    record: Mutex<Record>,
    /// Why the files, as they are now, are not in force; none when they are.
    problem: Mutex<Option<String>>,
    current: RwLock<Arc<Generation>>,
    seen: Mutex<Snapshot>,
}

/// What stands for the state of the files, to notice a change without reading them: their inodes
/// and when anything about these changed. Sizes and rights tell changes within one clock tick.
pub type Snapshot = BTreeMap<PathBuf, (u64, i64, i64, u64, u32)>;

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

impl std::error::Error for Mistakes {}

/// Why policies are not in force.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{0}")]
    Mistakes(#[from] Mistakes),
    #[error("cannot keep the number of the policies' generation in {path}: {source}")]
    Record { path: PathBuf, source: std::io::Error },
}

impl Policies {
    /// Reads the files without putting them in force: what `--check` does.
    pub fn check(dir: &Path) -> Result<PolicySet, Mistakes> {
        PolicySet::load(dir).map_err(Mistakes)
    }

    /// Loads the files for the first time. `state` is where the last number is kept.
    pub fn load(dir: &Path, state: &Path) -> Result<Self, LoadError> {
        let seen = snapshot(dir);
        let files = PolicySet::read(dir).map_err(Mistakes)?;
        let set = PolicySet::parse(&files).map_err(Mistakes)?;
        let mut record = Record::open(state)?;
        let number = record.number(&files)?;
        let first = Arc::new(Generation { number, set });
        Ok(Self {
            dir: dir.to_owned(),
            record: Mutex::new(record),
            problem: Mutex::new(None),
            current: RwLock::new(first),
            seen: Mutex::new(seen),
        })
    }

    pub fn current(&self) -> Arc<Generation> {
        Arc::clone(&self.current.read().expect("no holder of this lock panics"))
    }

    /// Loads the files again and puts them in force; says the generation. A failure leaves the
    /// former one in force and is remembered.
    pub fn reload(&self) -> Result<u64, LoadError> {
        *self.seen.lock().expect("no holder of this lock panics") = snapshot(&self.dir);
        let loaded = self.try_reload();
        let problem = loaded.as_ref().err().map(ToString::to_string);
        *self.problem.lock().expect("no holder of this lock panics") = problem;
        loaded
    }

    fn try_reload(&self) -> Result<u64, LoadError> {
        let files = PolicySet::read(&self.dir).map_err(Mistakes)?;
        let set = PolicySet::parse(&files).map_err(Mistakes)?;
        let mut record = self.record.lock().expect("no holder of this lock panics");
        // What was taken back must not stay allowed because a disk is full. The audit is on that
        // disk too: without room there is no record under this number, and nothing leaves.
        let number = record.number(&files).unwrap_or_else(|error| {
            tracing::error!(%error, "a restart may use this number again");
            record.last()
        });
        let mut current = self.current.write().expect("no holder of this lock panics");
        *current = Arc::new(Generation { number, set });
        Ok(number)
    }

    /// Why the files, as they were when last looked at, are not in force.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().expect("no holder of this lock panics").clone()
    }

    /// Whether a file was changed, added or removed since the last look.
    pub fn have_changed(&self) -> bool {
        *self.seen.lock().expect("no holder of this lock panics") != snapshot(&self.dir)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

pub fn snapshot(dir: &Path) -> Snapshot {
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
        let state = tempfile::tempdir().unwrap();
        let policies = Policies::load(dir.path(), state.path()).unwrap();
        assert!(!policies.have_changed());

        permit(0o666);
        assert!(policies.have_changed() && policies.reload().is_err());
        assert!(!policies.have_changed());
        permit(0o600);

        assert!(policies.have_changed() && policies.reload().is_ok());
    }

    #[test]
    fn a_number_stands_for_the_same_texts_for_ever() {
        let (dir, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let load = || Policies::load(dir.path(), state.path()).unwrap();
        let write = |name: &str, text: &str| {
            let file = dir.path().join(name);
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        };
        write("dev.toml", "description = \"one\"\n");

        let policies = load();
        let first = policies.current().number;
        assert_eq!(policies.reload().unwrap(), first, "nothing changed");
        write("dev.toml", "description = \"two\"\n");
        let second = policies.reload().unwrap();
        write("dev.toml", "nonsense\n");
        assert!(policies.reload().is_err());
        assert!(policies.problem().unwrap().contains("dev.toml"));
        write("dev.toml", "description = \"two\"\n");
        assert_eq!(policies.reload().unwrap(), second, "mended to what it was");
        assert_eq!(policies.problem(), None);
        assert_eq!(load().current().number, second, "a restart with the same files");
        write("groups.toml", "[groups]\na = [\"b.example\"]\n");
        let third = load().current().number;
        write("dev.toml", "description = \"one\"\n");
        std::fs::remove_file(dir.path().join("groups.toml")).unwrap();
        let fourth = load().current().number;

        assert_eq!((first, second, third, fourth), (1, 2, 3, 4));
    }
}
