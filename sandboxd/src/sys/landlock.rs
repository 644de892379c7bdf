//! Landlock: file-system rights, device ioctls, signals and abstract sockets.
//!
//! All rights of the highest ABI that both the kernel and the crate know are handled, as a hard
//! requirement: what cannot be enforced is an error, never less. No TCP rules: they are by port
//! and would break `localhost`; the empty network namespace carries that.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, Scope,
};

/// The highest ABI that the crate's rights are written for.
const KNOWN_ABI_MAX: u32 = 10;
/// `LANDLOCK_CREATE_RULESET_VERSION`, landlock_create_ruleset(2).
const VERSION_FLAG: libc::c_uint = 1;

/// Why a process could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    #[error("the kernel offers Landlock ABI {found}, {needed} is required")]
    Below { found: u32, needed: u32 },
    #[error("Landlock: {0}")]
    Ruleset(#[from] landlock::RulesetError),
    #[error("Landlock: cannot open {path}: {text}")]
    Path { path: String, text: String },
    #[error("Landlock reports that not every right is enforced")]
    Partial,
}

/// What a domain allows; everything else is refused.
#[derive(Clone, Debug, Default)]
pub struct Rights<'a> {
    /// Read and execute everything below.
    pub read: Vec<&'a Path>,
    /// Everything, below; but no device nodes.
    pub write: Vec<&'a Path>,
    /// Read, write and control devices below.
    pub devices: Vec<&'a Path>,
    /// Read and write, but neither make nor remove, files below.
    pub update: Vec<&'a Path>,
    /// Whether processes outside may be signalled.
    pub signals: bool,
}

/// A set of rules that may still be added to.
pub struct Rules {
    created: RulesetCreated,
    write: BitFlags<AccessFs>,
    abi: ABI,
}

/// A set of rules, ready to be entered, by other processes too.
#[derive(Debug)]
pub struct Domain(OwnedFd);

/// The ABI of this kernel; 0: no Landlock.
pub fn abi() -> u32 {
    // SAFETY: with this flag the call reads no memory and returns a number (or an error).
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0usize,
            VERSION_FLAG,
        )
    };
    u32::try_from(version).unwrap_or(0)
}

/// Makes a domain of these rights, at the kernel's highest ABI, which must be at least `floor`.
pub fn domain(floor: u32, rights: &Rights<'_>) -> Result<Domain, LandlockError> {
    rules(floor, rights)?.done()
}

/// The same, to be added to.
pub fn rules(floor: u32, rights: &Rights<'_>) -> Result<Rules, LandlockError> {
    let found = abi();
    if found < floor.max(1) {
        return Err(LandlockError::Below { found, needed: floor.max(1) });
    }
    let abi = ABI::from(found.min(KNOWN_ABI_MAX).cast_signed());
    let all = AccessFs::from_all(abi);
    let read = AccessFs::from_read(abi) | (all & unix_sockets());
    let write = all & !(AccessFs::MakeChar | AccessFs::MakeBlock);
    let update =
        all & (AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile | AccessFs::Truncate);
    let devices = update | (all & BitFlags::from(AccessFs::IoctlDev));
    let mut scope = Scope::from_all(abi);
    if rights.signals {
        scope &= !BitFlags::from(Scope::Signal);
    }
    let mut ruleset =
        Ruleset::default().set_compatibility(CompatLevel::HardRequirement).handle_access(all)?;
    if !scope.is_empty() {
        ruleset = ruleset.scope(scope)?;
    }
    let mut created = ruleset.create()?;
    let groups = [
        (&rights.read, read),
        (&rights.write, write),
        (&rights.devices, devices),
        (&rights.update, update),
    ];
    for (paths, access) in groups {
        for path in paths {
            created = allow(created, path, access, abi)?;
        }
    }
    Ok(Rules { created, write, abi })
}

/// Connecting to sockets that have a path, a right since ABI 9: wherever files may be read.
fn unix_sockets() -> BitFlags<AccessFs> {
    AccessFs::from_all(ABI::V9) & !AccessFs::from_all(ABI::V8)
}

fn allow(
    created: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
    abi: ABI,
) -> Result<RulesetCreated, LandlockError> {
    let fail = |text: String| LandlockError::Path { path: path.display().to_string(), text };
    let meta = std::fs::metadata(path).map_err(|e| fail(e.to_string()))?;
    let access = if meta.is_dir() { access } else { access & AccessFs::from_file(abi) };
    let fd = PathFd::new(path).map_err(|e| fail(e.to_string()))?;
    Ok(created.add_rule(PathBeneath::new(fd, access))?)
}

impl Rules {
    /// Allows everything below a directory, but no device nodes.
    pub fn add_writable(mut self, path: &Path) -> Result<Self, LandlockError> {
        self.created = allow(self.created, path, self.write, self.abi)?;
        Ok(self)
    }

    pub fn done(self) -> Result<Domain, LandlockError> {
        // There is a descriptor wherever there are rights to handle, which ABI 1 has.
        Option::<OwnedFd>::from(self.created).map(Domain).ok_or(LandlockError::Partial)
    }
}

impl Domain {
    /// Confines the calling thread, and what it starts, for good. Sets no-new-privileges.
    pub fn enter(&self) -> std::io::Result<()> {
        enter(self.0.as_fd())
    }
}

impl AsFd for Domain {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Confines the calling thread by a domain that another process made. Every right was a hard
/// requirement when it was made, so that the kernel enforces all of it or refuses.
pub fn enter(domain: BorrowedFd<'_>) -> std::io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: the call reads no memory; the descriptor is open for as long as it lasts.
    let entered = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, domain.as_raw_fd(), 0) };
    if entered == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
