//! The vault's worker for commands: runs one of the operator's commands, brings its output.
//!
//! A process of its own, started by proxyd with a socket to the vault child as standard input. It
//! has no way to the store and asks the vault nothing; it reaches the files that its commands may
//! have, and does what ordinary programs do. The vault names a command; what that is
//! stands in the configuration that this process read at its start.
//!
//! A command is started by this same program in the role [`COMMAND_ROLE`], which gives up what the
//! command is not to have and becomes it: no environment but the configured one, no descriptor but
//! the three standard ones, no file but the system's programs and what the configuration names,
//! and never proxyd's state or a file that it shows as a secret. It has its own session and ends,
//! with all that it started, at its time limit. What it writes to standard error is not kept: it
//! may hold anything.
//!
//! systemd tells every process of a service to end, commands too. Requests of proxyd's last moments
//! still need what they write, so the worker goes on, and runs what that signal ended once more.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ipc::daemon::SelfExec;
use ipc::vault::SECRET_BYTES_MAX;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;
use zeroize::Zeroizing;

use super::FETCH_SECONDS;
use super::secret::Secret;
use super::wire::{self, Fetched, Run};
use crate::config::{Arguments, Command, Config, Program};
use crate::start;
use crate::sys::command::Reach;
use crate::sys::{command, process, worker};

/// What this program is told to be.
pub const ROLE: &str = "vault-run";
/// What it is told to be when it is to become a command.
pub const COMMAND_ROLE: &str = "vault-command";
/// Commands that run at once; others wait.
const COMMANDS_MAX: usize = 8;
/// Longest output: JSON around the longest value, with every byte escaped.
const OUTPUT_BYTES_MAX: usize = 6 * SECRET_BYTES_MAX + 4096;

/// Runs the worker. `args` are those after the role: proxyd's own.
pub fn main(exec: &SelfExec, args: Vec<OsString>) -> ExitCode {
    match run(exec, args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            ipc::say::line(format_args!("proxyd vault-run: {reason}"));
            ExitCode::FAILURE
        }
    }
}

struct Place {
    exec: SelfExec,
    config: Config,
    /// Where neither the worker nor a command may look.
    hidden: Vec<PathBuf>,
    /// How often this service was told to end.
    told: Arc<AtomicU32>,
    turns: Semaphore,
    /// The processes of commands under way.
    running: Running,
}

type Running = std::sync::Mutex<HashSet<u32>>;

fn run(exec: &SelfExec, args: Vec<OsString>) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    process::hide_memory().map_err(|error| text(&error))?;
    worker::end_with_parent().map_err(|error| text(&error))?;
    worker::leave_ends_to_parent().map_err(|error| text(&error))?;
    // Whoever a command leaves behind becomes this process's child and is ended.
    command::adopt_orphans().map_err(|error| text(&error))?;
    let arguments = Arguments::parse_from_rest(args).map_err(|error| text(&error))?;
    let mut config = Config::load(&arguments).map_err(|error| text(&error))?;
    let hidden = start::never_for_commands(&config);
    let socket = ipc::daemon::inherited_fd(0).map(StdUnixStream::from);
    let socket = socket.map_err(|error| text(&error))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| text(&error))?;
    let exec = SelfExec { prefix: exec.prefix.clone() };
    let programs = config.backends.commands.values().map(|known| reach(&known.program));
    let programs: Vec<Reach<'_>> = programs.collect();
    let beside = programs.iter().map(|program| command::beside(*program, &hidden));
    let beside: Vec<_> = beside.collect();
    command::confine_worker(programs, &hidden).map_err(|error| text(&error))?;
    for (known, beside) in config.backends.commands.values_mut().zip(beside) {
        (known.program.read, known.program.write) = beside;
    }
    worker::only_commands().map_err(|error| text(&error))?;
    let (turns, told) = (Semaphore::new(COMMANDS_MAX), Arc::default());
    let place = Arc::new(Place { exec, config, hidden, told, turns, running: Running::default() });
    runtime.block_on(async {
        count_ends(&place.told).map_err(|error| text(&error))?;
        socket.set_nonblocking(true).map_err(|error| text(&error))?;
        let socket = UnixStream::from_std(socket).map_err(|error| text(&error))?;
        serve(socket, Arc::clone(&place)).await;
        for leader in super::lock(&place.running).drain() {
            command::end_group(leader);
        }
        Ok(())
    })
}

