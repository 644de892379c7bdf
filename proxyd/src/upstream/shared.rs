//! HTTP/2 connections to upstreams, shared by all requests of one key.
//!
//! One is opened at a time: whoever comes meanwhile waits for it and takes its outcome, so a burst
//! of requests to a new host costs one handshake. When all are as full as their upstream allows,
//! another is opened, up to a bound; beyond it requests queue.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use foldhash::HashMap;
use h2::client::SendRequest;

use super::dial::Endpoint;
use super::pool::Key;
use super::{UpstreamError, Want};
use crate::relay::h2::client::UNSAID;

/// Streams at once on one connection, whatever more the upstream allows: beyond it one lost packet
/// holds up too many.
const STREAMS_MAX: usize = 128;
/// Connections of one key.
const CONNECTIONS_MAX: usize = 8;
/// How long a connection without new requests is offered to the next.
const LIFE: Duration = Duration::from_secs(60);

/// What the holder of a connection and the task that carries its frames share.
#[derive(Clone, Default)]
pub struct Load {
    /// Requests on it, queued ones too.
    pub streams: Arc<AtomicUsize>,
    /// Set when the connection has ended.
    pub ended: Arc<AtomicBool>,
    /// Why, where it failed: its streams are told of some failures only that it broke.
    pub failure: Arc<OnceLock<String>>,
}

struct Connection {
    number: u64,
    sender: SendRequest<Bytes>,
    address: Endpoint,
    load: Load,
}

impl Connection {
    fn room(&self) -> usize {
        let said = self.sender.current_max_send_streams();
        // Before the upstream has said a number there is room for the first request alone.
        let allowed = if said == UNSAID { 0 } else { said.min(STREAMS_MAX) };
        allowed.saturating_sub(self.load.streams.load(Ordering::Acquire))
    }
}

/// One request's place on a shared connection; it is given back when this is dropped.
pub struct Seat {
    pub sender: SendRequest<Bytes>,
    pub address: Endpoint,
    number: u64,
    load: Load,
}

impl Seat {
    fn take(connection: &Connection) -> Self {
        connection.load.streams.fetch_add(1, Ordering::AcqRel);
        Self {
            sender: connection.sender.clone(),
            address: connection.address.clone(),
            number: connection.number,
            load: connection.load.clone(),
        }
    }

    /// Why its connection failed, if it did.
    pub fn failure(&self) -> Option<&str> {
        self.load.failure.get().map(String::as_str)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.load.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The connections of one key.
#[derive(Default)]
pub struct Group {
    /// Held by whoever opens a connection, until it is known how many requests it takes.
    pub opening: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    connections: Vec<Connection>,
    /// Whether the upstream chose HTTP/1.1 when it could have had HTTP/2, or has nothing else.
    prefers_http1: bool,
    only_http2: bool,
    /// The attempt to open a connection that was begun last.
    attempt: u64,
    /// The last attempt that failed, and how.
    failed: Option<(u64, UpstreamError)>,
    used: Option<Instant>,
}

impl Group {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// A seat for a request that may go to an address that `allowed` takes. None where another
    /// connection should be opened first.
    pub fn seat(&self, want: Want, allowed: impl Fn(&Endpoint) -> bool) -> Option<Seat> {
        let mut state = self.state();
        if want == Want::Http1Only || want == Want::Http1 && !state.only_http2 {
            return None;
        }
        state.connections.retain(|connection| !connection.load.ended.load(Ordering::Acquire));
        let full = state.connections.len() >= CONNECTIONS_MAX;
        let usable = state.connections.iter().filter(|connection| allowed(&connection.address));
        let roomiest = usable.max_by_key(|connection| connection.room())?;
        let seat = (roomiest.room() > 0 || full).then(|| Seat::take(roomiest))?;
        state.used = Some(Instant::now());
        Some(seat)
    }

    /// Keeps a connection that was just opened, if it lasts, and gives its first seat.
    pub fn keep(
        &self,
        sender: SendRequest<Bytes>,
        address: Endpoint,
        load: Load,
        only_http2: bool,
        lasts: bool,
    ) -> Seat {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.only_http2 |= only_http2;
        state.used = Some(Instant::now());
        let connection = Connection { number, sender, address, load };
        let seat = Seat::take(&connection);
        if lasts {
            state.connections.push(connection);
        }
        seat
    }

    pub fn prefers_http1(&self) -> bool {
        self.state().prefers_http1
    }

    pub fn found_http1(&self) {
        self.state().prefers_http1 = true;
    }

    /// The attempt that whoever comes now would wait for.
    pub fn attempt(&self) -> u64 {
        self.state().attempt
    }

    /// Notes that an attempt begins; says which.
    pub fn begin(&self) -> u64 {
        let mut state = self.state();
        state.attempt += 1;
        state.attempt
    }

    /// Notes how an attempt failed. A denial is of one permit and says nothing about others.
    pub fn failed(&self, attempt: u64, error: &UpstreamError) {
        if !matches!(error, UpstreamError::Denied(_)) {
            self.state().failed = Some((attempt, error.clone()));
        }
    }

    /// How an attempt failed that was under way at `attempt` or begun later.
    pub fn failure_since(&self, attempt: u64) -> Option<UpstreamError> {
        let state = self.state();
        let (number, error) = state.failed.as_ref()?;
        (*number >= attempt).then(|| error.clone())
    }

    /// Offers a connection to nobody any more; who is on it stays.
    fn forget(&self, number: u64) {
        self.state().connections.retain(|connection| connection.number != number);
    }
}

/// The groups of all keys. Clones share them.
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<HashMap<Key, Arc<Group>>>>);

impl Shared {
    fn groups(&self) -> MutexGuard<'_, HashMap<Key, Arc<Group>>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub fn group(&self, key: &Key) -> Arc<Group> {
        Arc::clone(self.groups().entry(key.clone()).or_default())
    }

    /// A seat on a connection that is open already.
    pub fn seat(&self, key: &Key, want: Want, allowed: impl Fn(&Endpoint) -> bool) -> Option<Seat> {
        let group = self.groups().get(key).cloned()?;
        group.seat(want, allowed)
    }

    /// Offers the connection of a seat to nobody any more.
    pub fn forget(&self, key: &Key, seat: &Seat) {
        if let Some(group) = self.groups().get(key) {
            group.forget(seat.number);
        }
    }

    /// Lets go of what nobody has asked for in a while. Running streams keep their connection.
    pub fn sweep(&self) {
        self.groups().retain(|_, group| {
            let busy = group.opening.try_lock().is_err();
            busy || group.state().used.is_some_and(|used| used.elapsed() < LIFE)
        });
    }
}
