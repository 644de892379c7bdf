//! What has to be had from others: tokens for secrets, values of other backends. Kept until
//! shortly before its end, fetched once for all who wait.
//!
//! The vault child has one thread and is the only process that can open its store, so there is one
//! flight for each thing at a time, whoever asks ([`flight`]). What an answer brings is on disk
//! before anybody gets the token, where it hangs on a secret of the store: a refresh token that its
//! server has replaced is lost otherwise. A server that refuses for good is not asked again until
//! an operator stores another value.

mod flight;
mod forget;

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use ipc::vault::SecretInfo;
use policies::{Backend, Grant, GrantKind, SecretRef};

use super::child::{Answer, Child, now};
use super::listing::place;
use super::remote::lease;
use super::secret::Secret;
use super::store::rfc3339;
use super::wire::Form;
use super::{VaultError, masking, registry};
pub(super) use flight::{Flight, Landed, seconds};

/// A token is replaced this long before its end, or a tenth of its life where that is longer, but
/// never before half of its life is over.
const AHEAD: Duration = Duration::from_secs(60);
/// The same for keys of AWS, which its own clients replace so early.
const SESSION_AHEAD: Duration = Duration::from_secs(300);
/// For clocks and networks: the last moments of a token are not used.
const SLACK: Duration = Duration::from_secs(5);
/// After a failure nobody is asked again for this long.
pub(super) const PAUSE: Duration = Duration::from_secs(3);
/// After a refusal that no new value in the store could end.
const PAUSE_REFUSED: Duration = Duration::from_secs(30);
/// A token that was had because its forerunner was refused is not taken for the culprit again so
/// soon: the upstream refuses for another reason then.
const FORCED_APART: Duration = Duration::from_secs(30);
/// How long one serves without another look when another one is on its way.
const LATE: Duration = Duration::from_secs(1);
/// Most tokens for registries: a sandbox can name any number of repositories, and is given one for
/// each that its policy lets it name.
const REGISTRY_TOKENS_MAX: usize = 256;
/// Longer than anything is kept.
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// What is to be had.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    /// The value of a secret that somebody else keeps.
    Value(SecretRef),
    /// What is given for a secret.
    Token(SecretRef, Grant),
    /// What the OpenBao server makes at that place for a lease of proxyd's.
    Leased { place: String, lease: String },
    /// The end of what it has made, by its name for it.
    Revoke(String),
    /// The vault's own token at the OpenBao server.
    Login,
    /// The vault's own keys at AWS.
    AwsLogin,
}

impl Key {
    /// The secret of the store that it is given for, and by which grant.
    fn stored(&self) -> Option<(&str, &Grant)> {
        match self {
            Self::Token(secret, grant) if secret.backend == Backend::Local => {
                Some((&secret.path, grant))
            }
            _ => None,
        }
    }

    /// One of many for a secret, each for one thing and for minutes: not kept on disk.
    fn is_for_registry(&self) -> bool {
        matches!(self, Self::Token(_, Grant { kind: GrantKind::Registry { .. }, .. }))
    }

    /// As a list of secrets names what is not the store's.
    fn listed(&self) -> String {
        match self {
            Self::Value(secret) | Self::Token(secret, _) => secret.to_string(),
            Self::Leased { place, .. } => format!("openbao-lease:{place}"),
            Self::Revoke(id) => format!("openbao-lease {id}"),
            Self::Login => "[openbao] login".to_owned(),
            Self::AwsLogin => "[aws] login".to_owned(),
        }
    }

    fn is_of_aws(&self) -> bool {
        match self {
            Self::AwsLogin => true,
            Self::Value(secret) => {
                matches!(secret.backend, Backend::AwsSecrets | Backend::AwsRole)
            }
            Self::Token(..) | Self::Leased { .. } | Self::Revoke(_) | Self::Login => false,
        }
    }

    /// The secret, as messages name it.
    fn secret(&self) -> String {
        match self {
            Self::Token(secret, _) if secret.backend == Backend::Local => {
                format!("secret {:?}", secret.path)
            }
            Self::Value(secret) | Self::Token(secret, _) => format!("secret \"{secret}\""),
            Self::Leased { .. } => format!("secret {:?}", self.listed()),
            Self::Revoke(id) => format!("the end of lease {id:?}"),
            Self::Login => "the login at the OpenBao server".to_owned(),
            Self::AwsLogin => "the login at AWS".to_owned(),
        }
    }
}

/// Who waits for it, and in which form it is wanted.
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

