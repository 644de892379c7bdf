//! Secrets in files that others keep up to date: mounts of an orchestrator, credentials of systemd.
//!
//! A file is read for each rendering, which the traffic process asks for every few seconds at most.
//! So a new value, also one that comes by a link that is moved, is used without anybody being
//! told. The value before is still searched for. A file that is not to be had leaves its last value
//! in use for a while, and then none.
//!
//! Whoever can put links into those directories, or names files in policies, must not have the
//! vault's own key sent as a secret: no link leads out of a directory, and no name of any kind to
//! what the vault itself keeps.

use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ipc::vault::{SECRET_BYTES_MAX, SECRET_BYTES_MIN};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::VaultError;
use super::secret::Secret;

/// How long a value serves after its file was last read.
const STALE: Duration = Duration::from_secs(300);

/// How often a file is opened again because something was renamed just then.
const RENAMED_MAX: usize = 8;

/// The files that were read, and where such files may lie.
#[derive(Default)]
pub(super) struct Files {
    directories: Vec<PathBuf>,
    own: Own,
    kept: HashMap<String, Kept>,
}

struct Kept {
    /// The current value, and the one before.
    values: Vec<Secret>,
    read: Instant,
}

impl Files {
    pub fn below(directories: Vec<PathBuf>, own: Own) -> Self {
        Self { directories, own, kept: HashMap::new() }
    }

    /// The value of a file, and the one before if it had another.
    pub fn values(&mut self, path: &str) -> Result<&[Secret], VaultError> {
        self.values_at(path, Instant::now())
    }

    fn values_at(&mut self, path: &str, now: Instant) -> Result<&[Secret], VaultError> {
        let read = self.read(Path::new(path));
        match (read, self.kept.get_mut(path)) {
            (Ok(value), Some(kept)) => {
                kept.read = now;
                if kept.values[0].expose_secret() != value.expose_secret() {
                    kept.values.insert(0, value);
                    kept.values.truncate(2);
                }
            }
            (Ok(value), None) => {
                self.kept.insert(path.to_owned(), Kept { values: vec![value], read: now });
            }
            (Err(_), Some(kept)) if now.saturating_duration_since(kept.read) < STALE => {}
            (Err(why), _) => {
                let text = format!("the secret in {path} is not to be had: {why}");
                return Err(VaultError::Unavailable(text));
            }
        }
        Ok(self.kept.get(path).map(|kept| &kept.values[..]).unwrap_or_default())
    }

    fn read(&self, path: &Path) -> Result<Secret, String> {
        let file = self.open(path)?;
        let meta = file.metadata().map_err(|error| error.to_string())?;
        if !meta.is_file() {
            return Err("it is no file".to_owned());
        }
        if self.own.holds(&meta).map_err(|error| format!("the vault's own files: {error}"))? {
            return Err("it is the vault's own, whatever its name".to_owned());
        }
        if meta.mode() & 0o002 != 0 {
            return Err("everybody can write it".to_owned());
        }
        let room = SECRET_BYTES_MAX + 2;
        let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(room));
        let read = file.take(room as u64).read_to_end(&mut bytes);
        read.map_err(|error| error.to_string())?;
        let value = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        match value.len() {
            0..SECRET_BYTES_MIN => Err(format!("it holds less than {SECRET_BYTES_MIN} bytes")),
            SECRET_BYTES_MIN..=SECRET_BYTES_MAX => Ok(Secret::concat(&[value])),
            _ => Err(format!("it holds more than {SECRET_BYTES_MAX} bytes")),
        }
    }

    /// Opens it below one of the directories, where the first that has it counts.
    fn open(&self, path: &Path) -> Result<File, String> {
        let mut why = "no entry of secret-directories in proxyd.toml covers it".to_owned();
        for directory in &self.directories {
            let Ok(within) = path.strip_prefix(directory) else { continue };
            match open_below(directory, within) {
                Ok(file) => return Ok(file),
                Err(Errno::XDEV) => {
                    why = "a link leads out of the directory in secret-directories".to_owned();
                }
                Err(error) => why = std::io::Error::from(error).to_string(),
            }
        }
        Err(why)
    }
}

