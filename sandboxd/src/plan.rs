//! Policy and workspace to [`SandboxPlan`]: what one sandbox will be, as plain data.
//!
//! Pure: no descriptor, no system call, no file is touched, so that tests need no privilege. The
//! zygote and [`crate::init`] do what the plan says, in their own order; what they add by
//! themselves (the directories of the root, `/proc`, `/dev`) stands there.

use std::path::{Component, Path, PathBuf};

use policies::{Root, SandboxTable};
use serde::{Deserialize, Serialize};

use crate::apart::Apart;

/// Where the workspace lies inside every sandbox.
pub const WORKSPACE: &str = "/workspace";
/// What belongs to the session beside its workspace.
const OF_SESSION: &str = "/mnt/session";
/// Where what a session was given to read lies inside every sandbox of it.
pub const UPLOADS: &str = ipc::sandbox::UPLOADS;
/// The home directory inside every sandbox: private, empty at first, gone with the sandbox.
pub const HOME: &str = "/home/agent";
/// The user, and its group, that commands run as inside.
pub const USER: &str = "agent";
/// The number of that user and group inside. The host knows it under another (see `zygote`).
pub const INSIDE_ID: u32 = 1000;
/// The resolver that every sandbox asks. Every address is local to a sandbox, so any would do;
/// this one is for documentation only (RFC 5737) and lies in nobody's network.
pub const RESOLVER: &str = "192.0.2.53";

/// Descriptors a command may have open: what a build or a browser wants, far below what one
/// sandbox would need to fill the host's file table.
const OPEN_FILES_MAX: u64 = 16_384;
/// Largest private `/tmp`, whatever the policy's memory: it is memory of the host.
const TMP_BYTES_MAX: u64 = 2 << 30;

/// One sandbox to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxPlan {
    /// The tree whose system directories are shown read-only: the host's `/`, or an image.
    pub root: PathBuf,
    pub hostname: String,
    /// What the policy names. The workspace comes later, by itself: see [`workspace`].
    pub mounts: Vec<Mount>,
    /// On the host: what neither the root nor a mount of the policy's may be, hold or lie in.
    pub apart: Apart,
    /// On the host: the directory that sandboxd's own workspaces are in.
    pub workspaces: Option<PathBuf>,
    /// On the host: the directory of templates, which a root may lie in although it is sandboxd's.
    pub templates: Option<PathBuf>,
    /// On the host: trees over the root's own directories, the highest first (`init::overlay`).
    pub layers: Vec<PathBuf>,
    /// A layer that the commands of this sandbox fill.
    pub build: Option<Mount>,
    /// On the host: what is shown as `trust::KEY_STORE`, if anything is.
    pub key_store: Option<PathBuf>,
    /// Written into the private root before anything runs.
    pub files: Vec<File>,
    /// Variables every command begins with; the caller adds the lease's.
    pub env: Vec<(String, String)>,
    pub limits: Limits,
    /// The lowest Landlock ABI that will do.
    pub landlock_floor: u32,
    /// Ports to listen on one by one where TPROXY is not to be had.
    pub ports: Vec<u16>,
}

/// A directory of the host that the sandbox sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// On the host, absolute.
    pub source: PathBuf,
    /// In the sandbox, absolute.
    pub target: PathBuf,
    pub read_only: bool,
    /// Device and inode that `source` must still have when it is mounted: what the caller showed
    /// it may use, not what somebody put in its place since. None: the policy names it, and it is
    /// judged when it is opened (see `crate::source`).
    pub identity: Option<(u64, u64)>,
}

/// A file that sandboxd makes up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub path: PathBuf,
    pub text: String,
}

/// What one command, or one sandbox, may use. Which of them hold for the whole sandbox and which
/// for each process depends on the host: the layers of a cell say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub memory_bytes: u64,
    pub processes: u64,
    /// Longest file that a command may write.
    pub file_bytes: u64,
    pub open_files: u64,
    /// Size of the private `/tmp`, `/dev/shm` and home directory, each.
    pub tmp_bytes: u64,
    pub cpu_seconds: Option<u64>,
    /// Whether those of memory and processes must hold for the whole sandbox.
    pub required: bool,
}

/// What the policy does not say about one sandbox.
#[derive(Clone, Debug)]
pub struct PlanFacts {
    pub hostname: String,
    /// `Policy::ports`, for hosts without TPROXY.
    pub ports: Vec<u16>,
}

