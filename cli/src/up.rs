//! `cleanhands up`: the three daemons in the foreground, as one user's.
//!
//! Logs come prefixed with the daemon's name. A daemon that dies is started again, within bounds;
//! one that says the host or its configuration is wrong ends everything with that status. Ctrl-C,
//! SIGTERM and the end of the terminal drain harnessd, sandboxd, proxyd in this order.

mod log;

use std::collections::VecDeque;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipc::layout::{Layout, NotUtf8};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;

use crate::args::{Global, Up};
use crate::daemons::{self, ALL, Daemon, Launch};
use crate::failure::{CONFIGURATION, Failure, HOST};
use crate::place;
use crate::policy;
use crate::stop::Stop;
use crate::term::printable;
use log::Log;

/// Restarts of one daemon within [`RESTARTS_WINDOW`] before `up` gives up: a daemon that cannot
/// stay up needs a person.
const RESTARTS_MAX: usize = 5;
const RESTARTS_WINDOW: Duration = Duration::from_secs(60);
/// Lines of a daemon's last words that are kept.
const LAST_LINES: usize = 8;

/// One daemon as it runs.
struct Running {
    daemon: Daemon,
    child: Child,
    copying: Option<JoinHandle<()>>,
    last: LastLines,
    restarts: VecDeque<Instant>,
}

/// What a daemon wrote last, to be said again when it cannot run.
type LastLines = Arc<Mutex<VecDeque<String>>>;

/// Runs the three daemons until told to stop.
pub async fn up(global: &Global, options: Up) -> Result<ExitCode, Failure> {
    let log = Log::start().map_err(|error| Failure::new(format!("cannot start: {error}")))?;
    let outcome = supervise(global, options, &log).await;
    // Written like all else here: an end that waits for somebody to read it would be none.
    let last = outcome.as_ref().err().map(|failure| failure.shown(global.json));
    log.finish(last);
    Ok(outcome.unwrap_or_else(|failure| ExitCode::from(failure.status)))
}

async fn supervise(global: &Global, options: Up, log: &Log) -> Result<ExitCode, Failure> {
    let layout = places(global, &options)?;
    if let Some(named) = options.config_dir.as_ref().filter(|named| !named.is_dir()) {
        return Err(Failure::new(format!("configuration: no directory {}", named.display()))
            .with_hint("make it, or leave --config-dir out: its files are all optional")
            .with_status(CONFIGURATION));
    }
    let policies = policy::load(&layout.policies)?;
    for directory in [&layout.runtime, &layout.state] {
        ipc::daemon::private_directory(directory).map_err(|error| {
            Failure::new(error.to_string()).with_hint("--runtime-dir and --state-dir name others")
        })?;
    }
    nobody_serves(&layout).await?;
    let (loopback, port) = options.port.map(loopback).transpose()?.unzip();
    let launch = Launch { layout, log: options.log, loopback };
    let mut stop = Stop::watch()?;
    let mut running = Vec::new();
    let outcome = tokio::select! {
        () = stop.asked() => Ok(ExitCode::SUCCESS),
        outcome = serve(&launch, &mut running, log, || {
            let names: Vec<&str> = policies.names().collect();
            announce(log, &launch.layout, &names, port);
        }) => outcome,
    };
    for one in running.iter_mut().rev() {
        finish(one, log, outcome.is_ok()).await;
    }
    outcome.map_err(|failure| told_again(&running, failure))
}

/// The directories, absolute: the daemons tell theirs to commands that run elsewhere.
fn places(global: &Global, options: &Up) -> Result<Layout, Failure> {
    let user = place::user();
    let absolute = |path: PathBuf| {
        std::path::absolute(&path)
            .map_err(|error| Failure::new(format!("cannot use {}: {error}", path.display())))
    };
    let layout = Layout {
        runtime: absolute(global.runtime_dir.clone().unwrap_or(user.runtime))?,
        state: absolute(options.state_dir.clone().unwrap_or(user.state))?,
        policies: absolute(options.policies.clone())?,
        config: absolute(options.config_dir.clone().unwrap_or(user.config))?,
    };
    let refused = |error: NotUtf8| Failure::new(error.to_string()).with_status(CONFIGURATION);
    layout.check().map_err(refused)?;
    Ok(layout)
}

/// Two installations cannot share their sockets; said before anything is started.
async fn nobody_serves(layout: &Layout) -> Result<(), Failure> {
    for daemon in ALL {
        if let Ok(alive) = daemons::health(daemon, layout).await {
            let place = layout.runtime.display();
            let (name, pid) = (daemon.name(), alive.pid);
            return Err(Failure::new(format!("{name}, process {pid}, serves in {place} already"))
                .with_hint("stop it, or give these --runtime-dir and --state-dir of their own"));
        }
    }
    Ok(())
}

/// Binds the loopback port here, so that harnessd itself never opens a network socket. Gives the
/// port too: for 0 the system has chosen one.
fn loopback(port: u16) -> Result<(OwnedFd, u16), Failure> {
    let failed = |error| Failure::new(format!("cannot listen on 127.0.0.1:{port}: {error}"));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?.port();
    Ok((listener.into(), bound))
}

