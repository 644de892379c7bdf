//! Recomputes the chain: what was changed, what is missing, what retention has removed.

use std::collections::HashMap;

use ipc::vault::{AuditRecord, ChainReport, RemovedRecords};

use super::journal::HEADER_BYTES;
use super::read::frames;
use super::record::{self, BEGINNING, Hash};
use super::retain::Removal;

/// Most problems that a report spells out.
const PROBLEMS_MAX: usize = 20;

/// A walk along the chain, from any segment on.
#[derive(Default)]
pub(super) struct Check {
    records: u64,
    expected: u64,
    head: Hash,
    /// The first record of each segment, and the hash that the segment says is before it.
    begun: HashMap<u64, Hash>,
    first: Option<u64>,
    /// The removal that went furthest, and when it was.
    removal: Option<(Removal, String)>,
    problems: Vec<String>,
}

impl Check {
    pub(super) fn problem(&mut self, text: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(text);
        }
    }

    fn gap_before(&mut self, number: u64) -> bool {
        if number <= self.expected {
            return false;
        }
        self.problem(missing(self.expected, number - 1));
        true
    }

    /// A segment says which record comes first in it, and the hash before that one.
    pub(super) fn begin(&mut self, first: u64, before: Hash) {
        if self.first.is_none() {
            self.first = Some(first);
        } else if !self.gap_before(first) && before != self.head {
            self.problem(format!("the file of record {first} does not follow the one before"));
        }
        self.begun.insert(first, before);
        (self.expected, self.head) = (first, before);
    }

    pub(super) fn segment(&mut self, bytes: &[u8], newest: bool) {
        let mut end = HEADER_BYTES;
        for frame in frames(bytes, HEADER_BYTES) {
            end = frame.end;
            self.records += 1;
            let number = record::keys(frame.fields).map_or(self.expected, |keys| keys.number);
            // The hash before a gap is not there to be checked against.
            let follows =
                self.gap_before(number) || record::chained(&self.head, frame.fields) == *frame.hash;
            match record::decode(frame.fields, frame.hash) {
                None => self.problem(format!("record {number} is not readable")),
                Some(_) if !follows => self.problem(format!(
                    "record {number} was changed, or follows another one than it did"
                )),
                Some(record) => self.look_for_removal(record),
            }
            (self.expected, self.head) = (number.saturating_add(1), *frame.hash);
        }
        // The newest segment may be growing while it is read.
        if end < bytes.len() && !newest {
            self.problem(format!("what follows record {} is not readable", self.expected - 1));
        }
    }

    fn look_for_removal(&mut self, record: AuditRecord) {
        let Some(removal) = Removal::of(&record) else { return };
        if let Some(broken) = &removal.broken {
            let (first, last) = (removal.first, removal.last);
            self.problem(format!(
                "records {first} to {last}, removed by retention, were not whole: {broken}"
            ));
        }
        if self.removal.as_ref().is_none_or(|(former, _)| former.last < removal.last) {
            self.removal = Some((removal, record.time));
        }
    }

    /// What is wrong with segments that others follow, the next of which begins like this.
    pub(super) fn finish_before(mut self, first: u64, before: Hash) -> Vec<String> {
        self.begin(first, before);
        self.problems
    }

    /// `last` is the newest record that must be there.
    pub(super) fn finish(mut self, last: u64) -> ChainReport {
        let removed = self.judge_beginning();
        if self.first.is_none() {
            self.expected = 1;
        }
        self.gap_before(last + 1);
        let head = hex::encode(self.head);
        ChainReport { records: self.records, head, removed, problems: self.problems }
    }

    /// A chain begins with record 1, or where a record in it says that retention has left off.
    fn judge_beginning(&mut self) -> Option<RemovedRecords> {
        let first = self.first?;
        if first == 1 {
            if self.begun.get(&1) != Some(&BEGINNING) {
                self.problem("the file of record 1 does not begin the chain".to_owned());
            }
            return None;
        }
        let known = self.removal.take();
        let removed_to = known.as_ref().map_or(0, |(removal, _)| removal.last);
        if removed_to + 1 < first {
            self.problems.insert(0, missing(removed_to + 1, first - 1));
        }
        let (removal, time) = known?;
        // Whatever ended a removal half way, the record of it names the hash at its end.
        if self.begun.get(&(removal.last + 1)).is_some_and(|before| *before != removal.hash) {
            let next = removal.last + 1;
            self.problem(format!("the file of record {next} does not follow what was removed"));
        }
        Some(RemovedRecords { last: removed_to.min(first - 1), time })
    }
}

fn missing(first: u64, last: u64) -> String {
    match first == last {
        true => format!("record {first} is missing"),
        false => format!("records {first} to {last} are missing"),
    }
}
