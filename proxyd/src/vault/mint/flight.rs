//! One question to somebody else: what it needs first, who waits for it, what its answer means.
//!
//! A token for a secret that another backend keeps needs that value first: its flight waits for
//! the value's own and departs when that has landed.

use std::time::{Duration, Instant};

use policies::SecretRef;

use super::{Key, Life, Look, PAUSE, Waiter, print};
use crate::vault::child::{Answer, Child, now};
use crate::vault::remote::{self, Meaning, Shown};
use crate::vault::secret::Secret;
use crate::vault::wire::Fetched;
use crate::vault::{VaultError, registry};

pub(in crate::vault) struct Flight {
    pub key: Key,
    /// The number of the value that was shown, where it is the store's.
    version: Option<u64>,
    pub forced: bool,
    pub begun: Instant,
    pub waiters: Vec<Waiter>,
    /// What departs when this one has landed.
    keys: Vec<Key>,
    /// A kept login is to live on.
    pub renewal: bool,
    /// It has been asked before, with a login that counted no more.
    again: bool,
    /// Nobody may have what it brings any more.
    pub unwanted: bool,
    /// An operator has changed a secret that it was asked with.
    pub stale: bool,
}

/// What a question is asked with.
enum Input {
    Has { version: Option<u64>, value: Secret },
    Needs(Key),
}

pub(in crate::vault) enum Landed {
    Kept,
    /// It is about a value that is no longer the secret's.
    Stale,
    /// The login that it was asked with counts no more: once more, with another.
    Again,
}

impl Child {
    fn flight(&mut self, key: &Key) -> Option<u32> {
        let mut flights = self.mints.flights.iter();
        flights.find(|(_, flight)| flight.key == *key).map(|(number, _)| *number)
    }

    /// Has it fetched, unless that is under way; the waiter gets the answer.
    pub(in crate::vault) fn fly(
        &mut self,
        key: &Key,
        waiter: Option<&Waiter>,
        forced: bool,
    ) -> Result<(), VaultError> {
        if let Some(number) = self.flight(key) {
            let flight = self.mints.flights.get_mut(&number).expect("it was just found");
            flight.waiters.extend(waiter.cloned());
            return Ok(());
        }
        if let Some(error) = self.mints.waits(key) {
            return Err(error);
        }
        if let Some((secret, _)) = key.stored()
            && let Some(reason) = self.store.login_needed(secret)?
        {
            return Err(needs_login(key, &reason));
        }
        self.mints.numbers = self.mints.numbers.wrapping_add(1);
        let (number, key, begun) = (self.mints.numbers, key.clone(), Instant::now());
        let waiters = waiter.cloned().into_iter().collect();
        let (version, keys, renewal, again) = (None, Vec::new(), false, false);
        let (unwanted, stale) = (false, false);
        let flight =
            Flight { key, version, forced, begun, waiters, keys, renewal, again, unwanted, stale };
        self.mints.flights.insert(number, flight);
        let departed = self.depart(number);
        if departed.is_err() {
            // The caller tells its waiter.
            self.mints.flights.remove(&number);
        }
        departed
    }

    /// Asks, or has what the question needs fetched first.
    fn depart(&mut self, number: u32) -> Result<(), VaultError> {
        let Some(flight) = self.mints.flights.get(&number) else { return Ok(()) };
        let (key, forced) = (flight.key.clone(), flight.forced);
        match self.input(&key)? {
            Input::Needs(needed) => {
                self.fly(&needed, None, false)?;
                if let Some(first) = self.flight(&needed)
                    && let Some(first) = self.mints.flights.get_mut(&first)
                {
                    first.keys.push(key);
                }
                Ok(())
            }
            Input::Has { version, value } => {
                let renewal = self.renews(&key, forced);
                let ask = self.question(&key, &value, renewal)?;
                self.workers.send(number, &ask)?;
                if let Some(flight) = self.mints.flights.get_mut(&number) {
                    flight.renewal = renewal;
                    flight.version = version;
                    flight.stale = false;
                    flight.begun = Instant::now();
                }
                if forced && let Some(kept) = self.mints.kept.get_mut(&key) {
                    kept.refused = true;
                }
                Ok(())
            }
        }
    }

