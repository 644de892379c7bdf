//! The traffic process's side of the vault: asks the vault child, keeps nothing.
//!
//! The child ([`child`]) is a process of its own that holds keys and values; this side knows names
//! and gets, for a permitted request, one rendered credential with the patterns to search answers
//! for. Both are kept for [`RENDERED_SECONDS`], so that a busy connection does not ask for each
//! request, and wiped when the last exchange that uses them has ended.
//!
//! When the child ends, every call fails with [`VaultError::Gone`], so requests that need a
//! credential are refused (503). [`Vault::gone`] tells proxyd to drain and exit with a failure: its
//! supervisor starts both processes again. A new child inside an old proxyd would have to be
//! started from a process that is confined by then.

mod authorities;
mod certificate;
pub mod child;
mod connection;
mod ending;
pub mod fetch;
mod files;
pub mod key;
mod known;
mod leased;
mod listing;
mod masking;
mod mint;
mod oauth;
pub mod placeholder;
pub mod registry;
mod rekey;
mod remote;
mod render;
pub mod run;
mod seal;
pub mod secret;
mod shown;
mod sigv4;
mod store;
mod wire;
mod workers;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use foldhash::HashMap;
use ipc::daemon::SelfExec;
use ipc::id::LeaseId;
use ipc::vault::SecretInfo;
use policies::{Credential, Host, Inject};

pub use key::KeySource;
pub use secret::Secret;
pub use shown::Shown;

use crate::scrub::Patterns;
use crate::tls::authority::Public;
use connection::Connection;
pub use wire::Scope;
use wire::{Named, Reply, Request};

/// How long a rendered credential is kept for the next request.
pub const RENDERED_SECONDS: u64 = 5;
/// How long a worker may take for one request of the vault's.
const FETCH_SECONDS: u64 = 20;
/// Most rendered credentials kept.
const RENDERED_MAX: usize = 256;
/// Most definitions whose digest is remembered.
const NAMED_MAX: usize = 1024;
/// Most texts in one question.
const TEXTS_MAX: usize = 1024;
/// Most placeholders remembered; they are no secrets.
const PLACEHOLDERS_MAX: usize = 4096;

/// Why the vault did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VaultError {
    /// The child ended. Nothing that needs a credential leaves any more; proxyd ends itself.
    #[error("the vault process has ended")]
    Gone,
    /// No such secret in the vault.
    #[error("no secret {0:?} in the vault")]
    Missing(String),
    /// The child's own check refused; names only.
    #[error("the vault refused: {0}")]
    Refused(String),
    /// A name or value that the vault does not take.
    #[error("{0}")]
    Invalid(String),
    /// The child could not start or its store failed.
    #[error("{0}")]
    Failed(String),
    /// The configuration names a key that cannot be used. proxyd ends with status 78.
    #[error("{0}")]
    Key(String),
    /// Whoever gives tokens for the secret refuses for good; an operator has to set a new one.
    #[error("{0}")]
    NeedsLogin(String),
    /// Whoever gives tokens for the secret is not to be had now.
    #[error("{0}")]
    Unavailable(String),
}

/// What the child said when it had opened its store.
#[derive(Clone, Debug)]
pub struct VaultFacts {
    pub pid: u32,
    /// `systemd-credential`, `passphrase`, `key-file`.
    pub key_source: String,
    /// What is weaker here than in the best case, in words.
    pub notes: Vec<String>,
}

/// One credential rendered for one host, and what to search answers for. Wiped on drop.
pub struct Rendered {
    /// The whole header value, or the bare value for a placeholder's place.
    pub value: Secret,
    /// What else goes with a signing key: the access key's id, the session token.
    pub more: Vec<Secret>,
    pub patterns: Patterns,
    /// Which token it is, where one was had for the secret.
    pub serial: u64,
}

/// What a rendering is good for, where that is less than all requests with the credential to the
/// host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// What is wanted of a registry.
    Registry(registry::Access),
    /// Requests of one lease, for which a server has made it.
    Lease(LeaseId),
}

/// Where the vault lies below proxyd's state directory: its store, and its key file by default.
/// Nothing but the child has any business there.
pub fn directory(state: &Path) -> PathBuf {
    state.join("vault")
}

/// The way to the vault child. Clones share one connection.
#[derive(Clone)]
pub struct Vault {
    connection: Arc<Connection>,
    rendered: Arc<Mutex<RenderedMap>>,
    /// How often a secret was changed: what was rendered across a change is not kept.
    changes: Arc<AtomicU64>,
    named: Arc<Mutex<NamedMap>>,
    placeholders: Arc<Mutex<HashMap<(LeaseId, String), String>>>,
    /// Replaced as a whole.
    authorities: Arc<Mutex<Arc<[Public]>>>,
}

