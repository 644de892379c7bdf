//! What confines a command of the operator's and the worker that starts it, and ends what a command
//! leaves behind.

use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::process::{Pid, Signal, WaitOptions};

use super::process::ConfineError;

/// The status of a process that could not become its command.
pub const CANNOT: u8 = 126;

/// What any program needs to run: itself, its libraries, names, time zones, certificates.
const SYSTEM: &[&str] = &[
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/opt",
    "/etc",
    "/nix/store",
    "/snap",
    "/run/systemd/resolve",
    "/run/resolvconf",
    "/proc",
    "/sys/devices/system/cpu",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
];

/// What a command may touch, besides the system's programs.
#[derive(Clone, Copy)]
pub struct Reach<'a> {
    pub program: &'a Path,
    pub read: &'a [PathBuf],
    pub write: &'a [PathBuf],
}

/// Orphans of commands come to this process.
pub fn adopt_orphans() -> io::Result<()> {
    let own = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(own)).map_err(io::Error::from)
}

/// Ends a command that has not been waited for, and what else is in its group.
pub fn end_group(leader: u32) {
    if let Some(group) = pid(leader) {
        // It may have ended by itself.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}

/// Ends what commands left behind: every child of this process that is none of `running`, until
/// there is none. Children of one that is ended here come to this process in turn.
pub fn end_orphans(running: impl Fn(u32) -> bool) {
    let own = rustix::process::getpid().as_raw_nonzero();
    let path = format!("/proc/{own}/task/{own}/children");
    loop {
        let children = std::fs::read_to_string(&path).unwrap_or_default();
        let children = children.split_ascii_whitespace().filter_map(|child| child.parse().ok());
        let orphans: Vec<Pid> = children.filter(|child| !running(*child)).filter_map(pid).collect();
        let mut ended = false;
        for orphan in orphans {
            // It is a child that nobody has waited for, so its number is still its own.
            let _ = rustix::process::kill_process(orphan, Signal::KILL);
            ended |= rustix::process::waitpid(Some(orphan), WaitOptions::empty()).is_ok();
        }
        if !ended {
            return;
        }
    }
}

fn pid(number: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(number).ok()?)
}

/// Last steps before this process becomes `program`:
///
/// 1. It ends with the worker.
/// 2. A session of its own: no terminal to speak to.
/// 3. No descriptor but the standard ones.
/// 4. No file but `program`, `read` and `write`, and nothing of `hidden`, wherever it lies; signals
///    and abstract sockets stay within, where the kernel knows how.
///
/// What the worker gave up before stays given up: privileges by set-uid programs, core files, the
/// system calls of `worker::only_commands`.
pub fn confine(reach: Reach<'_>, hidden: &[PathBuf]) -> Result<(), ConfineError> {
    let failed = |error: rustix::io::Errno| ConfineError::Landlock(error.to_string());
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed)?;
    // The worker made it the leader of a group already, in which case it cannot lead a session.
    let _ = rustix::process::setsid();
    super::vault::close_all_but_standard()
        .map_err(|error| ConfineError::Landlock(error.to_string()))?;
    let read: Vec<PathBuf> = reach.read.iter().cloned().chain([reach.program.to_owned()]).collect();
    restrict(rules(&read, reach.write, hidden))
}

/// What a command may read, with the system's programs, and write: without anything hidden. For the
/// worker before it is confined: no directory that it takes apart here can be looked at later.
pub fn beside(reach: Reach<'_>, hidden: &[PathBuf]) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let apart = |path: &PathBuf| {
        let touches = |real: &PathBuf| {
            hidden.iter().any(|secret| secret.starts_with(real) || real.starts_with(secret))
        };
        match std::fs::canonicalize(path).is_ok_and(|real| touches(&real)) {
            true => without(std::slice::from_ref(path), hidden),
            false => vec![path.clone()],
        }
    };
    let read = system().iter().chain(reach.read).flat_map(apart).collect();
    (read, reach.write.iter().flat_map(apart).collect())
}

/// Confines the worker, before it starts the first command, to what all of them together may touch
/// and to this program, which becomes them. A file that a command may touch can be replaced by
/// another while the worker runs, so for the worker it is the directory around it; each command is
/// confined to its own on top of that.
pub fn confine_worker<'a>(
    commands: impl IntoIterator<Item = Reach<'a>>,
    hidden: &[PathBuf],
) -> Result<(), ConfineError> {
    let (mut read, mut write) = (system(), Vec::new());
    for reach in commands {
        read.extend(reach.read.iter().map(|path| around(path)).chain([around(reach.program)]));
        write.extend(reach.write.iter().map(|path| around(path)));
    }
    let mut rules = rules(&read, &write, hidden);
    // Wherever it lies, and whatever lies there by now.
    rules.push((PathBuf::from("/proc/self/exe"), AccessFs::ReadFile | AccessFs::Execute));
    restrict(rules)
}

fn system() -> Vec<PathBuf> {
    SYSTEM.iter().map(PathBuf::from).collect()
}

/// A directory itself; of anything else, and of what is not there yet, the directory that holds it.
fn around(path: &Path) -> PathBuf {
    if path.is_dir() {
        return path.to_owned();
    }
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    real.parent().unwrap_or(Path::new("/")).to_owned()
}

