//! The cell's file tree: a tmpfs that shows little of the host, most of it read-only.
//!
//! Sources are taken as detached mounts first, while the host's tree is still visible and the
//! process still owns what sandboxd owns; then the new root is built over a directory of the old
//! one and entered. The old one is in this process's reach until the workspace was taken from it,
//! which may be much later. Every mount is nosuid; all but devices nodev.

use std::ffi::OsString;
use std::io::{Error, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};

use super::host::Host;
use super::overlay::{self, Stacks};
use crate::apart::Apart;
use crate::plan::{self, HOME, SandboxPlan, UPLOADS, WORKSPACE};
use crate::source::{self, Extent, Refusal};
use crate::sys::mount::{Attributes, NO_DEV, NO_EXEC, NO_SUID, READ_ONLY, set_attributes};
use crate::trust::KEY_STORE;

/// Directories of the root that hold programs; what is a symbolic link there is one here.
const SYSTEM: &[&str] = &["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// The same of a root that is not the host's, whose own `/opt` is nobody's.
const SYSTEM_ELSEWHERE: &[&str] = &["opt"];

/// What is shown of the root's `/etc`. Nothing here may hold a secret or name the host's users:
/// no package manager's or git's configuration (tokens), no `ssl/private`.
const ETC: &[&str] = &[
    // Which of several programs a name stands for.
    "alternatives",
    // The dynamic linker's cache and directories.
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    // Trust stores, as Debian, Arch and Red Hat lay them out, without directories of private keys.
    "ca-certificates.conf",
    "ca-certificates/extracted",
    "ssl/certs",
    "ssl/openssl.cnf",
    "pki/ca-trust",
    "pki/java",
    "pki/tls/certs",
    "pki/tls/cert.pem",
    "pki/tls/openssl.cnf",
    "crypto-policies",
    // Numbers and names that programs look up.
    "protocols",
    "services",
    "rpc",
    "networks",
    "ethertypes",
    "mime.types",
    "magic",
    // The time zone and the distribution.
    "localtime",
    "timezone",
    "os-release",
    "debian_version",
    "redhat-release",
    "lsb-release",
    // What Maven does not start without, and which modules PHP loads. No settings: those of Maven
    // hold passwords.
    "maven/m2.conf",
    "maven/logging",
    "php.d",
    // Terminals, keyboards, fonts.
    "terminfo",
    "inputrc",
    "fonts",
];
/// Runtimes whose own directory carries a version: `java-17-openjdk`, `python3.11`, `perl`.
const ETC_PREFIXES: &[&str] = &["java", "python", "perl"];
/// The same, of each version of PHP: which modules it loads, but not `php.ini` or what servers use.
const ETC_PHP: &[&str] = &["mods-available", "cli/conf.d"];

/// Devices that every program may use; none reaches hardware.
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom", "tty"];
const DEVICE_LINKS: &[(&str, &str)] = &[
    ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
    ("dev/ptmx", "pts/ptmx"),
];
/// What of `/proc` speaks of the host, or to it, whoever may open it.
const PROC_HIDDEN: &[&str] = &["kcore", "keys", "sysrq-trigger", "timer_list", "latency_stats"];

/// Directories that exist in every host and may be covered while the new root is built.
const STAGES: &[&str] = &["/tmp", "/run", "/var"];
/// The root holds directories, generated files and installed ones (a CA bundle twice or so).
const ROOT_OPTIONS: &std::ffi::CStr = c"mode=0755,size=32m,nr_inodes=4096";
/// Files in the private `/tmp`, `/dev/shm` and home directory, each: a large checkout of a project
/// with its dependencies.
const SCRATCH_INODES: u64 = 1_000_000;

/// How often a file of the root is opened again when the kernel asks for that: each mount that is
/// made somewhere at that moment is a reason to.
const OPEN_TRIES_MAX: u32 = 1000;

/// Something of the host, taken as a detached mount.
#[derive(Debug)]
pub struct Source {
    pub(super) tree: OwnedFd,
    /// Below the new root, without the leading slash.
    pub(super) target: PathBuf,
    pub(super) directory: bool,
}

/// What of a root's system directories is a link.
#[derive(Debug)]
struct Link {
    target: PathBuf,
    text: PathBuf,
}

/// Everything the new root will show of the old one.
#[derive(Debug)]
pub struct Sources {
    sources: Vec<Source>,
    links: Vec<Link>,
    stacks: Stacks,
}

/// Keeps mounts here from reaching the host's. The host's later ones reach here, and above all its
/// unmounts: a cell that waits for its workspace keeps no file system of the host in use.
pub fn separate() -> Result<()> {
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    Ok(rustix::mount::mount_change("/", flags)?)
}

/// Takes what the plan shows of the host. `given` are mounts that the zygote took already.
pub fn take(plan: &SandboxPlan, given: Vec<(PathBuf, OwnedFd)>) -> Result<Sources> {
    let stacks = Stacks::default();
    let mut taken = Sources { sources: Vec::new(), links: Vec::new(), stacks };
    check_root(&plan.root)?;
    let root = open_root_of(plan)?;
    for name in SYSTEM.iter().chain(SYSTEM_ELSEWHERE.iter().filter(|_| !is_host(plan))) {
        taken.system(&root, Path::new(name))?;
    }
    for name in etc_entries(&plan.root) {
        taken.system(&root, &Path::new("etc").join(name))?;
    }
    for device in DEVICES {
        let path = Path::new("/dev").join(device);
        let source = detach(&path, NO_SUID | NO_EXEC)?;
        taken.sources.push(Source { tree: source, target: inside(&path), directory: false });
    }
    if let Some(path) = &plan.key_store {
        let tree = detach(path, READ_ONLY | NO_SUID | NO_DEV | NO_EXEC)?;
        let target = inside(Path::new(KEY_STORE));
        taken.sources.push(Source { tree, target, directory: false });
    }
    let mut given = given;
    let mut tree_of = |mount: &plan::Mount| {
        let at = given.iter().position(|(target, _)| *target == mount.target);
        match at {
            Some(at) => Ok(given.swap_remove(at).1),
            None => detach_checked(mount, &plan.apart),
        }
    };
    let build = plan.build.as_ref().map(&mut tree_of).transpose()?;
    taken.stacks = overlay::take(plan, &mut taken.sources, build)?;
    for mount in &plan.mounts {
        let tree = tree_of(mount)?;
        taken.sources.push(Source { tree, target: inside(&mount.target), directory: true });
    }
    Ok(taken)
}

/// What is no root at all would give sandboxes in which nothing can run.
pub fn check_root(root: &Path) -> Result<()> {
    let fail = |text: &str| Err(Error::other(format!("{}: {text}", root.display())));
    if !SYSTEM.iter().any(|name| root.join(name).is_dir()) {
        return fail("it has none of the directories that programs are in");
    }
    Ok(())
}

/// The entries of [`ETC`], [`ETC_PREFIXES`] and [`ETC_PHP`] that may exist.
fn etc_entries(root: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> = ETC.iter().map(PathBuf::from).collect();
    let Ok(listing) = std::fs::read_dir(root.join("etc")) else { return entries };
    for entry in listing.flatten() {
        let name = entry.file_name();
        let named = |prefix: &&str| name.to_string_lossy().starts_with(*prefix);
        if ETC_PREFIXES.iter().any(named) {
            entries.push(name.into());
        }
    }
    let versions = std::fs::read_dir(root.join("etc/php")).into_iter().flatten().flatten();
    for version in versions {
        let version = Path::new("php").join(version.file_name());
        entries.extend(ETC_PHP.iter().map(|name| version.join(name)));
    }
    entries
}

impl Sources {
    /// A directory, file or link of the root, shown at the same place; what is absent is absent.
    fn system(&mut self, root: &OwnedFd, name: &Path) -> Result<()> {
        let target = name.to_owned();
        let found = match open_in(root, name, OFlags::PATH | OFlags::NOFOLLOW) {
            Ok(found) => found,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => return Ok(()),
            Err(error) => return Err(named(name, error.into())),
        };
        match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
            FileType::Symlink => {
                let text = rustix::fs::readlinkat(&found, "", Vec::new())?.into_bytes();
                let text = OsString::from_vec(text).into();
                self.links.push(Link { target, text });
            }
            kind @ (FileType::Directory | FileType::RegularFile) => {
                let tree = detach_at(&found, Path::new(""), READ_ONLY | NO_SUID | NO_DEV)
                    .map_err(|e| named(name, e))?;
                let directory = kind == FileType::Directory;
                self.sources.push(Source { tree, target, directory });
            }
            _ => {}
        }
        Ok(())
    }
}

