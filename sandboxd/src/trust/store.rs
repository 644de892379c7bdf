//! What is made out of a root's bundle, once for each root that sandboxes have: the key store for
//! Java, shared by all, because a private copy would be the largest thing a sandbox keeps in
//! memory; and the list of what the operator added to the bundle.
//!
//! A cell mounts the file read-only when it is made ([`crate::init`]), before proxyd's certificates
//! are known; the file is filled here before the first command runs. It is written in place, so
//! that sandboxes that live see the certificates that replace others.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};
use webpki_root_certs::TLS_SERVER_ROOT_CERTS;

use super::{BUNDLE_BYTES_MAX, java, pem};
use crate::zygote::memory;

/// All key stores of this daemon.
#[derive(Debug)]
pub struct KeyStores {
    directory: PathBuf,
    kept: Mutex<HashMap<PathBuf, KeyStore>>,
}

#[derive(Debug)]
struct KeyStore {
    path: PathBuf,
    file: File,
    /// The bundle that the root's certificates were read from.
    bundle: Option<Version>,
    roots: Vec<Vec<u8>>,
    /// Those of them, as PEM, that no runtime brings with it.
    added: Arc<str>,
    /// proxyd's certificates in the file; none yet: the file is empty.
    ours: Option<String>,
}

/// A file's content, as far as its metadata tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    /// When the inode was changed last.
    changed: (i64, u64),
    modified: (i64, u64),
    inode: (u64, u64),
    bytes: i64,
}

impl KeyStores {
    /// Begins anew below `directory`: no sandbox of an earlier daemon lives.
    pub fn open(directory: PathBuf) -> Result<Self> {
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        ipc::daemon::private_directory(&directory).map_err(Error::other)?;
        Ok(Self { directory, kept: Mutex::default() })
    }

    /// The file for sandboxes of a root; it may still have to be filled.
    pub fn path(&self, root: &Path) -> Result<PathBuf> {
        let mut kept = self.kept();
        if let Some(store) = kept.get(root) {
            return Ok(store.path.clone());
        }
        let name = Sha256::digest(root.as_os_str().as_encoded_bytes());
        let path = self.directory.join(format!("{}.jks", hex::encode(&name[..16])));
        let file = File::options().write(true).create_new(true).open(&path)?;
        // Whatever the umask: a sandbox may have another user. Its mount is read-only.
        file.set_permissions(std::fs::Permissions::from_mode(0o444))?;
        let (roots, added) = (Vec::new(), Arc::from(""));
        let store = KeyStore { path: path.clone(), file, bundle: None, roots, added, ours: None };
        kept.insert(root.to_owned(), store);
        Ok(path)
    }

