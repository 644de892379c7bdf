//! Who runs which session, and who listens to it.
//!
//! The engine starts one task for a session that has something to do, lets it own the session
//! (kernel lock and fencing number), and takes up what another process left behind. It carries
//! previews of answers to live subscribers; those are never stored.

use std::sync::Arc;

use ipc::fault::Fault;
use ipc::id::SessionId;

use crate::log::event::{Event, NewEvent};
use crate::log::objects::NewObject;
use crate::log::{Log, LogError, Tombstone};

/// What a live subscriber gets.
#[derive(Clone, Debug)]
pub enum Live {
    Event(Event),
    /// A piece of an answer that is still being made.
    Preview(Preview),
    /// The session was deleted; nothing follows.
    Deleted,
}

/// Part of an event that will be appended under the same id, or never.
#[derive(Clone, Debug)]
pub struct Preview {
    /// Id of the [`crate::log::event::Body::AgentMessage`] or `AgentThinking` to come.
    pub event: String,
    pub part: Part,
    /// The log's last event when this was made: those up to it come first.
    pub(crate) after: u64,
}

#[derive(Clone, Debug)]
pub enum Part {
    MessageStarted,
    ThinkingStarted,
    /// Text of content block `index` of that event.
    Text {
        index: usize,
        text: String,
    },
    /// The answer will not come; a new request may follow.
    Dropped,
}

/// The engine of this process. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {}

/// A live view of one session, from the moment it was made.
pub struct LiveStream {}

impl LiveStream {
    /// The next thing; cancel-safe. `None` when the daemon stops.
    pub async fn next(&mut self) -> Option<Result<Live, LogError>> {
        todo!()
    }
}

impl Engine {
    pub fn log(&self) -> &Log {
        todo!()
    }

    /// Names of the configured models.
    pub fn models(&self) -> Vec<String> {
        todo!()
    }

    /// Whether the table of models has (or its `*` covers) this name.
    pub fn knows_model(&self, name: &str) -> bool {
        todo!()
    }

    /// Creates a session; its first event must be `SessionCreated`. Wakes it when there is more.
    pub async fn create_session(
        &self,
        session: &SessionId,
        object: NewObject,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        todo!()
    }

    /// Appends client events and wakes the session.
    pub async fn send(
        &self,
        session: &SessionId,
        events: Vec<NewEvent>,
    ) -> Result<Vec<Event>, LogError> {
        todo!()
    }

    /// Follows a session from now on, with previews.
    pub async fn subscribe(&self, session: &SessionId) -> Result<LiveStream, LogError> {
        todo!()
    }

    /// Ends a session for good: appends `StatusTerminated`. Refused while it runs.
    pub async fn archive(&self, session: &SessionId) -> Result<(), Fault> {
        todo!()
    }

    /// Removes a session, its sandboxes and its workspace. Refused while it runs.
    pub async fn delete(&self, session: &SessionId, by: &str) -> Result<Tombstone, Fault> {
        todo!()
    }
}
