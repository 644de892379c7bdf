//! Starts the real harnessd in a temporary directory, with a sandboxd and a proxyd that only
//! pretend: they count, hold, and answer as the protocol says.

pub mod files;
pub mod peers;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use harnessd::log::{Body, Event, Log};
use ipc::http::Client;
use ipc::id::SessionId;
use ipc::layout::Layout;
use serde_json::{Value, json};

/// Longest wait for anything. Generous: the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

const HARNESSD: &str = env!("CARGO_BIN_EXE_harnessd");

/// Waits until `ready` gives something.
pub async fn until<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut ready: impl FnMut() -> F,
) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = ready().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A running harnessd; killed when dropped.
pub struct Daemon {
    child: Child,
    pub client: Client,
}

impl Daemon {
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM, then the exit status.
    pub async fn stop(&mut self) -> std::process::ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let mut ended = None;
        until("harnessd to end", || {
            ended = self.child.try_wait().unwrap();
            let ended = ended;
            async move { ended }
        })
        .await
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One installation.
pub struct Rig {
    pub dir: tempfile::TempDir,
    pub layout: Layout,
    pub sandboxd: peers::Sandboxd,
    pub proxyd: peers::Proxyd,
    config: PathBuf,
}

impl Rig {
    /// With a model that plays `turns`.
    pub fn new(turns: Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::below(dir.path());
        for path in [&layout.runtime, &layout.state, &layout.policies] {
            std::fs::create_dir(path).unwrap();
            let mode = std::fs::Permissions::from_mode(0o700);
            std::fs::set_permissions(path, mode).unwrap();
        }
        write(&layout.policies.join("dev.toml"), "description = \"A test\"\n");
        let script = dir.path().join("script.json");
        write(&script, &json!({ "turns": turns }).to_string());
        let config = dir.path().join("harnessd.toml");
        let text = format!(
            "default-environment = \"dev\"\n[models.\"*\"]\nprovider = \"scripted\"\n\
             script = {script:?}\n"
        );
        write(&config, &text);
        let sandboxd = peers::Sandboxd::start(&layout.sandboxd());
        let proxyd = peers::Proxyd::start(&layout.proxyd());
        Self { dir, layout, sandboxd, proxyd, config }
    }

    pub async fn daemon(&self) -> Daemon {
        self.start(Command::new(HARNESSD), &self.layout.runtime).await
    }

    /// A daemon whose files cannot grow beyond `blocks` of 512 (or 1024) bytes: to it, the disk
    /// is full. What it inherits as ignored stays so, so the signal becomes an error.
    pub async fn daemon_on_a_full_disk(&self, blocks: u32) -> Daemon {
        let mut command = Command::new("sh");
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
        command.arg("-c").arg(script).arg(HARNESSD);
        self.start(command, &self.layout.runtime).await
    }

    /// A second daemon on the same state; its runtime directory leads to the same peers.
    pub async fn second_daemon(&self) -> Daemon {
        let runtime = self.dir.path().join("run2");
        std::fs::create_dir(&runtime).unwrap();
        std::fs::set_permissions(&runtime, std::fs::Permissions::from_mode(0o700)).unwrap();
        for socket in ["sandboxd.sock", "proxyd.sock"] {
            let target = self.layout.runtime.join(socket);
            std::os::unix::fs::symlink(target, runtime.join(socket)).unwrap();
        }
        self.start(Command::new(HARNESSD), &runtime).await
    }

    async fn start(&self, mut command: Command, runtime: &Path) -> Daemon {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.path().join("harnessd.log"))
            .unwrap();
        let child = command
            .arg("--config")
            .arg(&self.config)
            .arg("--runtime-dir")
            .arg(runtime)
            .arg("--state-dir")
            .arg(&self.layout.state)
            .arg("--policies-dir")
            .arg(&self.layout.policies)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let client = Client::new(runtime.join("harnessd.sock"));
        let daemon = Daemon { child, client };
        until("harnessd to serve", || async {
            daemon.client.get::<Value>("/cleanhands/v1/health").await.ok()
        })
        .await;
        daemon
    }

    /// A view of the log from this process.
    pub fn log(&self) -> Log {
        Log::open(&self.layout.state.join("harnessd")).unwrap()
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("harnessd.log")).unwrap_or_default()
    }
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Creates environment, agent and session through the API.
pub async fn session(client: &Client) -> SessionId {
    session_with(client, json!([{ "type": "agent_toolset_20260401" }])).await
}

pub async fn session_with(client: &Client, tools: Value) -> SessionId {
    let post = async |path: &str, body: Value| -> Value { client.post(path, &body).await.unwrap() };
    let name = ipc::id::random_text(8);
    let environment = post("/v1/environments", json!({ "name": name })).await;
    let agent = json!({ "name": "tester", "model": "any-model", "tools": tools });
    let agent = post("/v1/agents", agent).await;
    let session = json!({ "agent": agent["id"], "environment_id": environment["id"] });
    let session = post("/v1/sessions", session).await;
    SessionId::parse(session["id"].as_str().unwrap()).unwrap()
}

pub async fn send(client: &Client, session: &SessionId, event: Value) {
    let body = json!({ "events": [event] });
    let _: Value = client.post(&format!("/v1/sessions/{session}/events"), &body).await.unwrap();
}

pub async fn say(client: &Client, session: &SessionId, text: &str) {
    let content = json!([{ "type": "text", "text": text }]);
    send(client, session, json!({ "type": "user.message", "content": content })).await;
}

/// Waits for the `count`th idle and returns the whole log.
pub async fn idle(log: &Log, session: &SessionId, count: usize) -> Vec<Event> {
    until("the session to be idle", || async {
        let events = log.all(session).await.unwrap();
        let idle = |e: &&Event| matches!(e.body, Body::StatusIdle { .. });
        (events.iter().filter(idle).count() >= count).then_some(events)
    })
    .await
}

/// The kinds of the events, as the log's column has them.
pub fn kinds(events: &[Event]) -> Vec<String> {
    events.iter().map(|e| e.body.to_columns().unwrap().0).collect()
}

/// A scripted turn without waiting.
pub fn turn(text: &str, commands: &[&str]) -> Value {
    let tools: Vec<Value> = commands
        .iter()
        .map(|command| json!({ "name": "bash", "input": { "command": command } }))
        .collect();
    json!({ "text": text, "tools": tools, "chunk_ms": 0, "first_token_ms": 1 })
}
