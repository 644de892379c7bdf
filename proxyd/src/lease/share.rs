//! What one lease, and all of them together, may use at once of what is scarce: descriptors, and
//! memory for bodies that are held back.
//!
//! Nobody waits for a part: whoever asks for more than there is gets an answer that says so. A
//! queue would fill with the requests of the one who asks for too much, and hold descriptors too.
//!
//! Of descriptors a few are each lease's own, so that the first connections and requests of one
//! that has just come are served whatever all others do. The rest is common, and nobody may have
//! more of it than is then left: one alone gets a half, two a third each, and so on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::places::{Places, REST, Room};
use crate::sys::process;

/// Requests that one lease has under way, and connections that it has, where the process may have
/// many descriptors.
const REQUESTS_MAX: usize = 1024;
/// Leases at once, where the process may have many descriptors. One host does not run more
/// sandboxes than this.
const LEASES_MAX: usize = 16 * 1024;
/// Descriptors that a lease takes at least: its connection, its sockets and for each of them the
/// client that was accepted and waits.
const LEASE_SOCKETS_MIN: usize = 4;
/// Connections, and requests, that every lease can have whatever all others do.
const FIRST: usize = 4;
/// How long a client that has not said whose it is is left alone while others wait for its place.
const SILENCE: Duration = Duration::from_millis(250);
/// Requests that wait for an operator's answer: of one lease, and of all. More could not be
/// overseen.
const QUESTIONS_MAX: usize = 16;
const QUESTIONS_ALL_MAX: usize = 256;
/// Of them every lease can have as many whatever all others do.
const FIRST_QUESTIONS: usize = 2;
/// Bytes of bodies held back: of one lease, and of all.
const HELD_BYTES_MAX: usize = 32 << 20;
const HELD_BYTES_ALL_MAX: usize = 256 << 20;
/// Bytes that peers of HTTP/2 may send before they are read: of one lease, and of all.
const WINDOW_BYTES_MAX: usize = 32 << 20;
const WINDOW_BYTES_ALL_MAX: usize = 256 << 20;

/// Why there is no part left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exhausted {
    #[error("one sandbox or lease may have {max} {what} at once, and this one has no more left")]
    Own { what: &'static str, max: usize },
    #[error(
        "all sandboxes and leases share {max} {what} beyond the first few of each, and this one \
         may have no more of what is left"
    )]
    All { what: &'static str, max: usize },
}

/// What all have in common of one thing.
pub struct Common {
    pub max: usize,
    used: AtomicUsize,
    /// Whether nobody may have more of it than is then left for others.
    fair: bool,
}

impl Common {
    pub fn new(max: usize, fair: bool) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicUsize::new(0), fair })
    }

    /// Takes `more` for somebody who has `all` of it then.
    fn take(&self, more: usize, all: usize) -> bool {
        let taken = |used: usize| {
            let left = self.max.checked_sub(used)?;
            (more <= left && (!self.fair || all <= left)).then(|| used + more)
        };
        more == 0 || self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
    }

    fn give_back(&self, amount: usize) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
    }
}

/// One lease's share of one thing. Clones are the same share.
#[derive(Clone)]
pub struct Share {
    what: &'static str,
    max: usize,
    /// As much of it is nobody else's.
    first: usize,
    used: Arc<Mutex<usize>>,
    common: Arc<Common>,
}

impl Share {
    pub fn new(what: &'static str, max: usize, first: usize, common: &Arc<Common>) -> Self {
        let common = Arc::clone(common);
        Self { what, max, first: first.min(max), used: Arc::default(), common }
    }

    /// Takes a part, until what comes out is dropped.
    pub fn take(&self, amount: usize) -> Result<Taken, Exhausted> {
        let mut taken = Taken { share: self.clone(), amount: 0 };
        taken.grow_to(amount)?;
        Ok(taken)
    }

    /// How much it has of what is common.
    pub fn beyond(&self) -> usize {
        self.used().saturating_sub(self.first)
    }

    fn used(&self) -> MutexGuard<'_, usize> {
        self.used.lock().expect("no holder of this lock panics")
    }

    fn grow(&self, more: usize) -> Result<(), Exhausted> {
        let Self { what, max, first, common, .. } = self;
        let mut used = self.used();
        let Some(all) = used.checked_add(more).filter(|all| all <= max) else {
            return Err(Exhausted::Own { what, max: *max });
        };
        let (had, has) = (used.saturating_sub(*first), all.saturating_sub(*first));
        if !common.take(has - had, has) {
            return Err(Exhausted::All { what, max: common.max });
        }
        *used = all;
        Ok(())
    }

    fn give_back(&self, amount: usize) {
        let mut used = self.used();
        let left = *used - amount;
        let (had, has) = (used.saturating_sub(self.first), left.saturating_sub(self.first));
        self.common.give_back(had - has);
        *used = left;
    }
}