/// Counts signals that tell the service to end. They are no longer ignored then but still end
/// nothing here: what is ignored stays so in programs that are started, and what is caught does
/// not. Commands are to end by such signals as everywhere.
fn count_ends(told: &Arc<AtomicU32>) -> std::io::Result<()> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        let (mut ends, told) = (signal(kind)?, Arc::clone(told));
        tokio::spawn(async move {
            while ends.recv().await.is_some() {
                told.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    Ok(())
}

/// What one of them may touch, besides the system's programs.
fn reach(program: &Program) -> Reach<'_> {
    Reach { program: Path::new(&program.argv[0]), read: &program.read, write: &program.write }
}

/// Until the vault has gone; commands under way are ended then.
async fn serve(socket: UnixStream, place: Arc<Place>) {
    let (mut reading, writing) = socket.into_split();
    let writing = Arc::new(Mutex::new(writing));
    let mut running = tokio::task::JoinSet::new();
    loop {
        let mut prefix = [0; 4];
        if reading.read_exact(&mut prefix).await.is_err() {
            return;
        }
        let Ok(length) = wire::body_length(prefix) else { return };
        let mut body = Zeroizing::new(vec![0; length]);
        if reading.read_exact(&mut body).await.is_err() {
            return;
        }
        while running.try_join_next().is_some() {}
        let (writing, place) = (Arc::clone(&writing), Arc::clone(&place));
        running.spawn(async move {
            let patience = Duration::from_secs(FETCH_SECONDS);
            let outcome = match timeout(patience, answer(&place, &body)).await {
                Ok(outcome) => outcome,
                Err(_) => Err("too many commands are running".to_owned()),
            };
            let (head, parts) = match outcome {
                Ok(output) => (Fetched::Answered { status: 0 }, vec![output]),
                Err(reason) => (Fetched::Failed { reason }, Vec::new()),
            };
            let frame = wire::encode(wire::number(&body), &head, &parts);
            // A vault that has gone needs no answer.
            let _ = writing.lock().await.write_all(&frame).await;
        });
    }
}

/// One command and its whole output. No reason quotes what it wrote.
async fn answer(place: &Place, question: &[u8]) -> Result<Secret, String> {
    let (asked, parts) = wire::decode::<Run>(question).map_err(|error| error.to_string())?;
    let name = &asked.command;
    let known = place.config.backends.commands.get(name);
    let known = known.ok_or_else(|| format!("proxyd.toml has no [commands.{name}]"))?;
    let _turn = place.turns.acquire().await.map_err(|error| error.to_string())?;
    let input = parts.into_iter().next().unwrap_or_else(|| Secret::new(Vec::new()));
    let told = place.told.load(Ordering::Relaxed);
    let mut outcome = run_one(place, known, &input).await;
    // What ended it may have reached this process and not been counted yet.
    tokio::task::yield_now().await;
    if outcome.is_err() && place.told.load(Ordering::Relaxed) != told {
        outcome = run_one(place, known, &input).await;
    }
    outcome.map_err(|reason| format!("command {name:?} {reason}"))
}

/// Where no command may look, by the real names of now: besides what the worker may not see, files
/// that proxyd shows as secrets.
fn hidden(place: &Place) -> Vec<PathBuf> {
    let shown = place.config.way_out.secret_files().into_iter();
    let shown = shown.filter_map(|path| std::fs::canonicalize(path).ok());
    place.hidden.iter().cloned().chain(shown).collect()
}

async fn run_one(place: &Place, known: &Command, input: &Secret) -> Result<Secret, String> {
    let spec = serde_json::to_string(&(&known.program, hidden(place)))
        .map_err(|_| "has a path that is no text".to_owned())?;
    let mut starting = tokio::process::Command::from(place.exec.command(COMMAND_ROLE));
    starting.arg(spec).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped());
    starting.stderr(Stdio::null()).kill_on_drop(true).current_dir("/").process_group(0);
    let mut child = starting.spawn().map_err(|error| format!("cannot be started: {error}"))?;
    let under_way = UnderWay::new(&place.running, child.id());
    let outcome = match timeout(known.timeout, converse(&mut child, input)).await {
        Ok(Ok(output)) => Ok(output),
        failed => {
            under_way.end();
            let _ = child.wait().await;
            failed.unwrap_or_else(|_| {
                Err(format!("did not end within {} s", known.timeout.as_secs_f32()))
            })
        }
    };
    drop(under_way);
    let running = super::lock(&place.running);
    command::end_orphans(|child| running.contains(&child));
    outcome
}

