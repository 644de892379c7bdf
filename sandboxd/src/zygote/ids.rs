//! Maps ids (user_namespaces(7)): who a cell's one user is on the host, and, for mounts, whose
//! files that user's are.

use std::collections::VecDeque;
use std::io::Result;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal};

use crate::plan::INSIDE_ID;
use crate::sys::process::{Namespaces, clone_into};

/// Maps [`INSIDE_ID`] of a new process's user namespace: to a uid and gid of its own, which takes
/// the privilege to map, or to this process's.
pub fn map(process: Pid, uid: Option<u32>) -> Result<()> {
    let process = process.as_raw_nonzero().get();
    if uid.is_none() {
        // Without the privilege to map groups, the kernel asks for this first.
        std::fs::write(format!("/proc/{process}/setgroups"), "deny")?;
    }
    let outside = uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let outside_group = uid.unwrap_or_else(|| rustix::process::getegid().as_raw());
    std::fs::write(format!("/proc/{process}/uid_map"), format!("{INSIDE_ID} {outside} 1"))?;
    std::fs::write(format!("/proc/{process}/gid_map"), format!("{INSIDE_ID} {outside_group} 1"))
}

/// Mappings that were made ahead, for workspaces that belong to this process's own user: making one
/// takes a process, for which a session's first call would have to wait.
#[derive(Debug, Default)]
pub struct Mappings(VecDeque<(u32, OwnedFd)>);

/// Cells that may wait for their workspace at once and have a mapping ahead.
const AHEAD_MAX: usize = 128;

impl Mappings {
    /// Makes the one for the cell of `uid`. Without it, `of` makes one.
    pub fn prepare(&mut self, uid: u32) {
        self.0.retain(|(of, _)| *of != uid);
        if self.0.len() >= AHEAD_MAX {
            self.0.pop_front();
        }
        if let Ok(made) = namespace(own(), uid) {
            self.0.push_back((uid, made));
        }
    }

    /// A mapping for files of `owner`.
    pub fn of(&mut self, owner: (u32, u32), uid: u32) -> Result<OwnedFd> {
        let at = self.0.iter().position(|(of, _)| *of == uid && owner == own());
        match at.and_then(|at| self.0.remove(at)) {
            Some((_, made)) => Ok(made),
            None => namespace(owner, uid),
        }
    }
}

fn own() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

/// A user namespace in which `owner` (uid, gid), as a file system has it, is `uid`: what an
/// idmapped mount takes its mapping from. It lives as long as the descriptor.
pub fn namespace(owner: (u32, u32), uid: u32) -> Result<OwnedFd> {
    let (wait, hold) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let holder = clone_into(Namespaces::User, None, || {
        // Nothing is ever written: this ends when the other side is killed or the pipe breaks.
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        let _ = rustix::io::read(&wait, &mut [0u8; 1]);
        0
    })?;
    let process = holder.pid.as_raw_nonzero().get();
    let opened = (|| {
        std::fs::write(format!("/proc/{process}/uid_map"), format!("{} {uid} 1", owner.0))?;
        std::fs::write(format!("/proc/{process}/gid_map"), format!("{} {uid} 1", owner.1))?;
        let path = format!("/proc/{process}/ns/user");
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    })();
    rustix::process::pidfd_send_signal(&holder.pidfd, Signal::KILL)?;
    drop(hold);
    opened
}
