//! What this host offers: makes a real sandbox, once, and says what confined it.

use ipc::daemon::SelfExec;
use ipc::sandbox::Layer;

use crate::zygote::{Identities, Zygote};

/// What a host was found to offer.
#[derive(Clone, Debug)]
pub struct HostFacts {
    pub layers: Vec<Layer>,
    /// What is weaker here than in the best case, in words.
    pub notes: Vec<String>,
    /// `user` or `system`.
    pub mode: &'static str,
    pub landlock_abi: u32,
    /// Every TCP port reaches proxyd; else only those that the policy names.
    pub every_port: bool,
}

/// Why there can be no sandbox on this host. Exit status 77.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct ProbeError {
    pub step: String,
    pub text: String,
    /// The one command or container flag that changes it.
    pub hint: String,
}

/// Starts a zygote of its own, probes, and ends it: for `doctor`. Blocking, well under a second.
pub fn host(exec: &SelfExec) -> Result<HostFacts, ProbeError> {
    let _ = exec;
    todo!()
}

/// Probes with a zygote that is already there. Blocking; before or outside the runtime.
pub fn with(zygote: &Zygote) -> Result<HostFacts, ProbeError> {
    let _ = zygote;
    todo!()
}
