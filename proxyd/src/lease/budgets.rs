//! What a lease has used of the budgets of rules, and whether there is room for more.
//!
//! Counts are the lease's and the rule's, not a connection's or a stream's, so more of these make
//! no more room. They go by what a rule allows and not by its place: a changed file leaves them as
//! they are where the rule is the same, also with other bounds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use policies::egress::budget::{Budget, Quota};

use crate::head::Fields;

/// What is around a name and a value of a field on a wire.
const FIELD_BYTES: usize = 4;

/// All counts of one lease. Clones share them.
#[derive(Clone, Default)]
pub struct Budgets(Arc<Mutex<HashMap<String, Arc<Counts>>>>);

/// The counts of one rule.
#[derive(Default)]
struct Counts {
    requests: Mutex<Bucket>,
    bytes: Mutex<Bucket>,
}

/// Why something goes no further: the budget has no room for it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rule} allows {bound}, and {}", why(.wait))]
pub struct Spent {
    pub rule: String,
    pub what: What,
    bound: String,
    /// After which there is room, if there ever is.
    pub wait: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Requests,
    Bytes,
}

fn why(wait: &Option<Duration>) -> &'static str {
    match wait {
        Some(_) => "this sandbox or lease has used them up",
        None => "this alone is more",
    }
}

impl Spent {
    fn new(budget: &Budget, what: What, quota: Quota, wait: Option<Duration>) -> Self {
        let bound = match what {
            What::Requests => quota.of_requests(),
            What::Bytes => quota.of_bytes(),
        };
        Self { rule: budget.rule.clone(), what, bound, wait }
    }

    /// For clients that try again: whole seconds, at least one.
    pub fn seconds(&self) -> Option<u64> {
        let wait = self.wait?;
        Some((wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1))
    }
}

impl Budgets {
    /// Counts one more request, or connection, under a rule, with the bytes of its head. Where the
    /// rule bounds bytes, what passes afterwards is to be paid for to what comes out.
    pub fn enter(
        &self,
        budget: Option<&Arc<Budget>>,
        head: u64,
        announced: u64,
    ) -> Result<Option<Meter>, Spent> {
        let Some(budget) = budget else { return Ok(None) };
        let counts = self.counts(&budget.key);
        let meter = counts.meter(budget, head.saturating_add(announced))?;
        if let Some(quota) = budget.quotas.rate {
            let taken = bucket(&counts.requests).take(quota, 1, Instant::now());
            taken.map_err(|wait| Spent::new(budget, What::Requests, quota, wait))?;
        }
        if let Some(meter) = &meter {
            meter.pay(head)?;
        }
        Ok(meter)
    }

    /// Whether there is room for one more now, without counting it.
    pub fn fits(
        &self,
        budget: Option<&Arc<Budget>>,
        head: u64,
        announced: u64,
    ) -> Result<(), Spent> {
        let Some(budget) = budget else { return Ok(()) };
        let counts = self.counts(&budget.key);
        counts.meter(budget, head.saturating_add(announced))?;
        let Some(quota) = budget.quotas.rate else { return Ok(()) };
        let room = bucket(&counts.requests).has_room(quota, 1, Instant::now());
        room.map_err(|wait| Spent::new(budget, What::Requests, quota, wait))
    }

    fn counts(&self, key: &str) -> Arc<Counts> {
        let mut all = self.0.lock().expect("no holder of this lock panics");
        if let Some(counts) = all.get(key) {
            return Arc::clone(counts);
        }
        // Those of rules that are no more, once all of them has come back.
        let now = Instant::now();
        all.retain(|_, counts| Arc::strong_count(counts) > 1 || !counts.has_rested(now));
        Arc::clone(all.entry(key.to_owned()).or_default())
    }
}

impl Counts {
    /// By which the bytes are paid for, where they are counted and so many more have room.
    fn meter(self: &Arc<Self>, budget: &Arc<Budget>, more: u64) -> Result<Option<Meter>, Spent> {
        let Some(quota) = budget.quotas.bytes else { return Ok(None) };
        let meter = Meter { budget: Arc::clone(budget), quota, counts: Arc::clone(self) };
        // A connection has nothing yet, and needs room for something.
        meter.fits(more.max(1))?;
        Ok(Some(meter))
    }

    fn has_rested(&self, now: Instant) -> bool {
        [&self.requests, &self.bytes].into_iter().all(|own| bucket(own).has_rested(now))
    }
}

fn bucket(own: &Mutex<Bucket>) -> MutexGuard<'_, Bucket> {
    own.lock().expect("no holder of this lock panics")
}

/// By which bytes under one rule are paid for.
pub struct Meter {
    budget: Arc<Budget>,
    quota: Quota,
    counts: Arc<Counts>,
}

impl Meter {
    /// Takes so many bytes, which then may pass; all of them or none.
    pub fn pay(&self, bytes: u64) -> Result<(), Spent> {
        let taken = bucket(&self.counts.bytes).take(self.quota, bytes, Instant::now());
        taken.map_err(|wait| self.spent(wait))
    }

    /// Whether so many could pass now.
    pub fn fits(&self, bytes: u64) -> Result<(), Spent> {
        let room = bucket(&self.counts.bytes).has_room(self.quota, bytes, Instant::now());
        room.map_err(|wait| self.spent(wait))
    }

    fn spent(&self, wait: Option<Duration>) -> Spent {
        Spent::new(&self.budget, What::Bytes, self.quota, wait)
    }
}

/// What a head counts as.
pub fn size(fields: &Fields, rest: usize) -> u64 {
    let fields = fields.iter().map(|(name, value)| name.len() + value.len() + FIELD_BYTES);
    (fields.sum::<usize>() + rest) as u64
}

