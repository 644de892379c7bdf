//! The demo's private directory, its three daemons, and the billing API beside them.
//!
//! Everything lies below one directory that only this user can enter; whatever ends the demo ends
//! the daemons.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use ipc::layout::Layout;
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::daemons::{self, ALL, Daemon, Launch};
use crate::demo::billing::Tally;
use crate::demo::seal::Recognised;
use crate::demo::story;
use crate::failure::Failure;

const DEMO_POLICY: &str = include_str!("../../../policies/demo.toml");
const GROUPS: &str = include_str!("../../../policies/groups.toml");
const HARNESS_POLICY: &str = include_str!("../../../policies/harness.toml");

/// Longest path of a socket: sockaddr_un holds 108 bytes with the final zero.
const SOCKET_PATH_MAX: usize = 107;
/// How long the billing API and the sealing process may take to do their part.
const PART_WITHIN: Duration = Duration::from_secs(20);

/// All that runs.
pub struct Stage {
    dir: TempDir,
    launch: Launch,
    running: Vec<(Daemon, Child)>,
    pub billing: Billing,
}

impl Stage {
    /// Makes the directory, starts the billing API and the daemons, waits until all serve.
    pub async fn set(pace_ms: u64) -> Result<Self, Failure> {
        let fail = |error: std::io::Error| {
            Failure::new(format!("cannot make a private directory: {error}"))
                .with_hint("TMPDIR names where; it must be writable")
        };
        let below = std::path::absolute(std::env::temp_dir()).map_err(fail)?;
        let dir = tempfile::Builder::new().prefix("cleanhands-demo-").tempdir_in(below);
        let dir = dir.map_err(fail)?;
        let layout = Layout::below(dir.path());
        fits(&layout)?;
        for part in [&layout.runtime, &layout.state, &layout.policies, &layout.config] {
            ipc::daemon::private_directory(part).map_err(|e| Failure::new(e.to_string()))?;
        }
        std::fs::create_dir(dir.path().join("logs")).map_err(fail)?;
        let ca = dir.path().join("billing-ca.pem");
        let billing = Billing::start(&ca).await?;
        write_files(&layout, dir.path(), billing.port, &ca, pace_ms).map_err(fail)?;
        let launch = Launch { layout, log: Some("info".into()), loopback: None };
        let mut stage = Self { dir, launch, running: Vec::new(), billing };
        for daemon in ALL {
            stage.start(daemon)?;
        }
        // sandboxd first: it says within the first second whether this host can do it at all.
        for daemon in [Daemon::Sandboxd, Daemon::Proxyd, Daemon::Harnessd] {
            stage.ready(daemon).await?;
        }
        Ok(stage)
    }

