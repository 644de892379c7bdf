//! The single-threaded process that makes cells.
//!
//! sandboxd executes itself again in the role `zygote` before it has a thread or a runtime: forking
//! from a process with threads may run almost no code in the child, and the parent-death signal
//! follows the forking thread, not the process. The zygote does nothing but read one
//! [`Request`] a message from its standard input (a SEQPACKET socket), and clone or take a mount;
//! it ends when that socket does, and every cell ends with it. Read [`crate::init`] next.

pub(crate) mod cgroup;
mod ids;
mod owners;
mod start;

pub mod memory;
pub mod message;

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use rustix::process::{PidfdFlags, Signal};

use self::cgroup::Groups;
use self::ids::Mappings;
use self::message::{Failure, Make, Progress, Request};
use self::owners::Owners;
use crate::apart::Apart;
use crate::init;
use crate::plan::{Mount, SandboxPlan};
use crate::sys::descriptors::{close_all_but, close_from};
use crate::sys::process::{Namespaces, clone_into, give_back_memory, ignore_children};
use crate::sys::seccomp::Filter;

pub(crate) use start::in_time;
pub use start::{Identities, OwnId, Zygote, ZygoteError};

/// What the zygote makes cells with.
struct Means {
    socket: OwnedFd,
    /// Refers to this process: how a cell's first process sees that it has ended.
    own: OwnedFd,
    filter: Filter,
    groups: Groups,
    owners: Owners,
    mappings: Mappings,
    /// Cells made so far.
    made: u64,
}

/// Runs the role `zygote`.
pub fn main(args: Vec<OsString>) -> ExitCode {
    if !args.is_empty() {
        ipc::say::line("sandboxd: zygote: takes no arguments");
        return ExitCode::from(2);
    }
    match means() {
        Ok(mut means) => {
            serve(&mut means);
            ExitCode::SUCCESS
        }
        Err(error) => {
            ipc::say::line(format_args!("sandboxd: cannot start the zygote: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn means() -> rustix::io::Result<Means> {
    // Whatever the starter left open is not for cells.
    close_from(3).map_err(|_| rustix::io::Errno::NOSYS)?;
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    let null = rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    // A terminal's interrupt is for sandboxd, which drains first. Already a leader: the same.
    let _ = rustix::process::setsid();
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    rustix::process::chdir("/")?;
    ignore_children();
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    Ok(Means {
        socket,
        own,
        filter: Filter::new(),
        groups: cgroup::find(),
        owners: Owners::detect(),
        mappings: Mappings::default(),
        made: 0,
    })
}

/// Makes cells until sandboxd closes the socket.
fn serve(means: &mut Means) {
    loop {
        give_back_memory();
        let (request, mut fds) = match ipc::fd::receive::<Request>(&means.socket) {
            Ok(received) => received,
            Err(ipc::fd::MessageError::Malformed(error)) => {
                ipc::say::line(format_args!(
                    "sandboxd: zygote: a request is not as documented: {error}"
                ));
                continue;
            }
            Err(_) => return,
        };
        let Some(answer) = fds.pop() else { continue };
        let outcome = match request {
            Request::Make(make) => make_cell(means, *make, &answer),
            Request::Take { mount, uid, range } => take(means, mount, uid, range, &answer),
        };
        if let Err(failure) = outcome {
            // Whoever asked is gone: nothing was made.
            let _ = ipc::fd::send(&answer, &Progress::Failed(failure), &[]);
        }
    }
}

fn take(
    means: &mut Means,
    mount: Mount,
    uid: u32,
    range: (u32, u32),
    answer: &OwnedFd,
) -> Result<(), Failure> {
    // What a caller showed has been judged, and is known by its inode.
    let apart = Apart::default();
    let taken = means.owners.prepare(&[mount], &apart, uid, Some(range), &mut means.mappings)?;
    let trees: Vec<_> = taken.iter().map(|(_, tree)| tree.as_fd()).collect();
    // Whoever asked is gone, and the mount with it.
    let _ = ipc::fd::send(answer, &Progress::Taken, &trees);
    Ok(())
}

fn make_cell(means: &mut Means, make: Make, cell: &OwnedFd) -> Result<(), Failure> {
    let given = match make.uid {
        Some(uid) => {
            let SandboxPlan { mounts, apart, build, .. } = &make.plan;
            let mounts = [mounts, build.as_slice()].concat();
            means.owners.prepare(&mounts, apart, uid, make.range, &mut means.mappings)?
        }
        None => Vec::new(),
    };
    let kernel = |step: &'static str| {
        move |error: rustix::io::Errno| failed(step)(std::io::Error::from(error))
    };
    let (mapped, tell) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(kernel("pipe"))?;
    if make.plan.limits.required
        && let Groups::None(why) = &means.groups
    {
        let text = cgroup::required(why);
        return Err(Failure { step: "limits".to_owned(), errno: None, text });
    }
    means.made += 1;
    let group =
        means.groups.make(means.made, &make.plan.limits).map_err(failed("control group"))?;
    let start = init::Start {
        plan: make.plan,
        socket: cell.try_clone().map_err(failed("descriptors"))?,
        mapped,
        zygote: means.own.try_clone().map_err(failed("descriptors"))?,
        given,
        filter: means.filter.clone(),
        uid: make.uid,
        limits: means.groups.describe(),
        memory_by_group: group.is_some(),
    };
    let directory = group.as_ref().map(|group| group.directory.as_fd());
    let cloned = clone_into(Namespaces::All, directory, || {
        // The zygote's own descriptors are not for the cell.
        match close_all_but(&start.descriptors()) {
            Ok(()) => init::run(start),
            Err(_) => 1,
        }
    })
    .map_err(failed("clone"))?;
    let uid = make.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    ids::map(cloned.pid, make.uid).map_err(failed("id map"))?;
    let progress = Progress::Cloned { pid: cloned.pid.as_raw_nonzero().get().cast_unsigned(), uid };
    let mut fds = vec![cloned.pidfd.as_fd()];
    let events = group.iter().flat_map(|group| [group.events.as_fd(), group.refused.as_fd()]);
    fds.extend(events);
    if ipc::fd::send(cell, &progress, &fds).is_ok() {
        rustix::io::write(&tell, b"+").map_err(kernel("pipe"))?;
    }
    if let (Some(uid), Owners::Mapped) = (make.uid, means.owners) {
        means.mappings.prepare(uid);
    }
    Ok(())
}

fn failed(step: &'static str) -> impl FnOnce(std::io::Error) -> Failure {
    move |error| Failure {
        step: step.to_owned(),
        errno: error.raw_os_error(),
        text: error.to_string(),
    }
}
