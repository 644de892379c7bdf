//! The files that clients of a lease need: certificates in three forms, and the variables for a
//! container. They lie in a directory of their own and go with the lease.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use sandboxd::trust::{self, java, pem};

use crate::failure::Failure;

/// proxyd's certificates alone.
pub const CA: &str = "ca.pem";
/// This host's own certificates and proxyd's.
pub const BUNDLE: &str = "bundle.pem";
/// The same for Java.
pub const KEY_STORE: &str = "java.jks";
/// Variables for `docker run --env-file`.
pub const ENVIRONMENT: &str = "environment";

pub struct Files(tempfile::TempDir);

impl Files {
    /// A directory that others can read, since a container's user may be anybody: certificates are
    /// public. What holds the token is readable by its owner alone.
    pub fn make() -> Result<Self, Failure> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let parent = runtime.filter(|dir| dir.is_absolute() && dir.is_dir());
        let parent = parent.unwrap_or_else(std::env::temp_dir);
        let fail = |error| cannot_write(&parent, &error);
        let made = tempfile::Builder::new().prefix("cleanhands-lease.").tempdir_in(&parent);
        let files = Self(made.map_err(fail)?);
        std::fs::set_permissions(files.dir(), Permissions::from_mode(0o755)).map_err(fail)?;
        Ok(files)
    }

    pub fn dir(&self) -> &Path {
        self.0.path()
    }

    pub fn path(&self, name: &str) -> String {
        self.dir().join(name).display().to_string()
    }

    /// Writes the certificates in all their forms.
    pub fn write(&self, ca_pem: &str) -> Result<(), Failure> {
        let host = trust::SYSTEM_BUNDLES.iter().find_map(|path| std::fs::read(path).ok());
        let mut bundle = host.unwrap_or_default();
        let (roots, ours) = (pem::certificates(&bundle), pem::certificates(ca_pem.as_bytes()));
        if !bundle.is_empty() && !bundle.ends_with(b"\n") {
            bundle.push(b'\n');
        }
        bundle.extend_from_slice(ca_pem.as_bytes());
        self.put(CA, ca_pem.as_bytes(), 0o644)?;
        self.put(BUNDLE, &bundle, 0o644)?;
        self.put(KEY_STORE, &java::key_store(&roots, &ours), 0o644)
    }

    /// Writes variables as `docker run --env-file` reads them: a line each, nothing quoted.
    pub fn write_environment(&self, variables: &[(String, String)]) -> Result<(), Failure> {
        let lines: String = variables.iter().map(|(n, v)| format!("{n}={v}\n")).collect();
        self.put(ENVIRONMENT, lines.as_bytes(), 0o600)
    }

    /// Beside and renamed: a client finds the old file or the new one.
    fn put(&self, name: &str, bytes: &[u8], mode: u32) -> Result<(), Failure> {
        let (path, beside) = (self.dir().join(name), self.dir().join(format!("{name}.new")));
        let write = || {
            let mut options = File::options();
            options.write(true).create(true).truncate(true).mode(mode);
            options.open(&beside)?.write_all(bytes)?;
            // The umask may have taken the others' right to read.
            std::fs::set_permissions(&beside, Permissions::from_mode(mode))?;
            std::fs::rename(&beside, &path)
        };
        write().map_err(|error| cannot_write(&path, &error))
    }
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot write {}: {error}", path.display()))
}
