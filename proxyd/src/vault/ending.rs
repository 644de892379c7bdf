//! The end of a proxyd and the beginning of the next: no refresh token is lost between them.
//!
//! A server that rotates refresh tokens takes the former one no more, often before its answer is
//! here. Whoever throws that answer away has lost the login for good. So the vault child and the
//! network's worker neither end with proxyd nor at a signal that is meant for it; they end when the
//! answers to questions with refresh tokens that had been sent are in the store, or have failed.
//! Nothing new is asked then. The next vault waits until this one has let go of the store.

use std::path::Path;
use std::time::{Duration, Instant};

use ipc::daemon::{HoldError, hold};

use super::child::Child;
use super::workers::Which;
use super::{FETCH_SECONDS, VaultError};

/// How long answers are waited for. The worker's own limit for each is shorter.
const FINISH: Duration = Duration::from_secs(FETCH_SECONDS + 5);
/// How long revocations take at most.
const REVOKE: Duration = Duration::from_secs(10);
/// How long the next vault waits for the store.
const HOLD: Duration = Duration::from_secs(FETCH_SECONDS + 15);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(20);

/// The right to open the store below a directory; another process gets it when this one has ended.
pub(super) struct Held {
    _directory: ipc::daemon::Held,
}

impl Held {
    /// Waits for it. Comes before the keys are read: whoever has it may be replacing them.
    pub(super) fn wait(directory: &Path) -> Result<Self, VaultError> {
        Self::within(directory, HOLD)
    }

    fn within(directory: &Path, patience: Duration) -> Result<Self, VaultError> {
        let end = Instant::now() + patience;
        let mut said = false;
        loop {
            let holder = match hold(directory) {
                Ok(held) => return Ok(Self { _directory: held }),
                Err(HoldError::InUse { holder, .. }) if Instant::now() < end => holder,
                Err(error) => {
                    return Err(VaultError::Failed(format!("cannot open the vault: {error}")));
                }
            };
            if !said {
                ipc::say::line(format_args!(
                    "proxyd vault: waits until the former one, {holder}, has stored an answer"
                ));
                said = true;
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// After proxyd or a worker has gone: waits for what cannot be asked for again.
pub(super) fn finish(child: &mut Child) {
    let end = Instant::now() + FINISH;
    // What cannot be revoked in time is by the next vault.
    let revoked = Instant::now() + REVOKE;
    child.end_leased();
    while child.is_revoking() && hears(child, revoked) {}
    child.workers.end();
    while child.mints.await_rotation() {
        if !hears(child, end) {
            ipc::say::line("proxyd vault: ends without an answer of a token server");
            return;
        }
    }
}

/// Takes an answer, if one comes by then. Nobody is there any more who waits for what it brings.
fn hears(child: &mut Child, end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now());
    child.workers.answers_within(left) && matches!(child.hear(Which::Network), Ok(Some(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vault_is_held_by_one_process_at_a_time_and_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let first = Held::wait(dir.path()).unwrap();
        assert!(Held::within(dir.path(), Duration::ZERO).is_err());

        let path = dir.path().to_owned();
        let waiting = std::thread::spawn(move || Held::wait(&path).is_ok());
        drop(first);

        assert!(waiting.join().unwrap());
    }

    #[test]
    fn the_unit_and_the_next_vault_wait_longer_than_the_last_answer_may_take() {
        let unit = include_str!("../../../systemd/cleanhands-proxyd.service");
        let set =
            |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));

        // "mixed" kills what remains as soon as proxyd has ended.
        assert_eq!(set("KillMode"), Some("control-group"));
        let stop = set("TimeoutStopSec").and_then(|text| text.parse().ok()).unwrap();
        assert!(Duration::from_secs(stop) > FINISH + 3 * crate::DRAIN);
        assert!(HOLD > FINISH);
        assert!(HOLD < Duration::from_secs(super::super::connection::START_SECONDS));
    }
}