    pub fn layout(&self) -> &Layout {
        &self.launch.layout
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn log(&self, daemon: Daemon) -> PathBuf {
        self.dir.path().join("logs").join(format!("{}.log", daemon.name()))
    }

    fn start(&mut self, daemon: Daemon) -> Result<(), Failure> {
        let path = self.log(daemon);
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        let log =
            log.map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
        let child = self.launch.start(daemon, Stdio::from(log))?;
        self.running.retain(|(name, _)| *name != daemon);
        self.running.push((daemon, child));
        Ok(())
    }

    async fn ready(&mut self, daemon: Daemon) -> Result<(), Failure> {
        let log = self.log(daemon);
        let (layout, child) = (&self.launch.layout, child(&mut self.running, daemon)?);
        daemons::ready(daemon, layout, child, Some(&log)).await.map(|_| ())
    }

    /// Process id of a daemon.
    pub fn pid(&self, daemon: Daemon) -> Option<u32> {
        self.running.iter().find(|(name, _)| *name == daemon)?.1.id()
    }

    /// Kills a daemon with SIGKILL and waits until it is gone.
    pub async fn kill(&mut self, daemon: Daemon) -> Result<(), Failure> {
        let child = child(&mut self.running, daemon)?;
        daemons::signal(child, Signal::KILL);
        let gone = child.wait().await;
        gone.map(|_| ()).map_err(|e| Failure::new(format!("cannot kill {}: {e}", daemon.name())))
    }

    /// Starts a daemon again and waits until it serves.
    pub async fn start_again(&mut self, daemon: Daemon) -> Result<(), Failure> {
        self.start(daemon)?;
        self.ready(daemon).await
    }

    /// Lets a process of its own draw the token and seal it; tells the billing API its hash.
    pub async fn seal(&mut self) -> Result<Recognised, Failure> {
        let fail = |what: String| Failure::new(format!("cannot seal a token: {what}"));
        let mut command = myself("demo-seal");
        command.arg("--runtime-dir").arg(&self.layout().runtime);
        command.stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let output = tokio::time::timeout(PART_WITHIN, command.output()).await;
        let output = output.map_err(|_| fail("it takes too long".into()))?;
        let output = output.map_err(|error| fail(error.to_string()))?;
        if !output.status.success() {
            return Err(fail(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        let recognised: Recognised =
            serde_json::from_slice(&output.stdout).map_err(|error| fail(error.to_string()))?;
        self.billing.order(&format!("token {}", recognised.sha256)).await?;
        Ok(recognised)
    }

    /// Drains the daemons in order. Gives the names of those that did not end well.
    pub async fn clear(&mut self) -> Vec<String> {
        let mut bad = Vec::new();
        for daemon in ALL.into_iter().rev() {
            let Ok(child) = child(&mut self.running, daemon) else { continue };
            match daemons::drain(daemon, child).await {
                Ok(status) if status.success() => {}
                Ok(status) => bad.push(format!("{} ended with {status}", daemon.name())),
                Err(failure) => bad.push(failure.text),
            }
        }
        bad
    }

    /// Leaves the directory where it is.
    pub fn keep(self) -> PathBuf {
        self.dir.keep()
    }
}

fn child(running: &mut [(Daemon, Child)], daemon: Daemon) -> Result<&mut Child, Failure> {
    let found = running.iter_mut().find(|(name, _)| *name == daemon);
    found
        .map(|(_, child)| child)
        .ok_or_else(|| Failure::new(format!("{} was not started", daemon.name())))
}

/// This program again, in one of its hidden roles; it ends with this process.
fn myself(role: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg(daemons::ATTACHED).arg(std::process::id().to_string()).arg(role);
    command.process_group(0);
    command
}

fn fits(layout: &Layout) -> Result<(), Failure> {
    let longest = layout.proxyd_egress();
    if longest.as_os_str().len() <= SOCKET_PATH_MAX {
        return Ok(());
    }
    Err(Failure::new(format!("{} is too long for a socket", longest.display()))
        .with_hint("TMPDIR=/tmp cleanhands demo"))
}

fn write_files(
    layout: &Layout,
    dir: &Path,
    port: u16,
    ca: &Path,
    pace_ms: u64,
) -> std::io::Result<()> {
    let quoted = |path: &Path| json!(path.to_string_lossy()).to_string();
    let script = dir.join("script.json");
    std::fs::write(&script, story::script(&story::turns(), pace_ms).to_string())?;
    for (name, text) in [("demo", DEMO_POLICY), ("groups", GROUPS), ("harness", HARNESS_POLICY)] {
        private_file(&layout.policies.join(format!("{name}.toml")), text)?;
    }
    let host = story::BILLING_HOST;
    let proxyd =
        format!("[upstreams.\"{host}\"]\ndial = \"127.0.0.1:{port}\"\nca = {}\n", quoted(ca));
    private_file(&layout.config.join("proxyd.toml"), &proxyd)?;
    let harnessd = format!(
        "default-environment = \"demo\"\n\n[models.\"{}\"]\nprovider = \"scripted\"\nscript = {}\n",
        story::MODEL,
        quoted(&script)
    );
    private_file(&layout.config.join("harnessd.toml"), &harnessd)
}

/// A file that nobody else can write, whatever the umask: the daemons refuse others.
fn private_file(path: &Path, text: &str) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}

/// The billing API's process.
pub struct Billing {
    child: Child,
    orders: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    port: u16,
}

impl Billing {
    async fn start(ca: &Path) -> Result<Self, Failure> {
        let mut command = myself("demo-billing");
        command.arg("--ca").arg(ca);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command
            .spawn()
            .map_err(|e| Failure::new(format!("cannot start the billing API: {e}")))?;
        let (Some(orders), Some(lines)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::new("the billing API has no standard streams"));
        };
        let lines = BufReader::new(lines).lines();
        let mut billing = Self { child, orders, lines, port: 0 };
        let port = billing.expect("ready ").await?;
        billing.port = port.parse().map_err(|_| Failure::new(format!("no port: {port}")))?;
        Ok(billing)
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Says something to the API.
    pub async fn order(&mut self, order: &str) -> Result<(), Failure> {
        let sent = self.orders.write_all(format!("{order}\n").as_bytes()).await;
        sent.map_err(|e| Failure::new(format!("the billing API does not listen: {e}")))
    }

    /// The next slow operation that arrived. Cancel-safe.
    pub async fn arrived(&mut self) -> Result<String, Failure> {
        loop {
            let line = self.line().await?;
            if let Some(what) = line.strip_prefix("arrived ") {
                return Ok(what.to_owned());
            }
        }
    }

    /// What the API counted so far.
    pub async fn tally(&mut self) -> Result<Tally, Failure> {
        self.order("tally").await?;
        let text = self.expect("tally ").await?;
        serde_json::from_str(&text).map_err(|e| Failure::new(format!("the billing API: {e}")))
    }

    async fn expect(&mut self, start: &str) -> Result<String, Failure> {
        let line = async {
            loop {
                let line = self.line().await?;
                if let Some(rest) = line.strip_prefix(start) {
                    return Ok(rest.to_owned());
                }
            }
        };
        tokio::time::timeout(PART_WITHIN, line)
            .await
            .map_err(|_| Failure::new("the billing API does not answer"))?
    }

    async fn line(&mut self) -> Result<String, Failure> {
        match self.lines.next_line().await {
            Ok(Some(line)) => Ok(line),
            Ok(None) => Err(Failure::new("the billing API ended")),
            Err(error) => Err(Failure::new(format!("the billing API: {error}"))),
        }
    }
}
