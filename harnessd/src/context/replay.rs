//! What the requests of a session would have held through another profile.
//!
//! The log is read once more from its beginning, and at each place where the model was asked the
//! profile makes its request. Nothing is sent: a summary that it would have asked for is a stand-in
//! of usual length, and tokens are counted as a quarter of the bytes.

use super::{Cut, Profile, talk};
use crate::log::{Body, Event, Summary};
use crate::state::State;

/// Length of a summary that was never written.
const SUMMARY_BYTES: usize = 2_000;
/// Bytes of one token, as a rule of thumb.
const TOKEN_BYTES: u64 = 4;
/// Requests that are made anew; of more, every so-manieth is.
const REQUESTS_MAX: usize = 500;

/// One profile over one session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// Requests that were made anew.
    pub requests: u64,
    /// Summaries that would have been asked for.
    pub summaries: u64,
    /// Bytes of all their messages, of the longest, and those that were the same from the beginning
    /// as in the request before: what a cache saves.
    pub bytes: u64,
    pub bytes_most: u64,
    pub bytes_kept: u64,
    /// The event that the last one begins with, and its messages.
    pub last_begins_at: u64,
    pub last_messages: u64,
}

/// Replays a whole log.
pub fn replay(events: &[Event], profile: Profile) -> Replay {
    let asked =
        |event: &Event| matches!(event.body, Body::ModelRequestStarted { summary: false, .. });
    let every = events.iter().filter(|e| asked(e)).count().div_ceil(REQUESTS_MAX).max(1);
    let mut report = Replay::default();
    let mut state = State::default();
    let mut summaries: Vec<Event> = Vec::new();
    let mut before: Vec<String> = Vec::new();
    let mut number = 0;
    for (place, event) in events.iter().enumerate() {
        if asked(event) {
            if number % every == 0 {
                state.floor = 0;
                if let Some(upto) = profile.summary_due(&state) {
                    report.summaries += 1;
                    let summary = stand_in(event.seq, upto);
                    state.take(&summary);
                    summaries.push(summary);
                }
                let cut = profile.cut(&state);
                before = request(&mut report, &events[..place], &summaries, &cut, &before);
                let bytes: usize = before.iter().map(String::len).sum();
                state.context_tokens = bytes as u64 / TOKEN_BYTES;
            }
            number += 1;
        }
        let tokens = state.context_tokens;
        // What another profile did is not what this one does.
        if !matches!(event.body, Body::Summary(_)) {
            state.take(event);
        }
        state.context_tokens = tokens;
    }
    report
}

fn request(
    report: &mut Replay,
    events: &[Event],
    summaries: &[Event],
    cut: &Cut,
    before: &[String],
) -> Vec<String> {
    // A stand-in shares the number of the request behind it, so it goes in front of all.
    let summary = cut.summary.and_then(|seq| summaries.iter().find(|event| event.seq == seq));
    let summary = summary.map(|summary| Event { seq: 0, ..summary.clone() });
    let cut = Cut { summary: cut.summary.map(|_| 0), ..cut.clone() };
    let named = cut.turn.map_or(cut.read_from, |turn| turn.read_from.min(cut.read_from));
    let shown = &events[events.partition_point(|event| event.seq < named)..];
    let messages = talk::messages(summary.iter().chain(shown), &cut, None);
    let messages: Vec<String> = messages.iter().map(ToString::to_string).collect();
    let bytes: u64 = messages.iter().map(|message| message.len() as u64).sum();
    let same = messages.iter().zip(before).take_while(|(now, then)| now == then);
    report.requests += 1;
    report.bytes += bytes;
    report.bytes_most = report.bytes_most.max(bytes);
    report.bytes_kept += same.map(|(now, _)| now.len() as u64).sum::<u64>();
    report.last_begins_at = cut.from.max(1);
    report.last_messages = messages.len() as u64;
    messages
}

fn stand_in(seq: u64, upto: u64) -> Event {
    let summary = Summary {
        request: String::new(),
        profile: String::new(),
        upto,
        text: "s".repeat(SUMMARY_BYTES),
    };
    Event { seq, id: String::new(), time: String::new(), body: Body::Summary(summary) }
}
