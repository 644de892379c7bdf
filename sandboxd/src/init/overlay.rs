//! The layers of a template over the root's own directories, and in a build the one that is filled.
//!
//! Each directory of [`LAYERED`] becomes an overlay of the layers' and the root's, mounted in the
//! cell's own user namespace. What it is made of is attached to the new root while it is mounted
//! and detached again: the kernel keeps copies of its own, and no other path leads there.
//!
//! In a build the upper layer begins with empty directories for those of the root's that packages
//! go into. The kernel cannot copy these up: their owners have no number here.

use std::ffi::CString;
use std::io::{Error, Result};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags, UnmountFlags};

use super::root::{Source, detach_at, directory, inside, named};
use crate::plan::SandboxPlan;
use crate::sys::mount::{NO_DEV, NO_SUID, READ_ONLY};
use crate::templates::seal::{UPPER, WORK};

/// What layers may add to.
pub const LAYERED: &[&str] = &["usr", "opt"];
/// Where parts lie while overlays are made of them.
const LOWER: &str = ".lower";
const BUILD: &str = ".build";
/// Directories that are made to be written into: a full system's `/usr/local` has hundreds, an
/// image's `/usr` thousands.
const SKELETON_MAX: usize = 100_000;

/// The parts of one overlay.
#[derive(Debug)]
struct Stack {
    name: &'static str,
    /// The highest first.
    lowers: Vec<OwnedFd>,
}

/// All overlays of a root that is to be.
#[derive(Debug, Default)]
pub struct Stacks {
    stacks: Vec<Stack>,
    build: Option<OwnedFd>,
    /// Where the policy's own mounts go, in the new root.
    targets: Vec<PathBuf>,
    /// Of all that packages go into: the root's own directories there have owners without a
    /// number here.
    whole: bool,
}

/// Takes what the overlays are made of: the layers of the plan, and from `sources` the root's own
/// directories. `build` holds the layer to be filled.
pub fn take(
    plan: &SandboxPlan,
    sources: &mut Vec<Source>,
    build: Option<OwnedFd>,
) -> Result<Stacks> {
    let mut stacks = Vec::new();
    if plan.layers.is_empty() && build.is_none() {
        return Ok(Stacks::default());
    }
    let whole = plan.root != Path::new("/");
    for name in LAYERED {
        let mut lowers = Vec::new();
        for layer in &plan.layers {
            lowers.extend(part(layer, name)?);
        }
        let own = sources.iter().position(|source| source.target == Path::new(name));
        lowers.extend(own.map(|at| sources.remove(at).tree));
        if !lowers.is_empty() || build.is_some() {
            stacks.push(Stack { name, lowers });
        }
    }
    let targets = plan.mounts.iter().map(|mount| inside(&mount.target)).collect();
    Ok(Stacks { stacks, build, targets, whole })
}

fn part(layer: &Path, name: &str) -> Result<Option<OwnedFd>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fail = |error: Errno| named(layer, error.into());
    let top = rustix::fs::openat(CWD, layer, flags | OFlags::NOFOLLOW, Mode::empty());
    let top = top.map_err(fail)?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match rustix::fs::openat2(&top, name, flags, Mode::empty(), resolve) {
        Ok(found) => {
            let tree = detach_at(&found, Path::new(""), READ_ONLY | NO_SUID | NO_DEV);
            tree.map(Some).map_err(|error| named(layer, error))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(fail(error)),
    }
}

impl Stacks {
    /// Mounts them in the new root, which is the working directory.
    pub fn mount(self) -> Result<()> {
        if self.stacks.is_empty() {
            return Ok(());
        }
        directory(Path::new(LOWER))?;
        let building = self.build.is_some();
        if let Some(build) = self.build {
            directory(Path::new(BUILD))?;
            attach(&build, Path::new(BUILD))?;
        }
        for stack in self.stacks {
            stack.mount(building, self.whole, &self.targets)?;
        }
        if building {
            detach(Path::new(BUILD))?;
        }
        std::fs::remove_dir(LOWER)
    }
}

