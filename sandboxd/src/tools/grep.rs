//! `grep`: the lines of text files that match a regular expression.
//!
//! Built in, on ripgrep's own walker and engine: linear time whatever the expression, hidden and
//! git-ignored files left out, binary files too.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use ignore::WalkBuilder;
use regex::bytes::{Regex, RegexBuilder};
use rustix::fs::{OFlags, ResolveFlags};
use serde::{Deserialize, Serialize};

use super::files::{Outcome, text};
use super::reach::{Reach, beneath, place};

/// Most text shown, in bytes.
const SHOWN_BYTES_MAX: usize = 100 * 1024;
/// Longest line shown, in characters: minified files have lines of megabytes.
const LINE_CHARS_MAX: usize = 2_000;
/// Longest part of a line that is searched; bounds memory.
const LINE_BYTES_MAX: usize = 1024 * 1024;
/// Largest compiled expression.
const EXPRESSION_BYTES_MAX: usize = 4 * 1024 * 1024;
/// A zero byte within so many bytes makes a file binary.
const SNIFFED_BYTES: usize = 8 * 1024;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub pattern: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// Where the search ends before the last file.
enum Stop {
    TooMuch,
    TooLong,
}

pub fn perform(reach: Reach<'_>, input: &Input, deadline: Instant) -> Outcome {
    let expression = RegexBuilder::new(&input.pattern)
        .size_limit(EXPRESSION_BYTES_MAX)
        .build()
        .map_err(|e| format!("pattern '{}': {e}", input.pattern))?;
    let path = input.path.as_deref().unwrap_or(".");
    let start = reach.open(path, OFlags::RDONLY).map_err(|e| e.text(path))?;
    let base = place(&start).map_err(|e| format!("{path}: {e}"))?;
    let start = File::from(start);
    let kind = start.metadata().map_err(|e| format!("{path}: {e}"))?.file_type();
    let mut search = Search { expression, deadline, shown: String::new() };
    let stopped = if kind.is_dir() {
        search.tree(&start.into(), &base)
    } else if kind.is_file() {
        search.file(start, &base)
    } else {
        return Err(format!("{path}: not a regular file"));
    };
    match stopped {
        Ok(()) if search.shown.is_empty() => return Ok(text(super::NO_MATCHES)),
        Ok(()) => {}
        Err(Stop::TooMuch) => search.shown.push_str("[output truncated]\n"),
        Err(Stop::TooLong) => search.shown.push_str("(the search took too long and was stopped)\n"),
    }
    search.shown.pop();
    Ok(text(search.shown))
}

struct Search {
    expression: Regex,
    deadline: Instant,
    shown: String,
}

impl Search {
    fn tree(&mut self, directory: &OwnedFd, base: &Path) -> Result<(), Stop> {
        let by_path = |a: &Path, b: &Path| a.cmp(b);
        let walk = WalkBuilder::new(base).parents(false).sort_by_file_path(by_path).build();
        // What cannot be read has nothing to show; it must not hide the rest.
        for entry in walk.flatten() {
            if Instant::now() > self.deadline {
                return Err(Stop::TooLong);
            }
            if !entry.file_type().is_some_and(|kind| kind.is_file()) {
                continue;
            }
            let below = entry.path().strip_prefix(base).unwrap_or(entry.path());
            let flags = ResolveFlags::NO_SYMLINKS;
            let Ok(file) = beneath(directory, below, OFlags::RDONLY, flags) else { continue };
            let file = File::from(file);
            // It may have been replaced since the walk saw it.
            if file.metadata().is_ok_and(|meta| meta.is_file()) {
                self.file(file, entry.path())?;
            }
        }
        Ok(())
    }

    fn file(&mut self, file: File, path: &Path) -> Result<(), Stop> {
        let mut reader = BufReader::with_capacity(64 * 1024, file);
        let sniffed = reader.fill_buf().unwrap_or_default();
        if sniffed[..sniffed.len().min(SNIFFED_BYTES)].contains(&0) {
            return Ok(());
        }
        let mut line = Vec::new();
        let mut number = 0u64;
        while next_line(&mut reader, &mut line) {
            number += 1;
            if number.is_multiple_of(4096) && Instant::now() > self.deadline {
                return Err(Stop::TooLong);
            }
            if self.expression.is_match(&line) {
                self.show(path, number, &line)?;
            }
        }
        Ok(())
    }

    fn show(&mut self, path: &Path, number: u64, line: &[u8]) -> Result<(), Stop> {
        let decoded = String::from_utf8_lossy(line);
        let cut: String = decoded.chars().take(LINE_CHARS_MAX).collect();
        let shown = format!("{}:{number}:{cut}\n", path.to_string_lossy());
        if self.shown.len() + shown.len() > SHOWN_BYTES_MAX {
            return Err(Stop::TooMuch);
        }
        self.shown.push_str(&shown);
        Ok(())
    }
}

/// Reads the next line without its end; of a longer one only the first [`LINE_BYTES_MAX`] bytes
/// are kept. False at the end of the file, and where reading fails.
fn next_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> bool {
    line.clear();
    let mut any = false;
    loop {
        let Ok(buffer) = reader.fill_buf() else { return any };
        if buffer.is_empty() {
            return any;
        }
        any = true;
        let newline = buffer.iter().position(|b| *b == b'\n');
        let piece = &buffer[..newline.unwrap_or(buffer.len())];
        let room = LINE_BYTES_MAX.saturating_sub(line.len());
        line.extend_from_slice(&piece[..piece.len().min(room)]);
        let used = newline.map_or(buffer.len(), |at| at + 1);
        reader.consume(used);
        if newline.is_some() {
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            return true;
        }
    }
}
