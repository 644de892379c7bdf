//! What was refused to the calls that run on a lease, what failed and what they gave up, kept for
//! whoever reads their results.
//!
//! A client may print nothing of the answer it got, or may not have understood it: one that trusts
//! a list of roots of its own sees a broken connection. So the holder of the lease may ask. Nothing
//! here is more than the client was told; the audit has it all, this only the first few.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use ipc::id::CallId;
use tokio::sync::watch;

use crate::audit::Line;

/// Different refusals kept for a lease: a program that fails has few causes.
const NOTES_MAX: usize = 16;
/// Longest line. The client chose parts of it.
const LINE_CHARS_MAX: usize = 600;
/// How long an answer waits for connections that are being opened. The client of such a connection
/// has ended, as a rule, when its call is asked about, so the connection has too.
const OPENING_PATIENCE: Duration = Duration::from_secs(1);

/// The refusals of one lease.
#[derive(Default)]
pub struct Notes {
    kept: Mutex<Vec<Note>>,
    opening: watch::Sender<usize>,
}

struct Note {
    calls: Vec<Concerned>,
    line: String,
}

/// A call that a line may be about.
struct Concerned {
    call: CallId,
    /// It ran alone once when that happened. All calls of a sandbox share its network, so that
    /// whose request it was is known of those alone.
    alone: bool,
}

/// Stands behind a line that may be about another call.
const SHARED: &str = "; other calls ran at that time, and it may have been a request of theirs";

impl Note {
    fn concerns(&mut self, calls: &[CallId]) {
        let alone = calls.len() == 1;
        for call in calls {
            match self.calls.iter_mut().find(|concerned| concerned.call == *call) {
                Some(known) => known.alone |= alone,
                None => self.calls.push(Concerned { call: call.clone(), alone }),
            }
        }
    }
}

/// What became of a request that has no answer of its upstream's: the first word of its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Policy, or proxyd for it, said no.
    Refused,
    /// It was allowed, and something on the way failed.
    Failed,
    /// It was allowed, and its client left before the end.
    GivenUp,
}

impl End {
    fn word(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::GivenUp => "given up by the client",
        }
    }
}

/// A connection of which it is not known yet whether it will be refused.
pub struct Opening<'a>(&'a watch::Sender<usize>);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Notes {
    /// Keeps how a request ended for the calls that it may concern.
    pub fn add(&self, record: &Line, end: End, hint: Option<&str>) {
        let Some(reason) = &record.reason else { return };
        if record.calls.is_empty() {
            return;
        }
        let host = record.host.as_deref().unwrap_or("?");
        let port = record.port.map(|port| format!(":{port}")).unwrap_or_default();
        let hint = hint.map(|hint| format!(" ({hint})")).unwrap_or_default();
        let line: String = format!("{}: {host}{port}: {reason}{hint}", end.word())
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(LINE_CHARS_MAX)
            .collect();
        let mut kept = self.kept();
        let at = kept.iter().position(|note| note.line == line);
        let line_at = match at {
            Some(at) => at,
            None if kept.len() < NOTES_MAX => {
                kept.push(Note { calls: Vec::new(), line });
                kept.len() - 1
            }
            None => return,
        };
        kept[line_at].concerns(&record.calls);
    }

    /// The lines about one call.
    pub async fn of(&self, call: &CallId) -> Vec<String> {
        let mut opening = self.opening.subscribe();
        // The sender is ours, so this ends for no other reason.
        let _ = tokio::time::timeout(OPENING_PATIENCE, opening.wait_for(|count| *count == 0)).await;
        let kept = self.kept();
        let about = kept.iter().filter_map(|note| {
            let found = note.calls.iter().find(|concerned| concerned.call == *call)?;
            Some(format!("{}{}", note.line, if found.alone { "" } else { SHARED }))
        });
        about.collect()
    }

    /// A call has ended: nobody asks about it any more.
    pub fn forget(&self, call: &CallId) {
        self.kept().retain_mut(|note| {
            note.calls.retain(|kept| kept.call != *call);
            !note.calls.is_empty()
        });
    }

