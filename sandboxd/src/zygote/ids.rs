//! Maps ids (user_namespaces(7)): who a cell's one user is on the host, and, for mounts, whose
//! files that user's are.

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