/// A root to open files in.
pub fn open_root(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|e| named(path, e.into()))
}

/// The root of a plan, judged where it is not the host's own.
pub fn open_root_of(plan: &SandboxPlan) -> Result<OwnedFd> {
    // A template is sandboxd's own, and its path was never a policy's.
    let ours = plan.templates.as_ref().is_some_and(|folder| plan.root.starts_with(folder));
    if is_host(plan) || ours {
        return open_root(&plan.root);
    }
    let opened = source::open(&plan.root, &plan.apart, Extent::Programs);
    opened.map_err(|refusal| refused(&plan.root, refusal))
}

fn is_host(plan: &SandboxPlan) -> bool {
    plan.root == Path::new("/")
}

fn refused(path: &Path, refusal: Refusal) -> Error {
    match refusal {
        Refusal::Io(error) => named(path, error),
        judged @ Refusal::Judged { .. } => Error::other(judged),
    }
}

/// Opens what a program of this root would find at `path`: the links of an image lead to nothing
/// outside of the image.
pub fn open_in(root: &OwnedFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let mut tries = 0;
    loop {
        let flags = flags | OFlags::CLOEXEC;
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            // Somebody mounted or renamed something, anywhere, while a link led upward.
            Err(Errno::AGAIN) if tries < OPEN_TRIES_MAX => tries += 1,
            other => return other,
        }
    }
}

