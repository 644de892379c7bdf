//! Ends everything that descends from a command, also what tried not to be found.
//!
//! The caller is the nearest subreaper above it, so an orphan becomes the caller's child whatever
//! session or group it moved to, and the kernel's process tree is the whole truth. First all are
//! stopped, until a look finds none that was not: so a process that forks quickly cannot outrun
//! the killing.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, kill_process};

use crate::sys::process::{Ended, Reaped, reap};

/// Looks before the killing begins anyway.
const STOP_ROUNDS_MAX: usize = 50;
/// A killed process goes at once unless the kernel holds it (a dead disk or network mount).
const GONE_TIMEOUT: Duration = Duration::from_secs(5);
/// Between looks, when no child's end is announced in the meantime.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Kills every descendant of the calling process and reaps them; each is passed to `seen`.
pub fn sweep(children: BorrowedFd<'_>, mut seen: impl FnMut(Ended)) -> std::io::Result<()> {
    let me = rustix::process::getpid();
    let mut stopped = BTreeSet::new();
    for _ in 0..STOP_ROUNDS_MAX {
        let fresh: Vec<i32> =
            descendants(me)?.into_iter().filter(|pid| !stopped.contains(pid)).collect();
        if fresh.is_empty() {
            break;
        }
        fresh.iter().for_each(|pid| signal(*pid, Signal::STOP));
        stopped.extend(fresh);
    }
    let deadline = Instant::now() + GONE_TIMEOUT;
    loop {
        descendants(me)?.into_iter().for_each(|pid| signal(pid, Signal::KILL));
        loop {
            match reap()? {
                Reaped::Child(ended) => seen(ended),
                Reaped::NoneYet => break,
                Reaped::NoChildren => return Ok(()),
            }
        }
        if Instant::now() > deadline {
            return Err(std::io::Error::other("a killed process does not go"));
        }
        let mut ready = [PollFd::from_borrowed_fd(children, PollFlags::IN)];
        match rustix::event::poll(&mut ready, Some(&LOOK_INTERVAL)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// One that has ended since the look is what we want.
fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

fn descendants(root: Pid) -> std::io::Result<Vec<i32>> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process may end between the listing and the reading.
        let Ok(stat) = std::fs::read(format!("/proc/{pid}/stat")) else { continue };
        if let Some(parent) = parent_of(&stat) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut next = vec![root.as_raw_nonzero().get()];
    while let Some(pid) = next.pop() {
        let below = children.remove(&pid).unwrap_or_default();
        next.extend(&below);
        found.extend(below);
    }
    Ok(found)
}

/// The fourth field of proc_pid_stat(5). The second, the name in parentheses, is the process's own
/// choice and may hold anything, closing parentheses included.
fn parent_of(stat: &[u8]) -> Option<i32> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_read_whatever_the_process_calls_itself() {
        assert_eq!(parent_of(b"7 (sh) S 3 7 7 0"), Some(3));
        assert_eq!(parent_of(b"7 () S 1 (x) R 4 7"), Some(4));
        assert_eq!(parent_of(b"7 (a\n\xff) Z 1 7"), Some(1));
        assert_eq!(parent_of(b""), None);
        assert_eq!(parent_of(b"7 (sh)"), None);
    }
}