/// How long something serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// Its end was said.
    Until(Duration),
    /// The same, for keys that sign.
    Session(Duration),
    /// It is asked for again after the first, and serves for the second on top while there is no
    /// answer.
    Fresh(Duration, Duration),
}

struct Kept {
    value: Secret,
    /// The one before: exchanges that use it may still be under way.
    before: Option<Secret>,
    serial: u64,
    forced: bool,
    /// The upstream refuses it, and another one is on its way.
    refused: bool,
    /// Its end was said.
    ends: bool,
    got: Instant,
    /// Another one is fetched from now on, and this one used meanwhile.
    ahead: Instant,
    /// Another one is waited for from now on.
    due: Instant,
    end: Instant,
}

#[derive(Default)]
pub(super) struct Mints {
    kept: HashMap<Key, Kept>,
    flights: HashMap<u32, Flight>,
    /// Until when nobody is asked, and why.
    paused: HashMap<Key, (Instant, String)>,
    /// What is refused for good by somebody who keeps it, since when and why.
    refusals: BTreeMap<String, (i64, String)>,
    numbers: u32,
    serials: u64,
    /// Whether the kept login can be renewed, and the life that it had at first.
    renewable: Option<Duration>,
    /// The vault's token of before its secret was changed: what was made by it is revoked by it.
    former: Option<Secret>,
}

enum Look {
    Use,
    /// Use it, and have another one fetched.
    UseAndFetch,
    Fetch,
}

impl Mints {
    /// Notes that whoever keeps it refuses it for good.
    fn refuse(&mut self, key: &Key, reason: &str) {
        self.kept.remove(key);
        self.pause(key, PAUSE_REFUSED, reason);
        let since = (now(), reason.to_owned());
        self.refusals.entry(key.listed()).or_insert(since).1 = reason.to_owned();
    }

    /// Why it is not asked for now, if that is so.
    fn waits(&self, key: &Key) -> Option<VaultError> {
        let (until, reason) = self.paused.get(key)?;
        let refused = key.is_of_aws() && self.refusals.contains_key(&key.listed());
        (Instant::now() < *until).then(|| match refused {
            true => flight::needs_login(key, reason),
            false => VaultError::Unavailable(reason.clone()),
        })
    }

    /// What is refused, as a list of secrets shows it beside those of the store.
    pub fn refused(&self) -> impl Iterator<Item = SecretInfo> {
        self.refusals.iter().map(|(name, (since, _))| SecretInfo {
            name: name.clone(),
            kept: place(name).to_owned(),
            version: 0,
            created_at: rfc3339(*since),
            last_used_at: None,
            expires_at: None,
            state: "needs_login".to_owned(),
        })
    }

    /// What is had of secrets that somebody else keeps, and how long it serves where its end was
    /// said.
    pub fn elsewhere(&self) -> impl Iterator<Item = (String, Option<Duration>)> {
        let now = Instant::now();
        let serving = self.kept.iter().filter(move |(key, kept)| {
            key.stored().is_none() && !key.is_for_registry() && !kept.refused && now < kept.end
        });
        serving.map(move |(key, kept)| (key.listed(), kept.ends.then(|| kept.end - now)))
    }

    /// Whether an answer is under way that may bring another refresh token: the server takes the
    /// former one no more.
    pub fn await_rotation(&self) -> bool {
        self.flights.values().any(|flight| {
            let grant = flight.key.stored().map(|(_, grant)| grant);
            grant.is_some_and(|grant| grant.kind == GrantKind::RefreshToken)
        })
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
        match self.paused.get(key) {
            Some((until, _)) if now < *until => Look::Use,
            _ if now < kept.ahead => Look::Use,
            // Whoever keeps it has just failed: it need not be waited for again.
            Some(_) => Look::UseAndFetch,
            None if now < kept.due => Look::UseAndFetch,
            None => Look::Fetch,
        }
    }

    /// Whether what is kept may still be used.
    fn serves(&self, key: &Key) -> bool {
        self.kept.get(key).is_some_and(|kept| !kept.refused && Instant::now() < kept.end)
    }