/// A part that was taken. Dropping it gives it back.
pub struct Taken {
    share: Share,
    amount: usize,
}

impl Taken {
    /// Takes what is missing to `amount`.
    pub fn grow_to(&mut self, amount: usize) -> Result<(), Exhausted> {
        let more = amount.saturating_sub(self.amount);
        self.share.grow(more)?;
        self.amount += more;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.share.give_back(self.amount);
    }
}

/// What all leases have together, and how much of it each may have.
///
/// All descriptors are spoken for, in sixteenths: five for clients' connections, five for requests
/// under way, one for idle connections to upstreams, one for HTTP/2 connections to them that are
/// kept, two for leases and their sockets, a half for clients and holders that have not said yet
/// what they want, a quarter for those who are told that there is no room. What is left is for the
/// control sockets, the audit, the vault and lookups.
pub struct Shares {
    part: usize,
    leases: Arc<Common>,
    /// Of leases, one for each owner.
    owners: Mutex<HashMap<String, Share>>,
    connections: Arc<Places>,
    strangers: Arc<Places>,
    /// Of strangers, one for each user.
    users: Mutex<HashMap<u32, Arc<Room>>>,
    requests: Arc<Common>,
    refusals: Arc<Common>,
    lasting: Arc<Common>,
    held: Arc<Common>,
    windows: Arc<Common>,
    questions: Arc<Common>,
}

impl Shares {
    /// By the number of descriptors that this process may have.
    pub fn here() -> Self {
        Self::of(process::descriptors())
    }

    /// A lease has an eighth at most, half of it for its connections and half for those to
    /// upstreams; harnessd's own has more ([`Shares::requests`]). What is set aside for the first
    /// few of every lease is nobody else's.
    fn of(descriptors: usize) -> Self {
        let of = |parts: usize, whole: usize| (descriptors / whole * parts).max(1);
        let leases = of(1, 32).min(LEASES_MAX);
        let common = of(5, 16).saturating_sub(leases * FIRST).max(1);
        Self {
            leases: Common::new(leases * LEASE_SOCKETS_MIN, true),
            owners: Mutex::default(),
            users: Mutex::default(),
            part: of(1, 16).min(REQUESTS_MAX),
            connections: Places::new(Common::new(common, true), REST),
            // All of them rest: whoever comes makes the one go that was silent for longest.
            strangers: Places::new(Common::new(of(1, 32), false), SILENCE),
            requests: Common::new(common, true),
            refusals: Common::new(of(1, 64), true),
            lasting: Common::new(of(1, 16), true),
            held: Common::new(HELD_BYTES_ALL_MAX, false),
            windows: Common::new(WINDOW_BYTES_ALL_MAX, false),
            questions: Common::new(QUESTIONS_ALL_MAX, true),
        }
    }

    fn parts(&self, harness: bool) -> usize {
        if harness { 4 * self.part } else { self.part }
    }

    /// Room for a new lease's connections.
    pub fn connections(&self, harness: bool) -> Arc<Room> {
        let common = self.connections.common();
        let share = Share::new("connections", self.parts(harness), FIRST, common);
        Room::new(share, &self.connections)
    }

    /// Room for the connections of a user that has not said yet which lease they are under.
    pub fn stranger(&self, uid: u32) -> Arc<Room> {
        let mut users = self.users.lock().expect("no holder of this lock panics");
        if !users.contains_key(&uid) {
            // Those of users who have no connection are made anew when they come again.
            users.retain(|_, room| Arc::strong_count(room) > 1);
        }
        let common = self.strangers.common();
        let what = "connections without a token";
        let made = || Room::new(Share::new(what, common.max, 0, common), &self.strangers);
        Arc::clone(users.entry(uid).or_insert_with(made))
    }

    /// What a new lease with so many sockets takes of the descriptors for leases. No owner may
    /// have more of them than are left for others.
    pub fn lease(&self, owner: &str, sockets: usize) -> Result<Taken, Exhausted> {
        let mut owners = self.owners.lock().expect("no holder of this lock panics");
        if !owners.contains_key(owner) {
            owners.retain(|_, share| *share.used() > 0);
        }
        let common = &self.leases;
        let made = || Share::new("sockets of leases", common.max, 0, common);
        let share = owners.entry(owner.to_owned()).or_insert_with(made);
        share.take((1 + 2 * sockets).max(LEASE_SOCKETS_MIN))
    }

    /// A new lease's share of requests under way: each may need an upstream connection of its own.
    /// harnessd's own lease carries what all sessions ask of models: it has the share of several.
    pub fn requests(&self, harness: bool) -> Share {
        let max = self.parts(harness);
        Share::new("requests and tunnels under way", max, FIRST, &self.requests)
    }

    /// A new lease's share of connections that are told that there is no room.
    pub fn refusals(&self) -> Share {
        Share::new("connections to be refused", self.refusals.max, 0, &self.refusals)
    }