/// Links are followed below the directory: mounts of an orchestrator hold some.
fn open_below(directory: &Path, within: &Path) -> Result<File, Errno> {
    let within = if within.as_os_str().is_empty() { Path::new(".") } else { within };
    let place = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, place, Mode::empty())?;
    // A FIFO in the directory must not hold the vault up.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let mut tries = 0;
    loop {
        match rustix::fs::openat2(&directory, within, flags, Mode::empty(), beneath) {
            // The kernel cannot tell whether ".." in a link led out meanwhile.
            Err(Errno::AGAIN) if tries < RENAMED_MAX => tries += 1,
            opened => return opened.map(File::from),
        }
    }
}

/// What the vault itself keeps: its key, and what lies in its directory.
#[derive(Default)]
pub(super) struct Own {
    keys: Vec<PathBuf>,
    directory: PathBuf,
    /// The keys' devices and inodes when they were read, should their sources be replaced.
    first: Vec<(u64, u64)>,
}

impl Own {
    /// `key` is where the key was read; there may have been another one before.
    pub fn new(key: &Path, former: Option<&Path>, directory: &Path) -> std::io::Result<Self> {
        let mut first = vec![identity(&std::fs::metadata(key)?)];
        // One that is gone already is nobody's secret.
        first.extend(former.and_then(|path| std::fs::metadata(path).ok()).as_ref().map(identity));
        let keys = std::iter::once(key).chain(former).map(Path::to_owned).collect();
        Ok(Self { keys, directory: directory.to_owned(), first })
    }

    /// Whether a file is one of these, by whatever name or link it was opened.
    fn holds(&self, meta: &Metadata) -> std::io::Result<bool> {
        let asked = identity(meta);
        let there = |found: std::io::Result<Metadata>| match found {
            Ok(found) => Ok(identity(&found) == asked),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        };
        if self.first.contains(&asked) {
            return Ok(true);
        }
        for key in &self.keys {
            if there(std::fs::metadata(key))? {
                return Ok(true);
            }
        }
        for entry in std::fs::read_dir(&self.directory)? {
            if there(std::fs::symlink_metadata(entry?.path()))? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn identity(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const KEY: &str = "KEY-CANARY-0123456789abcdef0123456789";

    /// A vault with a key and a database in `vault`, and files below the directories of these
    /// names.
    fn files(dir: &Path, directories: &[&str]) -> Files {
        for name in ["vault"].iter().chain(directories) {
            std::fs::create_dir_all(dir.join(name)).unwrap();
        }
        let key = dir.join("vault/vault.key");
        std::fs::write(&key, KEY).unwrap();
        std::fs::write(dir.join("vault/vault.db"), "DATABASE-CANARY").unwrap();
        let own = Own::new(&key, None, &dir.join("vault")).unwrap();
        Files::below(directories.iter().map(|name| dir.join(name)).collect(), own)
    }

    fn shown(values: &[Secret]) -> Vec<String> {
        let text = |value: &Secret| String::from_utf8(value.expose_secret().to_vec()).unwrap();
        values.iter().map(text).collect()
    }

    #[test]
    fn a_file_that_is_gone_serves_its_last_value_for_a_while_and_then_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let name = path.to_str().unwrap();
        let mut files = files(dir.path(), &[""]);
        let now = Instant::now();
        std::fs::write(&path, "FILE-CANARY-1\n").unwrap();
        assert_eq!(shown(files.values_at(name, now).unwrap()), ["FILE-CANARY-1"]);
        std::fs::write(&path, "FILE-CANARY-2").unwrap();
        let both = ["FILE-CANARY-2", "FILE-CANARY-1"];
        assert_eq!(shown(files.values_at(name, now).unwrap()), both);
        std::fs::remove_file(&path).unwrap();

        assert_eq!(shown(files.values_at(name, now + STALE / 2).unwrap()), both);
        assert!(matches!(files.values_at(name, now + STALE), Err(VaultError::Unavailable(_))));
        std::fs::write(&path, "FILE-CANARY-3").unwrap();
        assert_eq!(shown(files.values_at(name, now + STALE).unwrap())[0], "FILE-CANARY-3");
    }

    #[test]
    fn what_is_no_secret_or_lies_elsewhere_is_refused_without_being_shown() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(dir.path(), &["own"]);
        std::fs::create_dir(dir.path().join("other")).unwrap();
        for (name, text, mode, why) in [
            ("own/short", "1234567\n", 0o600, "less than 8 bytes"),
            ("own/long", &"x".repeat(SECRET_BYTES_MAX + 1)[..], 0o600, "more than"),
            ("own/open", "FILE-CANARY", 0o666, "everybody can write it"),
            ("other/token", "FILE-CANARY", 0o600, "secret-directories"),
            ("own", "", 0, "no file"),
            ("own/none", "", 0, "No such file"),
        ] {
            let path = dir.path().join(name);
            if mode != 0 {
                std::fs::write(&path, text).unwrap();
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            }
            let error = files.values(path.to_str().unwrap()).err().unwrap().to_string();
            assert!(error.contains(why) && !error.contains("CANARY"), "{name}: {error}");
        }
    }

    #[test]
    fn links_are_followed_below_a_directory_and_never_out_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(dir.path(), &["own"]);
        let own = dir.path().join("own");
        for place in ["own/..1", "own/sub", "other"] {
            std::fs::create_dir(dir.path().join(place)).unwrap();
            std::fs::write(dir.path().join(place).join("token"), "FILE-CANARY").unwrap();
        }
        for (name, to) in [
            // As an orchestrator mounts secrets.
            ("..data", "..1"),
            ("mounted", "..data/token"),
            ("sub/up", "../..data/token"),
            ("out", "../other/token"),
            ("key", "../vault/vault.key"),
            ("around", "sub/../../other"),
            ("around-and-back", "../own/sub/token"),
            ("process", "/proc/self/root/etc/passwd"),
            ("loop", "loop"),
        ] {
            symlink(to, own.join(name)).unwrap();
        }
        symlink(dir.path().join("other/token"), own.join("absolute")).unwrap();

        for name in ["mounted", "sub/up", "sub/token", "..data/token"] {
            let values = files.values(own.join(name).to_str().unwrap()).unwrap();
            assert_eq!(shown(values), ["FILE-CANARY"], "{name}");
        }
        for name in ["out", "key", "around/token", "around-and-back", "absolute", "process"] {
            let error = files.values(own.join(name).to_str().unwrap()).err().unwrap().to_string();
            assert!(error.contains("leads out"), "{name}: {error}");
        }
        assert!(files.values(own.join("loop").to_str().unwrap()).is_err());
        assert!(files.values(own.join("../vault/vault.key").to_str().unwrap()).is_err());
    }

