//! Starts sandboxd in a temporary directory, beside a stand-in for proxyd's lease socket.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ipc::daemon::{Inherited, Kind};
use ipc::fault::{Code, Fault};
use ipc::fd::{Channel, ChannelListener};
use ipc::http::Client;
use ipc::id::{CallId, LeaseId, SessionId};
use ipc::layout::Layout;
use ipc::lease::{LeaseReply, LeaseRequest, Opened};
use ipc::peer::Principal;
use ipc::sandbox::{CallReport, Content, Execute, Receipt, SandboxInfo};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

/// Nothing here takes this long unless it hangs.
const DEADLINE: Duration = Duration::from_secs(30);

/// What the stand-in gives out as the CA.
pub const CA: &str = "-----BEGIN CERTIFICATE-----\nRkFLRQ==\n-----END CERTIFICATE-----\n";

pub struct Daemon {
    pub layout: Layout,
    pub proxyd: Option<FakeProxyd>,
    child: Child,
    _directory: tempfile::TempDir,
}

impl Daemon {
    pub async fn start() -> Self {
        Self::start_with(spawn).await
    }

    /// As [`Daemon::start`], with this many sandboxes kept ready for each environment in use. The
    /// others keep none, so that what a test counts is what it made.
    pub async fn start_with_ready(count: usize) -> Self {
        Self::start_with_settings(&format!("cells-ready = {count}\n")).await
    }

    /// As [`Daemon::start`], with this `sandboxd.toml`.
    pub async fn start_with_settings(text: &str) -> Self {
        Self::start_with(|layout| {
            settings(layout, text);
            spawn(layout)
        })
        .await
    }

    /// As [`Daemon::start`], with its state on a disk of this many megabytes; one that is killed is
    /// started once more, on the same disk.
    pub async fn start_on_small_disk(megabytes: u32) -> Self {
        Self::start_with(|layout| spawn_on_small_disk(layout, megabytes)).await
    }

