//! Polls a future on threads that may wait, so that none that carries traffic does.
//!
//! For what only has a blocking interface in the middle of what else is a future. The future stays
//! its runtime's: the thread is another only while it is polled, and none is held while it rests.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use tokio::sync::{Notify, Semaphore};
use tokio::task::spawn_blocking;

/// Most threads that wait at once: each waits for the vault, which does one thing at a time.
const THREADS: usize = 16;

static PLACES: Semaphore = Semaphore::const_new(THREADS);

thread_local! {
    static MAY_BLOCK: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller is polled here.
pub fn may_block() -> bool {
    MAY_BLOCK.get()
}

/// While it is there, what runs on its thread may block it.
struct Waiting;

impl Waiting {
    fn begin() -> Self {
        MAY_BLOCK.set(true);
        Self
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        MAY_BLOCK.set(false);
    }
}

#[derive(Default)]
struct Woken(Notify);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

/// Runs the future to its end. An error says that it panicked, or that its runtime is ending.
pub async fn elsewhere<F>(future: F) -> io::Result<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let woken = Arc::new(Woken::default());
    let mut future = Box::pin(future);
    loop {
        let place = PLACES.acquire().await;
        let waker = Waker::from(Arc::clone(&woken));
        let polling = spawn_blocking(move || {
            let _waiting = Waiting::begin();
            let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
            (future, polled)
        });
        let (rested, polled) = polling.await.map_err(io::Error::other)?;
        drop(place);
        if let Poll::Ready(output) = polled {
            return Ok(output);
        }
        future = rested;
        woken.0.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn what_blocks_leaves_the_thread_of_its_runtime_free() {
        let (started, begins) = tokio::sync::oneshot::channel();
        let (answer, waits) = std::sync::mpsc::channel();
        let blocking = async move {
            // Woken by this runtime's own clock first.
            tokio::time::sleep(Duration::from_millis(1)).await;
            started.send(may_block()).unwrap();
            waits.recv().unwrap()
        };
        // On a runtime of one thread: it can answer only if it is not the one that waits.
        let (output, ()) = tokio::join!(elsewhere(blocking), async {
            assert!(begins.await.unwrap());
            answer.send(7).unwrap();
        });

        assert_eq!(output.unwrap(), 7);
        assert!(!may_block());
    }

    #[tokio::test]
    async fn a_future_that_panics_is_an_error_and_gives_its_place_back() {
        for _ in 0..2 * THREADS {
            let ended = elsewhere(async { panic!("as the test wants") }).await;

            assert!(ended.is_err());
        }
        assert_eq!(elsewhere(async { 1 }).await.unwrap(), 1);
    }
}
