//! The directories that sandboxes may write: each session's own, and those callers have shown.
//!
//! A session's workspace outlives its sandboxes and this daemon; it ends when the session is
//! deleted. A caller's own directory is used because the caller could open it and owns it, and is
//! used again only while its path still leads to the same inode. sandboxd never opens what is
//! inside a workspace, so that nothing a command planted there can lead it anywhere.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use ipc::fault::{Code, Fault};
use ipc::id::{SandboxId, SessionId};
use ipc::peer::Principal;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::apart::Apart;
use crate::source::{self, Extent, Refusal};
use crate::tools::reach::reason;

/// Begins the names of workspaces that are being removed: no id begins so.
const REMOVED: &str = ".removed-";
/// Begins the names of workspaces that end with their sandbox, or with this daemon.
const TEMPORARY: &str = ".sandbox-";

/// A directory that a caller has shown to be its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    pub owner: String,
    /// Absolute, as the caller named it.
    pub path: String,
    pub device: u64,
    pub inode: u64,
}

/// A directory ready to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    pub path: PathBuf,
    /// Device and inode it must still have when it is mounted.
    pub identity: (u64, u64),
}

/// Where the sessions' own workspaces lie.
#[derive(Clone, Debug)]
pub struct Workspaces {
    root: PathBuf,
    /// What no directory of a caller's or a policy's may touch.
    apart: Apart,
}

impl Workspaces {
    /// Opens the folder of workspaces; what an earlier process was removing, or left behind, goes.
    pub fn open(root: PathBuf, apart: Apart) -> std::io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&root)?;
        // A cell with a uid of its own that was led here can go on by a name it was told. Nobody is
        // led here: the directory above is sandboxd's alone.
        let passing = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        std::fs::set_permissions(&root, passing)?;
        let mut left = Vec::new();
        for entry in std::fs::read_dir(&root)? {
            let name = entry?.file_name();
            let ours = |name: &str| name.starts_with(REMOVED) || name.starts_with(TEMPORARY);
            if name.to_str().is_some_and(ours) {
                left.push(root.join(name));
            }
        }
        if !left.is_empty() {
            std::thread::spawn(move || left.iter().for_each(|path| empty_and_remove(path)));
        }
        Ok(Self { root, apart })
    }

    /// What no sandbox may be shown.
    pub fn apart(&self) -> &Apart {
        &self.apart
    }

    /// Where sandboxd's own workspaces lie.
    pub fn folder(&self) -> &Path {
        &self.root
    }

    /// The session's own workspace, made at its first use.
    pub fn of_session(&self, session: &SessionId) -> Result<Workspace, Fault> {
        self.own(session.as_str())
    }

    /// A workspace that ends with its sandbox.
    pub fn of_sandbox(&self, sandbox: &SandboxId) -> Result<Workspace, Fault> {
        self.own(&format!("{TEMPORARY}{sandbox}"))
    }

    /// Removes the workspace of a sandbox that has ended. Blocking.
    pub fn end_of(&self, sandbox: &SandboxId) -> std::io::Result<()> {
        self.remove(&format!("{TEMPORARY}{sandbox}"))
    }

    pub(crate) fn own(&self, name: &str) -> Result<Workspace, Fault> {
        let path = self.root.join(name);
        let fail = |e: std::io::Error| {
            Fault::new(Code::Unavailable, format!("cannot make workspace {}: {e}", path.display()))
        };
        match std::fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(fail(e)),
            _ => {}
        }
        let meta = std::fs::symlink_metadata(&path).map_err(fail)?;
        if !meta.is_dir() {
            return Err(fail(std::io::ErrorKind::NotADirectory.into()));
        }
        Ok(Workspace { identity: (meta.dev(), meta.ino()), path })
    }

    /// Removes a session's own workspace; no sandbox may use it any more. Blocking.
    pub fn end_of_session(&self, session: &SessionId) -> std::io::Result<()> {
        self.remove(session.as_str())
    }

    /// Gone for everybody at once, its files soon after.
    pub(crate) fn remove(&self, name: &str) -> std::io::Result<()> {
        let removed = self.root.join(format!("{REMOVED}{}", ipc::id::random_text(12)));
        match std::fs::rename(self.root.join(name), &removed) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        }
        empty_and_remove(&removed);
        Ok(())
    }

    /// Takes note of a directory that `peer` has passed as a descriptor. Only its owner may have it
    /// written by a sandbox: reading rights alone would let anybody pass `/etc`.
    pub fn register(
        &self,
        peer: &Principal,
        directory: &OwnedFd,
        path: &str,
    ) -> Result<Registered, Fault> {
        let invalid = |why: String| Fault::new(Code::Invalid, format!("workspace {path}: {why}"));
        if !Path::new(path).is_absolute() {
            return Err(invalid("the path is not absolute".into()));
        }
        let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        if !Path::new(path).components().all(plain) {
            return Err(invalid("the path must be without `..`".into()));
        }
        // Without the slashes and dots that say nothing.
        let plain: PathBuf = Path::new(path).components().collect();
        let passed = rustix::fs::fstat(directory).map_err(|e| invalid(e.to_string()))?;
        if FileType::from_raw_mode(passed.st_mode) != FileType::Directory {
            return Err(invalid("the descriptor is no directory".into()));
        }
        if passed.st_uid != peer.uid && peer.uid != 0 {
            let text =
                format!("workspace {path}: it belongs to uid {}, not to {peer}", passed.st_uid);
            return Err(Fault::new(Code::Denied, text).with_hint("use a directory of your own"));
        }
        let registered = Registered {
            owner: peer.owner(),
            path: plain.to_string_lossy().into_owned(),
            device: passed.st_dev,
            inode: passed.st_ino,
        };
        self.verify(&registered)?;
        Ok(registered)
    }

    /// Looks whether the path still leads to the directory that was shown, and whether a sandbox
    /// may be shown it: by the judgement that a policy's mounts get (`crate::source`).
    pub fn verify(&self, registered: &Registered) -> Result<Workspace, Fault> {
        let named = &registered.path;
        let path = PathBuf::from(named);
        let directory = source::open(&path, &self.apart, Extent::Whole)
            .map_err(|refusal| refused(named, refusal))?;
        let stat = rustix::fs::fstat(&directory)
            .map_err(|error| refused(named, Refusal::Io(error.into())))?;
        let identity = (registered.device, registered.inode);
        if (stat.st_dev, stat.st_ino) != identity {
            let text = format!("workspace {named}: another directory is there now");
            return Err(Fault::new(Code::Missing, text).with_hint("show the directory again"));
        }
        Ok(Workspace { path, identity })
    }
}

