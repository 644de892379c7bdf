//! One command: its guard, which outlives it and answers for all that descends from it, and the
//! process that confines itself and becomes the program.
//!
//! The guard is a child of PID 1 and the subreaper of the command: whoever is orphaned below it
//! becomes its child. It holds the command's socket; when sandboxd closes that, it sweeps and
//! ends. It has the capabilities of PID 1, reads nothing from the command, and cannot be traced
//! by it (it is undumpable).

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ipc::fd::MessageError;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use super::confine::{Broken, Confinement};
use super::failure;
use super::gate::Gate;
use super::sample;
use super::tree::sweep;
use crate::cell::CALL_BYTES_MAX;
use crate::sys::descriptors::{place, placed};
use crate::sys::process::{
    ChildEvents, Ended, Reaped, child_events, default_signals, execute, fork, give_back_memory,
    reap,
};
use crate::sys::seccomp::Subject;
use crate::zygote::memory;
use crate::zygote::message::{Control, Failure, Program, Report};

/// What a child tells its guard, before it is its program.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    /// Attached: the listener of its supervised calls.
    Supervised,
    /// It will not be its program.
    Failed(Failure),
}

/// What the child becomes.
pub enum Body {
    Program(Box<Program>),
    /// `tools::files::perform` on descriptor 3, the answer to descriptor 4.
    Files,
    /// Nothing: to show that it can be confined.
    Rehearsal,
}

/// Runs in the guard; returns its exit status.
pub fn guard(socket: &OwnedFd, body: Body, fds: Vec<OwnedFd>, confinement: &Confinement) -> i32 {
    match supervise(socket, body, fds, confinement) {
        Ok(()) => 0,
        Err(broken) => {
            let failure = failure(broken);
            // Nobody to tell: sandboxd sees the end of the socket.
            let _ = ipc::fd::send(socket, &Report::Failed(failure), &[]);
            1
        }
    }
}

fn supervise(
    socket: &OwnedFd,
    body: Body,
    fds: Vec<OwnedFd>,
    confinement: &Confinement,
) -> Result<(), Broken> {
    let (events, reader, writer) = prepare_guard()?;
    let main = fork(|| become_body(body, fds, writer, confinement)).map_err(Broken::at("fork"))?;
    // `fds` and `writer` moved into the closure, which this process has dropped: the socket ends
    // when the child executes, and the command's output ends when the command's processes do.
    follow(socket, events.as_fd(), reader, main)
}

/// What a guard needs before it forks: how it hears of children, and the socket by which a child
/// hands over its listener and tells why it could not become its program.
pub(super) fn prepare_guard() -> Result<(ChildEvents, OwnedFd, OwnedFd), Broken> {
    let io = |e: rustix::io::Errno| Broken::at("guard")(e.into());
    let events = child_events().map_err(Broken::at("guard"))?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(io)?;
    let (reader, writer) = ipc::fd::pair().map_err(Broken::at("guard"))?;
    Ok((events, reader, writer))
}

/// Says that the program runs, or why not, and watches over it from then on.
pub(super) fn follow(
    socket: &OwnedFd,
    events: std::os::fd::BorrowedFd<'_>,
    reader: OwnedFd,
    main: Pid,
) -> Result<(), Broken> {
    let (report, listener) = hear(&reader);
    drop(reader);
    if ipc::fd::send(socket, &report, &[]).is_err() || matches!(report, Report::Failed(_)) {
        let _ = sweep(events, |_| {});
        return Ok(());
    }
    give_back_memory();
    let mut gate = listener.map(Gate::new);
    watch(socket, events, main, &mut gate)
}

/// What the child says until it is its program, or ends.
fn hear(child: &OwnedFd) -> (Report, Option<OwnedFd>) {
    let (mut report, mut listener) = (Report::Started, None);
    loop {
        match ipc::fd::receive::<Word>(child) {
            Ok((Word::Supervised, mut fds)) => listener = fds.pop(),
            Ok((Word::Failed(failure), _)) => report = Report::Failed(failure),
            Err(_) => return (report, listener),
        }
    }
}

/// Serves the command's socket until sandboxd closes it.
fn watch(
    socket: &OwnedFd,
    events: std::os::fd::BorrowedFd<'_>,
    main: Pid,
    gate: &mut Option<Gate>,
) -> Result<(), Broken> {
    loop {
        collect(socket, main)?;
        let first_call = gate.as_ref().and_then(Gate::unopened).map(AsFd::as_fd);
        // Whether it listens for first calls or not, the third is nothing but the first again.
        let third = first_call.unwrap_or(socket.as_fd());
        let mut ready =
            [socket.as_fd(), events, third].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match rustix::event::poll(&mut ready, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Broken::at("guard")(error.into())),
        }
        let asked = !ready[0].revents().is_empty();
        if first_call.is_some() && !ready[2].revents().is_empty() {
            *gate = gate.take().and_then(Gate::open);
        }
        // What SIGCHLD announced is found by `collect`; the announcement itself says nothing more.
        drain(events);
        if asked && !serve(socket, events, main)? {
            return Ok(());
        }
    }
}

