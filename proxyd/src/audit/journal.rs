//! The audit's files: segments of records, one after the other, only ever appended to.
//!
//! A segment is named after its first record. It begins with a magic, that number and the hash of
//! the record before, so that a missing segment shows. When a segment is full, what its records can
//! be found by is left beside it ([`index`](super::index)).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ipc::daemon::{Held, hold};
use ipc::vault::AuditKind;

use super::index::Index;
use super::record::{self, BEGINNING, HASH_BYTES, Hash};
use super::{AuditError, Line, read, retain};

const MAGIC: &[u8; 16] = b"cleanhands aud 2";
pub(super) const HEADER_BYTES: usize = MAGIC.len() + 8 + HASH_BYTES;
/// A segment that has grown to this is followed by another.
const SEGMENT_BYTES: u64 = 16 * 1024 * 1024;
/// Outcomes that wait for a decision to go with, before they go alone.
const WAITING_BYTES_MAX: usize = 128 * 1024;

/// The only writer of the files.
pub(super) struct Journal {
    dir: PathBuf,
    /// Held while this process writes here; another one would break the chain.
    lock: Option<Held>,
    file: Arc<File>,
    /// The first record of the current segment.
    first: u64,
    end: u64,
    last: u64,
    head: Hash,
    index: Index,
    /// What the last record is found by: mostly the next one too.
    found_by: FoundBy,
    /// Frames that are not with the kernel yet, and how many of them are outcomes.
    waiting: Vec<u8>,
    waiting_outcomes: u64,
    /// Outcomes that could not be written since the last group that could.
    lost: u64,
    /// Files with records that are not on disk yet, beside the current one.
    unsynced: Vec<Arc<File>>,
}

pub(super) fn cannot_write(error: impl std::fmt::Display) -> AuditError {
    AuditError::Write(error.to_string())
}

pub(super) fn header(first: u64, before: &Hash) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..16].copy_from_slice(MAGIC);
    bytes[16..24].copy_from_slice(&first.to_le_bytes());
    bytes[24..].copy_from_slice(before);
    bytes
}

/// The number of a segment's first record, and the hash before it.
pub(super) fn parse_header(bytes: &[u8]) -> Option<(u64, Hash)> {
    let header = bytes.first_chunk::<HEADER_BYTES>()?;
    let first = u64::from_le_bytes(*header[16..].first_chunk()?);
    (header.starts_with(MAGIC)).then_some((first, *header[24..].first_chunk()?))
}

impl Journal {
    pub(super) fn open(dir: &Path) -> Result<Self, AuditError> {
        std::fs::create_dir_all(dir).map_err(cannot_write)?;
        let lock = hold(dir).map_err(cannot_write)?;
        let segments = read::segments(dir)?;
        let (first, file, found) = match segments.last() {
            Some((first, path)) => recover(*first, path, &segments)?,
            None => begin(dir, 1, &BEGINNING)?,
        };
        // A sync of a new file does not cover its name.
        lock.sync().map_err(cannot_write)?;
        let mut journal = Self {
            dir: dir.to_owned(),
            lock: Some(lock),
            file: Arc::new(file),
            first,
            end: found.end,
            last: found.last,
            head: found.head,
            index: found.index,
            found_by: FoundBy::default(),
            waiting: Vec::new(),
            waiting_outcomes: 0,
            lost: 0,
            unsynced: Vec::new(),
        };
        if found.torn > 0 {
            let torn = found.torn;
            journal.note(format!("{torn} bytes after this were no whole record and are cut off"));
            journal.hand_over()?;
        }
        Ok(journal)
    }

    /// The first record of the current segment.
    pub(super) fn first(&self) -> u64 {
        self.first
    }

