//! The `[sandbox]` table as limits that need no further checks.

use core::time::Duration;
use std::collections::BTreeMap;

/// What a sandbox of the environment is made of and may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxTable {
    pub root: Root,
    pub memory_bytes: u64,
    pub processes: u32,
    pub disk_bytes: u64,
    /// Whether the file itself names the limit: then a weaker one is not what it says.
    pub disk_named: bool,
    /// After this a tool call is killed, unless it asked for less.
    pub tool_timeout: Duration,
    /// After this without a call the sandbox is ended; its workspace stays.
    pub idle_timeout: Duration,
    pub packages: Packages,
    /// Shell commands that complete a template after its packages, in this order.
    pub setup: Vec<String>,
    pub mounts: Vec<Mount>,
    /// Refuse to start where a limit could only be enforced more weakly than named.
    pub limits_required: bool,
    /// The lowest Landlock ABI that will do; what the kernel has above it is applied too.
    pub landlock_floor: u32,
    /// Variables for every command, beside the placeholders.
    pub env: BTreeMap<String, String>,
}

/// What a sandbox sees as `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Root {
    /// The host's `/usr`, read-only.
    Host,
    /// A directory or an OCI layout on the host, by absolute path.
    Path(String),
}

/// Packages to install before the first command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packages {
    pub apt: Vec<String>,
    pub pip: Vec<String>,
    pub npm: Vec<String>,
    pub cargo: Vec<String>,
}

/// A directory of the host that sandboxes see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Absolute path on the host.
    pub source: String,
    /// Absolute path in the sandbox.
    pub target: String,
    pub read_only: bool,
}

impl Packages {
    pub fn is_empty(&self) -> bool {
        [&self.apt, &self.pip, &self.npm, &self.cargo].into_iter().all(Vec::is_empty)
    }
}

impl Default for SandboxTable {
    /// The limits of a file that says nothing: enough for a build, not for a runaway.
    fn default() -> Self {
        Self {
            root: Root::Host,
            memory_bytes: 2 << 30,
            processes: 256,
            disk_bytes: 4 << 30,
            disk_named: false,
            tool_timeout: Duration::from_secs(120),
            idle_timeout: Duration::from_secs(600),
            packages: Packages::default(),
            setup: Vec::new(),
            mounts: Vec::new(),
            limits_required: false,
            landlock_floor: 2,
            env: BTreeMap::new(),
        }
    }
}
