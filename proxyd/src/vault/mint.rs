//! Tokens that are had for secrets: kept until shortly before their end, fetched once for all who
//! wait.
//!
//! The vault child has one thread and is the only process that can open its store, so there is one
//! flight for each grant at a time, whoever asks. What an answer brings is on disk before anybody
//! gets the token: a refresh token that its server has replaced is lost otherwise. A server that
//! refuses for good is not asked again until an operator stores another value.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use policies::Grant;

use super::VaultError;
use super::child::{Answer, Child, now};
use super::oauth::{self, Meaning};
use super::secret::Secret;
use super::wire::{Fetched, Form};

/// A token is replaced this long before its end, or a tenth of its life where that is longer, but
/// never before half of its life is over.
const AHEAD: Duration = Duration::from_secs(60);
/// For clocks and networks: the last moments of a token are not used.
const SLACK: Duration = Duration::from_secs(5);
/// After a failure nobody is asked again for this long.
const PAUSE: Duration = Duration::from_secs(3);
/// A token that was had because its forerunner was refused is not taken for the culprit again so
/// soon: the upstream refuses for another reason then.
const FORCED_APART: Duration = Duration::from_secs(30);

/// What is had for what.
pub(super) type Key = (String, Grant);

/// Who waits for a token, and in which form it is wanted.
#[derive(Clone)]
pub(super) struct Waiter {
    pub number: u32,
    pub form: Form,
    /// It has waited for a flight whose answer was about a value that is no longer the secret's.
    again: bool,
}

impl Waiter {
    pub fn new(number: u32, form: Form) -> Self {
        Self { number, form, again: false }
    }
}

struct Kept {
    token: Secret,
    /// The one before: exchanges that use it may still be under way.
    before: Option<Secret>,
    serial: u64,
    forced: bool,
    /// The upstream refuses it, and another one is on its way.
    refused: bool,
    got: Instant,
    refresh: Instant,
    end: Instant,
}

struct Flight {
    key: Key,
    /// Of the secret that was shown.
    version: u64,
    forced: bool,
    begun: Instant,
    waiters: Vec<Waiter>,
}

#[derive(Default)]
pub(super) struct Mints {
    kept: HashMap<Key, Kept>,
    flights: HashMap<u32, Flight>,
    paused: HashMap<Key, (Instant, String)>,
    numbers: u32,
    serials: u64,
}

enum Look {
    Use,
    /// Use it, and have another one fetched.
    UseAndFetch,
    Fetch,
}

impl Mints {
    /// An operator has changed the secret: nothing that was had for it counts any more.
    pub fn forget(&mut self, secret: &str) {
        self.kept.retain(|(name, _), _| name != secret);
        self.paused.retain(|(name, _), _| name != secret);
    }

    fn look(&self, key: &Key, refused: Option<u64>) -> Look {
        let now = Instant::now();
        let Some(kept) = self.kept.get(key).filter(|kept| now < kept.end) else {
            return Look::Fetch;
        };
        if kept.refused {
            return Look::Fetch;
        }
        let recent = kept.forced && now < kept.got + FORCED_APART;
        if refused == Some(kept.serial) && !recent {
            return Look::Fetch;
        }
        let paused = self.paused.get(key).is_some_and(|(since, _)| now < *since + PAUSE);
        match now < kept.refresh || paused {
            true => Look::Use,
            false => Look::UseAndFetch,
        }
    }

    fn flight(&mut self, key: &Key) -> Option<&mut Flight> {
        self.flights.values_mut().find(|flight| flight.key == *key)
    }

    fn keep(&mut self, key: Key, token: Secret, life: Duration, got: Instant, forced: bool) {
        self.serials += 1;
        let before = self.kept.remove(&key).map(|kept| kept.token);
        let ahead = AHEAD.max(life / 10).min(life / 2);
        // Daemons that began together need not all ask in the same second.
        let jitter = ahead / 5 * random_percent() / 100;
        let kept = Kept {
            token,
            before,
            serial: self.serials,
            forced,
            refused: false,
            got,
            refresh: got + (life - ahead).saturating_sub(jitter),
            end: got + life - SLACK.min(life / 10),
        };
        self.paused.remove(&key);
        self.kept.insert(key, kept);
    }
}