    pub(super) fn keep(&mut self, key: Key, value: Secret, life: Life, got: Instant, forced: bool) {
        self.serials += 1;
        let same = |kept: &Kept| kept.value.expose_secret() == value.expose_secret();
        let before = self.kept.remove(&key);
        let before = match before {
            // The one before is still the one before.
            Some(kept) if same(&kept) => kept.before,
            other => other.map(|kept| kept.value),
        };
        let ends = !matches!(life, Life::Fresh(..));
        let (ahead, due, end) = match life {
            Life::Until(life) => until(life, AHEAD),
            Life::Session(life) => until(life, SESSION_AHEAD),
            Life::Fresh(refresh, stale) => {
                (refresh * (75 + random_percent() / 10) / 100, refresh, refresh + stale)
            }
        };
        let serial = self.serials;
        let [ahead, due, end] = [ahead, due, end].map(|time| got + time.min(YEAR));
        let refused = false;
        let kept = Kept { value, before, serial, forced, refused, ends, got, ahead, due, end };
        self.paused.remove(&key);
        self.refusals.remove(&key.listed());
        if key.is_for_registry() && !self.kept.contains_key(&key) {
            self.make_room();
        }
        self.kept.insert(key, kept);
    }

    /// All that was had and is kept, in what of it is secret by itself.
    pub fn had(&self) -> Vec<Secret> {
        let mut had: Vec<Secret> = self.former.iter().flat_map(masking::parts).collect();
        for (key, kept) in &self.kept {
            for value in std::iter::once(&kept.value).chain(&kept.before) {
                had.extend(match key {
                    _ if key.is_for_registry() => registry::parts(value),
                    Key::Leased { .. } => lease::texts(value),
                    _ => masking::parts(value),
                });
            }
        }
        had
    }

    /// Lets go of the registries' tokens that have ended, and of the oldest of too many.
    fn make_room(&mut self) {
        let now = Instant::now();
        self.kept.retain(|key, kept| !key.is_for_registry() || now < kept.end);
        self.paused.retain(|key, (until, _)| !key.is_for_registry() || now < *until);
        let tokens = || self.kept.iter().filter(|(key, _)| key.is_for_registry());
        if tokens().count() >= REGISTRY_TOKENS_MAX
            && let Some(oldest) = tokens().min_by_key(|(_, kept)| kept.got).map(|(key, _)| key)
        {
            let oldest = oldest.clone();
            self.kept.remove(&oldest);
        }
    }

    /// What is kept lives on, as it is.
    pub(super) fn prolong(&mut self, key: &Key, life: Duration, got: Instant) {
        if let Some(kept) = self.kept.get_mut(key) {
            let (ahead, due, end) = until(life, AHEAD);
            kept.got = got;
            [kept.ahead, kept.due, kept.end] = [ahead, due, end].map(|time| got + time.min(YEAR));
        }
    }

    /// What is kept ends by then, and another one is had at its next use.
    pub(super) fn end_by(&mut self, key: &Key, end: Instant) {
        if let Some(kept) = self.kept.get_mut(key) {
            kept.end = kept.end.min(end);
            kept.due = kept.due.min(end);
            kept.ahead = Instant::now();
        }
    }

    /// Whether another one is to be fetched ahead of the end of what is kept.
    pub(super) fn is_ahead(&self, key: &Key, now: Instant) -> bool {
        self.kept.get(key).is_some_and(|kept| kept.ahead <= now)
    }

    pub(super) fn drop_kept(&mut self, key: &Key) {
        self.kept.remove(key);
    }

    /// What is under way of those is wanted no more.
    pub(super) fn unwant(&mut self, of: impl Fn(&Key) -> bool) {
        self.paused.retain(|key, _| !of(key));
        let flights = self.flights.values_mut();
        flights.filter(|flight| of(&flight.key)).for_each(|flight| flight.unwanted = true);
    }

    /// How many revocations are under way.
    pub(super) fn revocations(&self) -> usize {
        let flights = self.flights.values();
        flights.filter(|flight| matches!(flight.key, Key::Revoke(_))).count()
    }

    /// Whether anything is being made for a lease.
    pub(super) fn makes_leased(&self) -> bool {
        self.flights.values().any(|flight| matches!(flight.key, Key::Leased { .. }))
    }

    /// Notes that nobody is asked for a while.
    pub(super) fn pause(&mut self, key: &Key, time: Duration, reason: &str) {
        if let Some(kept) = self.kept.get_mut(key) {
            kept.refused = false;
        }
        if key.is_for_registry() {
            self.make_room();
        }
        self.paused.insert(key.clone(), (Instant::now() + time, reason.to_owned()));
    }
}