/// Opens the source of a mount, after checking that it is still what the caller showed, or that a
/// policy may name it.
pub fn open_checked(mount: &plan::Mount, apart: &Apart) -> Result<OwnedFd> {
    if mount.identity.is_none() {
        let opened = source::open(&mount.source, apart, Extent::Whole);
        return opened.map_err(|refusal| refused(&mount.source, refusal));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(&mount.source, flags, Mode::empty())
        .map_err(|e| named(&mount.source, e.into()))?;
    checked(mount, directory)
}

pub(super) fn checked(mount: &plan::Mount, directory: OwnedFd) -> Result<OwnedFd> {
    let stat = rustix::fs::fstat(&directory)?;
    if mount.identity.is_some_and(|identity| identity != (stat.st_dev, stat.st_ino)) {
        let text = format!("{} is another directory than before", mount.source.display());
        return Err(Error::other(text));
    }
    Ok(directory)
}

/// Takes one mount of a plan. The zygote does this where owners are mapped, which needs its
/// privileges.
pub fn detach_checked(mount: &plan::Mount, apart: &Apart) -> Result<OwnedFd> {
    detach_source(mount, &open_checked(mount, apart)?)
}

pub(super) fn detach_source(mount: &plan::Mount, directory: &OwnedFd) -> Result<OwnedFd> {
    let read_only = if mount.read_only { READ_ONLY } else { 0 };
    detach_at(directory, Path::new(""), NO_SUID | NO_DEV | read_only)
        .map_err(|e| named(&mount.source, e))
}

/// Takes a path, with all mounts below it, as a detached mount with these attributes.
fn detach(path: &Path, set: u64) -> Result<OwnedFd> {
    detach_at(CWD, path, set).map_err(|e| named(path, e))
}

/// The same below a directory; with an empty path, what `at` itself refers to.
pub(super) fn detach_at(at: impl AsFd, path: &Path, set: u64) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = rustix::mount::open_tree(at, path, flags)?;
    set_attributes(&tree, Attributes { set, recursive: true, ..Attributes::default() })?;
    Ok(tree)
}

pub(super) fn named(path: &Path, error: Error) -> Error {
    Error::new(error.kind(), Named { path: path.to_owned(), error })
}

/// The kernel's error number, also where a path was added.
pub fn errno_of(error: &Error) -> Option<i32> {
    let inner = || error.get_ref()?.downcast_ref::<Named>()?.error.raw_os_error();
    error.raw_os_error().or_else(inner)
}

