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

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use memchr::memmem;
use policies::{Backend, Credential, Inject};
use zeroize::Zeroizing;

use super::VaultError;
use super::child::{Answer, Child, Use};
use super::render::{self, form};
use super::secret::Secret;
use super::sigv4;
use super::wire::{Form, Reply, Scope};
use crate::scrub::{Patterns, Texts, forms};

/// From which length on anything is searched for that no request of the environment's has.
const OTHER_BYTES_MIN: usize = 16;
/// And from which length on when it is cut short.
const CUT_BYTES_MIN: usize = 64;
/// How much is searched for by one machine, unless one value is longer.
const GROUP_BYTES: usize = 16 * 1024;
/// How long after one step of a search the next one follows.
const PACE: Duration = Duration::from_millis(8);
/// Most that waits for its search.
const WAITING_MAX: usize = 64;
const WAITING_BYTES_MAX: usize = 64 << 20;

/// The searches that wait, and the one that is under way.
#[derive(Default)]
pub(super) struct Maskings {
    waiting: VecDeque<Masking>,
    /// When the next step is due.
    due: Option<Instant>,
}

struct Masking {
    number: u32,
    environment: String,
    texts: Texts,
    /// What is still to be searched for, once that has been looked up.
    left: Option<Vec<Group>>,
    /// Of the group at the end.
    patterns: Option<Patterns>,
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
}

