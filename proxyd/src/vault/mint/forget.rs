//! What ends with a secret: all that was had by it, however far from it.
//!
//! A secret of the store may be what a token is had for, the client's that asks for it, the login
//! at a server that keeps others, or what a command reads. Whoever changes or removes it means all
//! of that. What a server has made is revoked, by the token by which it was made: with the secret
//! gone there may be no other. What is under way is about the former value and comes too late.

use policies::{Backend, SecretRef};

use super::{Key, Mints};
use crate::vault::VaultError;
use crate::vault::child::Child;
use crate::vault::remote::Shown;
use crate::vault::secret::Secret;

impl Mints {
    /// The token of before is of no more use; whether there was one.
    pub fn drop_former(&mut self) -> bool {
        self.former.take().is_some()
    }
}

impl Child {
    /// An operator has changed the secret: nothing that was had by it counts any more, and whoever
    /// failed because of it may be asked again.
    pub(in crate::vault) fn forget(&mut self, name: &str) -> Result<(), VaultError> {
        let clients = self.known.clients().into_iter().filter(|(_, client)| client == name);
        let dropped: Vec<_> = clients.map(|(secret, _)| self.store.drop_tokens(&secret)).collect();
        if self.hangs(&Key::Login, name)
            && let Some(login) = self.mints.kept.get(&Key::Login)
        {
            self.mints.former = Some(Secret::concat(&[login.value.expose_secret()]));
        }
        self.end_held(|child, key| child.hangs(key, name));
        let had: Vec<Key> =
            self.mints.kept.keys().filter(|key| self.hangs(key, name)).cloned().collect();
        had.iter().for_each(|key| self.mints.drop_kept(key));
        let under_way =
            self.mints.flights.iter().filter(|(_, flight)| self.hangs(&flight.key, name));
        for number in under_way.map(|(number, _)| *number).collect::<Vec<_>>() {
            if let Some(flight) = self.mints.flights.get_mut(&number) {
                flight.stale = true;
            }
        }
        self.mints.paused.retain(|key, _| key.stored().is_some_and(|(own, _)| own != name));
        self.mints.refusals.clear();
        self.tend_leased();
        // Said last: a disk that fails keeps nothing in use.
        dropped.into_iter().collect()
    }

    /// Whether something is had by that secret of the store. The end of what was made is not: it
    /// goes on.
    fn hangs(&self, key: &Key, name: &str) -> bool {
        if let Key::Token(_, grant) = key
            && grant.client.as_ref().is_some_and(|own| own.secret.as_deref() == Some(name))
        {
            return true;
        }
        match self.shown(key) {
            _ if matches!(key, Key::Revoke(_)) => false,
            Ok(Shown::Secret(secret)) if secret.is_remote() => {
                self.hangs(&Key::Value(SecretRef::clone(secret)), name)
            }
            Ok(Shown::Secret(secret)) => secret.backend == Backend::Local && secret.path == name,
            Ok(Shown::Login) => self.hangs(&Key::Login, name),
            Ok(Shown::AwsLogin) => self.hangs(&Key::AwsLogin, name),
            Ok(Shown::Nothing) | Err(_) => false,
        }
    }
}
