//! All environments of one directory.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

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
        Ok(Self { environments, warnings: found })
    }

    pub fn environment(&self, name: &str) -> Option<&Arc<Policy>> {
        self.environments.get(name)
    }

    /// The names of all environments, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.environments.keys().map(String::as_str)
    }

    /// What is legal but most likely not meant.
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }
}