    /// Whether what is kept is to live on, rather than to be had anew.
    fn renews(&self, key: &Key, forced: bool) -> bool {
        let can = match key {
            Key::Login => self.mints.renewable.is_some(),
            _ => !forced && self.leased.renews(key),
        };
        can && self.mints.serves(key)
    }

    pub(super) fn shown<'a>(&'a self, key: &'a Key) -> Result<Shown<'a>, VaultError> {
        match key {
            Key::Token(secret, _) => Ok(Shown::Secret(secret)),
            Key::Value(secret) => self.backends.input(secret),
            Key::Leased { .. } | Key::Revoke(_) => Ok(Shown::Login),
            Key::Login => self.backends.login_input(),
            Key::AwsLogin => self.backends.aws_login_input(),
        }
    }

    fn input(&mut self, key: &Key) -> Result<Input, VaultError> {
        if let (Key::Revoke(_), Some(former)) = (key, &self.mints.former) {
            let value = Secret::concat(&[former.expose_secret()]);
            return Ok(Input::Has { version: None, value });
        }
        match self.shown(key)? {
            Shown::Nothing => Ok(Input::Has { version: None, value: Secret::new(Vec::new()) }),
            Shown::Login => self.had(Key::Login),
            Shown::AwsLogin => self.had(Key::AwsLogin),
            Shown::Secret(secret) => {
                let secret = secret.clone();
                self.value_of(&secret)
            }
        }
    }

    /// A secret's value, wherever it is kept.
    fn value_of(&mut self, secret: &SecretRef) -> Result<Input, VaultError> {
        if !secret.is_remote() {
            let (version, value) = self.kept_value(secret)?;
            return Ok(Input::Has { version, value });
        }
        self.had(Key::Value(secret.clone()))
    }

    /// What has to be had first.
    fn had(&mut self, needed: Key) -> Result<Input, VaultError> {
        match self.mints.look(&needed, None) {
            Look::Fetch => return Ok(Input::Needs(needed)),
            Look::Use => {}
            Look::UseAndFetch => {
                // This one is good still.
                let _ = self.fly(&needed, None, false);
            }
        }
        let kept = self.mints.kept.get(&needed).ok_or_else(|| {
            VaultError::Unavailable(format!("{} is not to be had", needed.secret()))
        })?;
        Ok(Input::Has { version: None, value: Secret::concat(&[kept.value.expose_secret()]) })
    }

    /// A worker has answered: everybody who waited for it gets theirs.
    pub(in crate::vault) fn landed(
        &mut self,
        number: u32,
        fetched: Fetched,
        body: Option<&Secret>,
    ) -> Vec<(u32, Answer)> {
        let Some(mut flight) = self.mints.flights.remove(&number) else { return Vec::new() };
        let mut outcome = self.land(&flight, fetched, body);
        if let Ok(Landed::Again) = outcome {
            flight.again = true;
            self.mints.flights.insert(number, flight);
            let Err(error) = self.depart(number) else { return Vec::new() };
            outcome = Err(error);
            let Some(back) = self.mints.flights.remove(&number) else { return Vec::new() };
            flight = back;
        }
        self.settle(flight, &outcome)
    }

