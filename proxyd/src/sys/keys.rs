//! Memory for keys: nobody else can read it, and it leaves the machine's memory at no time.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::vault::VaultError;

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Size of the mapping of a key: one page of any machine up to this size.
const PAGE_BYTES: usize = 4096;

/// A key in a page of its own. Where the kernel has memfd_secret(2), the page is out of the
/// kernel's own reach too, so neither ptrace(2), `/proc/PID/mem` nor another process's system call
/// leads to it; else it is an ordinary one that is left out of core files. It is never swapped out:
/// where the limit of locked memory does not allow that, there is no key. Wiped and unmapped on
/// drop.
pub struct LockedKey {
    page: NonNull<[u8; KEY_BYTES]>,
}

// SAFETY: the page belongs to this value alone, and access to it follows the borrow of the value.
unsafe impl Send for LockedKey {}

impl LockedKey {
    /// A key of zeros.
    pub fn new() -> Result<Self, VaultError> {
        let page = secret_page().or_else(|_| locked_page()).map_err(|error| {
            VaultError::Key(format!(
                "cannot keep the vault's keys from being swapped out: {error}: raise the limit of \
                 locked memory to 64 KiB or more (LimitMEMLOCK= of the service, ulimit -l)"
            ))
        })?;
        Ok(Self { page })
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
        unmap(self.page);
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A page that the kernel locks and keeps out of core files by itself. It counts against the limit
/// of locked memory.
fn secret_page() -> io::Result<NonNull<[u8; KEY_BYTES]>> {
    // SAFETY: memfd_secret(2) touches no memory of ours.
    let raw = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
    let raw = i32::try_from(raw).ok().filter(|raw| *raw >= 0);
    let raw = raw.ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel just made this descriptor, and nobody else knows it.
    let secret = unsafe { OwnedFd::from_raw_fd(raw) };
    rustix::fs::ftruncate(&secret, PAGE_BYTES as u64)?;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing; nobody else can
    // map the file, whose only descriptor is closed here.
    let page = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            PAGE_BYTES,
            READ_WRITE,
            MapFlags::SHARED,
            secret.as_fd(),
            0,
        )
    }?;
    Ok(NonNull::new(page.cast()).expect("mmap never yields a null page"))
}

fn locked_page() -> io::Result<NonNull<[u8; KEY_BYTES]>> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
    let page = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, READ_WRITE, MapFlags::PRIVATE)
    }?;
    // SAFETY: the range is the mapping just made; neither call changes its contents.
    let kept = unsafe {
        rustix::mm::mlock(page, PAGE_BYTES)
            .and_then(|()| rustix::mm::madvise(page, PAGE_BYTES, Advice::LinuxDontDump))
    };
    let page = NonNull::new(page.cast()).expect("mmap never yields a null page");
    if let Err(error) = kept {
        unmap(page);
        return Err(error.into());
    }
    Ok(page)
}

/// Only what one of the two above made, and nobody refers to any more.
fn unmap(page: NonNull<[u8; KEY_BYTES]>) {
    // SAFETY: the range is a mapping of this module's own, which the caller has given up.
    let _ = unsafe { rustix::mm::munmap(page.as_ptr().cast(), PAGE_BYTES) };
}

#[cfg(test)]
mod tests {
    use super::super::filter::trial::{End, apart};
    use super::*;

    #[test]
    fn a_key_starts_as_zeros_and_holds_what_is_written() {
        let mut key = LockedKey::new().unwrap();

        assert_eq!(key.bytes(), &[0; KEY_BYTES]);
        key.bytes_mut()[31] = 7;
        assert_eq!(key.bytes()[31], 7);
    }

    /// The line of proc_pid_smaps(5) with the flags of the mapping at an address.
    fn flags(page: NonNull<[u8; KEY_BYTES]>) -> Option<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let begin = format!("{:x}-", page.as_ptr().addr());
        let own = smaps.lines().skip_while(|line| !line.starts_with(&begin));
        own.skip(1).find_map(|line| line.strip_prefix("VmFlags:")).map(str::to_owned)
    }

    #[test]
    fn either_kind_of_page_is_locked_and_left_out_of_core_files() {
        let pages = [secret_page().ok(), locked_page().ok()];

        assert!(pages[1].is_some());
        for page in pages.into_iter().flatten() {
            let flags = flags(page).unwrap();
            let has = |flag: &str| flags.split_whitespace().any(|own| own == flag);
            assert!(has("lo") && has("dd"), "{flags}");
            unmap(page);
        }
    }

    #[test]
    fn without_a_right_to_lock_memory_there_is_no_key_and_it_is_said_why() {
        let end = apart(|| {
            let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            let limited = rustix::process::setrlimit(rustix::process::Resource::Memlock, none);
            // Root locks what it wants, whatever the limit.
            // SAFETY: setresuid(2) touches no memory; the process has one thread after the fork.
            let nobody = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            let root = rustix::process::geteuid().is_root();
            if limited.is_err() || (root && nobody != 0) {
                return 255;
            }
            match LockedKey::new() {
                Err(VaultError::Key(text)) if text.contains("LimitMEMLOCK") => 0,
                Err(_) => 1,
                Ok(_) => 2,
            }
        });

        assert_eq!(end, End::Code(0));
    }
}
