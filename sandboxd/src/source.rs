//! Opens the directories of the host that a policy or a caller names, and judges what it opened:
//! mounts, roots and workspaces alike.
//!
//! Such a path may lead through a directory that an earlier sandbox could write, so what lies
//! there was chosen by a command: no link is followed, and what is judged, and then mounted, is the
//! opened directory and never the path again. An operator's own link is refused too, since nothing
//! tells it from a planted one.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::apart::Apart;

/// File systems that show the kernel, other processes or devices instead of files.
const KERNEL: &[&str] = &[
    "proc",
    "sysfs",
    "devtmpfs",
    "devpts",
    "mqueue",
    "cgroup",
    "cgroup2",
    "debugfs",
    "tracefs",
    "securityfs",
    "selinuxfs",
    "smackfs",
    "configfs",
    "bpf",
    "efivarfs",
    "pstore",
    "resctrl",
    "binfmt_misc",
    "fusectl",
    "nsfs",
    "nfsd",
    "rpc_pipefs",
];

/// How much of a directory is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of it, with what is mounted below.
    Whole,
    /// Of a root, the directories of programs.
    Programs,
}

/// Why a directory is not shown.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("{}: {why}", path.display())]
    Judged { path: PathBuf, why: String },
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// One line of proc_pid_mountinfo(5).
#[derive(Debug, PartialEq, Eq)]
struct Mounted {
    id: u64,
    at: PathBuf,
    kind: String,
}

/// Opens `path`, which is absolute and plain, through no link.
pub fn open(path: &Path, apart: &Apart, extent: Extent) -> Result<OwnedFd, Refusal> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let judged = |why| Refusal::Judged { path: path.to_owned(), why };
    match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve) {
        Ok(directory) => match objection(&directory, path, apart, extent)? {
            None => Ok(directory),
            Some(why) => Err(judged(why)),
        },
        Err(Errno::LOOP) => Err(judged(linked(path))),
        Err(error) => Err(Refusal::Io(error.into())),
    }
}

fn linked(path: &Path) -> String {
    let mut all: Vec<&Path> = path.ancestors().collect();
    all.reverse();
    let link = all.into_iter().find(|at| at.is_symlink()).unwrap_or(path);
    let leads = path.canonicalize().map_or_else(
        |_| "which leads nowhere: write the path of the directory itself".to_owned(),
        |real| format!("if {} is what is meant, write that", real.display()),
    );
    let link = link.display();
    format!(
        "{link} is a symbolic link, and what a sandbox is shown is reached through none; {leads}"
    )
}

/// Why the opened directory must not be shown.
fn objection(
    directory: &OwnedFd,
    path: &Path,
    apart: &Apart,
    extent: Extent,
) -> std::io::Result<Option<String>> {
    let number = directory.as_raw_fd();
    let real = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
    if real != path {
        return Ok(Some(format!("it was moved to {} meanwhile", real.display())));
    }
    let stat = rustix::fs::fstat(directory)?;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    let mounts = mounts(&std::fs::read("/proc/self/mountinfo")?);
    if let Some(own) = mounts.iter().find(|mount| Some(mount.id) == id)
        && KERNEL.contains(&&*own.kind)
    {
        return Ok(Some(format!("it lies in a file system of the kernel's, {}", own.kind)));
    }
    if let Some(why) = apart.conflict(path, (stat.st_dev, stat.st_ino)) {
        return Ok(Some(why));
    }
    let below = mounts.iter().filter(|mount| mount.at != path && mount.at.starts_with(path));
    match extent {
        Extent::Whole => below_objection(below, apart),
        Extent::Programs => Ok(None),
    }
}

