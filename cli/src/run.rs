//! `cleanhands run`: an agent session for one task, streamed to the terminal.
//!
//! The first Ctrl-C interrupts the agent and waits until it has stopped; the second leaves at once.
//! SIGTERM, SIGHUP and a standard output that nobody reads any more interrupt it too: an agent
//! whose reader has gone does not work on.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ipc::http::Client;
use ipc::layout::Layout;
use ipc::sandbox::{ExecReply, ExecRequest};
use rustix::fs::{Mode, OFlags};
use std::os::fd::{AsFd, OwnedFd};

use crate::api::{EventStream, Harness, NewSession};
use crate::args::{Global, Run};
use crate::failure::{CLOSED, Failure, INTERRUPTED};
use crate::place;
use crate::show::Show;
use crate::stop::Stop;
use crate::term::{self, Style};
use crate::wire::{Event, Received};

/// Longest title made from a task, in characters.
const TITLE_CHARS_MAX: usize = 80;
/// Longest task read from standard input.
const TASK_BYTES_MAX: u64 = 1024 * 1024;
/// How often a broken stream is opened again before the command gives up.
const RECONNECTS_MAX: u32 = 50;

/// Gives an agent a task and shows what it does.
pub async fn run(global: &Global, options: Run) -> Result<ExitCode, Failure> {
    let task = match options.task.as_str() {
        "-" => task_from_input()?.trim_end().to_owned(),
        task => task.to_owned(),
    };
    if task.trim().is_empty() {
        return Err(Failure::new("the task is empty").with_hint("cleanhands run … \"what to do\""));
    }
    let layout = place::layout(global);
    let harness = Harness::new(Client::new(layout.harnessd()));
    let health = harness.health().await?;
    let model = match options.model {
        Some(model) => model,
        None => first_model(&health.models)?,
    };
    let workspace = match &options.workspace {
        Some(dir) => Some(register(&layout, dir).await?),
        None => None,
    };
    let policy = &options.environment;
    let environment = harness.environment(&format!("run-{policy}"), policy).await?;
    let agent = harness.agent(&format!("run-{model}"), &model).await?;
    let session = harness
        .create_session(&NewSession {
            agent: &agent,
            environment: &environment,
            title: &title(&task),
            workspace: workspace.as_deref(),
        })
        .await?;
    if global.json {
        term::json_line(&serde_json::json!({ "type": "session", "id": session }))?;
    } else {
        term::aside(&format!("session {session}"));
    }
    let mut stream = harness.stream(&session).await?;
    let mut watch = Watch::new(global.json)?;
    harness.say(&session, &task).await?;
    let end = watch.until_idle(&harness, &session, &mut stream).await;
    if end.as_ref().is_err_and(|failure| failure.status == CLOSED) {
        harness.interrupt(&session).await?;
    }
    let end = end?;
    watch.show.settle()?;
    Ok(end)
}

