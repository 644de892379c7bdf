//! One harnessd process in a directory of its own, and a client that sees status and headers.
//!
//! No other daemon runs: the scripted model needs none, and these tests call no sandbox.

use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use serde_json::{Value, json};

/// Nothing here takes longer unless it is broken.
pub const DEADLINE: Duration = Duration::from_secs(20);

pub struct Daemon {
    pub dir: tempfile::TempDir,
    child: Child,
    client: ipc::http::Client,
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Value,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    pub fn message(&self) -> &str {
        self.body["error"]["message"].as_str().unwrap_or_default()
    }

    /// The body of a success; anything else ends the test.
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    /// An error of the wire API with everything an error must have.
    pub fn refused(self, status: u16, kind: &str, words: &str) {
        assert_eq!(self.status, status, "{}", self.body);
        assert_eq!(self.body["type"], "error", "{}", self.body);
        assert_eq!(self.body["error"]["type"], kind, "{}", self.body);
        assert!(self.message().contains(words), "{words:?} is not in {:?}", self.message());
        assert_eq!(self.header("request-id"), self.body["request_id"].as_str());
    }
}

impl Daemon {
    /// Starts a daemon whose one model plays `turns`.
    pub async fn start(turns: Value) -> Self {
        Self::start_with(turns, None).await
    }

    pub async fn start_with(turns: Value, loopback: Option<&TcpListener>) -> Self {
        Self::start_of(turns, loopback, "").await
    }

    /// With a model of this price in dollars for a million tokens, in and out alike.
    pub async fn start_priced(turns: Value, dollars: u32) -> Self {
        let price = format!("price-usd-per-million = {{ input = {dollars}, output = {dollars} }}");
        Self::start_of(turns, None, &price).await
    }

    async fn start_of(turns: Value, loopback: Option<&TcpListener>, model: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["run", "state", "policies"] {
            ipc::daemon::private_directory(&at(name)).unwrap();
        }
        let policy = "[[egress.allow]]\nhosts = [\"api.corp.example\", \"db.corp.example\"]\n";
        std::fs::write(at("policies/dev.toml"), policy).unwrap();
        std::fs::write(at("policies/locked.toml"), "description = \"nothing\"\n").unwrap();
        std::fs::write(at("script.json"), json!({ "turns": turns }).to_string()).unwrap();
        let config = format!(
            "default-environment = \"dev\"\n\
             [models.\"*\"]\nprovider = \"scripted\"\nscript = {script:?}\n{model}\n",
            script = at("script.json"),
        );
        std::fs::write(at("harnessd.toml"), config).unwrap();
        for name in ["policies/dev.toml", "policies/locked.toml", "harnessd.toml"] {
            private(&at(name));
        }
        let child = spawn(dir.path(), loopback);
        let client = ipc::http::Client::new(at("run/harnessd.sock"));
        let mut daemon = Self { dir, child, client };
        daemon.until_served().await;
        daemon
    }