/// What was used and has not come back yet.
#[derive(Default)]
struct Bucket {
    /// In parts: one for each nanosecond of `span`, so that nothing is lost in rounding.
    used: u128,
    span: u128,
    at: Option<Instant>,
}

impl Bucket {
    fn take(&mut self, quota: Quota, amount: u64, now: Instant) -> Result<(), Option<Duration>> {
        self.has_room(quota, amount, now)?;
        self.used += u128::from(amount) * self.span;
        Ok(())
    }

    fn has_room(
        &mut self,
        quota: Quota,
        amount: u64,
        now: Instant,
    ) -> Result<(), Option<Duration>> {
        self.settle(quota, now);
        self.room(quota, amount)
    }

    /// Gives back what came back since the last time.
    fn settle(&mut self, quota: Quota, now: Instant) {
        let span = quota.span.length().as_nanos();
        if self.span != span {
            // The rule says it for another time now; what was used stays used.
            self.used = self.used.div_ceil(self.span.max(1)) * span;
            self.span = span;
        }
        // Whoever looked at the clock first need not be here first.
        let at = self.at.unwrap_or(now);
        let passed = now.saturating_duration_since(at).as_nanos();
        self.used = self.used.saturating_sub(passed.saturating_mul(quota.amount.into()));
        self.at = Some(at.max(now));
    }

    /// Whether there is room for so much, and if not, in how long there will be.
    fn room(&self, quota: Quota, amount: u64) -> Result<(), Option<Duration>> {
        let all = u128::from(quota.amount);
        let over = (self.used + u128::from(amount) * self.span).saturating_sub(all * self.span);
        if over == 0 {
            return Ok(());
        }
        let wait = over.div_ceil(all.max(1));
        let wait = Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX));
        Err((amount <= quota.amount).then_some(wait))
    }

    /// Whether all of it has come back: it does within its time, if the bound is still the same.
    fn has_rested(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| now.saturating_duration_since(at).as_nanos() >= self.span)
    }
}

#[cfg(test)]
mod tests {
    use policies::egress::budget::{Quotas, Span};

    use super::*;

    const SIX_A_MINUTE: Quota = Quota { amount: 6, span: Span::Minute };

    fn later(at: Instant, seconds: u64) -> Instant {
        at + Duration::from_secs(seconds)
    }

    #[test]
    fn what_was_used_comes_back_evenly_and_no_more_than_all_of_it_is_ever_there() {
        let (mut bucket, begun) = (Bucket::default(), Instant::now());
        for _ in 0..6 {
            bucket.take(SIX_A_MINUTE, 1, begun).unwrap();
        }

        let wait = bucket.take(SIX_A_MINUTE, 1, begun);
        assert_eq!(wait, Err(Some(Duration::from_secs(10))));
        assert!(bucket.take(SIX_A_MINUTE, 1, later(begun, 9)).is_err());
        assert!(bucket.take(SIX_A_MINUTE, 1, later(begun, 10)).is_ok());
        assert!(bucket.take(SIX_A_MINUTE, 1, later(begun, 10)).is_err());
        let rested = later(begun, 86_400);
        assert_eq!((0..10).filter(|_| bucket.take(SIX_A_MINUTE, 1, rested).is_ok()).count(), 6);
    }

    #[test]
    fn a_clock_that_was_read_before_the_last_time_gives_nothing_back() {
        let (mut bucket, begun) = (Bucket::default(), Instant::now());
        bucket.take(SIX_A_MINUTE, 6, later(begun, 10)).unwrap();

        for _ in 0..10 {
            assert!(bucket.take(SIX_A_MINUTE, 1, begun).is_err());
            assert!(bucket.take(SIX_A_MINUTE, 1, later(begun, 10)).is_err());
        }
    }

    #[test]
    fn other_bounds_find_what_was_used_under_the_former_ones() {
        let (mut bucket, begun) = (Bucket::default(), Instant::now());
        bucket.take(SIX_A_MINUTE, 4, begun).unwrap();
        let less = Quota { amount: 3, span: Span::Hour };
        let more = Quota { amount: 5, span: Span::Hour };

        assert_eq!(bucket.take(less, 1, begun), Err(Some(Duration::from_secs(2 * 1200))));
        assert!(bucket.take(more, 1, begun).is_ok());
        assert!(bucket.take(more, 1, begun).is_err());
    }

    #[test]
    fn what_is_more_than_all_of_it_never_fits_and_takes_nothing() {
        let (mut bucket, begun) = (Bucket::default(), Instant::now());

        assert_eq!(bucket.take(SIX_A_MINUTE, 7, begun), Err(None));
        assert_eq!(bucket.take(SIX_A_MINUTE, u64::MAX, later(begun, 1 << 40)), Err(None));
        assert!(bucket.take(SIX_A_MINUTE, 6, later(begun, 1 << 40)).is_ok());
    }

    #[test]
    fn counts_of_rules_that_are_no_more_are_dropped_once_they_have_rested() {
        let budgets = Budgets::default();
        let budget = |key: &str, span| {
            let rate = Some(Quota { amount: 1, span });
            let quotas = Quotas { rate, bytes: None };
            Arc::new(Budget { rule: "egress.allow[0]".into(), key: key.to_owned(), quotas })
        };
        let (used, other) = (budget("used", Span::Day), budget("other", Span::Day));
        assert!(budgets.enter(Some(&used), 0, 0).is_ok());

        for number in 0..100 {
            budgets.counts(&number.to_string());
        }
        assert!(budgets.enter(Some(&other), 0, 0).is_ok());

        assert!(budgets.0.lock().unwrap().len() <= 3);
        assert!(budgets.enter(Some(&used), 0, 0).is_err(), "forgotten while it counts");
    }
}