    /// Has the root's store trust what is in `bundle`, as the cell opened it, and proxyd's
    /// certificates. Nothing is done where it does already, which is always but for the first time
    /// and after a change: then it takes about a millisecond. Returns what is in the bundle beyond
    /// Mozilla's list, which every runtime with a list of its own brings.
    pub fn fill(&self, root: &Path, bundle: Option<&OwnedFd>, ours: &str) -> Result<Arc<str>> {
        let mut kept = self.kept();
        let Some(store) = kept.get_mut(root) else { return Ok(Arc::from("")) };
        let version = bundle.map(version).transpose()?;
        // A cell that waited for its session has opened what was the bundle then. (Being replaced
        // changes a file's inode, not its content.)
        let newer = |kept: &Version| version.is_some_and(|v| v.modified >= kept.modified);
        let changed =
            version.is_some() && version != store.bundle && store.bundle.as_ref().is_none_or(newer);
        if let Some(bundle) = bundle
            && changed
        {
            let bytes_max = usize::try_from(BUNDLE_BYTES_MAX).map_err(Error::other)?;
            store.roots = pem::certificates(&memory::read(bundle, bytes_max)?);
            store.added = beyond_mozilla(&store.roots).into();
            store.bundle = version;
        }
        if changed || store.ours.as_deref() != Some(ours) {
            // Until it is whole it is none: a write that fails is tried again.
            store.ours = None;
            let bytes = java::key_store(&store.roots, &pem::certificates(ours.as_bytes()));
            store.file.write_all_at(&bytes, 0)?;
            store.file.set_len(bytes.len() as u64)?;
            store.ours = Some(ours.to_owned());
        }
        Ok(Arc::clone(&store.added))
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<PathBuf, KeyStore>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn beyond_mozilla(roots: &[Vec<u8>]) -> String {
    let known: HashSet<&[u8]> = TLS_SERVER_ROOT_CERTS.iter().map(|der| &der[..]).collect();
    roots.iter().filter(|der| !known.contains(&der[..])).map(|der| pem::entry(der)).collect()
}

fn version(file: &OwnedFd) -> Result<Version> {
    let stat = rustix::fs::fstat(file)?;
    Ok(Version {
        changed: (stat.st_ctime, stat.st_ctime_nsec),
        modified: (stat.st_mtime, stat.st_mtime_nsec),
        inode: (stat.st_dev, stat.st_ino),
        bytes: stat.st_size,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "-----BEGIN CERTIFICATE-----\nMAEJ\n-----END CERTIFICATE-----\n";
    const OTHER: &str = "-----BEGIN CERTIFICATE-----\nMAEK\n-----END CERTIFICATE-----\n";

    fn bundle(dir: &Path, text: &str) -> OwnedFd {
        let path = dir.join("bundle");
        std::fs::write(&path, text).unwrap();
        File::open(path).unwrap().into()
    }

    fn expected(roots: &[u8], ours: u8) -> Vec<u8> {
        let roots: Vec<Vec<u8>> = roots.iter().map(|byte| vec![0x30, 1, *byte]).collect();
        java::key_store(&roots, &[vec![0x30, 1, ours]])
    }

    #[test]
    fn a_store_follows_the_roots_bundle_and_proxyds_certificates() {
        let dir = tempfile::tempdir().unwrap();
        let stores = KeyStores::open(dir.path().join("trust")).unwrap();
        let root = Path::new("/image");
        let path = stores.path(root).unwrap();
        assert_eq!(stores.path(root).unwrap(), path);

        stores.fill(root, None, OURS).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected(&[], 9));

        let roots = bundle(dir.path(), &format!("{OURS}{OTHER}"));
        stores.fill(root, Some(&roots), OURS).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected(&[9, 10], 9));

        stores.fill(root, None, OTHER).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected(&[9, 10], 10));

        let roots = bundle(dir.path(), "");
        stores.fill(root, Some(&roots), OTHER).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), expected(&[], 10));
    }

    #[test]
    fn what_an_operator_added_to_the_bundle_is_told_from_what_every_runtime_brings() {
        let dir = tempfile::tempdir().unwrap();
        let stores = KeyStores::open(dir.path().join("trust")).unwrap();
        let root = Path::new("/");
        stores.path(root).unwrap();
        let known: String = TLS_SERVER_ROOT_CERTS.iter().map(|der| pem::entry(der)).collect();
        let roots = bundle(dir.path(), &format!("{known}{OTHER}"));

        let added = stores.fill(root, Some(&roots), OURS).unwrap();

        assert_eq!(&*added, OTHER);
        assert_eq!(&*stores.fill(root, None, OTHER).unwrap(), OTHER);
    }

    #[test]
    fn a_sandbox_made_before_the_bundle_was_replaced_does_not_bring_the_old_one_back() {
        let dir = tempfile::tempdir().unwrap();
        let stores = KeyStores::open(dir.path().join("trust")).unwrap();
        let root = Path::new("/");
        let path = stores.path(root).unwrap();
        let old = bundle(dir.path(), OTHER);
        std::fs::remove_file(dir.path().join("bundle")).unwrap();
        // The clock of a file system stands still for some milliseconds.
        let new = std::iter::repeat_with(|| bundle(dir.path(), OURS))
            .find(|new| version(new).unwrap().modified > version(&old).unwrap().modified);

        for bundle in [&old, new.as_ref().unwrap(), &old] {
            stores.fill(root, Some(bundle), OURS).unwrap();
        }

        assert_eq!(std::fs::read(&path).unwrap(), expected(&[9], 9));
    }

    #[test]
    fn roots_do_not_share_and_nothing_of_an_earlier_daemon_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let stores = KeyStores::open(dir.path().join("trust")).unwrap();
        let (one, other) = (stores.path(Path::new("/a")).unwrap(), stores.path(Path::new("/b")));
        assert_ne!(one, other.unwrap());
        stores.fill(Path::new("/a"), None, OURS).unwrap();

        let stores = KeyStores::open(dir.path().join("trust")).unwrap();

        assert!(!one.exists());
        assert_eq!(std::fs::read(stores.path(Path::new("/a")).unwrap()).unwrap(), b"");
    }
}
