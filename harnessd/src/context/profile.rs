//! The profiles: where a context begins, decided from the folded log alone.
//!
//! A context begins only at a [`Mark`], so that no result is shown without its use. Where it begins
//! moves in hops, not with every request: between two hops the prefix stays the same and the
//! provider's cache hits. Each profile has a version; what a version does never changes, a better
//! way gets a new number.

use std::fmt;

use crate::state::{MARKS_KEPT, Mark, State, Turn};

/// Steps that `last-n` keeps at least, unless told otherwise.
const STEPS: usize = 40;
/// Tokens at which `summary` and `reset` act, unless told otherwise.
const TOKENS: u64 = 120_000;
/// Steps that `summary` leaves as they are.
const TAIL: usize = 10;
/// Summaries in a row that may fail before the turn goes on without one.
const SUMMARY_FAILURES_MAX: u32 = 2;

/// A named, versioned way to choose. Its name stands in each request's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Everything that happened, in order.
    WholeLog,
    /// The last steps: at least this many, and fewer than twice as many. A step is an answer of the
    /// model with what came of it, or the beginning of a turn.
    LastN { steps: usize },
    /// Once the context is longer than `tokens`, a summary stands for all but its last steps.
    Summary { tokens: u64, tail: usize },
    /// A turn that begins when the context is longer than `tokens` begins with nothing before it.
    Reset { tokens: u64 },
}

/// A text that names no profile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no context profile {0:?}: there are whole-log, last-n[:STEPS], summary[:TOKENS[:STEPS]] and \
     reset[:TOKENS], STEPS from 1 to {max}",
    max = MARKS_KEPT / 2
)]
pub struct ProfileError(String);

/// Where a context begins, and what must be read for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Its first event; none before it is shown. 0: it begins with the session.
    pub from: u64,
    /// Events before this one are not needed.
    pub read_from: u64,
    /// The turn that it begins in the middle of: what the client said is shown first.
    pub turn: Option<Turn>,
    /// The event of the summary that stands for what is left out.
    pub summary: Option<u64>,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WholeLog => f.write_str("whole-log/1"),
            Self::LastN { steps } => write!(f, "last-n/1:{steps}"),
            Self::Summary { tokens, tail } => write!(f, "summary/1:{tokens}:{tail}"),
            Self::Reset { tokens } => write!(f, "reset/1:{tokens}"),
        }
    }
}

impl std::str::FromStr for Profile {
    type Err = ProfileError;

    /// Reads `NAME[/VERSION][:NUMBER…]`.
    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let bad = || ProfileError(text.chars().take(80).collect());
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let name = match name.split_once('/') {
            Some((name, "1")) => name,
            Some(_) => return Err(bad()),
            None => name,
        };
        let mut number = |default: u64| match parts.next() {
            None => Ok(default),
            Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
                digits.parse::<u64>().ok().filter(|n| *n > 0).ok_or_else(bad)
            }
            Some(_) => Err(bad()),
        };
        let steps =
            |n: u64| usize::try_from(n).ok().filter(|n| *n <= MARKS_KEPT / 2).ok_or_else(bad);
        let profile = match name {
            "whole-log" => Self::WholeLog,
            "last-n" => Self::LastN { steps: steps(number(STEPS as u64)?)? },
            "summary" => {
                let tokens = number(TOKENS)?;
                Self::Summary { tokens, tail: steps(number(TAIL as u64)?)? }
            }
            "reset" => Self::Reset { tokens: number(TOKENS)? },
            _ => return Err(bad()),
        };
        if parts.next().is_some() { Err(bad()) } else { Ok(profile) }
    }
}

impl Profile {
    /// Where the context of the next request begins.
    pub fn cut(self, state: &State) -> Cut {
        let chosen = match self {
            Self::WholeLog => Cut::default(),
            Self::LastN { steps } => last(state, steps),
            Self::Summary { .. } => summed_up(state),
            Self::Reset { tokens } => reset(state, tokens),
        };
        if chosen.from >= state.floor {
            return chosen;
        }
        Cut { summary: chosen.summary, ..at(state, state.floor) }
    }

    /// The event up to which a summary is to be made before the model is asked.
    pub fn summary_due(self, state: &State) -> Option<u64> {
        let Self::Summary { tokens, tail } = self else { return None };
        let worn = state.summary_failures >= SUMMARY_FAILURES_MAX;
        if state.context_tokens < tokens || worn || state.is_paused() {
            return None;
        }
        let place = state.marks.len().checked_sub(tail)?;
        let upto = state.marks.get(place)?.seq;
        (upto > self.cut(state).from.max(1)).then_some(upto)
    }
}

fn last(state: &State, steps: usize) -> Cut {
    let steps = steps as u64;
    let all = state.marks_before + state.marks.len() as u64;
    // In hops of `steps`, counted from the session's beginning.
    let dropped = (all / steps).saturating_sub(1) * steps;
    match dropped.checked_sub(state.marks_before) {
        None => oldest(state),
        Some(0) if state.marks_before == 0 => Cut::default(),
        Some(place) => usize::try_from(place)
            .ok()
            .and_then(|place| state.marks.get(place))
            .map_or_else(|| oldest(state), cut),
    }
}

