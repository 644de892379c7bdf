//! A guard and its child that were made before there is a command, so that the first command of a
//! cell waits for neither fork, nor for what confines it but Landlock, whose rules need the
//! workspace.
//!
//! The child has no capability, and its system calls are filtered, before it is told anything.

use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::command::{Way, begin_child, fill_up, follow, prepare_guard, run};
use super::confine::{Broken, Restraints};
use super::{PROGRAM_BYTES_MAX, failure, silence};
use crate::sys::descriptors::close_all_but;
use crate::sys::landlock::{self, Domain};
use crate::sys::process::fork;
use crate::sys::seccomp::Subject;
use crate::zygote::memory;
use crate::zygote::message::{Program, Report};

/// The two that wait. Dropping it ends them.
#[derive(Debug)]
pub struct Spare {
    guard: OwnedFd,
    child: OwnedFd,
    /// A byte comes when both are there.
    there: OwnedFd,
}

/// What each is told, once. Attached for the guard: the command's socket; for the child: the
/// domain, a memory file with the [`Program`], the command's descriptors.
#[derive(Debug, Serialize, Deserialize)]
struct Go;

impl Spare {
    /// Forks them. Call it when this process is the cell's user and nobody's to trace.
    pub fn make(restraints: &Restraints) -> Result<Self, Broken> {
        let pair = || ipc::fd::pair().map_err(Broken::at("spare"));
        let (guard, guards) = pair()?;
        let (child, childs) = pair()?;
        let (there, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|error| Broken::at("spare")(error.into()))?;
        fork(|| {
            // Every owner of what is closed here belongs to a frame that this process never
            // returns to.
            if close_all_but(&[guards.as_fd(), childs.as_fd(), tell.as_fd()]).is_err() {
                return 1;
            }
            watch_over(&guards, childs, tell, restraints)
        })
        .map_err(Broken::at("spare"))?;
        Ok(Self { guard, child, there })
    }

    /// Waits until both have been forked.
    pub fn are_there(&self) -> Result<(), Broken> {
        let mut byte = [0u8; 1];
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.there, &mut byte)) {
            Ok(1) => Ok(()),
            Ok(_) => Err(Broken::at("spare")(std::io::Error::other("the guard has ended"))),
            Err(error) => Err(Broken::at("spare")(error.into())),
        }
    }

    /// Has them run a program: `fds` begins with its memory file. A child that is gone by now is
    /// one that was ended, which the guard reports.
    pub fn run(self, socket: &OwnedFd, domain: &Domain, fds: &[OwnedFd]) -> std::io::Result<()> {
        let mut all = vec![domain.as_fd()];
        all.extend(fds.iter().map(AsFd::as_fd));
        let text = |error: ipc::fd::MessageError| std::io::Error::other(error.to_string());
        ipc::fd::send(&self.guard, &Go, &[socket.as_fd()]).map_err(text)?;
        let _ = ipc::fd::send(&self.child, &Go, &all);
        Ok(())
    }
}

/// The guard; returns its exit status.
fn watch_over(orders: &OwnedFd, childs: OwnedFd, tell: OwnedFd, restraints: &Restraints) -> i32 {
    let prepared = silence()
        .map_err(|error| Broken::at("descriptors")(error.into()))
        .and_then(|()| prepare_guard());
    let forked = prepared.and_then(|(events, reader, writer)| {
        let main = fork(|| wait_as_child(&childs, writer, restraints));
        Ok((events, reader, main.map_err(Broken::at("fork"))?))
    });
    // PID 1 sees the end if this fails.
    let _ = rustix::io::write(&tell, b"+");
    drop(tell);
    // PID 1 is gone, or never had a command: the child, which hears the same, ends with this.
    let Ok((Go, mut fds)) = ipc::fd::receive::<Go>(orders) else { return 0 };
    let Some(socket) = fds.pop() else { return 1 };
    let outcome =
        forked.and_then(|(events, reader, main)| follow(&socket, events.as_fd(), reader, main));
    match outcome {
        Ok(()) => 0,
        Err(broken) => {
            // Nobody to tell: sandboxd sees the end of the socket.
            let _ = ipc::fd::send(&socket, &Report::Failed(failure(broken)), &[]);
            1
        }
    }
}

/// The child: confined at once, a program when it is told which.
fn wait_as_child(orders: &OwnedFd, writer: OwnedFd, restraints: &Restraints) -> i32 {
    let mut way = Way::Open(writer);
    match become_program(orders, &mut way, restraints) {
        Ok(()) => 0,
        Err(broken) => way.tell(broken),
    }
}

fn become_program(orders: &OwnedFd, way: &mut Way, restraints: &Restraints) -> Result<(), Broken> {
    let confined = begin_child()
        .and_then(|()| restraints.apply())
        .and_then(|()| restraints.filter(Subject::Command))
        .and_then(|listener| way.hand_over(listener));
    let Ok((Go, mut fds)) = ipc::fd::receive::<Go>(orders) else { return Ok(()) };
    confined?;
    let incomplete = || Broken::at("order")(super::incomplete());
    if fds.len() < 2 {
        return Err(incomplete());
    }
    let domain = fds.remove(0);
    let bytes = memory::read(fds.remove(0), PROGRAM_BYTES_MAX).map_err(Broken::at("order"))?;
    let program: Program =
        serde_json::from_slice(&bytes).map_err(|error| Broken::at("order")(error.into()))?;
    fill_up(&mut fds)?;
    landlock::enter(domain.as_fd()).map_err(Broken::at("landlock"))?;
    rustix::process::chdir(&*program.cwd).map_err(|e| Broken::at("chdir")(e.into()))?;
    std::mem::forget(domain);
    way.place(fds)?;
    Err(run(&program))
}
