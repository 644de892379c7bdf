//! Bytes both ways, unread; each direction ends on its own.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};

use super::exchange::Tally;

const BUFFER_BYTES: usize = 32 * 1024;

/// Copies until both directions have ended, or one has failed.
pub async fn run<A, B>(client: A, upstream: B, tally: &Tally) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite,
    B: AsyncRead + AsyncWrite,
{
    let (client_read, client_write) = split(client);
    let (upstream_read, upstream_write) = split(upstream);
    let up = copy(client_read, upstream_write, |bytes| tally.count_up(bytes));
    let down = copy(upstream_read, client_write, |bytes| tally.count_down(bytes));
    tokio::try_join!(up, down).map(|_| ())
}

async fn copy<R: AsyncRead, W: AsyncWrite>(
    mut from: ReadHalf<R>,
    mut to: WriteHalf<W>,
    count: impl Fn(usize),
) -> io::Result<()> {
    let mut buffer = vec![0u8; BUFFER_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
        count(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_direction_that_ended_leaves_the_other_open() {
        let (mut client, client_end) = tokio::io::duplex(64);
        let (mut upstream, upstream_end) = tokio::io::duplex(64);
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
            tokio::join!(run(client_end, upstream_end, &tally), talk);

        assert!(outcome.is_ok());
        assert_eq!((&asked[..], &answered[..]), (&b"question"[..], &b"answer"[..]));
        assert_eq!((tally.up(), tally.down()), (8, 6));
    }
}
