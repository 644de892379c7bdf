//! A timer that is set once and looked at when it rings, instead of set anew for every request.
//!
//! Setting a timer that is the next one to ring interrupts the runtime's wait with a system call,
//! and a connection that is in use puts its limit on silence off with every request. So the time
//! that was set first stays, and whoever is woken by it looks how much is left by then.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// One connection's timer.
#[derive(Default)]
pub struct Alarm(Option<Pin<Box<Sleep>>>);

impl Alarm {
    /// Resolves when it is `due`, which may move on from call to call. No clock is read before
    /// the timer rings.
    pub async fn ring(&mut self, due: impl Fn() -> Instant) {
        let first = due();
        let sleep = self.0.get_or_insert_with(|| Box::pin(sleep_until(first)));
        if sleep.deadline() > first || sleep.is_elapsed() {
            sleep.as_mut().reset(first);
        }
        loop {
            sleep.as_mut().await;
            let due = due();
            if due <= Instant::now() {
                return;
            }
            sleep.as_mut().reset(due);
        }
    }

    /// Resolves when `limit` has passed since the first look at this.
    pub async fn after(&mut self, limit: Duration) {
        let due = Instant::now() + limit;
        self.ring(|| due).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(100);

    fn since(begun: Instant) -> impl Fn() -> Instant {
        move || begun + LIMIT
    }

    #[tokio::test(start_paused = true)]
    async fn it_rings_when_the_time_is_up_however_often_it_was_put_off() {
        let mut alarm = Alarm::default();
        for _ in 0..5 {
            let busy = tokio::time::sleep(Duration::from_secs(60));
            tokio::select! {
                () = alarm.ring(since(Instant::now())) => panic!("it rang while things moved"),
                () = busy => {}
            }
        }
        let begun = Instant::now();

        alarm.ring(since(begun)).await;
        let first = begun.elapsed();
        let begun = Instant::now();
        alarm.ring(since(begun)).await;

        for rang in [first, begun.elapsed()] {
            assert!(rang >= LIMIT && rang < LIMIT + Duration::from_secs(1), "after {rang:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_shorter_limit_holds_after_a_longer_one_was_set() {
        let mut alarm = Alarm::default();
        tokio::select! {
            () = alarm.after(LIMIT * 6) => panic!("it rang too soon"),
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
        let begun = Instant::now();

        alarm.ring(since(begun)).await;

        assert!(begun.elapsed() < LIMIT + Duration::from_secs(1));
    }
}
