//! The host's tree, from when a cell builds its root until it shows what is its session's.

use std::io::Result;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::UnmountFlags;

use super::root::{Source, attach, checked, detach_source, inside, named, open_in, open_root};
use crate::plan::{self, SandboxPlan};

/// The host's tree, for as long as the workspace is to be taken from it.
#[derive(Debug)]
pub struct Host {
    root: OwnedFd,
    /// The directory of sandboxd's own workspaces, which only sandboxd's user can find the way to.
    workspaces: Option<(PathBuf, OwnedFd)>,
    /// What is mounted inside the workspace.
    pub(super) later: Vec<Source>,
}

/// Opens the way back to the host's tree. Call it while this process is sandboxd's user.
pub fn keep(plan: &SandboxPlan) -> Result<Host> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let workspaces = match &plan.workspaces {
        None => None,
        Some(path) => {
            let opened = rustix::fs::open(path, flags, Mode::empty());
            Some((path.clone(), opened.map_err(|e| named(path, e.into()))?))
        }
    };
    Ok(Host { root: open_root(Path::new("/"))?, workspaces, later: Vec::new() })
}

/// Shows the workspace, whose mount the zygote has `given` where owners are mapped, and lets go of
/// the host's tree.
pub fn enter(
    host: Host,
    workspace: Option<&plan::Mount>,
    uploads: Option<&plan::Mount>,
    given: Option<OwnedFd>,
) -> Result<()> {
    // Nobody writes there, so it matters to nobody inside whose its files are.
    let uploads = uploads.map(|mount| {
        let tree = detach_source(mount, &checked(mount, host.open(&mount.source)?)?)?;
        Ok(Source { tree, target: inside(&mount.target), directory: true })
    });
    attach(uploads.into_iter().collect::<Result<_>>()?)?;
    if let Some(mount) = workspace {
        let tree = match given {
            Some(tree) => tree,
            None => detach_source(mount, &checked(mount, host.open(&mount.source)?)?)?,
        };
        attach(vec![Source { tree, target: inside(&mount.target), directory: true }])?;
        attach(host.later)?;
    }
    // The old root lies over the new one: this path means the upper.
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

impl Host {
    /// Opens a directory of the host's. sandboxd's own workspaces are found from their folder.
    fn open(&self, path: &Path) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        if let Some((folder, opened)) = &self.workspaces
            && let Ok(name) = path.strip_prefix(folder)
        {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let flags = flags | OFlags::CLOEXEC;
            return rustix::fs::openat2(opened, name, flags, Mode::empty(), resolve)
                .map_err(|e| named(path, e.into()));
        }
        open_in(&self.root, path, flags).map_err(|e| named(path, e.into()))
    }
}