/// One message of sandboxd's; false: there will be none any more.
fn serve(socket: &OwnedFd, events: std::os::fd::BorrowedFd<'_>, main: Pid) -> Result<bool, Broken> {
    let swept = |main_too: bool| {
        let outcome = sweep(events, |ended| {
            if main_too && ended.pid == main {
                let _ = ipc::fd::send(socket, &exited(&ended), &[]);
            }
        });
        outcome.map_err(Broken::at("sweep"))
    };
    match ipc::fd::receive::<Control>(socket) {
        Ok((Control::Signal { signal }, _)) => {
            if let Some(signal) = Signal::from_named_raw(signal) {
                // A group that has ended is no failure: its end is on its way to whoever asked.
                let _ = rustix::process::kill_process_group(main, signal);
            }
            Ok(true)
        }
        Ok((Control::Usage { since }, _)) => {
            let sample = sample::take(since).map_err(Broken::at("usage"))?;
            let _ = ipc::fd::send(socket, &Report::Used(sample), &[]);
            Ok(true)
        }
        Ok((Control::Kill, _)) => {
            swept(true)?;
            let _ = ipc::fd::send(socket, &Report::Swept, &[]);
            Ok(true)
        }
        Err(MessageError::Socket(error)) if error.kind() == std::io::ErrorKind::Interrupted => {
            Ok(true)
        }
        Err(_) => {
            swept(false)?;
            Ok(false)
        }
    }
}

fn drain(events: std::os::fd::BorrowedFd<'_>) {
    let mut buffer = [0u8; 1024];
    while rustix::io::read(events, &mut buffer).is_ok_and(|n| n > 0) {}
}

/// Reaps whatever has ended and reports the command's own end.
fn collect(socket: &OwnedFd, main: Pid) -> Result<(), Broken> {
    while let Reaped::Child(ended) = reap().map_err(Broken::at("guard"))? {
        if ended.pid == main {
            let _ = ipc::fd::send(socket, &exited(&ended), &[]);
        }
    }
    Ok(())
}

fn exited(ended: &Ended) -> Report {
    Report::Exited {
        code: ended.code,
        signal: ended.signal,
        maxrss_bytes: ended.maxrss_bytes,
        cpu_us: ended.cpu_us,
    }
}

/// The child: confines itself and becomes what it is to be. Returns only when there is no program
/// to become, or when it failed and said so.
fn become_body(body: Body, fds: Vec<OwnedFd>, writer: OwnedFd, confinement: &Confinement) -> i32 {
    let mut way = Way::Open(writer);
    match confined(body, fds, &mut way, confinement) {
        Ok(status) => status,
        Err(broken) => way.tell(broken),
    }
}

/// Exit status of a child that could not become its program; seen only where its report was lost.
const NOT_BECOME: i32 = 125;

/// The child's way to tell its guard of a failure.
pub(super) enum Way {
    Open(OwnedFd),
    /// Behind the command's own descriptors.
    Placed(std::mem::ManuallyDrop<OwnedFd>),
    Closed,
}

impl Way {
    /// Tells why the child is not its program; returns its exit status.
    pub(super) fn tell(&self, broken: Broken) -> i32 {
        let _ = self.say(&Word::Failed(failure(broken)), &[]);
        NOT_BECOME
    }

    /// Leaves the listener of this process's supervised calls to the guard.
    pub(super) fn hand_over(&self, listener: Option<OwnedFd>) -> Result<(), Broken> {
        let Some(listener) = listener else { return Ok(()) };
        self.say(&Word::Supervised, &[listener.as_fd()])
            .map_err(|error| Broken::at("guard")(std::io::Error::other(error.to_string())))
    }

