//! One persistent shell: a `bash` of a cell that is given one command after another.
//!
//! The shell reads its script from a pipe. A command goes in as one quoted word to `eval`, with
//! standard input empty, and is followed by a line that reports its status on descriptor 3, which
//! the command itself does not have. So the output needs no marker, a syntax error or `set -e`
//! cannot confuse the framing, and `cd`, variables and functions persist. Whatever holds the
//! output pipe open in the background is not waited for: a command has ended when its status
//! came, and what was written before is in the pipe by then.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use ipc::sandbox::Usage;
use rustix::pipe::PipeFlags;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cell::{Cell, CellCommand, CellError, ExitOf, Peak, Running};
use crate::init::sample;
use crate::output::Capture;
use crate::plan::WORKSPACE;
use crate::tools::bash::Spill;
use crate::zygote::message::Sample;

/// What the output pipe holds while nobody reads: a background process logging between two calls
/// is not held up by less. The kernel may grant less, which changes no result.
const PIPE_BYTES: usize = 1024 * 1024;
/// How much is read at once.
const READ_BYTES: usize = 64 * 1024;
/// Longest thing on the status pipe that is kept while looking for our line.
const STATUS_BYTES_MAX: usize = 4096;
/// How long ending a command's processes may take before its sandbox is given up.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// When what a command uses is looked at: soon, then ever later up to the interval.
const LOOK_FIRST: Duration = Duration::from_millis(20);
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// How long the end of a command's time may wait for the look at what it had used up.
const LAST_LOOK: Duration = Duration::from_secs(1);

/// A living shell. Dropping it kills it and all that it started.
#[derive(Debug)]
pub struct Shell {
    running: Running,
    script: pipe::Sender,
    output: pipe::Receiver,
    status: pipe::Receiver,
    /// False once every writer has closed the output: the shell redirected itself.
    output_open: bool,
    /// By all that descended from the shell, before the command that runs now.
    before: Sample,
    /// When that began, as `sample::now` has it.
    since: u64,
}

/// How a command ended.
#[derive(Debug)]
pub enum Ending {
    /// The shell goes on.
    Status(i32),
    /// The shell itself ended: `exit`, `exec`, a signal.
    Exited(ExitOf),
    TimedOut,
    Cancelled,
    /// The cell ended, or nobody can say.
    Lost,
}

impl Shell {
    pub async fn start(cell: &Cell, env: &[(String, String)]) -> Result<Self, CellError> {
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(std::io::Error::from);
        let (script_in, script) = pipe()?;
        let (output, output_in) = pipe()?;
        let (status, status_in) = pipe()?;
        // Refused where this user's pipes hold much already: then the pipe stays at its size.
        let _ = rustix::pipe::fcntl_setpipe_size(&output, PIPE_BYTES);
        let command = CellCommand {
            argv: ["/bin/bash", "--noprofile", "--norc"].map(str::to_owned).to_vec(),
            env: env.to_vec(),
            cwd: WORKSPACE.to_owned(),
        };
        let fds = [&script_in, &output_in, &output_in, &status_in].map(AsFd::as_fd);
        let running = cell.spawn(&command, &fds).await?;
        Ok(Self {
            running,
            script: sender(script)?,
            output: receiver(output)?,
            status: receiver(status)?,
            output_open: true,
            before: Sample::default(),
            since: 0,
        })
    }

