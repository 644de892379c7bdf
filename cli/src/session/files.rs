//! Sessions and logs as files: written whole or not at all, never over another file.

use std::io::{BufRead, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::api::Harness;
use crate::args::Global;
use crate::failure::Failure;
use crate::term;
use crate::wire::text_at;

/// Bytes of events in one step of an import: far below what one request may hold.
const STEP_BYTES: usize = 4 * 1024 * 1024;
/// Longest line of a file: the largest event and its frame.
const LINE_BYTES_MAX: u64 = 96 * 1024 * 1024;

pub async fn export(
    harness: &Harness,
    session: &str,
    file: Option<PathBuf>,
) -> Result<ExitCode, Failure> {
    let body = harness.export(session).await?.into_body();
    match file {
        None => copy(body, term::write_out).await?,
        Some(path) => {
            let out = NewFile::create(&path)?;
            copy(body, |bytes| out.write(bytes)).await?;
            out.finish()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn backup(global: &Global, harness: &Harness, path: &Path) -> Result<ExitCode, Failure> {
    let body = harness.stream_of("/cleanhands/v1/backup").await?.into_body();
    let out = NewFile::create(path)?;
    copy(body, |bytes| out.write(bytes)).await?;
    let bytes = out.finish()?;
    if global.json {
        term::json_line(&json!({ "file": path.display().to_string(), "bytes": bytes }))?;
    } else {
        term::line(&format!("{}: {bytes} bytes; as sessions.db it is the log", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn copy(
    mut body: Incoming,
    mut write: impl FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| Failure::new(format!("harnessd broke off: {error}")))?;
        if let Ok(bytes) = frame.into_data() {
            write(&bytes)?;
        }
    }
    Ok(())
}

/// A file that has its name only once it is whole and on disk.
struct NewFile {
    path: PathBuf,
    partial: PathBuf,
    file: std::fs::File,
}

impl NewFile {
    fn create(path: &Path) -> Result<Self, Failure> {
        if path.symlink_metadata().is_ok() {
            let text = format!("{} exists already", path.display());
            return Err(Failure::new(text).with_hint("name a file that does not"));
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".{}.partial", std::process::id()));
        let partial = PathBuf::from(partial);
        // It holds what was said in sessions: for its owner only.
        let options = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).clone();
        let file = options.open(&partial).map_err(|error| {
            Failure::new(format!("cannot write {}: {error}", partial.display()))
        })?;
        Ok(Self { path: path.to_owned(), partial, file })
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        (&self.file).write_all(bytes).map_err(|error| self.failed(&error))
    }

    /// Gives the length.
    fn finish(self) -> Result<u64, Failure> {
        self.file.sync_all().map_err(|error| self.failed(&error))?;
        // A link, unlike a rename, does not replace what came up meanwhile.
        std::fs::hard_link(&self.partial, &self.path).map_err(|error| self.failed(&error))?;
        Ok(self.file.metadata().map(|facts| facts.len()).unwrap_or(0))
    }

    fn failed(&self, error: &std::io::Error) -> Failure {
        Failure::new(format!("cannot write {}: {error}", self.path.display()))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // Whole, it has its own name by now.
        let _ = std::fs::remove_file(&self.partial);
    }
}

pub async fn import(global: &Global, harness: &Harness, path: &Path) -> Result<ExitCode, Failure> {
    let unreadable = |why: String| Failure::new(format!("cannot import {}: {why}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| unreadable(error.to_string()))?;
    let mut lines = Lines { reader: std::io::BufReader::new(file), number: 0 };
    let header = lines.next().map_err(unreadable)?.unwrap_or(Value::Null);
    let session = text_at(&header, &["session"]);
    if session.is_empty() {
        let why = "its first line names no session".to_owned();
        return Err(unreadable(why).with_hint("`cleanhands session export` writes such files"));
    }
    let (mut step, mut bytes, mut count) = (Vec::new(), 0, 0_u64);
    loop {
        let (line, length) = lines.next_sized().map_err(unreadable)?;
        let line = line.ok_or_else(|| unreadable("it ends before its last line".to_owned()))?;
        if let Some(end) = line.get("end").and_then(Value::as_u64) {
            if end != count {
                return Err(unreadable(format!("it says {end} events and has {count}")));
            }
            break;
        }
        count += 1;
        bytes += length;
        step.push(line);
        if bytes >= STEP_BYTES {
            let events = std::mem::take(&mut step);
            let body = json!({ "header": header, "events": events, "last": false });
            harness.import(&session, &body).await?;
            bytes = 0;
        }
    }
    let body = json!({ "header": header, "events": step, "last": true });
    harness.import(&session, &body).await?;
    if global.json {
        term::json_line(&json!({ "session": session, "events": count }))?;
    } else {
        term::line(&format!("session {session}: {count} events; it rests until you speak to it"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A file's lines of JSON.
struct Lines {
    reader: std::io::BufReader<std::fs::File>,
    number: u64,
}

impl Lines {
    fn next(&mut self) -> Result<Option<Value>, String> {
        self.next_sized().map(|(line, _)| line)
    }

    fn next_sized(&mut self) -> Result<(Option<Value>, usize), String> {
        let mut line = Vec::new();
        self.number += 1;
        let mut limited = std::io::Read::take(&mut self.reader, LINE_BYTES_MAX);
        let read = limited.read_until(b'\n', &mut line).map_err(|error| error.to_string())?;
        if read == 0 {
            return Ok((None, 0));
        }
        let value = serde_json::from_slice(&line)
            .map_err(|error| format!("line {} is no JSON: {error}", self.number))?;
        Ok((Some(value), read))
    }
}