    /// A new lease's share of HTTP/2 connections to upstreams that outlast their requests.
    pub fn lasting(&self) -> Share {
        Share::new("kept connections", self.part, 0, &self.lasting)
    }

    /// A new lease's share of memory for bodies that are held back.
    pub fn held(&self) -> Share {
        Share::new("bytes of request bodies held back", HELD_BYTES_MAX, 0, &self.held)
    }

    /// A new lease's share of what waits for an operator's answer.
    pub fn questions(&self) -> Share {
        let what = "requests that wait for an operator's answer";
        Share::new(what, QUESTIONS_MAX, FIRST_QUESTIONS, &self.questions)
    }

    /// A new lease's share of memory for what peers of HTTP/2 send ahead.
    pub fn windows(&self) -> Share {
        Share::new("bytes of HTTP/2 windows", WINDOW_BYTES_MAX, 0, &self.windows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(max: usize) -> Arc<Common> {
        Common::new(max, true)
    }

    #[test]
    fn one_lease_runs_out_alone_and_what_is_dropped_can_be_taken_again() {
        let common = requests(100);
        let [greedy, other] = [(); 2].map(|()| Share::new("requests", 10, 4, &common));
        let mut taken: Vec<_> = (0..10).map(|_| greedy.take(1).unwrap()).collect();

        assert!(matches!(greedy.take(1), Err(Exhausted::Own { max: 10, .. })));
        assert!(other.take(1).is_ok());
        taken.pop();
        assert!(greedy.take(1).is_ok());
        drop(taken);
        assert_eq!(common.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn however_much_others_take_every_lease_has_its_first_few() {
        let common = requests(20);
        let lease = || Share::new("requests", 1000, 4, &common);
        let greedy: Vec<_> = (0..50).map(|_| lease()).collect();
        let mut taken = Vec::new();
        // In turn as far as each gets, and then each as far as it gets at once.
        for share in greedy.iter().cycle().take(500).chain(&greedy) {
            while let Ok(part) = share.take(1) {
                taken.push(part);
                if taken.len() < 100 {
                    break;
                }
            }
        }

        assert!(taken.len() <= 50 * 4 + 20);
        let late = lease();
        let first: Vec<_> = (0..4).map(|_| late.take(1).unwrap()).collect();
        assert!(matches!(late.take(1), Err(Exhausted::All { max: 20, .. })));
        drop((taken, first));
        assert_eq!(common.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn nobody_has_more_of_what_is_common_than_is_left() {
        let common = requests(20);
        let share = Share::new("requests", 1000, 4, &common);

        let taken: Vec<_> = std::iter::from_fn(|| share.take(1).ok()).collect();

        assert_eq!(taken.len(), 4 + 10);
        assert_eq!(share.beyond(), 10);
    }

    #[test]
    fn a_part_that_grows_is_counted_once_and_given_back_whole() {
        let share = Shares::of(1024).held();
        let mut part = share.take(10).unwrap();
        part.grow_to(HELD_BYTES_MAX).unwrap();
        part.grow_to(20).unwrap();

        assert!(share.take(1).is_err() && part.grow_to(HELD_BYTES_MAX + 1).is_err());
        assert!(part.grow_to(usize::MAX).is_err());
        drop(part);
        assert!(share.take(HELD_BYTES_MAX).is_ok());
    }

    #[test]
    fn one_owner_leaves_leases_for_others_and_sockets_count() {
        let shares = Shares::of(1024);
        let all = || std::iter::from_fn(|| shares.lease("uid:1", 1).ok()).collect::<Vec<_>>();

        let leases = all();
        assert_eq!(leases.len(), 1024 / 32 / 2);
        assert!(shares.lease("uid:2", 1).is_ok());
        drop(leases);
        let wide = shares.lease("uid:1", 16).unwrap();
        assert!(all().len() < 1024 / 32 / 2 - 7);
        drop(wide);
    }

    #[test]
    fn all_descriptors_are_spoken_for_and_some_are_nobodys() {
        for descriptors in [64, 256, 512, 1024, 65_536, 1 << 20] {
            let shares = Shares::of(descriptors);
            let leases = shares.leases.max;
            let first = leases / LEASE_SOCKETS_MIN * FIRST;
            let connections = shares.connections.common().max + first;
            let requests = shares.requests.max + first;
            let strangers = shares.strangers.common().max;
            let rest = strangers + shares.refusals.max + shares.lasting.max + leases;
            let idle = crate::upstream::pool::idle_max(descriptors);

            let all = connections + requests + rest + idle;
            assert!(all <= descriptors / 16 * 15, "{all} of {descriptors}");
            let lease = shares.requests(false).max;
            assert!(lease <= descriptors / 16 && lease <= REQUESTS_MAX);
            assert!(shares.requests(true).max <= 4 * lease);
        }
    }
}
