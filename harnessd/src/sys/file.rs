//! Reading files that an operator named, which may turn out to be no files at all.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file; a pipe or a device is an error at once and is not waited for.
pub fn open_regular(path: &Path) -> Result<File> {
    // Otherwise a pipe is opened when somebody writes to it: never, if nobody does.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).expect("open's flags are small");
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
}

/// Reads to the end; more than `max` bytes are an error, also if the file grows meanwhile.
pub fn read_bounded(file: &File, max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        let text = format!("it is longer than {max} bytes");
        return Err(Error::new(ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}
