//! Starts harnessd: arguments, configuration, sockets, confinement, log, engine, service, drain.
//!
//! The order matters: sockets and files outside the state directory are opened first, then the
//! process confines itself, and only then is there a second thread or a first request.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use ipc::daemon::{Inherited, Kind, ListenError};
use ipc::http::Client;
use ipc::in_force::InForce;
use tokio_util::sync::CancellationToken;

use crate::api;
use crate::config::{Config, ConfigError, Overrides, Provider};
use crate::engine::Engine;
use crate::hands::SandboxHand;
use crate::log::{Log, LogError};
use crate::model::{Egress, Models, Script, ScriptError};
use crate::sys::confine::{ConfineError, confine_self};

/// The policy file that rules model calls.
const MODEL_ENVIRONMENT: &str = "harness";
/// How long requests and streams may take to end after a stop.
const DRAIN: Duration = Duration::from_secs(3);

const RUNTIME: u8 = 1;
const USAGE: u8 = 2;
const CONFIGURATION: u8 = 78;

/// The agent loop, its session log and its API.
#[derive(Debug, Parser)]
#[command(name = "harnessd", version, about)]
struct Arguments {
    /// Configuration file; else /etc/cleanhands/harnessd.toml, if it is there.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Reads the configuration, reports its errors, and ends.
    #[arg(long)]
    check: bool,
    /// Directory of the sockets.
    #[arg(long)]
    runtime_dir: Option<PathBuf>,
    /// Directory that holds `harnessd/`, the state.
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Directory of the policy files.
    #[arg(long)]
    policies_dir: Option<PathBuf>,
    /// Level of the log: error, warn, info, debug, trace.
    #[arg(long)]
    log: Option<String>,
    /// Number of an inherited socket that listens on a loopback address.
    #[arg(long, hide = true)]
    loopback_fd: Option<RawFd>,
}

/// Why harnessd does not start or stops.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("model {name:?}: {source}")]
    Script { name: String, source: ScriptError },
    #[error("cannot read the policies in {path}: {source}\nname the directory with --policies-dir")]
    Policies { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot take over an inherited socket: {0}")]
    Inherited(std::io::Error),
    #[error(transparent)]
    Confine(#[from] ConfineError),
    #[error("{path}: {source}\nis the disk full, or the directory not this user's?")]
    Log { path: PathBuf, source: LogError },
    #[error("cannot start: {0}")]
    Runtime(std::io::Error),
}

impl RunError {
    fn code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Script { .. } | Self::Policies { .. } => CONFIGURATION,
            _ => RUNTIME,
        }
    }
}

/// Runs harnessd. `prefix` is what stands before its own arguments when it executes itself again;
/// harnessd has no other roles, so it needs none.
pub fn main(prefix: &[&str], args: Vec<OsString>) -> ExitCode {
    let _ = prefix;
    let name = OsString::from("harnessd");
    let arguments = match Arguments::try_parse_from(std::iter::once(name).chain(args)) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version come this way too, and are no errors.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            ipc::say::line(format_args!("harnessd: {error}"));
            ExitCode::from(error.code())
        }
    }
}

