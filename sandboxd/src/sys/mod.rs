//! The only place of sandboxd for unsafe code and for the crates that wrap the kernel: one file
//! for each facility.

#![allow(unsafe_code)]

pub mod descriptors;
pub mod landlock;
pub mod mount;
pub mod process;
pub mod seccomp;
pub mod sockets;
pub mod supervision;

use std::path::Path;

use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets};

/// What only the zygote needs: mapping ids, and mounts whose owners are mapped.
const ZYGOTE_ONLY: CapabilitySet =
    CapabilitySet::SETUID.union(CapabilitySet::SETGID).union(CapabilitySet::SYS_ADMIN);

fn give_up_capabilities() -> std::io::Result<()> {
    let held = rustix::thread::capabilities(None)?;
    let left = CapabilitySets {
        effective: held.effective.difference(ZYGOTE_ONLY),
        permitted: held.permitted.difference(ZYGOTE_ONLY),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::clear_ambient_capability_set()?;
    Ok(rustix::thread::set_capabilities(None, left)?)
}

/// Confines this process for the rest of its life: no capability that the zygote alone needs, no
/// core dump, no ptrace by its own user, no file
/// but those below `read` and `write`. Call it after the zygote was started and before the runtime:
/// Landlock holds for the calling thread and those it starts. Paths that do not exist are passed
/// over. Returns what to tell the operator.
pub fn confine_self(read: &[&Path], write: &[&Path]) -> std::io::Result<String> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    give_up_capabilities()?;
    let existing = |paths: &'static [&'static str]| -> Vec<&'static Path> {
        paths.iter().map(Path::new).filter(|path| path.exists()).collect()
    };
    let mut rights = landlock::Rights {
        read: existing(&["/usr", "/lib", "/lib64", "/proc"]),
        devices: existing(&["/dev/null", "/dev/urandom"]),
        // Ending a cell is a signal to a process outside of this domain.
        signals: true,
        ..landlock::Rights::default()
    };
    rights.read.extend(read.iter().filter(|path| path.exists()));
    rights.write.extend(write.iter().filter(|path| path.exists()));
    landlock::domain(1, &rights)
        .map_err(|error| std::io::Error::other(error.to_string()))?
        .enter()?;
    Ok(format!("landlock abi {}, undumpable", landlock::abi()))
}
