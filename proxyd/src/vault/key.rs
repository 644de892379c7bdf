//! Where the vault's key comes from, and the key that the source yields.
//!
//! The source yields a key-encryption key; it opens the data key that lies, wrapped, in the store.
//! Only the vault child reads a source. A source that others could read is refused.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::VaultError;

/// Name of the systemd credential that holds the key when nothing else is configured.
pub const SYSTEMD_CREDENTIAL: &str = "proxyd-master";
/// Bytes of every key here.
pub const KEY_BYTES: usize = 32;
/// A key file or credential must hold at least this much to stand for 256 bits.
const KEY_FILE_BYTES_MIN: usize = 32;
/// A key file is small; a bigger one is a mistake.
const KEY_FILE_BYTES_MAX: u64 = 4096;
/// A passphrase shorter than this is guessed even through Argon2id.
const PASSPHRASE_BYTES_MIN: usize = 12;
/// Argon2id with 64 MiB and three passes: a fifth of a second, once at start.
const ARGON2_KIB: u32 = 64 * 1024;
const ARGON2_PASSES: u32 = 3;

/// Where the key that opens the vault lies.
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
        let Some(configured) = configured else {
            let credential = credentials_directory.map(|dir| dir.join(SYSTEMD_CREDENTIAL));
            return Ok(match credential.filter(|path| path.exists()) {
                Some(path) => Self::Systemd { path },
                None => {
                    Self::File { path: super::directory(state).join("vault.key"), create: true }
                }
            });
        };
        match configured.split_once(':') {
            Some(("file", path)) if !path.is_empty() => {
                Ok(Self::File { path: path.into(), create: false })
            }
            Some(("passphrase-file", path)) if !path.is_empty() => {
                Ok(Self::Passphrase { path: path.into() })
            }
            Some(("systemd", name)) if !name.is_empty() && !name.contains('/') => {
                let directory = credentials_directory.ok_or_else(|| {
                    VaultError::Key(format!(
                        "cannot read the vault's key: credential {name}: this service has no \
                         credentials (LoadCredential=, LoadCredentialEncrypted=)"
                    ))
                })?;
                Ok(Self::Systemd { path: directory.join(name) })
            }
            _ => Err(VaultError::Key(format!(
                "cannot use key {configured:?}: it is none of file:PATH, systemd:NAME, \
                 passphrase-file:PATH"
            ))),
        }
    }

    /// The word for health reports.
    pub fn word(&self) -> &'static str {
        match self {
            Self::File { .. } => "key-file",
            Self::Systemd { .. } => "systemd-credential",
            Self::Passphrase { .. } => "passphrase",
        }
    }

    pub fn path(&self) -> &Path {
        match self {
            Self::File { path, .. } | Self::Systemd { path } | Self::Passphrase { path } => path,
        }
    }

    /// As an argument of the child: names a place, never a key.
    pub(super) fn to_argument(&self) -> std::ffi::OsString {
        let kind = match self {
            Self::File { create: true, .. } => "created-file:",
            Self::File { create: false, .. } => "file:",
            Self::Systemd { .. } => "systemd:",
            Self::Passphrase { .. } => "passphrase:",
        };
        let mut argument = std::ffi::OsString::from(kind);
        argument.push(self.path());
        argument
    }

    pub(super) fn from_argument(argument: &std::ffi::OsStr) -> Option<Self> {
        use std::os::unix::ffi::OsStrExt;
        let bytes = argument.as_bytes();
        let colon = bytes.iter().position(|byte| *byte == b':')?;
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(&bytes[colon + 1..]));
        match &bytes[..colon] {
            b"created-file" => Some(Self::File { path, create: true }),
            b"file" => Some(Self::File { path, create: false }),
            b"systemd" => Some(Self::Systemd { path }),
            b"passphrase" => Some(Self::Passphrase { path }),
            _ => None,
        }
    }

    /// Reads what the source holds. `new_vault` says that there is no vault yet: only then is a
    /// key file made, since a new key would not open an old vault.
    pub(super) fn read(&self, new_vault: bool) -> Result<Material, VaultError> {
        if let Self::File { path, create: true } = self
            && new_vault
            && !path.exists()
        {
            create_key_file(path)?;
        }
        let bytes = self.read_private()?;
        let fault = |why: &str| {
            VaultError::Key(format!("cannot use the vault's key {}: {why}", self.path().display()))
        };
        match self {
            Self::Passphrase { .. } => {
                let text = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
                if text.len() < PASSPHRASE_BYTES_MIN {
                    return Err(fault("a passphrase has at least 12 characters"));
                }
                Ok(Material::Passphrase(Zeroizing::new(text.to_vec())))
            }
            _ if bytes.len() < KEY_FILE_BYTES_MIN => {
                Err(fault("it holds less than 32 bytes, which is too few for a key"))
            }
            _ => Ok(Material::Key(bytes)),
        }
    }

    fn read_private(&self) -> Result<Zeroizing<Vec<u8>>, VaultError> {
        let path = self.path();
        let fault = |why: String| {
            VaultError::Key(format!("cannot read the vault's key {}: {why}", path.display()))
        };
        let file = File::open(path).map_err(|error| fault(error.to_string()))?;
        let meta = file.metadata().map_err(|error| fault(error.to_string()))?;
        if !meta.is_file() {
            return Err(fault("it is no file".into()));
        }
        // systemd itself keeps credentials from others, with an access list that shows as group
        // bits; a file of ours must not be readable by anybody else.
        let own = meta.uid() == rustix::process::geteuid().as_raw() || meta.uid() == 0;
        if !matches!(self, Self::Systemd { .. }) && (meta.mode() & 0o077 != 0 || !own) {
            return Err(fault(format!(
                "others can read it (mode {:03o}, uid {}): it must be 0600 and this user's",
                meta.mode() & 0o777,
                meta.uid()
            )));
        }
        if meta.len() > KEY_FILE_BYTES_MAX {
            return Err(fault("it is larger than 4096 bytes".into()));
        }
        let mut bytes = Zeroizing::new(Vec::with_capacity(KEY_FILE_BYTES_MAX as usize + 1));
        file.take(KEY_FILE_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(|error| fault(error.to_string()))?;
        Ok(bytes)
    }
}