impl Stack {
    fn mount(self, building: bool, whole: bool, mounts: &[PathBuf]) -> Result<()> {
        let target = Path::new(self.name);
        directory(target)?;
        let inner: Vec<&Path> =
            mounts.iter().filter_map(|mount| mount.strip_prefix(target).ok()).collect();
        if let ([only], false, true) = (&self.lowers[..], building, inner.is_empty()) {
            return attach(only, target);
        }
        let mut lowers = Vec::new();
        for (at, tree) in self.lowers.iter().enumerate() {
            let path = Path::new(LOWER).join(at.to_string());
            directory(&path)?;
            attach(tree, &path)?;
            lowers.push(path);
        }
        let root = lowers.last().cloned();
        if !inner.is_empty() {
            lowers.push(places(&inner)?);
        }
        let mut options = "userxattr".to_owned();
        let nothing = Path::new(LOWER).join("nothing");
        if lowers.is_empty() {
            directory(&nothing)?;
        }
        let shown: Vec<String> = match &lowers[..] {
            [] => vec![nothing.display().to_string()],
            some => some.iter().map(|path| path.display().to_string()).collect(),
        };
        options += &format!(",lowerdir={}", shown.join(":"));
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
        if building {
            let [upper, work] = [UPPER, WORK].map(|part| Path::new(BUILD).join(part).join(target));
            directory(&upper)?;
            directory(&work)?;
            if let Some(root) = root {
                skeleton(&root, &upper, whole)?;
            }
            options += &format!(",upperdir={},workdir={}", upper.display(), work.display());
        } else {
            flags |= MountFlags::RDONLY;
        }
        let text = CString::new(options).map_err(Error::other)?;
        rustix::mount::mount("overlay", target, "overlay", flags, text.as_c_str())
            .map_err(|error| refused(target, error, building))?;
        for path in &lowers {
            detach(path)?;
        }
        match std::fs::remove_dir(nothing) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

fn refused(target: &Path, error: Errno, building: bool) -> Error {
    let why = if building {
        "sandboxd's state must lie on a file system that an overlay can write to, as ext4, xfs, \
         btrfs and tmpfs are, and nothing may be mounted below the root's directory"
    } else {
        "this kernel must let user namespaces mount overlays (Linux 5.11), and nothing may be \
         mounted below the root's directory"
    };
    named(&PathBuf::from(format!("overlay on /{}", target.display())), {
        let error = Error::from(error);
        Error::new(error.kind(), format!("{error}: {why}"))
    })
}

/// Directories for what is mounted below an overlay, as the lowest of its layers: an overlay that
/// cannot be written to takes none later, and one that can would keep them.
fn places(inner: &[&Path]) -> Result<PathBuf> {
    let path = Path::new(LOWER).join("places");
    directory(&path)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", &path, "tmpfs", flags, c"mode=0755")
        .map_err(|e| named(&path, e.into()))?;
    for place in inner {
        directory(&path.join(place))?;
    }
    Ok(path)
}

fn attach(tree: &OwnedFd, path: &Path) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree, "", CWD, path, flags).map_err(|e| named(path, e.into()))
}

fn detach(path: &Path) -> Result<()> {
    rustix::mount::unmount(path, UnmountFlags::DETACH).map_err(|e| named(path, e.into()))?;
    std::fs::remove_dir(path).map_err(|e| named(path, e))
}

/// Directories of the root's `/usr`, or `/opt`, that package tools write into, as empty ones.
fn skeleton(root: &Path, upper: &Path, whole: bool) -> Result<()> {
    let mut left = SKELETON_MAX;
    if whole {
        return copy(root, upper, &mut left);
    }
    for name in directories(root) {
        directory(&upper.join(&name))?;
    }
    copy(&root.join("local"), &upper.join("local"), &mut left)?;
    for python in directories(&root.join("lib")) {
        if !python.to_string_lossy().starts_with("python3") {
            continue;
        }
        for packages in ["site-packages", "dist-packages"] {
            let name = Path::new("lib").join(&python).join(packages);
            if root.join(&name).is_dir() {
                directory(&upper.join(name))?;
            }
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path, left: &mut usize) -> Result<()> {
    for name in directories(from) {
        if *left == 0 {
            return Err(Error::other("the root has too many directories to build over it"));
        }
        *left -= 1;
        directory(&to.join(&name))?;
        copy(&from.join(&name), &to.join(&name), left)?;
    }
    Ok(())
}

/// The directories in one, without links; of one that cannot be read, none.
fn directories(path: &Path) -> Vec<PathBuf> {
    let Ok(listing) = std::fs::read_dir(path) else { return Vec::new() };
    let is_directory =
        |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    listing.flatten().filter(is_directory).map(|entry| entry.file_name().into()).collect()
}
