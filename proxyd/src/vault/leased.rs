//! Secrets that an OpenBao server makes for one lease of proxyd's: an account for each sandbox.
//!
//! Had when the lease's first request needs it, let live on while the lease is there, also where
//! nobody uses it, and revoked when the lease ends, when another one takes its place, and when
//! proxyd stops. The server's name of each is on disk before its value is used, so that the next
//! vault revokes what a crash has left over. Values are not: they die with this process.
//!
//! A server ends what it has made together with the token that it was asked with. So while
//! something is held the vault's own token is kept alive, and after another login everything is
//! had anew, at its next use, before the former token ends.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::VaultError;
use super::child::Child;
use super::mint::{Flight, Key, Landed, Life};
use super::remote::Meaning;
use super::remote::lease::{Answered, Lease};
use super::secret::Secret;
use super::wire::Fetched;

/// How often it is looked what is due.
const LOOK: Duration = Duration::from_secs(1);
/// Most that is held at once: whoever controls the traffic process could invent leases.
const HELD_MAX: usize = 1024;
/// What has been replaced may still be in requests under way.
const OVERLAP: Duration = Duration::from_secs(60);
/// When a revocation that failed is tried again.
const AGAIN: Duration = Duration::from_secs(30);
/// Revocations under way at once.
const REVOCATIONS_MAX: usize = 8;
/// So long after its end, by this host's clock, the server has ended a lease by itself.
const ENDED_SECONDS: u64 = 120;

/// What the server keeps for the vault.
#[derive(Default)]
pub(super) struct Leased {
    held: HashMap<Key, Held>,
    /// What is to be revoked, by the server's name for it.
    ending: BTreeMap<String, Ending>,
    due: Option<Instant>,
}

struct Held {
    id: Option<String>,
    renewable: bool,
    /// Its life at first.
    first: Duration,
    /// When it ends if nothing is done, in seconds since 1970.
    ends: u64,
}

struct Ending {
    from: Instant,
    ends: u64,
    /// The operator has been told that it fails.
    told: bool,
}

impl Leased {
    /// With what a former vault has left over.
    pub fn over(left: Vec<(String, u64)>) -> Self {
        let from = Instant::now();
        let ending = |(id, ends)| (id, Ending { from, ends, told: false });
        Self { ending: left.into_iter().map(ending).collect(), ..Self::default() }
    }

    /// How long until it is to be looked what is due; none where nothing is held.
    pub fn patience(&self) -> Option<Duration> {
        let nothing = self.held.is_empty() && self.ending.is_empty();
        let now = Instant::now();
        (!nothing)
            .then(|| self.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(now)))
    }

    /// Whether the kept one can live on.
    pub fn renews(&self, key: &Key) -> bool {
        self.held.get(key).is_some_and(|held| held.renewable)
    }

    fn end(&mut self, held: Held, from: Instant) {
        if let Some(id) = held.id {
            self.ending.insert(id, Ending { from, ends: held.ends, told: false });
        }
    }
}

impl Child {
    /// Whether one more may be held.
    pub(super) fn may_hold(&self, key: &Key) -> Result<(), VaultError> {
        match self.leased.held.len() < HELD_MAX || self.leased.held.contains_key(key) {
            true => Ok(()),
            false => Err(VaultError::Unavailable(format!(
                "{HELD_MAX} secrets are made for leases already: end some of these"
            ))),
        }
    }

    /// The question for it.
    pub(super) fn leased_question(
        &self,
        key: &Key,
        token: &Secret,
        renewal: bool,
    ) -> Result<super::remote::Ask, VaultError> {
        match (key, self.leased.held.get(key).and_then(|held| held.id.as_ref())) {
            (Key::Revoke(id), _) => self.backends.revoke(id, token),
            (_, Some(id)) if renewal => self.backends.prolong(id, token),
            (Key::Leased { place, .. }, _) => self.backends.make(place, token),
            _ => Err(VaultError::Failed("nothing of the kind is made for leases".into())),
        }
    }

