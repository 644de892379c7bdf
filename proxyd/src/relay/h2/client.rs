//! The upstream leg of HTTP/2: one connection, many streams.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::time::timeout;

use super::{SEND_BYTES_MAX, Windows, convert, describe};
use crate::head::RequestHead;
use crate::lease::share::{Share, Taken};
use crate::relay::answer::Answer;
use crate::relay::body::BodyOut;
use crate::relay::h1::framing::Framing;
use crate::relay::stream::Stream;
use crate::upstream::shared::Load;

/// Flow control windows: with less, one stream over a long way is slower than HTTP/1.1.
const WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
/// How long to wait for the upstream to allow another stream.
pub const TURN: Duration = Duration::from_secs(30);

/// How often a connection with requests on it is probed. Servers of gRPC take more than one ping in
/// five minutes for an attack.
const PING: Duration = Duration::from_secs(310);
/// How long an upstream may take to send its settings, which are the first it has to send.
const SETTINGS: Duration = Duration::from_secs(10);
/// How long the answer may take.
const PONG: Duration = Duration::from_secs(30);

/// Why a request could not be put on its way.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    #[error("{0}")]
    Unsayable(#[from] convert::Unsayable),
    #[error("{}", describe(.0))]
    Connection(#[from] h2::Error),
    #[error("upstream allows no further stream")]
    Full,
}

/// What stands for the number of streams that the upstream allows until it has said so. No number
/// that it may say is as large.
pub const UNSAID: usize = u32::MAX as usize + 1;

/// What a connection takes of a lease's shares.
pub struct Room {
    pub windows: Share,
    /// A place among those that outlast their requests, if it has one.
    pub lasting: Option<Taken>,
}

/// Opens HTTP/2 on a connection. A task carries its frames until the last user is gone, or until
/// the upstream does not even answer a ping while requests wait for it. The first request may
/// leave at once; the task keeps `turn` until the upstream has said how many more it takes.
pub async fn open<T: Send + 'static>(
    stream: Stream,
    load: Load,
    turn: T,
    room: Room,
) -> Result<SendRequest<Bytes>, h2::Error> {
    let windows = Windows::of(&room.windows, WINDOW_BYTES, CONNECTION_WINDOW_BYTES);
    let mut builder = h2::client::Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_send_buffer_size(SEND_BYTES_MAX)
        .initial_max_send_streams(UNSAID)
        .max_header_list_size(64 * 1024);
    let (sender, mut connection) = builder.handshake(stream).await?;
    let pings = connection.ping_pong();
    let mut turn = Some(turn);
    let settled = Arc::new(AtomicBool::new(false));
    let said = Arc::clone(&settled);
    let failure = Arc::clone(&load.failure);
    let carried = std::future::poll_fn(move |context| {
        let polled = Pin::new(&mut connection).poll(context);
        // Said before the connection is dropped, which is what ends its streams.
        if let Poll::Ready(Err(error)) = &polled {
            let _ = failure.set(describe(error));
        }
        if connection.max_concurrent_send_streams() != UNSAID {
            drop(turn.take());
            said.store(true, Ordering::Release);
        }
        polled
    });
    tokio::spawn(async move {
        tokio::select! {
            _ = carried => {}
            () = unanswered(pings, &load) => {}
            () = unsettled(&settled) => {}
        }
        load.ended.store(true, Ordering::Release);
        drop((windows, room));
    });
    Ok(sender)
}

/// Resolves when the upstream has not begun as it must (RFC 9113 section 3.4).
async fn unsettled(settled: &AtomicBool) {
    tokio::time::sleep(SETTINGS).await;
    if settled.load(Ordering::Acquire) {
        std::future::pending::<()>().await;
    }
}

/// Resolves when a ping stays unanswered while requests are on the connection.
async fn unanswered(pings: Option<h2::PingPong>, load: &Load) {
    let Some(mut pings) = pings else { return std::future::pending().await };
    loop {
        tokio::time::sleep(PING).await;
        if load.streams.load(Ordering::Acquire) == 0 {
            continue;
        }
        match timeout(PONG, pings.ping(h2::Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection has ended, and its own future says so.
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}

/// Sends a head; gives the way for the body and the way of the answer.
pub async fn send(
    sender: SendRequest<Bytes>,
    head: &RequestHead,
    framing: Framing,
) -> Result<(BodyOut<'static>, Answer<'static>), SendError> {
    let request = convert::request(head)?;
    let mut sender = sender.ready().await?;
    let ends = framing == Framing::None;
    let (response, stream) = sender.send_request(request, ends)?;
    // Beyond the number of streams that the upstream allows the head waits here; given up in
    // time, it was not sent at all.
    timeout(TURN, sender.ready()).await.map_err(|_| SendError::Full)??;
    let out = if ends { BodyOut::None } else { BodyOut::H2(stream) };
    Ok((out, Answer::H2(response)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::share::Shares;
    use tokio::time::{Instant, sleep};

    const HOURS: Duration = Duration::from_secs(10 * 3600);

    /// A connection with one request on it, and the upstream's end of both.
    async fn asked() -> (
        h2::client::ResponseFuture,
        h2::server::Connection<tokio::io::DuplexStream, Bytes>,
        h2::server::SendResponse<Bytes>,
        Load,
    ) {
        let (near, far) = tokio::io::duplex(64 * 1024);
        let load = Load::default();
        load.streams.fetch_add(1, Ordering::AcqRel);
        let room = Room { windows: Shares::here().windows(), lasting: None };
        let mut sender = open(Stream::new(near), load.clone(), (), room).await.unwrap();
        let mut upstream = h2::server::handshake(far).await.unwrap();
        let request = http::Request::get("https://a.test/").body(()).unwrap();
        let (response, _) = sender.send_request(request, true).unwrap();
        let (_, respond) = upstream.accept().await.unwrap().unwrap();
        (response, upstream, respond, load)
    }

    #[tokio::test(start_paused = true)]
    async fn an_upstream_that_answers_no_ping_while_a_request_waits_is_given_up() {
        // Nobody looks after the upstream's end any more.
        let (response, _upstream, _respond, load) = asked().await;
        let begun = Instant::now();

        let outcome = response.await;

        assert!(outcome.is_err());
        assert!(begun.elapsed() >= PONG && begun.elapsed() <= PING + 2 * PONG);
        tokio::task::yield_now().await;
        assert!(load.ended.load(Ordering::Acquire));
    }

    #[tokio::test(start_paused = true)]
    async fn an_upstream_that_answers_pings_may_take_hours_for_the_rest() {
        let (response, mut upstream, mut respond, load) = asked().await;
        tokio::spawn(async move { while upstream.accept().await.is_some() {} });
        tokio::spawn(async move {
            sleep(HOURS).await;
            respond.send_response(http::Response::new(()), true).unwrap();
        });

        let outcome = response.await;

        assert_eq!(outcome.unwrap().status(), 200);
        assert!(!load.ended.load(Ordering::Acquire));
    }
}