/// An error of the kernel's and the path it was about.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}", path.display())]
pub struct Named {
    path: PathBuf,
    pub error: Error,
}

/// The same path, below a directory.
pub fn inside(path: &Path) -> PathBuf {
    path.strip_prefix("/").unwrap_or(path).to_owned()
}

/// Builds the new root, in the working directory. Returns the root's own file system, writable for
/// whoever holds this descriptor and read-only for everybody else.
pub fn build(plan: &SandboxPlan, sources: Sources, host: &mut Host) -> Result<OwnedFd> {
    let stage = STAGES
        .iter()
        .find(|stage| Path::new(stage).is_dir())
        .ok_or_else(|| Error::other("the host has neither /tmp nor /run nor /var"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", *stage, "tmpfs", flags, ROOT_OPTIONS)?;
    rustix::process::chdir(*stage)?;
    let private = rustix::mount::open_tree(
        CWD,
        ".",
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )?;
    let mut sources = sources;
    let workspace = inside(Path::new(WORKSPACE));
    let inner = |source: &mut Source| source.target.starts_with(&workspace);
    host.later = sources.sources.extract_if(.., inner).collect();
    directory(&workspace)?;
    directory(&inside(Path::new(UPLOADS)))?;
    std::mem::take(&mut sources.stacks).mount()?;
    populate(plan, &sources)?;
    attach(sources.sources)?;
    filesystems(plan)?;
    Ok(private)
}

/// Enters the new root, and with this process all that have the old one; the old one stays mounted
/// over it.
pub fn turn() -> Result<()> {
    rustix::process::pivot_root(".", ".")?;
    Ok(rustix::process::chdir("/")?)
}

/// Directories, links and files of the root itself.
fn populate(plan: &SandboxPlan, sources: &Sources) -> Result<()> {
    for name in ["dev/pts", "dev/shm", "proc", "etc", "run", "tmp", "var/log"] {
        directory(Path::new(name))?;
    }
    directory(&inside(Path::new(HOME)))?;
    symlink("../tmp", "var/tmp")?;
    symlink("../run", "var/run")?;
    symlink("/proc/self/mounts", "etc/mtab")?;
    for (path, text) in DEVICE_LINKS {
        symlink(text, path)?;
    }
    for source in &sources.sources {
        // A target inside another mount is made there, if it can be, when its turn comes.
        if sources.sources.iter().any(|other| below(&source.target, &other.target)) {
            continue;
        }
        place_for(source)?;
    }
    for link in &sources.links {
        directory(link.target.parent().unwrap_or(Path::new("")))?;
        symlink(&link.text, &link.target)?;
    }
    for file in &plan.files {
        let path = inside(&file.path);
        directory(path.parent().unwrap_or(Path::new("")))?;
        std::fs::write(&path, &file.text).map_err(|e| named(&path, e))?;
    }
    Ok(())
}

fn below(path: &Path, other: &Path) -> bool {
    path != other && path.starts_with(other)
}

/// What a mount goes onto.
fn place_for(source: &Source) -> Result<()> {
    if source.directory {
        return directory(&source.target);
    }
    directory(source.target.parent().unwrap_or(Path::new("")))?;
    std::fs::write(&source.target, "").map_err(|e| named(&source.target, e))
}

pub(super) fn directory(path: &Path) -> Result<()> {
    if path.as_os_str().is_empty() {
        return Ok(());
    }
    let mode = Mode::from_raw_mode(0o755);
    let made = match rustix::fs::mkdir(path, mode) {
        Err(Errno::NOENT) => {
            directory(path.parent().unwrap_or(Path::new("")))?;
            rustix::fs::mkdir(path, mode)
        }
        other => other,
    };
    match made {
        // The root is ours alone while it is built: what is there is a directory of ours.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(named(path, error.into())),
    }
}

pub(super) fn attach(sources: Vec<Source>) -> Result<()> {
    for source in sources {
        let target = target_of(&source).map_err(|e| named(&source.target, e))?;
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        rustix::mount::move_mount(&source.tree, "", &target, "", flags)
            .map_err(|e| named(&source.target, e.into()))?;
    }
    Ok(())
}

/// Opens what a mount goes onto, through no link: a workspace may hold links that commands of an
/// earlier sandbox planted, and the host's tree is still in reach. A directory that is missing
/// inside a mount is made.
fn target_of(source: &Source) -> Result<OwnedFd> {
    use rustix::fs::{mkdirat, openat, openat2};
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let of = |directory: bool| if directory { flags | OFlags::DIRECTORY } else { flags };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match openat2(CWD, &source.target, of(source.directory), Mode::empty(), resolve) {
        Err(Errno::NOENT) if source.directory => {}
        other => return Ok(other?),
    }
    let mut at = openat(CWD, ".", of(true), Mode::empty())?;
    for name in &source.target {
        at = match openat(&at, name, of(true), Mode::empty()) {
            Err(Errno::NOENT) => {
                mkdirat(&at, name, Mode::from_raw_mode(0o755))?;
                openat(&at, name, of(true), Mode::empty())?
            }
            other => other?,
        };
    }
    Ok(at)
}

/// Shows `source` at `target` too. No detached mount is made: each counts as a mount namespace, and
/// the cell may make none any more.
pub fn cover(source: &Path, target: &Path, set: u64) -> Result<()> {
    let fail = |error: rustix::io::Errno| named(target, error.into());
    rustix::mount::mount_bind(source, target).map_err(fail)?;
    let mount = rustix::mount::open_tree(CWD, target, OpenTreeFlags::OPEN_TREE_CLOEXEC);
    set_attributes(mount.map_err(fail)?, Attributes { set, ..Attributes::default() })
        .map_err(|error| named(target, error))
}

/// The file systems that are the cell's own: scratch space, terminals, processes.
fn filesystems(plan: &SandboxPlan) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    let home = inside(Path::new(HOME));
    for (target, mode) in
        [(Path::new("tmp"), "1777"), (Path::new("dev/shm"), "1777"), (&home, "700")]
    {
        let bytes = plan.limits.tmp_bytes;
        let options = format!("mode={mode},size={bytes},nr_inodes={SCRATCH_INODES}");
        let options = std::ffi::CString::new(options).map_err(Error::other)?;
        rustix::mount::mount("tmpfs", target, "tmpfs", flags, options.as_c_str())
            .map_err(|e| named(target, e.into()))?;
    }
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    let options = c"newinstance,ptmxmode=0666,mode=0620";
    rustix::mount::mount("devpts", "dev/pts", "devpts", flags, options)
        .map_err(|e| named(Path::new("dev/pts"), e.into()))?;
    let flags = flags | MountFlags::NODEV;
    rustix::mount::mount("proc", "proc", "proc", flags, c"")
        .map_err(|e| named(Path::new("proc"), e.into()))
}

/// After the root was entered: what of `/proc` is not for commands.
pub fn close_proc() -> Result<()> {
    for name in PROC_HIDDEN {
        let target = Path::new("/proc").join(name);
        if target.exists() {
            cover(Path::new("/dev/null"), &target, READ_ONLY | NO_SUID | NO_EXEC)?;
        }
    }
    // The kernel's settings can be read.
    let sys = Path::new("/proc/sys");
    cover(sys, sys, READ_ONLY | NO_SUID | NO_DEV | NO_EXEC)
}

/// Makes the root's own file system read-only for everybody who has no descriptor of `build`'s.
pub fn seal() -> Result<()> {
    let root = rustix::mount::open_tree(CWD, "/", OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
    set_attributes(&root, Attributes { set: READ_ONLY, ..Attributes::default() })
}

/// Where owners are mapped: shows a mount's files as if `owner`, to whom they belong, were `uid`.
pub fn map_owner(tree: &OwnedFd, namespace: &OwnedFd) -> Result<()> {
    let mapping = Some(namespace.as_fd());
    set_attributes(tree, Attributes { mapping, recursive: true, ..Attributes::default() })
}

/// The owner of a mount's root directory.
pub fn owner(tree: &OwnedFd) -> Result<(u32, u32)> {
    let stat = rustix::fs::fstat(tree)?;
    Ok((stat.st_uid, stat.st_gid))
}
