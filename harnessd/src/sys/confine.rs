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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set in the process that the test starts from itself: confinement is for good.
    const CHILD: &str = "HARNESSD_CONFINE_TEST_CHILD";

    #[test]
    fn a_confined_process_reaches_its_state_and_nothing_else() {
        if let Ok(dir) = std::env::var(CHILD) {
            return confined(Path::new(&dir));
        }
        let dir = tempfile::tempdir().unwrap();
        for name in ["state", "policies"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(name).join("file"), "x").unwrap();
        }
        std::fs::write(dir.path().join("vault"), "x").unwrap();

        let name = "sys::confine::tests::a_confined_process_reaches_its_state_and_nothing_else";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--test-threads", "1"])
            .env(CHILD, dir.path())
            .output()
            .unwrap();

        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    }

    fn confined(dir: &Path) {
        let (state, policies) = (dir.join("state"), dir.join("policies"));

        confine_self(&[&state], &[&policies]).unwrap();

        std::fs::write(state.join("new"), "x").unwrap();
        std::fs::read(policies.join("file")).unwrap();
        std::fs::read_dir(&policies).unwrap();
        let denied = |outcome: std::io::Result<()>, what: &str| {
            let kind = outcome.expect_err(what).kind();
            assert_eq!(kind, std::io::ErrorKind::PermissionDenied, "{what}");
        };
        denied(std::fs::read(dir.join("vault")).map(drop), "read outside");
        denied(std::fs::write(dir.join("vault"), "y"), "write outside");
        denied(std::fs::write(policies.join("file"), "y"), "write a policy");
        denied(std::fs::rename(state.join("file"), policies.join("moved")), "move out");
        denied(std::fs::read("/proc/self/environ").map(drop), "read the environment");
        let behavior = rustix::process::dumpable_behavior().unwrap();
        assert_eq!(behavior, rustix::process::DumpableBehavior::NotDumpable);
    }
}