    /// Kills it and starts it again, with another configuration.
    pub async fn restart(&mut self, change: impl Fn(String) -> String) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let path = self.path("harnessd.toml");
        std::fs::write(&path, change(std::fs::read_to_string(&path).unwrap())).unwrap();
        self.child = spawn(self.dir.path(), None);
        self.until_served().await;
    }

    async fn until_served(&mut self) {
        let end = Instant::now() + DEADLINE;
        loop {
            if self.client.get::<Value>("/cleanhands/v1/health").await.is_ok() {
                return;
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("harnessd ended with {status}:\n{}", self.stderr());
            }
            assert!(Instant::now() < end, "harnessd does not serve:\n{}", self.stderr());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn private(&self, name: &str) {
        private(&self.path(name));
    }

    /// Makes a key of the loopback port for this user.
    pub async fn key(&self, name: &str) -> String {
        let made = self.post("/cleanhands/v1/keys", json!({ "name": name })).await.ok();
        made["key"].as_str().unwrap().to_owned()
    }

    /// The most memory that it ever had, in bytes.
    pub fn memory_peak(&self) -> usize {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        1024 * line.trim_end_matches("kB").trim().parse::<usize>().unwrap()
    }

    fn stderr(&self) -> String {
        std::fs::read_to_string(self.path("stderr")).unwrap_or_default()
    }

    pub async fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        let bytes = body.map_or_else(Bytes::new, |body| body.to_string().into());
        self.raw(method, path, bytes).await
    }

    pub async fn raw(&self, method: &str, path: &str, body: Bytes) -> Answer {
        let method = method.parse().unwrap();
        let kind = Some("application/json");
        let response = self.client.send(method, path, kind, body).await.unwrap();
        let (head, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Answer { status: head.status.as_u16(), headers: head.headers, body }
    }

    /// Uploads a file as the SDKs do.
    pub async fn upload(&self, filename: &str, bytes: &[u8]) -> Answer {
        self.form(&[("file", Some(filename), bytes)], "--cut--\r\n").await
    }

    /// Sends parts to `/v1/files`, and this behind the last.
    pub async fn form(&self, parts: &[(&str, Option<&str>, &[u8])], end: &str) -> Answer {
        let mut body = Vec::new();
        for (name, filename, bytes) in parts {
            let file =
                filename.map(|name| format!("; filename=\"{name}\"\r\nContent-Type: text/plain"));
            let file = file.unwrap_or_default();
            let head =
                format!("--cut\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n");
            body.extend_from_slice(head.as_bytes());
            body.extend_from_slice(bytes);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(end.as_bytes());
        let kind = Some("multipart/form-data; boundary=cut");
        let sent = self.client.send(http::Method::POST, "/v1/files", kind, body.into());
        let (head, body) = sent.await.unwrap().into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Answer { status: head.status.as_u16(), headers: head.headers, body }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, Some(&body)).await
    }

    /// Makes environment, agent with these tools and session; gives the session's id.
    pub async fn session(&self, tools: Value) -> String {
        let name = format!("e-{}", ipc::id::random_text(8));
        let environment = self.post("/v1/environments", json!({ "name": name })).await.ok();
        let agent = json!({ "name": "tester", "model": "m", "tools": tools });
        let agent = self.post("/v1/agents", agent).await.ok();
        let session = json!({ "agent": agent["id"], "environment_id": environment["id"] });
        let session = self.post("/v1/sessions", session).await.ok();
        session["id"].as_str().unwrap().to_owned()
    }

    pub async fn send(&self, session: &str, events: Value) -> Answer {
        self.post(&format!("/v1/sessions/{session}/events"), json!({ "events": events })).await
    }

    pub async fn say(&self, session: &str, text: &str) {
        self.send(session, json!([message(text)])).await.ok();
    }

    pub async fn events(&self, session: &str) -> Vec<Value> {
        let body = self.get(&format!("/v1/sessions/{session}/events")).await.ok();
        body["data"].as_array().unwrap().clone()
    }

    /// Waits until the history satisfies `done`; gives it.
    pub async fn until(&self, session: &str, done: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let end = Instant::now() + DEADLINE;
        loop {
            let events = self.events(session).await;
            if done(&events) {
                return events;
            }
            let kinds: Vec<&Value> = events.iter().map(|event| &event["type"]).collect();
            assert!(Instant::now() < end, "waited in vain: {kinds:?}\n{}", self.stderr());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until as many turns have ended or wait for the client.
    pub async fn until_idle(&self, session: &str, times: usize) -> Vec<Value> {
        let idle = |events: &[Value]| of(events, "session.status_idle").len() >= times;
        self.until(session, idle).await
    }

    /// Waits until the session itself says that it is idle.
    pub async fn until_settled(&self, session: &str) {
        let end = Instant::now() + DEADLINE;
        while self.get(&format!("/v1/sessions/{session}")).await.ok()["status"] != "idle" {
            assert!(Instant::now() < end, "the session never settles:\n{}", self.stderr());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Opens the stream.
    pub async fn stream(&self, session: &str, query: &str) -> Stream {
        let path = format!("/v1/sessions/{session}/events/stream{query}");
        let sent = self.client.send(http::Method::GET, &path, None, Bytes::new());
        // The head must not wait for the first event.
        let response = tokio::time::timeout(DEADLINE, sent).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Stream { body: response.into_body(), text: String::new() }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn private(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn spawn(dir: &Path, loopback: Option<&TcpListener>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harnessd"));
    command.arg("--config").arg(dir.join("harnessd.toml"));
    for name in ["run", "state", "policies"] {
        let flag = if name == "run" { "runtime" } else { name };
        command.arg(format!("--{flag}-dir")).arg(dir.join(name));
    }
    if let Some(listener) = loopback {
        rustix::io::fcntl_setfd(listener, rustix::io::FdFlags::empty()).unwrap();
        command.arg("--loopback-fd").arg(listener.as_raw_fd().to_string());
    }
    let stderr = std::fs::File::create(dir.join("stderr")).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    command.spawn().unwrap()
}

pub fn message(text: &str) -> Value {
    json!({ "type": "user.message", "content": [{ "type": "text", "text": text }] })
}

/// Events of one type.
pub fn of<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["type"] == kind).collect()
}

/// Frames of server-sent events as they come.
pub struct Stream {
    body: hyper::body::Incoming,
    text: String,
}

impl Stream {
    /// The next named frame as its JSON; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            while let Some((frame, rest)) = self.text.split_once("\n\n") {
                let frame = frame.to_owned();
                self.text = rest.to_owned();
                if frame.starts_with(':') {
                    continue;
                }
                let (name, data) = frame.split_once('\n').unwrap();
                let data: Value = serde_json::from_str(data.strip_prefix("data: ")?).unwrap();
                assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{frame}");
                return Some(data);
            }
            let frame = tokio::time::timeout(DEADLINE, self.body.frame()).await.unwrap()?;
            let bytes = frame.unwrap().into_data().unwrap_or_default();
            self.text.push_str(std::str::from_utf8(&bytes).unwrap());
        }
    }

    /// Waits for this piece of text, whatever it stands in.
    pub async fn until_text(&mut self, wanted: &str) {
        while !self.text.contains(wanted) {
            let frame = tokio::time::timeout(DEADLINE, self.body.frame()).await.unwrap();
            let bytes = frame.unwrap().unwrap().into_data().unwrap_or_default();
            self.text.push_str(std::str::from_utf8(&bytes).unwrap());
        }
    }

    /// Everything up to the first event of that type, with it.
    pub async fn until(&mut self, kind: &str) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            let found = event["type"] == kind;
            events.push(event);
            if found {
                return events;
            }
        }
        panic!("the stream ended before {kind}: {events:?}");
    }
}
