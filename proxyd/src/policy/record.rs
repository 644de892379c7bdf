//! Which generation's number was used last, and for which texts: one small file.
//!
//! It is on disk before the number is in use. A number that was kept and then not used is a gap,
//! which says nothing wrong; a number used twice would make the audit ambiguous.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::LoadError;

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    generation: u64,
    /// Of names and texts, SHA-256, hex.
    policies: String,
}

/// The record and what it says now.
pub struct Record {
    dir: PathBuf,
    kept: Kept,
    on_disk: bool,
}

impl Record {
    /// Reads the record in `dir`; without one, numbers begin.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("generation.json");
        let failed = |source| LoadError::Record { path: path.clone(), source };
        let kept = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| failed(std::io::Error::other(error)))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Kept::default(),
            Err(error) => return Err(failed(error)),
        };
        Ok(Self { dir: dir.to_owned(), kept, on_disk: true })
    }

    /// Gives these texts their number: the last one if it stands for them, else a new one. On an
    /// error the number is theirs all the same and is written the next time.
    pub fn number(&mut self, files: &[(String, String)]) -> Result<u64, LoadError> {
        let policies = digest(files);
        if self.kept.generation == 0 || self.kept.policies != policies {
            self.kept = Kept { generation: self.kept.generation + 1, policies };
            self.on_disk = false;
        }
        if !self.on_disk {
            let path = self.dir.join("generation.json");
            self.write(&path).map_err(|source| LoadError::Record { path, source })?;
            self.on_disk = true;
        }
        Ok(self.kept.generation)
    }

    /// The number that was given last.
    pub fn last(&self) -> u64 {
        self.kept.generation
    }

    /// Beside, synced, renamed: after a crash there is the old record or the new one.
    fn write(&self, path: &Path) -> std::io::Result<()> {
        let beside = self.dir.join("generation.new");
        let mut file = std::fs::File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&beside)?;
        file.write_all(&serde_json::to_vec(&self.kept).map_err(std::io::Error::other)?)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        std::fs::File::open(&self.dir)?.sync_all()
    }
}

fn digest(files: &[(String, String)]) -> String {
    let mut digest = Sha256::new();
    for (path, text) in files {
        // The directory may move; the environment's name is the file's.
        let name = path.rsplit('/').next().unwrap_or(path);
        for part in [name, text] {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
    }
    hex::encode(digest.finalize())
}