pub(super) fn create_key_file(path: &Path) -> Result<(), VaultError> {
    let fault = |error: std::io::Error| {
        VaultError::Key(format!("cannot make the vault's key {}: {error}", path.display()))
    };
    let mut key = Zeroizing::new([0u8; KEY_BYTES]);
    getrandom::fill(&mut *key).map_err(|error| fault(std::io::Error::other(error)))?;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(fault)?;
    file.write_all(&*key).and_then(|()| file.sync_all()).map_err(fault)?;
    // The name must survive a power cut as surely as the vault that it opens.
    let parent = path.parent().unwrap_or(Path::new("."));
    File::open(parent).and_then(|directory| directory.sync_all()).map_err(fault)
}

/// What a source held.
pub(super) enum Material {
    Key(Zeroizing<Vec<u8>>),
    Passphrase(Zeroizing<Vec<u8>>),
}

impl Material {
    /// The key that wraps the data key of the vault with this salt.
    pub(super) fn key(&self, salt: &[u8]) -> Result<Zeroizing<[u8; KEY_BYTES]>, VaultError> {
        let mut key = Zeroizing::new([0u8; KEY_BYTES]);
        match self {
            Self::Key(bytes) => derive(bytes, salt, b"cleanhands vault wrapping key", &mut key),
            Self::Passphrase(text) => {
                let params = argon2::Params::new(ARGON2_KIB, ARGON2_PASSES, 1, Some(KEY_BYTES))
                    .expect("the parameters are within Argon2's bounds");
                argon2::Argon2::new(argon2::Algorithm::Argon2id, argon2::Version::V0x13, params)
                    .hash_password_into(text, salt, &mut *key)
                    .map_err(|error| {
                        VaultError::Key(format!("cannot derive the vault's key: {error}"))
                    })?;
            }
        }
        Ok(key)
    }
}

