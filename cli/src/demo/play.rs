//! What happens while the session runs: its events are shown, and twice something is killed.
//!
//! Nothing here depends on timing: the slow operations of the billing API hold a tool call open
//! for as long as the kill and the searches take.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::http::Client;
use ipc::sandbox::SandboxInfo;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::api::{EventStream, Harness, NewSession};
use crate::daemons::Daemon;
use crate::demo::fingerprint::Fingerprints;
use crate::demo::search::{Ground, Searched};
use crate::demo::stage::Stage;
use crate::demo::story::{self, Turn};
use crate::demo::voice::Voice;
use crate::failure::Failure;
use crate::run::reconnect;
use crate::show::Show;
use crate::wire::{Event, Received, text_at};

/// How long an event may take that must come.
const EVENT_WITHIN: Duration = Duration::from_secs(20);
/// How often the log is read while something is waited for.
const POLL: Duration = Duration::from_millis(20);

/// The session as it is played.
pub struct Play<'a> {
    pub stage: &'a mut Stage,
    pub voice: &'a mut Voice,
    pub harness: Harness,
    pub session: String,
    prints: Arc<Fingerprints>,
    stream: EventStream,
    show: Show,
    turns: Vec<Turn>,
    /// Requests to the model so far.
    pub asked: usize,
    last_command: String,
    began: Instant,
    /// When the first words of the model came, and how many sandboxes there were.
    pub first_token: Option<(Duration, usize)>,
    /// Every sandbox that was seen at work.
    pub sandboxes: Vec<SandboxInfo>,
}

impl<'a> Play<'a> {
    /// Makes agent, environment and session through harnessd's API and gives the task.
    pub async fn begin(
        stage: &'a mut Stage,
        voice: &'a mut Voice,
        prints: Fingerprints,
    ) -> Result<Self, Failure> {
        let harness = Harness::new(Client::new(stage.layout().harnessd()));
        let agent = harness.agent("bookkeeper", story::MODEL).await?;
        let environment = harness.environment("demo", "demo").await?;
        let new = NewSession {
            agent: &agent,
            environment: &environment,
            title: "Invoices",
            workspace: None,
        };
        let session = harness.create_session(&new).await?;
        let stream = harness.stream(&session).await?;
        let began = Instant::now();
        harness.say(&session, story::TASK).await?;
        let show = Show::new(voice.style());
        Ok(Self {
            stage,
            voice,
            harness,
            session,
            prints: Arc::new(prints),
            stream,
            show,
            turns: story::turns(),
            asked: 0,
            last_command: String::new(),
            began,
            first_token: None,
            sandboxes: Vec::new(),
        })
    }

    /// Shows the session until the model ends its turn.
    pub async fn until_the_end(&mut self) -> Result<(), Failure> {
        loop {
            tokio::select! {
                next = self.stream.next() => match next {
                    Some(received) => {
                        if self.event(&received).await?.is_some() {
                            return Ok(());
                        }
                    }
                    None => self.take_up_again().await?,
                },
                arrived = self.stage.billing.arrived() => {
                    let what = arrived?;
                    self.until_shown(&what).await?;
                    match what.as_str() {
                        story::CLOSE_MONTH => self.kill_harnessd().await?,
                        _ => self.kill_sandbox().await?,
                    }
                }
            }
        }
    }

    /// Shows one event; gives something when the session is at its end.
    async fn event(&mut self, received: &Received) -> Result<Option<ExitCode>, Failure> {
        if matches!(received.event, Event::Preview { .. }) && self.first_token.is_none() {
            let after = self.began.elapsed();
            self.first_token = Some((after, self.living().await?.len()));
        }
        if self.voice.quiet() {
            let fresh = self.show.quietly(received);
            return self.judge(received, fresh);
        }
        let fresh = self.show.is_fresh(received);
        if fresh && received.event == Event::ModelStart {
            let chapter = self.turns.get(self.asked).and_then(|turn| turn.chapter);
            if let Some(heading) = chapter {
                self.show.settle()?;
                // The first words of all are timed: nothing may come before them.
                if self.asked > 0 {
                    self.voice.breath().await;
                }
                self.voice.heading(heading)?;
            }
        }
        self.show.event(received)?;
        self.judge(received, fresh)
    }