    fn say(&self, word: &Word, fds: &[BorrowedFd<'_>]) -> Result<(), MessageError> {
        match self {
            Self::Open(writer) => ipc::fd::send(writer, word, fds),
            Self::Placed(writer) => ipc::fd::send(&**writer, word, fds),
            Self::Closed => Ok(()),
        }
    }

    /// Puts the command's descriptors in their places, with this behind them.
    pub(super) fn place(&mut self, fds: Vec<OwnedFd>) -> Result<(), Broken> {
        if let Self::Open(writer) = &*self {
            let placed = place(fds, writer).map_err(Broken::at("descriptors"))?;
            // The number that the old owner knows is closed or somebody else's.
            std::mem::forget(std::mem::replace(self, Self::Placed(placed)));
        }
        Ok(())
    }
}

/// Begins the life of a command's process, whatever it becomes.
pub(super) fn begin_child() -> Result<(), Broken> {
    rustix::process::setsid().map_err(|e| Broken::at("session")(e.into()))?;
    default_signals();
    Ok(())
}

/// Fills up a command's descriptors to the standard three. None may be a Unix socket that sends to
/// any address: the command could make no such socket itself, see `sys::seccomp`.
pub(super) fn fill_up(fds: &mut Vec<OwnedFd>) -> Result<(), Broken> {
    use rustix::net::sockopt::{socket_domain, socket_type};
    let sends_anywhere = |fd: &OwnedFd| {
        socket_domain(fd) == Ok(AddressFamily::UNIX) && socket_type(fd) == Ok(SocketType::DGRAM)
    };
    if let Some(number) = fds.iter().position(sends_anywhere) {
        let text = format!(
            "descriptor {number} is a Unix datagram socket, which could send to any socket of the \
             host that the sandbox is shown; give it a stream socket or a pipe"
        );
        return Err(Broken { step: "descriptors", errno: None, text });
    }
    while fds.len() < 3 {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let null = rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty());
        fds.push(null.map_err(|e| Broken::at("descriptors")(e.into()))?);
    }
    Ok(())
}

fn confined(
    body: Body,
    mut fds: Vec<OwnedFd>,
    way: &mut Way,
    confinement: &Confinement,
) -> Result<i32, Broken> {
    begin_child()?;
    let (cwd, subject) = match &body {
        Body::Program(program) => (program.cwd.clone(), Subject::Command),
        Body::Files => ("/".to_owned(), Subject::FileTools),
        Body::Rehearsal => ("/".to_owned(), Subject::Command),
    };
    fill_up(&mut fds)?;
    let listener = confinement.apply(subject, || {
        rustix::process::chdir(&*cwd).map_err(|e| Broken::at("chdir")(e.into()))?;
        way.place(fds)
    })?;
    way.hand_over(listener)?;
    if let Body::Program(program) = body {
        return Err(run(&program));
    }
    // There is no exec that would close it, and the guard waits for its end.
    if let Way::Placed(writer) = std::mem::replace(way, Way::Closed) {
        drop(std::mem::ManuallyDrop::into_inner(writer));
    }
    Ok(if matches!(body, Body::Files) { files() } else { 0 })
}

/// Executes the program; a name without a slash is looked for in the command's own `PATH`, and
/// the most telling error is returned, as execvp(3) has it.
pub(super) fn run(program: &Program) -> Broken {
    let strings = |texts: &mut dyn Iterator<Item = String>| -> Option<Vec<CString>> {
        texts.map(|text| CString::new(text).ok()).collect()
    };
    let env = &mut program.env.iter().map(|(name, value)| format!("{name}={value}"));
    let (Some(argv), Some(env)) = (strings(&mut program.argv.iter().cloned()), strings(env)) else {
        let text = "an argument or variable holds a zero byte".to_owned();
        return Broken { step: "exec", errno: None, text };
    };
    let Some(name) = program.argv.first().filter(|name| !name.is_empty()) else {
        return Broken { step: "exec", errno: Some(2), text: "no program is named".to_owned() };
    };
    let path = program.env.iter().find(|(name, _)| name == "PATH").map(|(_, value)| value.as_str());
    let candidates: Vec<String> = if name.contains('/') {
        vec![name.clone()]
    } else {
        let directories = path.unwrap_or("/usr/bin:/bin").split(':').filter(|d| !d.is_empty());
        directories.map(|directory| format!("{directory}/{name}")).collect()
    };
    let mut errno = Errno::NOENT.raw_os_error();
    for candidate in candidates {
        let Ok(candidate) = CString::new(candidate) else { continue };
        match Errno::from_io_error(&execute(&candidate, &argv, &env)) {
            Some(Errno::NOENT | Errno::NOTDIR) | None => {}
            Some(other) => errno = other.raw_os_error(),
        }
    }
    let text = format!("{name}: {}", std::io::Error::from_raw_os_error(errno));
    Broken { step: "exec", errno: Some(errno), text }
}

/// Exit status of a file call whose request or answer could not be passed.
const NOT_PASSED: i32 = 2;

/// A file call: the request is descriptor 3, the answer goes to descriptor 4.
fn files() -> i32 {
    let Ok(request) = memory::read(&*placed(3), CALL_BYTES_MAX) else { return NOT_PASSED };
    let answer = crate::templates::perform(&request)
        .unwrap_or_else(|| crate::tools::files::perform(&request));
    match memory::fill(&*placed(4), &answer) {
        Ok(()) => 0,
        Err(_) => NOT_PASSED,
    }
}
