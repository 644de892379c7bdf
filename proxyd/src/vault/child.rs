//! The vault child: the only process that holds keys and values.
//!
//! Proxyd starts it before anything else, with a socket as standard input, one to the worker that
//! talks over the network ([`super::fetch`]) as standard output, and one to the worker that runs
//! commands ([`super::run`]) where the configuration has some. It reads the key, confines
//! itself ([`crate::sys::vault`]), opens the store and answers [`Request`]s until a socket ends. It
//! has one thread; what needs a worker is answered when the worker has ([`super::mint`]).
//! When proxyd has gone it ends too, as soon as nothing is lost by it ([`super::ending`]).
//!
//! What is checked where: the traffic process judges every request by the policy and by the
//! credential's own host list. This process reads the policy files itself ([`super::known`]) and
//! renders what they define, for the hosts they list. A traffic process that is under foreign
//! control can have that, one request at a time: the values that go into requests in that form. It
//! cannot have the keys, what tokens are had for, or what signs, and it cannot sign anything but
//! leaf certificates and requests of a policy's regions and services.

use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use policies::{Backend, Credential, Grant, Host, Inject, SecretRef};
use zeroize::Zeroizing;

use super::VaultError;
use super::authorities::Authorities;
use super::certificate::Wanted;
use super::ending;
use super::files::{Files, Own};
use super::key::KeySource;
#[cfg(test)]
use super::key::Material;
use super::known::Known;
use super::leased::Leased;
use super::masking::Maskings;
use super::mint::{Key, Mints, Waiter};
use super::placeholder;
use super::registry::{self, Access};
use super::rekey;
use super::remote::Remote;
use super::render::{form, rendered};
use super::secret::Secret;
use super::store::{self, Store};
use super::wire::{self, Form, Named, Reply, Request, Scope};
use super::workers::{Which, Workers};
use crate::config::{Arguments, Backends, Config};

/// What the child works with, besides its sockets.
struct Place<'a> {
    directory: &'a OsStr,
    key: &'a OsStr,
    /// The key that it may still be closed with.
    former: Option<&'a OsStr>,
    policies: &'a Path,
    /// Directories of files that hold secrets.
    secrets: Vec<PathBuf>,
    /// Proxyd's own arguments, which lead to its configuration.
    arguments: Option<Vec<OsString>>,
    /// A descriptor that stays open beside the standard ones.
    also: Option<u32>,
}

/// The argument that says that there is a worker at standard output. The next one is the number of
/// the socket to the worker for commands, or empty.
pub(super) const WITH_WORKER: &str = "with-worker";
/// What stands between directories of secrets and proxyd's own arguments.
pub(super) const ARGUMENTS: &str = "--";
/// The next argument is the source of the key that the vault may still be closed with.
pub(super) const FORMER: &str = "former-key";

pub(super) type Answer = Result<(Reply, Vec<Secret>), VaultError>;

/// Runs the child. `args` are those after the role name: the vault's directory, the key's source,
/// the policies' directory, a former key's source, whether there are workers, directories of
/// secrets, and proxyd's own.
pub fn main(args: Vec<OsString>) -> ExitCode {
    let [directory, key, policies, rest @ ..] = args.as_slice() else {
        ipc::say::line("proxyd vault: started by hand; proxyd starts it by itself");
        return ExitCode::from(2);
    };
    let (former, rest) = match rest {
        [word, source, rest @ ..] if word == FORMER => (Some(source.as_os_str()), rest),
        rest => (None, rest),
    };
    let (workers, rest) = match rest {
        [word, number, rest @ ..] if word == WITH_WORKER => {
            (Some(number.to_str().and_then(|text| text.parse().ok())), rest)
        }
        rest => (None, rest),
    };
    let split = rest.iter().position(|word| word == ARGUMENTS).unwrap_or(rest.len());
    let (secrets, arguments) = (&rest[..split], rest.get(split + 1..).unwrap_or_default());
    let inherited = |raw| ipc::daemon::inherited_fd(raw).map(UnixStream::from);
    let sockets = inherited(0).and_then(|own| {
        let network = workers.map(|_| inherited(1)).transpose()?;
        let commands = workers.flatten().map(inherited).transpose()?;
        Ok((own, Workers::new(network, commands)))
    });
    let place = Place {
        directory,
        key,
        former,
        policies: Path::new(policies),
        secrets: secrets.iter().map(PathBuf::from).collect(),
        arguments: workers.map(|_| arguments.to_vec()),
        also: workers.flatten().and_then(|raw: i32| u32::try_from(raw).ok()),
    };
    match sockets {
        Ok((socket, workers)) => run(socket, workers, place),
        Err(error) => {
            ipc::say::line(format_args!("proxyd vault: no socket was passed: {error}"));
            ExitCode::from(2)
        }
    }
}