/// Why a policy's sandbox cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("cannot use {path} in a sandbox: it must be absolute, without `.` and `..`")]
    Path { path: PathBuf },
    #[error("cannot mount at {target}: it would hide {hidden}, which sandboxd makes itself")]
    Reserved { target: PathBuf, hidden: &'static str },
    #[error("cannot mount twice at {target}")]
    Twice { target: PathBuf },
    #[error(
        "apt packages need a root of their own, an image or a directory: those of the host are the \
         host's"
    )]
    HostPackages,
    #[error(
        "limits are required, and disk can be limited for each file only, not for the whole \
         workspace: leave out `disk`, or `limits`"
    )]
    Limits,
}

/// The directory that becomes [`WORKSPACE`], and what it must still be when it is mounted.
pub fn workspace(path: &Path, identity: (u64, u64)) -> Mount {
    Mount {
        source: path.to_owned(),
        target: WORKSPACE.into(),
        read_only: false,
        identity: Some(identity),
    }
}

/// The directory that becomes [`UPLOADS`].
pub fn uploads(path: &Path, identity: (u64, u64)) -> Mount {
    let target = UPLOADS.into();
    Mount { target, read_only: true, ..workspace(path, identity) }
}

/// Says what a sandbox of this policy will be.
pub fn plan(table: &SandboxTable, facts: &PlanFacts) -> Result<SandboxPlan, PlanError> {
    check_means(table)?;
    let mut mounts: Vec<Mount> = Vec::new();
    for wanted in &table.mounts {
        let target = clean(Path::new(&wanted.target))?;
        check_target(&target)?;
        if mounts.iter().any(|mount| mount.target == target) {
            return Err(PlanError::Twice { target });
        }
        let source = clean(Path::new(&wanted.source))?;
        mounts.push(Mount { source, target, read_only: wanted.read_only, identity: None });
    }
    // A mount below another must come after it.
    mounts.sort_by_key(|mount| mount.target.components().count());
    let root = match &table.root {
        Root::Host => PathBuf::from("/"),
        Root::Path(path) => clean(Path::new(path))?,
    };
    let hostname: String = facts
        .hostname
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
        .take(63)
        .collect();
    Ok(SandboxPlan {
        root,
        files: files(&hostname),
        hostname,
        mounts,
        apart: Apart::default(),
        key_store: None,
        workspaces: None,
        templates: None,
        layers: Vec::new(),
        build: None,
        env: env(table),
        limits: limits(table),
        landlock_floor: table.landlock_floor,
        ports: facts.ports.clone(),
    })
}

/// Refuses what would silently be less than the policy says.
fn check_means(table: &SandboxTable) -> Result<(), PlanError> {
    if table.root == policies::Root::Host && !table.packages.apt.is_empty() {
        return Err(PlanError::HostPackages);
    }
    if table.limits_required && table.disk_named { Err(PlanError::Limits) } else { Ok(()) }
}

