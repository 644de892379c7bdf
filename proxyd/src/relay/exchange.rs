//! One exchange under way: the request's body up and the answer down, at the same time.
//!
//! Nothing waits for a whole body. An upstream may answer before it has read the request, send
//! interim heads, or switch protocols; a client may stop uploading. There is no total time limit,
//! only one on silence: an exchange in which nothing moves for as long as the operator
//! says is broken off.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::alarm::Alarm;
use super::answer::{Answer, AnswerError, Next};
use super::body::{BodyIn, BodyOut, Piece, ReadError, WriteError};
use super::h1::framing::Framing;
use super::h1::wire::End;
use super::responder::Responder;
use super::switched::{self, Ends, Search};
use super::websocket::{self, Guard};
use crate::head::{Fields, ResponseHead};
use crate::lease::budgets::{self, Meter, Spent};
use crate::scrub::{self, BodyScrubber, Patterns, ScrubError};
use crate::upstream::Retry;

/// How long nothing may move towards a client that has ended its direction of a connection without
/// TLS. Over TCP nothing tells one that has closed from one that still listens (`printf ... |
/// ncat`) until something is sent to it; over a Unix socket the kernel does.
const HALF_CLOSED: Duration = Duration::from_secs(30);

/// What passed, counted while it passes: an exchange that is cut short still leaves its numbers.
pub struct Tally {
    begun: Instant,
    up: AtomicU64,
    down: AtomicU64,
    scrubbed: AtomicU64,
    status: AtomicU64,
    /// Milliseconds from `begun` to the last byte in any direction.
    moved: AtomicU64,
    /// Where the rule bounds bytes: whatever passes is paid for first.
    pub meter: Option<Meter>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
            scrubbed: AtomicU64::new(0),
            status: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            meter: None,
        }
    }
}

impl Tally {
    pub fn up(&self) -> u64 {
        self.up.load(Ordering::Relaxed)
    }

    pub fn down(&self) -> u64 {
        self.down.load(Ordering::Relaxed)
    }

    pub fn scrubbed(&self) -> u64 {
        self.scrubbed.load(Ordering::Relaxed)
    }

    /// The upstream's final status, once there is one.
    pub fn status(&self) -> Option<u16> {
        u16::try_from(self.status.load(Ordering::Relaxed)).ok().filter(|status| *status > 0)
    }

    pub fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn count(&self, counter: &AtomicU64, bytes: usize) {
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        self.moved.store(self.elapsed_ms(), Ordering::Relaxed);
    }

    pub fn count_up(&self, bytes: usize) {
        self.count(&self.up, bytes);
    }

    pub fn count_down(&self, bytes: usize) {
        self.count(&self.down, bytes);
    }

    /// Takes what is about to pass out of the rule's budget.
    pub fn pay(&self, bytes: u64) -> Result<(), Spent> {
        self.meter.as_ref().map_or(Ok(()), |meter| meter.pay(bytes))
    }

    /// The same for a head of the answer, of whose body so many bytes are announced.
    fn pay_head(&self, head: &ResponseHead, announced: Option<Framing>) -> Result<(), Spent> {
        let Some(meter) = &self.meter else { return Ok(()) };
        let size = budgets::size(&head.headers, head.reason.len());
        if let Some(Framing::Length(length)) = announced {
            meter.fits(length.saturating_add(size))?;
        }
        meter.pay(size)
    }

    pub fn masked(&self, values: u64) {
        self.scrubbed.fetch_add(values, Ordering::Relaxed);
    }

    /// Resolves when nothing has moved for `idle`.
    pub async fn silence(&self, idle: Duration) {
        Alarm::default().ring(|| self.due(idle)).await;
    }

    /// Until when nothing may move.
    fn due(&self, idle: Duration) -> Instant {
        self.begun + Duration::from_millis(self.moved.load(Ordering::Relaxed)) + idle
    }
}

