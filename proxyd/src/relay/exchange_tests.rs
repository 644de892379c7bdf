//! Hours pass here in no time: only silence ends an exchange, never its length.

use std::time::Duration;

use policies::Scheme;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::{Instant, sleep};

use super::*;
use crate::head::{Fields, RequestHead};
use crate::relay::h1::{client, server};
use crate::relay::stream::Stream;

const IDLE: Duration = Duration::from_secs(600);
const ALMOST: Duration = Duration::from_secs(599);
const ROUNDS: u32 = 100;

/// Runs one exchange between a client and an upstream that `talk` plays; both are at hand as raw
/// streams once the head has arrived.
async fn exchange<F>(request: &str, talk: impl FnOnce(DuplexStream, DuplexStream) -> F) -> Outcome
where
    F: Future<Output = (DuplexStream, DuplexStream)>,
{
    let (mut client, near) = duplex(4096);
    let (mut upstream, far) = duplex(4096);
    client.write_all(request.as_bytes()).await.unwrap();
    let mut downstream = server::Connection::new(Stream::new(near));
    let mut onward = client::Connection::new(Stream::new(far));
    let incoming = downstream.next().await.unwrap();
    let head = RequestHead {
        method: incoming.raw.method.clone(),
        target: incoming.raw.target.clone(),
        scheme: Scheme::Https,
        authority: "a.test".to_owned(),
        headers: Fields::clone(&incoming.raw.headers),
    };
    let framing = incoming.framing;
    let begun = Instant::now();
    let (mut body, reply) = downstream.parts(&incoming);
    let mut responder = Responder::H1(reply);
    let (out, awaited) = onward.send(&head, framing, None).await.unwrap();
    read_to(&mut upstream, b"\r\n\r\n").await;
    let (mut alarm, tally) = (Alarm::default(), Tally::default());
    let legs = Legs {
        body: &mut body,
        responder: &mut responder,
        patterns: None,
        upgrade: None,
        idle: IDLE,
        again: false,
        alarm: &mut alarm,
        tally: &tally,
    };
    let (ended, (mut client, _upstream)) =
        tokio::join!(run(legs, out, Answer::H1(awaited)), talk(client, upstream));
    let took = begun.elapsed();
    drop((body, responder));
    drop(downstream);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    Outcome { ended, took, rest }
}

struct Outcome {
    ended: Result<(), ExchangeError>,
    took: Duration,
    /// What the client read after `talk`.
    rest: Vec<u8>,
}

async fn read_to(stream: &mut DuplexStream, end: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    while !all.ends_with(end) {
        all.push(stream.read_u8().await.unwrap());
    }
    all
}

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

#[tokio::test(start_paused = true)]
async fn an_answer_may_go_on_for_hours_and_silence_breaks_it_off() {
    let outcome =
        exchange("GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", |mut client, mut upstream| async move {
            upstream.write_all(ANSWER).await.unwrap();
            read_to(&mut client, b"\r\n\r\n").await;
            for _ in 0..ROUNDS {
                sleep(ALMOST).await;
                upstream.write_all(b"1\r\nx\r\n").await.unwrap();
                assert_eq!(read_to(&mut client, b"\r\nx\r\n").await, b"1\r\nx\r\n");
            }
            (client, upstream)
        })
        .await;

    assert!(matches!(outcome.ended, Err(ExchangeError::Idle(IDLE))));
    assert!(outcome.took >= ALMOST * ROUNDS + IDLE, "{:?}", outcome.took);
    assert_eq!(outcome.rest, b"", "it looks whole");
}

#[tokio::test(start_paused = true)]
async fn an_upload_may_go_on_for_hours_while_nothing_comes_back() {
    let request = "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n";
    let outcome = exchange(request, |mut client, mut upstream| async move {
        for _ in 0..ROUNDS {
            sleep(ALMOST).await;
            client.write_all(b"1\r\nx\r\n").await.unwrap();
            assert_eq!(read_to(&mut upstream, b"\r\nx\r\n").await, b"1\r\nx\r\n");
        }
        client.write_all(b"0\r\n\r\n").await.unwrap();
        read_to(&mut upstream, b"0\r\n\r\n").await;
        sleep(ALMOST).await;
        upstream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
        (client, upstream)
    })
    .await;

    assert!(outcome.ended.is_ok());
    assert!(outcome.took >= ALMOST * (ROUNDS + 1), "{:?}", outcome.took);
    assert!(outcome.rest.ends_with(b"\r\n\r\nok"));
}

#[tokio::test(start_paused = true)]
async fn a_first_byte_may_take_minutes() {
    let outcome =
        exchange("GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", |client, mut upstream| async move {
            sleep(ALMOST).await;
            upstream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
            (client, upstream)
        })
        .await;

    assert!(outcome.ended.is_ok() && outcome.rest.ends_with(b"\r\n\r\nok"));
}

/// How long a client counts as there after it has ended its direction.
async fn waited_for(near: Stream) -> Duration {
    let mut connection = server::Connection::new(near);
    let incoming = connection.next().await.unwrap();
    let (mut body, _reply) = connection.parts(&incoming);
    let begun = Instant::now();
    gone(&mut body, &Tally::default()).await;
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_client_that_has_closed_is_not_waited_for_and_one_that_may_listen_only_a_while() {
    let request = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n";
    let (mut plain, near) = tokio::net::UnixStream::pair().unwrap();
    plain.write_all(request).await.unwrap();
    plain.shutdown().await.unwrap();
    let (mut gone, left) = tokio::net::UnixStream::pair().unwrap();
    gone.write_all(request).await.unwrap();
    drop(gone);
    let (mut layered, far) = duplex(4096);
    layered.write_all(request).await.unwrap();
    layered.shutdown().await.unwrap();

    let half = waited_for(Stream::new(near)).await;
    let closed = waited_for(Stream::new(far)).await;
    let hung_up = waited_for(Stream::new(left)).await;

    assert!(half >= HALF_CLOSED && half < IDLE, "{half:?}");
    assert_eq!(closed, Duration::ZERO);
    assert_eq!(hung_up, Duration::ZERO);
}
