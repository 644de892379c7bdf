//! Serves the API on the loopback port.
//!
//! The listener is made by systemd or by `cleanhands up` and passed in: harnessd opens no network
//! socket. Requests carry a mark in place of a principal, so that the edge asks for a key.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections served at once. One client of the official SDK keeps up to 100 idle.
const CONNECTIONS_MAX: usize = 1024;
/// A head must arrive within this time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Wait after a failed accept: out of descriptors or memory, the next try may find some.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Marks a request that came over the loopback port.
#[derive(Clone, Copy, Debug)]
pub struct Loopback;

/// Serves until `shutdown`, then lets running requests end for as long as `drain` says. A listener
/// on an address that other hosts can reach is refused: keys would cross the network in the clear.
pub async fn serve_loopback(
    listener: TcpListener,
    router: Router,
    shutdown: CancellationToken,
    drain: Duration,
) -> std::io::Result<()> {
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() {
        let why = format!("the port of the API must be on loopback, not {address}");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    }
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let tracker = TaskTracker::new();
    loop {
        let permit = tokio::select! {
            () = shutdown.cancelled() => break,
            permit = Arc::clone(&permits).acquire_owned() => permit,
        };
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept on the loopback port");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (router, shutdown) = (router.clone(), shutdown.clone());
        tracker.spawn(async move {
            serve_connection(stream, router, shutdown).await;
            drop(permit);
        });
    }
    tracker.close();
    let _ = tokio::time::timeout(drain, tracker.wait()).await;
    Ok(())
}

async fn serve_connection(stream: TcpStream, router: Router, shutdown: CancellationToken) {
    // Each event of a stream is a small write of its own; without this they wait for each other.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |mut request: http::Request<_>| {
        request.extensions_mut().insert(Loopback);
        let service = TowerToHyperService::new(router.clone());
        async move {
            let request = request.map(axum::body::Body::new);
            let response: Result<_, Infallible> =
                hyper::service::Service::call(&service, request).await;
            response
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    // A peer that breaks off is its own affair.
    let _ = connection.await;
}
