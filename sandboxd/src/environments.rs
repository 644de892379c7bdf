//! The policy files as sandboxd sees them: read when they changed, kept when they are broken.
//!
//! sandboxd uses their `[sandbox]` tables and asks nothing about egress: that is proxyd's. It
//! looks at the files' metadata whenever a sandbox is to be made, so a changed file rules the next
//! sandbox; those that live keep what they were made with.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use ipc::fault::{Code, Fault};
use policies::{Policy, PolicySet};
use sha2::{Digest, Sha256};

/// What the kernel says of each file: when all is the same, so are the files. The time of change of
/// an inode cannot be set by anybody, a replaced file has another inode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Fingerprint {
    files: Vec<(std::ffi::OsString, [u64; 3], [i64; 4])>,
    /// A file changed so shortly before it was looked at that the next change may bear the same
    /// time.
    unsettled: bool,
}

/// Coarser than the clock of any file system that keeps times below a second.
const CLOCK_TICK: Duration = Duration::from_millis(20);

/// All environments of one directory.
#[derive(Debug)]
pub struct Environments {
    directory: PathBuf,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    fingerprint: Fingerprint,
    set: Option<Arc<PolicySet>>,
    /// Why the files as they are now could not be read.
    broken: Option<String>,
    /// Of the files' contents.
    digest: Vec<u8>,
}

impl Environments {
    /// Reads the files once at the start, so that one that breaks later changes nothing.
    pub fn new(directory: PathBuf) -> Self {
        let environments = Self { directory, known: Mutex::default() };
        if let Err(fault) = environments.current() {
            tracing::warn!(reason = %fault, "there is no environment yet");
        }
        environments
    }

    /// The policy of an environment, from the files as they are now; while they do not parse, as
    /// they last did.
    pub fn policy(&self, name: &str) -> Result<Arc<Policy>, Fault> {
        let file = self.directory.join(format!("{name}.toml"));
        let set = self.current()?;
        set.environment(name).cloned().ok_or_else(|| {
            Fault::new(
                Code::Missing,
                format!("no environment {name:?}: there is no {}", file.display()),
            )
            .with_hint(format!("known are: {}", set.names().collect::<Vec<_>>().join(", ")))
        })
    }

    fn current(&self) -> Result<Arc<PolicySet>, Fault> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let fingerprint = fingerprint(&self.directory).map_err(|e| {
            let directory = self.directory.display();
            Fault::new(Code::Missing, format!("cannot read policies in {directory}: {e}"))
        })?;
        let unread = known.set.is_none() && known.broken.is_none();
        if known.fingerprint != fingerprint || fingerprint.unsettled || unread {
            known.fingerprint = fingerprint;
            let digest = digest(&self.directory, &known.fingerprint);
            if known.digest == digest && !unread {
                // The same files, touched or looked at too soon: what is ready for them stays.
                return known.answer();
            }
            known.digest = digest;
            match PolicySet::load(&self.directory) {
                Ok(set) => {
                    known.set = Some(Arc::new(set));
                    known.broken = None;
                }
                Err(diagnostics) => {
                    let texts: Vec<String> = diagnostics.iter().map(ToString::to_string).collect();
                    tracing::warn!(
                        problems = texts.len(),
                        "policy files changed nothing: they do not parse"
                    );
                    known.broken = Some(texts.join("\n"));
                }
            }
        }
        known.answer()
    }
}

impl Known {
    fn answer(&self) -> Result<Arc<PolicySet>, Fault> {
        match (&self.set, &self.broken) {
            (Some(set), _) => Ok(Arc::clone(set)),
            (None, broken) => {
                let why = broken.as_deref().unwrap_or("nothing was read");
                Err(Fault::new(Code::Missing, format!("the policy files do not parse:\n{why}"))
                    .with_hint("`cleanhands policy check` shows all problems"))
            }
        }
    }
}

/// Stands for the contents. A file that cannot be read makes loading fail, which says why.
fn digest(directory: &Path, fingerprint: &Fingerprint) -> Vec<u8> {
    let mut all = Sha256::new();
    for (name, ..) in &fingerprint.files {
        let text = std::fs::read(directory.join(name)).unwrap_or_default();
        all.update(name.as_encoded_bytes());
        all.update((text.len() as u64).to_le_bytes());
        all.update(text);
    }
    all.finalize().to_vec()
}

fn fingerprint(directory: &Path) -> std::io::Result<Fingerprint> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut found = Fingerprint::default();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|e| e == "toml") {
            // The file that a link leads to: that is what is read.
            let meta = std::fs::metadata(entry.path()).or_else(|_| entry.metadata())?;
            let inode = [meta.dev(), meta.ino(), meta.len()];
            let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
            let changed = Duration::new(
                meta.ctime().try_into().unwrap_or(0),
                meta.ctime_nsec().try_into().unwrap_or(0),
            );
            found.unsettled |= now.saturating_sub(changed) < CLOCK_TICK;
            found.files.push((entry.file_name(), inode, times));
        }
    }
    found.files.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_read_and_a_broken_one_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dev.toml");
        let environments = Environments::new(dir.path().to_owned());

        assert_eq!(environments.policy("dev").unwrap_err().code, Code::Missing);
        std::fs::write(&file, "description = \"one\"\n").unwrap();
        assert_eq!(environments.policy("dev").unwrap().description, "one");
        std::fs::write(&file, "description = \"second\"\n").unwrap();
        assert_eq!(environments.policy("dev").unwrap().description, "second");
        std::fs::write(&file, "this is no policy").unwrap();

        assert_eq!(environments.policy("dev").unwrap().description, "second");
        assert!(environments.policy("x").unwrap_err().text.contains("x.toml"));
    }

    #[test]
    fn a_change_of_the_same_length_under_the_same_time_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dev.toml");
        let environments = Environments::new(dir.path().to_owned());
        for word in ["one", "two", "six", "ten"] {
            let time = std::fs::FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
            let text = format!("description = \"{word}\"\n");
            std::fs::write(&file, text).unwrap();
            std::fs::File::options().write(true).open(&file).unwrap().set_times(time).unwrap();

            assert_eq!(environments.policy("dev").unwrap().description, word);
        }
    }

    #[test]
    fn a_file_that_breaks_before_the_first_sandbox_leaves_the_others_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("dev.toml"), "description = \"one\"\n").unwrap();
        let environments = Environments::new(dir.path().to_owned());

        std::fs::write(dir.path().join("other.toml"), "this is no policy").unwrap();

        assert_eq!(environments.policy("dev").unwrap().description, "one");
    }
}
