//! Waiting for a condition with a deadline: the only way tests pass time.

use std::time::{Duration, Instant};

/// How often a condition is looked at again.
const STEP: Duration = Duration::from_millis(10);
/// Far above what anything here takes, so that only a hang meets it.
pub const LONG: Duration = Duration::from_secs(60);

/// Polls until `condition` gives something; panics with `what` at the deadline.
pub fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {LONG:?} in vain for {what}");
        std::thread::sleep(STEP);
    }
}

/// The same under tokio.
pub async fn until_async<T, F>(what: &str, mut condition: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {LONG:?} in vain for {what}");
        tokio::time::sleep(STEP).await;
    }
}