fn random_percent() -> u32 {
    let mut byte = [0];
    // Without randomness there is no jitter.
    let _ = super::seal::fill(&mut byte);
    u32::from(byte[0]) * 100 / 255
}

impl Child {
    /// Renders a token; nothing when the answer comes later.
    pub(super) fn render_minted(
        &mut self,
        key: Key,
        waiter: Waiter,
        refused: Option<u64>,
    ) -> Option<Answer> {
        if !self.mints.kept.contains_key(&key) {
            self.recall(&key);
        }
        let outcome = match self.mints.look(&key, refused) {
            Look::Use => Ok(()),
            Look::UseAndFetch => {
                // This one is good still; why there is no other is told when it is not.
                let _ = self.fly(&key, None, false);
                Ok(())
            }
            Look::Fetch => match self.fly(&key, Some(&waiter), refused.is_some()) {
                Ok(()) => return None,
                Err(error) => Err(error),
            },
        };
        Some(outcome.and_then(|()| self.minted(&key, &waiter.form)))
    }

    /// The kept token in that form, with its needles.
    fn minted(&mut self, key: &Key, form: &Form) -> Answer {
        let kept =
            self.mints.kept.get(key).ok_or_else(|| {
                VaultError::Unavailable(format!("no token for secret {:?}", key.0))
            })?;
        let good = kept.end.saturating_duration_since(Instant::now());
        let good_ms = u64::try_from(good.as_millis()).unwrap_or(u64::MAX);
        let values = std::iter::once(&kept.token).chain(&kept.before);
        let answer = super::child::rendered(values, form, kept.serial, Some(good_ms))?;
        self.store.used(&key.0, now())?;
        Ok(answer)
    }

    /// What to search answers for.
    pub(super) fn minted_values(&self, key: &Key) -> Vec<&Secret> {
        let kept = self.mints.kept.get(key);
        kept.into_iter().flat_map(|kept| std::iter::once(&kept.token).chain(&kept.before)).collect()
    }

    /// A token of before the last start, if it is still good.
    fn recall(&mut self, key: &Key) {
        if let Ok(Some((token, end))) = self.store.token(&key.0, &print(&key.1))
            && let Some(left) = end.checked_sub((self.clock)()).filter(|left| *left > 0)
        {
            let life = Duration::from_secs(left);
            self.mints.keep(key.clone(), token, life, Instant::now(), false);
        }
    }

    /// Has a token fetched, unless that is under way; the waiter gets the answer.
    fn fly(&mut self, key: &Key, waiter: Option<&Waiter>, forced: bool) -> Result<(), VaultError> {
        if let Some(flight) = self.mints.flight(key) {
            flight.waiters.extend(waiter.cloned());
            return Ok(());
        }
        if let Some((since, reason)) = self.mints.paused.get(key)
            && since.elapsed() < PAUSE
        {
            return Err(VaultError::Unavailable(reason.clone()));
        }
        let (secret, grant) = key;
        if let Some(reason) = self.store.login_needed(secret)? {
            return Err(needs_login(secret, &reason));
        }
        let (version, value) = self.store.current(secret)?;
        let client = grant.client.as_ref().and_then(|client| client.secret.as_deref());
        let client = client.map(|name| self.store.current(name)).transpose()?.map(|(_, s)| s);
        let ask = oauth::ask(grant, &value, client.as_ref(), (self.clock)())?;
        self.mints.numbers = self.mints.numbers.wrapping_add(1);
        let number = self.mints.numbers;
        self.send(number, &ask.fetch, &[ask.authorization, ask.body])?;
        let (key, begun) = (key.clone(), Instant::now());
        let waiters = waiter.cloned().into_iter().collect();
        if forced && let Some(kept) = self.mints.kept.get_mut(&key) {
            kept.refused = true;
        }
        self.mints.flights.insert(number, Flight { key, version, forced, begun, waiters });
        Ok(())
    }

