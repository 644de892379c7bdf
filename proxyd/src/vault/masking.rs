//! Masks what the vault knows in texts that a tool has put out, before they are kept.
//!
//! Most of what is searched for never leaves this process, so the texts come here. The search goes
//! on by steps between other questions, so that nobody waits long for it, and by so many in a
//! second: whoever asks can try guesses, each a text of its own.
//!
//! | what | is found |
//! |---|---|
//! | what credentials of the environment put into requests | as in answers: cut short too |
//! | everything else, from 64 bytes on | the same |
//! | everything else, from 16 bytes on | whole |
//!
//! A beginning that counts tells more of a value, byte by byte, to whoever has guessed half of it;
//! who may have the value in a request learns nothing by it. Half of 64 bytes nobody guesses, nor
//! 16 at random. What is shorter is often of a person's choosing.
//!
//! To build the machine of a group of values costs far more than to search a usual text with it. So
//! a machine goes over all texts that wait for it, the shortest first, before the next one is
//! built: nobody waits for the whole search of another. What came meanwhile joins the next one.
//! A vault of so many values that a search cannot end in [`SEARCH`] says so.

mod parts;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use policies::{Backend, Credential, Inject};

use super::VaultError;
use super::child::{Answer, Child, Use, made};
use super::render::{self, form};
use super::secret::Secret;
use super::sigv4;
use super::wire::{Form, Reply, Scope};
use crate::scrub::{Patterns, Texts, forms};
pub(super) use parts::parts;

/// From which length on anything is searched for that no request of the environment's has.
const OTHER_BYTES_MIN: usize = 16;
/// And from which length on when it is cut short.
const CUT_BYTES_MIN: usize = 64;
/// How much is searched for by one machine, unless one value is longer.
const GROUP_BYTES: usize = 16 * 1024;
/// Of how many bytes of values machines are kept beside the one at work, while texts wait.
const KEPT_BYTES: usize = GROUP_BYTES;
/// How long after one step of a search the next one follows.
const PACE: Duration = Duration::from_millis(8);
/// How much is searched in one step.
const STEP_BYTES: usize = 64 * 1024;
/// Most that waits for its search.
const WAITING_MAX: usize = 64;
const WAITING_BYTES_MAX: usize = 64 << 20;
/// How long a search may take with all its waiting. Less than the traffic process waits for an
/// answer: it takes a vault that is silent for longer for one that is gone.
const SEARCH: Duration = Duration::from_secs(120);

/// The searches that wait or are under way, in the order in which they came.
#[derive(Default)]
pub(super) struct Maskings {
    waiting: VecDeque<Masking>,
    /// The one at work is the last.
    machines: Vec<Machine>,
    /// When the next step is due.
    due: Option<Instant>,
}

struct Masking {
    number: u32,
    environment: String,
    texts: Texts,
    since: Instant,
    /// What is still to be searched for, once that has been looked up; the next at the end.
    left: Option<Vec<Arc<Group>>>,
    /// The machine at work is going over it.
    in_turn: bool,
}

impl Masking {
    fn has_left(&self, group: &Arc<Group>) -> bool {
        self.left.iter().flatten().any(|own| Arc::ptr_eq(own, group))
    }
}

/// What one machine searches for.
struct Group {
    values: Vec<Secret>,
    bytes: usize,
    /// Nothing counts but the whole.
    whole: bool,
}

impl Group {
    fn patterns(&self) -> Patterns {
        let all = self.values.iter().map(Secret::expose_secret);
        let needles: Vec<Secret> = all.flat_map(forms).collect();
        match self.whole {
            true => Patterns::whole(&needles),
            false => Patterns::new(&needles),
        }
    }

    fn is(&self, other: &Self) -> bool {
        let values = || self.values.iter().zip(&other.values);
        let same = |(one, two): (&Secret, &Secret)| one.expose_secret() == two.expose_secret();
        self.whole == other.whole && self.values.len() == other.values.len() && values().all(same)
    }
}

struct Machine {
    group: Arc<Group>,
    patterns: Patterns,
}

