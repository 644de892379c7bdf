//! What a segment can be passed over by: hashes of its leases, sessions and calls, and its time.
//!
//! A full segment has its index in a file beside it. It finds records and is never trusted: a
//! record itself names what it is found by.

use std::collections::HashSet;
use std::path::Path;

use super::query::Filter;
use super::{read, record};

const INDEX: &str = "index";

#[derive(Default)]
pub(super) struct Index {
    keys: HashSet<u64>,
    /// Milliseconds of the earliest and of the latest record; clocks are set back at times.
    span: Option<(i64, i64)>,
}

impl Index {
    /// Adds all that a record is found by.
    pub(super) fn add(&mut self, fields: &[u8]) {
        let Some(found) = record::keys(fields) else { return };
        self.add_time(found.milliseconds);
        let all = [("lease", found.lease), ("session", found.session)].into_iter();
        for (kind, text) in all.chain(found.calls.split(' ').map(|call| ("call", call))) {
            if !text.is_empty() {
                self.keys.insert(key(kind, text));
            }
        }
    }

    /// The same for a record that names the same as the one before.
    pub(super) fn add_time(&mut self, at: i64) {
        let (from, to) = self.span.unwrap_or((at, at));
        self.span = Some((from.min(at), to.max(at)));
    }

    pub(super) fn span(&self) -> Option<(i64, i64)> {
        self.span
    }

    /// Whether there may be a record here that the filter takes.
    pub(super) fn may_hold(&self, filter: &Filter) -> bool {
        let Some((from, to)) = self.span else { return false };
        let named = [
            filter.lease.as_ref().map(|id| key("lease", id.as_str())),
            filter.session.as_ref().map(|id| key("session", id.as_str())),
            filter.call.as_ref().map(|id| key("call", id.as_str())),
        ];
        named.iter().flatten().all(|key| self.keys.contains(key))
            && filter.since.is_none_or(|since| since <= to)
            && filter.until.is_none_or(|until| from < until)
    }

    /// Leaves it beside a full segment: the number of keys, then they and the two times.
    pub(super) fn keep(&self, dir: &Path, first: u64) -> std::io::Result<()> {
        let path = read::segment_path(dir, first).with_extension(INDEX);
        let new = path.with_extension("new");
        let (from, to) = self.span.unwrap_or_default();
        let mut bytes = (self.keys.len() as u64).to_le_bytes().to_vec();
        bytes.extend(self.keys.iter().flat_map(|key| key.to_le_bytes()));
        bytes.extend([from, to].iter().flat_map(|time| time.to_le_bytes()));
        std::fs::write(&new, bytes)?;
        std::fs::rename(new, path)
    }

    /// The one beside a segment, if it is whole.
    pub(super) fn kept(segment: &Path) -> Option<Self> {
        let bytes = std::fs::read(segment.with_extension(INDEX)).ok()?;
        let numbers = bytes.as_chunks::<8>().0;
        let (count, rest) = numbers.split_first()?;
        let (keys, times) = rest.split_last_chunk::<2>()?;
        let [from, to] = times.map(i64::from_le_bytes);
        let keys: HashSet<u64> = keys.iter().map(|key| u64::from_le_bytes(*key)).collect();
        let whole = keys.len() as u64 == u64::from_le_bytes(*count)
            && bytes.len() == 8 * numbers.len()
            && from <= to;
        whole.then_some(Self { keys, span: Some((from, to)) })
    }
}

/// What stands for a text: FNV-1a, the same in every version.
fn key(kind: &str, text: &str) -> u64 {
    kind.bytes().chain([0]).chain(text.bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
