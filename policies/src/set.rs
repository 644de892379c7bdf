//! All environments of one directory.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::diagnostic::{Diagnostic, Severity};
use crate::policy::Policy;

/// The name of the file that lists host groups; every other `NAME.toml` is an environment.
pub const GROUPS_FILE: &str = "groups.toml";

/// The environment of harnessd's own model calls; no sandbox is made in it.
pub const HARNESS: &str = "harness";

/// All environments of a directory. A set is whole: one bad file and there is none.
#[derive(Debug, Default)]
pub struct PolicySet {
    environments: BTreeMap<String, Arc<Policy>>,
    warnings: Vec<Diagnostic>,
    digest: String,
}

impl PolicySet {
    /// Reads every `NAME.toml` of a directory. Files that somebody besides root and the calling
    /// user can write are refused: whoever writes a policy decides where credentials go.
    pub fn load(dir: &Path) -> Result<Self, Vec<Diagnostic>> {
        Self::parse(&Self::read(dir)?)
    }

    /// The same files as paths and texts, sorted, for those who must tell one state from another.
    pub fn read(dir: &Path) -> Result<Vec<(String, String)>, Vec<Diagnostic>> {
        crate::load::read(dir)
    }

    /// Parses files given as name (`dev.toml`, or a path that ends in it) and text.
    pub fn parse(files: &[(String, String)]) -> Result<Self, Vec<Diagnostic>> {
        let (environments, found) = crate::file::parse(files);
        if found.iter().any(|diagnostic| diagnostic.severity == Severity::Error) {
            return Err(found);
        }
        Ok(Self { environments, warnings: found, digest: digest(files) })
    }

    pub fn environment(&self, name: &str) -> Option<&Arc<Policy>> {
        self.environments.get(name)
    }

    /// The names of all environments, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.environments.keys().map(String::as_str)
    }

    /// Stands for the names and texts of all files: SHA-256, in hex. Two readers with the same
    /// digest go by the same policies.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// What is legal but most likely not meant.
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }
}

/// In the order of names, wherever the directory is; lengths keep two files from being one.
fn digest(files: &[(String, String)]) -> String {
    let name = |path: &'_ str| path.rsplit('/').next().unwrap_or_default().to_owned();
    let mut files: Vec<_> = files.iter().map(|(path, text)| (name(path), text)).collect();
    files.sort();
    let mut all = Sha256::new();
    for (name, text) in files {
        for part in [name.as_str(), text] {
            all.update((part.len() as u64).to_be_bytes());
            all.update(part);
        }
    }
    hex::encode(all.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_stands_for_names_and_texts_and_not_for_the_directory() {
        let of = |files: &[(&str, &str)]| {
            let owned = files.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned()));
            PolicySet::parse(&owned.collect::<Vec<_>>()).unwrap().digest().to_owned()
        };

        let here = of(&[("/a/dev.toml", "# x"), ("/a/prod.toml", "")]);
        assert_eq!(here, of(&[("/b/prod.toml", ""), ("/b/dev.toml", "# x")]));
        assert_ne!(here, of(&[("/a/dev.toml", ""), ("/a/prod.toml", "# x")]));
        assert_ne!(here, of(&[("/a/dev.toml", "# x")]));
        assert_eq!(here.len(), 64);
    }
}