    fn settle(
        &mut self,
        flight: Flight,
        outcome: &Result<Landed, VaultError>,
    ) -> Vec<(u32, Answer)> {
        let mut answers = Vec::new();
        // One that is kept serves on where another one is not to be had.
        let stale = matches!(outcome, Err(VaultError::Unavailable(_)))
            && !flight.forced
            && self.mints.serves(&flight.key);
        for waiter in &flight.waiters {
            let answer = match outcome {
                Ok(Landed::Kept | Landed::Again) => self.minted(&flight.key, &waiter.form),
                Err(_) if stale => self.minted(&flight.key, &waiter.form),
                // Once: whoever asked for the vault waits for two flights at most.
                Ok(Landed::Stale) if waiter.again => Err(VaultError::Unavailable(format!(
                    "{} was changed while a token was fetched for it",
                    flight.key.secret()
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
        for key in flight.keys {
            let Some(next) = self.flight(&key) else { continue };
            let departed = match outcome {
                Err(error) if !stale => Err(error.clone()),
                _ => self.depart(next),
            };
            if let Err(error) = departed
                && let Some(grounded) = self.mints.flights.remove(&next)
            {
                answers.extend(self.settle(grounded, &Err(error)));
            }
        }
        answers
    }

    fn land(
        &mut self,
        flight: &Flight,
        fetched: Fetched,
        body: Option<&Secret>,
    ) -> Result<Landed, VaultError> {
        let key = &flight.key;
        // What was made all the same has to be revoked.
        let made = matches!(key, Key::Leased { .. }) && !flight.renewal;
        if flight.stale && !made {
            return stale(fetched);
        }
        match key {
            Key::Leased { .. } => return self.land_leased(flight, fetched, body),
            Key::Revoke(id) => return self.land_revocation(flight, id, fetched),
            Key::Value(_) | Key::Token(..) | Key::Login | Key::AwsLogin => {}
        }
        let stored = key.stored().map(|(secret, grant)| (secret.to_owned(), grant));
        if let Some((secret, _)) = &stored
            && Some(self.store.current(secret)?.0) != flight.version
        {
            // An operator has stored another value meanwhile: the answer is about the former one.
            return stale(fetched);
        }
        let meaning = match fetched {
            Fetched::Failed { reason } => Meaning::Later(reason),
            Fetched::Answered { status } => {
                if key.is_for_registry() && registry::denies(status) {
                    let reason = "the server that gives the registry's tokens gives none for that";
                    return Err(VaultError::Refused(format!("{reason}: it answers {status}")));
                }
                let body = body.map(Secret::expose_secret).unwrap_or_default();
                self.meaning(flight, status, body)
            }
        };
        let login = match &meaning {
            Meaning::Refused(_) => Some(Key::Login),
            Meaning::Unknown(_) => Some(Key::AwsLogin),
            Meaning::Had { .. } | Meaning::Later(_) => None,
        };
        if let Some(login) = login
            && self.is_to_blame(&login, flight)
        {
            return Ok(Landed::Again);
        }
        match meaning {
            Meaning::Had { value, rotated, life } => {
                if let Some((secret, grant)) = stored {
                    let rotates = grant.kind == policies::GrantKind::RefreshToken;
                    self.keep_stored((&secret, grant), &value, rotated.filter(|_| rotates), life)?;
                }
                if *key == Key::Login && !flight.renewal {
                    self.logged_in(&value);
                }
                self.mints.keep(key.clone(), value, life, flight.begun, flight.forced);
                Ok(Landed::Kept)
            }
            Meaning::Refused(reason) | Meaning::Unknown(reason) => {
                let Some((secret, _)) = stored else {
                    return Err(self.refused(key, &reason));
                };
                let version = flight.version.unwrap_or_default();
                self.store.need_login(&secret, version, &reason)?;
                ipc::say::line(format_args!(
                    "proxyd vault: {} needs a new value: {reason}",
                    key.secret()
                ));
                Err(needs_login(key, &reason))
            }
            Meaning::Later(reason) => {
                self.mints.pause(key, PAUSE, &reason);
                Err(VaultError::Unavailable(reason))
            }
        }
    }

    /// Whoever keeps it refuses it: it was withdrawn, and what was had before counts no more.
    pub(in crate::vault) fn refused(&mut self, key: &Key, reason: &str) -> VaultError {
        self.mints.refuse(key, reason);
        ipc::say::line(format_args!("proxyd vault: {} is refused: {reason}", key.secret()));
        self.mints.waits(key).unwrap_or_else(|| VaultError::Unavailable(reason.to_owned()))
    }

    /// A token takes the place of the kept one, unless it is the same.
    fn logged_in(&mut self, token: &Secret) {
        let kept = self.mints.kept.get(&Key::Login);
        if kept.is_none_or(|kept| kept.value.expose_secret() != token.expose_secret()) {
            self.login_replaced(kept.map_or_else(Instant::now, |kept| kept.end));
        }
    }

    /// Whether another login may make the difference: the kept one is given up then.
    pub(in crate::vault) fn is_to_blame(&mut self, login: &Key, flight: &Flight) -> bool {
        let shown = match &flight.key {
            Key::Value(secret) => self.backends.input(secret).ok(),
            Key::Leased { .. } | Key::Revoke(_) => Some(Shown::Login),
            Key::Login | Key::AwsLogin | Key::Token(..) => None,
        };
        let asked_with = match shown {
            Some(Shown::Login) => *login == Key::Login,
            Some(Shown::AwsLogin) => *login == Key::AwsLogin,
            _ => flight.key == Key::Login && flight.renewal,
        };
        let to_blame = asked_with && !flight.again;
        // One that came after this question was asked has not been tried yet.
        if to_blame && self.mints.kept.get(login).is_some_and(|kept| kept.got < flight.begun) {
            self.mints.kept.remove(login);
        }
        to_blame
    }

    /// Writes down what came for a secret of the store, before anybody uses it.
    fn keep_stored(
        &mut self,
        (secret, grant): (&str, &policies::Grant),
        token: &Secret,
        rotated: Option<Secret>,
        life: Life,
    ) -> Result<(), VaultError> {
        let current = self.store.current(secret)?.1;
        let rotated = rotated.filter(|new| new.expose_secret() != current.expose_secret());
        if let Some(rotated) = rotated {
            // On disk first: the server takes the former one no more.
            self.store.put(secret, &rotated, now())?;
        }
        let seconds = match life {
            Life::Until(life) | Life::Session(life) | Life::Fresh(life, _) => life.as_secs(),
        };
        if matches!(grant.kind, policies::GrantKind::Registry { .. }) {
            return Ok(());
        }
        let end = (self.clock)().saturating_add(seconds);
        self.store.keep_token(secret, &print(grant), token, end)
    }

    /// What is asked to have it.
    fn question(
        &mut self,
        key: &Key,
        value: &Secret,
        renewal: bool,
    ) -> Result<remote::Ask, VaultError> {
        let now = (self.clock)();
        match key {
            Key::Value(secret) => self.backends.ask(secret, value, now),
            Key::Leased { .. } | Key::Revoke(_) => self.leased_question(key, value, renewal),
            Key::AwsLogin => self.backends.ask_aws_login(value),
            Key::Login => {
                let kept = self.mints.kept.get(key).filter(|_| renewal);
                self.backends.login(value, kept.map(|kept| &kept.value))
            }
            Key::Token(_, grant) => {
                let client = grant.client.as_ref().and_then(|client| client.secret.as_deref());
                let client = client.map(|name| self.store.current(name)).transpose()?;
                let client = client.map(|(_, secret)| secret);
                crate::vault::oauth::ask(grant, value, client.as_ref(), now)
            }
        }
    }

    fn meaning(&mut self, flight: &Flight, status: u16, body: &[u8]) -> Meaning {
        let now = (self.clock)();
        match &flight.key {
            Key::Value(secret) => self.backends.read(secret, status, body, now),
            Key::Token(..) if flight.key.is_for_registry() => registry::read(status, body),
            Key::Token(..) => crate::vault::oauth::read(status, body, now),
            Key::Leased { .. } | Key::Revoke(_) => {
                Meaning::Later("what is made for leases is read elsewhere".to_owned())
            }
            Key::AwsLogin => self.backends.read_aws_login(status, body, now),
            Key::Login => {
                let shown = match self.input(&Key::Login) {
                    Ok(Input::Has { value, .. }) => value,
                    _ => Secret::new(Vec::new()),
                };
                let (meaning, renewable) =
                    self.backends.read_login(&shown, flight.renewal, status, body);
                if let Meaning::Had { life: Life::Until(life), .. } = meaning {
                    let first = self.mints.renewable.filter(|_| flight.renewal).unwrap_or(life);
                    // Near its greatest age a token is given less and less: a login does better.
                    self.mints.renewable = Some(first).filter(|_| renewable && life >= first / 2);
                }
                meaning
            }
        }
    }
}

/// An answer about a value that is no longer the secret's.
fn stale(fetched: Fetched) -> Result<Landed, VaultError> {
    match fetched {
        Fetched::Answered { .. } => Ok(Landed::Stale),
        // A server that is silent or not there is so for every value.
        Fetched::Failed { reason } => Err(VaultError::Unavailable(reason)),
    }
}

pub(super) fn needs_login(key: &Key, reason: &str) -> VaultError {
    VaultError::NeedsLogin(format!("{} gives no tokens any more: {reason}", key.secret()))
}

/// Seconds as they stand in answers, within what is kept.
pub(in crate::vault) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds).min(super::YEAR)
}
