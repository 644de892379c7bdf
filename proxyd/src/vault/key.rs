//! Where the vault's key comes from.

use std::path::{Path, PathBuf};

use super::VaultError;

/// Name of the systemd credential that holds the key when nothing else is configured.
pub const SYSTEMD_CREDENTIAL: &str = "proxyd-master";

/// Where the key that opens the vault lies. Only the vault child reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file of this user with mode 0600. The default one, `vault/vault.key` below proxyd's
    /// state, is made at the first start (`create`).
    File { path: PathBuf, create: bool },
    /// A systemd credential (systemd.exec(5)), as a path below `$CREDENTIALS_DIRECTORY`.
    Systemd { path: PathBuf },
    /// A file with a passphrase; the key is derived with Argon2id.
    Passphrase { path: PathBuf },
}

impl KeySource {
    /// Reads the configuration's `key`: `file:PATH`, `systemd:NAME`, `passphrase-file:PATH`.
    /// Without one, the systemd credential `proxyd-master` serves if there is one, else the key
    /// file below `state` (proxyd's own state directory).
    pub fn choose(
        configured: Option<&str>,
        credentials_directory: Option<&Path>,
        state: &Path,
    ) -> Result<KeySource, VaultError> {
        let _ = (configured, credentials_directory, state);
        todo!()
    }
}
