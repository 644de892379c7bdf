//! What the kernel shall refuse this process: being looked into, leaving a core, foreign files.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

/// Why the process could not be confined; it must not serve then.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error("cannot make the process undumpable: {0}")]
    Dumpable(rustix::io::Errno),
    #[error("cannot forbid core files: {0}")]
    Core(rustix::io::Errno),
    #[error("cannot name {path} in a Landlock rule: {reason}")]
    Path { path: PathBuf, reason: String },
    #[error("Landlock: {0}")]
    Landlock(String),
    #[error("Landlock is not fully enforced: the kernel must offer it with ABI 2 or newer")]
    Partial,
}

/// Keeps other processes of this user from reading our memory (ptrace(2), `/proc/PID/mem`) and the
/// kernel from writing it to disk.
pub fn hide_memory() -> Result<(), ConfineError> {
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .map_err(ConfineError::Dumpable)?;
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).map_err(ConfineError::Core)
}

/// Raises the number of descriptors to what the process may have: a thousand sandboxes hold two
/// sockets each before their first connection. Fewer only means that later accepts wait.
pub fn raise_descriptors() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
}

/// How many descriptors this process may have.
pub fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // Where there is no limit, the limits of each lease are the ones that count.
    limit.current.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Confines the calling thread, and all threads it starts later, to these files. `read` and
/// `write` are directories or files; those that do not exist are left out.
pub fn confine_files(read: &[PathBuf], write: &[PathBuf]) -> Result<(), ConfineError> {
    confine(read, write, BitFlags::EMPTY)
}

/// The same for a process that only reads files. Where the kernel knows how (ABI 6), it signals no
/// other process and connects to no abstract socket either.
pub fn confine_reader(read: &[PathBuf]) -> Result<(), ConfineError> {
    confine(read, &[], Scope::from_all(ABI::V6))
}

fn confine(
    read: &[PathBuf],
    write: &[PathBuf],
    scopes: BitFlags<Scope>,
) -> Result<(), ConfineError> {
    // ABI 2 is the floor of the project; what newer kernels know is handled on top of it, so
    // that it is refused too, and must be fully enforced as well.
    let failed = |error: landlock::RulesetError| ConfineError::Landlock(error.to_string());
    let handled = AccessFs::from_all(ABI::V5);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V2))
        .map_err(failed)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(handled)
        .map_err(failed)?;
    if !scopes.is_empty() {
        rules = rules.scope(scopes).map_err(failed)?;
    }
    let mut rules = rules.create().map_err(failed)?;
    for (paths, access) in [(read, AccessFs::from_read(ABI::V5)), (write, handled)] {
        for path in paths {
            let Some(fd) = open(path)? else { continue };
            let allowed =
                if path.is_dir() { access } else { access & AccessFs::from_file(ABI::V5) };
            // Programs are never executed: the vault child was started before.
            let allowed = allowed & !AccessFs::Execute;
            rules = rules.add_rule(PathBeneath::new(fd, allowed)).map_err(failed)?;
        }
    }
    let status = rules.restrict_self().map_err(failed)?;
    // Partly enforced means that the kernel lacks rights newer than the floor: the floor itself was
    // a hard requirement above.
    if status.ruleset == RulesetStatus::NotEnforced || !status.no_new_privs {
        return Err(ConfineError::Partial);
    }
    Ok(())
}

fn open(path: &Path) -> Result<Option<PathFd>, ConfineError> {
    if !path.exists() {
        return Ok(None);
    }
    PathFd::new(path)
        .map(Some)
        .map_err(|error| ConfineError::Path { path: path.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confined_thread_reaches_only_the_files_it_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let [read, write, foreign] = ["read", "write", "foreign"].map(|name| dir.path().join(name));
        for path in [&read, &write, &foreign] {
            std::fs::create_dir(path).unwrap();
            std::fs::write(path.join("file"), "x").unwrap();
        }

        // Landlock holds for the thread, so the other tests stay free.
        let outcome = std::thread::spawn(move || {
            confine_files(std::slice::from_ref(&read), std::slice::from_ref(&write)).unwrap();
            [
                std::fs::read(read.join("file")).is_ok(),
                std::fs::write(read.join("file"), "y").is_ok(),
                std::fs::write(write.join("new"), "y").is_ok(),
                std::fs::read(foreign.join("file")).is_ok(),
                std::fs::read_dir(&foreign).is_ok(),
                std::fs::File::create(foreign.join("new")).is_ok(),
                std::process::Command::new("/bin/true").status().is_ok(),
            ]
        });

        assert_eq!(outcome.join().unwrap(), [true, false, true, false, false, false, false]);
    }
}