    /// The last record that is with the kernel.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes a record; it goes to the kernel with [`Journal::hand_over`].
    pub(super) fn add(&mut self, kind: AuditKind, line: &Line) {
        let now = retain::milliseconds(SystemTime::now());
        record::encode(&mut self.waiting, kind, line, now);
        self.waiting_outcomes += u64::from(kind == AuditKind::Outcome);
        if self.waiting.len() > WAITING_BYTES_MAX && kind == AuditKind::Outcome {
            // Whether it succeeded shows when the next decision is written.
            let _ = self.hand_over();
        }
    }

    pub(super) fn note(&mut self, reason: String) {
        self.add(AuditKind::Note, &Line { reason: Some(reason), ..Line::default() });
    }

    /// Numbers, chains and writes what waits: all of it is with the kernel then, or none of it,
    /// and it is not tried again.
    pub(super) fn hand_over(&mut self) -> Result<(), AuditError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut batch = std::mem::take(&mut self.waiting);
        if self.lost > 0 {
            let lost = self.lost;
            self.note(format!("{lost} outcomes could not be written before this"));
            self.waiting.extend_from_slice(&batch);
            batch = std::mem::take(&mut self.waiting);
        }
        let written = self.write(&mut batch);
        match &written {
            Ok(()) => self.lost = 0,
            Err(_) => self.lost += self.waiting_outcomes,
        }
        self.waiting_outcomes = 0;
        batch.clear();
        // Its room serves the next batch, unless it has grown out of the usual.
        if batch.capacity() <= WAITING_BYTES_MAX {
            self.waiting = batch;
        }
        written
    }

    fn write(&mut self, batch: &mut [u8]) -> Result<(), AuditError> {
        if self.lock.is_none() {
            return Err(AuditError::Gone);
        }
        if self.end >= SEGMENT_BYTES {
            self.next_segment()?;
        }
        let (mut last, mut head, mut at) = (self.last, self.head, 0);
        while at < batch.len() {
            last += 1;
            (head, at) = record::seal(batch, at, last, &head);
        }
        if let Err(error) = self.file.write_all_at(batch, self.end) {
            // A part may have been written; the next batch need not be as long.
            let _ = self.file.set_len(self.end);
            return Err(cannot_write(error));
        }
        let mut at = 0;
        while let Some(frame) = record::frame(batch, at) {
            if !self.found_by.is_same(frame.fields) {
                self.index.add(frame.fields);
            } else if let Some(time) = record::time(frame.fields) {
                self.index.add_time(time);
            }
            at = frame.end;
        }
        self.end += batch.len() as u64;
        (self.last, self.head) = (last, head);
        Ok(())
    }

    fn next_segment(&mut self) -> Result<(), AuditError> {
        let (first, file, found) = begin(&self.dir, self.last + 1, &self.head)?;
        let full = std::mem::replace(&mut self.file, Arc::new(file));
        self.unsynced.push(full);
        let index = std::mem::take(&mut self.index);
        self.found_by = FoundBy::default();
        // Without it the segment is read when it is asked for.
        let _ = index.keep(&self.dir, self.first);
        (self.first, self.end) = (first, found.end);
        Ok(())
    }

    /// Goes on in a new segment if the first record of this one is older than `span` at `now`.
    pub(super) fn end_segment_since(
        &mut self,
        now: SystemTime,
        span: Duration,
    ) -> Result<(), AuditError> {
        let before = now.checked_sub(span).map(retain::milliseconds);
        let (Some((from, _)), Some(before)) = (self.index.span(), before) else { return Ok(()) };
        let whole = self.lock.is_some() && self.last >= self.first;
        if whole && from < before { self.next_segment() } else { Ok(()) }
    }

    /// The files that a sync has to cover, with the directory when one of them is new.
    pub(super) fn take_unsynced(&mut self) -> Vec<Arc<File>> {
        let mut files = std::mem::take(&mut self.unsynced);
        if !files.is_empty()
            && let Some(directory) = self.lock.as_ref().and_then(|lock| lock.to_sync().ok())
        {
            files.push(Arc::new(directory));
        }
        files.push(Arc::clone(&self.file));
        files
    }

    /// Goes on in a new segment because the current one may not be whole on disk.
    pub(super) fn give_up_segment(&mut self, files: Vec<Arc<File>>, error: &std::io::Error) {
        self.note(format!("records before this may not be on disk: {error}"));
        if self.next_segment().is_err() {
            // The files stay to be synced: until that succeeds nothing leaves.
            self.unsynced = files;
        }
    }

    /// Lets another process write here.
    pub(super) fn release(&mut self) {
        self.lock = None;
    }

    #[cfg(test)]
    pub(super) fn write_to(&mut self, file: File) -> Arc<File> {
        std::mem::replace(&mut self.file, Arc::new(file))
    }

    #[cfg(test)]
    pub(super) fn write_again_to(&mut self, file: Arc<File>) {
        self.file = file;
    }

    #[cfg(test)]
    pub(super) fn fill_segment(&mut self) {
        self.end = self.end.max(SEGMENT_BYTES);
    }
}

