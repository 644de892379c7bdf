//! One exchange under way: the request's body up and the answer down, at the same time.
//!
//! Nothing waits for a whole body. An upstream may answer before it has read the request, send
//! interim heads, or switch protocols; a client may stop uploading. There is no total time limit,
//! only one on silence: an exchange in which nothing moves for [`IDLE`] is broken off.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::answer::{Answer, AnswerError, Next};
use super::body::{BodyIn, BodyOut, Piece, ReadError, WriteError};
use super::h1::framing::Framing;
use super::responder::Responder;
use crate::head::ResponseHead;
use crate::scrub::{self, BodyScrubber, Patterns, ScrubError};

/// Silence in both directions after which an exchange is broken off. Model servers have been
/// seen to think for minutes before the first byte.
pub const IDLE: Duration = Duration::from_secs(600);

/// What passed, counted while it passes: an exchange that is cut short still leaves its numbers.
pub struct Tally {
    begun: Instant,
    up: AtomicU64,
    down: AtomicU64,
    scrubbed: AtomicU64,
    status: AtomicU64,
    /// Milliseconds from `begun` to the last byte in any direction.
    moved: AtomicU64,
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

    fn masked(&self, values: u64) {
        self.scrubbed.fetch_add(values, Ordering::Relaxed);
    }

    /// Resolves when nothing has moved for `idle`.
    async fn silence(&self, idle: Duration) {
        loop {
            let quiet = self
                .begun
                .elapsed()
                .saturating_sub(Duration::from_millis(self.moved.load(Ordering::Relaxed)));
            if quiet >= idle {
                return;
            }
            tokio::time::sleep(idle - quiet).await;
        }
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
    #[error("nothing moved for {} s", IDLE.as_secs())]
    Idle,
}

impl ExchangeError {
    /// Whether the upstream hung up before it said anything: the mark of a connection that had
    /// been kept too long.
    pub fn is_stale(&self) -> bool {
        use super::h1::wire::HeadError;
        matches!(self, Self::Answer(AnswerError::Closed | AnswerError::Head(HeadError::Io(_))))
    }
}

/// Both legs of an exchange whose request head is already on its way.
pub struct Legs<'a, 'b> {
    pub body: &'a mut BodyIn<'b>,
    pub responder: &'a mut Responder<'b>,
    /// What to search the answer for; none when nothing was injected.
    pub patterns: Option<&'a Patterns>,
    pub tally: &'a Tally,
}

/// Moves bodies until the answer is complete.
pub async fn run(
    legs: Legs<'_, '_>,
    mut out: BodyOut<'_>,
    answer: Answer<'_>,
) -> Result<(), ExchangeError> {
    let Legs { body, responder, patterns, tally } = legs;
    let scrubbing = Scrubbing { patterns, tally };
    let switched = {
        let mut upload = pin!(upload(body, &mut out, tally));
        let mut download = pin!(download(answer, responder, &scrubbing));
        let mut uploading = true;
        loop {
            tokio::select! {
                result = &mut upload, if uploading => {
                    uploading = false;
                    // An upstream that reads no further may still answer; a client that broke
                    // off will not read the answer.
                    if let Err(UploadError::Client(error)) = result {
                        return Err(ExchangeError::ClientBody(error));
                    }
                }
                result = &mut download => break result?,
                () = tally.silence(IDLE) => return Err(ExchangeError::Idle),
            }
        }
    };
    match switched {
        None => Ok(()),
        Some((head, reading)) => {
            let down = responder.switch(&head).await.map_err(ExchangeError::Client)?;
            both_ways(body, out, reading, down, &scrubbing).await
        }
    }
}

enum UploadError {
    Client(ReadError),
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
                out.data(data).await.map_err(|_| UploadError::Upstream)?;
                tally.count_up(length);
            }
            Ok(Some(Piece::Trailers(fields))) => trailers = Some(fields),
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
            got = answer.head() => got?,
            () = responder.gone() => return Err(ExchangeError::ClientGone),
        };
        scrubbing.tally.count_down(0);
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
            piece = body.next() => piece,
            () = out.gone() => break Err(ExchangeError::ClientGone),
        };
        match piece {
            Ok(Some(Piece::Data(data))) => {
                scrubbing.tally.count_down(data.len());
                let result = send(&mut out, scrubber.as_mut(), data).await;
                if let Err(error) = result {
                    break Err(error);
                }
            }
            Ok(Some(Piece::Trailers(mut fields))) => {
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
    for part in scrubber.push(data)? {
        out.data(part).await.map_err(ExchangeError::Client)?;
    }
    Ok(())
}

async fn finish(
    out: &mut BodyOut<'_>,
    scrubber: Option<BodyScrubber>,
    trailers: Option<crate::head::Fields>,
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

/// After a switch of protocols: bytes both ways, each direction ending on its own.
async fn both_ways(
    body: &mut BodyIn<'_>,
    mut out: BodyOut<'_>,
    reading: BodyIn<'_>,
    down: BodyOut<'_>,
    scrubbing: &Scrubbing<'_>,
) -> Result<(), ExchangeError> {
    if let BodyIn::H1(client) = body {
        client.become_raw();
    }
    if let BodyOut::H1(upstream) = &mut out {
        upstream.become_raw();
    }
    let scrubber = match scrubbing.patterns {
        Some(patterns) => Some(BodyScrubber::new(patterns, None)?),
        None => None,
    };
    let up = async {
        match upload(body, &mut out, scrubbing.tally).await {
            Err(UploadError::Client(error)) => Err(ExchangeError::ClientBody(error)),
            Ok(()) | Err(UploadError::Upstream) => Ok(()),
        }
    };
    let (up, down) = tokio::join!(up, pass(reading, down, scrubber, scrubbing));
    down.and(up)
}

/// The search for injected values in one answer.
struct Scrubbing<'a> {
    patterns: Option<&'a Patterns>,
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