impl Maskings {
    /// How long until there is something to do; none while there is nothing.
    pub fn patience(&self) -> Option<Duration> {
        self.waiting.front()?;
        let now = Instant::now();
        Some(self.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(now)))
    }

    fn has_room(&self, texts: &Texts) -> bool {
        let bytes: usize = self.waiting.iter().map(|waiting| waiting.texts.bytes()).sum();
        self.waiting.len() < WAITING_MAX
            && (bytes == 0 || bytes + texts.bytes() <= WAITING_BYTES_MAX)
    }

    /// The group as another search has it already, so that one machine is for both.
    fn shared(&self, group: Group) -> Arc<Group> {
        let of_machines = self.machines.iter().map(|machine| &machine.group);
        let of_others = self.waiting.iter().flat_map(|waiting| waiting.left.iter().flatten());
        let same = of_machines.chain(of_others).find(|known| known.is(&group));
        same.map_or_else(|| Arc::new(group), Arc::clone)
    }

    /// Has the next machine go over all that wait for it.
    fn take_turns(&mut self) {
        let next = self.waiting.iter().find_map(|waiting| waiting.left.as_ref()?.last());
        let Some(group) = next.map(Arc::clone) else { return };
        for waiting in &mut self.waiting {
            waiting.in_turn = waiting.has_left(&group);
        }
        let known = self.machines.iter().position(|machine| Arc::ptr_eq(&machine.group, &group));
        let patterns = match known.map(|at| self.machines.remove(at)) {
            Some(machine) => machine.patterns,
            None => {
                let kept = |machines: &[Machine]| -> usize {
                    machines.iter().map(|machine| machine.group.bytes).sum()
                };
                while kept(&self.machines) > KEPT_BYTES {
                    self.machines.remove(0);
                }
                group.patterns()
            }
        };
        self.machines.push(Machine { group, patterns });
    }

    /// Goes on by one step with the machine at work.
    fn search(&mut self) {
        if !self.waiting.iter().any(|waiting| waiting.in_turn) {
            self.take_turns();
        }
        let Some(machine) = self.machines.last() else { return };
        let mut in_turn: Vec<&mut Masking> =
            self.waiting.iter_mut().filter(|waiting| waiting.in_turn).collect();
        in_turn.sort_by_key(|waiting| waiting.texts.bytes());
        let mut room = STEP_BYTES;
        for waiting in in_turn {
            if !waiting.texts.step(&machine.patterns, &mut room) {
                break;
            }
            waiting.in_turn = false;
            waiting.left.iter_mut().for_each(|left| {
                left.retain(|group| !Arc::ptr_eq(group, &machine.group));
            });
        }
    }

    /// The answers of searches that have ended, or take too long.
    fn ended(&mut self) -> Vec<(u32, Answer)> {
        let mut answers = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            if waiting.left.as_ref().is_some_and(Vec::is_empty) {
                let (texts, found) = waiting.texts.masked();
                answers.push((waiting.number, Ok((Reply::Masked { found }, texts))));
            } else if waiting.since.elapsed() >= SEARCH {
                let seconds = SEARCH.as_secs();
                let text = format!("the texts could not be searched in {seconds} s");
                answers.push((waiting.number, Err(VaultError::Unavailable(text))));
            } else {
                self.waiting.push_back(waiting);
            }
        }
        answers
    }
}

impl Child {
    /// Takes texts whose search begins when its turn comes; the answer comes later.
    pub(super) fn mask_later(
        &mut self,
        number: u32,
        environment: String,
        texts: &[Secret],
    ) -> Option<Answer> {
        let texts = Texts::new(texts);
        if !self.maskings.has_room(&texts) {
            let text = "too many texts wait to be searched";
            return Some(Err(VaultError::Unavailable(text.into())));
        }
        let (since, left, in_turn) = (Instant::now(), None, false);
        let masking = Masking { number, environment, texts, since, left, in_turn };
        self.maskings.waiting.push_back(masking);
        None
    }

    /// Goes on with the searches by one step if that is due; the answers of those that have ended.
    pub(super) fn mask(&mut self) -> Vec<(u32, Answer)> {
        if self.maskings.patience() != Some(Duration::ZERO) {
            return Vec::new();
        }
        self.maskings.due = Some(Instant::now() + PACE);
        let mut answers = self.take_up();
        self.maskings.search();
        answers.extend(self.maskings.ended());
        if self.maskings.waiting.is_empty() {
            // No value stays in memory for texts that may come.
            self.maskings.machines.clear();
        }
        answers
    }