/// An absolute path without `.`, `..` and doubled slashes.
fn clean(path: &Path) -> Result<PathBuf, PlanError> {
    let plain = |c: Component| matches!(c, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(plain) {
        return Err(PlanError::Path { path: path.to_owned() });
    }
    Ok(path.components().collect())
}

/// Refuses a mount that would hide, or put foreign files into, what confines the sandbox.
fn check_target(target: &Path) -> Result<(), PlanError> {
    const OURS: &[&str] = &["/proc", "/dev", "/etc", "/sys", OF_SESSION];
    const WHOLE: &[&str] =
        &["/", "/usr", "/bin", "/sbin", "/lib", "/lib64", WORKSPACE, "/tmp", HOME];
    let inside = OURS.iter().find(|ours| target.starts_with(ours));
    let equal = WHOLE.iter().find(|whole| Path::new(whole).starts_with(target));
    match inside.or(equal) {
        Some(hidden) => Err(PlanError::Reserved { target: target.to_owned(), hidden }),
        None => Ok(()),
    }
}

fn limits(table: &SandboxTable) -> Limits {
    Limits {
        memory_bytes: table.memory_bytes,
        processes: table.processes.into(),
        file_bytes: table.disk_bytes,
        open_files: OPEN_FILES_MAX,
        tmp_bytes: (table.memory_bytes / 2).min(table.disk_bytes).min(TMP_BYTES_MAX),
        cpu_seconds: None,
        required: table.limits_required,
    }
}

/// The variables that every shell and runtime expects, then the policy's own.
fn env(table: &SandboxTable) -> Vec<(String, String)> {
    let base = [
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("HOME", HOME),
        ("USER", USER),
        ("LOGNAME", USER),
        ("SHELL", "/bin/bash"),
        ("LANG", "C.UTF-8"),
        ("TERM", "dumb"),
        ("TMPDIR", "/tmp"),
    ];
    let mut env: Vec<(String, String)> = base
        .into_iter()
        .filter(|(name, _)| !table.env.contains_key(*name))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    env.extend(table.env.iter().map(|(name, value)| (name.clone(), value.clone())));
    env
}

/// The whole generated part of `/etc`. Everything else there is shown from the root, by the list
/// in `init/root.rs`.
fn files(hostname: &str) -> Vec<File> {
    let id = INSIDE_ID;
    let passwd = format!(
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n\
         {USER}:x:{id}:{id}:agent:{HOME}:/bin/bash\n\
         nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    );
    let group = format!("root:x:0:\ntty:x:5:\n{USER}:x:{id}:\nnogroup:x:65534:\n");
    let hosts =
        format!("127.0.0.1 localhost {hostname}\n::1 localhost ip6-localhost ip6-loopback\n");
    // `use-vc` is not set: answers are small. One resolver, asked twice, then given up quickly,
    // because a name that policy does not list is refused at once.
    let resolv = format!("nameserver {RESOLVER}\noptions timeout:5 attempts:2\n");
    let nsswitch = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n\
                    networks: files\nprotocols: files\nservices: files\n";
    let texts = [
        ("/etc/passwd", passwd),
        ("/etc/group", group),
        ("/etc/hosts", hosts),
        ("/etc/resolv.conf", resolv),
        ("/etc/nsswitch.conf", nsswitch.to_owned()),
        ("/etc/hostname", format!("{hostname}\n")),
        ("/etc/host.conf", "multi on\n".to_owned()),
        ("/etc/shells", "/bin/sh\n/bin/bash\n".to_owned()),
        ("/etc/gai.conf", String::new()),
        ("/etc/machine-id", String::new()),
    ];
    texts.into_iter().map(|(path, text)| File { path: path.into(), text }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> PlanFacts {
        PlanFacts { hostname: "sbx_abc".into(), ports: vec![443] }
    }

    fn with_mount(source: &str, target: &str) -> Result<SandboxPlan, PlanError> {
        let mount =
            policies::Mount { source: source.into(), target: target.into(), read_only: true };
        let table = SandboxTable { mounts: vec![mount], ..SandboxTable::default() };
        plan(&table, &facts())
    }

    #[test]
    fn a_workspace_can_be_written_and_must_be_the_directory_that_was_shown() {
        let mount = workspace(Path::new("/state/ws"), (1, 2));

        assert_eq!(mount.target, Path::new(WORKSPACE));
        assert!(!mount.read_only);
        assert_eq!(mount.identity, Some((1, 2)));
    }

    #[test]
    fn a_host_name_is_what_is_legal_of_the_environments() {
        let plan = plan(&SandboxTable::default(), &facts()).unwrap();

        assert_eq!(plan.hostname, "sbxabc");
        assert_eq!(plan.mounts, []);
    }

    #[test]
    fn mounts_that_would_hide_what_confines_are_refused() {
        for target in
            ["/", "/usr", "/proc", "/proc/sys", "/etc/ssl", "/dev/shm", "/home", "/tmp", UPLOADS]
        {
            let outcome = with_mount("/data", target);

            assert!(matches!(outcome, Err(PlanError::Reserved { .. })), "{target}: {outcome:?}");
        }
        assert!(with_mount("/data", "/data").is_ok());
        assert!(with_mount("/data", "/workspace/data").is_ok());
    }

    #[test]
    fn what_this_version_cannot_do_is_refused_and_not_left_out() {
        let required = SandboxTable { limits_required: true, ..SandboxTable::default() };
        let limits = SandboxTable { disk_named: true, ..required.clone() };

        let mut packages = policies::Packages::default();
        packages.apt.push("jq".into());
        let of_host = SandboxTable { packages, ..SandboxTable::default() };
        let of_root = SandboxTable {
            root: policies::Root::Path("/srv/roots/debian".into()),
            ..of_host.clone()
        };

        assert_eq!(plan(&limits, &facts()), Err(PlanError::Limits));
        assert!(plan(&required, &facts()).unwrap().limits.required);
        assert_eq!(plan(&of_host, &facts()), Err(PlanError::HostPackages));
        assert!(plan(&of_root, &facts()).is_ok());
    }

    #[test]
    fn paths_that_climb_or_are_relative_are_refused() {
        for (source, target) in [("data", "/data"), ("/a/../etc", "/data"), ("/data", "data")] {
            let outcome = with_mount(source, target);

            assert!(matches!(outcome, Err(PlanError::Path { .. })), "{source} {target}");
        }
    }

    #[test]
    fn a_variable_of_the_policy_replaces_ours() {
        let mut table = SandboxTable::default();
        table.env.insert("LANG".into(), "de_DE.UTF-8".into());

        let plan = plan(&table, &facts()).unwrap();

        let values: Vec<_> = plan.env.iter().filter(|(name, _)| name == "LANG").collect();
        assert_eq!(values, [&("LANG".to_owned(), "de_DE.UTF-8".to_owned())]);
    }
}
