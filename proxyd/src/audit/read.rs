//! Reads the audit's files: pages by filter, and the whole chain.
//!
//! A full segment has a file of keys beside it, hashes of the leases, sessions and calls in it, so
//! that a filter passes over segments without looking into them. They find records and are never
//! trusted: a record itself names its lease, session and calls.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use ipc::vault::{AuditPage, ChainReport};

use super::journal::{self, HEADER_BYTES};
use super::record::{self, BEGINNING, Frame, Hash, Keys};
use super::{AuditError, Filter, PAGE_RECORDS_MAX};

/// Most problems that a report spells out.
const PROBLEMS_MAX: usize = 20;
/// Segments whose keys are kept in memory.
const SEGMENTS_KEPT: usize = 1024;
const SEGMENT: &str = "audit";
const KEYS: &str = "keys";

fn cannot_read(error: impl std::fmt::Display) -> AuditError {
    AuditError::Read(error.to_string())
}

pub(super) fn segment_path(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("{first:020}.{SEGMENT}"))
}

/// All segments, with the number in their name, in order.
pub(super) fn segments(dir: &Path) -> Result<Vec<(u64, PathBuf)>, AuditError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(cannot_read)? {
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
    let bytes = std::fs::read(path).map_err(cannot_read)?;
    let before = journal::parse_header(&bytes).map(|(_, before)| before);
    let last = frames(&bytes, HEADER_BYTES).last().map(|frame| *frame.hash);
    last.or(before).ok_or_else(|| cannot_read(format!("{}: no header", path.display())))
}

fn frames(bytes: &[u8], from: usize) -> impl Iterator<Item = Frame<'_>> {
    std::iter::successors(record::frame(bytes, from), |frame| record::frame(bytes, frame.end))
}

/// What stands for a text in a file of keys: FNV-1a, the same in every version.
pub(super) fn key(kind: &str, text: &str) -> u64 {
    kind.bytes().chain([0]).chain(text.bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Leaves the keys of a full segment beside it: their number, then they.
pub(super) fn keep_keys(dir: &Path, first: u64, keys: &HashSet<u64>) -> std::io::Result<()> {
    let path = segment_path(dir, first).with_extension(KEYS);
    let new = path.with_extension("new");
    let mut bytes = (keys.len() as u64).to_le_bytes().to_vec();
    bytes.extend(keys.iter().flat_map(|key| key.to_le_bytes()));
    std::fs::write(&new, bytes)?;
    std::fs::rename(new, path)
}

fn kept_keys(path: &Path) -> Option<HashSet<u64>> {
    let bytes = std::fs::read(path.with_extension(KEYS)).ok()?;
    let mut numbers = bytes.as_chunks::<8>().0.iter().map(|chunk| u64::from_le_bytes(*chunk));
    let count = numbers.next()?;
    let keys: HashSet<u64> = numbers.collect();
    (keys.len() as u64 == count && bytes.len() as u64 == 8 + 8 * count).then_some(keys)
}

pub(super) struct Reader {
    dir: PathBuf,
    /// The keys of full segments, by the number of their first record.
    keys: HashMap<u64, HashSet<u64>>,
    /// Where the last page ended: segment, record, offset behind it.
    left_off: (u64, u64, u64),
}

impl Reader {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), keys: HashMap::new(), left_off: (0, 0, 0) }
    }

    pub(super) fn page(&mut self, filter: &Filter) -> Result<AuditPage, AuditError> {
        let wanted: Vec<u64> = [
            filter.lease.as_ref().map(|id| key("lease", id.as_str())),
            filter.session.as_ref().map(|id| key("session", id.as_str())),
            filter.call.as_ref().map(|id| key("call", id.as_str())),
        ]
        .into_iter()
        .flatten()
        .collect();
        let limit = filter.limit.clamp(1, PAGE_RECORDS_MAX);
        let segments = segments(&self.dir)?;
        let mut records = Vec::new();
        for (index, (first, path)) in segments.iter().enumerate() {
            let next = segments.get(index + 1).map(|(next, _)| *next);
            if next.is_some_and(|next| next <= filter.after.saturating_add(1)) {
                continue;
            }
            // Only a segment that others follow is full, and has all its keys.
            if next.is_some() && !wanted.is_empty() && !self.may_hold(*first, path, &wanted)? {
                continue;
            }
            let (bytes, from, base) = self.read_from(*first, path, filter.after)?;
            for frame in frames(&bytes, from) {
                let Some(keys) = record::keys(frame.fields) else { continue };
                if keys.number <= filter.after || !matches(&keys, filter) {
                    continue;
                }
                records.extend(record::decode(frame.fields, frame.hash));
                self.left_off = (*first, keys.number, base + frame.end as u64);
                if records.len() == limit {
                    let last = keys.number;
                    return Ok(AuditPage { records, last });
                }
            }
        }
        let last = records.last().map_or(filter.after, |record| record.seq);
        Ok(AuditPage { records, last })
    }

    /// A segment's bytes, from where reading for records after `after` may begin.
    fn read_from(
        &self,
        first: u64,
        path: &Path,
        after: u64,
    ) -> Result<(Vec<u8>, usize, u64), AuditError> {
        let mut file = std::fs::File::open(path).map_err(cannot_read)?;
        let (segment, number, offset) = self.left_off;
        let (base, from) =
            if segment == first && number <= after { (offset, 0) } else { (0, HEADER_BYTES) };
        file.seek(SeekFrom::Start(base)).map_err(cannot_read)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(cannot_read)?;
        Ok((bytes, from, base))
    }

    fn may_hold(&mut self, first: u64, path: &Path, wanted: &[u64]) -> Result<bool, AuditError> {
        if !self.keys.contains_key(&first) {
            let keys = match kept_keys(path) {
                Some(keys) => keys,
                None => {
                    let bytes = std::fs::read(path).map_err(cannot_read)?;
                    let mut keys = HashSet::new();
                    frames(&bytes, HEADER_BYTES)
                        .for_each(|frame| journal::add_keys(&mut keys, frame.fields));
                    keys
                }
            };
            if self.keys.len() >= SEGMENTS_KEPT {
                self.keys.clear();
            }
            self.keys.insert(first, keys);
        }
        Ok(self.keys.get(&first).is_some_and(|keys| wanted.iter().all(|key| keys.contains(key))))
    }

    /// Recomputes the chain; `last` is the newest record that must be there.
    pub(super) fn verify(&mut self, last: u64) -> Result<ChainReport, AuditError> {
        let mut check = Check { records: 0, expected: 1, head: BEGINNING, problems: Vec::new() };
        let segments = segments(&self.dir)?;
        for (index, (first, path)) in segments.iter().enumerate() {
            let bytes = std::fs::read(path).map_err(cannot_read)?;
            let newest = index + 1 == segments.len();
            match journal::parse_header(&bytes) {
                Some((named, before)) if named == *first => {
                    check.begin(*first, before);
                    check.segment(&bytes, newest);
                }
                _ => check.problem(format!("{} has no sound beginning", path.display())),
            }
        }
        check.gap_before(last + 1);
        Ok(ChainReport {
            records: check.records,
            head: hex::encode(check.head),
            problems: check.problems,
        })
    }
}

