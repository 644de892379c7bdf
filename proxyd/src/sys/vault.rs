//! What confines the vault child, and memory for its keys.
//!
//! The child reads its key, then gives up everything but its own directory and the one socket it
//! was born with: no other file, no network, no new program. If any step cannot be taken it ends.

use std::path::Path;
use std::ptr::NonNull;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use seccompiler::{SeccompAction, SeccompFilter, TargetArch};

use crate::vault::VaultError;

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Size of the mapping of a key: one page of any machine up to this size.
const PAGE_BYTES: usize = 4096;

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
    restrict_calls()
}

/// Landlock: files below `directory`, those to read, and nothing else. ABI 2 is required;
/// newer kernels add device ioctls, and keep abstract sockets and signals inside. On older ones
/// nothing is missing for that: [`allowed_calls`] has no ioctl, no socket and no kill.
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

/// Seccomp: what SQLite, the allocator and the one socket need. Anything else fails with EPERM:
/// sockets, connections, new programs, other processes' memory, new namespaces among it.
fn restrict_calls() -> Result<(), VaultError> {
    let arch = if cfg!(target_arch = "x86_64") { TargetArch::x86_64 } else { TargetArch::aarch64 };
    let rules = ALLOWED_CALLS.iter().map(|call| (*call, Vec::new())).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        SeccompAction::Allow,
        arch,
    )
    .map_err(|error| cannot("seccomp", error))?;
    let program: seccompiler::BpfProgram =
        filter.try_into().map_err(|error| cannot("seccomp", error))?;
    seccompiler::apply_filter(&program).map_err(|error| cannot("seccomp", error))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the vault's seccomp filter knows x86-64 and aarch64 only");

/// What the vault may ask of the kernel.
const ALLOWED_CALLS: &[i64] = &[
    // The socket to proxyd, the log, the files of the vault.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_lseek,
    libc::SYS_fcntl,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_fchmod,
    libc::SYS_geteuid,
    libc::SYS_getuid,
    libc::SYS_getpid,
    libc::SYS_gettid,
    // Memory, time, randomness.
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_brk,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    // Signals and the end.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_tgkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Spellings of the same calls that only x86-64 has.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
];

/// A key in a page of its own that is left out of core files and, where the memory-lock limit
/// allows it, never swapped out. Wiped and unmapped on drop.
pub struct LockedKey {
    page: NonNull<[u8; KEY_BYTES]>,
    locked: bool,
}

// SAFETY: the page belongs to this value alone, and access to it follows the borrow of the value.
unsafe impl Send for LockedKey {}

impl LockedKey {
    /// A key of zeros.
    pub fn new() -> Result<Self, VaultError> {
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
        let page = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                PAGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|error| cannot("memory for a key", error))?;
        let page: NonNull<[u8; KEY_BYTES]> =
            NonNull::new(page.cast()).expect("mmap never yields a null page");
        // SAFETY: the range is the mapping just made; locking does not change its contents.
        let locked = unsafe { rustix::mm::mlock(page.as_ptr().cast(), PAGE_BYTES) }.is_ok();
        // SAFETY: the range is the mapping just made; the advice only leaves it out of core files.
        unsafe { rustix::mm::madvise(page.as_ptr().cast(), PAGE_BYTES, Advice::LinuxDontDump) }
            .map_err(|error| cannot("memory for a key", error))?;
        Ok(Self { page, locked })
    }

    /// Whether the page is locked in memory.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        // SAFETY: the mapping lives as long as `self`, is large enough, aligned, and was zeroed by
        // the kernel; only `bytes_mut` writes to it, under an exclusive borrow.
        unsafe { self.page.as_ref() }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8; KEY_BYTES] {
        // SAFETY: as for `bytes`, and the borrow is exclusive.
        unsafe { self.page.as_mut() }
    }
}

impl Drop for LockedKey {
    fn drop(&mut self) {
        use zeroize::Zeroize;
        self.bytes_mut().zeroize();
        // SAFETY: the range is the mapping made in `new`, which nothing refers to any more.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{Mode, OFlags, ResolveFlags};

    use super::*;

    #[test]
    fn a_key_starts_as_zeros_and_holds_what_is_written() {
        let mut key = LockedKey::new().unwrap();

        assert_eq!(key.bytes(), &[0; KEY_BYTES]);
        key.bytes_mut()[31] = 7;
        assert_eq!(key.bytes()[31], 7);
    }

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
