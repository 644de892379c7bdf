//! The keys of the loopback port: a file of hashes, each with the owner it stands for.
//!
//! ```toml
//! [[key]]
//! name = "laptop"
//! sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
//! owner = "uid:1000"
//! ```
//!
//! The file holds no key, and a key is 180 random bits, so a plain hash is enough. The file is read
//! again when it changed; one that cannot be read, or that others can write, lets nobody in. The
//! operator's file is only read; where there is none, the daemon keeps its own beside the log.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Longest key looked at, in bytes. Ours have 40.
const KEY_BYTES_MAX: usize = 512;
/// Most keys that the daemon keeps for one owner.
const KEYS_MAX: usize = 100;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default, rename = "key")]
    keys: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    /// For people only.
    name: String,
    sha256: String,
    owner: String,
}

/// Why a keys file lets nobody in.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("keys file {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("keys file {path}: others can write it (mode {mode:03o}): it must be 0600 or 0644")]
    Writable { path: PathBuf, mode: u32 },
    #[error("keys file {path}: belongs to uid {uid}, not to root or this user")]
    Foreign { path: PathBuf, uid: u32 },
    #[error("keys file {path}: {why}")]
    Malformed { path: PathBuf, why: String },
    #[error("cannot write keys file {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("keys are kept in {path}, which is the operator's")]
    Operators { path: PathBuf },
    #[error("there is already a key named {name:?}")]
    Taken { name: String },
    #[error("there are {KEYS_MAX} keys already: remove one first")]
    TooMany,
}

/// The keys as they were read last.
pub struct Keys {
    path: PathBuf,
    /// The daemon's own file, which may be absent and may be written.
    ours: bool,
    read: Mutex<Option<Read>>,
}

#[derive(Clone)]
struct Read {
    stamp: Option<Stamp>,
    keys: Arc<Vec<Key>>,
}

/// Tells one state of the file from the next.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    bytes: u64,
    seconds: i64,
    nanos: i64,
}

#[derive(Clone)]
struct Key {
    name: String,
    hash: [u8; 32],
    owner: String,
}

impl Keys {
    /// Reads the operator's file.
    pub fn of_operator(path: PathBuf) -> Self {
        Self { path, ours: false, read: Mutex::new(None) }
    }

    /// Reads and writes the daemon's own file in its state directory.
    pub fn own(state_dir: &Path) -> Self {
        Self { path: state_dir.join("keys.toml"), ours: true, read: Mutex::new(None) }
    }

    /// The owner that a key stands for. Every hash is compared, each in constant time.
    pub fn owner_of(&self, key: &str) -> Option<String> {
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return None;
        }
        let keys = match self.current(&mut self.lock()) {
            Ok(keys) => keys,
            Err(error) => {
                tracing::warn!(%error, "keys file not usable");
                return None;
            }
        };
        let hash: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        let mut found = None;
        for key in keys.iter() {
            if bool::from(key.hash.ct_eq(&hash)) {
                found = Some(key.owner.clone());
            }
        }
        found
    }

    /// The names of an owner's keys.
    pub fn names(&self, owner: &str) -> Result<Vec<String>, KeysError> {
        let keys = self.current(&mut self.lock())?;
        Ok(keys.iter().filter(|key| key.owner == owner).map(|key| key.name.clone()).collect())
    }

    /// Draws a key for an owner. It is given out here and kept nowhere.
    pub fn add(&self, name: &str, owner: &str) -> Result<String, KeysError> {
        let mut read = self.lock();
        let mut keys = self.writable(&mut read)?;
        if keys.iter().any(|key| key.owner == owner && key.name == name) {
            return Err(KeysError::Taken { name: name.to_owned() });
        }
        if keys.iter().filter(|key| key.owner == owner).count() >= KEYS_MAX {
            return Err(KeysError::TooMany);
        }
        let text = format!("chk_{}", ipc::id::random_text(36));
        let hash = Sha256::digest(text.as_bytes()).into();
        keys.push(Key { name: name.to_owned(), hash, owner: owner.to_owned() });
        self.write(&keys)?;
        Ok(text)
    }

    /// Removes a key; false when there was none of that name.
    pub fn remove(&self, name: &str, owner: &str) -> Result<bool, KeysError> {
        let mut read = self.lock();
        let mut keys = self.writable(&mut read)?;
        let before = keys.len();
        keys.retain(|key| key.owner != owner || key.name != name);
        if keys.len() == before {
            return Ok(false);
        }
        self.write(&keys)?;
        Ok(true)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Read>> {
        self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn writable(&self, read: &mut Option<Read>) -> Result<Vec<Key>, KeysError> {
        if !self.ours {
            return Err(KeysError::Operators { path: self.path.clone() });
        }
        Ok(self.current(read)?.to_vec())
    }

    fn current(&self, read: &mut Option<Read>) -> Result<Arc<Vec<Key>>, KeysError> {
        let stamp = match stamp(&self.path) {
            Err(KeysError::Read { source, .. })
                if self.ours && source.kind() == std::io::ErrorKind::NotFound =>
            {
                None
            }
            stamp => Some(stamp?),
        };
        if let Some(read) = read.as_ref().filter(|read| read.stamp == stamp) {
            return Ok(Arc::clone(&read.keys));
        }
        *read = None;
        let keys = match stamp {
            None => Arc::default(),
            Some(_) => {
                let text = std::fs::read_to_string(&self.path)
                    .map_err(|source| KeysError::Read { path: self.path.clone(), source })?;
                Arc::new(parse(&self.path, &text)?)
            }
        };
        *read = Some(Read { stamp, keys: Arc::clone(&keys) });
        Ok(keys)
    }

    /// Writes beside and renames, so that a crash leaves the old file or the new one.
    fn write(&self, keys: &[Key]) -> Result<(), KeysError> {
        let fail = |source| KeysError::Write { path: self.path.clone(), source };
        let beside = self.path.with_extension("new");
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&beside).map_err(fail)?;
        let text: Vec<String> = keys.iter().map(lines).collect();
        file.write_all(text.join("\n").as_bytes()).map_err(fail)?;
        file.sync_all().map_err(fail)?;
        std::fs::rename(&beside, &self.path).map_err(fail)
    }
}