fn matches(keys: &Keys<'_>, filter: &Filter) -> bool {
    let is = |found: &str, wanted: Option<&str>| wanted.is_none_or(|wanted| found == wanted);
    is(keys.lease, filter.lease.as_ref().map(|id| id.as_str()))
        && is(keys.session, filter.session.as_ref().map(|id| id.as_str()))
        && filter.call.as_ref().is_none_or(|call| keys.calls.split(' ').any(|c| c == call.as_str()))
}

/// A walk along the chain.
struct Check {
    records: u64,
    expected: u64,
    head: Hash,
    problems: Vec<String>,
}

impl Check {
    fn problem(&mut self, text: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(text);
        }
    }

    fn gap_before(&mut self, number: u64) -> bool {
        if number <= self.expected {
            return false;
        }
        let (first, last) = (self.expected, number - 1);
        self.problem(match first == last {
            true => format!("record {first} is missing"),
            false => format!("records {first} to {last} are missing"),
        });
        true
    }

    /// A segment says which record comes first in it, and the hash before that one.
    fn begin(&mut self, first: u64, before: Hash) {
        if !self.gap_before(first) && before != self.head {
            self.problem(format!("the file of record {first} does not follow the one before"));
        }
        (self.expected, self.head) = (first, before);
    }

    fn segment(&mut self, bytes: &[u8], newest: bool) {
        let mut end = HEADER_BYTES;
        for frame in frames(bytes, HEADER_BYTES) {
            end = frame.end;
            self.records += 1;
            let number = record::keys(frame.fields).map_or(self.expected, |keys| keys.number);
            // The hash before a gap is not there to be checked against.
            let follows =
                self.gap_before(number) || record::chained(&self.head, frame.fields) == *frame.hash;
            if record::decode(frame.fields, frame.hash).is_none() {
                self.problem(format!("record {number} is not readable"));
            } else if !follows {
                self.problem(format!(
                    "record {number} was changed, or follows another one than it did"
                ));
            }
            (self.expected, self.head) = (number.saturating_add(1), *frame.hash);
        }
        // The newest segment may be growing while it is read.
        if end < bytes.len() && !newest {
            self.problem(format!("what follows record {} is not readable", self.expected - 1));
        }
    }
}
