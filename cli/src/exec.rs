//! `cleanhands exec`: one command in a sandbox, as if it ran here.
//!
//! The command gets this program's own standard streams, its signals and, with `--workspace`, a
//! directory; its exit status becomes this program's. When this program dies, the command does.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;

use ipc::fd::MessageError;
use ipc::sandbox::{ExecReply, ExecRequest};
use rustix::termios::{OptionalActions, Termios};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{Exec, Global};
use crate::failure::{Failure, NOT_RUN};
use crate::place;
use crate::run::{open_workspace, path_text};

/// Signals that are passed on. The others end this program, and so the command, or concern only
/// this program's own process.
const PASSED_ON: [(SignalKind, i32); 7] = [
    (SignalKind::hangup(), 1),
    (SignalKind::interrupt(), 2),
    (SignalKind::quit(), 3),
    (SignalKind::user_defined1(), 10),
    (SignalKind::user_defined2(), 12),
    (SignalKind::terminate(), 15),
    (SignalKind::window_change(), 28),
];

/// Runs the command and ends as it ended.
pub async fn exec(global: &Global, options: Exec) -> Result<ExitCode, Failure> {
    perform(global, options).await.map_err(|failure| failure.with_status(NOT_RUN))
}

async fn perform(global: &Global, options: Exec) -> Result<ExitCode, Failure> {
    let socket = place::layout(global).sandboxd_exec();
    let fail = |what: String| Failure::new(format!("{}: {what}", socket.display()));
    let workspace = options.workspace.as_deref().map(open_workspace).transpose()?;
    let path = workspace.as_ref().map(|(_, path)| path_text(path)).transpose()?;
    let request = ExecRequest::Exec {
        environment: options.environment,
        argv: argv(options.argv)?,
        env: terminal_env(),
        path,
    };
    let channel = place::connect(&socket, "sandboxd")?;
    let mut signals = Signals::watch()?;
    let (input, output, errors) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let mut descriptors = vec![input.as_fd(), output.as_fd(), errors.as_fd()];
    descriptors.extend(workspace.as_ref().map(|(fd, _)| fd.as_fd()));
    let _terminal = Terminal::kept(input.as_fd());
    channel.send(&request, &descriptors).await.map_err(|error| match error {
        MessageError::TooLong => {
            Failure::new("the command and its arguments are longer than 64 KiB together")
                .with_hint("pass the long part through standard input or a file of the workspace")
        }
        error => fail(error.to_string()),
    })?;
    loop {
        let reply = tokio::select! {
            reply = channel.receive::<ExecReply>() => reply.map_err(|error| match error {
                MessageError::Closed => {
                    Failure::new("sandboxd ended, and the command with it")
                        .with_hint("its log says why; `cleanhands doctor` tells whether it is back")
                }
                error => fail(error.to_string()),
            })?.0,
            signal = signals.next() => {
                // Where it cannot be sent, the answer that waits to be received says why.
                let _ = channel.send(&ExecRequest::Signal { signal }, &[]).await;
                continue;
            }
        };
        match reply {
            ExecReply::Started { .. } => {}
            ExecReply::Noted { lines } => note(&lines),
            ExecReply::Exited { exit_code, signal } => return Ok(status(exit_code, signal)),
            ExecReply::Refused { fault } => return Err(fault.into()),
            ExecReply::Workspace { .. } => return Err(fail("an answer out of turn".into())),
        }
    }
}

fn argv(words: Vec<OsString>) -> Result<Vec<String>, Failure> {
    words
        .into_iter()
        .map(|word| {
            word.into_string()
                .map_err(|word| Failure::new(format!("argument {word:?} is not UTF-8")))
        })
        .collect()
}

/// Says what the command may not have said: what became of its requests, and why.
fn note(lines: &[String]) {
    for line in lines {
        // Where standard error is closed nobody wants to know.
        let _ = writeln!(std::io::stderr(), "cleanhands: {line}");
    }
}

/// What a command needs to know of the caller's terminal, and nothing else of its environment.
fn terminal_env() -> Vec<(String, String)> {
    ["TERM", "COLORTERM", "NO_COLOR"]
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?)))
        .collect()
}

/// The shell's convention: 128 and the number of the signal.
fn status(exit_code: Option<i32>, signal: Option<i32>) -> ExitCode {
    let number = match (exit_code, signal) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => i32::from(NOT_RUN),
    };
    ExitCode::from(u8::try_from(number & 0xff).unwrap_or(NOT_RUN))
}

/// How the caller's terminal was set. A command that sets it otherwise, and dies before it has set
/// it back, must not leave the caller without echo.
struct Terminal<'a> {
    input: BorrowedFd<'a>,
    settings: Termios,
}

impl<'a> Terminal<'a> {
    fn kept(input: BorrowedFd<'a>) -> Option<Self> {
        let settings = rustix::termios::tcgetattr(input).ok()?;
        Some(Self { input, settings })
    }
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        // In the background, changing the terminal would stop this program: it is not ours then.
        let ours = rustix::termios::tcgetpgrp(self.input) == Ok(rustix::process::getpgrp());
        if ours {
            let when = OptionalActions::Now;
            let _ = rustix::termios::tcsetattr(self.input, when, &self.settings);
        }
    }
}

/// Signals that arrive while the command runs.
struct Signals(Vec<(Signal, i32)>);

impl Signals {
    fn watch() -> Result<Self, Failure> {
        let watched = PASSED_ON.iter().map(|(kind, number)| Ok((signal(*kind)?, *number)));
        let watched: std::io::Result<Vec<_>> = watched.collect();
        let fail = |error| Failure::new(format!("cannot watch for signals: {error}"));
        Ok(Self(watched.map_err(fail)?))
    }

    async fn next(&mut self) -> i32 {
        let waits = self.0.iter_mut().map(|(signal, number)| {
            Box::pin(async move {
                signal.recv().await;
                *number
            })
        });
        futures_util::future::select_all(waits).await.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_the_shells() {
        for (code, signal, expected) in
            [(Some(0), None, 0), (Some(7), None, 7), (None, Some(9), 137), (None, None, NOT_RUN)]
        {
            let shown = format!("{:?}", status(code, signal));
            assert_eq!(shown, format!("{:?}", ExitCode::from(expected)));
        }
    }
}
