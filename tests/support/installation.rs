//! One installation: three daemons as processes of their own, below one temporary directory.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use ipc::layout::Layout;

use crate::origin::{Origin, ok};
use crate::wait;

/// The daemons, in the order in which they start.
pub const DAEMONS: [&str; 3] = ["proxyd", "sandboxd", "harnessd"];

/// The `cleanhands` program under test, never stale.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| intruder::built("cli", "cleanhands"))
}

/// What an installation starts with.
#[derive(Default)]
pub struct Setup {
    /// Environment names and the texts of their policy files.
    pub policies: BTreeMap<String, String>,
    /// Host names and the loopback ports that proxyd's upstream table sends them to.
    pub upstreams: BTreeMap<String, u16>,
    /// The CA of those upstreams, PEM.
    pub upstream_ca: String,
    /// The turns of the scripted model, which answers to every model name.
    pub script: serde_json::Value,
}

impl Setup {
    #[must_use]
    pub fn policy(mut self, name: &str, text: &str) -> Self {
        self.policies.insert(name.to_owned(), text.to_owned());
        self
    }

    #[must_use]
    pub fn upstream(mut self, host: &str, upstream: &crate::upstream::Upstream) -> Self {
        self.upstreams.insert(host.to_owned(), upstream.port);
        self.upstream_ca.clone_from(&upstream.ca_pem);
        self
    }

    #[must_use]
    pub fn script(mut self, turns: serde_json::Value) -> Self {
        self.script = serde_json::json!({ "turns": turns });
        self
    }
}

/// A running installation; dropping it ends its daemons and removes its directory.
pub struct Installation {
    root: tempfile::TempDir,
    pub layout: Layout,
    running: BTreeMap<&'static str, Child>,
}

impl Installation {
    /// Writes the files and starts all three daemons; returns when all of them answer.
    pub fn start(setup: &Setup) -> Self {
        let mut installation = Self::prepare(setup);
        for daemon in DAEMONS {
            installation.start_daemon(daemon);
        }
        installation
    }

    /// The same under the policy `dev`, before an origin that answers `ok` for all of `hosts`.
    pub async fn before(hosts: &[&str], policy: &str) -> (Self, Origin) {
        let origin = Origin::start(hosts, |_| ok("", b"ok")).await;
        let setup = Setup::default().policy("dev", policy);
        let setup = hosts.iter().fold(setup, |setup, host| origin.behind(host, setup));
        (tokio::task::block_in_place(|| Self::start(&setup)), origin)
    }

    /// Writes the files, starts nothing.
    pub fn prepare(setup: &Setup) -> Self {
        let root = tempfile::Builder::new().prefix("cleanhands-test.").tempdir().unwrap();
        let layout = Layout::below(root.path());
        for dir in [&layout.runtime, &layout.state, &layout.policies, &layout.config] {
            std::fs::create_dir(dir).unwrap();
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).unwrap();
        }
        for (name, text) in &setup.policies {
            write_private(&layout.policies.join(format!("{name}.toml")), text);
        }
        let ca = layout.config.join("upstream-ca.pem");
        write_private(&ca, &setup.upstream_ca);
        let mut proxyd = String::new();
        for (host, port) in &setup.upstreams {
            proxyd += &format!(
                "[upstreams.\"{host}\"]\ndial = \"127.0.0.1:{port}\"\nca = \"{}\"\n",
                ca.display()
            );
        }
        write_private(&layout.config.join("proxyd.toml"), &proxyd);
        write_private(&layout.config.join("sandboxd.toml"), "");
        let script = layout.config.join("script.json");
        let turns = if setup.script.is_null() {
            r#"{ "turns": [] }"#.to_owned()
        } else {
            setup.script.to_string()
        };
        write_private(&script, &turns);
        let harnessd = format!(
            "default-environment = \"dev\"\n\
             [models.\"*\"]\nprovider = \"scripted\"\nscript = \"{}\"\n",
            script.display()
        );
        write_private(&layout.config.join("harnessd.toml"), &harnessd);
        Self { root, layout, running: BTreeMap::new() }
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// Starts one daemon and waits until it serves.
    pub fn start_daemon(&mut self, daemon: &'static str) {
        self.spawn_daemon(daemon);
        self.wait_serving(daemon);
    }

    /// Starts one daemon without waiting.
    pub fn spawn_daemon(&mut self, daemon: &'static str) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.root.path().join(format!("{daemon}.log")))
            .unwrap();
        self.spawn(daemon, log.into());
    }

    /// Starts one daemon that speaks to `err` and to nobody else; waits until it serves.
    pub fn start_speaking_to(&mut self, daemon: &'static str, err: Stdio) {
        self.spawn(daemon, err);
        self.wait_serving(daemon);
    }

