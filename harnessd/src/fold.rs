//! Reads what a session's events fold to, at the cost of what is new since it was last stored.

use ipc::id::SessionId;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::log::{Event, Log, LogError};
use crate::state::State;

/// Events behind a snapshot before another is stored: writing one costs about as much as reading
/// these.
pub const SNAPSHOT_EVERY: u64 = 512;
/// Events read at once.
const SLICE: u64 = 512;

/// A way to fold, under which its snapshots are stored.
pub struct Kind {
    /// Changes with every change of what is folded: snapshots of others are then made anew.
    pub name: &'static str,
    /// Only the newest snapshot is kept. Else one is stored every so often, so that any place can
    /// be reached from one shortly before it.
    pub newest_only: bool,
}

/// Changes with every change of [`State`].
const LOOP: Kind = Kind { name: "loop/3", newest_only: true };

/// The state of a session at its end.
pub async fn load(log: &Log, session: &SessionId) -> Result<State, LogError> {
    upto(log, session, &LOOP, u64::MAX, State::default(), State::take).await
}

/// Stores the state, in place of earlier ones.
pub async fn save(log: &Log, session: &SessionId, state: &State) {
    store(log, session, &LOOP, state.seq, state).await;
}

/// What the events up to `last` fold to, from where it was last stored; `fresh`: before the first.
pub async fn upto<F: Serialize + DeserializeOwned>(
    log: &Log,
    session: &SessionId,
    kind: &Kind,
    last: u64,
    fresh: F,
    take: impl Fn(&mut F, &Event),
) -> Result<F, LogError> {
    let stored = log.snapshot(session, kind.name, last).await?;
    let taken = stored.and_then(|(seq, body)| Some((seq, serde_json::from_str(&body).ok()?)));
    let (mut stored, mut fold) = taken.unwrap_or((0, fresh));
    let mut read = stored;
    while read < last {
        let limit = usize::try_from(SLICE.min(last - read)).unwrap_or(usize::MAX);
        let events = log.slice(session, read, limit).await?;
        events.iter().for_each(|event| take(&mut fold, event));
        read = events.last().map_or(read, |event| event.seq);
        let ends = events.len() < limit || read >= last;
        if read >= stored + SNAPSHOT_EVERY && (ends || !kind.newest_only) {
            store(log, session, kind, read, &fold).await;
            stored = read;
        }
        if ends {
            break;
        }
    }
    Ok(fold)
}

/// Without it (the disk is full) the next reader has more to read; nothing else follows.
async fn store(log: &Log, session: &SessionId, kind: &Kind, seq: u64, fold: &impl Serialize) {
    let Ok(body) = serde_json::to_string(fold) else { return };
    if let Err(error) = log.save_snapshot(session, kind.name, seq, body, kind.newest_only).await {
        tracing::debug!(%session, %error, "fold not stored");
    }
}
