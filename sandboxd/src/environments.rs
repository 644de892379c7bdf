//! The policy files as sandboxd sees them: read when they changed, kept when they are broken.
//!
//! sandboxd uses their `[sandbox]` tables and asks nothing about egress: that is proxyd's. It
//! looks at the files' times whenever a sandbox is to be made, so a changed file rules the next
//! sandbox; those that live keep what they were made with.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use ipc::fault::{Code, Fault};
use policies::{Policy, PolicySet};

/// Name, time of change and length of each file: when they are the same, so are the files.
type Fingerprint = Vec<(std::ffi::OsString, Option<SystemTime>, u64)>;

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
        if known.fingerprint != fingerprint || (known.set.is_none() && known.broken.is_none()) {
            known.fingerprint = fingerprint;
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
        match (&known.set, &known.broken) {
            (Some(set), _) => Ok(Arc::clone(set)),
            (None, broken) => {
                let why = broken.as_deref().unwrap_or("nothing was read");
                Err(Fault::new(Code::Missing, format!("the policy files do not parse:\n{why}"))
                    .with_hint("`cleanhands policy check` shows all problems"))
            }
        }
    }
}

fn fingerprint(directory: &Path) -> std::io::Result<Fingerprint> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|e| e == "toml") {
            let meta = entry.metadata()?;
            found.push((entry.file_name(), meta.modified().ok(), meta.len()));
        }
    }
    found.sort();
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
    fn a_file_that_breaks_before_the_first_sandbox_leaves_the_others_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("dev.toml"), "description = \"one\"\n").unwrap();
        let environments = Environments::new(dir.path().to_owned());

        std::fs::write(dir.path().join("other.toml"), "this is no policy").unwrap();

        assert_eq!(environments.policy("dev").unwrap().description, "one");
    }
}