fn summed_up(state: &State) -> Cut {
    match &state.summary {
        None => Cut::default(),
        Some(summary) => Cut { summary: Some(summary.seq), ..at(state, summary.upto) },
    }
}

fn reset(state: &State, tokens: u64) -> Cut {
    let begins = |mark: &&Mark| mark.begins_turn && mark.tokens >= tokens;
    match state.marks.iter().rev().find(begins) {
        Some(mark) => cut(mark),
        None if state.marks_before == 0 => Cut::default(),
        None => oldest(state),
    }
}

/// The furthest back that is remembered.
fn oldest(state: &State) -> Cut {
    state.marks.front().map_or_else(Cut::default, cut)
}

/// The mark at `seq`, or the next one that is remembered.
fn at(state: &State, seq: u64) -> Cut {
    state.marks.iter().find(|mark| mark.seq >= seq).map_or_else(|| oldest(state), cut)
}

fn cut(mark: &Mark) -> Cut {
    let turn = mark.turn.filter(|_| !mark.begins_turn);
    Cut { from: mark.seq, read_from: mark.read_from, turn, summary: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::SummaryAt;

    /// A session of so many steps, each of four events and so many tokens more.
    fn steps(count: u64, tokens: u64) -> State {
        let mut state = State::default();
        for number in 0..count {
            let seq = number * 4 + 1;
            let begins_turn = number % 5 == 0;
            let turn = Some(Turn { seq: number / 5 * 20 + 1, read_from: number / 5 * 20 + 1 });
            let mark = Mark { seq, read_from: seq, begins_turn, tokens: number * tokens, turn };
            state.marks.push_back(mark);
            if state.marks.len() > MARKS_KEPT {
                state.marks.pop_front();
                state.marks_before += 1;
            }
        }
        state.context_tokens = count * tokens;
        state
    }

    #[test]
    fn the_last_steps_move_in_hops_and_are_never_fewer_than_asked_for() {
        for kept in [1, 3, 40] {
            let profile = Profile::LastN { steps: kept };
            let mut begins = Vec::new();
            for count in 0..2_000 {
                let state = steps(count, 0);
                let cut = profile.cut(&state);
                let shown = count - cut.from.saturating_sub(1) / 4;
                let least = count.min(kept as u64);
                assert!((least..2 * kept as u64).contains(&shown) || shown == least, "{count}");
                begins.push(cut.from);
            }
            begins.dedup();
            let hops = 2_000 / kept;
            assert!(begins.is_sorted() && begins.len() <= hops + 1, "{kept}: {}", begins.len());
        }
    }

    #[test]
    fn a_reset_begins_with_the_turn_that_began_too_long() {
        let begins = |count| Profile::Reset { tokens: 100 }.cut(&steps(count, 10)).from;

        // The first turn that began with 100 tokens before it is that of step 10.
        assert_eq!((begins(9), begins(11), begins(14)), (0, 41, 41));
        assert_eq!(begins(16), 61);
    }

    #[test]
    fn a_summary_is_due_when_the_context_is_long_and_leaves_the_tail() {
        let profile = Profile::Summary { tokens: 100, tail: 3 };

        assert_eq!(profile.summary_due(&steps(9, 10)), None);
        assert_eq!(profile.summary_due(&steps(12, 10)), Some(9 * 4 + 1));
        let mut state = steps(12, 10);
        state.summary = Some(SummaryAt { seq: 99, upto: 37 });
        assert_eq!(profile.summary_due(&state), None, "twice the same");
        let cut = profile.cut(&state);
        assert_eq!((cut.from, cut.summary), (37, Some(99)));
        assert_eq!(cut.turn.map(|turn| turn.seq), Some(21), "the words that began the turn");
    }

    #[test]
    fn a_floor_holds_for_every_profile() {
        let mut state = steps(30, 1);
        state.floor = 81;
        for name in ["whole-log", "last-n:20", "summary", "reset"] {
            assert_eq!(name.parse::<Profile>().unwrap().cut(&state).from, 81, "{name}");
        }
        let nearer = Profile::LastN { steps: 1 }.cut(&state).from;
        assert!(nearer > 81);
    }

    #[test]
    fn names_are_read_back_and_what_names_nothing_is_refused() {
        for name in ["whole-log/1", "last-n/1:3", "summary/1:500:2", "reset/1:77"] {
            assert_eq!(name.parse::<Profile>().unwrap().to_string(), name);
        }
        assert_eq!("last-n".parse(), Ok(Profile::LastN { steps: STEPS }));
        assert_eq!("summary:9".parse(), Ok(Profile::Summary { tokens: 9, tail: TAIL }));
        let bad = [
            "",
            "last",
            "last-n/2",
            "last-n:0",
            "last-n:-1",
            "last-n:+1",
            "last-n:1:2",
            "last-n:100000",
            "whole-log:1",
            "reset:x",
            "reset:",
            "summary:1:2:3",
        ];
        for name in bad {
            assert!(name.parse::<Profile>().is_err(), "{name} was accepted");
        }
    }
}
