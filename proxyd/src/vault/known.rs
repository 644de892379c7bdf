//! What may be asked of the vault: what the policy files say, read here once more.
//!
//! The traffic process names an environment and a credential. Which secret that is, in which form
//! it goes where, and which server gives tokens for it, the vault reads in the files itself. So a
//! traffic process under foreign control can have rendered what policies define, for the hosts
//! they list, and nothing else: no refresh token, no signing key, no other form.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use policies::{Backend, Credential, Host, PolicySet, SecretRef};
use sha2::{Digest, Sha256};

use super::VaultError;
use crate::policy::{Snapshot, snapshot};

/// How long what was seen last counts without another look.
const LOOK: Duration = Duration::from_secs(1);

/// The policies as they were when last looked at.
pub(super) struct Known {
    dir: PathBuf,
    seen: Snapshot,
    looked: Instant,
    set: PolicySet,
}

impl Known {
    pub fn open(dir: &Path) -> Result<Self, VaultError> {
        let (seen, looked) = (snapshot(dir), Instant::now());
        let set = PolicySet::load(dir).map_err(|found| {
            let first = found.first().map(ToString::to_string).unwrap_or_default();
            VaultError::Failed(format!("the vault cannot read the policies: {first}"))
        })?;
        Ok(Self { dir: dir.to_owned(), seen, looked, set })
    }

    /// The credential of that environment, if the files define it as the asker knows it. A file
    /// that has changed is read again; one with a mistake leaves the former policies in force.
    ///
    /// The files come first: an asker that sticks to what they once defined gets that no more.
    pub fn find(
        &mut self,
        environment: &str,
        name: &str,
        print: &str,
    ) -> Result<Arc<Credential>, VaultError> {
        self.find_at(environment, name, print, Instant::now())
    }

    fn find_at(
        &mut self,
        environment: &str,
        name: &str,
        print: &str,
        now: Instant,
    ) -> Result<Arc<Credential>, VaultError> {
        self.look(now);
        if let Some(found) = self.defined(environment, name, print) {
            return Ok(found);
        }
        // The traffic process may have read a file that is newer than the last look.
        self.look_again(now);
        self.defined(environment, name, print).ok_or_else(|| {
            VaultError::Refused(format!(
                "the policy of environment {environment:?} does not define credential {name:?} so"
            ))
        })
    }

    fn look(&mut self, now: Instant) {
        if now.saturating_duration_since(self.looked) >= LOOK {
            self.look_again(now);
        }
    }

    fn look_again(&mut self, now: Instant) {
        self.looked = now;
        let seen = snapshot(&self.dir);
        if seen != self.seen {
            if let Ok(set) = PolicySet::load(&self.dir) {
                self.set = set;
            }
            self.seen = seen;
        }
    }

    fn defined(&self, environment: &str, name: &str, print: &str) -> Option<Arc<Credential>> {
        #[cfg(test)]
        if let Some(found) = super::tests::registered(environment, name, print) {
            return Some(found);
        }
        let credential = self.set.environment(environment)?.credentials.get(name)?;
        (self::print(credential) == print).then(|| Arc::clone(credential))
    }

    /// Whether the environment's rules give the credential to requests of one of the methods.
    pub fn gives(
        &self,
        environment: &str,
        credential: &str,
        host: &Host,
        methods: &[&str],
    ) -> bool {
        let policy = self.set.environment(environment);
        policy.is_some_and(|policy| policy.gives(credential, host, methods))
    }

    /// Whether any policy has a use for the secret.
    pub fn names(&mut self, secret: &str) -> bool {
        self.names_at(secret, Instant::now())
    }

    /// What an environment's policy defines.
    pub fn credentials(&mut self, environment: &str) -> Vec<Arc<Credential>> {
        self.look(Instant::now());
        let policy = self.set.environment(environment);
        policy.map(|policy| policy.credentials.values().cloned().collect()).unwrap_or_default()
    }

    /// What all of them define.
    pub fn all(&mut self) -> Vec<Arc<Credential>> {
        self.look(Instant::now());
        let environments = self.set.names().filter_map(|name| self.set.environment(name));
        environments.flat_map(|policy| policy.credentials.values().cloned()).collect()
    }

    /// The secrets of the store for which tokens are had, with those of the clients that ask.
    pub fn clients(&mut self) -> Vec<(String, String)> {
        let pair = |credential: &Arc<Credential>| {
            let client = credential.grant.as_ref()?.client.as_ref()?.secret.clone()?;
            let local = credential.secret.backend == Backend::Local;
            local.then(|| (credential.secret.path.clone(), client))
        };
        self.all().iter().filter_map(pair).collect()
    }

