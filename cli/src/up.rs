//! `cleanhands up`: the three daemons in the foreground, as one user's.
//!
//! Logs come prefixed with the daemon's name. A daemon that dies is started again, within bounds;
//! one that says the host or its configuration is wrong ends everything with that status. Ctrl-C
//! and SIGTERM drain harnessd, sandboxd, proxyd in this order.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ipc::layout::Layout;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

use crate::args::{Global, Up};
use crate::daemons::{self, ALL, Daemon, Launch};
use crate::failure::{CONFIGURATION, Failure, HOST};
use crate::place;
use crate::policy;
use crate::term::printable;

/// Restarts of one daemon within [`RESTARTS_WINDOW`] before `up` gives up: a daemon that cannot
/// stay up needs a person.
const RESTARTS_MAX: usize = 5;
const RESTARTS_WINDOW: Duration = Duration::from_secs(60);

/// One daemon as it runs.
struct Running {
    daemon: Daemon,
    child: Child,
    log: Option<JoinHandle<()>>,
    restarts: VecDeque<Instant>,
}

/// Runs the three daemons until told to stop.
pub async fn up(global: &Global, options: Up) -> Result<ExitCode, Failure> {
    let layout = places(global, &options);
    let policies = policy::load(&layout.policies)?;
    for directory in [&layout.runtime, &layout.state] {
        ipc::daemon::private_directory(directory).map_err(|e| Failure::new(e.to_string()))?;
    }
    let loopback = options.port.map(loopback).transpose()?;
    let launch = Launch { layout, log: options.log, loopback };
    let mut stop = Stop::new()?;
    let mut running = Vec::new();
    let outcome = tokio::select! {
        () = stop.asked() => Ok(ExitCode::SUCCESS),
        outcome = serve(&launch, &mut running, || {
            let names: Vec<&str> = policies.names().collect();
            announce(&launch.layout, &names, options.port);
        }) => outcome,
    };
    for one in running.iter_mut().rev() {
        finish(one).await;
    }
    outcome
}

fn places(global: &Global, options: &Up) -> Layout {
    let user = place::user();
    Layout {
        runtime: global.runtime_dir.clone().unwrap_or(user.runtime),
        state: options.state_dir.clone().unwrap_or(user.state),
        policies: options.policies.clone(),
        config: options.config_dir.clone().unwrap_or(user.config),
    }
}

/// Binds the loopback port here, so that harnessd itself never opens a network socket.
fn loopback(port: u16) -> Result<OwnedFd, Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .map_err(|error| Failure::new(format!("cannot listen on 127.0.0.1:{port}: {error}")))?;
    Ok(listener.into())
}

/// Starts all, then starts again what dies. Comes back only when nothing more can be done.
async fn serve(
    launch: &Launch,
    running: &mut Vec<Running>,
    announce: impl FnOnce(),
) -> Result<ExitCode, Failure> {
    for daemon in ALL {
        running.push(start(launch, daemon)?);
    }
    for one in running.iter_mut() {
        daemons::ready(one.daemon, &launch.layout, &mut one.child, None)
            .await
            .map_err(|failure| explained(one.daemon, failure))?;
    }
    announce();
    loop {
        let (at, status) = first_end(running).await?;
        let daemon = running[at].daemon;
        if matches!(status.code().map(u8::try_from), Some(Ok(HOST | CONFIGURATION))) {
            return Err(explained(daemon, daemons::ended_early(daemon, status, None)));
        }
        say(&format!("{} ended unexpectedly: {status}; starting it again", daemon.name()));
        let wait = delay(&mut running[at].restarts).ok_or_else(|| {
            Failure::new(format!(
                "{} ended {RESTARTS_MAX} times in {} s",
                daemon.name(),
                RESTARTS_WINDOW.as_secs()
            ))
            .with_hint("its last lines above say why")
        })?;
        tokio::time::sleep(wait).await;
        let again = start(launch, daemon)?;
        running[at].child = again.child;
        running[at].log = again.log;
    }
}