/// A command that has not been waited for.
struct UnderWay<'a> {
    running: &'a Running,
    leader: u32,
}

impl<'a> UnderWay<'a> {
    fn new(running: &'a Running, leader: Option<u32>) -> Self {
        let leader = leader.unwrap_or_default();
        super::lock(running).insert(leader);
        Self { running, leader }
    }

    /// Ends it and its group. Only before it has been waited for.
    fn end(&self) {
        command::end_group(self.leader);
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        super::lock(self.running).remove(&self.leader);
    }
}

async fn converse(child: &mut Child, input: &Secret) -> Result<Secret, String> {
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A command that reads nothing is free to.
            let _ = stdin.write_all(input.expose_secret()).await;
        }
    };
    let read = async {
        let mut output = Zeroizing::new(Vec::with_capacity(OUTPUT_BYTES_MAX + 1));
        if let Some(stdout) = stdout {
            let mut bounded = stdout.take(OUTPUT_BYTES_MAX as u64 + 1);
            bounded.read_to_end(&mut output).await.map_err(|error| error.to_string())?;
        }
        match output.len() {
            0..=OUTPUT_BYTES_MAX => Ok(Secret::concat(&[&output])),
            _ => Err("wrote more than any secret".to_owned()),
        }
    };
    let ((), output) = tokio::join!(write, read);
    let output = output?;
    let status = child.wait().await.map_err(|error| error.to_string())?;
    match (status.success(), status.code()) {
        (true, _) => Ok(output),
        (false, Some(code)) if code == i32::from(command::CANNOT) => {
            // What a shell says of a program that it may not start, too.
            Err("cannot be started: it, its interpreter or a program of its own is neither the \
                 system's nor in \"read\""
                .to_owned())
        }
        (false, Some(code)) => Err(format!("ended with status {code}")),
        (false, None) => Err("was ended by a signal".to_owned()),
    }
}

/// Becomes the command: the process that [`run_one`] starts.
pub fn become_command(args: &[OsString]) -> ExitCode {
    let spec = args.first().and_then(|text| text.to_str());
    let spec: Option<(Program, Vec<PathBuf>)> =
        spec.and_then(|text| serde_json::from_str(text).ok());
    let Some((program, hidden)) = spec else {
        return ExitCode::from(2);
    };
    let path = Path::new(&program.argv[0]);
    if let Err(error) = command::confine(reach(&program), &hidden) {
        ipc::say::line(format_args!("proxyd vault-command: {error}"));
        return ExitCode::from(command::CANNOT);
    }
    let mut own = std::process::Command::new(&program.argv[0]);
    own.args(&program.argv[1..]).env_clear().envs(&program.environment);
    if let Some(account) = program.user {
        own.uid(account.uid).gid(account.gid);
    }
    let error = own.exec();
    ipc::say::line(format_args!("proxyd vault-command: {}: {error}", path.display()));
    ExitCode::from(command::CANNOT)
}
