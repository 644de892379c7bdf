//! A control group for each cell (cgroups(7), version 2), where systemd delegated a subtree.
//!
//! systemd marks what it delegates with an extended attribute; nothing else is touched, so that
//! root's session or somebody's container is never rearranged. sandboxd moves itself into the
//! child `supervisor` (a group with controllers for its children may hold no process), each cell
//! gets a sibling of it. Where there is no such subtree the limits are each process's, and the
//! cell's layers say so.

use std::io::Result;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::plan::Limits;

const MOUNT: &str = "/sys/fs/cgroup";
/// linux/magic.h
const CGROUP2_MAGIC: i64 = 0x6367_7270;
const SUPERVISOR: &str = "supervisor";
const CELL_PREFIX: &str = "cell-";
/// A process that starts while the others are moved needs another try.
const SETTLE_TRIES: u32 = 5;
/// Between a daemon's own child and whoever started the daemons are few processes.
const DEPTH_MAX: u32 = 16;
/// Processes of a cell that are not commands: its first, and the guards of commands that run at
/// the same time.
const OWN_PROCESSES: u64 = 16;

/// What limits the cells of this zygote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Groups {
    /// A group below this directory for each cell.
    Below(PathBuf),
    /// There are none; the text says why.
    None(String),
}

/// One cell's group.
#[derive(Debug)]
pub struct Group {
    pub directory: OwnedFd,
    /// `memory.events`: what became of its memory limit.
    pub events: OwnedFd,
    /// `pids.events`: how often no process could be made.
    pub refused: OwnedFd,
}

/// Moves this process out of the way and asks for controllers. Once, before the zygote starts.
pub fn settle() {
    let Ok((base, own)) = delegated() else { return };
    // What fails here is found, and told, by `find`.
    if own == base {
        let _ = std::fs::create_dir(base.join(SUPERVISOR));
        let _ = std::fs::write(base.join(SUPERVISOR).join("cgroup.procs"), "0");
    }
    for _ in 0..SETTLE_TRIES {
        move_family(&base);
        if std::fs::write(base.join("cgroup.subtree_control"), "+memory +pids").is_ok() {
            break;
        }
    }
}

/// Moves whoever started this process, and what else it started, out of the way as well: in a scope
/// that a user had made for `cleanhands up` all daemons are in one group. Nobody else is moved.
fn move_family(base: &Path) {
    let Some(parent) = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) else {
        return;
    };
    if parent == 1 {
        return;
    }
    let members = std::fs::read_to_string(base.join("cgroup.procs")).unwrap_or_default();
    for pid in members.lines().filter_map(|line| line.parse().ok()) {
        if descends(pid, parent) {
            let _ = std::fs::write(base.join(SUPERVISOR).join("cgroup.procs"), pid.to_string());
        }
    }
}

/// Whether `pid` is `top` or was started below it.
fn descends(mut pid: i32, top: i32) -> bool {
    for _ in 0..DEPTH_MAX {
        if pid == top {
            return true;
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        match parent.and_then(|parent| parent.trim().parse().ok()) {
            Some(parent) if parent > 0 => pid = parent,
            _ => return false,
        }
    }
    false
}

/// What is said where a policy requires limits that nothing here can hold.
pub fn required(why: &str) -> String {
    format!(
        "the policy requires them, and without a control group they hold for each process only: \
         {why}; run sandboxd as a service with Delegate=yes, or start the daemons with \
         `systemd-run --user --scope -p Delegate=yes cleanhands up`"
    )
}

/// Whether cells can have groups here.
pub fn find() -> Groups {
    let base = match delegated() {
        Ok((base, _)) => base,
        Err(why) => return Groups::None(why),
    };
    let enabled = std::fs::read_to_string(base.join("cgroup.subtree_control")).unwrap_or_default();
    let has = |name| enabled.split_ascii_whitespace().any(|controller| controller == name);
    if !has("memory") || !has("pids") {
        return Groups::None(format!("no memory and pids controllers in {}", base.display()));
    }
    Groups::Below(base)
}

/// The delegated directory, and the one that this process is in: the same, or its `supervisor`.
fn delegated() -> std::result::Result<(PathBuf, PathBuf), String> {
    let unified = rustix::fs::statfs(MOUNT).is_ok_and(|fs| fs.f_type == CGROUP2_MAGIC);
    if !unified {
        return Err("no unified cgroup hierarchy".to_owned());
    }
    let own = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let own = own_group(&own).ok_or("not in the unified cgroup hierarchy")?;
    let base = match own.file_name() {
        Some(name) if name == SUPERVISOR => own.parent().unwrap_or(&own).to_owned(),
        _ => own.clone(),
    };
    if ["user.delegate", "trusted.delegate"].iter().any(|name| is_marked(&base, name)) {
        Ok((base, own))
    } else {
        Err("no cgroup was delegated".to_owned())
    }
}

fn is_marked(directory: &Path, attribute: &str) -> bool {
    let mut value = [0u8; 8];
    rustix::fs::getxattr(directory, attribute, &mut value).is_ok_and(|n| &value[..n] == b"1")
}

/// The line of the unified hierarchy in /proc/PID/cgroup.
fn own_group(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new(MOUNT).join(path))
}