    fn judge(&mut self, received: &Received, fresh: bool) -> Result<Option<ExitCode>, Failure> {
        match &received.event {
            _ if !fresh => {}
            Event::ModelStart => self.asked += 1,
            Event::ToolUse { input, .. } => self.last_command = text_at(input, &["command"]),
            Event::Idle { reason } if reason == "end_turn" => return Ok(Some(ExitCode::SUCCESS)),
            Event::Idle { reason } => {
                return Err(Failure::new(format!("the session stopped: {reason}")));
            }
            Event::Terminated | Event::Deleted => {
                return Err(Failure::new("the session ended"));
            }
            _ => {}
        }
        Ok(None)
    }

    /// The request may overtake the event on its way here: shows what is due first.
    async fn until_shown(&mut self, command: &str) -> Result<(), Failure> {
        let deadline = tokio::time::Instant::now() + EVENT_WITHIN;
        while !self.last_command.contains(command) {
            let next = tokio::time::timeout_at(deadline, self.stream.next()).await;
            let Ok(Some(received)) = next else {
                return Err(Failure::new(format!("the stream did not show the call {command}")));
            };
            self.event(&received).await?;
        }
        Ok(())
    }

    /// The stream broke: opens it again and shows what was missed.
    async fn take_up_again(&mut self) -> Result<(), Failure> {
        let (stream, history) = reconnect(&self.harness, &self.session, 1).await?;
        self.stream = stream;
        for received in &history {
            self.event(received).await?;
        }
        Ok(())
    }

    /// While the request waits at the API: a first search, then SIGKILL for harnessd.
    async fn kill_harnessd(&mut self) -> Result<(), Failure> {
        self.voice.remark(
            "The request waits at the billing API, so at this moment the token is under way.\n    \
             A first search, in mid-flow:",
        )?;
        let (searched, allowed) = self.search().await?;
        self.voice.claim(searched.found.is_empty(), &nowhere(&searched))?;
        self.voice.line(&format!("    {}", where_it_may_be(&allowed)))?;
        self.voice.breath().await;
        let before = self.stage.pid(Daemon::Harnessd);
        let (call, _) = self.started_calls().await?.pop().unwrap_or_default();
        self.stage.kill(Daemon::Harnessd).await?;
        let old = before.map(|pid| pid.to_string()).unwrap_or_default();
        self.voice
            .remark(&format!("SIGKILL for harnessd, process {old}. A new one is started."))?;
        self.stage.start_again(Daemon::Harnessd).await?;
        self.take_up_again().await?;
        let joined = self.joined(&call).await?;
        let new = self.stage.pid(Daemon::Harnessd);
        let number = new.map(|pid| pid.to_string()).unwrap_or_default();
        self.voice.claim(
            joined && new != before,
            &format!("process {number} woke the session and joined the running call {call}"),
        )?;
        self.voice.breath().await;
        self.stage.billing.order(&format!("release {}", story::CLOSE_MONTH)).await
    }

    /// While the request waits at the API: SIGKILL for the sandbox's first process.
    async fn kill_sandbox(&mut self) -> Result<(), Failure> {
        let living = self.living().await?;
        let sandbox = living
            .iter()
            .find(|sandbox| !sandbox.running.is_empty())
            .ok_or_else(|| Failure::new("no sandbox runs a call"))?;
        self.voice.remark(&format!(
            "SIGKILL for the sandbox, process {}: everything in it ends at once.",
            sandbox.pid
        ))?;
        let gone = end_at_once(sandbox.pid).await;
        self.voice.claim(gone, "it is gone, in the middle of the call")?;
        self.voice.breath().await;
        Ok(())
    }

    /// The sandboxes that live now; remembers them.
    pub async fn living(&mut self) -> Result<Vec<SandboxInfo>, Failure> {
        #[derive(serde::Deserialize)]
        struct List {
            sandboxes: Vec<SandboxInfo>,
        }
        let list: List = Client::new(self.stage.layout().sandboxd()).get("/v1/sandboxes").await?;
        for sandbox in &list.sandboxes {
            if !self.sandboxes.iter().any(|known| known.sandbox == sandbox.sandbox) {
                self.sandboxes.push(sandbox.clone());
            }
        }
        Ok(list.sandboxes)
    }