    /// What an answer brings.
    pub(super) fn land_leased(
        &mut self,
        flight: &Flight,
        fetched: Fetched,
        body: Option<&Secret>,
    ) -> Result<Landed, VaultError> {
        let key = &flight.key;
        let body = body.map(Secret::expose_secret).unwrap_or_default();
        let answered = match fetched {
            Fetched::Failed { reason } => Answered::Other(Meaning::Later(reason)),
            Fetched::Answered { status } => self.backends.leased(flight.renewal, status, body),
        };
        match answered {
            Answered::Lease(lease) if flight.renewal => {
                self.live_on(flight, &lease)?;
                Ok(Landed::Kept)
            }
            Answered::Lease(lease) => self.hold(flight, lease),
            Answered::Ended => {
                self.let_go(key, Instant::now());
                match flight.waiters.is_empty() {
                    true => Err(VaultError::Unavailable("the server has ended the lease".into())),
                    false => Ok(Landed::Again),
                }
            }
            Answered::Other(Meaning::Later(reason)) => {
                self.mints.pause(key, super::mint::PAUSE, &reason);
                Err(VaultError::Unavailable(reason))
            }
            Answered::Other(Meaning::Refused(reason) | Meaning::Unknown(reason)) => {
                if self.is_to_blame(&Key::Login, flight) {
                    return Ok(Landed::Again);
                }
                Err(self.refused(key, &reason))
            }
            Answered::Other(Meaning::Had { .. }) => {
                Err(VaultError::Failed("no answer of a lease is that".into()))
            }
        }
    }

    fn hold(&mut self, flight: &Flight, lease: Lease) -> Result<Landed, VaultError> {
        let key = &flight.key;
        let first = match lease.life {
            Life::Until(life) | Life::Session(life) | Life::Fresh(life, _) => life,
        };
        let ends = (self.clock)().saturating_add(first.as_secs());
        let held = Held { id: lease.id, renewable: lease.renewable, first, ends };
        let noted = held.id.as_ref().map(|id| self.store.keep_leased(id, ends)).transpose();
        if flight.unwanted || flight.stale || noted.is_err() {
            self.leased.end(held, Instant::now());
            self.tend_leased();
            noted?;
            if !flight.unwanted {
                return Ok(Landed::Stale);
            }
            return Err(VaultError::Refused("the lease that it was made for has ended".into()));
        }
        if let Some(former) = self.leased.held.insert(key.clone(), held) {
            self.leased.end(former, Instant::now() + OVERLAP);
        }
        let Some(fields) = lease.fields else { return Ok(Landed::Kept) };
        self.mints.keep(key.clone(), fields, lease.life, flight.begun, flight.forced);
        Ok(Landed::Kept)
    }

    fn live_on(&mut self, flight: &Flight, lease: &Lease) -> Result<(), VaultError> {
        let Some(held) = self.leased.held.get_mut(&flight.key) else { return Ok(()) };
        let Life::Until(life) = lease.life else { return Ok(()) };
        held.ends = (self.clock)().saturating_add(life.as_secs());
        // Near its greatest age it is given less and less: a new one does better.
        held.renewable = lease.renewable && life >= held.first / 2;
        if let Some(id) = &held.id {
            self.store.keep_leased(id, held.ends)?;
        }
        self.mints.prolong(&flight.key, life, flight.begun);
        Ok(())
    }

    /// A lease of proxyd's has ended, and all that was made for it ends too.
    pub(super) fn forget_lease(&mut self, lease: &str) {
        let of = |key: &Key| matches!(key, Key::Leased { lease: own, .. } if own == lease);
        self.end_held(|_, key| of(key));
        self.mints.unwant(of);
        self.tend_leased();
    }

    /// All of these that is held ends.
    pub(super) fn end_held(&mut self, of: impl Fn(&Self, &Key) -> bool) {
        let held: Vec<Key> = self.leased.held.keys().filter(|key| of(self, key)).cloned().collect();
        for key in held {
            self.let_go(&key, Instant::now());
        }
    }

    fn let_go(&mut self, key: &Key, from: Instant) {
        self.mints.drop_kept(key);
        if let Some(held) = self.leased.held.remove(key) {
            self.leased.end(held, from);
        }
    }

