//! What is put on every command before its first instruction.
//!
//! The order is bound where a step takes away what another needs: the bounding set is emptied while
//! there are capabilities, and whoever has none may load neither Landlock nor seccomp before
//! no-new-privileges. These two are free: the filter allows Landlock's calls, which only take
//! rights away, so a process that waits for its workspace can be filtered before the rules are
//! known.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::overlay;
use crate::plan::{HOME, Limits, Mount, SandboxPlan, WORKSPACE};
use crate::sys::landlock::{self, Domain, LandlockError, Rights, Rules};
use crate::sys::seccomp::{Filter, Subject};

/// What confines every command of a cell, but for the rules of where it may write.
#[derive(Clone)]
pub struct Restraints {
    pub limits: Limits,
    /// Memory is limited for the sandbox as a whole, so not for each process.
    pub memory_by_group: bool,
    pub filter: Filter,
}

/// Prepared once for a cell, applied to each command.
pub struct Confinement {
    restraints: Restraints,
    domain: Domain,
}

/// A step that failed, and why.
#[derive(Debug)]
pub struct Broken {
    pub step: &'static str,
    pub errno: Option<i32>,
    pub text: String,
}

impl Broken {
    pub fn at(step: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self { step, errno: super::root::errno_of(&error), text: error.to_string() }
    }
}

/// The rules of the cell's own tree; it has no workspace yet.
pub fn rules(plan: &SandboxPlan) -> Result<Rules, LandlockError> {
    let mut write: Vec<&Path> = ["/tmp", "/dev/shm", HOME].into_iter().map(Path::new).collect();
    // What lies in the workspace is not there yet, and allowed with it.
    let elsewhere = |mount: &&Mount| !mount.read_only && !mount.target.starts_with(WORKSPACE);
    write.extend(plan.mounts.iter().filter(elsewhere).map(|mount| &*mount.target));
    let layered = |name: &&str| Path::new("/").join(name);
    let filled: Vec<_> = match plan.build {
        Some(_) => overlay::LAYERED.iter().map(layered).collect(),
        None => Vec::new(),
    };
    write.extend(filled.iter().map(|path| &**path));
    let rights = Rights {
        read: vec![Path::new("/")],
        write,
        devices: vec![Path::new("/dev")],
        update: vec![Path::new("/proc")],
        signals: false,
    };
    landlock::rules(plan.landlock_floor, &rights)
}

impl Restraints {
    /// Confines the calling process but for Landlock and seccomp.
    pub fn apply(&self) -> Result<(), Broken> {
        // 1. Limits: a hard one is raised again by nobody without a capability on the host.
        let mut limits = self.limits;
        if self.memory_by_group {
            limits.memory_bytes = u64::MAX;
        }
        limit(&limits).map_err(|e| Broken::at("limits")(e.into()))?;
        // 2. The bounding set: dropping from it needs a capability, so before 4.
        empty_bounding_set().map_err(|e| Broken::at("bounding set")(e.into()))?;
        // 3. No program gives more than its caller has; without a capability, Landlock and seccomp
        //    ask for this.
        rustix::thread::set_no_new_privs(true)
            .map_err(|e| Broken::at("no-new-privileges")(e.into()))?;
        // 4. No capability at all, in any set.
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::clear_ambient_capability_set()
            .and_then(|()| rustix::thread::set_capabilities(None, none))
            .map_err(|e| Broken::at("capabilities")(e.into()))
    }

    /// System calls. After all of [`Restraints::apply`]; Landlock may come before or after.
    /// Gives the listener of supervised calls, which the guard is to have.
    pub fn filter(&self, subject: Subject) -> Result<Option<OwnedFd>, Broken> {
        self.filter.load(subject).map_err(Broken::at("seccomp"))
    }
}

impl Confinement {
    /// The workspace is there now, if there is one.
    pub fn complete(
        restraints: Restraints,
        rules: Rules,
        workspace: bool,
    ) -> Result<Self, LandlockError> {
        let rules = if workspace { rules.add_writable(Path::new(WORKSPACE))? } else { rules };
        Ok(Self { restraints, domain: rules.done()? })
    }

    /// Confines the calling process. What must be done between the steps is done by `between`, when
    /// no capability is left and system calls are not filtered yet.
    pub fn apply(
        &self,
        subject: Subject,
        between: impl FnOnce() -> Result<(), Broken>,
    ) -> Result<Option<OwnedFd>, Broken> {
        self.restraints.apply()?;
        self.domain.enter().map_err(Broken::at("landlock"))?;
        between()?;
        self.restraints.filter(subject)
    }

    /// For a process that was confined by the restraints before this was known.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }
}

fn empty_bounding_set() -> rustix::io::Result<()> {
    for number in 0..64 {
        match rustix::thread::remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(
            1 << number,
        )) {
            Ok(()) => {}
            // The first number that this kernel does not know.
            Err(rustix::io::Errno::INVAL) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn limit(limits: &Limits) -> rustix::io::Result<()> {
    let values = [
        // Counted for the cell's user namespace, so for the whole sandbox.
        (Resource::Nproc, limits.processes),
        // Private writable memory, for each process.
        (Resource::Data, limits.memory_bytes),
        (Resource::Fsize, limits.file_bytes),
        (Resource::Nofile, limits.open_files),
        // No memory of a command is written anywhere. Not 0: a core_pattern that is a pipe, as
        // systemd-coredump's, ignores that and would let the host parse a command's memory; 1 makes
        // the kernel give up either way (core(5)).
        (Resource::Core, 1),
        // Locked memory is the host's: what libraries that hold keys need, no more.
        (Resource::Memlock, 8 << 20),
        (Resource::Msgqueue, 819_200),
        (Resource::Nice, 0),
        (Resource::Rtprio, 0),
    ];
    for (resource, value) in values {
        bound(resource, value)?;
    }
    match limits.cpu_seconds {
        Some(seconds) => bound(Resource::Cpu, seconds),
        None => Ok(()),
    }
}

/// Lowers a limit. One that is lower already stays: raising needs a privilege on the host.
fn bound(resource: Resource, value: u64) -> rustix::io::Result<()> {
    let hard = rustix::process::getrlimit(resource).maximum;
    let value = Some(hard.map_or(value, |hard| hard.min(value)));
    setrlimit(resource, Rlimit { current: value, maximum: value })
}
