//! For the host's side of tests: namespaces in which a daemon under test finds itself.

use std::ffi::CString;
use std::io::Result;

use super::checked;

/// A user namespace in which this user is root, and whatever else `more` names. Nothing outside
/// changes.
pub fn become_root_of_own_namespace(more: libc::c_int) -> Result<()> {
    // SAFETY: they take nothing and cannot fail.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    // SAFETY: takes a number; this program has one thread, as a new user namespace demands.
    checked(unsafe { libc::unshare(libc::CLONE_NEWUSER | more) })?;
    // An ordinary user may map its group only after that (user_namespaces(7)).
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

/// Mounts a file system in memory, in a mount namespace of this process's own.
pub fn mount_small_disk(path: &str, megabytes: u32) -> Result<()> {
    let path = CString::new(path)?;
    let options = CString::new(format!("size={megabytes}m,mode=0700"))?;
    let kind = c"tmpfs".as_ptr();
    // SAFETY: every pointer is to a live C string.
    unsafe {
        let private = libc::MS_REC | libc::MS_PRIVATE;
        checked(libc::mount(kind, c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()))?;
        checked(libc::mount(kind, path.as_ptr(), kind, 0, options.as_ptr().cast())).map(drop)
    }
}

/// This process is killed when its parent ends, also after it became another program.
pub fn die_with_parent() -> Result<()> {
    // SAFETY: takes numbers; no memory is touched.
    checked(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }).map(drop)
}
