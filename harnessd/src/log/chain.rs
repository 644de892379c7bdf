//! The hash chain of a session: what each hash covers, and how a chain is checked.
//!
//! SHA-256 over the previous hash and every column of the event, each with its length before it,
//! so that no two different events have the same bytes. What this cannot see: someone who rewrites
//! the whole file with a whole new chain; for that the heads also go into proxyd's audit.

use ipc::session::LogEvent;
use ipc::vault::ChainReport;
use sha2::{Digest, Sha256};

/// What stands before the first event.
pub const GENESIS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Problems reported before the rest is only counted.
const PROBLEMS_MAX: usize = 20;

/// The hash of one event.
pub fn hash(session: &str, event: &LogEvent, body: &str) -> String {
    let seq = event.seq.to_string();
    let mut hasher = Sha256::new();
    hasher.update(b"cleanhands session event 1\n");
    let fields = [&event.previous, session, &seq, &event.id, &event.time, &event.kind, body];
    for field in fields {
        hasher.update((field.len() as u64).to_le_bytes());
        hasher.update(field.as_bytes());
    }
    hex::encode(hasher.finalize())
}

/// Goes along a chain, event by event.
pub struct Check<'a> {
    session: &'a str,
    last: u64,
    head: String,
    problems: Vec<String>,
    more: usize,
}

impl<'a> Check<'a> {
    pub fn new(session: &'a str) -> Self {
        Self { session, last: 0, head: GENESIS.to_owned(), problems: Vec::new(), more: 0 }
    }

    /// Takes the next event, with its body as it is stored.
    pub fn event(&mut self, event: &LogEvent, body: &str) {
        let expected = self.last + 1;
        if event.seq != expected {
            let upto = event.seq.saturating_sub(1);
            self.problem(format!("events {expected} to {upto} are missing"));
        } else if event.previous != self.head {
            self.problem(format!("event {} does not follow the one before it", event.seq));
        }
        if hash(self.session, event, body) != event.hash {
            self.problem(format!("event {} was rewritten", event.seq));
        }
        self.last = event.seq;
        self.head.clone_from(&event.hash);
    }

    /// Compares with what was counted when the events were appended.
    pub fn finish(mut self, events: u64, head: &str) -> ChainReport {
        if self.last < events {
            let last = self.last;
            self.problem(format!("the log ends at event {last}, but {events} were appended"));
        } else if self.last > events {
            let last = self.last;
            self.problem(format!("the log ends at event {last}, but only {events} were appended"));
        } else if self.head != head {
            self.problem("the last event is not the one that was appended".to_owned());
        }
        if self.more > 0 {
            self.problems.push(format!("and {} more", self.more));
        }
        ChainReport { records: self.last, head: self.head, removed: None, problems: self.problems }
    }

    fn problem(&mut self, text: String) {
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(text);
        } else {
            self.more += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(count: u64) -> Vec<LogEvent> {
        let mut previous = GENESIS.to_owned();
        let mut events = Vec::new();
        for seq in 1..=count {
            let mut event = LogEvent {
                seq,
                id: format!("sevt_{seq}"),
                time: "2026-01-01T00:00:00.000Z".into(),
                kind: "note".into(),
                body: serde_json::Value::Null,
                previous,
                hash: String::new(),
            };
            event.hash = hash("sesn_a", &event, "{}");
            previous = event.hash.clone();
            events.push(event);
        }
        events
    }

    fn problems(events: &[LogEvent], count: u64, head: &str) -> Vec<String> {
        let mut check = Check::new("sesn_a");
        for event in events {
            check.event(event, "{}");
        }
        check.finish(count, head).problems
    }

    #[test]
    fn tells_a_whole_chain_a_gap_a_rewrite_and_a_truncation_apart() {
        let whole = chain(4);
        let head = whole[3].hash.clone();
        let gap: Vec<_> = whole.iter().filter(|e| e.seq != 2).cloned().collect();
        let mut rewritten = whole.clone();
        rewritten[1].kind = "nota".into();

        assert_eq!(problems(&whole, 4, &head), Vec::<String>::new());
        assert_eq!(problems(&gap, 4, &head), ["events 2 to 2 are missing"]);
        assert_eq!(problems(&rewritten, 4, &head), ["event 2 was rewritten"]);
        assert_eq!(
            problems(&whole[..3], 4, &head),
            ["the log ends at event 3, but 4 were appended"]
        );
    }
}
