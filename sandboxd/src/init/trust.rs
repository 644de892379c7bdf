//! What the commands of a cell trust: the root's own certificates, and behind them proxyd's, which
//! are known only after the lease was opened.
//!
//! One file of the private root holds both; where the root's programs look for theirs it is shown
//! instead. It is written through a descriptor that only this process holds, so there is no moment
//! at which a command could.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::root::{cover, inside, open_in, open_root_of};
use crate::plan::SandboxPlan;
use crate::sys::mount::{NO_DEV, NO_EXEC, NO_SUID, READ_ONLY};
use crate::trust::{
    BUNDLE, BUNDLE_BYTES_MAX, JAVA_HOMES, JAVA_OWN_STORES, JAVA_STORES, KEY_STORE, LINKS, OURS,
    SYSTEM_BUNDLES,
};

/// Entries of a directory that are looked at for a Java: more than any host has, and no walk.
const JAVAS_MAX: usize = 64;

/// The root's bundle of certificates, opened.
#[derive(Debug)]
pub struct Original {
    file: OwnedFd,
    bytes: u64,
}

/// The certificates of a living cell.
#[derive(Debug)]
pub struct Trust {
    bundle: File,
    /// Length of the root's part of it.
    root_bytes: u64,
    ours: File,
}

/// Opens the root's bundle as its own programs would find it: an image's links lead to nothing
/// outside of the image. None: the root has none.
pub fn original(plan: &SandboxPlan) -> Result<Option<Original>> {
    let root = open_root_of(plan)?;
    // A file of an image may be a pipe, which must not be waited for.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    for path in SYSTEM_BUNDLES {
        let fail = |why: String| Error::other(format!("{path} of the root: {why}"));
        let file = match open_in(&root, Path::new(path), flags) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::NOTDIR) => continue,
            Err(error) => return Err(fail(Error::from(error).to_string())),
        };
        let stat = rustix::fs::fstat(&file)?;
        let bytes = stat.st_size.cast_unsigned();
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(fail("it is no file".to_owned()));
        }
        if bytes > BUNDLE_BYTES_MAX {
            return Err(fail(format!("it has more than {BUNDLE_BYTES_MAX} bytes")));
        }
        return Ok(Some(Original { file, bytes }));
    }
    Ok(None)
}

impl Original {
    /// The same file, opened once more.
    pub fn again(&self) -> Result<OwnedFd> {
        self.file.try_clone()
    }
}

/// Shows the plan's key store in the place of every Java's own. Call it in the new root, before
/// that is made read-only.
pub fn cover_java(plan: &SandboxPlan) -> Result<()> {
    if plan.key_store.is_none() {
        return Ok(());
    }
    let mut stores: Vec<PathBuf> = JAVA_STORES.iter().map(PathBuf::from).collect();
    // A directory of the policy may be a Java, or hold some; not one that is written to.
    let mounted = plan.mounts.iter().filter(|mount| mount.read_only).map(|mount| &*mount.target);
    for place in JAVA_HOMES.iter().map(Path::new).chain(mounted) {
        let Ok(listing) = std::fs::read_dir(place) else { continue };
        let homes = listing.flatten().take(JAVAS_MAX).map(|entry| entry.path());
        for home in homes.chain([place.to_owned()]) {
            stores.extend(JAVA_OWN_STORES.iter().map(|own| home.join(own)));
        }
    }
    // Most are not there. Of the rest most are links to the same file, and what is covered twice
    // costs two mounts.
    let there = stores.iter().filter(|path| path.is_file());
    let mut targets: Vec<PathBuf> = there.filter_map(|path| path.canonicalize().ok()).collect();
    targets.sort();
    targets.dedup();
    for target in &targets {
        cover(Path::new(KEY_STORE), target, READ_ONLY | NO_SUID | NO_DEV | NO_EXEC)?;
    }
    Ok(())
}

/// Makes our bundle in the private root and shows it in the places of the root's. Call it in the
/// new root, before that is made read-only.
pub fn prepare(private: &OwnedFd, original: Option<Original>) -> Result<Trust> {
    let ssl = inside(Path::new(BUNDLE).parent().unwrap_or(Path::new("/")));
    match rustix::fs::mkdirat(private, &ssl, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let bundle = create(private, BUNDLE)?;
    let root_bytes = match original {
        Some(original) => copy(&original, &bundle)?,
        None => 0,
    };
    for path in SYSTEM_BUNDLES {
        // What is absent, or leads out of what is shown, is looked for by nobody in vain: the
        // variables name ours.
        if let Ok(target) = std::fs::canonicalize(path) {
            cover(Path::new(BUNDLE), &target, READ_ONLY | NO_SUID | NO_DEV | NO_EXEC)?;
        }
    }
    for path in LINKS {
        rustix::fs::symlinkat(BUNDLE, private, inside(Path::new(path)))?;
    }
    Ok(Trust { bundle, root_bytes, ours: create(private, OURS)? })
}

fn create(private: &OwnedFd, path: &str) -> Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o444);
    Ok(rustix::fs::openat(private, inside(Path::new(path)), flags, mode)?.into())
}

/// Copies in the kernel; returns the length, with a line's end if that was missing.
fn copy(original: &Original, bundle: &File) -> Result<u64> {
    let mut left = original.bytes;
    while left > 0 {
        let length = usize::try_from(left).unwrap_or(usize::MAX);
        match rustix::fs::sendfile(bundle, &original.file, None, length)? {
            0 => break,
            copied => left = left.saturating_sub(copied as u64),
        }
    }
    let copied = original.bytes - left;
    // Certificates are lines: the first of ours must not continue the root's last.
    bundle.write_all_at(b"\n", copied)?;
    Ok(copied + 1)
}

impl Trust {
    /// Puts proxyd's certificates in the place of those that were added before. `added` are those
    /// of the root's that only this host has.
    pub fn add(&self, ca_pem: &[u8], added: &[u8]) -> Result<()> {
        let only_here = [ca_pem, added].concat();
        // Written before it is cut: a reader never finds a bundle without any of ours.
        for (file, from, bytes) in
            [(&self.bundle, self.root_bytes, ca_pem), (&self.ours, 0, &only_here)]
        {
            file.write_all_at(bytes, from)?;
            file.set_len(from + bytes.len() as u64)?;
        }
        Ok(())
    }
}
