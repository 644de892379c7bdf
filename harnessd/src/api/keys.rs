//! The keys of the loopback port: a file of hashes, each with the owner it stands for.
//!
//! ```toml
//! [[key]]
//! name = "laptop"
//! sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
//! owner = "uid:1000"
//! ```
//!
//! The file holds no key, and a key is 160 random bits, so a plain hash is enough. The file is read
//! again when it changed; one that cannot be read, or that others can write, lets nobody in.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Longest key looked at, in bytes. Ours have 40.
const KEY_BYTES_MAX: usize = 512;

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
    #[serde(rename = "name")]
    _name: String,
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
}

/// The keys as they were read last.
pub struct Keys {
    path: Option<PathBuf>,
    read: Mutex<Option<Read>>,
}

#[derive(Clone)]
struct Read {
    stamp: Stamp,
    keys: std::sync::Arc<Vec<Key>>,
}

/// Tells one state of the file from the next.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    bytes: u64,
    seconds: i64,
    nanos: i64,
}

struct Key {
    hash: [u8; 32],
    owner: String,
}

impl Keys {
    pub fn new(path: Option<PathBuf>) -> Self {
        Self { path, read: Mutex::new(None) }
    }

    /// The owner that a key stands for. Every hash is compared, each in constant time.
    pub fn owner_of(&self, key: &str) -> Option<String> {
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return None;
        }
        let path = self.path.as_deref()?;
        let keys = match self.current(path) {
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

    fn current(&self, path: &Path) -> Result<std::sync::Arc<Vec<Key>>, KeysError> {
        let stamp = stamp(path)?;
        let mut read = self.read.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(read) = read.as_ref().filter(|read| read.stamp == stamp) {
            return Ok(std::sync::Arc::clone(&read.keys));
        }
        *read = None;
        let text = std::fs::read_to_string(path)
            .map_err(|source| KeysError::Read { path: path.to_owned(), source })?;
        let keys = std::sync::Arc::new(parse(path, &text)?);
        *read = Some(Read { stamp, keys: std::sync::Arc::clone(&keys) });
        Ok(keys)
    }
}

/// Reads a keys file once, to tell at start what is wrong with it.
pub fn check(path: &Path) -> Result<(), KeysError> {
    Keys::new(Some(path.to_owned())).current(path).map(drop)
}

/// Draws a key for `owner` (`uid:1000`) and gives it with the lines that the file needs. The key
/// itself is kept nowhere.
pub fn generate(name: &str, owner: &str) -> (String, String) {
    let key = format!("chk_{}", ipc::id::random_text(36));
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let lines = format!(
        "[[key]]\nname = {}\nsha256 = \"{}\"\nowner = {}\n",
        quoted(name),
        hex::encode(Sha256::digest(key.as_bytes())),
        quoted(owner),
    );
    (key, lines)
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
        keys.push(Key { hash, owner: entry.owner.clone() });
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
        let path = dir.path().join("keys.toml");
        let (one, one_lines) = generate("one", "uid:1000");
        let (two, two_lines) = generate("two \"quoted\"", "uid:1001");
        std::fs::write(&path, format!("{one_lines}\n{two_lines}")).unwrap();
        let keys = Keys::new(Some(path.clone()));

        assert_eq!(keys.owner_of(&one).as_deref(), Some("uid:1000"));
        assert_eq!(keys.owner_of(&two).as_deref(), Some("uid:1001"));
        assert_eq!(keys.owner_of("chk_guess"), None);
        std::fs::write(&path, two_lines).unwrap();
        assert_eq!(keys.owner_of(&one), None);
        assert!(!std::fs::read_to_string(&path).unwrap().contains(&two));
    }

    #[test]
    fn a_file_that_others_can_write_lets_nobody_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        let (key, lines) = generate("one", "uid:1000");
        std::fs::write(&path, lines).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();

        assert_eq!(Keys::new(Some(path.clone())).owner_of(&key), None);
        assert!(matches!(check(&path), Err(KeysError::Writable { .. })));
    }

    #[test]
    fn without_a_file_nobody_has_a_key() {
        assert_eq!(Keys::new(None).owner_of("chk_any"), None);
        assert_eq!(Keys::new(Some("/nonexistent".into())).owner_of("chk_any"), None);
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