fn refused(named: &str, refusal: Refusal) -> Fault {
    match refusal {
        Refusal::Judged { why, .. } => {
            Fault::new(Code::Denied, format!("workspace {named}: {why}")).with_hint(
                "use another directory, or start the daemons with their policies, configuration \
                 and state outside of what agents work on",
            )
        }
        Refusal::Io(error) => {
            let why = Errno::from_io_error(&error).map_or_else(|| error.to_string(), reason);
            Fault::new(Code::Missing, format!("workspace {named}: {why}")).with_hint(
                "sandboxd must be able to reach the directory by this path: as a service it sees \
                 only what its unit lets in (BindPaths=)",
            )
        }
    }
}

/// Removes a tree whose makers may have meant harm: no link is followed, and depth costs neither
/// stack nor descriptors, because every directory found is moved up to the top before it is
/// emptied. What cannot be removed is left and logged.
pub(crate) fn empty_and_remove(top: &Path) {
    if let Err(error) = try_empty(top).and_then(|()| rustix::fs::rmdir(top)) {
        tracing::warn!(path = %top.display(), %error, "cannot remove a workspace");
    }
}

fn try_empty(top: &Path) -> Result<(), Errno> {
    let top = open_directory(CWD, top)?;
    let mut moved = 0u64;
    loop {
        let names = names_in(&top)?;
        if names.is_empty() {
            return Ok(());
        }
        for name in names {
            if !is_directory(&top, &name)? {
                rustix::fs::unlinkat(&top, &name, AtFlags::empty())?;
                continue;
            }
            let directory = open_directory(&top, &name)?;
            for below in names_in(&directory)? {
                if is_directory(&directory, &below)? {
                    // A directory can be moved only by whoever may write it.
                    open_directory(&directory, &below)?;
                    moved += 1;
                    let new = format!("{REMOVED}{moved}-{}", ipc::id::random_text(8));
                    rustix::fs::renameat(&directory, &below, &top, new)?;
                } else {
                    rustix::fs::unlinkat(&directory, &below, AtFlags::empty())?;
                }
            }
            rustix::fs::unlinkat(&top, &name, AtFlags::REMOVEDIR)?;
        }
    }
}

fn is_directory(parent: &OwnedFd, name: &std::ffi::CStr) -> Result<bool, Errno> {
    let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Opens a directory for emptying, giving its owner the right to when that was taken away.
fn open_directory<P: rustix::path::Arg + Copy>(
    parent: impl std::os::fd::AsFd,
    name: P,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let full = Mode::RWXU;
    let directory = match rustix::fs::openat(&parent, name, flags, Mode::empty()) {
        Err(Errno::ACCESS) => {
            // The name was just seen to be a directory and nobody else is left in this tree.
            rustix::fs::chmodat(&parent, name, full, AtFlags::empty())?;
            rustix::fs::openat(&parent, name, flags, Mode::empty())?
        }
        other => other?,
    };
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&directory)?.st_mode);
    if !mode.contains(full) {
        rustix::fs::fchmod(&directory, full)?;
    }
    Ok(directory)
}

