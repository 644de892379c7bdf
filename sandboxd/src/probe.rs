//! What this host offers: makes a real sandbox, once, and says what confined it.
//!
//! Nothing is concluded from a version or a setting: the probe makes a cell as any other, with all
//! its namespaces, mounts and sockets, and confines a process in it. What failed names the remedy.

use std::os::fd::{AsFd, OwnedFd};

use ipc::daemon::SelfExec;
use ipc::sandbox::Layer;

use crate::cell::CellError;
use crate::plan::{Limits, SandboxPlan};
use crate::zygote::message::{Failure, Order, Progress, Report};
use crate::zygote::{Identities, Zygote};

/// Where a range of host uids begins, and how long it is, unless the configuration says otherwise.
pub const UIDS_FIRST: u32 = 200_000;
pub const UIDS_COUNT: u32 = 65_536;

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
    /// Something ran out at this moment, which says nothing about what the host offers.
    pub passing: bool,
}

/// Starts a zygote of its own, probes, and ends it: for `doctor`. Blocking, well under a second.
pub fn host(exec: &SelfExec) -> Result<HostFacts, ProbeError> {
    let identities = Identities::detect(UIDS_FIRST, UIDS_COUNT);
    let zygote = Zygote::start(exec, identities).map_err(|error| ProbeError {
        step: "zygote".to_owned(),
        text: error.to_string(),
        hint: "sandboxd executes itself through /proc/self/exe: /proc must be mounted".to_owned(),
        passing: false,
    })?;
    with(&zygote)
}

/// Probes with a zygote that is already there. Blocking; before the runtime.
pub fn with(zygote: &Zygote) -> Result<HostFacts, ProbeError> {
    if zygote.identities() == Identities::Own && rustix::process::geteuid().is_root() && whole() {
        return Err(ProbeError {
            step: "ids".to_owned(),
            text: "cannot make a sandbox: root without the capabilities to map ids would run \
                   commands as root"
                .to_owned(),
            hint: "start sandboxd as an ordinary user, or with CAP_SETUID, CAP_SETGID and \
                   CAP_SYS_ADMIN (or CAP_CHOWN and CAP_DAC_OVERRIDE)"
                .to_owned(),
            passing: false,
        });
    }
    let layers = attempt(zygote).map_err(explain)?;
    let detail = |name: &str| {
        layers.iter().find(|layer| layer.name == name).map_or("", |layer| layer.detail.as_str())
    };
    let every_port = detail("network-namespace").contains("every TCP port");
    let mut notes = Vec::new();
    if !every_port {
        notes.push(format!("network: {}", detail("network-namespace")));
    }
    let landlock_abi = crate::sys::landlock::abi();
    if landlock_abi < 6 {
        notes.push(format!(
            "landlock abi {landlock_abi}: signals and abstract sockets between the commands of one \
             sandbox are not restricted (abi 6, Linux 6.12)"
        ));
    }
    notes.push(format!("limits: {}", detail("limits")));
    let mode = match zygote.identities() {
        Identities::Range { .. } => "system",
        Identities::Own => {
            notes.push("user mode: sandboxes run under this user's own uid".to_owned());
            "user"
        }
    };
    Ok(HostFacts { layers, notes, mode, landlock_abi, every_port })
}

/// Whether this process lives in a user namespace with every id, as the host's own.
fn whole() -> bool {
    std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| map.contains("4294967295"))
}

/// Makes a cell, confines a process in it, lets go of it.
fn attempt(zygote: &Zygote) -> Result<Vec<Layer>, CellError> {
    let socket = zygote.make_blocking(&scratch())?;
    let layers = loop {
        match receive(&socket)? {
            Progress::Egress { .. } => {}
            Progress::Ready { layers, .. } => break layers,
            Progress::Failed(failure) => return Err(CellError::Setup(failure)),
            _ => return Err(CellError::Lost),
        }
    };
    ordered(&socket, &Order::Enter { workspace: None, uploads: None })?;
    ordered(&socket, &Order::Rehearse)?;
    Ok(layers)
}

/// Gives an order and waits until it has been done.
fn ordered(socket: &OwnedFd, order: &Order) -> Result<(), CellError> {
    let (ours, theirs) = ipc::fd::pair()?;
    ipc::fd::send(socket, order, &[theirs.as_fd()]).map_err(CellError::of_zygote)?;
    drop(theirs);
    loop {
        match receive(&ours)? {
            Report::Started => {}
            Report::Entered => return Ok(()),
            Report::Exited { code: Some(0), .. } => return Ok(()),
            Report::Failed(failure) => return Err(CellError::Setup(failure)),
            _ => return Err(CellError::Lost),
        }
    }
}

fn receive<T: serde::de::DeserializeOwned>(socket: &OwnedFd) -> Result<T, CellError> {
    Ok(ipc::fd::receive(socket).map_err(CellError::of_zygote)?.0)
}