type RenderedMap = HashMap<RenderedKey, Kept>;
/// By the definition's place in memory, which is not used again while something points to it.
type NamedMap = HashMap<usize, (Weak<Credential>, Arc<Named>)>;

#[derive(PartialEq, Eq, Hash)]
struct RenderedKey {
    credential: Arc<Named>,
    scope: Option<Scope>,
    access: Option<Access>,
    host: Host,
}

/// A rendered credential and until when it serves the next request.
struct Kept {
    rendered: Arc<Rendered>,
    until: Instant,
}

impl Vault {
    /// Starts the child and waits until it has opened the vault below `state` (proxyd's own state
    /// directory). Blocking; call on the main thread before the runtime starts, because the worker
    /// for commands ends with the thread that started it (PR_SET_PDEATHSIG(2const)).
    ///
    /// It reads the policies and, below the directories of `secrets`, files that hold secrets.
    /// `arguments` are proxyd's own: all these processes read the same configuration. With commands
    /// in it there is a worker for them.
    pub fn start(
        exec: &SelfExec,
        state: &Path,
        (key, former): (&KeySource, Option<&KeySource>),
        (policies, secrets): (&Path, &[PathBuf]),
        (arguments, with_commands): (Vec<std::ffi::OsString>, bool),
    ) -> Result<(Vault, VaultFacts), VaultError> {
        let directory = directory(state);
        ipc::daemon::private_directory(&directory)
            .map_err(|error| VaultError::Failed(error.to_string()))?;
        let mut fetch = exec.command(fetch::ROLE);
        fetch.args(&arguments);
        let run = with_commands.then(|| {
            let mut run = exec.command(run::ROLE);
            run.args(&arguments);
            run
        });
        let command = |commands: Option<i32>| {
            let mut command = exec.command("vault");
            let commands = commands.map(|number| number.to_string()).unwrap_or_default();
            command.arg(&directory).arg(key.to_argument()).arg(policies);
            if let Some(former) = former {
                command.arg(child::FORMER).arg(former.to_argument());
            }
            command.arg(child::WITH_WORKER).arg(commands).args(secrets);
            command.arg(child::ARGUMENTS).args(&arguments);
            command
        };
        let (connection, first) = Connection::start(command, fetch, run)?;
        Self::opened(connection, first)
    }

    fn opened(connection: Connection, first: Reply) -> Result<(Vault, VaultFacts), VaultError> {
        let Reply::Open { pid, key_source, authorities, notes } = first else {
            return Err(VaultError::Failed("the vault process began with another message".into()));
        };
        if authorities.is_empty() {
            return Err(VaultError::Failed(
                "the vault process has no certificate authority".into(),
            ));
        }
        let vault = Vault {
            connection: Arc::new(connection),
            rendered: Arc::default(),
            changes: Arc::default(),
            named: Arc::default(),
            placeholders: Arc::default(),
            authorities: Arc::new(Mutex::new(authorities.into())),
        };
        Ok((vault, VaultFacts { pid, key_source, notes }))
    }

