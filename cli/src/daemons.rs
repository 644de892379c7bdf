//! Starts the three daemons as processes of their own, waits until they serve, ends them.
//!
//! Each is this same executable under another first argument. A daemon started here dies with
//! this program whatever kills it (PR_SET_PDEATHSIG, set by [`attach`] in the new process), and
//! runs in a process group of its own, so that a terminal's Ctrl-C reaches this program alone and
//! the order of draining is ours.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ipc::http::Client;
use ipc::in_force::InForce;
use ipc::layout::Layout;
use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};

use crate::failure::{CONFIGURATION, Failure, HOST};

/// The first argument of a process that must die with its parent.
pub const ATTACHED: &str = "attached";

/// How long a daemon may take until it serves: generous for a loaded machine, and longer than a
/// proxyd waits for what the one before it still has to store.
const READY_WITHIN: Duration = Duration::from_secs(45);
/// How long a daemon may take to say that it serves.
const HEALTH_WITHIN: Duration = Duration::from_secs(5);
/// How often readiness is asked for.
const READY_POLL: Duration = Duration::from_millis(10);
/// How long a daemon may drain before it is killed: the daemons' own deadline is below it.
const DRAIN_WITHIN: Duration = Duration::from_secs(8);

/// The order in which they start; they drain in the opposite one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Daemon {
    Proxyd,
    Sandboxd,
    Harnessd,
}

/// All three, in the order of their start.
pub const ALL: [Daemon; 3] = [Daemon::Proxyd, Daemon::Sandboxd, Daemon::Harnessd];

impl Daemon {
    pub fn name(self) -> &'static str {
        match self {
            Self::Proxyd => "proxyd",
            Self::Sandboxd => "sandboxd",
            Self::Harnessd => "harnessd",
        }
    }

    pub fn socket(self, layout: &Layout) -> PathBuf {
        match self {
            Self::Proxyd => layout.proxyd(),
            Self::Sandboxd => layout.sandboxd(),
            Self::Harnessd => layout.harnessd(),
        }
    }

    pub fn health_path(self) -> &'static str {
        match self {
            Self::Proxyd | Self::Sandboxd => "/v1/health",
            Self::Harnessd => "/cleanhands/v1/health",
        }
    }
}

/// What every daemon's health says of itself.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct Alive {
    pub version: String,
    pub pid: u32,
    #[serde(default)]
    pub in_force: InForce,
}

/// Asks a daemon whether it serves. One that is stopped, or hangs, does not.
pub async fn health(daemon: Daemon, layout: &Layout) -> Result<Alive, Failure> {
    let socket = daemon.socket(layout);
    let client = Client::new(&socket);
    let asked = tokio::time::timeout(HEALTH_WITHIN, client.get(daemon.health_path())).await;
    let seconds = HEALTH_WITHIN.as_secs();
    let silent = || Failure::new(format!("{}: no answer in {seconds} s", socket.display()));
    Ok(asked.map_err(|_| silent())??)
}

/// How daemons are started.
pub struct Launch {
    pub layout: Layout,
    /// Level of the logs, or what the daemon's configuration says.
    pub log: Option<String>,
    /// A listening socket for harnessd's API on loopback.
    pub loopback: Option<OwnedFd>,
}

impl Launch {
    /// Starts one daemon; its log goes to `stderr`.
    pub fn start(&self, daemon: Daemon, stderr: Stdio) -> Result<Child, Failure> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(ATTACHED).arg(std::process::id().to_string()).arg(daemon.name());
        command.arg("--runtime-dir").arg(&self.layout.runtime);
        command.arg("--state-dir").arg(&self.layout.state);
        command.arg("--policies-dir").arg(&self.layout.policies);
        let config = self.layout.config.join(format!("{}.toml", daemon.name()));
        if config.exists() {
            command.arg("--config").arg(config);
        }
        if daemon == Daemon::Sandboxd {
            command.arg("--config-dir").arg(&self.layout.config);
        }
        if let Some(level) = &self.log {
            command.arg("--log").arg(level);
        }
        // What systemd told this program is not meant for the daemons.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).process_group(0);
        let fail = |error| Failure::new(format!("cannot start {}: {error}", daemon.name()));
        let Some(socket) = self.loopback.as_ref().filter(|_| daemon == Daemon::Harnessd) else {
            return command.spawn().map_err(fail);
        };
        command.arg("--loopback-fd").arg(socket.as_raw_fd().to_string());
        // One thread alone starts processes, so no other child can be started while the socket may
        // be inherited.
        inheritable(socket, true).map_err(fail)?;
        let child = command.spawn().map_err(fail);
        inheritable(socket, false).map_err(fail)?;
        child
    }
}

