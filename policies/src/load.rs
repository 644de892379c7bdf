//! Reads a directory of policy files: the only I/O of the crate.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::diagnostic::Diagnostic;
use crate::set::GROUPS_FILE;

/// No policy needs more; it keeps a stray file from filling memory.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The folder with the shipped policies is this crate as well; its manifest is no policy.
const MANIFEST: &str = "Cargo.toml";

/// Every `NAME.toml` of the directory, as path and text, sorted.
pub(crate) fn read(dir: &Path) -> Result<Vec<(String, String)>, Vec<Diagnostic>> {
    let shown = dir.display().to_string();
    let cannot = |error: io::Error| {
        vec![
            Diagnostic::whole(&shown, format!("cannot read the policies: {}", reason(&error)))
                .with_hint("policies are files NAME.toml in one directory, one per environment"),
        ]
    };
    let meta = fs::metadata(dir).map_err(cannot)?;
    // Who may create files in the directory can replace a policy. Sticky bits do not help: they
    // stop removal, not the addition of an environment.
    check_owner(&meta, &shown).map_err(|found| vec![*found])?;
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let skipped = path
            .file_name()
            .is_none_or(|name| name == MANIFEST || name.as_encoded_bytes().starts_with(b"."));
        if !skipped && path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    let (mut files, mut found) = (Vec::new(), Vec::new());
    for path in paths {
        match read_file(&path) {
            Ok(file) => files.push(file),
            Err(diagnostic) => found.push(*diagnostic),
        }
    }
    if found.is_empty() {
        return Ok(files);
    }
    // All that is wrong is told at once, unless the others name groups that cannot be read.
    if !found.iter().any(|diagnostic| Path::new(&diagnostic.file).ends_with(GROUPS_FILE)) {
        found.append(&mut crate::file::parse(&files).1);
    }
    found.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
    Err(found)
}

fn read_file(path: &Path) -> Result<(String, String), Box<Diagnostic>> {
    let shown = path.display().to_string();
    let cannot =
        |why: String| Box::new(Diagnostic::whole(&shown, format!("cannot read the policy: {why}")));
    // A FIFO in the directory must not hold the daemon up.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| cannot(reason(&error)))?;
    // Asked of the open file, so that it cannot be exchanged in between.
    let meta = file.metadata().map_err(|error| cannot(reason(&error)))?;
    if !meta.is_file() {
        return Err(cannot("not a regular file".to_owned()));
    }
    check_owner(&meta, &shown)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| cannot(reason(&error)))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(cannot("larger than 1 MiB".to_owned()));
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok((shown, text)),
        Err(error) => {
            let at = error.utf8_error().valid_up_to();
            // Up to there the text is the same, so the place is.
            let text = String::from_utf8_lossy(error.as_bytes());
            let message = "cannot read the policy: it is not UTF-8 from here on".to_owned();
            Err(Box::new(Diagnostic::at(&shown, &text, at..at + 1, message)))
        }
    }
}

/// A policy decides where credentials go: whoever can write it holds them.
fn check_owner(meta: &fs::Metadata, shown: &str) -> Result<(), Box<Diagnostic>> {
    if meta.mode() & 0o022 != 0 {
        let found = Diagnostic::whole(shown, "others can write it".to_owned());
        return Err(Box::new(found.with_hint(format!("chmod go-w {shown}"))));
    }
    let own = rustix::process::geteuid().as_raw();
    if meta.uid() != 0 && meta.uid() != own {
        let found = Diagnostic::whole(shown, format!("it belongs to uid {}", meta.uid()));
        let hint = format!("it must belong to root or to uid {own}, which reads it");
        return Err(Box::new(found.with_hint(hint)));
    }
    Ok(())
}

/// The error without its number.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}
