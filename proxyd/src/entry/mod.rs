//! The ways in. Each fixes who asks (a lease) and whom for (a verified name), then hands over to
//! [`crate::request`].

pub mod authority;
pub mod explicit;
pub mod http;
mod ports;
pub mod transparent;

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// How long nobody is accepted after that failed: descriptors come back only as connections end.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Runs something unless `end` comes first. An end that is there counts before all that has become
/// possible meanwhile: nothing more leaves under a lease that has ended.
async fn unless<T>(end: &CancellationToken, future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = end.cancelled() => None,
        output = future => Some(output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_end_counts_before_what_has_become_possible_at_the_same_moment() {
        let end = CancellationToken::new();
        assert_eq!(unless(&end, async { 1 }).await, Some(1));

        let (send, receive) = tokio::sync::oneshot::channel();
        let mut waiting = std::pin::pin!(unless(&end, receive));
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("nothing was sent"),
            () = std::future::ready(()) => {}
        }
        send.send(2).unwrap();
        end.cancel();

        assert_eq!(waiting.await, None);
    }
}