    async fn start_with(spawn: impl Fn(&Layout) -> Child) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::below(directory.path());
        std::fs::create_dir(&layout.policies).unwrap();
        write_policy(&layout.policies, "dev", "tool-timeout = \"30s\"");
        write_policy(&layout.policies, "refused", "");
        write_policy(&layout.policies, "small", "processes = 32");
        write_policy(&layout.policies, "brief", "idle-timeout = \"1s\"");
        write_policy(&layout.policies, "lean", "memory = \"96MiB\"");
        write_policy(&layout.policies, "strict", "limits = \"required\"\ndisk = \"1GiB\"");
        write_policy(&layout.policies, "packed", "packages = { pip = [\"requests==2.32.5\"] }");
        write_policy(&layout.policies, "rootless", "root = \"/nonexistent\"");
        settings(&layout, "cells-ready = 0\n");
        let proxyd = Some(FakeProxyd::start(&layout));
        let child = spawn(&layout);
        let mut daemon = Self { layout, proxyd, child, _directory: directory };
        daemon.serving().await;
        daemon
    }

    /// As [`Daemon::start`], after [`Daemon::kill_hard`], on the same state.
    pub async fn restart(&mut self) {
        self.child.wait().unwrap();
        self.child = spawn(&self.layout);
        self.serving().await;
    }

    async fn serving(&mut self) {
        let begun = Instant::now();
        while self.client().get::<Value>("/v1/health").await.is_err() {
            assert!(begun.elapsed() < DEADLINE, "sandboxd does not serve");
            assert_eq!(self.child.try_wait().unwrap(), None, "sandboxd ended");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Replaces an environment's policy.
    pub fn policy(&self, name: &str, sandbox: &str) {
        write_policy(&self.layout.policies, name, sandbox);
    }

    pub fn client(&self) -> Client {
        Client::new(self.layout.sandboxd())
    }

    /// Process id of the daemon itself.
    pub async fn pid(&self) -> u32 {
        self.health().await.pid
    }

    pub async fn health(&self) -> ipc::sandbox::Health {
        self.client().get("/v1/health").await.unwrap()
    }

    /// How the daemon ended by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < DEADLINE, "sandboxd does not end");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn kill_hard(&self) {
        kill(self.child.id());
    }

    pub async fn stop(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.ended().await
    }

    pub fn request(&self, session: &SessionId, tool: &str, input: Value) -> Execute {
        Execute {
            call: CallId::random(),
            session: session.clone(),
            owner: Principal::own().owner(),
            fence: 1,
            journal: None,
            environment: "dev".into(),
            workspace: None,
            tool: tool.into(),
            input,
        }
    }

    pub fn bash_request(&self, session: &SessionId, command: &str) -> Execute {
        self.request(session, "bash", json!({"command": command}))
    }

    pub async fn execute(&self, request: &Execute) -> Result<Receipt, Fault> {
        Self::execute_with(&self.client(), request).await
    }

    pub async fn execute_with(client: &Client, request: &Execute) -> Result<Receipt, Fault> {
        client.post("/v1/execute", request).await
    }

    pub async fn bash(&self, session: &SessionId, command: &str) -> Receipt {
        self.execute(&self.bash_request(session, command)).await.unwrap()
    }

    pub async fn file(&self, session: &SessionId, tool: &str, input: Value) -> Receipt {
        self.execute(&self.request(session, tool, input)).await.unwrap()
    }

    pub async fn report(&self, call: &CallId) -> CallReport {
        self.client().get(&format!("/v1/calls/{call}")).await.unwrap()
    }

    pub async fn cancel(&self, call: &CallId) -> Result<Value, Fault> {
        self.client().post(&format!("/v1/calls/{call}/cancel"), &json!({})).await
    }

    pub async fn delete(&self, path: &str) -> Result<Value, Fault> {
        self.client().delete(path).await
    }

    pub async fn sandboxes(&self) -> Vec<SandboxInfo> {
        let mut answer: Value = self.client().get("/v1/sandboxes").await.unwrap();
        serde_json::from_value(answer["sandboxes"].take()).unwrap()
    }

    /// The only sandbox, once this file is in its workspace.
    pub async fn sandbox_with(&self, file: &str) -> SandboxInfo {
        let begun = Instant::now();
        loop {
            let found = self.sandboxes().await.into_iter().next();
            if let Some(found) = found
                && Path::new(&found.workspace).join(file).exists()
            {
                return found;
            }
            assert!(begun.elapsed() < DEADLINE, "no sandbox with {file}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write_policy(directory: &Path, name: &str, sandbox: &str) {
    let path = directory.join(format!("{name}.toml"));
    std::fs::write(&path, format!("description = \"{name}\"\n[sandbox]\n{sandbox}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn settings(layout: &Layout, text: &str) {
    let path = layout.policies.with_file_name("sandboxd.toml");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn spawn(layout: &Layout) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxd"));
    command.args(arguments(layout)).stdin(Stdio::null()).spawn().unwrap()
}

/// In a user and a mount namespace of the test's own, where it may mount.
fn spawn_on_small_disk(layout: &Layout, megabytes: u32) -> Child {
    std::fs::create_dir_all(&layout.state).unwrap();
    let mut command = Command::new(intruder::program());
    command.args(["small-disk", &megabytes.to_string()]).arg(&layout.state);
    command.arg(env!("CARGO_BIN_EXE_sandboxd")).args(arguments(layout));
    command.stdin(Stdio::null()).spawn().unwrap()
}

fn arguments(layout: &Layout) -> Vec<std::ffi::OsString> {
    let log = std::env::var("TEST_LOG").unwrap_or_else(|_| "error".into());
    let mut arguments = vec!["--log".into(), log.into()];
    let settings = layout.policies.with_file_name("sandboxd.toml");
    for (flag, directory) in [
        ("--config", &settings),
        ("--runtime-dir", &layout.runtime),
        ("--state-dir", &layout.state),
        ("--policies-dir", &layout.policies),
    ] {
        arguments.extend([flag.into(), directory.into()]);
    }
    arguments
}

pub fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// The one text of a receipt.
pub fn text(receipt: &Receipt) -> &str {
    let [Content::Text { text }] = &receipt.content[..] else { panic!("{receipt:?}") };
    text
}

/// Asks again and again, up to a deadline.
pub async fn wait_until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < DEADLINE, "{what}: never");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Answers on proxyd's lease socket: opens every lease but those of the environment `refused`.
pub struct FakeProxyd {
    seen: Arc<Mutex<Seen>>,
    task: tokio::task::JoinHandle<()>,
    socket: PathBuf,
    revoke: Arc<tokio::sync::Notify>,
    answers: Arc<Semaphore>,
}

#[derive(Default)]
struct Seen {
    /// How often a lease was asked for.
    asked: usize,
    leases: BTreeSet<LeaseId>,
    /// Those of them that have not ended.
    open: BTreeSet<LeaseId>,
    assigned: Vec<(SessionId, LeaseId)>,
    running: BTreeSet<CallId>,
    closed: usize,
    connections: Vec<tokio::task::JoinHandle<()>>,
}

impl FakeProxyd {
    pub fn start(layout: &Layout) -> Self {
        let socket = layout.proxyd_lease();
        let mut nothing = Inherited::from_environment().unwrap();
        let listener = ipc::daemon::listen(&mut nothing, &socket, Kind::SeqPacket).unwrap();
        let listener = ChannelListener::new(listener).unwrap();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let shared = Arc::clone(&seen);
        let revoke = Arc::new(tokio::sync::Notify::new());
        let revoked = Arc::clone(&revoke);
        let answers = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        let answering = Arc::clone(&answers);
        let task = tokio::spawn(async move {
            loop {
                let channel = listener.accept().await.unwrap();
                let (seen, revoked) = (Arc::clone(&shared), Arc::clone(&revoked));
                let connection = tokio::spawn(hold(channel, seen, revoked, Arc::clone(&answering)));
                shared.lock().unwrap().connections.push(connection);
            }
        });
        Self { seen, task, socket, revoke, answers }
    }

    pub fn leases(&self) -> BTreeSet<LeaseId> {
        self.seen.lock().unwrap().leases.clone()
    }

    pub fn running(&self) -> BTreeSet<CallId> {
        self.seen.lock().unwrap().running.clone()
    }

    /// The leases that have not ended.
    pub fn open_leases(&self) -> BTreeSet<LeaseId> {
        self.seen.lock().unwrap().open.clone()
    }

    /// Whose the leases are, in the order in which that was said.
    pub fn assigned(&self) -> Vec<(SessionId, LeaseId)> {
        self.seen.lock().unwrap().assigned.clone()
    }

    /// How often a lease was asked for.
    pub fn asked(&self) -> usize {
        self.seen.lock().unwrap().asked
    }

    /// From now on opens so many leases, and lets whoever asks for more wait.
    pub fn answer_only(&self, count: usize) {
        self.answers.forget_permits(Semaphore::MAX_PERMITS);
        self.answers.add_permits(count);
    }

    /// Opens every lease again, beginning with those that wait.
    pub fn answer_all(&self) {
        self.answers.add_permits(Semaphore::MAX_PERMITS / 2);
    }

    /// How many leases were given back.
    pub fn closed(&self) -> usize {
        self.seen.lock().unwrap().closed
    }

    /// Ends every lease that is open now.
    pub fn revoke_all(&self) {
        self.revoke.notify_waiters();
    }

    /// Goes away as a killed daemon does: listener and connections end.
    pub async fn stop(self) {
        self.task.abort();
        let connections = std::mem::take(&mut self.seen.lock().unwrap().connections);
        for connection in &connections {
            connection.abort();
        }
        let _ = self.task.await;
        for connection in connections {
            let _ = connection.await;
        }
        std::fs::remove_file(self.socket).unwrap();
    }
}

async fn hold(
    channel: Channel,
    seen: Arc<Mutex<Seen>>,
    revoke: Arc<tokio::sync::Notify>,
    answers: Arc<Semaphore>,
) {
    let Ok((LeaseRequest::Open(open), sockets)) = channel.receive().await else { return };
    assert_eq!(open.descriptors.len(), sockets.len());
    seen.lock().unwrap().asked += 1;
    answers.acquire().await.unwrap().forget();
    if open.environment == "refused" {
        let fault = Fault::new(Code::Denied, "proxyd says no");
        let _ = channel.send(&LeaseReply::Refused { fault }, &[]).await;
        return;
    }
    let opened = Opened {
        lease: open.lease.clone(),
        token: None,
        ca_pem: CA.into(),
        env: vec![("BILLING_TOKEN".into(), "placeholder-billing".into())],
        generation: 1,
    };
    {
        let mut seen = seen.lock().unwrap();
        seen.leases.insert(open.lease.clone());
        seen.open.insert(open.lease.clone());
    }
    // Whoever asked may have been let go of meanwhile.
    if channel.send(&LeaseReply::Opened(opened), &[]).await.is_ok() {
        serve_lease(&channel, &open.lease, &seen, &revoke).await;
    }
    seen.lock().unwrap().open.remove(&open.lease);
}

/// One lease until its connection ends.
async fn serve_lease(
    channel: &Channel,
    lease: &LeaseId,
    seen: &Mutex<Seen>,
    revoke: &tokio::sync::Notify,
) {
    loop {
        let received = tokio::select! {
            received = channel.receive() => received,
            () = revoke.notified() => {
                let reply = LeaseReply::Revoked { reason: "a test".into() };
                channel.send(&reply, &[]).await.unwrap();
                continue;
            }
        };
        let Ok((request, _)) = received else { return };
        if let LeaseRequest::Refusals { call } = request {
            let reply = LeaseReply::Refusals { call, lines: Vec::new() };
            channel.send(&reply, &[]).await.unwrap();
            continue;
        }
        let mut seen = seen.lock().unwrap();
        match request {
            LeaseRequest::CallStarted { call } => drop(seen.running.insert(call)),
            LeaseRequest::CallFinished { call } => drop(seen.running.remove(&call)),
            LeaseRequest::Close => seen.closed += 1,
            LeaseRequest::Assign { session } => {
                seen.assigned.push((session, lease.clone()));
            }
            // A lease is opened once a connection, and the rest is not for sandboxd.
            other => panic!("sandboxd says {other:?}"),
        }
    }
}