    /// Says that a connection is being opened, until the guard is dropped.
    pub fn opening(&self) -> Opening<'_> {
        self.opening.send_modify(|count| *count += 1);
        Opening(&self.opening)
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Note>> {
        self.kept.lock().expect("no holder of this lock panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(host: &str, calls: &[&CallId]) -> Line {
        Line {
            host: Some(host.to_owned()),
            port: Some(443),
            reason: Some("host_not_listed: no".to_owned()),
            calls: calls.iter().map(|call| (*call).clone()).collect(),
            ..Line::default()
        }
    }

    #[tokio::test]
    async fn a_call_is_told_what_was_refused_while_it_ran_once_for_each_kind() {
        let (one, other) = (CallId::random(), CallId::random());
        let notes = Notes::default();
        notes.add(&record("a.example", &[&one]), End::Refused, Some("list it"));
        notes.add(&record("a.example", &[&one, &other]), End::Refused, Some("list it"));
        notes.add(&record("b\n.example", &[&other]), End::Refused, None);
        notes.add(&record("c.example", &[]), End::Refused, None);

        let a = "refused: a.example:443: host_not_listed: no (list it)";
        assert_eq!(notes.of(&one).await, [a]);
        let b = "refused: b .example:443: host_not_listed: no";
        assert_eq!(notes.of(&other).await, [format!("{a}{SHARED}"), b.to_owned()]);

        notes.forget(&one);
        assert!(notes.of(&one).await.is_empty());
        assert_eq!(notes.of(&other).await.len(), 2);
    }

    #[tokio::test]
    async fn what_ended_while_several_calls_ran_is_told_to_none_of_them_as_its_own() {
        let (one, other) = (CallId::random(), CallId::random());
        let notes = Notes::default();
        notes.add(&record("a.example", &[&one, &other]), End::Refused, None);
        notes.forget(&other);

        let line = notes.of(&one).await.remove(0);
        assert!(line.ends_with(SHARED), "{line}");

        notes.add(&record("a.example", &[&one]), End::Refused, None);
        let line = notes.of(&one).await.remove(0);
        assert!(!line.ends_with(SHARED), "{line}");
    }

    #[tokio::test]
    async fn what_failed_and_what_the_client_gave_up_are_told_apart_from_what_was_refused() {
        let call = CallId::random();
        let notes = Notes::default();
        for end in [End::Refused, End::Failed, End::GivenUp] {
            notes.add(&record("a.example", &[&call]), end, None);
        }

        let lines = notes.of(&call).await;

        let words: Vec<_> = lines.iter().map(|line| line.split(": ").next().unwrap()).collect();
        assert_eq!(words, ["refused", "failed", "given up by the client"]);
    }

    #[tokio::test]
    async fn what_a_hostile_sandbox_leaves_here_is_bounded() {
        let call = CallId::random();
        let notes = Notes::default();
        for at in 0..1000 {
            notes.add(&record(&format!("{at}{}", "x".repeat(2000)), &[&call]), End::Refused, None);
        }

        let lines = notes.of(&call).await;

        assert_eq!(lines.len(), NOTES_MAX);
        assert!(lines.iter().all(|line| line.chars().count() <= LINE_CHARS_MAX));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_waits_for_connections_that_are_being_opened_but_not_for_ever() {
        let call = CallId::random();
        let notes = std::sync::Arc::new(Notes::default());
        let stuck = notes.opening();
        assert!(notes.of(&call).await.is_empty());
        drop(stuck);

        let opening = notes.opening();
        let asking = tokio::spawn({
            let (notes, call) = (std::sync::Arc::clone(&notes), call.clone());
            async move { notes.of(&call).await }
        });
        tokio::task::yield_now().await;
        notes.add(&record("a.example", &[&call]), End::Refused, None);
        drop(opening);

        assert_eq!(asking.await.unwrap().len(), 1);
    }
}