fn explained(daemon: Daemon, failure: Failure) -> Failure {
    let hint = format!("the last lines of {} above say what and what to do", daemon.name());
    if failure.hint.is_none() { failure.with_hint(hint) } else { failure }
}

/// How long to wait before the next start, or none when there were too many.
fn delay(restarts: &mut VecDeque<Instant>) -> Option<Duration> {
    let now = Instant::now();
    while restarts.front().is_some_and(|t| now.duration_since(*t) > RESTARTS_WINDOW) {
        restarts.pop_front();
    }
    if restarts.len() >= RESTARTS_MAX {
        return None;
    }
    let doubled = u32::try_from(restarts.len()).unwrap_or_default();
    restarts.push_back(now);
    // The first restart is at once: clients of the others wait for it.
    Some(if doubled == 0 { Duration::ZERO } else { Duration::from_millis(100) * 2u32.pow(doubled) })
}

fn start(launch: &Launch, daemon: Daemon) -> Result<Running, Failure> {
    let mut child = launch.start(daemon, Stdio::piped())?;
    let log = child.stderr.take().map(|lines| tokio::spawn(copy_log(daemon, lines)));
    Ok(Running { daemon, child, log, restarts: VecDeque::new() })
}

async fn copy_log(daemon: Daemon, stream: impl AsyncRead + Unpin) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).await.is_ok_and(|n| n > 0) {
        let text = String::from_utf8_lossy(&line);
        eprintln!("{:<8} | {}", daemon.name(), printable(text.trim_end_matches('\n')));
        line.clear();
    }
}

/// Waits for whichever daemon ends first.
async fn first_end(running: &mut [Running]) -> Result<(usize, ExitStatus), Failure> {
    let waits = running.iter_mut().map(|one| Box::pin(one.child.wait()));
    let (status, at, _) = futures_util::future::select_all(waits).await;
    let status = status.map_err(|error| Failure::new(format!("cannot wait: {error}")))?;
    Ok((at, status))
}

async fn finish(one: &mut Running) {
    match daemons::drain(one.daemon, &mut one.child).await {
        Ok(status) if status.success() => {}
        Ok(status) => say(&format!("{} ended: {status}", one.daemon.name())),
        Err(failure) => say(&failure.text),
    }
    if let Some(log) = one.log.take() {
        // The pipe ends with the daemon and its children; a child that holds it open is no reason
        // to stay.
        let _ = tokio::time::timeout(Duration::from_secs(1), log).await;
    }
}

fn announce(layout: &Layout, policies: &[&str], port: Option<u16>) {
    say(&format!("ready: sockets in {}", layout.runtime.display()));
    say(&format!("environments: {}", policies.join(", ")));
    if let Some(port) = port {
        say(&format!(
            "API on http://127.0.0.1:{port}; `cleanhands key add NAME` makes a key for it"
        ));
    }
    say("Ctrl-C drains and ends");
}

fn say(text: &str) {
    eprintln!("{:<8} | {text}", "up");
}

/// SIGINT and SIGTERM.
struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> Result<Self, Failure> {
        let fail = |error| Failure::new(format!("cannot watch for signals: {error}"));
        Ok(Self {
            interrupt: signal(SignalKind::interrupt()).map_err(fail)?,
            terminate: signal(SignalKind::terminate()).map_err(fail)?,
        })
    }

    async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_keeps_dying_is_not_started_for_ever() {
        let mut restarts = VecDeque::new();

        let waits: Vec<_> = (0..RESTARTS_MAX).map(|_| delay(&mut restarts)).collect();

        assert_eq!(waits[0], Some(Duration::ZERO));
        assert!(waits.iter().all(Option::is_some), "{waits:?}");
        assert_eq!(delay(&mut restarts), None);
    }
}