impl Maskings {
    /// How long until there is something to do; none while nothing waits.
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
        let (left, patterns) = (None, None);
        self.maskings.waiting.push_back(Masking { number, environment, texts, left, patterns });
        None
    }

    /// Goes on with the search by one step if that is due; the answer where it has ended.
    pub(super) fn mask(&mut self) -> Option<(u32, Answer)> {
        if self.maskings.patience()? > Duration::ZERO {
            return None;
        }
        let mut masking = self.maskings.waiting.pop_front()?;
        self.maskings.due = Some(Instant::now() + PACE);
        let mut left = match masking.left.take().map_or_else(|| self.sought(&masking), Ok) {
            Ok(left) => left,
            Err(error) => return Some((masking.number, Err(error))),
        };
        if let Some(group) = left.last() {
            let patterns = masking.patterns.get_or_insert_with(|| group.patterns());
            if masking.texts.step(patterns) {
                masking.patterns = None;
                left.pop();
            }
        }
        if left.is_empty() {
            let (texts, found) = masking.texts.masked();
            return Some((masking.number, Ok((Reply::Masked { found }, texts))));
        }
        masking.left = Some(left);
        self.maskings.waiting.push_front(masking);
        None
    }

    /// All that is searched for, in groups.
    fn sought(&mut self, masking: &Masking) -> Result<Vec<Group>, VaultError> {
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for credential in self.known.credentials(&masking.environment) {
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
        let mut add = |value: &Secret| {
            // A value that does not fit its use was never sent.
            own.extend(render::texts(value, &form).unwrap_or_default());
            if let (Form::SigV4(_), Ok(key)) = (&form, sigv4::parse(value)) {
                others.push(Secret::concat(&[key.secret]));
            }
        };
        if let Inject::Registry { .. } = credential.inject {
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

/// What of a kept value is secret by itself.
pub(super) fn parts(value: &Secret) -> Vec<Secret> {
    let keys = private_keys(value.expose_secret());
    if !keys.is_empty() {
        // What stands beside them may be public, as certificates are.
        return keys;
    }
    let mut parts = vec![Secret::concat(&[value.expose_secret()])];
    if let Ok(key) = sigv4::parse(value)
        && is_key_id(key.id)
    {
        parts.extend([key.secret, key.session].map(|part| Secret::concat(&[part])));
    }
    parts
}

/// As AWS forms them: `AKIA…`, `ASIA…`.
fn is_key_id(id: &[u8]) -> bool {
    id.first() == Some(&b'A')
        && id.iter().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
}

/// The private keys in a text of PEM, or in JSON that quotes it: each as it is written there, with
/// the ends of lines that it stands for, and in DER.
fn private_keys(text: &[u8]) -> Vec<Secret> {
    let mut keys = Vec::new();
    let mut rest = text;
    while let Some(at) = memmem::find(rest, b"-----BEGIN ") {
        rest = &rest[at + 11..];
        let Some(label) = memmem::find(rest, b"-----") else { break };
        let is_key = rest[..label].ends_with(b"PRIVATE KEY");
        rest = &rest[label + 5..];
        let Some(end) = memmem::find(rest, b"-----END ") else { break };
        if is_key {
            let written = &rest[..end];
            let lines = lines(written);
            keys.push(Secret::concat(&[lines.trim_ascii()]));
            if lines.len() != written.len() {
                keys.push(Secret::concat(&[written]));
            }
            let mut plain = Zeroizing::new(Vec::with_capacity(lines.len()));
            plain.extend(lines.iter().filter(|byte| !byte.is_ascii_whitespace()));
            let mut der = Zeroizing::new(vec![0; plain.len()]);
            if let Ok(length) = STANDARD.decode_slice(&plain[..], &mut der) {
                keys.push(Secret::concat(&[&der[..length]]));
            }
        }
        rest = &rest[end..];
    }
    keys
}

/// With ends of lines where they were escaped for JSON.
fn lines(written: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut lines = Zeroizing::new(Vec::with_capacity(written.len()));
    let mut rest = written;
    while let Some((first, after)) = rest.split_first() {
        let (byte, after) = match after.split_first() {
            Some((b'n', after)) if *first == b'\\' => (b'\n', after),
            Some((b'r', after)) if *first == b'\\' => (b'\r', after),
            _ => (*first, after),
        };
        lines.push(byte);
        rest = after;
    }
    lines
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

    #[test]
    fn what_is_public_beside_a_key_is_no_part_of_what_is_searched_for() {
        let body = STANDARD.encode("KEY-CANARY-0123456789abcdef-0123456789abcdef");
        let (one, two) = body.split_at(32);
        let pem = format!(
            "-----BEGIN CERTIFICATE-----\nTUlJQ\n-----END CERTIFICATE-----\n\
             -----BEGIN EC PRIVATE KEY-----\n{one}\n{two}\n-----END EC PRIVATE KEY-----\n"
        );
        let json = format!("{{\"private_key\":\"{}\"}}", pem.replace('\n', "\\n"));
        let der = "KEY-CANARY-0123456789abcdef-0123456789abcdef".to_owned();
        let lines = format!("{one}\n{two}");

        assert_eq!(shown(&parts(&secret(&pem))), [lines.clone(), der.clone()]);
        let written = format!("\\n{one}\\n{two}\\n");
        assert_eq!(shown(&parts(&secret(&json))), [lines, written, der]);
    }

    #[test]
    fn of_an_access_key_the_secret_and_the_session_are_searched_for_by_themselves() {
        let whole = "ASIAEXAMPLE0:SECRET-CANARY-1:SESSION-CANARY";
        let expected = [whole, "SECRET-CANARY-1", "SESSION-CANARY"];
        assert_eq!(shown(&parts(&secret(whole))), expected);
        for value in ["some-user:SECRET-CANARY-1", "plain", "-----BEGIN PRIVATE KEY-----", ""] {
            assert_eq!(shown(&parts(&secret(value))), [value]);
        }
    }

    #[test]
    fn a_search_goes_on_by_steps_and_what_waits_has_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let (worker, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut child = open_in_test(dir.path(), worker);
        let value = secret("SECRET-CANARY-0123456789");
        child.store.put("one", &value, 0).unwrap();
        let long = format!("{} SECRET-CANARY-0123456789", "x".repeat(200_000));
        for number in 0..WAITING_MAX as u32 {
            let later = child.mask_later(number, "dev".into(), &[secret(&long)]);
            assert!(later.is_none(), "{number}");
        }
        let refused = child.mask_later(99, "dev".into(), &[]);
        assert!(matches!(refused, Some(Err(VaultError::Unavailable(_)))));

        let (mut steps, mut next) = (0, 0);
        while let Some(patience) = child.maskings.patience() {
            std::thread::sleep(patience);
            steps += 1;
            let Some((number, answer)) = child.mask() else { continue };
            let Ok((Reply::Masked { found }, texts)) = answer else { panic!("not masked") };
            assert_eq!((number, found, texts.len()), (next, 1, 1));
            assert!(texts[0].expose_secret().ends_with(b"x ************************"));
            next += 1;
        }
        assert_eq!(next, WAITING_MAX as u32);
        // Other questions are answered between any two.
        assert!(steps >= WAITING_MAX * long.len() / (64 * 1024), "{steps}");
        assert!(child.mask_later(100, "dev".into(), &[secret("x")]).is_none());
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