/// Starts all, then starts again what dies. Comes back only when nothing more can be done.
async fn serve(
    launch: &Launch,
    running: &mut Vec<Running>,
    log: &Log,
    announce: impl FnOnce(),
) -> Result<ExitCode, Failure> {
    for daemon in ALL {
        running.push(start(launch, log, daemon)?);
    }
    for one in running.iter_mut() {
        daemons::ready(one.daemon, &launch.layout, &mut one.child, None).await?;
    }
    announce();
    loop {
        let (at, status) = first_end(running).await?;
        let daemon = running[at].daemon;
        if matches!(status.code().map(u8::try_from), Some(Ok(HOST | CONFIGURATION))) {
            return Err(daemons::ended_early(daemon, status, None));
        }
        say(log, &format!("{} ended unexpectedly: {status}", daemon.name()));
        let wait = delay(&mut running[at].restarts).ok_or_else(|| {
            let (name, seconds) = (daemon.name(), RESTARTS_WINDOW.as_secs());
            Failure::new(format!(
                "{name} ended again after {RESTARTS_MAX} restarts within {seconds} s"
            ))
        })?;
        say(log, &format!("{} is started again", daemon.name()));
        tokio::time::sleep(wait).await;
        let again = start(launch, log, daemon)?;
        running[at].child = again.child;
        running[at].copying = again.copying;
        running[at].last = again.last;
    }
}

/// The failure with the last words of the daemon that it begins with: they stand far above by
/// now, among what the others said.
fn told_again(running: &[Running], failure: Failure) -> Failure {
    let of = |one: &&Running| failure.text.starts_with(one.daemon.name());
    let host = |one: &&Running| failure.status == HOST && one.daemon == Daemon::Sandboxd;
    let Some(one) = running.iter().find(|one| of(one) || host(one)) else {
        return failure;
    };
    let lines = one.last.lock().unwrap_or_else(PoisonError::into_inner);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    if failure.hint.is_some() || lines.is_empty() {
        return failure;
    }
    failure.with_hint(lines.join("\n"))
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

fn start(launch: &Launch, log: &Log, daemon: Daemon) -> Result<Running, Failure> {
    let mut child = launch.start(daemon, Stdio::piped())?;
    let last = LastLines::default();
    let copy = |lines| tokio::spawn(copy_log(daemon, lines, Arc::clone(&last), log.clone()));
    let copying = child.stderr.take().map(copy);
    Ok(Running { daemon, child, copying, last, restarts: VecDeque::new() })
}

async fn copy_log(daemon: Daemon, stream: impl AsyncRead + Unpin, last: LastLines, log: Log) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).await.is_ok_and(|n| n > 0) {
        let text = String::from_utf8_lossy(&line);
        let text = printable(text.trim_end_matches('\n'));
        log.line(format!("{:<8} | {text}", daemon.name()));
        remember(&last, &text);
        line.clear();
    }
}

/// Keeps a line that is no record of ordinary work: what a daemon writes when it cannot run.
fn remember(last: &LastLines, text: &str) {
    if text.is_empty() || text.contains("Z  INFO ") || text.contains("Z DEBUG ") {
        return;
    }
    let mut lines = last.lock().unwrap_or_else(PoisonError::into_inner);
    if lines.len() == LAST_LINES {
        lines.pop_front();
    }
    lines.push_back(text.to_owned());
}

/// Waits for whichever daemon ends first.
async fn first_end(running: &mut [Running]) -> Result<(usize, ExitStatus), Failure> {
    let waits = running.iter_mut().map(|one| Box::pin(one.child.wait()));
    let (status, at, _) = futures_util::future::select_all(waits).await;
    let status = status.map_err(|error| Failure::new(format!("cannot wait: {error}")))?;
    Ok((at, status))
}

/// Drains one. Where `well` is false the daemons are stopped because of one of them, at a moment
/// when others may not yet have been able to end in their own way: that is said once, by the cause.
async fn finish(one: &mut Running, log: &Log, well: bool) {
    match daemons::drain(one.daemon, &mut one.child).await {
        Ok(status) if status.success() || !well => {}
        Ok(status) => say(log, &format!("{} ended: {status}", one.daemon.name())),
        Err(failure) => say(log, &failure.text),
    }
    if let Some(copying) = one.copying.take() {
        // The pipe ends with the daemon and its children; a child that holds it open is no reason
        // to stay.
        let _ = tokio::time::timeout(Duration::from_secs(1), copying).await;
    }
}

fn announce(log: &Log, layout: &Layout, policies: &[&str], port: Option<u16>) {
    say(log, &format!("ready: sockets in {}", layout.runtime.display()));
    say(log, &format!("environments: {}", policies.join(", ")));
    if let Some(port) = port {
        say(
            log,
            &format!(
                "API on http://127.0.0.1:{port}; `cleanhands key add NAME` makes a key for it"
            ),
        );
    }
    say(log, "Ctrl-C drains and ends");
}

fn say(log: &Log, text: &str) {
    log.line(format!("{:<8} | {text}", "up"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_that_the_system_chose_is_the_one_that_is_announced() {
        let (socket, port) = loopback(0).unwrap_or_else(|failure| panic!("{}", failure.text));

        assert_ne!(port, 0);
        assert_eq!(TcpListener::from(socket).local_addr().unwrap().port(), port);
    }

    #[test]
    fn a_daemon_that_keeps_dying_is_not_started_for_ever() {
        let mut restarts = VecDeque::new();

        let waits: Vec<_> = (0..RESTARTS_MAX).map(|_| delay(&mut restarts)).collect();

        assert_eq!(waits[0], Some(Duration::ZERO));
        assert!(waits.iter().all(Option::is_some), "{waits:?}");
        assert_eq!(delay(&mut restarts), None);
    }
}
