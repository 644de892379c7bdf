//! mount_setattr(2), which no wrapper crate offers; the rest of the mount calls is rustix's.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// What to change about a mount, or about a whole tree of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attributes<'a> {
    pub set: u64,
    pub clear: u64,
    /// The user namespace whose mapping the mount shows its files' owners through.
    pub mapping: Option<BorrowedFd<'a>>,
    pub recursive: bool,
}

pub const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY;
pub const NO_SUID: u64 = libc::MOUNT_ATTR_NOSUID;
pub const NO_DEV: u64 = libc::MOUNT_ATTR_NODEV;
pub const NO_EXEC: u64 = libc::MOUNT_ATTR_NOEXEC;

/// Changes the mount that `mount` refers to, and makes it private (no event goes in or out).
pub fn set_attributes(mount: impl AsFd, change: Attributes<'_>) -> std::io::Result<()> {
    let mut attributes = libc::mount_attr {
        attr_set: change.set,
        attr_clr: change.clear,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    if let Some(mapping) = change.mapping {
        attributes.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attributes.userns_fd = mapping.as_raw_fd() as u64;
    }
    let recursive = if change.recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty C string, the structure is valid for its size and is only read.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | recursive,
            &raw mut attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