fn task_from_input() -> Result<String, Failure> {
    let fail = |why: String| Failure::new(format!("cannot read the task: {why}"));
    let mut bytes = Vec::new();
    let limit = TASK_BYTES_MAX + 1;
    std::io::stdin().take(limit).read_to_end(&mut bytes).map_err(|e| fail(e.to_string()))?;
    if bytes.len() as u64 == limit {
        return Err(fail(format!("it is longer than {TASK_BYTES_MAX} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| fail("it is not UTF-8".to_owned()))
}

fn first_model(models: &[String]) -> Result<String, Failure> {
    models.iter().find(|name| *name != "*").cloned().ok_or_else(|| {
        Failure::new("harnessd's configuration names no model")
            .with_hint("add a [models.\"NAME\"] table to harnessd.toml, or name one with --model")
    })
}

fn title(task: &str) -> String {
    let line = task.lines().next().unwrap_or_default();
    line.chars().take(TITLE_CHARS_MAX).collect()
}

/// Opens a directory of the caller's, which proves that they may use it.
pub fn open_workspace(dir: &Path) -> Result<(OwnedFd, PathBuf), Failure> {
    let fail = |error: std::io::Error| {
        Failure::new(format!("cannot use workspace {}: {error}", dir.display()))
    };
    let path = std::fs::canonicalize(dir).map_err(fail)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
    Ok((fd, path))
}

/// A path as text; the messages are JSON, which has no other strings.
pub fn path_text(path: &Path) -> Result<String, Failure> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::new(format!("workspace {} has a name that is not UTF-8", path.display()))
    })
}

/// Shows a directory to sandboxd and gets the id under which sessions may use it.
async fn register(layout: &Layout, dir: &Path) -> Result<String, Failure> {
    let (fd, path) = open_workspace(dir)?;
    let socket = layout.sandboxd_exec();
    let fail = |what: String| Failure::new(format!("{}: {what}", socket.display()));
    let channel = place::connect(&socket, "sandboxd")?;
    let request = ExecRequest::Workspace { path: path_text(&path)? };
    channel.send(&request, &[fd.as_fd()]).await.map_err(|e| fail(e.to_string()))?;
    match channel.receive().await.map_err(|e| fail(e.to_string()))?.0 {
        ExecReply::Workspace { workspace } => Ok(workspace.to_string()),
        ExecReply::Refused { fault } => Err(fault.into()),
        _ => Err(fail("an answer out of turn".into())),
    }
}

/// Somebody who watches a session.
struct Watch {
    show: Show,
    json: bool,
    interrupted: bool,
    stop: Stop,
}

impl Watch {
    fn new(json: bool) -> Result<Self, Failure> {
        let show = Show::new(Style::of_stdout());
        Ok(Self { show, json, interrupted: false, stop: Stop::watch()? })
    }

    /// Shows events until the session waits or ends; gives the exit status of that.
    async fn until_idle(
        &mut self,
        harness: &Harness,
        session: &str,
        stream: &mut EventStream,
    ) -> Result<ExitCode, Failure> {
        let mut reconnects = 0;
        loop {
            let next = tokio::select! {
                next = stream.next() => next,
                () = self.stop.asked() => {
                    if std::mem::replace(&mut self.interrupted, true) {
                        return Ok(ExitCode::from(INTERRUPTED));
                    }
                    harness.interrupt(session).await?;
                    continue;
                }
            };
            if let Some(received) = next {
                if let Some(end) = self.event(&received)? {
                    return Ok(end);
                }
                continue;
            }
            reconnects += 1;
            let (again, missed) = reconnect(harness, session, reconnects).await?;
            *stream = again;
            for received in &missed {
                if let Some(end) = self.event(received)? {
                    return Ok(end);
                }
            }
        }
    }

    fn event(&mut self, received: &Received) -> Result<Option<ExitCode>, Failure> {
        if self.json {
            if received.id.is_some() {
                term::json_line(&received.json)?;
            }
        } else {
            self.show.event(received)?;
        }
        let status = match &received.event {
            Event::Idle { .. } if self.interrupted => INTERRUPTED,
            Event::Idle { reason } => match reason.as_str() {
                "end_turn" => 0,
                "requires_action" => 3,
                "refusal" => 5,
                _ => 4,
            },
            Event::Terminated | Event::Deleted => 6,
            _ => return Ok(None),
        };
        Ok(Some(ExitCode::from(status)))
    }
}

/// Opens the stream again after it broke, then reads what was missed: first the stream, then the
/// history, so that nothing falls between.
pub async fn reconnect(
    harness: &Harness,
    session: &str,
    attempt: u32,
) -> Result<(EventStream, Vec<Received>), Failure> {
    if attempt > RECONNECTS_MAX {
        return Err(Failure::new(format!("session {session}: the stream broke {attempt} times")));
    }
    let mut wait = std::time::Duration::from_millis(50);
    loop {
        let opened = harness.stream(session).await;
        match opened {
            Ok(stream) => {
                let history = harness.events(session).await?;
                return Ok((stream, history));
            }
            Err(failure) if failure.code != ipc::fault::Code::Unavailable => return Err(failure),
            Err(failure) if wait > std::time::Duration::from_secs(8) => return Err(failure),
            Err(_) => {
                tokio::time::sleep(wait).await;
                wait *= 2;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_named_model_is_taken_and_never_the_wildcard() {
        let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();

        assert_eq!(first_model(&names(&["*", "b", "c"])).unwrap(), "b");
        assert!(first_model(&names(&["*"])).is_err());
    }

    #[test]
    fn a_title_is_the_first_line_of_the_task() {
        assert_eq!(title("fix it\nplease"), "fix it");
        assert_eq!(title(&"é".repeat(200)).chars().count(), TITLE_CHARS_MAX);
    }
}
