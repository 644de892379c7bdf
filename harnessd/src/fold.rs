//! Reads a session's folded state at the cost of what is new since it was last stored.

use ipc::id::SessionId;

use crate::log::{Log, LogError};
use crate::state::State;

/// Events behind a snapshot before another is stored: writing one costs about as much as reading
/// these.
pub const SNAPSHOT_EVERY: u64 = 512;
/// Changes with every change of [`State`]: snapshots of others are then made anew.
const KIND: &str = "loop/1";
/// Events read at once.
const SLICE: usize = 1_000;

/// The state of a session at its end.
pub async fn load(log: &Log, session: &SessionId) -> Result<State, LogError> {
    let stored = log.snapshot(session, KIND, u64::MAX).await?;
    let taken = stored.and_then(|(_, body)| serde_json::from_str::<State>(&body).ok());
    let mut state = taken.unwrap_or_default();
    let snapshot_at = state.seq;
    loop {
        let events = log.slice(session, state.seq, SLICE).await?;
        events.iter().for_each(|event| state.take(event));
        if events.len() < SLICE {
            break;
        }
    }
    if state.seq >= snapshot_at + SNAPSHOT_EVERY {
        save(log, session, &state).await;
    }
    Ok(state)
}

/// Stores the state, in place of earlier ones. Without it (the disk is full) the next reader has
/// more to read; nothing else follows.
pub async fn save(log: &Log, session: &SessionId, state: &State) {
    let Ok(body) = serde_json::to_string(state) else { return };
    if let Err(error) = log.save_snapshot(session, KIND, state.seq, body, true).await {
        tracing::debug!(%session, %error, "state not stored");
    }
}
