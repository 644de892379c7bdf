//! Live views of a session: its events from the log, and previews of the answer under way.
//!
//! Events are read from the log by cursor, so none is lost or doubled whoever appended it.
//! Previews come from the task that reads the answer and may be shed; each says behind which event
//! it belongs, and the event it previews comes after all of them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use ipc::id::SessionId;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use super::Parts;
use crate::log::{Event, LogError};

/// Previews kept for a listener that is slow; older ones are shed.
const PREVIEWS_KEPT: usize = 1024;

/// What a live subscriber gets.
#[derive(Clone, Debug)]
pub enum Live {
    Event(Box<Event>),
    /// A piece of an answer that is still being made.
    Preview(Preview),
    /// The session was deleted; nothing follows.
    Deleted,
}

/// Part of an event that will be appended under the same id, or never.
#[derive(Clone, Debug)]
pub struct Preview {
    /// Id of the [`crate::log::Body::AgentMessage`] or `AgentThinking` to come.
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

/// Who listens for previews of which session.
#[derive(Default)]
pub(crate) struct Previews {
    table: Mutex<HashMap<SessionId, broadcast::Sender<Preview>>>,
}

impl Previews {
    pub(crate) fn publish(&self, session: &SessionId, preview: Preview) {
        let mut table = self.lock();
        if let Some(sender) = table.get(session)
            && sender.send(preview).is_err()
        {
            // The last listener has gone.
            table.remove(session);
        }
    }

    fn listen(&self, session: &SessionId) -> broadcast::Receiver<Preview> {
        let mut table = self.lock();
        let sender =
            table.entry(session.clone()).or_insert_with(|| broadcast::Sender::new(PREVIEWS_KEPT));
        sender.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SessionId, broadcast::Sender<Preview>>> {
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A live view of one session, from the moment it was made.
pub struct LiveStream {
    log: crate::log::Subscription,
    previews: broadcast::Receiver<Preview>,
    stop: CancellationToken,
    ready: VecDeque<Event>,
    /// A preview that waits for the events before it.
    held: Option<Preview>,
    ended: bool,
}

impl LiveStream {
    pub(super) async fn open(parts: &Arc<Parts>, session: &SessionId) -> Result<Self, LogError> {
        let previews = parts.previews.listen(session);
        let chain = parts.log.chain(session).await?;
        Ok(Self {
            log: parts.log.subscribe(session, chain.events),
            previews,
            stop: parts.stop.clone(),
            ready: VecDeque::new(),
            held: None,
            ended: false,
        })
    }

    /// The next thing; cancel-safe. `None` when the session is gone or the daemon stops.
    pub async fn next(&mut self) -> Option<Result<Live, LogError>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(Ok(Live::Event(Box::new(event))));
            }
            if self.ended {
                return None;
            }
            if let Some(held) = self.held.take() {
                if held.after <= self.log.after() {
                    return Some(Ok(Live::Preview(held)));
                }
                self.held = Some(held);
                match self.log.ready().await {
                    Ok(Some(events)) => self.ready.extend(events),
                    // Its events are gone, with the session.
                    Ok(None) => self.held = None,
                    Err(error) => return Some(Err(error)),
                }
                continue;
            }
            tokio::select! {
                biased;
                preview = self.previews.recv() => match preview {
                    Ok(preview) => self.held = Some(preview),
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => self.ended = true,
                },
                batch = self.log.next() => match batch {
                    Ok(Some(events)) => self.ready.extend(events),
                    Ok(None) => {
                        self.ended = true;
                        return Some(Ok(Live::Deleted));
                    }
                    Err(error) => return Some(Err(error)),
                },
                () = self.stop.cancelled() => return None,
            }
        }
    }
}
