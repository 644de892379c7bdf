//! Keeps the whole of a long output in a file of the workspace.
//!
//! Not a tool of the model's. It runs inside the cell like the file tools, so that the file is
//! the sandbox's own, counts against its limits, and lands in the workspace even when a command
//! planted links in its way: none is followed.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::files::{Outcome, text};
use super::reach::{Reach, beneath, reason};

/// The folder in the workspace that spill files are in.
pub const FOLDER: &str = ".cleanhands";

/// A piece of an output; its bytes are attached to the request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Piece {
    /// Name of the file in [`FOLDER`].
    pub name: String,
    /// Whether the file is there already, with the pieces before.
    pub continues: bool,
}

/// Where a spill file of that name lies below a workspace.
pub fn path_in(workspace: &str, name: &str) -> String {
    format!("{workspace}/{FOLDER}/{name}")
}

pub fn perform(reach: Reach<'_>, piece: &Piece, bytes: &[u8]) -> Outcome {
    write(reach, piece, bytes).map_err(|errno| format!("{}: {}", piece.name, reason(errno)))?;
    Ok(text("kept"))
}

fn write(reach: Reach<'_>, piece: &Piece, bytes: &[u8]) -> Result<(), Errno> {
    let workspace = reach.0.first().ok_or(Errno::NOENT)?;
    let open = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let workspace = rustix::fs::open(workspace, open, Mode::empty())?;
    match rustix::fs::mkdirat(&workspace, FOLDER, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let plain = ResolveFlags::NO_SYMLINKS;
    let folder = beneath(&workspace, Path::new(FOLDER), open, plain)?;
    let way = if piece.continues { OFlags::APPEND } else { OFlags::CREATE | OFlags::EXCL };
    let flags = OFlags::WRONLY | way;
    let mut file = File::from(beneath(&folder, Path::new(&piece.name), flags, plain)?);
    let fail = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
    if !file.metadata().map_err(fail)?.is_file() {
        return Err(Errno::NXIO);
    }
    file.write_all(bytes).map_err(fail)?;
    if !piece.continues {
        keep_out_of_git(&folder);
    }
    Ok(())
}

/// A repository in the workspace should not list our folder as a change. Nothing hangs on it.
fn keep_out_of_git(folder: impl std::os::fd::AsFd) {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let name = Path::new(".gitignore");
    if let Ok(file) = beneath(folder, name, flags, ResolveFlags::NO_SYMLINKS) {
        let _ = File::from(file).write_all(b"*\n");
    }
}