impl Groups {
    /// Makes the group of cell number `number`; those of cells that have ended are removed.
    pub fn make(&self, number: u64, limits: &Limits) -> Result<Option<Group>> {
        let Self::Below(base) = self else { return Ok(None) };
        remove_empty(base);
        let path = base.join(format!("{CELL_PREFIX}{}-{number}", std::process::id()));
        std::fs::create_dir(&path)?;
        std::fs::write(path.join("memory.max"), limits.memory_bytes.to_string())?;
        if path.join("memory.swap.max").exists() {
            std::fs::write(path.join("memory.swap.max"), "0")?;
        }
        let processes = limits.processes.saturating_add(OWN_PROCESSES);
        std::fs::write(path.join("pids.max"), processes.to_string())?;
        let open = |path: &Path, flags| {
            rustix::fs::open(path, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        };
        Ok(Some(Group {
            directory: open(&path, OFlags::DIRECTORY)?,
            events: open(&path.join("memory.events"), OFlags::empty())?,
            refused: open(&path.join("pids.events"), OFlags::empty())?,
        }))
    }

    /// For a cell's layers.
    pub fn describe(&self) -> String {
        match self {
            Self::Below(_) => {
                "cgroup v2: memory and processes for the sandbox; rlimits: file size".to_owned()
            }
            Self::None(why) => format!(
                "rlimits: processes for the sandbox, memory and file size for each process; a \
                 command that ran out of memory cannot be told from another that failed ({why})"
            ),
        }
    }
}

/// A group with processes cannot be removed, which is the check.
fn remove_empty(base: &Path) {
    let Ok(entries) = std::fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(CELL_PREFIX) {
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

/// How often the memory limit had a process killed, by the text of `memory.events`.
pub fn oom_kills(events: &str) -> u64 {
    count(events, "oom_kill ")
}

/// How often the limit of processes kept one from being made, by the text of `pids.events`.
pub fn processes_refused(events: &str) -> u64 {
    count(events, "max ")
}

fn count(events: &str, name: &str) -> u64 {
    let count = events.lines().find_map(|line| line.strip_prefix(name));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unified_line_is_found_beside_the_old_hierarchies() {
        let hybrid = "12:pids:/x\n1:name=systemd:/y\n0::/system.slice/s.service\n";

        assert_eq!(own_group(hybrid), Some("/sys/fs/cgroup/system.slice/s.service".into()));
        assert_eq!(own_group("1:name=systemd:/y\n"), None);
    }

    #[test]
    fn a_family_is_told_from_strangers() {
        let own = std::process::id().cast_signed();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let started = child.id().cast_signed();

        let found = [(own, own), (started, own), (own, started), (1, own)]
            .map(|(pid, top)| descends(pid, top));
        child.kill().unwrap();
        child.wait().unwrap();

        assert_eq!(found, [true, true, false, false]);
    }

    #[test]
    fn kills_are_counted_from_their_own_line() {
        assert_eq!(oom_kills("low 0\noom 4\noom_kill 3\noom_group_kill 1\n"), 3);
        assert_eq!(oom_kills(""), 0);
        assert_eq!(processes_refused("max 12\nmax.imposed 3\n"), 12);
    }
}
