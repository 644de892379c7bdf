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
    /// The files as they were last read, when they could be.
    files: Option<Vec<(String, String)>>,
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
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let why = match &known.broken {
                Some(why) => format!("the policy files as they are now do not parse:\n{why}"),
                None => format!("there is no {}", file.display()),
            };
            let text = format!("no environment {name:?}: {why}");
            Fault::new(Code::Missing, text)
                .with_hint(format!("known are: {}", set.names().collect::<Vec<_>>().join(", ")))
        })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The digest of the policies in force, after a look at the files.
    pub fn digest(&self) -> Option<String> {
        self.current().ok().map(|set| set.digest().to_owned())
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
            known.read(&self.directory);
        }
        known.answer()
    }
}

impl Known {
    /// Reads and parses the files. The same files, touched or looked at too soon, change nothing:
    /// what is ready for them stays.
    fn read(&mut self, directory: &Path) {
        let read = PolicySet::read(directory);
        let parsed = match &read {
            Ok(files) if self.files.as_ref() == Some(files) => return,
            Ok(files) => PolicySet::parse(files),
            Err(diagnostics) => Err(diagnostics.clone()),
        };
        self.files = read.ok();
        match parsed {
            Ok(set) => {
                self.set = Some(Arc::new(set));
                self.broken = None;
            }
            Err(diagnostics) => {
                let texts: Vec<String> = diagnostics.iter().map(ToString::to_string).collect();
                tracing::warn!(
                    problems = texts.len(),
                    "policy files changed nothing: they do not parse"
                );
                self.broken = Some(texts.join("\n"));
            }
        }
    }

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

fn fingerprint(directory: &Path) -> std::io::Result<Fingerprint> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut found = Fingerprint::default();
    // Whose the directory is, and who else may write there, decides whether files are read at all.
    let mut seen = vec![(std::ffi::OsString::new(), std::fs::metadata(directory)?)];
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.path().extension().is_some_and(|e| e == "toml") {
            // The file that a link leads to: that is what is read.
            let meta = std::fs::metadata(entry.path()).or_else(|_| entry.metadata())?;
            seen.push((entry.file_name(), meta));
        }
    }
    for (name, meta) in seen {
        let inode = [meta.dev(), meta.ino(), meta.len()];
        let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
        let changed = Duration::new(
            meta.ctime().try_into().unwrap_or(0),
            meta.ctime_nsec().try_into().unwrap_or(0),
        );
        found.unsettled |= now.saturating_sub(changed) < CLOCK_TICK;
        found.files.push((name, inode, times));
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
        assert!(environments.policy("x").unwrap_err().text.contains("dev.toml:1"));
        std::fs::remove_file(&file).unwrap();
        assert!(environments.policy("x").unwrap_err().text.contains("there is no"));
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

    /// Opened like any other file, the link would lead to a read without an end and the FIFO to an
    /// open without one.
    #[test]
    fn what_is_no_regular_file_neither_holds_up_a_look_nor_changes_anything() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("dev.toml"), "description = \"one\"\n").unwrap();
        let environments = Arc::new(Environments::new(dir.path().to_owned()));
        let fifo = dir.path().join("fifo.toml");
        let link = dir.path().join("link.toml");
        let look = || {
            let (tell, told) = std::sync::mpsc::channel();
            let environments = Arc::clone(&environments);
            std::thread::spawn(move || tell.send(environments.policy("dev").unwrap()));
            told.recv_timeout(Duration::from_secs(30)).expect("the look hangs")
        };
        let fresh = || Environments::new(dir.path().to_owned()).policy("dev").unwrap_err();

        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
        assert_eq!(look().description, "one");
        let with_fifo = fresh();
        std::fs::remove_file(&fifo).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert_eq!(look().description, "one");
        let with_link = fresh();

        assert!(with_fifo.text.contains("not a regular file"), "{with_fifo}");
        assert!(with_link.text.contains("not a regular file"), "{with_link}");
    }

    #[test]
    fn a_directory_that_is_closed_to_others_again_is_read() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mode = |mode| std::fs::Permissions::from_mode(mode);
        let file = dir.path().join("dev.toml");
        std::fs::write(&file, "description = \"one\"\n").unwrap();
        std::fs::set_permissions(dir.path(), mode(0o777)).unwrap();
        let settled = SystemTime::now() + 2 * CLOCK_TICK;
        while SystemTime::now() < settled {
            std::thread::yield_now();
        }
        let environments = Environments::new(dir.path().to_owned());

        assert!(environments.policy("dev").unwrap_err().text.contains("others can write it"));
        std::fs::set_permissions(dir.path(), mode(0o700)).unwrap();

        assert_eq!(environments.policy("dev").unwrap().description, "one");
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
