//! Reads the audit's files: pages by filter, and the whole chain.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use ipc::vault::{AuditPage, ChainReport};

use super::chain::Check;
use super::index::Index;
use super::journal::{self, HEADER_BYTES};
use super::query::Filter;
use super::record::{self, Frame, Hash};
use super::{AuditError, PAGE_RECORDS_MAX};

/// Segments whose index is kept in memory.
const SEGMENTS_KEPT: usize = 1024;
/// A page ends when so much was read for it, whatever was found.
const PAGE_BYTES_MAX: usize = 128 * 1024 * 1024;
const SEGMENT: &str = "audit";

pub(super) fn cannot_read(error: impl std::fmt::Display) -> AuditError {
    AuditError::Read(error.to_string())
}

/// The same about a file, which it names.
pub(super) fn unreadable(path: &Path) -> impl Fn(std::io::Error) -> AuditError {
    move |error| cannot_read(format!("{}: {error}", path.display()))
}

pub(super) fn segment_path(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("{first:020}.{SEGMENT}"))
}

/// All segments, with the number in their name, in order.
pub(super) fn segments(dir: &Path) -> Result<Vec<(u64, PathBuf)>, AuditError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable(dir))? {
        let path = entry.map_err(cannot_read)?.path();
        if path.extension().is_some_and(|extension| extension == SEGMENT)
            && let Some(first) = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok())
        {
            found.push((first, path));
        }
    }
    found.sort();
    Ok(found)
}

/// The hash of the last record in a segment.
pub(super) fn head_of(path: &Path) -> Result<Hash, AuditError> {
    let bytes = std::fs::read(path).map_err(unreadable(path))?;
    let before = journal::parse_header(&bytes).map(|(_, before)| before);
    let last = frames(&bytes, HEADER_BYTES).last().map(|frame| *frame.hash);
    last.or(before).ok_or_else(|| cannot_read(format!("{}: no header", path.display())))
}

/// What a segment says at its beginning.
pub(super) fn header_of(path: &Path) -> Result<Option<(u64, Hash)>, AuditError> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable(path))?;
    file.take(HEADER_BYTES as u64).read_to_end(&mut bytes).map_err(unreadable(path))?;
    Ok(journal::parse_header(&bytes))
}

/// Takes a check on through one segment.
pub(super) fn walk(
    check: &mut Check,
    first: u64,
    path: &Path,
    newest: bool,
) -> Result<(), AuditError> {
    let bytes = std::fs::read(path).map_err(unreadable(path))?;
    match journal::parse_header(&bytes) {
        Some((named, before)) if named == first => {
            check.begin(first, before);
            check.segment(&bytes, newest);
        }
        _ => check.problem(format!("{} has no sound beginning", path.display())),
    }
    Ok(())
}

pub(super) fn frames(bytes: &[u8], from: usize) -> impl Iterator<Item = Frame<'_>> {
    std::iter::successors(record::frame(bytes, from), |frame| record::frame(bytes, frame.end))
}

pub(super) struct Reader {
    dir: PathBuf,
    /// Of full segments, by the number of their first record.
    indices: HashMap<u64, Index>,
    /// Where the last page ended: segment, record, offset behind it.
    left_off: (u64, u64, u64),
}

impl Reader {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), indices: HashMap::new(), left_off: (0, 0, 0) }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// `newest` is the number of the newest record.
    pub(super) fn page(&mut self, filter: &Filter, newest: u64) -> Result<AuditPage, AuditError> {
        let limit = filter.limit.clamp(1, PAGE_RECORDS_MAX);
        let segments = segments(&self.dir)?;
        let mut page = AuditPage { records: Vec::new(), last: filter.after, newest };
        let mut read = 0;
        for (index, (first, path)) in segments.iter().enumerate() {
            let next = segments.get(index + 1).map(|(next, _)| *next);
            if next.is_some_and(|next| next <= filter.after.saturating_add(1)) {
                continue;
            }
            // Only a segment that others follow is full, and has its whole index.
            if let Some(next) = next
                && filter.has_index()
                && !self.index(*first, path)?.may_hold(filter)
            {
                page.last = page.last.max(next - 1);
                continue;
            }
            let (bytes, from, base) = self.read_from(*first, path, filter.after)?;
            for frame in frames(&bytes, from) {
                let Some(keys) = record::keys(frame.fields) else { continue };
                if keys.number <= filter.after {
                    continue;
                }
                page.last = keys.number;
                self.left_off = (*first, keys.number, base + frame.end as u64);
                if filter.takes_keys(&keys) {
                    let record = record::decode(frame.fields, frame.hash);
                    page.records.extend(record.filter(|record| filter.takes(record)));
                }
                if page.records.len() == limit {
                    return Ok(page);
                }
            }
            read += bytes.len();
            if read >= PAGE_BYTES_MAX {
                break;
            }
        }
        Ok(page)
    }

    /// A segment's bytes, from where reading for records after `after` may begin.
    fn read_from(
        &self,
        first: u64,
        path: &Path,
        after: u64,
    ) -> Result<(Vec<u8>, usize, u64), AuditError> {
        let mut file = std::fs::File::open(path).map_err(unreadable(path))?;
        let (segment, number, offset) = self.left_off;
        let (base, from) =
            if segment == first && number <= after { (offset, 0) } else { (0, HEADER_BYTES) };
        file.seek(SeekFrom::Start(base)).map_err(unreadable(path))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(unreadable(path))?;
        Ok((bytes, from, base))
    }

    /// That of a full segment.
    pub(super) fn index(&mut self, first: u64, path: &Path) -> Result<&Index, AuditError> {
        if !self.indices.contains_key(&first) && self.indices.len() >= SEGMENTS_KEPT {
            self.indices.clear();
        }
        match self.indices.entry(first) {
            Entry::Occupied(found) => Ok(found.into_mut()),
            Entry::Vacant(place) => {
                let index = match Index::kept(path) {
                    Some(index) => index,
                    None => {
                        let bytes = std::fs::read(path).map_err(unreadable(path))?;
                        let mut index = Index::default();
                        frames(&bytes, HEADER_BYTES).for_each(|frame| index.add(frame.fields));
                        index
                    }
                };
                Ok(place.insert(index))
            }
        }
    }

    /// A segment is no longer there.
    pub(super) fn forget(&mut self, first: u64) {
        self.indices.remove(&first);
    }

    /// Recomputes the chain; `last` is the newest record that must be there.
    pub(super) fn verify(&mut self, last: u64) -> Result<ChainReport, AuditError> {
        let mut check = Check::default();
        let segments = segments(&self.dir)?;
        for (index, (first, path)) in segments.iter().enumerate() {
            walk(&mut check, *first, path, index + 1 == segments.len())?;
        }
        Ok(check.finish(last))
    }
}
