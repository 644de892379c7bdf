//! What one connection of HTTP/2 can have held back.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use super::*;
use crate::head::ResponseHead;
use crate::lease::share::Shares;

const STREAMS: usize = 20;
const PIECE_BYTES: usize = 16 * 1024;

/// A client's end that reads nothing.
struct Deaf(DuplexStream);

impl AsyncRead for Deaf {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        _: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Poll::Pending
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// Answers without end; counts what is taken of it.
async fn pour(incoming: Incoming, begun: Arc<AtomicUsize>, taken: Arc<AtomicUsize>) {
    let mut responder = incoming.responder;
    let head = ResponseHead { status: 200, reason: Bytes::new(), headers: Fields::new() };
    let mut out = responder.start(head, Framing::Chunked).await.unwrap();
    begun.fetch_add(1, Ordering::Relaxed);
    while out.data(Bytes::from(vec![0; PIECE_BYTES])).await.is_ok() {
        taken.fetch_add(PIECE_BYTES, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn a_client_with_endless_windows_that_reads_nothing_has_little_held_for_each_stream() {
    let (near, far) = tokio::io::duplex(1024);
    let [begun, taken] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let (counts, room) = ((Arc::clone(&begun), Arc::clone(&taken)), Shares::here().windows());
    tokio::spawn(async move {
        let answer = |incoming| pour(incoming, Arc::clone(&counts.0), Arc::clone(&counts.1));
        serve(Stream::new(far), Scheme::Https, &room, answer).await
    });
    let endless = (1 << 31) - 1;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(endless).initial_connection_window_size(endless);
    let (mut sender, connection) = builder.handshake::<_, Bytes>(Deaf(near)).await.unwrap();
    tokio::spawn(connection);

    let mut answers = Vec::new();
    for _ in 0..STREAMS {
        let request = http::Request::get("https://a.test/").body(()).unwrap();
        answers.push(sender.send_request(request, true).unwrap());
    }
    // Everything runs on this thread, and nothing waits for anything outside it.
    for _ in 0..20_000 {
        tokio::task::yield_now().await;
    }

    assert_eq!(begun.load(Ordering::Relaxed), STREAMS);
    let held = taken.load(Ordering::Relaxed);
    assert!(held <= STREAMS * (SEND_BYTES_MAX + PIECE_BYTES), "{held} bytes are held back");
}

#[tokio::test]
async fn windows_are_large_while_the_share_has_room_and_as_small_as_they_can_be_then() {
    let room = Shares::here().windows();
    let windows = || Windows::of(&room, WINDOW_BYTES, CONNECTION_WINDOW_BYTES);

    let mut large: Vec<_> =
        std::iter::from_fn(|| Some(windows()).filter(|own| own.stream == WINDOW_BYTES)).collect();

    assert_eq!(large.len(), (32 << 20) / CONNECTION_WINDOW_BYTES as usize);
    assert_eq!((windows().stream, windows().connection), (65_535, 65_535));
    large.pop();
    assert_eq!(windows().connection, CONNECTION_WINDOW_BYTES);
}