    /// Starts the tasks that carry messages and wipe what is no longer used. Call once, inside the
    /// runtime, before any other call.
    pub fn attach(&self) -> Result<(), VaultError> {
        self.connection.attach()?;
        let kept = Arc::downgrade(&self.rendered);
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(Duration::from_secs(1));
            loop {
                tick.tick().await;
                let Some(kept) = kept.upgrade() else { return };
                drop_old(&mut lock(&kept));
            }
        });
        Ok(())
    }

    /// Resolves when the child has ended: proxyd must then end too, with a failure.
    pub async fn gone(&self) {
        self.connection.gone().await;
    }

    /// What a lease's sandbox sees in place of the credential, by variable; one without a variable
    /// where the policy gives it none. Needs no stored secret.
    pub async fn placeholders(
        &self,
        lease: &LeaseId,
        credential: &Credential,
    ) -> Result<Vec<(Option<String>, String)>, VaultError> {
        if credential.env.is_empty() {
            return Ok(vec![(None, self.placeholder(lease, credential, None).await?)]);
        }
        let mut made = Vec::with_capacity(credential.env.len());
        for name in &credential.env {
            let placeholder = self.placeholder(lease, credential, Some(name)).await?;
            made.push((Some(name.clone()), placeholder));
        }
        Ok(made)
    }

    async fn placeholder(
        &self,
        lease: &LeaseId,
        credential: &Credential,
        variable: Option<&str>,
    ) -> Result<String, VaultError> {
        let prefix = placeholder::prefix(credential.shape.as_deref(), variable);
        let key = (lease.clone(), format!("{prefix} {}", credential.name));
        if let Some(known) = lock(&self.placeholders).get(&key) {
            return Ok(known.clone());
        }
        let request = Request::Placeholder {
            lease: lease.as_str().to_owned(),
            credential: credential.name.clone(),
            prefix: prefix.to_owned(),
        };
        match self.connection.ask(&request, &[]).await? {
            (Reply::Text { text }, _) => {
                let mut known = lock(&self.placeholders);
                if known.len() >= PLACEHOLDERS_MAX {
                    known.clear();
                }
                known.insert(key, text.clone());
                Ok(text)
            }
            _ => Err(unexpected()),
        }
    }

    /// Renders `credential` for a request to `host`.
    pub async fn render(
        &self,
        credential: &Arc<Credential>,
        host: &Host,
    ) -> Result<Arc<Rendered>, VaultError> {
        self.render_key(credential, host, (None, None)).await
    }

    /// Renders what is good for that access.
    pub async fn render_access(
        &self,
        credential: &Arc<Credential>,
        host: &Host,
        access: Access,
    ) -> Result<Arc<Rendered>, VaultError> {
        self.render_key(credential, host, (None, Some(access))).await
    }

    /// Renders a key that signs within that scope.
    pub async fn render_for(
        &self,
        credential: &Arc<Credential>,
        host: &Host,
        scope: Scope,
        access: Option<Access>,
    ) -> Result<Arc<Rendered>, VaultError> {
        self.render_key(credential, host, (Some(scope), access)).await
    }

    async fn render_key(
        &self,
        credential: &Arc<Credential>,
        host: &Host,
        (scope, access): (Option<Scope>, Option<Access>),
    ) -> Result<Arc<Rendered>, VaultError> {
        let (credential_named, host) = (self.named(credential), host.clone());
        let key = RenderedKey { credential: credential_named, scope, access, host };
        if let Some(kept) = lock(&self.rendered).get(&key)
            && Instant::now() < kept.until
        {
            return Ok(kept.rendered.clone());
        }
        self.ask_rendered(key, credential, None).await
    }

    /// Renders it anew after the upstream refused the token of that number; the same again where
    /// there is no other to be had.
    pub async fn render_again(
        &self,
        credential: &Arc<Credential>,
        host: &Host,
        access: Option<Access>,
        refused: u64,
    ) -> Result<Arc<Rendered>, VaultError> {
        let (named, host) = (self.named(credential), host.clone());
        let key = RenderedKey { credential: named, scope: None, access, host };
        self.ask_rendered(key, credential, Some(refused)).await
    }

    async fn ask_rendered(
        &self,
        key: RenderedKey,
        credential: &Arc<Credential>,
        refused: Option<u64>,
    ) -> Result<Arc<Rendered>, VaultError> {
        let since = Instant::now();
        let changes = self.changes.load(Ordering::SeqCst);
        if refused.is_some() {
            lock(&self.rendered).remove(&key);
        }
        let request = match (&credential.environment, &credential.inject) {
            (None, Inject::Basic { user: Some(user) }) => {
                Request::Password { secret: credential.secret.path.clone(), user: user.clone() }
            }
            _ => {
                let (access, lease) = match key.access.clone() {
                    Some(Access::Registry(access)) => (Some(access), None),
                    Some(Access::Lease(lease)) => (None, Some(lease.as_str().to_owned())),
                    None => (None, None),
                };
                let (named, host) = (Named::clone(&key.credential), key.host.to_string());
                let scope = key.scope.clone();
                Request::Render { credential: named, host, scope, access, lease, refused }
            }
        };
        let answer = self.connection.ask(&request, &[]).await?;
        let (Reply::Rendered { values, serial, good_ms }, mut parts) = answer else {
            return Err(unexpected());
        };
        if values == 0 || values > parts.len() {
            return Err(unexpected());
        }
        let needles = parts.split_off(values);
        let value = parts.remove(0);
        let patterns = Patterns::new(&needles);
        let rendered = Arc::new(Rendered { value, more: parts, patterns, serial });
        let good = good_ms.map_or(Duration::MAX, Duration::from_millis);
        let until = since + good.min(Duration::from_secs(RENDERED_SECONDS));
        let mut kept = lock(&self.rendered);
        if kept.len() >= RENDERED_MAX {
            kept.clear();
        }
        if self.changes.load(Ordering::SeqCst) == changes {
            kept.insert(key, Kept { rendered: rendered.clone(), until });
        }
        Ok(rendered)
    }

    /// Stores a value under `name`, as the next version. One line end is cut from its end.
    pub async fn put(&self, name: &str, value: Secret) -> Result<SecretInfo, VaultError> {
        let request = Request::Put { name: name.to_owned() };
        let reply = self.connection.ask(&request, &[value]).await;
        self.forget_rendered();
        match reply? {
            (Reply::Secrets { mut secrets }, _) => secrets.pop().ok_or_else(unexpected),
            _ => Err(unexpected()),
        }
    }

    fn forget_rendered(&self) {
        let mut kept = lock(&self.rendered);
        self.changes.fetch_add(1, Ordering::SeqCst);
        kept.clear();
    }

    /// Names and dates of all secrets.
    pub async fn list(&self) -> Result<Vec<SecretInfo>, VaultError> {
        match self.connection.ask(&Request::List, &[]).await? {
            (Reply::Secrets { secrets }, _) => Ok(secrets),
            _ => Err(unexpected()),
        }
    }

    /// Removes every version; [`VaultError::Missing`] when there is none.
    pub async fn remove(&self, name: &str) -> Result<(), VaultError> {
        let reply = self.connection.ask(&Request::Remove { name: name.to_owned() }, &[]).await;
        self.forget_rendered();
        reply.map(drop)
    }

    /// A lease has ended: what was made for it is revoked.
    pub async fn forget(&self, lease: &LeaseId) -> Result<(), VaultError> {
        let request = Request::Forget { lease: lease.as_str().to_owned() };
        self.connection.ask(&request, &[]).await.map(drop)
    }

    /// Gives the vault a new data key; says how many rows were sealed anew.
    pub async fn rotate(&self) -> Result<u64, VaultError> {
        match self.connection.ask(&Request::Rotate, &[]).await? {
            (Reply::Sealed { rows }, _) => Ok(rows),
            _ => Err(unexpected()),
        }
    }

    /// Replaces the key around the data key, where that is proxyd's own.
    pub async fn rewrap(&self) -> Result<(), VaultError> {
        self.connection.ask(&Request::Rewrap, &[]).await.map(drop)
    }

    /// Masks all that the vault knows in what a tool put out in a sandbox of that environment; says
    /// how many values were.
    pub async fn mask(
        &self,
        environment: &str,
        texts: Vec<String>,
    ) -> Result<(Vec<String>, u64), VaultError> {
        let (mut masked, mut count) = (Vec::with_capacity(texts.len()), 0);
        let mut texts = texts.into_iter().map(|text| Secret::new(text.into_bytes())).peekable();
        while texts.peek().is_some() {
            let parts: Vec<Secret> = texts.by_ref().take(TEXTS_MAX).collect();
            let request = Request::Mask { environment: environment.to_owned() };
            let (Reply::Masked { found }, clean) = self.connection.ask(&request, &parts).await?
            else {
                return Err(unexpected());
            };
            if clean.len() != parts.len() {
                return Err(unexpected());
            }
            // A value of whole characters leaves whole characters; any other a legible rest.
            let text = |text: &Secret| String::from_utf8_lossy(text.expose_secret()).into_owned();
            masked.extend(clean.iter().map(text));
            count += found;
        }
        Ok((masked, count))
    }

    /// How the vault is asked for the credential. The digest of a definition costs more than the
    /// rest of a small request, so each is made once.
    fn named(&self, credential: &Arc<Credential>) -> Arc<Named> {
        let place = Arc::as_ptr(credential).addr();
        let mut known = lock(&self.named);
        if let Some((_, named)) = known.get(&place) {
            return Arc::clone(named);
        }
        if known.len() >= NAMED_MAX {
            known.clear();
        }
        let named = Arc::new(Named {
            environment: credential.environment.clone().unwrap_or_default(),
            name: credential.name.clone(),
            print: known::print(credential),
        });
        known.insert(place, (Arc::downgrade(credential), Arc::clone(&named)));
        named
    }
}

fn drop_old(kept: &mut RenderedMap) {
    let now = Instant::now();
    kept.retain(|_, kept| now < kept.until);
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing panics while holding the lock in the middle of a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unexpected() -> VaultError {
    VaultError::Failed("the vault process gave another kind of answer than asked for".into())
}

#[cfg(test)]
pub(crate) mod tests;