/// Why an exchange did not come to its proper end, by whose fault.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// The client went away or broke its own framing off.
    #[error("client: {0}")]
    ClientBody(ReadError),
    #[error("client: cannot answer: {0}")]
    Client(WriteError),
    #[error("client gave the request up")]
    ClientGone,
    #[error("upstream: {0}")]
    Answer(#[from] AnswerError),
    #[error("upstream: answer broke off: {0}")]
    UpstreamBody(ReadError),
    #[error("{0}")]
    Scrub(#[from] ScrubError),
    #[error("nothing moved for {} s", .0.as_secs())]
    Idle(Duration),
    #[error("{0}")]
    Message(websocket::Refused),
    /// The rule's budget has no room for what would pass next.
    #[error("{0}")]
    Spent(#[from] Spent),
    /// Nothing of the answer has gone on: the request can be tried with another token.
    #[error("the upstream refuses the token (401)")]
    Token,
}

impl ExchangeError {
    /// Whether the upstream hung up before it said anything: the mark of a connection that had
    /// been kept too long.
    pub fn is_stale(&self) -> bool {
        use super::h1::wire::HeadError;
        match self {
            Self::Answer(AnswerError::Closed | AnswerError::Head(HeadError::Io(_))) => true,
            Self::Answer(AnswerError::Reset(error)) => error.is_io(),
            _ => false,
        }
    }

    /// The code with which the upstream reset the request's stream before any answer.
    pub fn reset(&self) -> Option<h2::Reason> {
        match self {
            Self::Answer(AnswerError::Reset(error)) if error.is_reset() && error.is_remote() => {
                error.reason()
            }
            _ => None,
        }
    }

    /// Whether the upstream said that it did nothing about the request, and how to go on then:
    /// it refused the stream, it went away before it (RFC 9113 section 8.7), or it wants another
    /// version.
    pub fn unprocessed(&self) -> Option<Retry> {
        let Self::Answer(AnswerError::Reset(error)) = self else { return None };
        match self.reset() {
            Some(h2::Reason::REFUSED_STREAM) => Some(Retry::Refused),
            Some(h2::Reason::HTTP_1_1_REQUIRED) => Some(Retry::Http1),
            _ => (error.is_go_away() && error.is_remote()).then_some(Retry::Elsewhere),
        }
    }
}

/// A switch of protocols that was asked for.
pub struct Upgrade {
    /// The key of a handshake that is ours, since the client's protocol knows none.
    pub key: Option<Bytes>,
    /// Searches what the client sends afterwards.
    pub guard: Option<Guard>,
}

impl Upgrade {
    /// Whether the answer is that to our own handshake; a client looks after its own.
    fn check(&self, head: &ResponseHead) -> Result<(), AnswerError> {
        let accept = head.headers.first("sec-websocket-accept");
        match &self.key {
            Some(key) if !websocket::is_answer_to(key, accept) => Err(AnswerError::Unasked),
            _ => Ok(()),
        }
    }
}

/// Both legs of an exchange whose request head is already on its way.
pub struct Legs<'a, 'b> {
    pub body: &'a mut BodyIn<'b>,
    pub responder: &'a mut Responder<'b>,
    /// What to search the answer for; none when nothing was injected.
    pub patterns: Option<&'a Patterns>,
    /// Whether a 401 shall not go on, because the request can be tried with another token.
    pub again: bool,
    /// What was asked for, if the client wants to switch protocols.
    pub upgrade: Option<Upgrade>,
    /// How long nothing may move.
    pub idle: Duration,
    /// The client's connection's.
    pub alarm: &'a mut Alarm,
    pub tally: &'a Tally,
}

/// Moves bodies until the answer is complete.
pub async fn run(
    legs: Legs<'_, '_>,
    mut out: BodyOut<'_>,
    answer: Answer<'_>,
) -> Result<(), ExchangeError> {
    let Legs { body, responder, patterns, again, upgrade, idle, alarm, tally } = legs;
    let scrubbing = Scrubbing { patterns, again, tally };
    let switched = {
        let mut client = pin!(async {
            // An upstream that reads no further may still answer; a client that broke off will not
            // read the answer.
            match upload(body, &mut out, tally).await {
                Err(UploadError::Client(error)) => return ExchangeError::ClientBody(error),
                Err(UploadError::Spent(spent)) => return spent.into(),
                Ok(()) | Err(UploadError::Upstream) => {}
            }
            gone(body, tally).await;
            ExchangeError::ClientGone
        });
        let mut silence = pin!(alarm.ring(|| tally.due(idle)));
        let mut download = pin!(download(answer, responder, &scrubbing));
        tokio::select! {
            // An answer that is there needs no look at the client.
            biased;
            result = &mut download => result?,
            error = &mut client => return Err(error),
            () = &mut silence => return Err(ExchangeError::Idle(idle)),
        }
    };
    match switched {
        None => Ok(()),
        Some((head, reading)) => {
            let Some(upgrade) = upgrade else { return Err(AnswerError::Unasked.into()) };
            upgrade.check(&head)?;
            let to_client = responder.switch(&head).await.map_err(ExchangeError::Client)?;
            let protocol = head.headers.first("upgrade").cloned().unwrap_or_default();
            let scrubber = patterns.map(|patterns| BodyScrubber::switched(patterns, &protocol));
            let search = Search { guard: upgrade.guard, scrubber };
            let ends = Ends { client: body, to_upstream: out, upstream: reading, to_client };
            switched::run(ends, search, tally, idle).await
        }
    }
}

/// Resolves when nobody is there to be answered, as far as the client's own direction tells.
async fn gone(body: &mut BodyIn<'_>, tally: &Tally) {
    if let End::Half = body.ends().await {
        let given_up = async {
            sleep(HALF_CLOSED).await;
            tally.silence(HALF_CLOSED).await;
        };
        tokio::select! {
            () = body.hangs_up() => {}
            () = given_up => {}
        }
    }
}

enum UploadError {
    Client(ReadError),
    Spent(Spent),
    Upstream,
}

async fn upload(
    body: &mut BodyIn<'_>,
    out: &mut BodyOut<'_>,
    tally: &Tally,
) -> Result<(), UploadError> {
    let mut trailers = None;
    loop {
        match body.next().await.map_err(UploadError::Client) {
            Ok(Some(Piece::Data(data))) => {
                let length = data.len();
                if let Err(spent) = tally.pay(length as u64) {
                    out.abort();
                    return Err(UploadError::Spent(spent));
                }
                out.data(data).await.map_err(|_| UploadError::Upstream)?;
                tally.count_up(length);
            }
            Ok(Some(Piece::Trailers(fields))) => {
                if let Err(spent) = tally.pay(budgets::size(&fields, 0)) {
                    out.abort();
                    return Err(UploadError::Spent(spent));
                }
                trailers = Some(fields);
            }
            Ok(None) => break,
            Err(error) => {
                out.abort();
                return Err(error);
            }
        }
    }
    out.finish(trailers).await.map_err(|_| UploadError::Upstream)
}

type Switched<'a> = Option<(ResponseHead, BodyIn<'a>)>;

/// Passes heads and body of the answer on. Gives back the head of a switch of protocols.
async fn download<'a>(
    mut answer: Answer<'a>,
    responder: &mut Responder<'_>,
    scrubbing: &Scrubbing<'_>,
) -> Result<Switched<'a>, ExchangeError> {
    let (mut head, body, framing) = loop {
        let (mut head, next) = tokio::select! {
            biased;
            got = answer.head() => got?,
            () = responder.gone() => return Err(ExchangeError::ClientGone),
        };
        scrubbing.tally.count_down(0);
        let announced = match &next {
            Next::Body(_, framing) => Some(*framing),
            Next::Interim(_) | Next::Switched(_) => None,
        };
        scrubbing.tally.pay_head(&head, announced)?;
        match next {
            Next::Interim(rest) => {
                scrubbing.head(&mut head);
                responder.interim(&head).await.map_err(ExchangeError::Client)?;
                answer = rest;
            }
            Next::Switched(body) => {
                scrubbing.head(&mut head);
                scrubbing.tally.status.store(u64::from(head.status), Ordering::Relaxed);
                return Ok(Some((head, body)));
            }
            Next::Body(body, framing) => break (head, body, framing),
        }
    };
    if scrubbing.again && head.status == 401 {
        return Err(ExchangeError::Token);
    }
    scrubbing.tally.status.store(u64::from(head.status), Ordering::Relaxed);
    let scrubber = scrubbing.body(&head, framing)?;
    scrubbing.head(&mut head);
    let out = responder.start(head, framing).await.map_err(ExchangeError::Client)?;
    pass(body, out, scrubber, scrubbing).await?;
    Ok(None)
}