    /// The vault's own token has been replaced, and the former one ends then: with it all that was
    /// made by it.
    pub(super) fn login_replaced(&mut self, end: Instant) {
        for (key, held) in &mut self.leased.held {
            held.renewable = false;
            self.mints.end_by(key, end);
        }
    }

    /// Goes on with what is due: revocations, and what is to live on.
    pub(super) fn tend_leased(&mut self) {
        let now = Instant::now();
        self.leased.due = Some(now + LOOK);
        let clock = (self.clock)();
        let ended = |ending: &Ending| ending.ends.saturating_add(ENDED_SECONDS) < clock;
        let gone = self.leased.ending.iter().filter(|(_, ending)| ended(ending));
        for id in gone.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            self.revoked(&id);
        }
        let due = self.leased.ending.iter().filter(|(_, ending)| ending.from <= now);
        let due: Vec<Key> = due.map(|(id, _)| Key::Revoke(id.clone())).collect();
        for key in due {
            if self.mints.revocations() >= REVOCATIONS_MAX {
                break;
            }
            if let Err(error) = self.fly(&key, None, false) {
                self.revoke_later(&key, &error.to_string());
            }
        }
        if self.leased.ending.is_empty() && !self.mints.makes_leased() {
            self.mints.drop_former();
        }
        let lasting = self.leased.held.iter().filter(|(_, held)| held.renewable);
        let mut lasting: Vec<Key> = lasting.map(|(key, _)| key.clone()).collect();
        if !self.leased.held.is_empty() {
            lasting.push(Key::Login);
        }
        for key in lasting {
            if self.mints.is_ahead(&key, now) {
                // Whoever uses it next is told why there is none.
                let _ = self.fly(&key, None, false);
            }
        }
    }

    /// The answer to a revocation.
    pub(super) fn land_revocation(
        &mut self,
        flight: &Flight,
        id: &str,
        fetched: Fetched,
    ) -> Result<Landed, VaultError> {
        let reason = match fetched {
            // One that the server does not know has ended.
            Fetched::Answered { status: 200..300 | 400 | 404 } => {
                self.revoked(id);
                self.tend_leased();
                return Ok(Landed::Kept);
            }
            // The token of before may have ended: the present one revokes as well.
            Fetched::Answered { status: 403 } if self.mints.drop_former() => {
                return Ok(Landed::Again);
            }
            Fetched::Answered { status: 403 } if self.is_to_blame(&Key::Login, flight) => {
                return Ok(Landed::Again);
            }
            Fetched::Answered { status } => {
                format!("the OpenBao server answers a revocation with {status}")
            }
            Fetched::Failed { reason } => reason,
        };
        self.revoke_later(&flight.key, &reason);
        Err(VaultError::Unavailable(reason))
    }

    fn revoked(&mut self, id: &str) {
        self.leased.ending.remove(id);
        if let Err(error) = self.store.drop_leased(id) {
            ipc::say::line(format_args!("proxyd vault: {error}"));
        }
    }

    fn revoke_later(&mut self, key: &Key, reason: &str) {
        let Key::Revoke(id) = key else { return };
        let Some(ending) = self.leased.ending.get_mut(id) else { return };
        ending.from = Instant::now() + AGAIN;
        if !std::mem::replace(&mut ending.told, true) {
            ipc::say::line(format_args!("proxyd vault: lease {id} is not revoked yet: {reason}"));
        }
    }

    /// Whether anything is still to be revoked that could be now. For the end: gives up all that
    /// is held.
    pub(super) fn end_leased(&mut self) {
        self.end_held(|_, _| true);
        for ending in self.leased.ending.values_mut() {
            ending.from = Instant::now().min(ending.from);
        }
        self.mints.unwant(|key| matches!(key, Key::Leased { .. }));
        self.tend_leased();
    }

    /// Whether a revocation is under way.
    pub(super) fn is_revoking(&self) -> bool {
        self.mints.revocations() > 0 || self.mints.makes_leased()
    }
}
