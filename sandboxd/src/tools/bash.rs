//! `bash`: a command in the session's persistent shell.
//!
//! After a timeout, a cancellation or an `exit` the shell and all it started are gone, and the
//! model is told to restart it, because it must know that its variables and directory are lost.

use std::time::Duration;

use ipc::sandbox::{Outcome, Usage};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use super::files::{Action, Request, decode_reply};
use super::shell::{Ending, Shell};
use super::{NO_OUTPUT, spill};
use crate::cell::{Cell, ExitOf, Peak};
use crate::output::Capture;
use crate::plan::WORKSPACE;

/// How long one write of a spill file may hold up its command.
const SPILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Said before the first output of a shell that silently took the place of another.
const NEW_SHELL: &str = "(a new shell: the sandbox had ended while idle, \
    and with it the directory, the variables and all processes; files are kept)\n";

/// The input as the model writes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Raw {
    #[serde(default)]
    command: Option<String>,
    #[serde(default)]
    restart: Option<bool>,
    #[serde(default)]
    timeout_ms: Option<i64>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    Run { command: String, timeout: Option<Duration> },
    Restart,
}

impl TryFrom<Raw> for Input {
    type Error = String;

    fn try_from(raw: Raw) -> Result<Self, String> {
        if raw.restart == Some(true) {
            return Ok(Self::Restart);
        }
        let command = raw.command.ok_or("bash: command is missing")?;
        if command.contains('\0') {
            return Err("bash: command holds a zero byte".into());
        }
        let timeout = match raw.timeout_ms {
            None => None,
            Some(ms) => match u64::try_from(ms) {
                Ok(ms @ 1..) => Some(Duration::from_millis(ms)),
                _ => return Err(format!("bash: timeout_ms {ms} is not a time to wait")),
            },
        };
        Ok(Self::Run { command, timeout })
    }
}

/// The shell of one sandbox, as the model knows it.
#[derive(Debug)]
pub enum Session {
    /// No command came yet. `lost`: the session had a shell, which ended with an earlier sandbox
    /// while no command ran, so nobody was told.
    Fresh {
        lost: bool,
    },
    Living(Box<Shell>),
    /// Ended; only a restart makes another.
    Terminated,
}

/// Where and under what a command runs.
#[derive(Debug)]
pub struct Place<'a> {
    pub cell: &'a Cell,
    pub env: &'a [(String, String)],
    /// Names the spill file.
    pub call: &'a str,
    /// The environment's limit for one call.
    pub timeout_max: Duration,
    pub cancel: &'a CancellationToken,
}

/// What came of it.
#[derive(Debug)]
pub struct Ran {
    pub outcome: Outcome,
    pub text: String,
    pub is_error: bool,
    pub exit: Option<ExitOf>,
    pub output_bytes: u64,
    pub spill: Option<String>,
    pub usage: Option<Usage>,
    /// The most that was seen in use while it ran.
    pub peak: Peak,
}

/// Runs one input in the session's shell.
pub async fn run(session: &mut Session, place: &Place<'_>, input: Input) -> Ran {
    let (command, asked) = match input {
        Input::Restart => {
            // Dropping a living shell ends it and all that it started.
            *session = Session::Fresh { lost: false };
            return Ran::plain(Outcome::Finished, "bash session restarted", false);
        }
        Input::Run { command, timeout } => (command, timeout),
    };
    let mut told = "";
    let mut shell = match std::mem::replace(session, Session::Terminated) {
        Session::Living(shell) => shell,
        Session::Fresh { lost } => match Shell::start(place.cell, place.env).await {
            Ok(shell) => {
                told = if lost { NEW_SHELL } else { "" };
                Box::new(shell)
            }
            Err(error) => {
                *session = Session::Fresh { lost };
                return Ran::plain(Outcome::Refused, format!("bash: {error}"), true);
            }
        },
        Session::Terminated => {
            let text = "bash: bash session terminated; restart required";
            return Ran::plain(Outcome::Finished, text, true);
        }
    };
    let timeout = asked.unwrap_or(place.timeout_max).min(place.timeout_max);
    let spill = Spill { cell: place.cell, name: format!("{}.txt", place.call) };
    let mut capture = Capture::default();
    let ending = shell.run(&command, timeout, place.cancel, &mut capture, &spill).await;
    let path = spill::path_in(WORKSPACE, &spill.name);
    let shown = capture.finish(&path);
    let (usage, peak) = shell.usage().await;
    let mut ran = Ran {
        outcome: Outcome::Finished,
        text: format!("{told}{}", shown.text),
        is_error: false,
        exit: None,
        output_bytes: shown.total,
        spill: shown.spilled.then_some(path),
        usage,
        peak,
    };
    match ending {
        Ending::Status(code) => {
            *session = Session::Living(shell);
            ran.exited(ExitOf { code: Some(code), signal: None, maxrss_bytes: 0, cpu_us: 0 });
        }
        Ending::Exited(exit) => ran.exited(exit),
        Ending::TimedOut => {
            let mut notice = format!("bash: bash command timed out after {}", seconds(timeout));
            if asked.is_some_and(|asked| asked > place.timeout_max) {
                notice.push_str(" (the most that this environment allows)");
            }
            ran.stopped(Outcome::TimedOut, notice);
        }
        Ending::Cancelled => ran.stopped(Outcome::Cancelled, "bash: cancelled".into()),
        Ending::Lost => ran.stopped(Outcome::OutcomeUnknown, crate::receipt::LOST.into()),
    }
    if ran.text.is_empty() {
        ran.text = NO_OUTPUT.into();
    }
    ran
}

