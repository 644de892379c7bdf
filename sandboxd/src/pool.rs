//! Half-made sandboxes that wait for a session, so that its first call need not wait for them.
//!
//! A [`Ready`] one has everything but its workspace: all namespaces, the root, the way out, a lease
//! of its owner's, the certificates. It is for one environment as its policy stands and for one
//! owner, and is used once: what has been a session's is never anybody else's. An environment has
//! some ready from its first use until it was not used for a while.
//!
//! Those that are ready count among the cells that there may be. One is given up as soon as a
//! session needs its place (see [`Pool::place`]): nobody is refused a sandbox for what nobody uses.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipc::id::SandboxId;
use ipc::lease::Opened;
use policies::Policy;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use crate::cell::Cell;
use crate::lease::{Event, Lease};
use crate::plan::SandboxPlan;
use crate::templates::Held;

/// For how long after its last use an environment is kept ready.
const KEPT: Duration = Duration::from_secs(300);
/// Environments and owners that are kept ready at once; beyond that the one unused for longest
/// goes.
const SHAPES_MAX: usize = 8;
/// How long the processes of one that is given up may take to be gone before its place is free.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// The pool is filled when nobody asked for a sandbox for this long: a call that runs now needs the
/// processors more.
pub const QUIET: Duration = Duration::from_millis(20);

/// What two sandboxes have in common when one can be made before it is known whose it will be.
#[derive(Clone, Debug)]
pub struct Shape {
    pub owner: String,
    pub policy: Arc<Policy>,
    pub plan: SandboxPlan,
    /// What of the plan is shared, and kept while this is.
    pub templates: Vec<Arc<Held>>,
}

impl PartialEq for Shape {
    fn eq(&self, other: &Self) -> bool {
        // A policy that was read again is another one: its placeholders may be.
        Arc::ptr_eq(&self.policy, &other.policy)
            && self.owner == other.owner
            && self.plan == other.plan
    }
}

/// A sandbox that lacks its workspace.
#[derive(Debug)]
pub struct Ready {
    pub id: SandboxId,
    pub cell: Cell,
    pub lease: Lease,
    pub opened: Opened,
    pub events: mpsc::UnboundedReceiver<Event>,
    pub made: Instant,
    /// Last, so that it is free when all else is gone.
    pub place: OwnedSemaphorePermit,
}

impl Ready {
    /// Nothing of it has changed since it was made. A lease that was taken up again may have other
    /// placeholders.
    fn is_fresh(&self) -> bool {
        self.cell.is_alive() && self.events.is_empty() && !self.events.is_closed()
    }

    /// Ends one that nobody used; its place, when that is free.
    pub async fn discard(self) -> OwnedSemaphorePermit {
        self.cell.kill();
        self.lease.close().await;
        if tokio::time::timeout(END_TIMEOUT, self.cell.ended()).await.is_err() {
            tracing::error!(sandbox = %self.id, "the processes of a killed sandbox do not end");
        }
        self.place
    }
}

/// All that are ready.
#[derive(Debug)]
pub struct Pool {
    /// How many of each shape.
    size: usize,
    /// One permit for each cell that there may be, used or ready.
    places: Arc<Semaphore>,
    kept: Mutex<Kept>,
    /// Told when one was put in.
    put_in: Notify,
}

#[derive(Debug, Default)]
struct Kept {
    shapes: Vec<Stock>,
    /// When a sandbox was last asked for.
    asked: Option<Instant>,
    filling: bool,
    closed: bool,
}

#[derive(Debug)]
struct Stock {
    shape: Shape,
    ready: VecDeque<Ready>,
    used: Instant,
    /// One could not be made: none is until the environment is used again.
    failed: bool,
}

/// What the pool wants next.
#[derive(Debug)]
pub enum Next {
    Make(Box<Shape>),
    /// Look again after this time.
    Wait(Duration),
    Nothing,
}

impl Pool {
    /// `size` of each shape, while there are no more cells than `places` in all.
    pub fn new(size: usize, places: usize) -> Self {
        let places = Arc::new(Semaphore::new(places));
        Self { size, places, kept: Mutex::default(), put_in: Notify::new() }
    }

    /// The place of one more cell: a free one, or that of the oldest that is ready, whosever. The
    /// caller has a right to it, as one of no more users than there are places: then there is one
    /// that is free, or held by what nobody uses, if only while that is being made or ended.
    pub async fn place(&self) -> OwnedSemaphorePermit {
        loop {
            // Made before looking, so that nothing is put in unheard.
            let put_in = self.put_in.notified();
            if let Some(place) = self.free_place() {
                return place;
            }
            if let Some(oldest) = self.give_up_oldest() {
                return oldest.discard().await;
            }
            tokio::select! {
                place = Arc::clone(&self.places).acquire_owned() => {
                    return place.expect("nobody closes it");
                }
                () = put_in => {}
            }
        }
    }