fn run(mut socket: UnixStream, workers: Workers, place: Place<'_>) -> ExitCode {
    match Child::open(place) {
        Ok(mut child) => {
            child.workers = workers;
            let code = serve(socket, &mut child);
            ending::finish(&mut child);
            code
        }
        Err(error) => {
            // Proxyd reports it; if it is gone, nobody needs to know.
            let _ = socket.write_all(&wire::encode(0, &error.to_wire(), &[]));
            ExitCode::from(if matches!(error, VaultError::Key(_)) { 78 } else { 1 })
        }
    }
}

/// Answers until a socket ends.
fn serve(mut socket: UnixStream, child: &mut Child) -> ExitCode {
    if socket.write_all(&wire::encode(0, &child.facts(), &[])).is_err() {
        return ExitCode::SUCCESS;
    }
    loop {
        for (number, answer) in child.mask() {
            if reply(&mut socket, number, answer).is_err() {
                return ExitCode::SUCCESS;
            }
        }
        if child.leased.patience() == Some(Duration::ZERO) {
            child.tend_leased();
        }
        let patience = [child.maskings.patience(), child.leased.patience()];
        let patience = patience.into_iter().flatten().min();
        let (asked, answered) = match child.workers.wait(&socket, patience) {
            Ok(ready) => ready,
            Err(error) => {
                ipc::say::line(format_args!("proxyd vault: cannot wait: {error}"));
                return ExitCode::FAILURE;
            }
        };
        for which in answered {
            match child.hear(which) {
                Ok(Some(answers)) => {
                    for (number, answer) in answers {
                        if reply(&mut socket, number, answer).is_err() {
                            return ExitCode::SUCCESS;
                        }
                    }
                }
                // Without it nothing is to be had from others: all start again.
                Ok(None) => return ExitCode::FAILURE,
                Err(error) => {
                    ipc::say::line(format_args!(
                        "proxyd vault: cannot read from its worker: {error}"
                    ));
                    return ExitCode::FAILURE;
                }
            }
        }
        if asked {
            let body = match read_body(&mut socket) {
                Ok(Some(body)) => body,
                Ok(None) => return ExitCode::SUCCESS,
                Err(error) => {
                    ipc::say::line(format_args!("proxyd vault: cannot read from proxyd: {error}"));
                    return ExitCode::FAILURE;
                }
            };
            let number = wire::number(&body);
            let answer = match wire::decode(&body) {
                Ok((request, parts)) => child.answer(number, request, &parts),
                Err(malformed) => Some(Err(VaultError::Invalid(malformed.to_string()))),
            };
            if answer.is_some_and(|answer| reply(&mut socket, number, answer).is_err()) {
                return ExitCode::SUCCESS;
            }
        }
    }
}

fn reply(socket: &mut UnixStream, number: u32, answer: Answer) -> std::io::Result<()> {
    let (reply, parts) = answer.unwrap_or_else(|error| (error.to_wire(), Vec::new()));
    socket.write_all(&wire::encode(number, &reply, &parts))
}

/// One frame's body; none when proxyd has closed the socket between two frames.
fn read_body(socket: &mut UnixStream) -> std::io::Result<Option<Zeroizing<Vec<u8>>>> {
    let mut prefix = [0u8; 4];
    match socket.read_exact(&mut prefix) {
        Ok(()) => {}
        Err(error)
            if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    }
    let length = wire::body_length(prefix).map_err(std::io::Error::other)?;
    let mut body = Zeroizing::new(vec![0; length]);
    socket.read_exact(&mut body)?;
    Ok(Some(body))
}

