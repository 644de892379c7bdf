//! Start-up, in order: configuration, policies, vault child, sockets, confinement, audit.
//!
//! The vault child is started and the sockets are bound before the process gives up its access to
//! everything but its own state; no runtime and no other thread exists before that, because
//! Landlock holds for the calling thread and those it starts. Any step that fails ends the start.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipc::daemon::{
    Held, HoldError, Inherited, Kind, ListenError, SelfExec, hold, listen, private_directory,
};
use ipc::fd::ChannelListener;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::Daemon;
use crate::audit::{Audit, AuditError};
use crate::config::{Config, ConfigError, credentials};
use crate::lease::Leases;
use crate::policy::{LoadError, Policies};
use crate::question::Questions;
use crate::reload::Configured;
use crate::rotation::Rotation;
use crate::shards::Shards;
use crate::sys::process::{self, ConfineError};
use crate::tls::leaf::{LeafError, Leaves};
use crate::upstream::Upstreams;
use crate::upstream::trust::{self, TrustError};
use crate::upstream::way::Ways;
use crate::vault::{KeySource, Vault, VaultError, VaultFacts};

/// Why proxyd does not serve.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Policies(#[from] LoadError),
    #[error("{0}")]
    Trust(#[from] TrustError),
    #[error("{0}")]
    Vault(#[from] VaultError),
    #[error("{0}")]
    Listen(#[from] ListenError),
    #[error("{0}")]
    Hold(#[from] HoldError),
    #[error("cannot use {what}: {source}")]
    State { what: String, source: std::io::Error },
    #[error("cannot confine itself: {0}")]
    Confine(#[from] ConfineError),
    #[error("{0}")]
    Audit(#[from] AuditError),
    #[error("{0}")]
    Leaves(#[from] LeafError),
    #[error("cannot start the runtime: {0}")]
    Runtime(std::io::Error),
    #[error("the vault process has ended")]
    VaultGone,
}

impl StartError {
    /// 78 for configuration, 77 for a host that lacks what is needed, 1 for the rest.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Policies(LoadError::Mistakes(_)) | Self::Trust(_) => 78,
            Self::Vault(VaultError::Key(_)) => 78,
            Self::Confine(_) => 77,
            _ => 1,
        }
    }
}

/// `--check`: reads everything, changes nothing.
pub fn check(config: &Config) -> Result<(), StartError> {
    let policies = Policies::check(&config.layout.policies).map_err(LoadError::from)?;
    Ways::load(&config.way_out, None)?;
    key_source(config)?;
    former_key_source(config)?;
    for warning in policies.warnings() {
        ipc::say::line(warning);
    }
    Ok(())
}

fn key_source(config: &Config) -> Result<KeySource, StartError> {
    let credentials = credentials();
    Ok(KeySource::choose(config.key.as_deref(), credentials.as_deref(), &config.state())?)
}

fn former_key_source(config: &Config) -> Result<Option<KeySource>, StartError> {
    let Some(former) = &config.former_key else { return Ok(None) };
    let credentials = credentials();
    Ok(Some(KeySource::choose(Some(former), credentials.as_deref(), &config.state())?))
}

/// One line an event, to standard error. Only our own modules speak below warnings: libraries log
/// what they carry, and they carry secrets.
pub fn log(level: tracing::Level) {
    use tracing_subscriber::prelude::*;
    let ours = ["proxyd", "ipc", "policies"].map(|name| (name, level));
    let targets = tracing_subscriber::filter::Targets::new()
        .with_default(level.min(tracing::Level::WARN))
        .with_targets(ours);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(ipc::say::log)
        .log_internal_errors(false)
        .with_ansi(false)
        .with_target(false);
    tracing_subscriber::registry().with(lines.with_filter(targets)).init();
}

/// What was made before the runtime.
pub struct Prepared {
    config: Config,
    policies: Policies,
    vault: Vault,
    facts: VaultFacts,
    upstreams: Upstreams,
    leases: Leases,
    audit: Audit,
    sockets: [std::os::fd::OwnedFd; 3],
    held: Held,
}

/// Everything that needs more than this process will be allowed to do, then the confinement.
pub fn prepare(exec: &SelfExec, config: Config) -> Result<Prepared, StartError> {
    process::hide_memory()?;
    process::raise_descriptors();
    // Whoever has a mistake in a file learns of it before anything is made.
    Policies::check(&config.layout.policies).map_err(LoadError::from)?;
    let ways = Ways::load(&config.way_out, None)?;
    let (key, former) = (key_source(&config)?, former_key_source(&config)?);
    let state = config.state();
    private_directory(&state)?;
    // Before anything in it is touched or waited for: a second proxyd would do both.
    let held = hold(&state)?;
    private_directory(&state.join("audit"))?;
    private_directory(&state.join("policies"))?;
    // What is synced below must be found again by its name.
    held.sync()
        .map_err(|source| StartError::State { what: state.display().to_string(), source })?;
    let policies = Policies::load(&config.layout.policies, &state.join("policies"))?;
    let mut inherited = Inherited::from_environment()
        .map_err(|source| StartError::State { what: "passed sockets".to_owned(), source })?;
    let layout = &config.layout;
    let sockets = [
        listen(&mut inherited, &layout.proxyd(), Kind::Stream)?,
        listen(&mut inherited, &layout.proxyd_lease(), Kind::SeqPacket)?,
        listen(&mut inherited, &layout.proxyd_egress(), Kind::Stream)?,
    ];
    let (vault, facts) = Vault::start(
        exec,
        &state,
        (&key, former.as_ref()),
        (&layout.policies, &config.secret_directories),
        (config.command_line(), !config.backends.commands.is_empty()),
    )?;
    for note in &facts.notes {
        tracing::warn!(note, "vault");
    }
    let names = state.join("leases");
    let leases = Leases::open(&names)
        .map_err(|source| StartError::State { what: names.display().to_string(), source })?;
    let upstreams = Upstreams::new(ways, config.resolver.clone(), vault.clone());
    confine(&config)?;
    let audit = Audit::open(&state.join("audit"))?;
    Ok(Prepared { config, policies, vault, facts, upstreams, leases, audit, sockets, held })
}

/// What the traffic process may still touch: its own state to write, what names, trust and
/// policies are read from to read. The vault's directory is not among it.
fn confine(config: &Config) -> Result<(), StartError> {
    let mut read = readable(config);
    read.push(config.layout.policies.clone());
    let state = config.state();
    let write = [state.join("leases"), state.join("audit"), state.join("policies")];
    process::confine_files(&read, &write)?;
    Ok(())
}

/// What names, trust and the operator's configuration are read from.
pub fn readable(config: &Config) -> Vec<PathBuf> {
    let mut read: Vec<PathBuf> = [
        "/etc/hosts",
        "/etc/resolv.conf",
        "/etc/nsswitch.conf",
        "/etc/passwd",
        "/etc/group",
        "/etc/localtime",
        "/usr/share/zoneinfo",
        "/lib",
        "/usr/lib",
        "/dev/urandom",
    ]
    .map(PathBuf::from)
    .to_vec();
    // The resolver's file is often a link into a directory where others replace it.
    if let Ok(file) = std::fs::canonicalize("/etc/resolv.conf")
        && let Some(dir) = file.parent().filter(|dir| *dir != Path::new("/etc"))
    {
        read.push(dir.to_owned());
    }
    read.extend(config.way_out.files());
    read.extend(own_directory(config));
    read.push(config.path.clone());
    read.extend(trust::BUNDLES.map(PathBuf::from));
    // These hold certificates and nothing else; a package that updates them replaces the file.
    let replaced = ["/etc/ssl/certs", "/etc/pki/ca-trust/extracted/pem", "/etc/pki/tls/certs"];
    read.extend(replaced.map(PathBuf::from));
    read
}

/// What neither a command of the operator's nor the worker that starts it may read, by its real
/// name: proxyd's state with the vault, the vault's key, and what systemd keeps for this service.
pub fn never_for_commands(config: &Config) -> Vec<PathBuf> {
    let mut hidden = vec![config.state()];
    hidden.extend(credentials());
    let former = former_key_source(config).ok().flatten();
    let keys = key_source(config).ok().into_iter().chain(former);
    hidden.extend(keys.map(|key| key.path().to_owned()));
    hidden.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect()
}

/// The directory of `proxyd.toml`: a file there that was replaced can be read again, elsewhere only
/// the very file that was there at the start. Not where the daemons' own state lies below it, nor
/// where others can write: such a directory is no configuration of ours alone.
fn own_directory(config: &Config) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let directory = std::fs::canonicalize(config.path.parent()?).ok()?;
    let open = std::fs::metadata(&directory).ok()?.mode() & 0o022 != 0;
    let layout = &config.layout;
    let holds_state = [&layout.state, &layout.runtime]
        .iter()
        .any(|own| std::fs::canonicalize(own).is_ok_and(|own| own.starts_with(&directory)));
    (!open && !holds_state).then_some(directory)
}

/// The sockets as the runtime serves them.
pub struct Sockets {
    pub control: UnixListener,
    pub lease: ChannelListener,
    pub egress: UnixListener,
}

/// Puts the parts together, inside the runtime.
pub fn assemble(prepared: Prepared) -> Result<(Arc<Daemon>, Sockets), StartError> {
    let [control, lease, egress] = prepared.sockets;
    let unix = |socket: std::os::fd::OwnedFd| {
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener)
    };
    let sockets = Sockets {
        control: unix(control).map_err(StartError::Runtime)?,
        lease: ChannelListener::new(lease).map_err(StartError::Runtime)?,
        egress: unix(egress).map_err(StartError::Runtime)?,
    };
    prepared.vault.attach()?;
    let daemon = Daemon {
        trusted_uids: prepared.config.trusted_uids.clone(),
        policies: prepared.policies,
        leaves: Leaves::new(prepared.vault.clone())?,
        rotation: Rotation::default(),
        vault: prepared.vault,
        _held: prepared.held,
        facts: prepared.facts,
        audit: prepared.audit,
        leases: Arc::new(prepared.leases),
        questions: Questions::default(),
        upstreams: prepared.upstreams,
        shards: Shards::start().map_err(StartError::Runtime)?,
        idle: prepared.config.idle,
        configured: Configured::new(prepared.config),
        tasks: TaskTracker::new(),
        ending: CancellationToken::new(),
    };
    Ok((Arc::new(daemon), sockets))
}