    /// Whether a policy shows the secret of the store as a client's certificate.
    pub fn shows(&mut self, secret: &str) -> bool {
        self.look(Instant::now());
        let shows = |credential: &Arc<Credential>| {
            let local = credential.secret.backend == Backend::Local;
            credential.is_certificate() && local && credential.secret.path == secret
        };
        let environments = self.set.names().filter_map(|name| self.set.environment(name));
        environments.into_iter().any(|policy| policy.credentials.values().any(shows))
    }

    /// The secrets of policies that are not the store's.
    pub fn elsewhere(&mut self) -> Vec<SecretRef> {
        self.look(Instant::now());
        let environments = self.set.names().filter_map(|name| self.set.environment(name));
        let credentials = environments.flat_map(|policy| policy.credentials.values());
        let secrets = credentials.map(|credential| &credential.secret);
        secrets.filter(|secret| secret.backend != Backend::Local).cloned().collect()
    }

    fn names_at(&mut self, secret: &str, now: Instant) -> bool {
        self.look(now);
        let uses = |credential: &Arc<Credential>| {
            let client = credential.grant.as_ref().and_then(|grant| grant.client.as_ref());
            (credential.secret.backend == Backend::Local && credential.secret.path == secret)
                || client.is_some_and(|client| client.secret.as_deref() == Some(secret))
        };
        let environments = self.set.names().filter_map(|name| self.set.environment(name));
        environments.into_iter().any(|policy| policy.credentials.values().any(uses))
    }
}

/// Tells definitions apart: two that differ in anything have different ones.
pub(super) fn print(credential: &Credential) -> String {
    hex::encode(Sha256::digest(format!("{credential:?}")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const RULE: &str = "[[egress.allow]]\nhosts = [\"a.example\"]\nmethods = [\"GET\"]\n";

    fn credential(name: &str) -> String {
        format!(
            "[credentials.{name}]\nsecret = \"local:{name}\"\ninject = {{ bearer = true }}\n\
             hosts = [\"a.example\"]\n"
        )
    }

    fn write(dir: &Path, text: &str) {
        let (file, beside) = (dir.join("dev.toml"), dir.join("dev.new"));
        std::fs::write(&beside, text).unwrap();
        std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(beside, file).unwrap();
    }

    fn digest(known: &Known, name: &str) -> String {
        print(&known.set.environment("dev").unwrap().credentials[name])
    }

    #[test]
    fn a_definition_that_was_taken_out_or_changed_is_refused_by_its_old_digest() {
        let dir = tempfile::tempdir().unwrap();
        let both = [RULE, &credential("taken-out"), &credential("changed")].concat();
        write(dir.path(), &both);
        let mut known = Known::open(dir.path()).unwrap();
        let digests = ["taken-out", "changed"].map(|name| (name, digest(&known, name)));
        let now = known.looked;
        for (name, digest) in &digests {
            assert!(known.find_at("dev", name, digest, now + LOOK).is_ok(), "{name}");
        }

        let narrowed = credential("changed").replace("a.example", "b.example");
        write(dir.path(), &[RULE, &narrowed].concat());

        for (name, digest) in &digests {
            let refused = known.find_at("dev", name, digest, now + 2 * LOOK).err();
            assert!(matches!(refused, Some(VaultError::Refused(_))), "{name}: {refused:?}");
        }
        assert!(!known.names_at("taken-out", now + 2 * LOOK));
    }

    #[test]
    fn a_new_definition_counts_at_once_and_a_new_name_at_the_next_look() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), RULE);
        let mut known = Known::open(dir.path()).unwrap();
        let now = known.looked;
        assert!(!known.names_at("new", now));
        write(dir.path(), &[RULE, &credential("new")].concat());

        assert!(known.names_at("new", now + LOOK));
        let digest = digest(&known, "new");
        write(dir.path(), RULE);
        assert!(!known.names_at("new", now + 2 * LOOK));
        write(dir.path(), &[RULE, &credential("new")].concat());
        assert!(known.find_at("dev", "new", &digest, now + 2 * LOOK).is_ok());
    }

    #[test]
    fn a_file_with_a_mistake_leaves_the_former_definitions_in_force() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[RULE, &credential("kept")].concat());
        let mut known = Known::open(dir.path()).unwrap();
        let (digest, now) = (digest(&known, "kept"), known.looked);

        write(dir.path(), "nonsense");

        assert!(known.find_at("dev", "kept", &digest, now + LOOK).is_ok());
    }
}
