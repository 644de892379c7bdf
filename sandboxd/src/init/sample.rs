//! What a command and all that descends from it use, as the command's guard sees it in `/proc`.
//!
//! Times and bytes of disks hold what was reaped too: the kernel adds a child's to those of whoever
//! waited for it. The guard waits for orphans, but cannot read its own bytes, because it is
//! undumpable: an orphan's go with it. What is used now (memory, processes,
//! room) is what a look finds: what comes and goes between two looks is not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rustix::time::{ClockId, clock_gettime};

use crate::plan::{HOME, WORKSPACE};
use crate::sys::process::{ended_children_us, page_bytes};
use crate::zygote::message::Sample;

/// The unit of times in `/proc`, whatever the kernel's own: `USER_HZ` of every architecture that we
/// run on.
const TICKS_PER_SECOND: u64 = 100;
/// Where commands can write.
const WRITABLE: [&str; 4] = ["/tmp", "/dev/shm", HOME, WORKSPACE];

/// What proc_pid_stat(5) says of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    parent: i32,
    /// Its own and of those that it waited for, in ticks.
    time: u64,
    threads: u64,
    began: u64,
    resident_pages: u64,
}

/// Now, as the begin of a process is counted in `/proc`.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let part = now.tv_nsec.unsigned_abs() / (1_000_000_000 / TICKS_PER_SECOND);
    now.tv_sec.unsigned_abs() * TICKS_PER_SECOND + part
}

/// Looks at all that descends from the calling process.
pub fn take(since: u64) -> std::io::Result<Sample> {
    let all = processes()?;
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let mut sample = Sample {
        cpu_us: ended_children_us(),
        tasks: all.values().map(|process| process.threads).sum(),
        full: full(),
        ..Sample::default()
    };
    for pid in below(own, &all) {
        let process = all[&pid];
        sample.cpu_us += process.time * (1_000_000 / TICKS_PER_SECOND);
        if process.began >= since {
            sample.resident_bytes += process.resident_pages * page_bytes();
        }
        // One that has ended since counts with whoever waited for it, at the next look.
        if let Some((read, written)) = disk_bytes(pid) {
            let sum = sample.disk.get_or_insert_default();
            *sum = (sum.0 + read, sum.1 + written);
        }
    }
    Ok(sample)
}

fn processes() -> std::io::Result<BTreeMap<i32, Process>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process may end between the listing and the reading.
        let Ok(stat) = std::fs::read(format!("/proc/{pid}/stat")) else { continue };
        if let Some(process) = process(&stat) {
            all.insert(pid, process);
        }
    }
    Ok(all)
}

/// Those that descend from `root`. Two looks at `/proc` may contradict each other, so that a parent
/// seems to descend from its child: none is counted twice.
fn below(root: i32, all: &BTreeMap<i32, Process>) -> BTreeSet<i32> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for (pid, process) in all {
        children.entry(process.parent).or_default().push(*pid);
    }
    let mut found = BTreeSet::new();
    let mut next = vec![root];
    while let Some(pid) = next.pop() {
        for child in children.remove(&pid).unwrap_or_default() {
            found.insert(child);
            next.push(child);
        }
    }
    found
}

/// The second field, the name in parentheses, is the process's own choice and may hold anything,
/// closing parentheses included.
fn process(stat: &[u8]) -> Option<Process> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    // The first of these is the third field of the manual page.
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(Process {
        parent: fields.get(1)?.parse().ok()?,
        time: (14..=17).filter_map(field).sum(),
        threads: field(20)?,
        began: field(22)?,
        resident_pages: field(24)?,
    })
}

/// Bytes that a process, and those that it waited for, had read from disks and written to them.
fn disk_bytes(pid: i32) -> Option<(u64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.parse().ok());
    Some((field("read_bytes: ")?, field("write_bytes: ")?))
}

/// The places without room for another byte, or another file.
fn full() -> Vec<String> {
    let is_full = |place: &&&str| {
        rustix::fs::statvfs(Path::new(**place)).is_ok_and(|fs| {
            let bytes = fs.f_blocks > 0 && fs.f_bavail == 0;
            let files = fs.f_files > 0 && fs.f_favail == 0;
            bytes || files
        })
    };
    WRITABLE.iter().filter(is_full).map(|&place| place.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_whatever_it_calls_itself() {
        let stat = b"7 (a) b) S 3 7 7 0 -1 4194304 1 2 3 4 10 20 300 4000 20 0 9 0 55 4096 77 8";

        let expected = Process { parent: 3, time: 4330, threads: 9, began: 55, resident_pages: 77 };
        assert_eq!(process(stat), Some(expected));
        assert_eq!(process(b"7 (sh) S 3 7"), None);
        assert_eq!(process(b""), None);
    }

    #[test]
    fn a_contradictory_table_is_walked_once() {
        let process = |parent| Process { parent, time: 0, threads: 1, began: 0, resident_pages: 0 };
        let all =
            BTreeMap::from([(2, process(1)), (3, process(2)), (1, process(3)), (9, process(8))]);

        assert_eq!(below(1, &all), BTreeSet::from([1, 2, 3]));
    }

    #[test]
    fn this_process_began_before_now() {
        let stat = std::fs::read("/proc/self/stat").unwrap();

        let own = process(&stat).unwrap();

        assert!(own.began <= now(), "{own:?}");
        assert!(own.resident_pages * page_bytes() > 100 * 1024, "{own:?}");
    }
}