/// From when on another one is fetched, and waited for, and the end.
fn until(life: Duration, ahead: Duration) -> (Duration, Duration, Duration) {
    let ahead = ahead.max(life / 10).min(life / 2);
    // Daemons that began together need not all ask in the same second.
    let jitter = ahead / 5 * random_percent() / 100;
    let end = life - SLACK.min(life / 10);
    ((life - ahead).saturating_sub(jitter), end, end)
}

fn random_percent() -> u32 {
    let mut byte = [0];
    // Without randomness there is no jitter.
    let _ = super::seal::fill(&mut byte);
    u32::from(byte[0]) * 100 / 255
}

impl Child {
    /// Renders what is had from others; nothing when the answer comes later.
    pub(super) fn render_minted(
        &mut self,
        key: Key,
        waiter: Waiter,
        refused: Option<u64>,
    ) -> Option<Answer> {
        self.recall(&key);
        let outcome = match self.mints.look(&key, refused) {
            Look::Use => Ok(()),
            Look::UseAndFetch => {
                // This one is good still; why there is no other is told when it is not.
                let _ = self.fly(&key, None, false);
                Ok(())
            }
            Look::Fetch => match self.fly(&key, Some(&waiter), refused.is_some()) {
                Ok(()) => return None,
                // Whoever it hangs on has failed just now: what is kept serves on for its while.
                Err(VaultError::Unavailable(_)) if refused.is_none() && self.mints.serves(&key) => {
                    Ok(())
                }
                // One that was refused is no good, whatever else is not to be had.
                Err(error) => Err(error),
            },
        };
        Some(outcome.and_then(|()| self.minted(&key, &waiter.form)))
    }

    /// What is kept, in that form, with its needles.
    fn minted(&mut self, key: &Key, form: &Form) -> Answer {
        let kept = self
            .mints
            .kept
            .get(key)
            .ok_or_else(|| VaultError::Unavailable(format!("nothing for {}", key.secret())))?;
        // Whoever uses it asks again when another one should be on its way.
        let at = Instant::now();
        let good = match kept.ahead.saturating_duration_since(at) {
            Duration::ZERO => kept.end.saturating_duration_since(at).min(LATE),
            left => left,
        };
        let good_ms = u64::try_from(good.as_millis()).unwrap_or(u64::MAX);
        let values = std::iter::once(&kept.value).chain(&kept.before);
        let answer = super::render::rendered(values, form, kept.serial, Some(good_ms))?;
        if let Some((secret, _)) = key.stored() {
            self.store.used(secret, now())?;
        }
        Ok(answer)
    }

    /// What to search answers for.
    pub(super) fn minted_values(&self, key: &Key) -> Vec<&Secret> {
        let kept = self.mints.kept.get(key);
        kept.into_iter().flat_map(|kept| std::iter::once(&kept.value).chain(&kept.before)).collect()
    }

    /// The same of all that was made at that place, for whichever lease.
    pub(super) fn leased_values(&self, made: &str) -> Vec<&Secret> {
        let own = |key: &Key| matches!(key, Key::Leased { place, .. } if place == made);
        let kept = self.mints.kept.iter().filter(|(key, _)| own(key)).map(|(_, kept)| kept);
        kept.flat_map(|kept| std::iter::once(&kept.value).chain(&kept.before)).collect()
    }

    /// The same of all that was had of registries for the secret.
    pub(super) fn registry_values(&self, secret: &SecretRef) -> Vec<&Secret> {
        let own =
            |key: &Key| key.is_for_registry() && matches!(key, Key::Token(of, _) if of == secret);
        let kept = self.mints.kept.iter().filter(|(key, _)| own(key)).map(|(_, kept)| kept);
        kept.flat_map(|kept| std::iter::once(&kept.value).chain(&kept.before)).collect()
    }

    /// A token of before the last start, if it is still good.
    pub(super) fn recall(&mut self, key: &Key) {
        let Some((secret, grant)) = key.stored().filter(|_| !key.is_for_registry()) else { return };
        if !self.mints.kept.contains_key(key)
            && let Ok(Some((token, end))) = self.store.token(secret, &print(grant))
            && let Some(left) = end.checked_sub((self.clock)()).filter(|left| *left > 0)
        {
            let life = Life::Until(Duration::from_secs(left));
            self.mints.keep(key.clone(), token, life, Instant::now(), false);
        }
    }
}

/// Tells grants apart in the store.
fn print(grant: &Grant) -> String {
    use sha2::{Digest, Sha256};
    let text = serde_json::to_vec(grant).expect("a grant holds nothing that JSON cannot");
    hex::encode(Sha256::digest(text))
}

#[cfg(test)]
mod tests;
