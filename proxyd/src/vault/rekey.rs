//! Another key for the vault, in place of the one that it was opened with so far.
//!
//! Only the row that wraps the data key changes, in one step on disk: before it the former key
//! opens the vault, after it the new one. Neither key's file is touched before that.
//!
//! A key that proxyd made itself is replaced at an operator's word: the new one lies beside it
//! under another name, is wrapped with, and takes the name of the former one, which is overwritten.
//! A start after a crash goes on from there. A key that the operator keeps is replaced at a start:
//! the configuration names the new one as `key` and the other as `former-key`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::VaultError;
use super::key::{KeySource, Material, create_key_file};
use super::store::Store;

/// What the sources of a start held.
pub(super) struct Keys {
    current: Material,
    /// Of a replacement that was not finished.
    next: Option<Material>,
    former: Option<Result<Material, VaultError>>,
    own: Own,
}

/// Where the key lies that proxyd made itself; nothing where the operator keeps it.
#[derive(Default)]
pub(super) struct Own(Option<PathBuf>);

impl Keys {
    /// Reads the sources, before anything is confined. `new_vault` as [`KeySource::read`] has it.
    pub fn read(
        source: &KeySource,
        former: Option<&KeySource>,
        new_vault: bool,
    ) -> Result<Self, VaultError> {
        let own = Own(match source {
            KeySource::File { path, create: true } => Some(path.clone()),
            _ => None,
        });
        let current = source.read(new_vault)?;
        // One that was not written to its end has never closed the vault.
        let next = own.next().and_then(|path| read_file(&path).ok());
        let former = former.map(|source| source.read(false));
        Ok(Self { current, next, former, own })
    }

    /// Opens the vault in `directory` with whichever key it is closed with, and closes it with the
    /// present one from now on. Gives what the operator should know.
    pub fn open(self, directory: &Path) -> Result<(Store, Own, Vec<String>), VaultError> {
        let Self { current, next, former, own } = self;
        let refused = match Store::open(directory, &current) {
            Ok(store) => {
                own.drop_next()?;
                let note = "former-key in proxyd.toml is needed no more: remove it, then its key";
                let notes = former.map(|_| note.to_owned()).into_iter().collect();
                return Ok((store, own, notes));
            }
            Err(VaultError::Key(reason)) => reason,
            Err(error) => return Err(error),
        };
        if let Some(next) = next {
            match Store::open(directory, &next) {
                Ok(store) => {
                    own.finish()?;
                    return Ok((store, own, Vec::new()));
                }
                Err(VaultError::Key(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let former = former.ok_or(VaultError::Key(refused))??;
        let mut store = Store::open(directory, &former).map_err(|error| match error {
            VaultError::Key(_) => VaultError::Key(
                "cannot open the vault: neither key nor former-key is the one that it was closed \
                 with"
                    .into(),
            ),
            other => other,
        })?;
        store.rewrap(&current)?;
        let note = "the vault is closed with the new key from now on: remove former-key from \
                    proxyd.toml, then the former key";
        Ok((store, own, vec![note.to_owned()]))
    }
}

impl Own {
    /// Replaces the key. When it returns the former one opens nothing any more and is gone.
    pub fn replace(&self, store: &mut Store) -> Result<(), VaultError> {
        if self.0.is_none() {
            return Err(VaultError::Invalid(
                "the vault's key is not proxyd's own: make another one, name it as key and the \
                 present one as former-key in proxyd.toml, and start proxyd again"
                    .into(),
            ));
        }
        self.settle(store)?;
        let next = self.begin()?;
        store.rewrap(&next)?;
        self.finish()
    }

    /// A former replacement may have ended in an error that left open how far it came.
    fn settle(&self, store: &Store) -> Result<(), VaultError> {
        let next = self.next().and_then(|path| read_file(&path).ok());
        match next {
            Some(next) if store.is_wrapped_by(&next)? => self.finish(),
            _ => self.drop_next(),
        }
    }

    /// Makes the new key beside the present one; on disk when it returns.
    fn begin(&self) -> Result<Material, VaultError> {
        let next = self.next().ok_or_else(|| VaultError::Failed("no key file".into()))?;
        create_key_file(&next)?;
        read_file(&next)
    }

    /// Gives the new key its place, and overwrites the former one.
    fn finish(&self) -> Result<(), VaultError> {
        let (Some(path), Some(next)) = (&self.0, self.next()) else { return Ok(()) };
        let failed = |error: std::io::Error| {
            let place = path.display();
            VaultError::Failed(format!("cannot put the vault's new key in place: {place}: {error}"))
        };
        let former = File::options().write(true).open(path).map_err(failed)?;
        std::fs::rename(&next, path).map_err(failed)?;
        sync_directory(path).map_err(failed)?;
        overwrite(former).map_err(failed)
    }

    /// Removes a new key that has never closed the vault.
    fn drop_next(&self) -> Result<(), VaultError> {
        let Some(next) = self.next().filter(|next| next.exists()) else { return Ok(()) };
        std::fs::remove_file(&next)
            .and_then(|()| sync_directory(&next))
            .map_err(|error| VaultError::Failed(format!("cannot remove {next:?}: {error}")))
    }

    fn next(&self) -> Option<PathBuf> {
        let mut name = self.0.clone()?.into_os_string();
        name.push(".next");
        Some(name.into())
    }
}

fn read_file(path: &Path) -> Result<Material, VaultError> {
    KeySource::File { path: path.to_owned(), create: false }.read(false)
}

fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("."))).and_then(|directory| directory.sync_all())
}

/// What the file system does not copy elsewhere by itself is gone then.
fn overwrite(mut file: File) -> std::io::Result<()> {
    let zeros = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or_default()];
    file.write_all(&zeros)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::vault::secret::Secret;

