//! What was recorded since the start, counted for metrics: numbers, and words of our own.

use std::collections::BTreeMap;

use super::Line;

/// Most reasons told apart. They are words of our own, which nothing bounds; the rest is `other`.
const REASONS_MAX: usize = 128;
/// Upper ends of the classes of durations, in milliseconds; one more class is beyond them.
pub const DURATIONS_MS: [u64; 11] = [1, 5, 10, 25, 50, 100, 250, 1000, 5000, 30_000, 300_000];

/// Counted as it is decided and as it ends, whether it has a record of its own or not.
#[derive(Clone, Default)]
pub struct Counts {
    pub allowed: u64,
    /// Of those, with a credential.
    pub injected: u64,
    /// By reason.
    pub denied: BTreeMap<String, u64>,
    /// What did not leave because no record could be made.
    pub stopped: u64,
    /// By the class of the status, as `2xx`; `none` where there was no answer.
    pub ended: BTreeMap<String, u64>,
    /// What was allowed and did not come to its proper end, by reason.
    pub failed: BTreeMap<String, u64>,
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub masked: u64,
    /// How many ended within the class, not counting those within a lower one.
    pub durations: [u64; DURATIONS_MS.len() + 1],
    pub milliseconds: u64,
}

impl Counts {
    pub(super) fn allowed(&mut self, line: &Line) {
        self.allowed += 1;
        self.injected += u64::from(line.credential.is_some());
    }

    pub(super) fn denied(&mut self, line: &Line) {
        count(&mut self.denied, code(line).unwrap_or("other"));
    }

    pub(super) fn ended(&mut self, line: &Line) {
        let class = match line.status {
            Some(status @ 100..=599) => {
                ["1xx", "2xx", "3xx", "4xx", "5xx"][usize::from(status / 100) - 1]
            }
            Some(_) => "other",
            None => "none",
        };
        count(&mut self.ended, class);
        if let Some(code) = code(line) {
            count(&mut self.failed, code);
        }
        self.bytes_up += line.bytes_up.unwrap_or_default();
        self.bytes_down += line.bytes_down.unwrap_or_default();
        self.masked += line.scrubbed.unwrap_or_default();
        let took = line.duration_ms.unwrap_or_default();
        let class = DURATIONS_MS.iter().position(|end| took <= *end);
        self.durations[class.unwrap_or(DURATIONS_MS.len())] += 1;
        self.milliseconds = self.milliseconds.saturating_add(took);
    }
}

/// The word for programs that a reason begins with.
fn code(line: &Line) -> Option<&str> {
    let code = line.reason.as_deref()?.split(':').next().unwrap_or_default();
    let plain = !code.is_empty() && code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    Some(if plain { code } else { "other" })
}

fn count(counts: &mut BTreeMap<String, u64>, what: &str) {
    if let Some(count) = counts.get_mut(what) {
        *count += 1;
        return;
    }
    let what = if counts.len() < REASONS_MAX { what } else { "other" };
    *counts.entry(what.to_owned()).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(reason: Option<&str>, status: Option<u16>, duration_ms: u64) -> Line {
        let reason = reason.map(str::to_owned);
        Line { reason, status, duration_ms: Some(duration_ms), ..Line::default() }
    }

    #[test]
    fn reasons_are_words_of_ours_and_their_number_is_bounded() {
        let mut counts = Counts::default();
        for reason in
            [Some("host_not_listed: x"), Some("host_not_listed: y"), Some("Weird \" one"), None]
        {
            counts.denied(&line(reason, None, 0));
        }
        assert_eq!(counts.denied["host_not_listed"], 2);
        assert_eq!(counts.denied["other"], 2);
        for number in 0..1000u32 {
            let name: String =
                (0..4).map(|at| char::from(b'a' + ((number >> (4 * at)) % 16) as u8)).collect();
            counts.denied(&line(Some(&name), None, 0));
        }
        assert!(counts.denied.len() <= REASONS_MAX);
        assert_eq!(counts.denied.values().sum::<u64>(), 1004);
    }

    #[test]
    fn every_end_is_in_one_class_of_status_and_one_of_duration() {
        let mut counts = Counts::default();
        for (status, took) in
            [(Some(200), 0), (Some(299), 5), (Some(503), 6), (None, u64::MAX), (Some(7), 9)]
        {
            counts.ended(&line(None, status, took));
        }
        assert_eq!(
            (counts.ended["2xx"], counts.ended["5xx"], counts.ended["none"], counts.ended["other"]),
            (2, 1, 1, 1)
        );
        assert_eq!(
            (counts.durations[0], counts.durations[1], counts.durations[2], counts.durations[11]),
            (1, 1, 2, 1)
        );
        assert!(counts.failed.is_empty());
    }
}
