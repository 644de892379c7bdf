//! The operator's policy files, read again for each use.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use policies::PolicySet;

use super::error::ApiError;

/// A directory of policy files and what it held when it last was right. Files that do not parse
/// change nothing: what they said before stays in force, here as in proxyd.
pub struct PolicyFiles {
    dir: PathBuf,
    former: Mutex<Option<Arc<PolicySet>>>,
}

impl PolicyFiles {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, former: Mutex::new(None) }
    }

    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    pub async fn current(&self) -> Result<Arc<PolicySet>, ApiError> {
        let dir = self.dir.clone();
        let loaded = tokio::task::spawn_blocking(move || PolicySet::load(&dir)).await;
        let loaded = loaded.map_err(|error| ApiError::internal(&error))?;
        let mut former = self.former.lock().unwrap_or_else(PoisonError::into_inner);
        match (loaded, &*former) {
            (Ok(set), _) => Ok(Arc::clone(former.insert(Arc::new(set)))),
            (Err(found), kept) => {
                let first = found.first().map(ToString::to_string).unwrap_or_default();
                let kept = kept.clone();
                tracing::error!(problems = found.len(), first, "policies are not usable");
                let refused = || ApiError::unavailable(format!("policies are not usable: {first}"));
                kept.ok_or_else(refused)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_that_does_not_parse_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dev.toml");
        std::fs::write(&file, "sandbx = 1\n").unwrap();
        let files = PolicyFiles::new(dir.path().to_owned());

        let first = files.current().await.unwrap_err();
        std::fs::write(&file, "").unwrap();
        let good = files.current().await.unwrap();
        std::fs::write(&file, "sandbx = 1\n").unwrap();
        let kept = files.current().await.unwrap();

        assert!(first.message.contains("sandbx"), "{first}");
        assert!(Arc::ptr_eq(&good, &kept));
    }
}
