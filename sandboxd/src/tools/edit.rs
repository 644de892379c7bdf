//! `edit`: one text in a file replaced by another, exactly where it stands.

use std::io::{Read, Seek};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::files::{Outcome, text};
use super::reach::Reach;
use super::read::open_regular;
use super::write::overwrite;

/// Largest file edited, in bytes: it is held in memory whole, twice.
const FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub file_path: String,
    pub old_string: String,
    pub new_string: String,
    #[serde(default)]
    pub replace_all: bool,
}

pub fn perform(reach: Reach<'_>, input: &Input) -> Outcome {
    let path = &input.file_path;
    if input.old_string.is_empty() {
        return Err(format!("{path}: old_string is empty"));
    }
    let mut file = open_regular(reach, path, OFlags::RDWR)?;
    let mut bytes = Vec::new();
    let read = (&mut file).take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
    if read.map_err(|e| format!("{path}: {e}"))? as u64 > FILE_BYTES_MAX {
        return Err(format!("{path}: files of more than {FILE_BYTES_MAX} bytes are not edited"));
    }
    let before = String::from_utf8(bytes).map_err(|_| format!("{path}: is not UTF-8 text"))?;
    let count = before.matches(&input.old_string).count();
    match count {
        0 => return Err(format!("{path}: old_string is not in the file")),
        2.. if !input.replace_all => {
            return Err(format!(
                "{path}: old_string is in the file {count} times: \
                 give more of its surroundings, or set replace_all"
            ));
        }
        _ => {}
    }
    let after = before.replace(&input.old_string, &input.new_string);
    file.rewind().map_err(|e| format!("{path}: {e}"))?;
    overwrite(file, path, after.as_bytes())?;
    Ok(text(format!("edited {path} ({count} replacement(s))")))
}
