//! `glob`: the files whose path below a directory matches a pattern, newest first.

use std::path::PathBuf;
use std::time::{Instant, SystemTime};

use globset::GlobBuilder;
use ignore::WalkBuilder;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::files::{Outcome, text};
use super::reach::{Reach, place};

/// Most entries shown; a model that gets as many should narrow its pattern.
const ENTRIES_MAX: usize = 200;
/// Most matches held while the newest are sought: bounds memory in a tree full of files.
const MATCHES_MAX: usize = 100_000;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub pattern: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

pub fn perform(reach: Reach<'_>, input: &Input, deadline: Instant) -> Outcome {
    let pattern = &input.pattern;
    if pattern.starts_with('/') || pattern.split('/').any(|part| part == "..") {
        return Err(format!("pattern '{pattern}' must be relative, without '..'"));
    }
    let matcher = GlobBuilder::new(pattern)
        .literal_separator(true)
        .empty_alternates(true)
        .build()
        .map_err(|e| format!("pattern '{pattern}': {}", e.kind()))?
        .compile_matcher();
    let path = input.path.as_deref().unwrap_or(".");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let directory = reach.open(path, flags).map_err(|e| e.text(path))?;
    let base = place(&directory).map_err(|e| format!("{path}: {e}"))?;

    let into_git = pattern.split('/').any(|part| part == ".git");
    let walk = WalkBuilder::new(&base)
        .standard_filters(false)
        .filter_entry(move |entry| into_git || entry.file_name() != ".git")
        .build();
    let mut found: Vec<(SystemTime, PathBuf)> = Vec::new();
    let mut complete = true;
    // What cannot be read has nothing to show; it must not hide the rest.
    for entry in walk.flatten() {
        if Instant::now() > deadline || found.len() >= MATCHES_MAX {
            complete = false;
            break;
        }
        let is_directory = entry.file_type().is_none_or(|kind| kind.is_dir());
        let below = entry.path().strip_prefix(&base).unwrap_or(entry.path());
        if is_directory || !matcher.is_match(below) {
            continue;
        }
        let modified = entry.metadata().ok().and_then(|meta| meta.modified().ok());
        found.push((modified.unwrap_or(SystemTime::UNIX_EPOCH), entry.into_path()));
    }
    Ok(text(listing(found, complete)))
}

fn listing(mut found: Vec<(SystemTime, PathBuf)>, complete: bool) -> String {
    found.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
    found.truncate(ENTRIES_MAX);
    let mut lines: Vec<String> =
        found.iter().map(|(_, path)| path.to_string_lossy().into_owned()).collect();
    if !complete {
        lines.push("(the search was stopped: there is too much to look at)".into());
    }
    if lines.is_empty() { super::NO_MATCHES.into() } else { lines.join("\n") }
}