impl Ran {
    fn plain(outcome: Outcome, text: impl Into<String>, is_error: bool) -> Self {
        Self {
            outcome,
            text: text.into(),
            is_error,
            exit: None,
            output_bytes: 0,
            spill: None,
            usage: None,
            peak: Peak::default(),
        }
    }

    fn exited(&mut self, exit: ExitOf) {
        self.is_error = exit.code != Some(0);
        self.exit = Some(exit);
    }

    /// The notice first, then what the command had written.
    fn stopped(&mut self, outcome: Outcome, notice: String) {
        self.outcome = outcome;
        self.is_error = true;
        self.text = if self.text.is_empty() { notice } else { format!("{notice}\n{}", self.text) };
    }
}

/// The file in the workspace that a long output goes to.
#[derive(Debug)]
pub struct Spill<'a> {
    cell: &'a Cell,
    name: String,
}

impl Spill<'_> {
    /// Writes what is due of `capture`. When it cannot be written (a full disk, links planted in
    /// the way) the output is still counted and its end shown; the result names no file then.
    pub async fn write_due(&self, capture: &mut Capture, last: bool) {
        let continues = capture.spill_begun();
        let Some(bytes) = capture.due(last) else { return };
        let piece = spill::Piece { name: self.name.clone(), continues };
        let request = Request {
            roots: vec![WORKSPACE.into()],
            search_ms_max: 0,
            action: Action::Spill(piece),
        };
        let payload = request.encode(&bytes);
        let call = tokio::time::timeout(SPILL_TIMEOUT, self.cell.file_call(&payload));
        let kept = match call.await {
            Ok(Ok(reply)) => decode_reply(&reply).is_ok_and(|reply| !reply.is_error),
            _ => false,
        };
        if !kept {
            tracing::debug!(name = self.name, "cannot spill an output");
            capture.spill_failed();
        }
    }
}

/// `120s`, `0.5s`.
fn seconds(time: Duration) -> String {
    format!("{}s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::{Tool, parse};
    use serde_json::json;

    #[test]
    fn inputs_are_as_documented_or_an_error_for_the_model() {
        let run = |command: &str, timeout| Input::Run { command: command.into(), timeout };
        let good = [
            (json!({"command": "ls"}), run("ls", None)),
            (json!({"command": ""}), run("", None)),
            (json!({"restart": true, "command": "ls"}), Input::Restart),
            (
                json!({"command": "ls", "restart": false, "timeout_ms": 500}),
                run("ls", Some(Duration::from_millis(500))),
            ),
        ];
        for (input, expected) in good {
            let Ok(Tool::Bash(parsed)) = parse("bash", &input) else { panic!("{input}") };
            assert_eq!(parsed, expected);
        }
        let bad = [
            json!({}),
            json!({"command": 1}),
            json!({"command": "a\0b"}),
            json!({"command": "ls", "timeout_ms": 0}),
            json!({"command": "ls", "timeout_ms": -1}),
            json!({"cmd": "ls"}),
            json!("ls"),
        ];
        for input in bad {
            let text = parse("bash", &input).unwrap_err();
            assert!(text.starts_with("bash: "), "{text}");
        }
    }

    #[test]
    fn times_are_written_short() {
        assert_eq!(seconds(Duration::from_millis(500)), "0.5s");
        assert_eq!(seconds(Duration::from_secs(120)), "120s");
    }
}