/// The part of a record's bytes that names what it is found by.
#[derive(Default)]
struct FoundBy(Vec<u8>);

impl FoundBy {
    /// Whether these fields name the same as those before; remembers them otherwise.
    fn is_same(&mut self, fields: &[u8]) -> bool {
        let Some(names) = record::names(fields) else { return false };
        if names == self.0 {
            return true;
        }
        self.0.clear();
        self.0.extend_from_slice(names);
        false
    }
}

/// Where the last segment ends.
struct Found {
    end: u64,
    last: u64,
    head: Hash,
    index: Index,
    /// Bytes that followed and were no whole record.
    torn: u64,
}

fn begin(dir: &Path, first: u64, before: &Hash) -> Result<(u64, File, Found), AuditError> {
    let path = read::segment_path(dir, first);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).mode(0o600);
    let file = options.open(&path).map_err(cannot_write)?;
    file.write_all_at(&header(first, before), 0).map_err(cannot_write)?;
    let (end, index) = (HEADER_BYTES as u64, Index::default());
    let found = Found { end, last: first - 1, head: *before, index, torn: 0 };
    Ok((first, file, found))
}

/// Takes the last segment up again. A machine that lost power may leave a record there that is not
/// whole; whatever follows the last whole one is moved aside.
fn recover(
    first: u64,
    path: &Path,
    segments: &[(u64, PathBuf)],
) -> Result<(u64, File, Found), AuditError> {
    let bytes = std::fs::read(path).map_err(cannot_write)?;
    let dir = path.parent().unwrap_or(Path::new("."));
    if bytes.len() < HEADER_BYTES {
        // It was begun and no record had come: its header follows from the segment before.
        let before = match segments.iter().rev().nth(1) {
            Some((_, former)) => read::head_of(former)?,
            None => BEGINNING,
        };
        return begin(dir, first, &before);
    }
    let no_segment = || cannot_write(format!("{}: not a file of this audit", path.display()));
    let (named, mut head) = parse_header(&bytes).ok_or_else(no_segment)?;
    if named != first {
        return Err(no_segment());
    }
    let (mut end, mut last, mut index) = (HEADER_BYTES, first - 1, Index::default());
    while let Some(frame) = record::frame(&bytes, end) {
        let sound = record::chained(&head, frame.fields) == *frame.hash;
        // A record that does not fit and has others behind it is for `verify` to report; the last
        // one is what a power cut leaves.
        if !sound && record::frame(&bytes, frame.end).is_none() {
            break;
        }
        last = record::keys(frame.fields).map_or(last + 1, |keys| keys.number);
        index.add(frame.fields);
        (head, end) = (*frame.hash, frame.end);
    }
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(cannot_write)?;
    let torn = (bytes.len() - end) as u64;
    if torn > 0 {
        let aside = path.with_extension(format!("torn-{end}"));
        std::fs::write(aside, &bytes[end..]).map_err(cannot_write)?;
        file.set_len(end as u64).map_err(cannot_write)?;
    }
    Ok((first, file, Found { end: end as u64, last, head, index, torn }))
}
