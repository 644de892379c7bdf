//! Bytes both ways, unread; each direction ends on its own.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};

use super::exchange::Tally;
use crate::lease::budgets::Spent;

const BUFFER_BYTES: usize = 32 * 1024;

/// Why a tunnel did not come to its proper end. Neither peer may take it for one: both
/// connections are to be reset.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("nothing moved for {} s", .0.as_secs())]
    Idle(Duration),
    /// The rule's budget has no room for what would pass next.
    #[error("{0}")]
    Spent(#[from] Spent),
}

/// Copies until both directions have ended, one has failed, or nothing moves for `idle`.
pub async fn run<A, B>(
    client: &mut A,
    upstream: &mut B,
    tally: &Tally,
    idle: Duration,
) -> Result<(), TunnelError>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (client_read, client_write) = split(client);
    let (upstream_read, upstream_write) = split(upstream);
    let up = copy(client_read, upstream_write, tally, Tally::count_up);
    let down = copy(upstream_read, client_write, tally, Tally::count_down);
    tokio::select! {
        passed = async { tokio::try_join!(up, down) } => passed.map(|_| ()),
        () = tally.silence(idle) => Err(TunnelError::Idle(idle)),
    }
}

async fn copy<R: AsyncRead, W: AsyncWrite>(
    mut from: ReadHalf<R>,
    mut to: WriteHalf<W>,
    tally: &Tally,
    count: impl Fn(&Tally, usize),
) -> Result<(), TunnelError> {
    let mut buffer = vec![0u8; BUFFER_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(to.shutdown().await?);
        }
        tally.pay(length as u64)?;
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
        count(tally, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn a_direction_that_ended_leaves_the_other_open() {
        let (mut client, mut client_end) = tokio::io::duplex(64);
        let (mut upstream, mut upstream_end) = tokio::io::duplex(64);
        let tally = Tally::default();
        let talk = async {
            client.write_all(b"question").await.unwrap();
            client.shutdown().await.unwrap();
            let mut asked = Vec::new();
            upstream.read_to_end(&mut asked).await.unwrap();
            upstream.write_all(b"answer").await.unwrap();
            upstream.shutdown().await.unwrap();
            let mut answered = Vec::new();
            client.read_to_end(&mut answered).await.unwrap();
            (asked, answered)
        };

        let (outcome, (asked, answered)) =
            tokio::join!(run(&mut client_end, &mut upstream_end, &tally, HOUR), talk);

        assert!(outcome.is_ok());
        assert_eq!((&asked[..], &answered[..]), (&b"question"[..], &b"answer"[..]));
        assert_eq!((tally.up(), tally.down()), (8, 6));
    }

    #[tokio::test(start_paused = true)]
    async fn a_byte_in_either_direction_keeps_a_tunnel_for_days_and_silence_ends_it() {
        let (mut client, mut client_end) = tokio::io::duplex(64);
        let (mut upstream, mut upstream_end) = tokio::io::duplex(64);
        let tally = Tally::default();
        let begun = tokio::time::Instant::now();
        let talk = async {
            for round in 0..72 {
                tokio::time::sleep(HOUR - Duration::from_secs(1)).await;
                let (from, to) = match round % 2 {
                    0 => (&mut client, &mut upstream),
                    _ => (&mut upstream, &mut client),
                };
                from.write_u8(round).await.unwrap();
                assert_eq!(to.read_u8().await.unwrap(), round);
            }
            begun.elapsed()
        };

        let (outcome, active) =
            tokio::join!(run(&mut client_end, &mut upstream_end, &tally, HOUR), talk);

        assert!(matches!(outcome, Err(TunnelError::Idle(HOUR))), "{outcome:?}");
        assert!(active > 70 * HOUR && begun.elapsed() >= active + HOUR);
    }
}