    /// A vault with a value, its key in `vault.key` below the same directory.
    struct Scene {
        dir: tempfile::TempDir,
    }

    impl Scene {
        fn new() -> Self {
            let scene = Self { dir: tempfile::tempdir().unwrap() };
            let (mut store, _, _) = scene.keys(true).open(scene.dir.path()).unwrap();
            store.put("api", &Secret::new(b"VALUE-CANARY-1".to_vec()), 0).unwrap();
            scene
        }

        fn source(&self) -> KeySource {
            KeySource::File { path: self.dir.path().join("vault.key"), create: true }
        }

        fn keys(&self, new_vault: bool) -> Keys {
            Keys::read(&self.source(), None, new_vault).unwrap()
        }

        fn key(&self) -> Vec<u8> {
            std::fs::read(self.dir.path().join("vault.key")).unwrap()
        }

        /// What a start finds.
        fn opens(&self) -> (Store, Own) {
            let (store, own, _) = self.keys(false).open(self.dir.path()).unwrap();
            let value = store.values("api").unwrap();
            assert_eq!(value[0].expose_secret(), b"VALUE-CANARY-1");
            assert!(!self.dir.path().join("vault.key.next").exists(), "a second key is left");
            (store, own)
        }

        fn operators(&self, name: &str, byte: u8) -> KeySource {
            let path = self.dir.path().join(name);
            std::fs::write(&path, [byte; 32]).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            KeySource::File { path, create: false }
        }
    }

    #[test]
    fn a_replaced_key_opens_the_vault_and_the_former_one_opens_it_no_more() {
        let scene = Scene::new();
        let (mut store, own) = scene.opens();
        let mut keys = vec![scene.key()];
        for _ in 0..3 {
            own.replace(&mut store).unwrap();
            keys.push(scene.key());
        }
        drop(store);

        scene.opens();
        for (at, former) in keys[..3].iter().enumerate() {
            assert_ne!(*former, keys[3]);
            std::fs::write(scene.dir.path().join("vault.key"), former).unwrap();
            let refused = scene.keys(false).open(scene.dir.path());
            assert!(matches!(refused, Err(VaultError::Key(_))), "key {at} still opens it");
        }
    }

    #[test]
    fn whatever_step_of_a_replacement_was_the_last_the_vault_opens() {
        for last in 0..5 {
            let scene = Scene::new();
            let (mut store, own) = scene.opens();
            let before = scene.key();
            let next = scene.dir.path().join("vault.key.next");
            // A key that was not written to its end.
            if last == 0 {
                std::fs::write(&next, [7; 16]).unwrap();
            }
            if last >= 1 {
                let material = own.begin().unwrap();
                if last >= 2 {
                    store.rewrap(&material).unwrap();
                }
            }
            // Its name was taken, but the former one not overwritten.
            if last == 3 {
                std::fs::rename(&next, scene.dir.path().join("vault.key")).unwrap();
            }
            if last == 4 {
                own.finish().unwrap();
            }
            drop(store);

            let (mut store, own) = scene.opens();
            assert_eq!(scene.key() != before, last >= 2, "step {last}");
            own.replace(&mut store).unwrap();
            drop(store);
            scene.opens();
        }
    }

    #[test]
    fn a_replacement_that_ended_in_an_error_is_settled_by_the_next() {
        for wrapped in [false, true] {
            let scene = Scene::new();
            let (mut store, own) = scene.opens();
            let material = own.begin().unwrap();
            if wrapped {
                store.rewrap(&material).unwrap();
            }

            own.replace(&mut store).unwrap();
            drop(store);

            scene.opens();
        }
    }

    #[test]
    fn an_operators_key_of_any_source_takes_the_place_of_the_former_at_a_start() {
        for kind in 0..3 {
            let scene = Scene::new();
            let (new, wrong) = (scene.operators("new", 50), scene.operators("wrong", 51));
            let path = new.path().to_owned();
            let new = match kind {
                0 => new,
                1 => KeySource::Systemd { path },
                _ => KeySource::Passphrase { path },
            };
            let open = |source: &KeySource, former: Option<&KeySource>| {
                Keys::read(source, former, false).unwrap().open(scene.dir.path())
            };
            let refused = |source: &KeySource, former: Option<&KeySource>| {
                open(source, former).err().unwrap().to_string()
            };
            let old = scene.source();
            assert!(refused(&new, Some(&wrong)).contains("neither key nor former-key"));
            assert!(refused(&new, None).contains("former-key in proxyd.toml"));

            let (mut store, own, notes) = open(&new, Some(&old)).unwrap();
            assert!(notes[0].contains("new key"), "{notes:?}");
            assert!(matches!(own.replace(&mut store), Err(VaultError::Invalid(_))));
            drop(store);

            // Both ways to go on, and none back.
            assert!(open(&new, Some(&old)).unwrap().2[0].contains("needed no more"));
            assert!(open(&new, None).unwrap().2.is_empty());
            assert!(open(&old, None).is_err());
            // A former key that is gone already is in nobody's way.
            let gone = KeySource::File { path: scene.dir.path().join("gone"), create: false };
            assert!(open(&new, Some(&gone)).is_ok());
            assert!(refused(&wrong, Some(&gone)).contains("gone"));
        }
    }
}