    /// A place that nobody has.
    pub fn free_place(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.places).try_acquire_owned().ok()
    }

    fn give_up_oldest(&self) -> Option<Ready> {
        let mut kept = self.kept();
        let stocks = kept.shapes.iter_mut().filter(|stock| !stock.ready.is_empty());
        let oldest = stocks.min_by_key(|stock| stock.ready.front().map(|ready| ready.made));
        oldest.and_then(|stock| stock.ready.pop_front())
    }

    /// Takes one of this shape, if one is ready, and notes that the shape is in use. The second
    /// value are those that are of no more use.
    pub fn take(&self, shape: &Shape) -> (Option<Ready>, Vec<Ready>) {
        if self.size == 0 {
            return (None, Vec::new());
        }
        let now = Instant::now();
        let mut kept = self.kept();
        kept.asked = Some(now);
        let mut stale = kept.forget_old(now, shape);
        let at = match kept.shapes.iter().position(|stock| stock.shape == *shape) {
            Some(at) => at,
            None => {
                let (shape, ready) = (shape.clone(), VecDeque::new());
                kept.shapes.push(Stock { shape, ready, used: now, failed: false });
                kept.shapes.len() - 1
            }
        };
        let stock = &mut kept.shapes[at];
        (stock.used, stock.failed) = (now, false);
        while let Some(ready) = stock.ready.pop_front() {
            if ready.is_fresh() {
                return (Some(ready), stale);
            }
            stale.push(ready);
        }
        (None, stale)
    }

    /// Whether the caller is to fill the pool: one does at a time.
    pub fn begin_filling(&self) -> bool {
        let mut kept = self.kept();
        let begin = self.size > 0 && !kept.filling && !kept.closed;
        kept.filling |= begin;
        begin
    }

    /// What whoever fills the pool does next; after [`Next::Nothing`] nobody fills it.
    pub fn next(&self) -> Next {
        let mut kept = self.kept();
        let quiet = kept.asked.map_or(QUIET, |asked| asked.elapsed());
        let size = self.size;
        let lacking = |stock: &&Stock| !stock.failed && stock.ready.len() < size;
        let wanted = kept.shapes.iter().find(lacking).map(|stock| stock.shape.clone());
        match wanted {
            Some(_) if kept.closed => {}
            Some(_) if quiet < QUIET => return Next::Wait(QUIET - quiet),
            Some(shape) => return Next::Make(Box::new(shape)),
            None => {}
        }
        kept.filling = false;
        Next::Nothing
    }

    /// Puts one in; gives it back when it came too late.
    pub fn put(&self, shape: &Shape, made: Option<Ready>) -> Option<Ready> {
        let mut kept = self.kept();
        let closed = kept.closed;
        let stock = kept.shapes.iter_mut().find(|stock| stock.shape == *shape);
        match (stock, made) {
            (Some(stock), Some(ready)) if !closed => {
                stock.ready.push_back(ready);
                self.put_in.notify_waiters();
                None
            }
            (Some(stock), None) => {
                stock.failed = true;
                None
            }
            (_, made) => made,
        }
    }

    /// There is no room for more until the next sandbox is asked for.
    pub fn end_filling(&self) {
        self.kept().filling = false;
    }

    /// Takes all that are of no more use by now.
    pub fn expired(&self) -> Vec<Ready> {
        let now = Instant::now();
        let mut kept = self.kept();
        let old = |stock: &mut Stock| now.duration_since(stock.used) >= KEPT;
        kept.shapes.extract_if(.., old).flat_map(|stock| stock.ready).collect()
    }

    /// Takes all, for good.
    pub fn close(&self) -> Vec<Ready> {
        let mut kept = self.kept();
        kept.closed = true;
        kept.shapes.drain(..).flat_map(|stock| stock.ready).collect()
    }

    /// How many are ready.
    pub fn len(&self) -> usize {
        self.kept().shapes.iter().map(|stock| stock.ready.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Drops what `shape` takes the place of: the same environment and owner under a policy that
    /// was replaced, what was not used for long, and the oldest of too many.
    fn forget_old(&mut self, now: Instant, shape: &Shape) -> Vec<Ready> {
        let replaced = |stock: &Stock| {
            stock.shape.policy.name == shape.policy.name
                && stock.shape.owner == shape.owner
                && stock.shape != *shape
        };
        let old = |stock: &mut Stock| now.duration_since(stock.used) >= KEPT || replaced(stock);
        let mut gone: Vec<Stock> = self.shapes.extract_if(.., old).collect();
        let known = self.shapes.iter().any(|stock| stock.shape == *shape);
        if self.shapes.len() >= SHAPES_MAX && !known {
            let oldest = (0..self.shapes.len()).min_by_key(|at| self.shapes[*at].used);
            gone.extend(oldest.map(|at| self.shapes.remove(at)));
        }
        gone.into_iter().flat_map(|stock| stock.ready).collect()
    }
}