    /// Runs one command to its end; everything it writes goes to `capture` and `spill`. After any
    /// ending but [`Ending::Status`] the shell is of no more use.
    pub async fn run(
        &mut self,
        command: &str,
        timeout: Duration,
        cancel: &CancellationToken,
        capture: &mut Capture,
        spill: &Spill<'_>,
    ) -> Ending {
        self.since = sample::now();
        self.running.begin();
        let nonce = ipc::id::random_text(16);
        let script = frame(command, &nonce);
        let mut ending =
            self.follow(script.as_bytes(), &nonce, timeout, cancel, capture, spill).await;
        if matches!(ending, Ending::TimedOut | Ending::Cancelled) {
            // What it had used up is seen while it is there. Nothing hangs on the answer.
            let _ = tokio::time::timeout(LAST_LOOK, self.running.sample(self.since)).await;
            let killed = tokio::time::timeout(KILL_TIMEOUT, self.running.kill_tree()).await;
            if !matches!(killed, Ok(Ok(()))) {
                ending = Ending::Lost;
            }
        }
        self.drain(capture);
        spill.write_due(capture, true).await;
        ending
    }

    /// What the last command used, and the most that was seen of it; nothing, when nobody can say
    /// any more.
    pub async fn usage(&mut self) -> (Option<Usage>, Peak) {
        let now = match (self.running.sample(self.since).await, self.running.exited()) {
            (Ok(now), _) => now,
            // With the shell, all that it had waited for; the rest was swept away.
            (Err(_), Some(exit)) => Sample { cpu_us: exit.cpu_us, ..Sample::default() },
            (Err(_), None) => return (None, self.running.peak()),
        };
        let peak = self.running.peak();
        let before = std::mem::replace(&mut self.before, now.clone());
        let begun = before.disk.unwrap_or_default();
        let disk = now
            .disk
            .map(|(read, written)| (read.saturating_sub(begun.0), written.saturating_sub(begun.1)));
        let usage = Usage {
            cpu_us: now.cpu_us.saturating_sub(before.cpu_us),
            memory_peak_bytes: Some(peak.resident_bytes).filter(|&bytes| bytes > 0),
            disk_read_bytes: disk.map(|(read, _)| read),
            disk_written_bytes: disk.map(|(_, written)| written),
        };
        (Some(usage), peak)
    }

    async fn follow(
        &mut self,
        mut script: &[u8],
        nonce: &str,
        timeout: Duration,
        cancel: &CancellationToken,
        capture: &mut Capture,
        spill: &Spill<'_>,
    ) -> Ending {
        let deadline = Instant::now() + timeout;
        let mut pause = LOOK_FIRST;
        let mut look = Instant::now() + pause;
        let mut reported = Vec::new();
        let mut buffer = vec![0u8; READ_BYTES];
        loop {
            tokio::select! {
                biased;
                () = cancel.cancelled() => return Ending::Cancelled,
                () = tokio::time::sleep_until(deadline) => return Ending::TimedOut,
                read = self.status.read_buf(&mut reported) => {
                    if let Some(code) = status_in(&reported, nonce) {
                        return Ending::Status(code);
                    }
                    if !matches!(read, Ok(1..)) || reported.len() > STATUS_BYTES_MAX {
                        return self.exited(deadline).await;
                    }
                }
                ended = self.running.wait() => {
                    return ended.map_or(Ending::Lost, Ending::Exited);
                }
                written = self.script.write(script), if !script.is_empty() => match written {
                    Ok(count) => script = &script[count..],
                    Err(_) => return self.exited(deadline).await,
                },
                read = self.output.read(&mut buffer), if self.output_open => match read {
                    Ok(count @ 1..) => {
                        capture.push(&buffer[..count]);
                        spill.write_due(capture, false).await;
                    }
                    _ => self.output_open = false,
                },
                () = tokio::time::sleep_until(look) => {
                    // A guard that is gone is seen by its end.
                    let _ = self.running.look(self.since).await;
                    pause = (pause * 2).min(LOOK_INTERVAL);
                    look = Instant::now() + pause;
                }
            }
        }
    }

    /// The shell has closed its pipes: it is ending, or has made itself unusable.
    async fn exited(&self, deadline: Instant) -> Ending {
        match tokio::time::timeout_at(deadline, self.running.wait()).await {
            Ok(Ok(exit)) => Ending::Exited(exit),
            Ok(Err(_)) => Ending::Lost,
            Err(_) => Ending::TimedOut,
        }
    }

