//! What a daemon says on standard error. Nobody to hear it is no reason to fail.
//!
//! A full disk, a closed terminal or a reader that has gone must not end a daemon or a call. The
//! standard library's `eprintln!` panics there, so no daemon uses it.

use std::fmt::Display;
use std::io::{self, Write};

/// Says one thing, in one write, so that the lines of several processes do not mix.
pub fn line(text: impl Display) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Standard error as the loggers write to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard;

/// Makes what a logger writes to.
pub fn log() -> Heard {
    Heard
}

impl Write for Heard {
    /// What cannot be written is dropped.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