/// A key for one use from another key (RFC 5869).
pub(super) fn derive(secret: &[u8], salt: &[u8], purpose: &[u8], out: &mut [u8; KEY_BYTES]) {
    Hkdf::<Sha256>::new(Some(salt), secret)
        .expand(purpose, out)
        .expect("32 bytes are within what HKDF-SHA256 yields");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_configuration_names_a_source_or_is_refused() {
        let state = Path::new("/state");
        let directory = Some(Path::new("/credentials"));
        let choose = |text| KeySource::choose(Some(text), directory, state).ok();
        let file = |path: &str| KeySource::File { path: path.into(), create: false };

        assert_eq!(choose("file:/k"), Some(file("/k")));
        assert_eq!(
            choose("systemd:master"),
            Some(KeySource::Systemd { path: "/credentials/master".into() })
        );
        assert_eq!(choose("passphrase-file:/p"), Some(KeySource::Passphrase { path: "/p".into() }));
        for bad in ["", "/k", "file:", "systemd:../x", "env:KEY", "passphrase:/p"] {
            assert_eq!(choose(bad), None, "{bad}");
        }
        assert!(KeySource::choose(Some("systemd:master"), None, state).is_err());
    }

    #[test]
    fn without_configuration_a_systemd_credential_comes_before_the_key_file() {
        let dir = tempfile::tempdir().unwrap();
        let state = Path::new("/state");

        let without = KeySource::choose(None, Some(dir.path()), state).unwrap();
        std::fs::write(dir.path().join(SYSTEMD_CREDENTIAL), [7; 32]).unwrap();
        let with = KeySource::choose(None, Some(dir.path()), state).unwrap();

        assert_eq!(without.word(), "key-file");
        assert_eq!(with.word(), "systemd-credential");
    }

    #[test]
    fn arguments_come_back_as_they_went() {
        for source in [
            KeySource::File { path: "/a:b".into(), create: true },
            KeySource::File { path: "/a".into(), create: false },
            KeySource::Systemd { path: "/c/d".into() },
            KeySource::Passphrase { path: "/p".into() },
        ] {
            assert_eq!(KeySource::from_argument(&source.to_argument()), Some(source));
        }
    }

    #[test]
    fn a_key_that_others_can_read_or_that_is_too_short_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let source = KeySource::File { path: path.clone(), create: false };
        let write = |bytes: &[u8], mode| {
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            source.read(true).err().map(|error| error.to_string())
        };

        assert_eq!(write(&[1; 32], 0o600), None);
        assert!(write(&[1; 32], 0o640).unwrap().contains("others can read it"));
        assert!(write(&[1; 32], 0o604).unwrap().contains("others can read it"));
        assert!(write(&[1; 31], 0o600).unwrap().contains("less than 32 bytes"));
        assert!(write(&[1; 5000], 0o600).unwrap().contains("larger"));
    }

    #[test]
    fn a_key_file_is_made_for_a_new_vault_only() {
        let dir = tempfile::tempdir().unwrap();
        let source = KeySource::File { path: dir.path().join("key"), create: true };

        assert!(source.read(false).is_err());
        assert!(source.read(true).is_ok());
        assert!(source.read(false).is_ok());
    }

    #[test]
    fn keys_differ_by_salt_and_by_source() {
        let key = Material::Key(Zeroizing::new(vec![1; 32]));
        let phrase = Material::Passphrase(Zeroizing::new(vec![1; 32]));

        let made = [
            key.key(b"salt of vault one").unwrap(),
            key.key(b"salt of vault two").unwrap(),
            phrase.key(b"salt of vault one").unwrap(),
        ];

        assert!(made[0] != made[1] && made[0] != made[2]);
        assert!(made[0] == key.key(b"salt of vault one").unwrap());
    }
}