    #[test]
    fn what_the_vault_keeps_is_no_secret_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(dir.path(), &["own", "vault", "keys"]);
        let at = |name: &str| dir.path().join(name);
        // A key that lies where secrets do, as credentials of systemd.
        std::fs::write(at("keys/proxyd-master"), KEY).unwrap();
        std::fs::write(at("keys/token"), "FILE-CANARY").unwrap();
        files.own = Own::new(&at("keys/proxyd-master"), None, &at("vault")).unwrap();
        std::fs::hard_link(at("keys/proxyd-master"), at("own/key")).unwrap();
        std::fs::hard_link(at("vault/vault.db"), at("own/database")).unwrap();
        symlink("proxyd-master", at("keys/link")).unwrap();
        let refused = |files: &mut Files, name: &str| {
            let error = files.values(at(name).to_str().unwrap()).err().unwrap().to_string();
            assert!(error.contains("the vault's own"), "{name}: {error}");
        };

        let names = ["keys/proxyd-master", "keys/link", "own/key", "own/database"];
        for name in names.into_iter().chain(["vault/vault.key", "vault/vault.db"]) {
            refused(&mut files, name);
        }
        // One that came in its place is the key of the next start; the former one still is a key.
        std::fs::write(at("keys/next"), KEY).unwrap();
        std::fs::rename(at("keys/next"), at("keys/proxyd-master")).unwrap();
        for name in ["keys/proxyd-master", "own/key"] {
            refused(&mut files, name);
        }
        let token = at("keys/token");
        assert_eq!(shown(files.values(token.to_str().unwrap()).unwrap()), ["FILE-CANARY"]);
    }
}