    /// Looks up what is to be searched for in the texts of one environment for which nobody has;
    /// the answers where that fails.
    fn take_up(&mut self) -> Vec<(u32, Answer)> {
        let first = self.maskings.waiting.iter().find(|waiting| waiting.left.is_none());
        let Some(environment) = first.map(|waiting| waiting.environment.clone()) else {
            return Vec::new();
        };
        let sought = self.sought(&environment).map(|groups| {
            groups.into_iter().map(|group| self.maskings.shared(group)).collect::<Vec<_>>()
        });
        let mut answers = Vec::new();
        for mut waiting in std::mem::take(&mut self.maskings.waiting) {
            if waiting.left.is_none() && waiting.environment == environment {
                match &sought {
                    Ok(groups) => waiting.left = Some(groups.clone()),
                    Err(error) => {
                        answers.push((waiting.number, Err(error.clone())));
                        continue;
                    }
                }
            }
            self.maskings.waiting.push_back(waiting);
        }
        answers
    }

    /// All that is searched for, in groups.
    fn sought(&mut self, environment: &str) -> Result<Vec<Group>, VaultError> {
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for credential in self.known.credentials(environment) {
            self.put_in_requests(&credential, &mut own, &mut others)?;
        }
        for listed in self.store.list()? {
            // Nobody can have a row that was changed from outside.
            let values = self.store.values(&listed.name).unwrap_or_default();
            others.extend(values.iter().flat_map(parts));
        }
        let all = self.known.all();
        let secrets = all.iter().map(|credential| &credential.secret);
        for secret in secrets.chain(self.backends.0.shown()) {
            if secret.backend == Backend::File {
                // One that is not to be had was never read.
                let values = self.files.values(&secret.path).unwrap_or_default();
                others.extend(values.iter().flat_map(parts));
            }
        }
        for key in all.iter().filter_map(|credential| Use::of(credential).key()) {
            self.recall(&key);
        }
        others.extend(self.mints.had());
        others.retain(|value| value.expose_secret().len() >= OTHER_BYTES_MIN);
        Ok(grouped(own, others))
    }

