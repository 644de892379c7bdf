//! harnessd confines itself before it reads a single request: its memory is closed to others of
//! the same user, and it can open nothing but its own state and what it must read.
//!
//! In user mode all daemons share one uid; without this a flaw in the loop could read proxyd's
//! vault file (design, decision 15). It fails closed: no confinement, no start.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};

/// The least that is accepted: file-system rights with re-linking across directories, Linux 5.19.
const FLOOR: ABI = ABI::V2;
/// The most that is asked for; what the kernel lacks above the floor is left out.
const BEST: ABI = ABI::V7;

/// Why harnessd could not confine itself.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error("cannot close the process's memory to others: {0}")]
    Undumpable(std::io::Error),
    #[error("cannot confine to {path}: {why}")]
    Path { path: PathBuf, why: String },
    #[error("cannot confine with Landlock: {0}")]
    Landlock(#[from] landlock::RulesetError),
    #[error("the kernel has no Landlock, or it is not enabled: add `landlock` to `lsm=`")]
    Absent,
}

/// Confines this thread and all that it starts: call it before any other thread exists.
pub fn confine_self(write: &[&Path], read: &[&Path]) -> Result<(), ConfineError> {
    use rustix::process::DumpableBehavior::NotDumpable;
    rustix::process::set_dumpable_behavior(NotDumpable)
        .map_err(|e| ConfineError::Undumpable(e.into()))?;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(FLOOR))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(BEST))?
        .scope(Scope::from_all(BEST))?
        .create()?;
    for (paths, rights) in [(write, AccessFs::from_all(BEST)), (read, AccessFs::from_read(BEST))] {
        for path in paths {
            let fail = |why: String| ConfineError::Path { path: path.to_path_buf(), why };
            let fd = PathFd::new(path).map_err(|e| fail(e.to_string()))?;
            let directory = std::fs::metadata(path).map_err(|e| fail(e.to_string()))?.is_dir();
            let rights = if directory { rights } else { rights & AccessFs::from_file(BEST) };
            ruleset = ruleset.add_rule(PathBeneath::new(fd, rights))?;
        }
    }
    match ruleset.restrict_self()?.ruleset {
        RulesetStatus::NotEnforced => Err(ConfineError::Absent),
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
    }
}