/// The same of what is mounted below, which is shown with the directory.
fn below_objection<'a>(
    mut below: impl Iterator<Item = &'a Mounted>,
    apart: &Apart,
) -> std::io::Result<Option<String>> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let found = below.find_map(|mount| {
        let at = mount.at.display();
        if KERNEL.contains(&&*mount.kind) {
            return Some(format!("{at} below it is a file system of the kernel's, {}", mount.kind));
        }
        // One that cannot be looked at, even by whoever mounts it, shows nothing either.
        let stat = rustix::fs::statat(CWD, &mount.at, flags).ok()?;
        let why = apart.shown_by((stat.st_dev, stat.st_ino))?;
        Some(format!("{at} is mounted below it, and {why}"))
    });
    Ok(found)
}

fn mounts(table: &[u8]) -> Vec<Mounted> {
    table.split(|byte| *byte == b'\n').filter_map(mounted).collect()
}

fn mounted(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let at = OsString::from_vec(unescaped(fields.nth(3)?)).into();
    // Optional fields end with a dash.
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    // A kind may have a subkind: `fuse.sshfs`.
    Some(Mounted { id, at, kind: String::from_utf8_lossy(kind).into_owned() })
}

/// Blanks, line ends and backslashes stand in the table as three octal digits.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                rest = &after[3..];
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "22 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n\
         30 22 0:5 / /srv/a\\040b/proc rw,nosuid master:2 shared:3 - proc proc rw\n\
         31 22 8:2 / /srv/models rw - fuse.sshfs host:/ rw\n\
         broken\n";

    #[test]
    fn mounts_are_read_by_place_and_kind() {
        let found = mounts(TABLE.as_bytes());

        let shown: Vec<_> =
            found.iter().map(|m| (m.id, m.at.to_str().unwrap(), &*m.kind)).collect();
        let expected =
            [(22, "/", "ext4"), (30, "/srv/a b/proc", "proc"), (31, "/srv/models", "fuse.sshfs")];
        assert_eq!(shown, expected);
    }

    #[test]
    fn what_is_mounted_below_is_judged_too() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let mounted = |at: &Path, kind: &str| Mounted { id: 1, at: at.into(), kind: kind.into() };
        let apart = Apart::new(vec![state.clone()]);
        let judge = |mount: Mounted| below_objection([mount].iter(), &apart).unwrap();

        let proc = judge(mounted(Path::new("/srv/image/proc"), "proc")).unwrap();
        assert!(proc.contains("/srv/image/proc"), "{proc}");
        assert!(judge(mounted(&state, "ext4")).is_some(), "the daemons' own");
        assert!(judge(mounted(dir.path(), "ext4")).is_some(), "what holds them");
        let beside = tempfile::tempdir().unwrap();
        assert_eq!(judge(mounted(beside.path(), "ext4")), None);
    }

    #[test]
    fn a_link_anywhere_on_the_way_is_refused_by_its_name_and_the_directory_meant() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("real/data")).unwrap();
        std::os::unix::fs::symlink("real", top.join("link")).unwrap();
        std::os::unix::fs::symlink("real/data", top.join("last")).unwrap();
        std::os::unix::fs::symlink("/proc/self/root", top.join("magic")).unwrap();
        let apart = Apart::default();
        let refused =
            |name: &str| open(&top.join(name), &apart, Extent::Whole).unwrap_err().to_string();

        for (name, link) in [("link/data", "link"), ("last", "last")] {
            let text = refused(name);
            let is = format!("{} is a symbolic link", top.join(link).display());
            let write = format!("if {} is what", top.join("real/data").display());
            assert!(text.contains(&is) && text.contains(&write), "{text}");
        }
        assert!(refused("magic").contains("symbolic link"));
        assert!(open(&top.join("real/data"), &apart, Extent::Whole).is_ok());
    }

    #[test]
    fn file_systems_of_the_kernel_are_refused() {
        for path in ["/proc", "/proc/sys", "/sys"] {
            let outcome = open(Path::new(path), &Apart::default(), Extent::Whole);

            assert!(matches!(outcome, Err(Refusal::Judged { .. })), "{path}: {outcome:?}");
        }
    }
}
