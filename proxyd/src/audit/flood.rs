//! Denials that repeat: the first are written singly, the rest of a while are counted.
//!
//! A denied request costs a sandbox nothing, so a hostile one could fill the disk with them. Alike
//! are denials of one lease for one host and port, by one rule and for one reason. A lease that
//! varies what it asks for gets no further than [`KINDS_MAX`] kinds: beyond them only the reason
//! counts.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ipc::id::LeaseId;

use super::Line;

/// For how long denials that are alike are counted before the count is written.
const WINDOW: Duration = Duration::from_secs(10);
/// How many of a kind are written singly within that time.
const SINGLY: u64 = 20;
/// Kinds that are told apart for one lease.
const KINDS_MAX: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It gets a record of its own.
    Write,
    Counted,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Kind {
    /// Entry, host and port; none where the lease has too many kinds.
    place: Option<(String, String, u16)>,
    rule: String,
    code: String,
}

struct Burst {
    begun: Instant,
    seen: u64,
    /// The first that was only counted, and how many.
    held: Option<(Line, u64)>,
}

/// The denials of the last while.
#[derive(Default)]
pub(super) struct Floods(HashMap<Option<LeaseId>, HashMap<Kind, Burst>>);

impl Floods {
    pub(super) fn look(&mut self, line: &Line, now: Instant) -> Verdict {
        let kinds = self.0.entry(line.lease.clone()).or_default();
        let reason = line.reason.as_deref().unwrap_or_default();
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let mut kind = Kind {
            place: Some((text(&line.entry), text(&line.host), line.port.unwrap_or_default())),
            rule: text(&line.rule),
            code: reason.split(':').next().unwrap_or_default().to_owned(),
        };
        if kinds.len() >= KINDS_MAX && !kinds.contains_key(&kind) {
            kind.place = None;
        }
        let (named, burst) = (kind.place.is_some(), Burst { begun: now, seen: 0, held: None });
        let burst = kinds.entry(kind).or_insert(burst);
        burst.seen += 1;
        if burst.seen <= SINGLY {
            return Verdict::Write;
        }
        match &mut burst.held {
            Some((_, count)) => *count += 1,
            held => {
                let mut line = Line { request: None, path: None, method: None, ..line.clone() };
                if !named {
                    (line.entry, line.host, line.port) = (None, None, None);
                    line.reason = line.reason.map(|r| {
                        format!("{}: for many hosts", r.split(':').next().unwrap_or_default())
                    });
                }
                *held = Some((line, 1));
            }
        }
        Verdict::Counted
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.0.values().flat_map(HashMap::values).any(|burst| now - burst.begun >= WINDOW)
    }

    /// Ends what has been counted for long enough, or all; gives one line for each count.
    pub(super) fn expired(&mut self, now: Instant, all: bool) -> Vec<Line> {
        let mut lines = Vec::new();
        self.0.retain(|_, kinds| {
            kinds.retain(|_, burst| {
                let over = all || now - burst.begun >= WINDOW;
                if over && let Some((line, count)) = burst.held.take() {
                    lines.push(summed(line, count));
                }
                !over
            });
            !kinds.is_empty()
        });
        lines
    }
}

fn summed(line: Line, count: u64) -> Line {
    let reason = line.reason.as_deref().unwrap_or_default();
    let seconds = WINDOW.as_secs();
    let reason = Some(format!("{reason} ({count} more like the ones before, within {seconds} s)"));
    Line { reason, repeated: Some(count), ..line }
}
