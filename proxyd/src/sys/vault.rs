//! What confines the vault child.
//!
//! The child reads its key, then gives up everything but its own directory and the sockets it was
//! born with: no other file, no network, no new program. If any step cannot be taken it ends.

use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::process::{DumpableBehavior, Resource, Rlimit};

use super::calls;
use crate::vault::VaultError;

fn cannot(what: &str, error: impl std::fmt::Display) -> VaultError {
    VaultError::Failed(format!("cannot confine the vault process: {what}: {error}"))
}

/// First steps, before any key is read.
///
/// 1. Undumpable: no core file, and no process of the same user may trace it or read its memory
///    (ptrace(2), proc(5)).
/// 2. No core file even so.
/// 3. Signals that tell proxyd to end leave it alone: it ends by itself when proxyd has gone and
///    nothing is lost by its end.
/// 4. Nothing that it executes could gain privileges; seccomp and Landlock need this too.
/// 5. Files it makes are its own.
/// 6. Nothing of what proxyd had open stays open here but standard input, output and error.
///
/// One more stays open if it is named: the socket to a second worker.
pub fn harden(also: Option<u32>) -> Result<(), VaultError> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|error| cannot("undumpable", error))?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
        .map_err(|error| cannot("core limit", error))?;
    super::worker::leave_ends_to_parent().map_err(|error| cannot("signals", error))?;
    rustix::thread::set_no_new_privs(true).map_err(|error| cannot("no new privileges", error))?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    match also {
        Some(number) => {
            if number > 3 {
                close_range(3, number - 1)?;
            }
            close_range(number.saturating_add(1).max(3), u32::MAX)
        }
        None => close_all_but_standard(),
    }
}

/// Closes everything but standard input, output and error. Only before anything was opened here.
pub fn close_all_but_standard() -> Result<(), VaultError> {
    close_range(3, u32::MAX)
}

fn close_range(first: u32, last: u32) -> Result<(), VaultError> {
    // SAFETY: the callers are single-threaded and have opened nothing that they still use within
    // the range, so no owned descriptor is closed; close_range(2) touches no memory.
    let outcome = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0u32) };
    match outcome {
        0 => Ok(()),
        _ => Err(cannot("close_range", std::io::Error::last_os_error())),
    }
}

/// Last step before serving: only `directory`, what is to be read and these system calls remain.
pub fn confine<'a>(
    directory: &Path,
    read: impl IntoIterator<Item = &'a Path>,
) -> Result<(), VaultError> {
    restrict_files(directory, read)?;
    calls::vault().load().map_err(|error| cannot("seccomp", error))
}

/// Landlock: files below `directory`, those to read, and nothing else. ABI 2 is required;
/// newer kernels add device ioctls, and keep abstract sockets and signals inside. On older ones
/// nothing is missing for that: [`calls::vault`] has no ioctl, no socket and no kill.
fn restrict_files<'a>(
    directory: &Path,
    read: impl IntoIterator<Item = &'a Path>,
) -> Result<(), VaultError> {
    let fail = |error: &dyn std::fmt::Display| cannot("Landlock", error);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V2))
        .map_err(|error| fail(&error))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))
        .map_err(|error| fail(&error))?
        .scope(Scope::from_all(ABI::V6))
        .map_err(|error| fail(&error))?
        .create()
        .map_err(|error| fail(&error))?
        .add_rule(PathBeneath::new(
            PathFd::new(directory).map_err(|error| fail(&error))?,
            AccessFs::from_all(ABI::V5) & !(AccessFs::Execute | AccessFs::IoctlDev),
        ))
        .map_err(|error| fail(&error))?;
    for path in read {
        let path = PathFd::new(path).map_err(|error| fail(&error))?;
        let beneath = PathBeneath::new(path, AccessFs::ReadFile | AccessFs::ReadDir);
        rules = rules.add_rule(beneath).map_err(|error| fail(&error))?;
    }
    let status = rules.restrict_self().map_err(|error| fail(&error))?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(cannot("Landlock", "this kernel does not enforce it")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{Mode, OFlags, ResolveFlags};

    use super::*;

    fn open_below(directory: &Path) -> rustix::io::Result<OwnedFd> {
        let (place, flags) = (OFlags::PATH | OFlags::DIRECTORY, OFlags::RDONLY);
        let place = rustix::fs::open(directory, place, Mode::empty())?;
        rustix::fs::openat2(&place, "kept", flags, Mode::empty(), ResolveFlags::BENEATH)
    }

    /// What a confined thread can still do. Both restrictions hold for the calling thread alone
    /// here, because the child that they are made for has no other.
    fn confined(directory: &Path, policies: &Path) -> Vec<(&'static str, bool)> {
        let parent = rustix::process::getppid().unwrap();
        rustix::thread::set_no_new_privs(true).unwrap();
        confine(directory, [policies]).unwrap();
        let own = directory.join("file");
        vec![
            ("write own files", std::fs::write(&own, b"x").is_ok()),
            ("read own files", std::fs::read(&own).is_ok()),
            ("remove own files", std::fs::remove_file(&own).is_ok()),
            ("open below a directory", open_below(directory).is_ok()),
            ("read policies", std::fs::read(policies.join("dev.toml")).is_ok()),
            ("write policies", std::fs::write(policies.join("dev.toml"), b"x").is_ok()),
            ("read other files", std::fs::read("/etc/passwd").is_ok()),
            ("write elsewhere", std::fs::write(directory.join("../other"), b"x").is_ok()),
            ("list directories", std::fs::read_dir("/").is_ok()),
            ("open internet sockets", std::net::TcpListener::bind("127.0.0.1:0").is_ok()),
            ("open unix sockets", std::os::unix::net::UnixDatagram::unbound().is_ok()),
            ("start programs", std::process::Command::new("/bin/true").spawn().is_ok()),
            ("start threads", std::thread::Builder::new().spawn(|| ()).is_ok()),
            ("signal others", rustix::process::test_kill_process(parent).is_ok()),
        ]
    }

    #[test]
    fn a_confined_process_keeps_its_directory_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("vault");
        let policies = dir.path().join("policies");
        std::fs::create_dir(&directory).unwrap();
        std::fs::create_dir(&policies).unwrap();
        std::fs::write(policies.join("dev.toml"), b"").unwrap();
        std::fs::write(directory.join("kept"), b"").unwrap();

        let can = std::thread::spawn(move || confined(&directory, &policies)).join().unwrap();

        for (what, possible) in can {
            let own = [
                "write own files",
                "read own files",
                "remove own files",
                "open below a directory",
                "read policies",
            ];
            let own = own.contains(&what);
            assert_eq!(possible, own, "{what}");
        }
        assert!(std::fs::read("/etc/passwd").is_ok(), "the restriction left its thread");
    }
}