pub(super) struct Child {
    pub(super) store: Store,
    pub(super) mints: Mints,
    pub(super) backends: Remote,
    pub(super) known: Known,
    pub(super) files: Files,
    pub(super) workers: Workers,
    pub(super) maskings: Maskings,
    pub(super) leased: Leased,
    authorities: Authorities,
    key_source: &'static str,
    own_key: rekey::Own,
    notes: Vec<String>,
    /// Nobody else opens the store; none in tests.
    _held: Option<ending::Held>,
    /// Seconds since 1970, for what is issued.
    pub(super) clock: Box<dyn Fn() -> u64 + Send>,
}

impl Child {
    /// Confinement comes before the store is opened and before anything is read from the socket.
    fn open(place: Place<'_>) -> Result<Self, VaultError> {
        let Place { directory, key, former, policies, secrets, arguments, also } = place;
        let directory = Path::new(directory);
        if let Some(missing) = secrets.iter().find(|path| !path.is_dir()) {
            let missing = missing.display();
            let text = format!("cannot use secret-directories: {missing} is no directory");
            return Err(VaultError::Key(text));
        }
        let source = |argument| {
            KeySource::from_argument(argument)
                .ok_or_else(|| VaultError::Key("the vault's key has no such source".into()))
        };
        let (source, former) = (source(key)?, former.map(source).transpose()?);
        crate::sys::vault::harden(also)?;
        let backends = arguments.map(configured).transpose()?.unwrap_or_default();
        let held = Some(ending::Held::wait(directory)?);
        let keys = rekey::Keys::read(&source, former.as_ref(), !store::exists(directory))?;
        let former = former.as_ref().map(KeySource::path);
        let own = Own::new(source.path(), former, directory).map_err(|error| {
            VaultError::Key(format!("cannot look at the vault's own files: {error}"))
        })?;
        let read = secrets.iter().map(PathBuf::as_path).chain([policies]);
        crate::sys::vault::confine(directory, read)?;
        let (store, own_key, notes) = keys.open(directory)?;
        let child = Self::over(store, source.word(), policies)?;
        let (files, backends) = (Files::below(secrets, own), Remote(backends));
        Ok(Self { files, backends, own_key, notes, _held: held, ..child })
    }

    fn over(
        mut store: Store,
        key_source: &'static str,
        policies: &Path,
    ) -> Result<Self, VaultError> {
        let authorities = Authorities::open(&mut store, now_unsigned())?;
        let leased = Leased::over(store.leased()?);
        Ok(Self {
            store,
            mints: Mints::default(),
            known: Known::open(policies)?,
            files: Files::default(),
            backends: Remote::default(),
            workers: Workers::default(),
            maskings: Maskings::default(),
            leased,
            authorities,
            key_source,
            own_key: rekey::Own::default(),
            notes: Vec::new(),
            _held: None,
            clock: Box::new(now_unsigned),
        })
    }

    fn facts(&self) -> Reply {
        Reply::Open {
            pid: std::process::id(),
            key_source: self.key_source.into(),
            authorities: self.authorities.public(now_unsigned()),
            notes: self.notes.clone(),
        }
    }

    /// Takes one answer of a worker's; none when it has ended.
    pub(super) fn hear(&mut self, which: Which) -> std::io::Result<Option<Vec<(u32, Answer)>>> {
        let Some(worker) = self.workers.of_mut(which) else { return Ok(None) };
        let Some(body) = read_body(worker)? else { return Ok(None) };
        let (fetched, parts) = wire::decode(&body).map_err(std::io::Error::other)?;
        Ok(Some(self.landed(wire::number(&body), fetched, parts.first())))
    }

    /// A value that needs no question, and its number where it has one.
    pub(super) fn kept_value(
        &mut self,
        secret: &SecretRef,
    ) -> Result<(Option<u64>, Secret), VaultError> {
        if secret.backend == Backend::Local {
            let (version, value) = self.store.current(&secret.path)?;
            return Ok((Some(version), value));
        }
        let value = self.files.values(&secret.path)?.first().map(Secret::expose_secret);
        Ok((None, Secret::concat(&[value.unwrap_or_default()])))
    }

    /// Answers; nothing where the answer comes later.
    pub(super) fn answer(
        &mut self,
        number: u32,
        request: Request,
        parts: &[Secret],
    ) -> Option<Answer> {
        match request {
            Request::Render { credential, host, scope, access, lease, refused } => {
                match self.permitted(&credential, &host, (scope, access, lease)) {
                    Err(error) => Some(Err(error)),
                    Ok((used, form)) => match used.key() {
                        None => Some(self.render(&used.secret, &form)),
                        Some(key) => self.render_minted(key, Waiter::new(number, form), refused),
                    },
                }
            }
            Request::Mask { environment } => self.mask_later(number, environment, parts),
            other => Some(self.answer_now(other, parts)),
        }
    }