/// A sandbox without a workspace.
fn scratch() -> SandboxPlan {
    SandboxPlan {
        root: "/".into(),
        hostname: "probe".to_owned(),
        key_store: None,
        mounts: Vec::new(),
        apart: crate::apart::Apart::default(),
        files: Vec::new(),
        env: Vec::new(),
        limits: Limits {
            memory_bytes: 256 << 20,
            processes: 16,
            file_bytes: 1 << 20,
            open_files: 64,
            tmp_bytes: 1 << 20,
            cpu_seconds: None,
            required: false,
        },
        landlock_floor: 1,
        ports: Vec::new(),
        workspaces: None,
        templates: None,
        layers: Vec::new(),
        build: None,
    }
}

/// From a failed step to the sentence and the remedy.
fn explain(error: CellError) -> ProbeError {
    let text = error.to_string();
    let (step, errno) = match error {
        CellError::Setup(Failure { step, errno, .. }) => (step, errno),
        _ => ("zygote".to_owned(), None),
    };
    let hint = hint(&step, errno, &|path| std::fs::read_to_string(path).ok()).to_owned();
    let meaning = meaning(&step, errno).map(|m| format!(" ({m})")).unwrap_or_default();
    let passing = errno.is_some_and(passes);
    ProbeError { step, text: format!("{text}{meaning}"), hint, passing }
}

/// Whether an error number means that something ran out which others may give back: descriptors,
/// memory, processes.
fn passes(errno: i32) -> bool {
    use rustix::io::Errno;
    const PASSING: &[Errno] =
        &[Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN, Errno::INTR, Errno::NOBUFS];
    PASSING.contains(&Errno::from_raw_os_error(errno))
}

/// What an error number says at this step, where its own words mislead.
fn meaning(step: &str, errno: Option<i32>) -> Option<&'static str> {
    use rustix::io::Errno;
    match Errno::from_raw_os_error(errno?) {
        // namespaces(7): a limit in /proc/sys/user is reached.
        Errno::NOSPC if step == "clone" => {
            Some("no more namespaces may be made: user.max_user_namespaces or its like")
        }
        Errno::MFILE => Some("this process may open no more descriptors: RLIMIT_NOFILE"),
        Errno::NFILE => Some("the host may open no more files: fs.file-max"),
        _ => None,
    }
}

/// The one thing to do. The settings are asked only for what to advise, never for what is so.
fn hint(step: &str, errno: Option<i32>, setting: &dyn Fn(&str) -> Option<String>) -> &'static str {
    let is = |path: &str, value: &str| setting(path).is_some_and(|text| text.trim() == value);
    if is("/proc/sys/user/max_user_namespaces", "0") {
        return "sysctl -w user.max_user_namespaces=15000";
    }
    if is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        return "sysctl -w kernel.unprivileged_userns_clone=1";
    }
    if is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        return "install the AppArmor profile of the package, or sysctl -w \
                kernel.apparmor_restrict_unprivileged_userns=0";
    }
    let refused = errno == Some(rustix::io::Errno::PERM.raw_os_error());
    let descriptors = errno == Some(rustix::io::Errno::MFILE.raw_os_error());
    match step {
        _ if descriptors => "raise the limit of open files: ulimit -n 65536, or LimitNOFILE=",
        "clone" | "id map" | "private mounts" | "take mounts" => {
            "in a container: --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
             (or run sandboxd on the host)"
        }
        "root" | "/proc" if refused => {
            "in a container: --security-opt systempaths=unconfined, or procMount: Unmasked with \
             hostUsers: false"
        }
        "landlock" => "boot a kernel with Landlock: 5.19 or newer, lsm= must list landlock",
        "seccomp" => "boot a kernel with CONFIG_SECCOMP_FILTER",
        "owner map" => "put the workspace on a file system with idmapped mounts (ext4, xfs, btrfs)",
        _ => "see `cleanhands doctor`, and the log of sandboxd for the failed step",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint_with(step: &str, errno: i32, set: (&str, &str)) -> &'static str {
        hint(step, Some(errno), &|path| (path == set.0).then(|| set.1.to_owned()))
    }

    #[test]
    fn a_setting_that_forbids_is_named_with_its_command() {
        let userns = hint_with("clone", 28, ("/proc/sys/user/max_user_namespaces", "0\n"));
        let clone = hint_with("clone", 1, ("/proc/sys/kernel/unprivileged_userns_clone", "0\n"));
        let apparmor = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns";
        let profile = hint_with("loopback", 1, (apparmor, "1\n"));

        assert_eq!(userns, "sysctl -w user.max_user_namespaces=15000");
        assert_eq!(clone, "sysctl -w kernel.unprivileged_userns_clone=1");
        assert!(profile.contains("AppArmor"), "{profile}");
    }

    #[test]
    fn without_such_a_setting_the_step_says_which_container_flag_is_missing() {
        assert!(hint_with("clone", 1, ("", "")).contains("seccomp=unconfined"));
        assert!(hint_with("clone", 24, ("", "")).contains("ulimit -n"));
        assert!(meaning("clone", Some(28)).is_some_and(|m| m.contains("max_user_namespaces")));
        assert_eq!(meaning("root", Some(28)), None);
        assert!(passes(24) && passes(12) && !passes(1) && !passes(28));
        assert!(hint_with("root", 1, ("", "")).contains("systempaths=unconfined"));
        assert!(hint_with("landlock", 0, ("", "")).contains("lsm="));
    }
}
