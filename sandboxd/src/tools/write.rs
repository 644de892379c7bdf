//! `write`: a whole file, with its missing parents.

use std::fs::File;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::files::{Outcome, text};
use super::reach::Reach;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub file_path: String,
    pub content: String,
}

pub fn perform(reach: Reach<'_>, input: &Input) -> Outcome {
    let path = &input.file_path;
    let file = File::from(reach.create(path).map_err(|e| e.text(path))?);
    overwrite(file, path, input.content.as_bytes())?;
    Ok(text(format!("wrote {} bytes to {path}", input.content.len())))
}

/// Replaces what a regular file holds; its inode, owner and mode stay.
pub fn overwrite(mut file: File, path: &str, content: &[u8]) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{path}: {e}");
    if !file.metadata().map_err(fail)?.is_file() {
        return Err(format!("{path}: not a regular file"));
    }
    file.set_len(0).map_err(fail)?;
    file.write_all(content).map_err(fail)
}
