//! The daemon from its arguments to its exit status: probe, zygote, confinement, sockets, serve,
//! drain.
//!
//! The order matters. The zygote starts before there is a thread; this process confines itself
//! after the zygote started, which must not be confined so, and before there is a thread, because
//! Landlock holds for the calling thread and those it starts.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ipc::daemon::{Held, HoldError, Inherited, Kind, ListenError, SelfExec};
use ipc::fd::ChannelListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::apart::Apart;
use crate::config::{Config, ConfigError};
use crate::control::{self, Control};
use crate::environments::Environments;
use crate::exec;
use crate::execute::Service;
use crate::journal::{Journal, JournalError};

use crate::owner::Owners;
use crate::probe::{self, HostFacts, ProbeError};
use crate::receipt;
use crate::sandbox::{Sandboxes, Stores};
use crate::sys;
use crate::templates::Templates;
use crate::trust::store::KeyStores;
use crate::workspace::Workspaces;
use crate::zygote::{Identities, Zygote, ZygoteError};

/// How often what was kept ready for nothing is looked for.
const TIDY_INTERVAL: Duration = Duration::from_secs(60);
/// How long running calls may go on after the signal to end.
const DRAIN_CALLS: Duration = Duration::from_secs(3);
/// How long their sandboxes may take to be gone, and their receipts to be written.
const DRAIN_SANDBOXES: Duration = Duration::from_secs(3);
/// How long answers may take to be sent after that.
const DRAIN_ANSWERS: Duration = Duration::from_secs(1);

/// sysexits(3) `EX_CONFIG`.
const EXIT_CONFIG: u8 = 78;
/// The host lacks what a sandbox needs.
const EXIT_HOST: u8 = 77;
const EXIT_USAGE: u8 = 2;
const EXIT_RUNTIME: u8 = 1;