fn names_in(directory: &OwnedFd) -> Result<Vec<std::ffi::CString>, Errno> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn passed(path: &Path) -> OwnedFd {
        rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    #[test]
    fn a_directory_is_known_again_and_its_replacement_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("project");
        std::fs::create_dir(&path).unwrap();
        let name = path.to_str().unwrap();

        let apart = Apart::new(vec![dir.path().join("state")]);
        let workspaces = Workspaces { root: dir.path().join("state"), apart };
        let verify = |known: &Registered| workspaces.verify(known);

        let known = workspaces.register(&Principal::own(), &passed(&path), name).unwrap();
        assert!(verify(&known).is_ok());
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        assert_eq!(verify(&known).unwrap_err().code, Code::Missing);
        std::fs::create_dir(&path).unwrap();

        assert!(verify(&known).unwrap_err().text.contains("another directory"));
    }

    #[test]
    fn a_workspace_is_judged_as_a_mount_is() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("real/data")).unwrap();
        std::os::unix::fs::symlink("real", top.join("link")).unwrap();
        let shared = tempfile::tempdir_in("/dev/shm").unwrap();
        let workspaces = Workspaces { root: top.join("state"), apart: Apart::default() };
        let register = |path: &Path| {
            workspaces.register(&Principal::own(), &passed(path), path.to_str().unwrap())
        };
        let said = |path: &Path| {
            let fault = register(path).unwrap_err();
            assert_eq!(fault.code, Code::Denied, "{fault}");
            fault.text
        };

        assert!(said(&top.join("link/data")).contains("link is a symbolic link"));
        assert!(said(shared.path()).contains("the host's devices"));
        let own = Path::new("/proc").join(std::process::id().to_string());
        assert!(said(&own).contains("a file system of the kernel's, proc"));
        for path in ["/", "/run"] {
            let stat = std::fs::metadata(path).unwrap();
            let known = Registered {
                owner: Principal::own().owner(),
                path: path.into(),
                device: stat.dev(),
                inode: stat.ino(),
            };
            assert_eq!(workspaces.verify(&known).unwrap_err().code, Code::Denied, "{path}");
        }
        assert_eq!(register(&top.join("real/../real")).unwrap_err().code, Code::Invalid);
        let path = format!("{}/real//./data/", top.display());
        let known = workspaces.register(&Principal::own(), &passed(path.as_ref()), &path).unwrap();
        assert_eq!(known.path, top.join("real/data").to_str().unwrap());
    }

    #[test]
    fn what_is_not_the_peers_own_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let stranger = Principal { uid: 12_345, ..Principal::own() };
        let path = dir.path().to_str().unwrap();

        let workspaces = Workspaces { root: dir.path().join("x"), apart: Apart::default() };
        let register =
            |peer: &Principal, fd: &OwnedFd, path: &str| workspaces.register(peer, fd, path);

        let denied = register(&stranger, &passed(dir.path()), path).unwrap_err();
        let file = register(&Principal::own(), &passed(&file), file.to_str().unwrap());
        let other = register(&Principal::own(), &passed(dir.path()), "/");
        let relative = register(&Principal::own(), &passed(dir.path()), "x");

        assert_eq!(denied.code, Code::Denied);
        assert_eq!(file.unwrap_err().code, Code::Invalid);
        assert!(other.is_err());
        assert_eq!(relative.unwrap_err().code, Code::Invalid);
    }

    #[test]
    fn a_hostile_tree_is_removed_and_nothing_outside_it() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("file"), "kept").unwrap();
        let workspaces = Workspaces::open(dir.path().join("workspaces"), Apart::default()).unwrap();
        let session = SessionId::random();
        let workspace = workspaces.of_session(&session).unwrap().path;
        let mut deep = workspace.clone();
        for _ in 0..200 {
            deep.push("d");
        }
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("f"), "").unwrap();
        std::os::unix::fs::symlink(&outside, workspace.join("link")).unwrap();
        std::os::unix::fs::symlink(&outside, deep.join("link")).unwrap();
        std::fs::create_dir(workspace.join("closed")).unwrap();
        std::fs::write(workspace.join("closed/f"), "").unwrap();
        let closed = std::fs::Permissions::from_mode(0o000);
        std::fs::set_permissions(workspace.join("closed"), closed).unwrap();

        workspaces.end_of_session(&session).unwrap();

        assert_eq!(std::fs::read_dir(dir.path().join("workspaces")).unwrap().count(), 0);
        assert_eq!(std::fs::read_to_string(outside.join("file")).unwrap(), "kept");
    }
}