    /// Takes what is in the output pipe now, and no more: a background process may go on writing.
    fn drain(&mut self, capture: &mut Capture) {
        let mut left = rustix::io::ioctl_fionread(&self.output).unwrap_or(0);
        let mut buffer = vec![0u8; READ_BYTES];
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(READ_BYTES).min(READ_BYTES);
            // Readiness known to the runtime may be stale; ask the pipe itself. It cannot block:
            // it is non-blocking, and holds what was counted.
            match rustix::io::read(&self.output, &mut buffer[..want]) {
                Ok(count @ 1..) => {
                    capture.push(&buffer[..count]);
                    left = left.saturating_sub(count as u64);
                }
                _ => return,
            }
        }
    }
}

fn sender(fd: OwnedFd) -> std::io::Result<pipe::Sender> {
    pipe::Sender::from_owned_fd(fd)
}

fn receiver(fd: OwnedFd) -> std::io::Result<pipe::Receiver> {
    pipe::Receiver::from_owned_fd(fd)
}

/// The script that runs `command` and reports its status under `nonce`.
fn frame(command: &str, nonce: &str) -> String {
    let quoted = command.replace('\'', r"'\''");
    format!("eval -- '{quoted}' </dev/null 3>&-\nbuiltin printf '{nonce} %d\\n' \"$?\" >&3\n")
}

/// The status reported under `nonce`, once its line is whole.
fn status_in(reported: &[u8], nonce: &str) -> Option<i32> {
    let text = std::str::from_utf8(reported).ok()?;
    text.split_inclusive('\n').find_map(|line| {
        let rest = line.strip_suffix('\n')?.strip_prefix(nonce)?;
        rest.strip_prefix(' ')?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_one_quoted_word_whatever_it_holds() {
        let table = [("true", "'true'"), ("echo 'a b'", r"'echo '\''a b'\'''"), ("a\nb", "'a\nb'")];
        for (command, quoted) in table {
            let script = frame(command, "n");

            let expected = format!("eval -- {quoted} </dev/null 3>&-\n");
            assert!(script.starts_with(&expected), "{script}");
        }
    }

    #[test]
    fn only_a_whole_line_with_the_nonce_is_a_status() {
        let table: [(&[u8], Option<i32>); 7] = [
            (b"", None),
            (b"abc 7", None),
            (b"abc 7\n", Some(7)),
            (b"xyz 0\nabc 1\n", Some(1)),
            (b"xyz 0\n", None),
            (b"abc x\n", None),
            (b"\xff\n", None),
        ];
        for (reported, expected) in table {
            assert_eq!(status_in(reported, "abc"), expected, "{reported:?}");
        }
    }

    /// The framing against a real bash, without a cell.
    #[test]
    fn a_real_bash_reports_each_status_and_keeps_its_state() {
        let commands = [
            ("cd / && x='it'\\''s'; pwd", 0),
            ("echo \"$x\"; false", 1),
            ("if", 2),
            ("break; nosuchcommand", 127),
            ("cat; read line", 1),
            ("echo forged 0 >&3", 1),
        ];
        let script: String =
            commands.iter().map(|(c, _)| frame(c, "n")).chain([frame("exit 7", "n")]).collect();
        let directory = tempfile::tempdir().unwrap();
        let input = directory.path().join("script");
        std::fs::write(&input, script).unwrap();
        let line = "exec /bin/bash --noprofile --norc 3>\"$1\" <\"$0\"";
        let report = directory.path().join("report");

        let output = std::process::Command::new("/bin/bash")
            .args(["-c", line])
            .args([&input, &report])
            .output()
            .unwrap();

        let expected: String = commands.iter().map(|(_, code)| format!("n {code}\n")).collect();
        assert_eq!(std::fs::read_to_string(report).unwrap(), expected);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "/\nit's\n");
        assert_eq!(output.status.code(), Some(7));
    }
}
