//! proxyd: the only way out of a sandbox, and the keeper of credentials.
//!
//! Read [`request`] first: one request's life in order. Then `entry` (how connections come in),
//! `relay` (how bytes go on), `upstream` (whom they reach), `inject` and `scrub` (where a secret
//! meets an exchange), `vault` (the child process that holds secrets). [`run`] puts them together.
// It panics where nobody can hear: `ipc::say` does not.
#![deny(clippy::print_stderr)]

mod request;

mod entry;
mod lease;
mod overrides;
mod policy;
mod question;
mod reload;
mod rotation;

mod dns;
mod head;
mod ids;
mod relay;
mod reply;
mod tls;
mod upstream;

mod inject;
mod scrub;
mod vault;

mod audit;
mod config;
mod control;
mod shards;
mod start;
mod sys;

#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod measuring;
mod metrics;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::error::ErrorKind;
use ipc::daemon::SelfExec;
use ipc::peer::Principal;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use audit::Audit;
use config::{Arguments, Config, Idle};
use lease::Leases;
use policy::Policies;
use question::Questions;
use reload::Configured;
use rotation::Rotation;
use shards::Shards;
use start::{Prepared, StartError};
use tls::leaf::Leaves;
use upstream::Upstreams;
use vault::{Vault, VaultFacts};

/// How long flows may still run when the daemon is told to end.
const DRAIN: Duration = Duration::from_secs(2);
/// How often the policy files are looked at.
const POLICY_LOOK: Duration = Duration::from_secs(1);

/// What every connection needs.
pub(crate) struct Daemon {
    trusted_uids: Vec<u32>,
    /// The state directory, for this process alone.
    _held: ipc::daemon::Held,
    policies: Policies,
    configured: Configured,
    vault: Vault,
    facts: VaultFacts,
    audit: Audit,
    leaves: Leaves,
    rotation: Rotation,
    leases: Arc<Leases>,
    /// What waits for operators.
    questions: Questions,
    upstreams: Upstreams,
    shards: Shards,
    idle: Idle,
    /// Everything that is under way.
    tasks: TaskTracker,
    /// Cancelled when flows are to end.
    ending: CancellationToken,
}

impl Daemon {
    /// Whether a peer is root, this daemon's own user, or one of the other daemons.
    fn trusts(&self, peer: Principal) -> bool {
        peer.uid == 0 || peer.uid == Principal::own().uid || self.trusted_uids.contains(&peer.uid)
    }
}

/// Runs proxyd, or its vault child when the first argument is the hidden role `vault`. `prefix`
/// is what to put before the role when this program starts itself again.
pub fn main(prefix: &[&str], mut args: Vec<OsString>) -> ExitCode {
    sys::wipe::freed_memory();
    if args.first().is_some_and(|role| role == "vault") {
        args.remove(0);
        return vault::child::main(args);
    }
    if args.first().is_some_and(|role| role == vault::fetch::ROLE) {
        args.remove(0);
        return vault::fetch::main(args);
    }
    let exec = SelfExec { prefix: prefix.iter().map(OsString::from).collect() };
    if args.first().is_some_and(|role| role == vault::run::ROLE) {
        args.remove(0);
        return vault::run::main(&exec, args);
    }
    if args.first().is_some_and(|role| role == vault::run::COMMAND_ROLE) {
        return vault::run::become_command(&args[1..]);
    }
    let arguments = match Arguments::parse_from_rest(args) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Printing to a closed terminal changes nothing about the outcome.
            let _ = error.print();
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return ExitCode::from(if asked { 0 } else { 2 });
        }
    };
    match run(&exec, &arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            ipc::say::line(format_args!("proxyd: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

/// From configuration to the end of the last flow.
fn run(exec: &SelfExec, arguments: &Arguments) -> Result<(), StartError> {
    let config = Config::load(arguments)?;
    if arguments.check {
        return start::check(&config);
    }
    start::log(config.log);
    let prepared = start::prepare(exec, config)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(StartError::Runtime)?;
    let outcome = runtime.block_on(serve(prepared));
    // A lookup of the host's resolver or accounts may hang; it must not keep the process.
    runtime.shutdown_timeout(Duration::from_millis(200));
    outcome
}

/// Serves until a signal, or until the vault is gone.
async fn serve(prepared: Prepared) -> Result<(), StartError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(StartError::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(StartError::Runtime)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(StartError::Runtime)?;
    let stop = CancellationToken::new();
    let (daemon, sockets) = start::assemble(prepared)?;
    let vault = daemon.vault.clone();
    let operators = control::operators(&sockets.control);
    let control = ipc::http::serve(
        sockets.control,
        control::router(Arc::clone(&daemon), operators)
            .merge(question::calls::router(Arc::clone(&daemon), operators)),
        stop.clone(),
        control::DRAIN,
    );
    let control = tokio::spawn(control);
    tokio::spawn(lease::serve::serve(Arc::clone(&daemon), sockets.lease, stop.clone()));
    let shard = daemon.shards.for_listener();
    let egress = shards::moved(sockets.egress, shard).map_err(StartError::Runtime)?;
    shard.spawn(entry::explicit::serve(Arc::clone(&daemon), egress, stop.clone()));
    tokio::spawn(Arc::clone(&daemon.leases).sweep());
    tokio::spawn(Arc::clone(&daemon.leases).tell(daemon.vault.clone()));
    tokio::spawn(daemon.upstreams.clone().sweep());
    tokio::spawn(daemon.leaves.clone().keep_fresh());
    tokio::spawn(rotation::keep(Arc::clone(&daemon)));
    tokio::spawn(audit::keep(Arc::clone(&daemon)));
    ipc::daemon::ready("serving");
    tracing::info!(generation = daemon.policies.current().number, "proxyd serves");
    let mut look = tokio::time::interval(POLICY_LOOK);
    let mut alive =
        tokio::time::interval(ipc::daemon::watchdog_period().unwrap_or(Duration::from_secs(3600)));
    let outcome = loop {
        tokio::select! {
            _ = terminate.recv() => break Ok(()),
            _ = interrupt.recv() => break Ok(()),
            () = vault.gone() => break Err(StartError::VaultGone),
            // What is wrong is logged, and stands in the health answer.
            _ = hangup.recv() => drop(reload::all(&daemon).await),
            _ = look.tick() => {
                if daemon.policies.have_changed() {
                    drop(reload::policies(&daemon).await);
                }
            }
            _ = alive.tick() => ipc::daemon::alive(),
        }
    };
    drain(&daemon, &stop).await;
    // The control socket drains beside the flows; what is left of it ends with the runtime.
    let _ = tokio::time::timeout(control::DRAIN, control).await;
    daemon.audit.close().await;
    outcome
}

/// Takes nothing new, lets flows end for a moment, ends the rest.
async fn drain(daemon: &Daemon, stop: &CancellationToken) {
    ipc::daemon::stopping();
    tracing::info!("proxyd drains");
    daemon.questions.close();
    stop.cancel();
    daemon.tasks.close();
    if tokio::time::timeout(DRAIN, daemon.tasks.wait()).await.is_err() {
        daemon.ending.cancel();
        // Flows see the cancellation at their next step; their outcomes are recorded then.
        let _ = tokio::time::timeout(DRAIN, daemon.tasks.wait()).await;
    }
}