fn run(arguments: Arguments) -> Result<(), RunError> {
    let check = arguments.check;
    let config = Config::load(Overrides {
        config: arguments.config,
        runtime_dir: arguments.runtime_dir,
        state_dir: arguments.state_dir,
        policies_dir: arguments.policies_dir,
        log: arguments.log,
        loopback_fd: arguments.loopback_fd,
    })?;
    let scripts = load_scripts(&config)?;
    if check {
        return Ok(());
    }
    start_logging(&config.log);
    let policies = &config.layout.policies;
    std::fs::read_dir(policies)
        .map_err(|source| RunError::Policies { path: policies.clone(), source })?;
    let mut inherited = Inherited::from_environment().map_err(RunError::Inherited)?;
    let socket = ipc::daemon::listen(&mut inherited, &config.layout.harnessd(), Kind::Stream)?;
    let loopback = match config.loopback {
        Some(raw) => Some(ipc::daemon::inherited_fd(raw).map_err(RunError::Inherited)?),
        None => inherited.take("harnessd-loopback"),
    };
    let state = config.layout.state.join("harnessd");
    ipc::daemon::private_directory(&state)?;
    let mut readable: Vec<&Path> = vec![policies];
    readable.extend(config.keys_file.as_deref());
    confine_self(&[&state], &readable)?;
    let log = Log::open(&state).map_err(|source| RunError::Log { path: state, source })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(RunError::Runtime)?;
    runtime.block_on(serve(config, scripts, log, socket, loopback))?;
    // Reads that are still under way on the blocking threads are of no use to anybody.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

fn load_scripts(config: &Config) -> Result<BTreeMap<String, Arc<Script>>, RunError> {
    let mut scripts = BTreeMap::new();
    for (name, model) in &config.models {
        if let Provider::Scripted { script } = &model.provider {
            let script = Script::load(script)
                .map_err(|source| RunError::Script { name: name.clone(), source })?;
            scripts.insert(name.clone(), Arc::new(script));
        }
    }
    Ok(scripts)
}

fn start_logging(level: &str) {
    let filter = tracing_subscriber::EnvFilter::new(level);
    let started = tracing_subscriber::fmt()
        .with_writer(ipc::say::log)
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(false)
        .try_init();
    // Only a test that starts two daemons in one process has one already.
    drop(started);
}

async fn serve(
    config: Config,
    scripts: BTreeMap<String, Arc<Script>>,
    log: Log,
    socket: OwnedFd,
    loopback: Option<OwnedFd>,
) -> Result<(), RunError> {
    let layout = &config.layout;
    // Whoever was importing has lost its connection. A full disk keeps nobody from starting.
    if let Err(error) = log.break_imports_off().await {
        tracing::warn!(%error, "what broken-off imports have left stays");
    }
    if let Err(error) = log.break_uploads_off().await {
        tracing::warn!(%error, "what broken-off uploads have left stays");
    }
    let stop = CancellationToken::new();
    let egress = Egress::new(layout.proxyd_lease(), layout.proxyd_egress(), MODEL_ENVIRONMENT);
    let models = Models::new(config.models.clone(), scripts, egress);
    let hand = Box::new(SandboxHand::new(Client::new(layout.sandboxd())));
    let proxyd = Arc::new(Client::new(layout.proxyd()));
    let engine = Engine::new(log, models, hand, proxyd, stop.clone());
    let state = api::ApiState::new(
        engine.clone(),
        api::ApiConfig {
            policies_dir: layout.policies.clone(),
            default_environment: config.default_environment.clone(),
            keys_file: config.keys_file.clone(),
            state_dir: layout.state.join("harnessd"),
            sandboxd: Client::new(layout.sandboxd()),
            in_force: InForce {
                config: Some(config.path.clone()),
                config_sha256: config.sha256.clone(),
                ..InForce::default()
            },
        },
    );
    let listener = listener(socket).map_err(RunError::Runtime)?;
    let router = api::router(state);
    let service = ipc::http::serve(listener, router.clone(), stop.clone(), DRAIN);
    let sweep = engine.sweep();
    let signals = wait_for_signal(stop.clone());
    let by_key = async {
        match loopback {
            Some(fd) => {
                let listener = tcp_listener(fd)?;
                api::serve_loopback(listener, router.clone(), stop.clone(), DRAIN).await
            }
            None => Ok(()),
        }
    };
    tracing::info!(socket = %layout.harnessd().display(), "harnessd serves");
    ipc::daemon::ready("serving");
    let alive = tell_watchdog(stop.clone());
    let ((), (), (), signals, by_key) = tokio::join!(service, sweep, alive, signals, by_key);
    ipc::daemon::stopping();
    let drained = tokio::time::timeout(DRAIN, engine.drained()).await;
    tracing::info!(complete = drained.is_ok(), "harnessd ends");
    signals.and(by_key).map_err(RunError::Runtime)
}

/// Tells systemd's watchdog, where it is set, that the runtime still turns.
async fn tell_watchdog(stop: CancellationToken) {
    let Some(period) = ipc::daemon::watchdog_period() else { return };
    while !stop.is_cancelled() {
        ipc::daemon::alive();
        tokio::select! {
            () = tokio::time::sleep(period) => {}
            () = stop.cancelled() => {}
        }
    }
}

fn listener(socket: OwnedFd) -> std::io::Result<tokio::net::UnixListener> {
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

fn tcp_listener(socket: OwnedFd) -> std::io::Result<tokio::net::TcpListener> {
    let listener = std::net::TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(listener)
}

/// Cancels `stop` on SIGTERM or SIGINT.
async fn wait_for_signal(stop: CancellationToken) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = stop.cancelled() => {}
    }
    tracing::info!("stop asked for");
    stop.cancel();
    Ok(())
}