/// One key as the file has it.
fn lines(key: &Key) -> String {
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    format!(
        "[[key]]\nname = {}\nsha256 = \"{}\"\nowner = {}\n",
        quoted(&key.name),
        hex::encode(key.hash),
        quoted(&key.owner),
    )
}

fn stamp(path: &Path) -> Result<Stamp, KeysError> {
    let meta = std::fs::metadata(path)
        .map_err(|source| KeysError::Read { path: path.to_owned(), source })?;
    let ours = rustix::process::geteuid().as_raw();
    if meta.uid() != ours && meta.uid() != 0 {
        return Err(KeysError::Foreign { path: path.to_owned(), uid: meta.uid() });
    }
    // Whoever writes this file makes keys for any owner.
    if meta.mode() & 0o022 != 0 {
        return Err(KeysError::Writable { path: path.to_owned(), mode: meta.mode() & 0o777 });
    }
    Ok(Stamp {
        inode: meta.ino(),
        bytes: meta.size(),
        seconds: meta.mtime(),
        nanos: meta.mtime_nsec(),
    })
}

fn parse(path: &Path, text: &str) -> Result<Vec<Key>, KeysError> {
    let malformed = |why: String| KeysError::Malformed { path: path.to_owned(), why };
    let file: File = toml::from_str(text).map_err(|error| malformed(error.message().to_owned()))?;
    let mut keys = Vec::new();
    for (at, entry) in file.keys.iter().enumerate() {
        let mut hash = [0u8; 32];
        hex::decode_to_slice(&entry.sha256, &mut hash)
            .map_err(|_| malformed(format!("key[{at}].sha256: must have 64 hex digits")))?;
        let uid = entry.owner.strip_prefix("uid:").and_then(|uid| uid.parse::<u32>().ok());
        if uid.is_none() {
            return Err(malformed(format!("key[{at}].owner: must look like uid:1000")));
        }
        keys.push(Key { name: entry.name.clone(), hash, owner: entry.owner.clone() });
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_stands_for_its_owner_and_a_removed_one_for_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::own(dir.path());
        let one = keys.add("one", "uid:1000").unwrap();
        let two = keys.add("two \"quoted\"", "uid:1001").unwrap();

        assert_eq!(keys.owner_of(&one).as_deref(), Some("uid:1000"));
        assert_eq!(keys.owner_of(&two).as_deref(), Some("uid:1001"));
        assert_eq!(keys.owner_of("chk_guess"), None);
        assert_eq!(keys.names("uid:1000").unwrap(), ["one"]);
        assert!(matches!(keys.add("one", "uid:1000"), Err(KeysError::Taken { .. })));
        assert!(!keys.remove("one", "uid:1001").unwrap());
        assert!(keys.remove("one", "uid:1000").unwrap());
        assert_eq!(keys.owner_of(&one), None);
        assert_eq!(Keys::own(dir.path()).owner_of(&two).as_deref(), Some("uid:1001"));
        let text = std::fs::read_to_string(dir.path().join("keys.toml")).unwrap();
        assert!(!text.contains(&two));
    }

    #[test]
    fn a_file_that_others_can_write_lets_nobody_in() {
        let dir = tempfile::tempdir().unwrap();
        let key = Keys::own(dir.path()).add("one", "uid:1000").unwrap();
        let path = dir.path().join("keys.toml");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();

        assert_eq!(Keys::own(dir.path()).owner_of(&key), None);
        assert_eq!(Keys::of_operator(path).owner_of(&key), None);
    }

    #[test]
    fn the_operators_file_is_read_and_never_written() {
        let dir = tempfile::tempdir().unwrap();
        let key = Keys::own(dir.path()).add("one", "uid:1000").unwrap();
        let theirs = Keys::of_operator(dir.path().join("keys.toml"));

        assert_eq!(theirs.owner_of(&key).as_deref(), Some("uid:1000"));
        assert!(matches!(theirs.add("two", "uid:1000"), Err(KeysError::Operators { .. })));
        assert_eq!(Keys::of_operator("/nonexistent".into()).owner_of(&key), None);
    }

    #[test]
    fn malformed_files_say_which_entry() {
        let path = Path::new("keys.toml");
        for (text, expected) in [
            ("[[key]]\nname='a'\nsha256='zz'\nowner='uid:1'", "key[0].sha256"),
            ("[[key]]\nname='a'\nowner='uid:1'", "sha256"),
            ("[[key]]\nname='a'\nsha256='00'\nowner='uid:1'\nadmin=true", "admin"),
        ] {
            let error = parse(path, text).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let hash = "00".repeat(32);
        let owner = format!("[[key]]\nname='a'\nsha256='{hash}'\nowner='root'");
        assert!(parse(path, &owner).is_err());
    }
}
