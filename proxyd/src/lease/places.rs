//! Places for clients' connections: how many each lease may have, and who goes when all are taken.
//!
//! A connection on which nothing is under way can be closed to make room: HTTP lets either side do
//! that, and its client opens another. So whoever comes when there is no room takes the place of
//! the connection that has rested longest: of its own lease if that has its fair part, of the one
//! that has most otherwise. Only where all are busy is it refused.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::share::{Common, Exhausted, Share, Taken};

/// How long a connection may rest before it has to make room: one that was accepted just now, or
/// answered, most likely has its next request on the way.
pub const REST: Duration = Duration::from_secs(1);
/// How long to wait for others to go.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often to look whether one has rested for long enough.
const LOOK: Duration = Duration::from_millis(100);

/// All places of one kind.
pub struct Places {
    common: Arc<Common>,
    /// How long a connection may rest before it has to make room.
    rest: Duration,
    rooms: Mutex<Vec<Weak<Room>>>,
    /// Told whenever a place has become free.
    freed: Notify,
}

/// What making room has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Making {
    /// A connection was told to go, and is not gone yet.
    Leaving,
    /// One that rests may be told so soon.
    Soon,
    /// All are busy.
    Never,
}

impl Places {
    pub fn new(common: Arc<Common>, rest: Duration) -> Arc<Self> {
        Arc::new(Self { common, rest, rooms: Mutex::default(), freed: Notify::new() })
    }

    pub fn common(&self) -> &Arc<Common> {
        &self.common
    }

    fn rooms(&self) -> MutexGuard<'_, Vec<Weak<Room>>> {
        self.rooms.lock().expect("no holder of this lock panics")
    }

    /// Whose connection is to make room for one more of `asking`.
    fn crowded(&self, asking: &Arc<Room>) -> Arc<Room> {
        let rooms: Vec<_> = self.rooms().iter().filter_map(Weak::upgrade).collect();
        let beyond = rooms.into_iter().map(|room| (room.share.beyond(), room));
        let large: Vec<_> = beyond.filter(|(beyond, _)| *beyond > 0).collect();
        let others = large.iter().filter(|(_, room)| !Arc::ptr_eq(room, asking)).count();
        let fair = self.common.max / (others + 1);
        if asking.share.beyond() >= fair.max(1) {
            return Arc::clone(asking);
        }
        let most = large.into_iter().max_by_key(|(beyond, _)| *beyond);
        most.map_or_else(|| Arc::clone(asking), |(_, room)| room)
    }
}

/// The connections of one lease, or of others who share a bound.
pub struct Room {
    share: Share,
    places: Arc<Places>,
    seats: Mutex<Seats>,
}

#[derive(Default)]
struct Seats {
    next: u64,
    taken: HashMap<u64, Arc<Seat>>,
}

impl Room {
    pub fn new(share: Share, places: &Arc<Places>) -> Arc<Self> {
        let room = Arc::new(Self { share, places: Arc::clone(places), seats: Mutex::default() });
        let mut rooms = places.rooms();
        rooms.retain(|room| room.strong_count() > 0);
        rooms.push(Arc::downgrade(&room));
        room
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().expect("no holder of this lock panics")
    }

    /// A place for one more connection, which ends with `end`. A listener waits (`patient`) while
    /// its lease has as many as one may have: clients wait in its backlog. Else nobody waits for
    /// connections that are busy.
    pub async fn place(
        self: &Arc<Self>,
        end: &CancellationToken,
        patient: bool,
    ) -> Result<Place, Exhausted> {
        let since = Instant::now();
        loop {
            let mut freed = pin!(self.places.freed.notified());
            freed.as_mut().enable();
            let error = match self.share.take(1) {
                Ok(taken) => return Ok(self.seat(taken, end)),
                Err(error) => error,
            };
            let own = matches!(error, Exhausted::Own { .. });
            let full = if own { Arc::clone(self) } else { self.places.crowded(self) };
            let making = full.make_room();
            let waits = own && patient;
            if !waits && (making == Making::Never || since.elapsed() >= PATIENCE) {
                return Err(error);
            }
            // Whether it was told or not, the next look says what has come of it.
            let _ = timeout(LOOK, freed).await;
        }
    }

    fn seat(self: &Arc<Self>, taken: Taken, end: &CancellationToken) -> Place {
        let seat = Arc::new(Seat::new(end.child_token()));
        let mut seats = self.seats();
        let number = seats.next;
        seats.next += 1;
        seats.taken.insert(number, Arc::clone(&seat));
        Place { seat, room: Arc::clone(self), number, taken: Some(taken) }
    }

    /// Tells the connection that has rested longest to go, unless one is going already.
    fn make_room(&self) -> Making {
        let seats = self.seats();
        let mut oldest: Option<(Instant, &Arc<Seat>)> = None;
        for seat in seats.taken.values() {
            match seat.rests() {
                Rests::Leaving => return Making::Leaving,
                Rests::Since(since) if oldest.is_none_or(|(oldest, _)| since < oldest) => {
                    oldest = Some((since, seat));
                }
                Rests::Since(_) | Rests::Never => {}
            }
        }
        match oldest {
            None => Making::Never,
            Some((since, seat)) if since.elapsed() >= self.places.rest && seat.leave() => {
                Making::Leaving
            }
            Some(_) => Making::Soon,
        }
    }
}

/// One connection's place. It is free again when this is dropped.
pub struct Place {
    seat: Arc<Seat>,
    room: Arc<Room>,
    number: u64,
    taken: Option<Taken>,
}

impl Place {
    pub fn seat(&self) -> &Arc<Seat> {
        &self.seat
    }

    pub fn is_in(&self, room: &Arc<Room>) -> bool {
        Arc::ptr_eq(&self.room, room)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.seats().taken.remove(&self.number);
        drop(self.taken.take());
        self.room.places.freed.notify_waiters();
    }
}

/// What a connection says about itself.
pub struct Seat {
    state: Mutex<State>,
    /// Cancelled when the connection has to go.
    pub end: CancellationToken,
}

struct State {
    /// Requests or tunnels on it.
    under_way: usize,
    /// When it last came to rest.
    since: Instant,
    leaving: bool,
}

enum Rests {
    Never,
    Since(Instant),
    Leaving,
}

impl Seat {
    /// One that makes room for nobody.
    pub fn new(end: CancellationToken) -> Self {
        let state = State { under_way: 0, since: Instant::now(), leaving: false };
        Self { state: Mutex::new(state), end }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Something begins on the connection, until what comes out is dropped. None where it has
    /// been told to go: then nothing may begin any more.
    pub fn works(self: &Arc<Self>) -> Option<Working> {
        let mut state = self.state();
        if state.leaving {
            return None;
        }
        state.under_way += 1;
        Some(Working(Arc::clone(self)))
    }

    fn rests(&self) -> Rests {
        let state = self.state();
        match (state.leaving, state.under_way) {
            (true, _) => Rests::Leaving,
            (false, 0) => Rests::Since(state.since),
            (false, _) => Rests::Never,
        }
    }

    /// Has the connection go, unless something has begun on it.
    fn leave(&self) -> bool {
        let mut state = self.state();
        state.leaving = state.under_way == 0;
        if state.leaving {
            self.end.cancel();
        }
        state.leaving
    }
}

/// Something under way on a connection.
pub struct Working(Arc<Seat>);

impl Drop for Working {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.under_way -= 1;
        state.since = Instant::now();
    }
}

#[cfg(test)]
#[path = "places_tests.rs"]
mod tests;