    /// Calls that were started, in order, each with the fencing number of its start.
    pub async fn started_calls(&self) -> Result<Vec<(String, u64)>, Failure> {
        let log = self.harness.log(&self.session).await?;
        let started = log.iter().filter(|event| event.kind == "tool_started");
        let fence = |body: &serde_json::Value| body.get("fence").and_then(|f| f.as_u64());
        Ok(started.map(|e| (text_at(&e.body, &["call"]), fence(&e.body).unwrap_or(0))).collect())
    }

    /// Waits until the log says that a new owner took the session up, and asks sandboxd whether
    /// the call still runs: then its only way on is to join it.
    async fn joined(&self, call: &str) -> Result<bool, Failure> {
        let deadline = Instant::now() + EVENT_WITHIN;
        loop {
            let log = self.harness.log(&self.session).await?;
            if log.iter().any(|event| event.kind == "note" || event.kind == "recovered") {
                break;
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
            tokio::time::sleep(POLL).await;
        }
        let path = format!("/v1/calls/{}", crate::api::segment(call));
        let sandboxd = Client::new(self.stage.layout().sandboxd());
        let report: ipc::sandbox::CallReport = sandboxd.get(&path).await?;
        Ok(matches!(report, ipc::sandbox::CallReport::Running { .. }))
    }

    /// Looks for the token everywhere; see [`Ground::search`].
    pub async fn search(&mut self) -> Result<(Searched, Searched), Failure> {
        let proxyd = Client::new(self.stage.layout().proxyd());
        let health: ipc::vault::Health = proxyd.get("/v1/health").await?;
        let mut without = vec![(std::process::id(), "this demo")];
        without.extend(self.stage.pid(Daemon::Harnessd).map(|pid| (pid, "harnessd")));
        without.extend(self.stage.pid(Daemon::Sandboxd).map(|pid| (pid, "sandboxd")));
        let ground = Ground {
            dir: self.stage.dir().to_owned(),
            sandboxes: self.living().await?.iter().map(|sandbox| sandbox.pid).collect(),
            without,
            with: vec![
                (health.pid, "proxyd's traffic process"),
                (health.vault_pid, "the vault's process"),
            ],
            except: self.stage.billing.pid(),
        };
        let prints = Arc::clone(&self.prints);
        tokio::task::spawn_blocking(move || ground.search(&prints))
            .await
            .map_err(|error| Failure::new(format!("the search broke off: {error}")))
    }
}

/// Kills a process by a handle that cannot mean another one, and waits until it is gone.
async fn end_at_once(pid: u32) -> bool {
    let end = move || {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
        let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        rustix::process::pidfd_send_signal(&handle, Signal::KILL)?;
        let mut gone = [PollFd::new(&handle, PollFlags::IN)];
        let limit = Timespec::try_from(EVENT_WITHIN).map_err(|_| Errno::INVAL)?;
        Ok::<_, Errno>(rustix::event::poll(&mut gone, Some(&limit))? == 1)
    };
    matches!(tokio::task::spawn_blocking(end).await, Ok(Ok(true)))
}

/// What was searched, in words.
pub fn nowhere(searched: &Searched) -> String {
    let what = format!(
        "searched {} files ({} of logs, {} of databases), {} environments and {:.1} MB of the \
         sandbox's memory",
        searched.files,
        searched.logs,
        searched.databases,
        searched.environments,
        searched.memory_bytes as f64 / 1e6,
    );
    if searched.found.is_empty() {
        return format!("{what}: not there");
    }
    format!("{what}: FOUND in {}", searched.found.join(", "))
}

/// The one place where the token may be while a request is under way.
fn where_it_may_be(allowed: &Searched) -> String {
    let place = "the one place where it may be now is the memory of proxyd's processes";
    if !allowed.found.is_empty() {
        return format!("{place}; root can look: it is in {}", allowed.found.join(" and "));
    }
    if allowed.memories == 0 {
        return format!("{place}, which the kernel keeps from this user");
    }
    format!("{place}; root can look: not in plain form there either, at this moment")
}