    /// What the policy files let be made of a secret for that host.
    pub(super) fn permitted(
        &mut self,
        named: &Named,
        host: &str,
        (scope, access, lease): (Option<Scope>, Option<Access>, Option<String>),
    ) -> Result<(Use, Form), VaultError> {
        let credential = self.known.find(&named.environment, &named.name, &named.print)?;
        let host = Host::parse(host).map_err(|error| VaultError::Invalid(error.to_string()))?;
        if !credential.may_go_to(&host) {
            return Err(VaultError::Refused(format!(
                "credential {:?} may not go to {host}: its own list does not name that host",
                credential.name
            )));
        }
        // Of nothing is for what is searched for.
        let form = form(&credential.inject, scope.filter(|scope| *scope != Scope::none()))?;
        let grant = match (access, &credential.grant) {
            (Some(access), _) => {
                let methods = access.methods();
                if !self.known.gives(&named.environment, &named.name, &host, methods) {
                    let reason = "no rule allows that of a registry with this credential";
                    return Err(VaultError::Refused(reason.to_owned()));
                }
                Some(registry::grant(&credential, &host, &access)?)
            }
            (None, _) if matches!(credential.inject, Inject::Registry { .. }) => {
                return Err(VaultError::Refused("it is for registries only".to_owned()));
            }
            (None, grant) => grant.clone(),
        };
        let (form, place) = made(&credential.secret, form);
        let Some(place) = place else {
            return Ok((Use { secret: credential.secret.clone(), grant, made: None }, form));
        };
        let lease = lease.ok_or_else(|| VaultError::Refused("it is for a lease only".into()))?;
        let made = Key::Leased { place, lease };
        self.may_hold(&made)?;
        Ok((Use { secret: credential.secret.clone(), grant, made: Some(made) }, form))
    }

    /// The password of an upstream proxy. Which secret that is says proxyd's configuration; one
    /// that a policy has a use for is not given out so.
    fn password(&mut self, secret: &str, user: String) -> Answer {
        match self.known.names(secret) || self.backends.0.uses(secret) {
            true => Err(VaultError::Refused(format!("secret {secret:?} is for another use"))),
            false => {
                let secret = SecretRef { backend: Backend::Local, path: secret.to_owned() };
                self.render(&secret, &Form::Basic { user: Some(user) })
            }
        }
    }

    fn answer_now(&mut self, request: Request, parts: &[Secret]) -> Answer {
        match request {
            Request::Placeholder { lease, credential, prefix } => {
                let bytes = self.store.placeholder_bytes(&lease, &credential);
                done(Reply::Text { text: placeholder::shape(&prefix, &bytes) })
            }
            // Answered by `answer`.
            Request::Render { .. } | Request::Mask { .. } => {
                Err(VaultError::Invalid("not a question of this kind".into()))
            }
            Request::Forget { lease } => {
                self.forget_lease(&lease);
                done(Reply::Done)
            }
            Request::Password { secret, user } => self.password(&secret, user),
            Request::Sign { credential, host, scheme, shown } => {
                let message = one(parts)?.expose_secret();
                let (credential, host, shown) = (&credential, &host[..], &shown[..]);
                self.sign(&Wanted { credential, host, scheme, shown, message })
            }
            Request::Put { name } => {
                let value = one(parts)?.expose_secret();
                // Values come from files and terminals, which end lines; exactly one end is cut.
                let value = value.strip_suffix(b"\n").unwrap_or(value);
                let value = Secret::concat(&[value]);
                self.check_value(&name, &value)?;
                let info = self.store.put(&name, &value, now())?;
                self.forget(&name)?;
                done(Reply::Secrets { secrets: vec![info] })
            }
            Request::List => {
                let mut secrets = self.listed()?;
                secrets.extend(self.mints.refused());
                done(Reply::Secrets { secrets })
            }
            Request::Remove { name } => {
                self.store.remove(&name)?;
                self.forget(&name)?;
                done(Reply::Done)
            }
            Request::Rotate => done(Reply::Sealed { rows: self.store.rotate()? }),
            Request::Rewrap => {
                self.own_key.replace(&mut self.store)?;
                done(Reply::Done)
            }
            Request::Leaf { authority, host, life_seconds } => {
                let (spki, now) = (one(parts)?.expose_secret(), (self.clock)());
                let issued = self.authorities.issue(authority, &host, spki, life_seconds, now);
                let (not_after, leaf) = issued?;
                Ok((Reply::Leaf { not_after }, vec![Secret::new(leaf)]))
            }
            Request::Authorities { wanted, used } => {
                let now = (self.clock)();
                self.authorities.tend(&mut self.store, wanted, &used, now)?;
                done(Reply::Authorities { authorities: self.authorities.public(now) })
            }
        }
    }