/// Passes one body on, searched where something was injected.
async fn pass(
    mut body: BodyIn<'_>,
    mut out: BodyOut<'_>,
    mut scrubber: Option<BodyScrubber>,
    scrubbing: &Scrubbing<'_>,
) -> Result<(), ExchangeError> {
    let mut trailers = None;
    let outcome = loop {
        let piece = tokio::select! {
            // What was written waits for what is there already, and goes when nothing is.
            biased;
            piece = body.next() => piece,
            () = out.gone() => break Err(ExchangeError::ClientGone),
            () = scrub::lull(scrubber.as_ref()) => {
                let held = scrubber.as_mut().map(BodyScrubber::let_go).unwrap_or_default();
                match write_all(&mut out, held).await {
                    Ok(()) => continue,
                    Err(error) => break Err(error),
                }
            }
        };
        match piece {
            Ok(Some(Piece::Data(data))) => {
                if let Err(spent) = scrubbing.tally.pay(data.len() as u64) {
                    break Err(spent.into());
                }
                scrubbing.tally.count_down(data.len());
                let result = send(&mut out, scrubber.as_mut(), data).await;
                if let Err(error) = result {
                    break Err(error);
                }
            }
            Ok(Some(Piece::Trailers(mut fields))) => {
                if let Err(spent) = scrubbing.tally.pay(budgets::size(&fields, 0)) {
                    break Err(spent.into());
                }
                if let Some(patterns) = scrubbing.patterns {
                    scrubbing.tally.masked(scrub::scrub_fields(patterns, &mut fields));
                }
                trailers = Some(fields);
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(ExchangeError::UpstreamBody(error)),
        }
    };
    match outcome {
        Ok(()) => finish(&mut out, scrubber, trailers, scrubbing.tally).await,
        Err(error) => {
            out.flush().await;
            if let Some(scrubber) = scrubber {
                scrubbing.tally.masked(scrubber.masked());
            }
            Err(error)
        }
    }
}

async fn send(
    out: &mut BodyOut<'_>,
    scrubber: Option<&mut BodyScrubber>,
    data: Bytes,
) -> Result<(), ExchangeError> {
    let Some(scrubber) = scrubber else {
        return out.data(data).await.map_err(ExchangeError::Client);
    };
    write_all(out, scrubber.push(data)?).await
}

async fn write_all(out: &mut BodyOut<'_>, parts: Vec<Bytes>) -> Result<(), ExchangeError> {
    for part in parts {
        out.data(part).await.map_err(ExchangeError::Client)?;
    }
    Ok(())
}

async fn finish(
    out: &mut BodyOut<'_>,
    scrubber: Option<BodyScrubber>,
    trailers: Option<Fields>,
    tally: &Tally,
) -> Result<(), ExchangeError> {
    if let Some(scrubber) = scrubber {
        tally.masked(scrubber.masked());
        let rest = scrubber.finish()?;
        for part in rest {
            out.data(part).await.map_err(ExchangeError::Client)?;
        }
    }
    out.finish(trailers).await.map_err(ExchangeError::Client)
}

/// The search for injected values in one answer.
struct Scrubbing<'a> {
    patterns: Option<&'a Patterns>,
    again: bool,
    tally: &'a Tally,
}

impl Scrubbing<'_> {
    fn head(&self, head: &mut ResponseHead) {
        let Some(patterns) = self.patterns else { return };
        self.tally.masked(scrub::scrub_fields(patterns, &mut head.headers));
        // A reason phrase is the upstream's free text; its place is no field to be searched.
        head.reason = Bytes::new();
    }

    /// The search of the body; an answer that cannot be searched does not go on.
    fn body(
        &self,
        head: &ResponseHead,
        framing: Framing,
    ) -> Result<Option<BodyScrubber>, ExchangeError> {
        let Some(patterns) = self.patterns.filter(|_| framing != Framing::None) else {
            return Ok(None);
        };
        let mut encodings = head.headers.all("content-encoding");
        let encoding = encodings.next();
        if encodings.next().is_some() {
            return Err(ScrubError::Unknown("several content-encoding fields".into()).into());
        }
        Ok(Some(BodyScrubber::new(patterns, encoding.map(|value| &value[..]))?))
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