fn rules(
    read: &[PathBuf],
    write: &[PathBuf],
    hidden: &[PathBuf],
) -> Vec<(PathBuf, BitFlags<AccessFs>)> {
    let run = AccessFs::from_read(ABI::V5) & !AccessFs::IoctlDev;
    // A device of its own would lead root's command to the disk below all files.
    let devices = AccessFs::MakeBlock | AccessFs::MakeChar | AccessFs::IoctlDev;
    let change = AccessFs::from_all(ABI::V5) & !(devices | AccessFs::Execute);
    let read = without(read, hidden).into_iter().map(|path| (path, run));
    let write = without(write, hidden).into_iter().map(|path| (path, change));
    let null = (PathBuf::from("/dev/null"), AccessFs::ReadFile | AccessFs::WriteFile);
    read.chain(write).chain([null]).collect()
}

fn restrict(rules: Vec<(PathBuf, BitFlags<AccessFs>)>) -> Result<(), ConfineError> {
    let failed = |error: landlock::RulesetError| ConfineError::Landlock(error.to_string());
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V2))
        .map_err(failed)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))
        .map_err(failed)?
        .scope(Scope::from_all(ABI::V6))
        .map_err(failed)?
        .create()
        .map_err(failed)?;
    for (path, access) in rules {
        let Ok(fd) = PathFd::new(&path) else { continue };
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(ABI::V5) };
        ruleset = ruleset.add_rule(PathBeneath::new(fd, access)).map_err(failed)?;
    }
    match ruleset.restrict_self().map_err(failed)?.ruleset {
        RulesetStatus::NotEnforced => Err(ConfineError::Partial),
        _ => Ok(()),
    }
}

/// The paths, by their real names, without anything that is hidden: a directory that holds a hidden
/// one is taken apart into what else is in it now.
fn without(paths: &[PathBuf], hidden: &[PathBuf]) -> Vec<PathBuf> {
    let mut left = Vec::new();
    let mut open: Vec<PathBuf> =
        paths.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect();
    while let Some(path) = open.pop() {
        if hidden.iter().any(|secret| path.starts_with(secret)) {
            continue;
        }
        if !hidden.iter().any(|secret| secret.starts_with(&path)) {
            left.push(path);
            continue;
        }
        let entries = std::fs::read_dir(&path).into_iter().flatten().filter_map(Result::ok);
        // A link needs no rule of its own; what it leads to is judged by its real name.
        let real = entries.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_symlink()));
        open.extend(real.map(|entry| entry.path()));
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worker_reaches_what_commands_may_and_never_what_is_hidden() {
        use super::super::filter::trial::{End, apart};
        let dir = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(dir.path()).unwrap();
        for path in ["state", "bin", "input", "output", "foreign"] {
            std::fs::create_dir(root.join(path)).unwrap();
        }
        for path in ["state/key", "bin/op", "bin/next", "input/file", "foreign/file"] {
            std::fs::write(root.join(path), "x").unwrap();
        }
        let hidden = [root.join("state")];
        let reads = |path: &str| std::fs::read(root.join(path)).is_ok();
        let writes = |path: &str| std::fs::write(root.join(path), "y").is_ok();

        let end = apart(|| {
            let (read, write) = ([root.join("input"), root.join("state")], [root.join("output")]);
            let reach = Reach { program: &root.join("bin/op"), read: &read, write: &write };
            if confine_worker([reach], &hidden).is_err() {
                return 255;
            }
            // A program that was replaced is still one.
            std::fs::rename(root.join("bin/next"), root.join("bin/op")).ok();
            let own = std::process::Command::new("/proc/self/exe").arg("--help").output();
            let can = [
                reads("input/file"),
                reads("bin/op"),
                writes("output/new"),
                own.is_ok_and(|own| own.status.success()),
                !reads("state/key"),
                !reads("foreign/file"),
                !writes("input/new"),
                !writes("bin/op"),
                !writes("foreign/new"),
                std::fs::read_dir(&root).is_err(),
            ];
            can.iter().position(|right| !right).map_or(0, |wrong| wrong as i32 + 1)
        });

        assert_eq!(end, End::Code(0));
    }

    #[test]
    fn what_is_hidden_is_left_out_of_whatever_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(dir.path()).unwrap();
        for path in ["a/state/proxyd", "a/other", "b"] {
            std::fs::create_dir_all(root.join(path)).unwrap();
        }
        std::fs::write(root.join("a/key"), "x").unwrap();
        std::os::unix::fs::symlink(root.join("a/state"), root.join("b/link")).unwrap();
        let hidden = [root.join("a/state"), root.join("a/key")];
        let left = |path: &str| {
            let mut left = without(&[root.join(path)], &hidden);
            left.sort();
            left
        };

        assert_eq!(left(""), [root.join("a/other"), root.join("b")]);
        assert_eq!(left("a"), [root.join("a/other")]);
        assert_eq!(left("b"), [root.join("b")]);
        for path in ["a/state", "a/state/proxyd", "a/key", "b/link", "none"] {
            assert!(left(path).is_empty(), "{path}");
        }
    }
}