    fn render(&mut self, secret: &SecretRef, form: &Form) -> Answer {
        if secret.backend == Backend::File {
            return rendered(self.files.values(&secret.path)?, form, 0, None);
        }
        let answer = rendered(&self.store.values(&secret.path)?, form, 0, None)?;
        self.store.used(&secret.path, now())?;
        Ok(answer)
    }
}

/// What a credential makes of which secret.
pub(super) struct Use {
    pub secret: SecretRef,
    grant: Option<Grant>,
    /// What a server makes of it for one lease.
    made: Option<Key>,
}

impl Use {
    /// The credential's own use.
    pub fn of(credential: &Credential) -> Self {
        let (secret, grant) = (credential.secret.clone(), credential.grant.clone());
        Self { secret, grant, made: None }
    }

    /// What has to be had from others for it.
    pub fn key(&self) -> Option<Key> {
        match &self.grant {
            _ if self.secret.backend == Backend::OpenBaoLease => self.made.clone(),
            Some(grant) => Some(Key::Token(self.secret.clone(), grant.clone())),
            None if self.secret.is_remote() => Some(Key::Value(self.secret.clone())),
            None => None,
        }
    }
}

/// The form of a credential, and where what it is made of is made, if that is so for each lease.
pub(super) fn made(secret: &SecretRef, form: Form) -> (Form, Option<String>) {
    let fields = match secret.backend {
        Backend::OpenBaoLease => secret.path.split_once('#'),
        _ => None,
    };
    let Some((place, named)) = fields else { return (form, None) };
    let named = named.split(':').map(str::to_owned).collect();
    (Form::Fields { named, form: Box::new(form) }, Some(place.to_owned()))
}

/// What the operator's configuration says of those who keep secrets. Read before anything is.
fn configured(arguments: Vec<OsString>) -> Result<Backends, VaultError> {
    let parsed = Arguments::parse_from_rest(arguments);
    let parsed = parsed.map_err(|error| VaultError::Key(error.to_string()))?;
    let config = Config::load(&parsed).map_err(|error| VaultError::Key(error.to_string()))?;
    Ok(config.backends)
}

fn done(reply: Reply) -> Answer {
    Ok((reply, Vec::new()))
}

fn one(parts: &[Secret]) -> Result<&Secret, VaultError> {
    match parts {
        [part] => Ok(part),
        _ => Err(VaultError::Invalid("a message needs exactly one part".into())),
    }
}

pub(super) fn now_unsigned() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub(super) fn now() -> i64 {
    i64::try_from(now_unsigned()).unwrap_or(i64::MAX)
}

/// The child's work on a thread of the test's own process, for tests of what asks it. The process
/// itself, with its confinement, is tested from outside.
#[cfg(test)]
pub(super) fn serve_in_test(
    socket: UnixStream,
    directory: &Path,
    clock: impl Fn() -> u64 + Send + 'static,
) {
    let mut child = open_store_in_test(directory);
    child.clock = Box::new(clock);
    std::thread::spawn(move || serve(socket, &mut child));
}

/// The child for a test that stands for its worker.
#[cfg(test)]
pub(super) fn open_in_test(directory: &Path, worker: UnixStream) -> Child {
    let mut child = open_store_in_test(directory);
    child.workers.network = Some(worker);
    child
}

#[cfg(test)]
fn open_store_in_test(directory: &Path) -> Child {
    let material = Material::Key(Zeroizing::new(vec![7; 32]));
    Child::over(Store::open(directory, &material).unwrap(), "key-file", directory).unwrap()
}