fn inheritable(socket: impl AsFd, yes: bool) -> std::io::Result<()> {
    use rustix::io::FdFlags;
    let flags = if yes { FdFlags::empty() } else { FdFlags::CLOEXEC };
    Ok(rustix::io::fcntl_setfd(socket, flags)?)
}

/// In a process started with [`ATTACHED`] and its parent's number: takes both words off and asks
/// the kernel to end this process when the parent is gone.
pub fn attach(words: &mut Vec<OsString>) -> Result<(), Failure> {
    let parent = words.get(1).and_then(|word| word.to_str()?.parse::<i32>().ok());
    let parent = parent.ok_or_else(|| {
        Failure::new(format!("{ATTACHED} needs the number of a process")).with_status(2)
    })?;
    words.drain(..2);
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|error| Failure::new(format!("cannot attach to process {parent}: {error}")))?;
    // The parent may have ended before the request was made.
    if rustix::process::getppid().map(Pid::as_raw_nonzero).map(std::num::NonZero::get)
        != Some(parent)
    {
        return Err(Failure::new(format!("process {parent} has ended")));
    }
    Ok(())
}

/// Waits until a daemon that was just started serves, or says how it ended. `log` is where its
/// last words may be found.
pub async fn ready(
    daemon: Daemon,
    layout: &Layout,
    child: &mut Child,
    log: Option<&Path>,
) -> Result<Alive, Failure> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        let ended = child
            .try_wait()
            .map_err(|error| Failure::new(format!("cannot wait for {}: {error}", daemon.name())))?;
        if let Some(status) = ended {
            return Err(ended_early(daemon, status, log));
        }
        // Another process may serve that socket: only our own child's answer counts.
        if let Ok(alive) = health(daemon, layout).await
            && Some(alive.pid) == child.id()
        {
            return Ok(alive);
        }
        if Instant::now() >= deadline {
            let socket = daemon.socket(layout);
            let waited = READY_WITHIN.as_secs();
            return Err(Failure::new(format!(
                "{} does not answer on {} after {waited} s",
                daemon.name(),
                socket.display()
            )));
        }
        tokio::time::sleep(READY_POLL).await;
    }
}

/// What a daemon's early end means for whoever started it.
pub fn ended_early(daemon: Daemon, status: ExitStatus, log: Option<&Path>) -> Failure {
    let last = log.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    let lines: Vec<&str> = last.lines().collect();
    let last = lines[lines.len().saturating_sub(6)..].join("\n");
    let text = format!("{} ended before it served: {status}", daemon.name());
    let failure = match status.code() {
        Some(77) => Failure::new("this host lacks what sandboxes need").with_status(HOST),
        Some(78) => Failure::new(text).with_status(CONFIGURATION),
        _ => Failure::new(text),
    };
    if last.is_empty() { failure } else { failure.with_hint(last) }
}

/// Asks a daemon to drain and waits for it; kills it when it takes too long.
pub async fn drain(daemon: Daemon, child: &mut Child) -> Result<ExitStatus, Failure> {
    let fail = |error| Failure::new(format!("cannot end {}: {error}", daemon.name()));
    signal(child, Signal::TERM);
    match tokio::time::timeout(DRAIN_WITHIN, child.wait()).await {
        Ok(status) => status.map_err(fail),
        Err(_) => {
            child.start_kill().map_err(fail)?;
            child.wait().await.map_err(fail)
        }
    }
}

/// Sends a signal to a child that was not waited for yet.
pub fn signal(child: &Child, signal: Signal) {
    // A child without a number has been waited for: there is nobody to tell.
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}