/// Why the daemon does not run, or ended by itself.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Policies(String),
    #[error("{}\n{}", .0.text, .0.hint)]
    Host(#[from] ProbeError),
    #[error("{0}")]
    Zygote(#[from] ZygoteError),
    #[error("{0}")]
    Listen(#[from] ListenError),
    #[error("{0}")]
    Journal(#[from] JournalError),
    #[error("{what}: {source}")]
    Start { what: String, source: std::io::Error },
    #[error("{0}")]
    Hold(#[from] HoldError),
    #[error("the zygote ended: no sandbox can be made any more")]
    Broken,
}

/// What was made before there is a runtime.
struct Prepared {
    config: Config,
    host: HostFacts,
    zygote: Zygote,
    control: OwnedFd,
    exec: OwnedFd,
    /// Holds the state directory for this process alone.
    _held: Held,
}

/// Runs the daemon; `args` are its flags.
pub fn main(prefix: &[&str], args: Vec<OsString>) -> ExitCode {
    let outcome = Config::load(args).map_err(RunError::from).and_then(|config| {
        tracing_subscriber::fmt()
            .with_max_level(config.log)
            .with_writer(ipc::say::log)
            .log_internal_errors(false)
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .with_target(false)
            .init();
        if config.check { check(&config) } else { run(prefix, config) }
    });
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    if let RunError::Config(ConfigError::Usage(shown)) = &error {
        // Help and version come this way too. Nothing can be done when they cannot be printed.
        let _ = shown.print();
        return if shown.use_stderr() { EXIT_USAGE.into() } else { ExitCode::SUCCESS };
    }
    ipc::say::line(format_args!("sandboxd: {error}"));
    ExitCode::from(match error {
        RunError::Config(_) | RunError::Policies(_) => EXIT_CONFIG,
        RunError::Host(error) if !error.passing => EXIT_HOST,
        _ => EXIT_RUNTIME,
    })
}

/// `--check`: the configuration is read by now; the policies are here.
fn check(config: &Config) -> Result<(), RunError> {
    let lines = |diagnostics: &[policies::Diagnostic]| {
        diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    match policies::PolicySet::load(&config.layout.policies) {
        Ok(set) if set.warnings().is_empty() => Ok(()),
        Ok(set) => {
            ipc::say::line(lines(set.warnings()));
            Ok(())
        }
        Err(diagnostics) => Err(RunError::Policies(lines(&diagnostics))),
    }
}

fn run(prefix: &[&str], config: Config) -> Result<(), RunError> {
    let prepared = prepare(prefix, config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(start("cannot start the runtime"))?;
    let outcome = runtime.block_on(serve(prepared));
    // What still blocks, a connect(2) to a daemon that hangs, must not hold up the end.
    runtime.shutdown_timeout(DRAIN_ANSWERS);
    outcome
}

/// All that happens while this process has one thread.
fn prepare(prefix: &[&str], config: Config) -> Result<Prepared, RunError> {
    raise_descriptor_limit();
    let exec = SelfExec { prefix: prefix.iter().map(OsString::from).collect() };
    let identities = Identities::detect(config.uid_range.first, config.uid_range.count);
    let zygote = Zygote::start(&exec, identities)?;
    let host = probe::with(&zygote)?;
    let state = config.state();
    ipc::daemon::private_directory(&state)?;
    // A second daemon on the same state would take this one's running calls for lost ones.
    let held = ipc::daemon::hold(&state)?;
    let mut inherited =
        Inherited::from_environment().map_err(start("cannot take the sockets of systemd"))?;
    let control = ipc::daemon::listen(&mut inherited, &config.layout.sandboxd(), Kind::Stream)?;
    let exec =
        ipc::daemon::listen(&mut inherited, &config.layout.sandboxd_exec(), Kind::SeqPacket)?;
    let read = [config.layout.policies.as_path()];
    let write = [state.as_path(), config.layout.runtime.as_path()];
    let confined =
        sys::confine_self(&read, &write).map_err(start("cannot confine this process"))?;
    tracing::info!(confined, mode = host.mode, "prepared");
    Ok(Prepared { config, host, zygote, control, exec, _held: held })
}

/// Each sandbox costs about a dozen descriptors; the soft limit is 1,024 on most hosts.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Raising to the hard limit is always allowed; without it there are fewer sandboxes.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

async fn serve(prepared: Prepared) -> Result<(), RunError> {
    let Prepared { config, host, zygote, control, exec, _held } = prepared;
    let state = config.state();
    let journal = Journal::open(&state, receipt::unknown_outcome)?;
    let apart = Apart::new(config.apart());
    let workspaces = Workspaces::open(state.join("workspaces"), apart)
        .map_err(start("cannot open the workspaces"))?;
    let key_stores = KeyStores::open(state.join("trust"))
        .map_err(start("cannot open the stores of certificates"))?;
    let templates = Templates::open(state.join("templates"), config.templates_bytes)
        .map_err(start("cannot open the templates"))?;
    let environments = Environments::new(config.layout.policies.clone());
    let lease_socket = config.layout.proxyd_lease();
    let sandboxes = Arc::new(Sandboxes::new(
        zygote,
        environments,
        Stores { workspaces, key_stores, templates },
        lease_socket,
        config.sandboxes_max,
        config.cells_ready,
    ));
    let owners = Owners::new(&config.trusted_uids, rustix::process::geteuid().as_raw());
    let service = Arc::new(Service::new(journal, Arc::clone(&sandboxes), owners));

    let control_listener = std::os::unix::net::UnixListener::from(control);
    control_listener.set_nonblocking(true).map_err(start("cannot serve"))?;
    let control_listener =
        tokio::net::UnixListener::from_std(control_listener).map_err(start("cannot serve"))?;
    let exec_listener = ChannelListener::new(exec).map_err(start("cannot serve"))?;
    let stop = CancellationToken::new();
    let router = control::router(Control {
        service: Arc::clone(&service),
        host: Arc::new(host),
        config: Arc::new((config.path, config.sha256)),
    });
    let drain = DRAIN_CALLS + DRAIN_SANDBOXES + DRAIN_ANSWERS;
    let api = tokio::spawn(ipc::http::serve(control_listener, router, stop.clone(), drain));
    let exec = tokio::spawn(exec::serve(exec_listener, Arc::clone(&service), stop.clone()));
    let watchdog = tokio::spawn(tell_watchdog());
    let tidying = tokio::spawn(tidy(Arc::clone(&sandboxes)));
    ipc::daemon::ready("serving");
    tracing::info!(journal = service.journal.identity(), "ready");

    let outcome = until_told_to_stop(&sandboxes).await;
    ipc::daemon::stopping();
    tracing::info!("draining");
    stop.cancel();
    service.quiet(DRAIN_CALLS).await;
    sandboxes.end_all(DRAIN_SANDBOXES).await;
    service.quiet(DRAIN_ANSWERS).await;
    let _ = tokio::time::timeout(DRAIN_ANSWERS, async { tokio::join!(api, exec) }).await;
    watchdog.abort();
    tidying.abort();
    tracing::info!("ended");
    outcome
}

/// The end of the zygote ends this daemon too: there can be no new one in a process with threads,
/// and its cells have ended with it. Whoever started the daemon starts it again.
async fn until_told_to_stop(sandboxes: &Sandboxes) -> Result<(), RunError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(start("cannot await signals"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(start("cannot await signals"))?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        () = sandboxes.cannot_be_made() => Err(RunError::Broken),
    }
}

async fn tidy(sandboxes: Arc<Sandboxes>) {
    loop {
        tokio::time::sleep(TIDY_INTERVAL).await;
        sandboxes.tidy_pool();
        let templates = Arc::clone(&sandboxes.templates);
        // It walks directories; what it could not do it tries again the next time.
        let _ = tokio::task::spawn_blocking(move || templates.tidy()).await;
    }
}

async fn tell_watchdog() {
    let Some(period) = ipc::daemon::watchdog_period() else { return };
    loop {
        ipc::daemon::alive();
        tokio::time::sleep(period).await;
    }
}

fn start(what: &str) -> impl Fn(std::io::Error) -> RunError + use<> {
    let what = what.to_owned();
    move |source| RunError::Start { what: what.clone(), source }
}