    /// What a credential puts into requests, and the part of it that it keeps back.
    fn put_in_requests(
        &mut self,
        credential: &Credential,
        own: &mut Vec<Secret>,
        others: &mut Vec<Secret>,
    ) -> Result<(), VaultError> {
        let (form, secret) = (form(&credential.inject, Some(Scope::none()))?, &credential.secret);
        let (form, made) = made(secret, form);
        let mut add = |value: &Secret| {
            // A value that does not fit its use was never sent.
            let sent = render::texts(value, &form).unwrap_or_default();
            own.extend(sent.into_iter().map(|sent| sent.text));
            // What is made for leases is searched for field by field.
            if let (Form::SigV4(_), Ok(key)) = (&form, sigv4::parse(value)) {
                others.push(Secret::concat(&[key.secret]));
            }
        };
        if let Some(place) = made {
            self.leased_values(&place).into_iter().for_each(add);
        } else if let Inject::Registry { .. } = credential.inject {
            self.registry_values(secret).into_iter().for_each(add);
        } else if let Some(key) = Use::of(credential).key() {
            self.recall(&key);
            self.minted_values(&key).into_iter().for_each(add);
        } else if secret.backend == Backend::File {
            self.files.values(&secret.path).unwrap_or_default().iter().for_each(add);
        } else {
            match self.store.values(&secret.path) {
                Ok(values) => values.iter().for_each(&mut add),
                Err(VaultError::Missing(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Each value once, those of one kind together.
fn grouped(own: Vec<Secret>, mut others: Vec<Secret>) -> Vec<Group> {
    others.sort_unstable_by(|one, other| one.expose_secret().cmp(other.expose_secret()));
    others.dedup_by(|next, kept| next.expose_secret() == kept.expose_secret());
    others.retain(|value| !own.iter().any(|own| own.expose_secret() == value.expose_secret()));
    let (long, short): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|value| value.expose_secret().len() >= CUT_BYTES_MIN);
    let all = own.into_iter().chain(long).map(|value| (value, false));
    let mut groups: Vec<Group> = Vec::new();
    for (value, whole) in all.chain(short.into_iter().map(|value| (value, true))) {
        let bytes = value.expose_secret().len();
        match groups.last_mut() {
            Some(group) if group.whole == whole && group.bytes + bytes <= GROUP_BYTES => {
                group.bytes += bytes;
                group.values.push(value);
            }
            _ => groups.push(Group { values: vec![value], bytes, whole }),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::super::child::open_in_test;
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes().to_vec())
    }

    fn shown(values: &[Secret]) -> Vec<String> {
        let text = |value: &Secret| String::from_utf8_lossy(value.expose_secret()).into_owned();
        values.iter().map(text).collect()
    }

    /// Steps until nothing waits any more, and the answers in their order.
    fn searched(child: &mut Child) -> (usize, Vec<(u32, Answer)>) {
        let (mut steps, mut answers) = (0, Vec::new());
        while !child.maskings.waiting.is_empty() {
            std::thread::sleep(child.maskings.patience().unwrap());
            steps += 1;
            answers.extend(child.mask());
        }
        (steps, answers)
    }

    fn numbers(answers: &[(u32, Answer)]) -> Vec<u32> {
        answers.iter().map(|(number, _)| *number).collect()
    }

    /// The vault's process over a store of that many values of that length.
    fn child(dir: &tempfile::TempDir, values: usize, length: usize) -> Child {
        let (worker, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut child = open_in_test(dir.path(), worker);
        for number in 0..values {
            let value = secret(&format!("SECRET-CANARY-{number:010}{}", "x".repeat(length - 24)));
            child.store.put(&format!("n{number}"), &value, 0).unwrap();
        }
        child
    }

    #[test]
    fn a_search_goes_on_by_steps_and_what_waits_has_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = child(&dir, 1, 24);
        let long = format!("{} SECRET-CANARY-0000000000", "-".repeat(200_000));
        for number in 0..WAITING_MAX as u32 {
            let later = child.mask_later(number, "dev".into(), &[secret(&long)]);
            assert!(later.is_none(), "{number}");
        }
        let refused = child.mask_later(99, "dev".into(), &[]);
        assert!(matches!(refused, Some(Err(VaultError::Unavailable(_)))));

        let (steps, answers) = searched(&mut child);

        for (number, answer) in answers {
            let Ok((Reply::Masked { found }, texts)) = answer else { panic!("not masked") };
            assert_eq!((found, texts.len()), (1, 1), "{number}");
            assert!(texts[0].expose_secret().ends_with(b"- ************************"));
        }
        // Other questions are answered between any two.
        assert!(steps >= WAITING_MAX * long.len() / STEP_BYTES, "{steps}");
        assert!(child.mask_later(100, "dev".into(), &[secret("x")]).is_none());
    }

    #[test]
    fn a_machine_goes_over_all_texts_that_wait_before_the_next_is_built() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = child(&dir, 6, GROUP_BYTES);
        let texts = 30;
        for number in 0..texts {
            child.mask_later(number, "dev".into(), &[secret("SECRET-CANARY-0000000003")]);
        }

        let (steps, answers) = searched(&mut child);

        let expected: Vec<u32> = (0..texts).collect();
        assert_eq!(numbers(&answers), expected);
        assert!(steps <= 2 * 6, "{steps}");
        assert!(child.maskings.machines.is_empty() && child.maskings.patience().is_none());
    }

    #[test]
    fn a_short_text_does_not_wait_for_the_whole_search_of_a_long_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = child(&dir, 2, GROUP_BYTES);
        child.mask_later(1, "dev".into(), &[secret(&"-".repeat(10 * STEP_BYTES))]);
        child.mask_later(2, "dev".into(), &[secret("short")]);

        let (_, answers) = searched(&mut child);

        assert_eq!(numbers(&answers), [2, 1]);
    }

    #[test]
    fn a_search_that_cannot_end_says_so_before_the_vault_is_taken_for_gone() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = child(&dir, 2, GROUP_BYTES);
        child.mask_later(1, "dev".into(), &[secret("a text")]);
        child.maskings.waiting[0].since = Instant::now() - SEARCH;

        let (_, answers) = searched(&mut child);

        assert!(matches!(answers[..], [(1, Err(VaultError::Unavailable(_)))]));
        assert!(SEARCH < Duration::from_secs(super::super::connection::ANSWER_SECONDS) / 10 * 9);
    }

    #[test]
    fn groups_have_a_bound_and_hold_each_value_once() {
        let long = "x".repeat(CUT_BYTES_MIN);
        let own = vec![secret("own-value"), secret("own-value-of-16-or-more")];
        let mut others: Vec<_> =
            (0..2000).map(|n| secret(&format!("other-value-{n:08}"))).collect();
        others.extend(["own-value-of-16-or-more", &long, &long].map(secret));

        let groups = grouped(own, others);

        assert_eq!(shown(&groups[0].values), ["own-value", "own-value-of-16-or-more", &long]);
        assert!(!groups[0].whole && groups[1..].iter().all(|group| group.whole));
        assert!(groups.iter().all(|group| group.bytes <= GROUP_BYTES));
        assert_eq!(groups[1..].iter().map(|group| group.values.len()).sum::<usize>(), 2000);
    }
}
