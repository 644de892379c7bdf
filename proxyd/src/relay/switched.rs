//! After a switch of protocols: bytes both ways, each direction ending on its own.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::body::{BodyIn, BodyOut, Piece};
use super::exchange::{ExchangeError, Tally};
use super::websocket::{self, Boundary, Guard, Refused};
use crate::scrub::{self, BodyScrubber};

/// How long a client may take to read why its message was refused.
const FAREWELL: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 1024 * 1024;

/// The four ends of a connection that speaks another protocol from now on.
pub struct Ends<'a, 'b> {
    pub client: &'a mut BodyIn<'b>,
    pub to_upstream: BodyOut<'a>,
    pub upstream: BodyIn<'a>,
    pub to_client: BodyOut<'a>,
}

/// What both directions are searched for.
pub struct Search {
    /// In what the client sends.
    pub guard: Option<Guard>,
    /// In what comes back.
    pub scrubber: Option<BodyScrubber>,
}

/// Passes bytes on until both directions have ended, one has failed, or nothing moves.
pub async fn run(
    ends: Ends<'_, '_>,
    search: Search,
    tally: &Tally,
    idle: Duration,
) -> Result<(), ExchangeError> {
    let Ends { client, mut to_upstream, upstream, to_client } = ends;
    client.become_raw();
    to_upstream.become_raw();
    let Search { guard, scrubber } = search;
    let (refused, refusal) = watch::channel(None);
    let passed = Boundary::new(guard.as_ref().is_some_and(Guard::reads_frames));
    let outcome = {
        let mut up = pin!(go_up(client, &mut to_upstream, guard, tally));
        let mut down = pin!(go_down(upstream, to_client, scrubber, tally, passed, refusal));
        let (mut going_up, mut going_down) = (true, true);
        loop {
            tokio::select! {
                result = &mut up, if going_up => {
                    going_up = false;
                    match result {
                        Err(Up::Refused(reason)) => {
                            refused.send_replace(Some(reason));
                            // The client hears nothing more where that direction has ended.
                            if going_down {
                                let _ = timeout(FAREWELL, &mut down).await;
                            }
                            break Err(ExchangeError::Message(reason));
                        }
                        Err(Up::Failed(error)) => break Err(error),
                        Ok(()) => {}
                    }
                }
                result = &mut down, if going_down => {
                    going_down = false;
                    result?;
                }
                () = tally.silence(idle) => break Err(ExchangeError::Idle(idle)),
            }
            if !going_up && !going_down {
                break Ok(());
            }
        }
    };
    if matches!(outcome, Err(ExchangeError::Message(_))) {
        // What it sends after the refused message must not turn our close into a reset.
        let _ = timeout(FAREWELL, client.linger(LINGER_BYTES_MAX)).await;
    }
    outcome
}

enum Up {
    Refused(Refused),
    Failed(ExchangeError),
}

async fn go_up(
    client: &mut BodyIn<'_>,
    out: &mut BodyOut<'_>,
    mut guard: Option<Guard>,
    tally: &Tally,
) -> Result<(), Up> {
    loop {
        let piece = tokio::select! {
            // What was written waits for what is there already, and goes when nothing is.
            biased;
            piece = client.next() => piece,
            // An upstream that reads no further may still have something to say.
            () = out.gone() => return Ok(()),
        };
        match piece {
            Ok(Some(Piece::Data(data))) => {
                if let Some(guard) = &mut guard
                    && let Err(refused) = guard.check(&data)
                {
                    if let Some(farewell) = guard.farewell() {
                        // The upstream may have gone; there is nobody else to tell.
                        let _ = out.data(farewell).await;
                        out.flush().await;
                    }
                    out.abort();
                    return Err(Up::Refused(refused));
                }
                if let Err(spent) = tally.pay(data.len() as u64) {
                    out.abort();
                    return Err(Up::Failed(spent.into()));
                }
                tally.count_up(data.len());
                if out.data(data).await.is_err() {
                    return Ok(());
                }
            }
            Ok(Some(Piece::Trailers(_))) => {}
            Ok(None) => {
                // The same holds for one that has gone.
                let _ = out.finish(None).await;
                return Ok(());
            }
            Err(error) => {
                out.abort();
                return Err(Up::Failed(ExchangeError::ClientBody(error)));
            }
        }
    }
}

async fn go_down(
    mut upstream: BodyIn<'_>,
    mut out: BodyOut<'_>,
    mut scrubber: Option<BodyScrubber>,
    tally: &Tally,
    mut passed: Boundary,
    mut refusal: watch::Receiver<Option<Refused>>,
) -> Result<(), ExchangeError> {
    let mut masked = 0;
    loop {
        let piece = tokio::select! {
            biased;
            piece = upstream.next() => piece.map_err(ExchangeError::UpstreamBody)?,
            () = out.gone() => return Err(ExchangeError::ClientGone),
            () = scrub::lull(scrubber.as_ref()) => {
                for part in scrubber.as_mut().map(BodyScrubber::let_go).unwrap_or_default() {
                    passed.pass(&part);
                    out.data(part).await.map_err(ExchangeError::Client)?;
                }
                continue;
            }
            // Writing is never cut short, so the client stands where `passed` says.
            reason = refused(&mut refusal) => return dismiss(&mut out, &passed, reason).await,
        };
        match piece {
            Some(Piece::Data(data)) => {
                tally.pay(data.len() as u64)?;
                tally.count_down(data.len());
                let parts = match &mut scrubber {
                    Some(scrubber) => scrubber.push(data)?,
                    None => vec![data],
                };
                for part in parts {
                    passed.pass(&part);
                    out.data(part).await.map_err(ExchangeError::Client)?;
                }
            }
            Some(Piece::Trailers(_)) => {}
            None => break,
        }
        if let Some(scrubber) = &scrubber {
            tally.masked(scrubber.masked() - masked);
            masked = scrubber.masked();
        }
    }
    if let Some(scrubber) = scrubber {
        for part in scrubber.finish()? {
            out.data(part).await.map_err(ExchangeError::Client)?;
        }
    }
    out.finish(None).await.map_err(ExchangeError::Client)
}

/// Resolves once a message of the client was refused.
async fn refused(refusal: &mut watch::Receiver<Option<Refused>>) -> Refused {
    let reason = refusal.wait_for(Option::is_some).await.ok().and_then(|reason| *reason);
    match reason {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}

/// Tells the client why the connection ends, if it stands between two frames.
async fn dismiss(
    out: &mut BodyOut<'_>,
    passed: &Boundary,
    reason: Refused,
) -> Result<(), ExchangeError> {
    if passed.is_reached() {
        out.data(websocket::refusal(reason)).await.map_err(ExchangeError::Client)?;
        out.finish(None).await.map_err(ExchangeError::Client)?;
    }
    Ok(())
}