    /// A worker has answered: everybody who waited for it gets theirs.
    pub(super) fn landed(
        &mut self,
        number: u32,
        fetched: Fetched,
        body: Option<&Secret>,
    ) -> Vec<(u32, Answer)> {
        let Some(flight) = self.mints.flights.remove(&number) else { return Vec::new() };
        let outcome = self.land(&flight, fetched, body);
        let mut answers = Vec::new();
        for waiter in &flight.waiters {
            let answer = match &outcome {
                Ok(Landed::Kept) => self.minted(&flight.key, &waiter.form),
                // Once: whoever asked for the vault waits for two flights at most.
                Ok(Landed::Stale) if waiter.again => Err(VaultError::Unavailable(format!(
                    "secret {:?} was changed while a token was fetched for it",
                    flight.key.0
                ))),
                Ok(Landed::Stale) => {
                    let waiter = Waiter { again: true, ..waiter.clone() };
                    match self.fly(&flight.key, Some(&waiter), flight.forced) {
                        Ok(()) => continue,
                        Err(error) => Err(error),
                    }
                }
                Err(error) => Err(error.clone()),
            };
            answers.push((waiter.number, answer));
        }
        answers
    }

    fn land(
        &mut self,
        flight: &Flight,
        fetched: Fetched,
        body: Option<&Secret>,
    ) -> Result<Landed, VaultError> {
        let (secret, grant) = &flight.key;
        let (version, value) = self.store.current(secret)?;
        if version != flight.version {
            // An operator has stored another value meanwhile: the answer is about the former one.
            return match fetched {
                Fetched::Answered { .. } => Ok(Landed::Stale),
                // A server that is silent or not there is so for every value.
                Fetched::Failed { reason } => Err(VaultError::Unavailable(reason)),
            };
        }
        let meaning = match fetched {
            Fetched::Failed { reason } => Meaning::Later(reason),
            Fetched::Answered { status } => {
                let body = body.map(Secret::expose_secret).unwrap_or_default();
                oauth::read(status, body, (self.clock)())
            }
        };
        match meaning {
            Meaning::Token { token, rotated, seconds } => {
                let rotated = rotated.filter(|new| new.expose_secret() != value.expose_secret());
                let rotated = rotated.filter(|_| grant.kind == policies::GrantKind::RefreshToken);
                if let Some(rotated) = rotated {
                    // On disk first: the server takes the former one no more.
                    self.store.put(secret, &rotated, now())?;
                }
                let end = (self.clock)().saturating_add(seconds);
                self.store.keep_token(secret, &print(grant), &token, end)?;
                let life = Duration::from_secs(seconds.min(365 * 24 * 3600));
                self.mints.keep(flight.key.clone(), token, life, flight.begun, flight.forced);
                Ok(Landed::Kept)
            }
            Meaning::Refused(reason) => {
                self.store.need_login(secret, version, &reason)?;
                eprintln!("proxyd vault: secret {secret:?} needs a new value: {reason}");
                Err(needs_login(secret, &reason))
            }
            Meaning::Later(reason) => {
                if let Some(kept) = self.mints.kept.get_mut(&flight.key) {
                    kept.refused = false;
                }
                let paused = (Instant::now(), reason.clone());
                self.mints.paused.insert(flight.key.clone(), paused);
                Err(VaultError::Unavailable(reason))
            }
        }
    }
}

enum Landed {
    Kept,
    /// The token is for a value that is no longer the secret's.
    Stale,
}

fn needs_login(secret: &str, reason: &str) -> VaultError {
    VaultError::NeedsLogin(format!("secret {secret:?} gives no tokens any more: {reason}"))
}

/// Tells grants apart in the store.
fn print(grant: &Grant) -> String {
    use sha2::{Digest, Sha256};
    let text = serde_json::to_vec(grant).expect("a grant holds nothing that JSON cannot");
    hex::encode(Sha256::digest(text))
}

#[cfg(test)]
mod tests;
