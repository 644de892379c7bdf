//! Secrets in files that others keep up to date: mounts of an orchestrator, credentials of systemd.
//!
//! A file is read for each rendering, which the traffic process asks for every few seconds at most.
//! So a new value, also one that comes by a link that is moved, is used without anybody being
//! told. The value before is still searched for. A file that is not to be had leaves its last value
//! in use for a while, and then none.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ipc::vault::{SECRET_BYTES_MAX, SECRET_BYTES_MIN};

use super::VaultError;
use super::secret::Secret;

/// How long a value serves after its file was last read.
const STALE: Duration = Duration::from_secs(300);

/// The files that were read, and where such files may lie.
pub(super) struct Files {
    directories: Vec<PathBuf>,
    kept: HashMap<String, Kept>,
}

struct Kept {
    /// The current value, and the one before.
    values: Vec<Secret>,
    read: Instant,
}

impl Files {
    pub fn below(directories: Vec<PathBuf>) -> Self {
        Self { directories, kept: HashMap::new() }
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
        if !self.directories.iter().any(|directory| path.starts_with(directory)) {
            return Err("no entry of secret-directories in proxyd.toml covers it".to_owned());
        }
        // A FIFO in the directory must not hold the vault up.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|error| error.to_string())?;
        let meta = file.metadata().map_err(|error| error.to_string())?;
        if !meta.is_file() {
            return Err("it is no file".to_owned());
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
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn shown(values: &[Secret]) -> Vec<String> {
        let text = |value: &Secret| String::from_utf8(value.expose_secret().to_vec()).unwrap();
        values.iter().map(text).collect()
    }

    #[test]
    fn a_file_that_is_gone_serves_its_last_value_for_a_while_and_then_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let name = path.to_str().unwrap();
        let mut files = Files::below(vec![dir.path().to_owned()]);
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
        let mut files = Files::below(vec![dir.path().join("own")]);
        for name in ["own", "other"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
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
}
