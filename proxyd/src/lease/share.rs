//! What one lease, and all of them together, may use at once of what is scarce: descriptors, and
//! memory for bodies that are held back.
//!
//! Nobody waits for a part: whoever asks for more than there is gets an answer that says so. A
//! queue would fill with the requests of the one who asks for too much, and hold descriptors too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sys::process;

/// Requests that one lease has under way, where the process may have many descriptors.
const REQUESTS_MAX: usize = 1024;
/// Bytes of bodies held back: of one lease, and of all.
const HELD_BYTES_MAX: usize = 32 << 20;
const HELD_BYTES_ALL_MAX: usize = 256 << 20;

/// Why there is no part left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exhausted {
    #[error("one sandbox or lease may have {max} {what} at once, and this one has no more left")]
    Own { what: &'static str, max: usize },
    #[error("all sandboxes and leases together may have {max} {what} at once, and none are left")]
    All { what: &'static str, max: usize },
}

struct Counter {
    max: usize,
    used: AtomicUsize,
}

impl Counter {
    fn new(max: usize) -> Self {
        Self { max, used: AtomicUsize::new(0) }
    }

    fn take(&self, amount: usize) -> bool {
        let more = |used: usize| used.checked_add(amount).filter(|used| *used <= self.max);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn give_back(&self, amount: usize) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
    }
}

/// One lease's share of one thing. Clones are the same share.
#[derive(Clone)]
pub struct Share {
    what: &'static str,
    own: Arc<Counter>,
    all: Arc<Counter>,
}

impl Share {
    fn new(what: &'static str, max: usize, all: &Arc<Counter>) -> Self {
        Self { what, own: Arc::new(Counter::new(max)), all: Arc::clone(all) }
    }

    /// Takes a part, until what comes out is dropped.
    pub fn take(&self, amount: usize) -> Result<Taken, Exhausted> {
        let mut taken = Taken { share: self.clone(), amount: 0 };
        taken.grow_to(amount)?;
        Ok(taken)
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
        let Share { what, own, all } = &self.share;
        let more = amount.saturating_sub(self.amount);
        if !own.take(more) {
            return Err(Exhausted::Own { what, max: own.max });
        }
        if !all.take(more) {
            own.give_back(more);
            return Err(Exhausted::All { what, max: all.max });
        }
        self.amount += more;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.share.own.give_back(self.amount);
        self.share.all.give_back(self.amount);
    }
}

/// What all leases have together, and how much of it each may have.
pub struct Shares {
    /// Connections of one lease.
    pub connections: usize,
    requests: usize,
    requests_all: Arc<Counter>,
    held_all: Arc<Counter>,
}

impl Shares {
    /// By the number of descriptors that this process may have.
    pub fn here() -> Self {
        Self::of(process::descriptors())
    }

    /// A lease has an eighth at most, half of it for its connections and half for those to
    /// upstreams; harnessd's own has more ([`Shares::requests`]). All requests together leave more
    /// than half: for clients' connections, the control sockets, the audit and lookups.
    fn of(descriptors: usize) -> Self {
        let part = (descriptors / 16).clamp(1, REQUESTS_MAX);
        Self {
            connections: part,
            requests: part,
            requests_all: Arc::new(Counter::new((descriptors / 8 * 3).max(1))),
            held_all: Arc::new(Counter::new(HELD_BYTES_ALL_MAX)),
        }
    }

    /// A new lease's share of requests under way: each may need an upstream connection of its own.
    /// harnessd's own lease carries what all sessions ask of models: it has the share of several.
    pub fn requests(&self, harness: bool) -> Share {
        let max = if harness { 4 * self.requests } else { self.requests };
        Share::new("requests and tunnels under way", max, &self.requests_all)
    }

    /// A new lease's share of memory for bodies that are held back.
    pub fn held(&self) -> Share {
        Share::new("bytes of request bodies held back", HELD_BYTES_MAX, &self.held_all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_lease_runs_out_alone_and_what_is_dropped_can_be_taken_again() {
        let shares = Shares::of(64);
        let (greedy, other) = (shares.requests(false), shares.requests(false));
        let mut taken: Vec<_> = (0..4).map(|_| greedy.take(1).unwrap()).collect();

        assert!(matches!(greedy.take(1), Err(Exhausted::Own { max: 4, .. })));
        assert!(other.take(1).is_ok());
        assert!(shares.requests(true).take(5).is_ok());
        taken.pop();
        assert!(greedy.take(1).is_ok());
    }

    #[test]
    fn all_leases_together_run_out_too_and_a_refused_part_is_not_kept() {
        let shares = Shares::of(64);
        let leases: Vec<_> = (0..7).map(|_| shares.requests(false)).collect();
        let taken: Vec<_> = leases[..6].iter().map(|lease| lease.take(4).unwrap()).collect();

        assert!(matches!(leases[6].take(1), Err(Exhausted::All { max: 24, .. })));
        drop(taken);
        assert!(leases[6].take(4).is_ok());
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
    fn no_lease_has_more_than_an_eighth_of_the_descriptors_and_the_harness_five_sixteenths() {
        for descriptors in [16, 256, 1024, 1 << 20] {
            let shares = Shares::of(descriptors);
            let with = |harness| shares.connections + shares.requests(harness).own.max;
            assert!(with(false) <= descriptors / 8);
            assert!(with(true) <= descriptors / 16 * 5);
            assert!(shares.connections <= REQUESTS_MAX);
            assert!(shares.requests_all.max < descriptors / 2);
        }
    }
}