    fn spawn(&mut self, daemon: &'static str, err: Stdio) {
        let child = Command::new(program())
            .arg(daemon)
            .arg("--config")
            .arg(self.layout.config.join(format!("{daemon}.toml")))
            .arg("--runtime-dir")
            .arg(&self.layout.runtime)
            .arg("--state-dir")
            .arg(&self.layout.state)
            .arg("--policies-dir")
            .arg(&self.layout.policies)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(err)
            .spawn()
            .unwrap();
        self.running.insert(daemon, child);
    }

    fn wait_serving(&mut self, daemon: &'static str) {
        let socket = self.layout.runtime.join(format!("{daemon}.sock"));
        wait::until(&format!("{daemon} to serve"), || {
            if let Some(status) = self.running.get_mut(daemon).unwrap().try_wait().unwrap() {
                panic!("{daemon} ended with {status}:\n{}", self.log(daemon));
            }
            std::os::unix::net::UnixStream::connect(&socket).ok()
        });
    }

    /// What the daemon has logged.
    pub fn log(&self, daemon: &str) -> String {
        std::fs::read_to_string(self.root.path().join(format!("{daemon}.log"))).unwrap_or_default()
    }

    /// The process id of a running daemon.
    pub fn pid(&self, daemon: &str) -> u32 {
        self.running[daemon].id()
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self, daemon: &'static str) {
        let mut child = self.running.remove(daemon).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// SIGTERM; gives the exit status.
    pub fn stop(&mut self, daemon: &'static str) -> std::process::ExitStatus {
        let mut child = self.running.remove(daemon).unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        wait::until(&format!("{daemon} to drain"), || child.try_wait().unwrap())
    }

    /// A `cleanhands` command against this installation; `verbs` as one would type them.
    pub fn command(&self, verbs: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(verbs).arg("--runtime-dir").arg(&self.layout.runtime);
        command
    }

    /// Runs a shell script in a fresh sandbox; gives exit status, stdout, stderr.
    pub fn shell(&self, environment: &str, script: &str) -> (Option<i32>, String, String) {
        let output = self
            .command(&["exec"])
            .args(["--environment", environment, "--", "bash", "-c", script])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    }

    /// Runs a shell script in a fresh sandbox whose workspace holds `./intruder` and these files
    /// (names and texts); gives what it printed. It must end well.
    pub fn intrude(&self, environment: &str, files: &[(&str, &str)], script: &str) -> String {
        let workspace = intruders_workspace();
        for (name, text) in files {
            std::fs::write(workspace.path().join(name), text).unwrap();
        }
        let mut command = self.intruder(environment, workspace.path());
        command.args(["bash", "-c", script]).stdin(Stdio::null());
        let output = tokio::task::block_in_place(|| command.output().unwrap());
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{}: {out}\n{err}", output.status);
        out.into_owned()
    }

    /// The beginning of a command in a sandbox with that workspace.
    pub fn intruder(&self, environment: &str, workspace: &Path) -> Command {
        let mut command = self.command(&["exec"]);
        command.args(["--environment", environment, "--workspace"]).arg(workspace).arg("--");
        command
    }

    /// Seals a secret through proxyd's socket.
    pub async fn store_secret(&self, name: &str, value: &str) {
        let proxyd = ipc::http::Client::new(self.layout.proxyd());
        let body = bytes::Bytes::copy_from_slice(value.as_bytes());
        let path = format!("/v1/secrets/{name}");
        proxyd.call(http::Method::PUT, &path, None, body).await.unwrap();
    }

    /// The whole audit.
    pub async fn audit(&self) -> Vec<ipc::vault::AuditRecord> {
        let proxyd = ipc::http::Client::new(self.layout.proxyd());
        let page: ipc::vault::AuditPage = proxyd.get("/v1/audit?after=0&limit=1000").await.unwrap();
        page.records
    }

    /// Every regular file below the installation, with its content.
    pub fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut found = Vec::new();
        let mut folders = vec![self.root.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                    Ok(kind) if kind.is_file() => {
                        if let Ok(content) = std::fs::read(entry.path()) {
                            found.push((entry.path(), content));
                        }
                    }
                    _ => {}
                }
            }
        }
        found
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        for (_, mut child) in std::mem::take(&mut self.running) {
            // A daemon that is gone already is none the worse for it.
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for daemon in DAEMONS {
                eprintln!("--- {daemon}'s log\n{}", self.log(daemon));
            }
        }
    }
}

/// A directory that holds `./intruder`.
pub fn intruders_workspace() -> tempfile::TempDir {
    let workspace = tempfile::tempdir().unwrap();
    intruder::put_into(workspace.path());
    workspace
}

fn write_private(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}
