//! One request's life, in order: the function to read first.
//!
//! [`answer`] judges, records, carries. Nothing is sent to an upstream before the decision stands
//! in the audit; a request that was allowed leaves its outcome there however it ends, because the
//! record is made when [`Outcome`] is dropped.

mod held;
mod outcome;
mod own;
mod refused;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ipc::id::RequestId;
use policies::{Credential, Host, Permit, Policy, Scheme};

pub use outcome::Outcome;
pub use refused::{Standing, record_denied, record_denied_at_once};

use crate::Daemon;
use crate::audit::Line;
use crate::entry::authority;
use crate::head::{Fields, RequestHead};
use crate::ids;
use crate::inject::{self, Injected, LeaseContext, Payload};
use crate::lease::Lease;
use crate::lease::budgets::{self, Meter};
use crate::lease::flow::{self, Entry, Flow, Given};
use crate::lease::places::Seat;
use crate::overrides;
use crate::question::Judged as Judgement;
use crate::relay::alarm::Alarm;
use crate::relay::body::BodyIn;
use crate::relay::exchange::{self, ExchangeError, Legs, Tally, Upgrade};
use crate::relay::h1::framing::Framing;
use crate::relay::responder::Responder;
use crate::relay::websocket::Guard;
use crate::reply::form::Form;
use crate::reply::{self, Refusal};
use crate::scrub::{self, ACCEPTED_ENCODINGS};
use crate::upstream::{Link, Retry, UpstreamError, Want};
use crate::vault::Access;

/// How long and for how much of a body a refusal over HTTP/2 waits.
const BODY_WAIT: std::time::Duration = std::time::Duration::from_millis(100);
const BODY_WAIT_BYTES_MAX: usize = 64 * 1024;

/// What was verified about a connection before its requests were read.
#[derive(Clone)]
pub struct Scene {
    pub daemon: Arc<Daemon>,
    pub lease: Arc<Lease>,
    pub scheme: Scheme,
    /// By the lease's DNS answer, the literal address, or the authority of CONNECT.
    pub host: Host,
    pub port: u16,
    /// The client's connection's: what is under way on it is said there.
    pub seat: Arc<Seat>,
    /// Set where the connection is already refused: every request on it gets this.
    pub standing: Option<Arc<Standing>>,
}

/// One request on its way through.
pub struct Asked<'a> {
    pub head: RequestHead,
    pub framing: Framing,
    /// The protocol to switch to, if the client asks for an upgrade.
    pub upgrade: Option<Bytes>,
    /// What the client's own leg speaks: the upstream leg had better speak it too.
    pub want: Want,
    pub body: BodyIn<'a>,
    pub responder: Responder<'a>,
    /// The connection's, for limits on silence.
    pub alarm: Alarm,
}

/// Answers one request, one way or the other.
pub async fn answer(scene: &Scene, asked: &mut Asked<'_>) {
    let id = ids::request();
    let mut line = Box::new(line(scene, &asked.head, &id));
    if let Some(standing) = &scene.standing {
        line.generation = scene.daemon.policies.current().number;
        let id = standing.record(*line, id).await;
        return refuse(scene, asked, &standing.refusal, &id).await;
    }
    // Before a body is waited for, and until the answer has ended: each may hold a connection.
    let place = match scene.lease.requests.take(1) {
        Ok(place) => place,
        Err(error) => {
            let refusal = error.into();
            record_denied(&scene.daemon, *line, &refusal).await;
            return refuse(scene, asked, &refusal, &id).await;
        }
    };
    if let Some(own) = own::find(scene, &asked.head) {
        return own::serve(scene, asked, own, line, &id).await;
    }
    match judge(scene, asked, line).await {
        Ok(judged) => carry(scene, asked, judged, &id).await,
        Err(refusal) => refuse(scene, asked, &refusal, &id).await,
    }
    drop(place);
}

/// A request that may leave: its decision is recorded.
struct Judged {
    permit: Permit,
    injected: Injected,
    /// The request as it was before a token went in, where it can be sent with another one.
    spare: Option<RequestHead>,
    /// Searches what an upgraded connection carries up.
    guard: Option<Guard>,
    outcome: Outcome,
    flow: Entry,
}

/// Decides, injects, and records which way it went. A refusal that comes out is recorded too.
async fn judge(
    scene: &Scene,
    asked: &mut Asked<'_>,
    mut line: Box<Line>,
) -> Result<Judged, Refusal> {
    match decide_and_inject(scene, asked, &mut line).await {
        Ok((permit, injected, spare, guard, flow, meter)) => {
            line.credential.clone_from(&injected.credential);
            let recorded = scene.daemon.audit.allow(&line).await;
            recorded.inspect_err(|error| {
                tracing::error!(%error, "request stopped: the audit cannot be written");
            })?;
            line.reason = None;
            let mut outcome = Outcome::new(Arc::clone(&scene.daemon), line);
            outcome.tally.meter = meter;
            Ok(Judged { permit, injected, spare, guard, outcome, flow })
        }
        Err(refusal) => {
            record_denied(&scene.daemon, *line, &refusal).await;
            Err(refusal)
        }
    }
}

async fn decide_and_inject(
    scene: &Scene,
    asked: &mut Asked<'_>,
    line: &mut Line,
) -> Result<(Permit, Injected, Option<RequestHead>, Option<Guard>, Entry, Option<Meter>), Refusal> {
    let (policy, generation) =
        scene.lease.policy(&scene.daemon.policies.current()).ok_or_else(environment_gone)?;
    line.generation = generation;
    check_authority(scene, &mut asked.head)?;
    check_protocol(asked)?;
    let request = judged_by(scene, &asked.head)?;
    let permit = request.judge(&policy)?;
    line.rule = Some(permit.rule().to_owned());
    let judged = Judgement { permit, policy, generation };
    let Judgement { permit, policy, generation } =
        held::answered(scene, asked, line, &request, judged).await?;
    let meter = enter(scene, &permit, asked)?;
    // What waits from here on is stopped when its permission is taken back.
    let flow = scene.lease.flows.enter(Flow::Request(request), Given::by(&permit, generation));
    let guard = guard(&policy, asked);
    let context = LeaseContext {
        lease: scene.lease.id.clone(),
        environment: scene.lease.environment.clone(),
        policy,
    };
    let vault = &scene.daemon.vault;
    let mut spare = spare(&permit, asked);
    let mut payload = Payload {
        body: &mut asked.body,
        framing: &mut asked.framing,
        responder: Some(&mut asked.responder),
        room: &scene.lease.held,
        idle: scene.daemon.idle.exchange,
    };
    let injected = tokio::select! {
        biased;
        () = flow.stop.cancelled() => return Err(policy_changed()),
        injected = inject::inject(&permit, vault, &context, &mut asked.head, &mut payload) => {
            injected?
        }
    };
    still_allowed(scene, &flow)?;
    if injected.patterns.is_some() {
        prepare_for_search(&mut asked.head.headers, !injected.signed);
    }
    spare = spare.filter(|_| injected.token.is_some());
    if let Some(spare) = &mut spare {
        prepare_for_search(&mut spare.headers, true);
    }
    Ok((permit, injected, spare, guard, flow, meter))
}

/// Whether what was decided holds after a wait. Whoever sends something looks first.
fn still_allowed(scene: &Scene, flow: &Entry) -> Result<(), Refusal> {
    if scene.seat.end.is_cancelled() {
        return Err(Refusal::denied(403, "lease_ended", "the lease of this request has ended"));
    }
    if flow.stop.is_cancelled() {
        return Err(policy_changed());
    }
    Ok(())
}

fn policy_changed() -> Refusal {
    Refusal::denied(403, "policy_changed", "the policy no longer allows this request")
}

/// Counts the request where its rule has a budget.
fn enter(scene: &Scene, permit: &Permit, asked: &Asked<'_>) -> Result<Option<Meter>, Refusal> {
    let (head, announced) = weight(asked);
    Ok(scene.lease.budgets.enter(permit.budget(), head, announced)?)
}

/// What a request counts as: its head, and what it announces of a body.
fn weight(asked: &Asked<'_>) -> (u64, u64) {
    let announced = match asked.framing {
        Framing::Length(length) => length,
        Framing::None | Framing::Chunked | Framing::UntilClose => 0,
    };
    (head_size(&asked.head), announced)
}

fn head_size(head: &RequestHead) -> u64 {
    budgets::size(&head.headers, head.method.len() + head.target.len())
}

/// A copy of a request that could be sent twice, for a credential whose tokens the upstream may
/// refuse: it has no body and holds no secret yet.
fn spare(permit: &Permit, asked: &Asked<'_>) -> Option<RequestHead> {
    let replaced = permit.credential().is_some_and(|credential| credential.is_replaceable());
    let head = &asked.head;
    (replaced && asked.framing == Framing::None && asked.upgrade.is_none()).then(|| RequestHead {
        method: head.method.clone(),
        target: head.target.clone(),
        scheme: head.scheme,
        authority: head.authority.clone(),
        headers: head.headers.clone(),
    })
}

/// The name in the request must be the verified one: another name behind it would be answered by
/// a virtual host that nobody judged (domain fronting). A name in a spelling of its own goes on
/// in the one that was judged.
fn check_authority(scene: &Scene, head: &mut RequestHead) -> Result<(), Refusal> {
    match authority::settle(&head.authority, &scene.host, scene.port) {
        Some(Cow::Borrowed(_)) => return Ok(()),
        Some(Cow::Owned(judged)) => {
            if head.headers.contains("host") {
                head.headers.set("Host", Bytes::copy_from_slice(judged.as_bytes()));
            }
            head.authority = judged;
            return Ok(());
        }
        None => {}
    }
    let verified = scene.host.authority(scene.port);
    let reason = format!("the request names {:?} on a connection to {verified}", head.authority);
    Err(Refusal::denied(421, "authority_mismatch", reason))
}

/// Over HTTP/2 a stream may ask to speak another protocol; WebSocket is the one that an upstream
/// over HTTP/1.1 can be asked for in its place.
fn check_protocol(asked: &Asked<'_>) -> Result<(), Refusal> {
    let Some(protocol) = &asked.upgrade else { return Ok(()) };
    if matches!(asked.responder, Responder::H1(_)) || protocol.eq_ignore_ascii_case(b"websocket") {
        return Ok(());
    }
    let protocol = String::from_utf8_lossy(protocol);
    let reason = format!("a stream asks to speak {protocol:?}: only websocket is passed on");
    Err(Refusal::denied(501, "protocol_unsupported", reason))
}

/// A search of what follows a switch of protocols, where there are placeholders that could be in
/// it. Compressed frames could not be searched: the extension is not offered then.
fn guard(policy: &Policy, asked: &mut Asked<'_>) -> Option<Guard> {
    let protocol = asked.upgrade.as_ref()?;
    let guard = Guard::new(protocol);
    policy.credentials.values().any(|credential| !credential.env.is_empty()).then(|| {
        asked.head.headers.remove_all("sec-websocket-extensions");
        guard
    })
}

pub fn environment_gone() -> Refusal {
    Refusal::denied(403, "environment_gone", "the policy of this environment is gone")
}

fn judged_by(scene: &Scene, head: &RequestHead) -> Result<flow::Request, Refusal> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec());
    let parts = (text(&head.method), text(head.path()), head.query().map(text).transpose());
    let (Ok(method), Ok(path), Ok(query)) = parts else {
        return Err(Refusal::denied(400, "request_malformed", "the request target is not ASCII"));
    };
    let (scheme, host, port) = (scene.scheme, scene.host.clone(), scene.port);
    let taken = overrides::of(head)
        .map_err(|error| Refusal::denied(400, "request_malformed", error.to_string()))?;
    Ok(flow::Request { scheme, host, port, method, path, query, taken })
}

/// Keeps the answer in a form that can be searched for what was injected, and `whole` where that
/// is a key.
fn prepare_for_search(headers: &mut Fields, whole: bool) {
    if headers.contains("accept-encoding") {
        let readable = |coding: &[u8]| {
            let name = coding.split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
            ACCEPTED_ENCODINGS.split(", ").any(|a| name.eq_ignore_ascii_case(a.as_bytes()))
        };
        let kept: Vec<_> = headers.members("accept-encoding").filter(|c| readable(c)).collect();
        let value = if kept.is_empty() { b"identity".to_vec() } else { kept.join(&b", "[..]) };
        headers.set("accept-encoding", value.into());
    }
    // A page that shows the value could be asked for in two parts, each with half of it. A server
    // may always answer with the whole (RFC 9110, section 14.2). But AWS's clients, which fetch a
    // large object in parts, take each answer for its part: no request of theirs holds a key.
    for name in ["range", "if-range", "request-range", "x-ms-range"] {
        if whole {
            headers.remove_all(name);
        }
    }
    // Compressed frames of an upgraded connection could not be searched.
    headers.remove_all("sec-websocket-extensions");
}

/// Sends the request on and the answer back.
async fn carry(scene: &Scene, asked: &mut Asked<'_>, judged: Judged, id: &RequestId) {
    let Judged { permit, injected, spare, guard, mut outcome, flow } = judged;
    let idle = scene.daemon.idle.exchange;
    let replaceable = replaceable(&permit, &injected).filter(|_| spare.is_none());
    let mut going = Going { injected, spare, guard, idle };
    let carried = tokio::select! {
        biased;
        () = flow.stop.cancelled() => Err(policy_changed()),
        carried = exchange(scene, asked, permit, &mut going, &mut outcome, &flow) => carried,
    };
    if let Err(mut refusal) = carried {
        // It may quote what the upstream said.
        if let Some(patterns) = &going.injected.patterns {
            refusal.reason = scrub::scrub_text(patterns, &refusal.reason).0;
        }
        outcome.refused(&refusal);
        if asked.responder.has_started() {
            asked.responder.abort();
        } else {
            refuse(scene, asked, &refusal, id).await;
        }
    } else {
        outcome.done();
    }
    if outcome.tally.status() == Some(401)
        && let Some(Replaceable { token, access, credential, host }) = replaceable
    {
        let vault = scene.daemon.vault.clone();
        scene.daemon.tasks.spawn(async move {
            // The next request says what is wrong, if something is.
            let _ = vault.render_again(&credential, &host, access, token).await;
        });
    }
}

/// What another token is to be fetched by, for the requests to come, once this one was refused for
/// a request that could not be sent again.
fn replaceable(permit: &Permit, injected: &Injected) -> Option<Replaceable> {
    Some(Replaceable {
        token: injected.token?,
        access: injected.access.clone(),
        credential: Arc::clone(permit.credential()?),
        host: permit.host().clone(),
    })
}

struct Replaceable {
    token: u64,
    access: Option<Access>,
    credential: Arc<Credential>,
    host: Host,
}

/// Finds a connection, sends the head, moves both bodies. A request is sent once more only where
/// nobody can have carried it out, or where carrying it out twice does no harm.
async fn exchange(
    scene: &Scene,
    asked: &mut Asked<'_>,
    permit: Permit,
    going: &mut Going,
    outcome: &mut Outcome,
    flow: &Entry,
) -> Result<(), Refusal> {
    let upstreams = &scene.daemon.upstreams;
    let repeatable = asked.framing == Framing::None
        && asked.upgrade.is_none()
        && matches!(&asked.head.method[..], b"GET" | b"HEAD" | b"OPTIONS");
    let behalf = &scene.lease.behalf;
    let want = if asked.upgrade.is_some() { Want::Http1Only } else { asked.want };
    let permit = (permit, going.injected.shown.take());
    let mut link = upstreams.link(permit, scene.scheme, behalf, want, !repeatable).await?;
    outcome.line.address = Some(link.address.to_string());
    upstreams.note(&link, flow);
    let mut left = RETRIES_MAX;
    loop {
        // It may have lost its permission by the address that was found.
        still_allowed(scene, flow)?;
        if left == 0 {
            // There is nobody to hold a refusal of the token back for.
            going.spare = None;
        }
        let sent = attempt(&mut link, asked, going, &outcome.tally).await;
        let Err(failure) = sent else {
            // A connection that brought an injected value back has it in its read buffers:
            // it goes, and they with it, instead of waiting for the next request.
            if outcome.tally.scrubbed() == 0 {
                upstreams.release(link);
            }
            return Ok(());
        };
        if let Attempt::Exchange(ExchangeError::Token) = &failure
            && let Some(head) = going.spare.take()
        {
            link = with_another_token(scene, asked, going, head, link).await?;
        } else {
            let retry = retry(&failure, &link, repeatable, asked.framing == Framing::None);
            let Some(retry) = retry.filter(|_| left > 0 && !asked.responder.has_started()) else {
                pass_reset_on(&failure, asked);
                return Err(failure.told(&link));
            };
            link = upstreams.redial(link, retry).await?;
        }
        outcome.line.address = Some(link.address.to_string());
        upstreams.note(&link, flow);
        outcome.tally.pay(head_size(&asked.head))?;
        left -= 1;
    }
}

/// The request once more, with another token than the one that the upstream has refused.
async fn with_another_token(
    scene: &Scene,
    asked: &mut Asked<'_>,
    going: &mut Going,
    mut head: RequestHead,
    link: Link,
) -> Result<Link, Refusal> {
    let refused = (going.injected.token.unwrap_or_default(), going.injected.access.take());
    let vault = &scene.daemon.vault;
    going.injected =
        inject::inject_again(link.permit(), vault, &mut head, refused, &scene.lease.held).await?;
    asked.head = head;
    Ok(scene.daemon.upstreams.redial(link, Retry::Refused).await?)
}

/// How often one request is tried again, each time for a reason that makes it safe.
const RETRIES_MAX: usize = 3;

/// How a request that failed may be tried again without any risk of being carried out twice.
fn retry(failure: &Attempt, link: &Link, repeatable: bool, bodiless: bool) -> Option<Retry> {
    match failure {
        Attempt::Send(UpstreamError::Full { .. }) => None,
        // A head that could not be sent on a shared connection was not sent at all.
        Attempt::Send(_) => {
            (link.reused && (repeatable || link.shares())).then_some(Retry::Elsewhere)
        }
        Attempt::Exchange(error) => match error.unprocessed() {
            Some(retry) => bodiless.then_some(retry),
            None => (link.reused && repeatable && error.is_stale()).then_some(Retry::Elsewhere),
        },
    }
}

/// An HTTP/2 client learns from the code of a reset what a status could not tell: that the request
/// is safe to send again, or what its gRPC library makes of the code.
fn pass_reset_on(failure: &Attempt, asked: &mut Asked<'_>) {
    if let Attempt::Exchange(error) = failure
        && let Some(reason) = error.reset()
        && (reason == h2::Reason::REFUSED_STREAM || Form::of(&asked.head) == Form::Grpc)
    {
        asked.responder.reset(reason);
    }
}

/// What goes with a request on its way, besides the request.
struct Going {
    injected: Injected,
    /// See [`Judged::spare`].
    spare: Option<RequestHead>,
    guard: Option<Guard>,
    idle: Duration,
}

enum Attempt {
    Send(UpstreamError),
    Exchange(ExchangeError),
}

impl Attempt {
    /// The refusal, in the words of the upstream's alert where it says something of certificates.
    fn told(self, link: &Link) -> Refusal {
        let text = match &self {
            Self::Send(error) => error.to_string(),
            Self::Exchange(error) => error.to_string(),
        };
        link.told(&text).map_or_else(|| self.into(), Refusal::from)
    }
}

impl From<Attempt> for Refusal {
    fn from(attempt: Attempt) -> Self {
        match attempt {
            Attempt::Send(error) => error.into(),
            Attempt::Exchange(error) => (&error).into(),
        }
    }
}

async fn attempt(
    link: &mut Link,
    asked: &mut Asked<'_>,
    going: &mut Going,
    tally: &Tally,
) -> Result<(), Attempt> {
    let sent = link.send(&asked.head, asked.framing, asked.upgrade.as_ref()).await;
    let (out, answer) = sent.map_err(Attempt::Send)?;
    let own_handshake = matches!(asked.responder, Responder::H2 { .. });
    let key = asked.head.headers.first("sec-websocket-key").filter(|_| own_handshake).cloned();
    let legs = Legs {
        body: &mut asked.body,
        responder: &mut asked.responder,
        alarm: &mut asked.alarm,
        patterns: going.injected.patterns.as_ref(),
        again: going.spare.is_some(),
        upgrade: asked.upgrade.as_ref().map(|_| Upgrade { key, guard: going.guard.take() }),
        idle: going.idle,
        tally,
    };
    exchange::run(legs, out, answer).await.map_err(Attempt::Exchange)
}

async fn refuse(scene: &Scene, asked: &mut Asked<'_>, refusal: &Refusal, id: &RequestId) {
    let form = Form::of(&asked.head);
    if !asked.body.is_done() {
        asked.responder.close();
        // Some clients of HTTP/2 that are answered before they sent their body neither send it nor
        // read the answer's end any more (curl before 8), and hang.
        if asked.responder.has_streams() && !asked.head.headers.contains("expect") {
            let _ = tokio::time::timeout(BODY_WAIT, asked.body.linger(BODY_WAIT_BYTES_MAX)).await;
        }
    }
    let environment = &scene.lease.environment;
    // The client may have gone; the decision is recorded already.
    let _ = reply::send(&mut asked.responder, refusal, form, id, environment).await;
}

/// The audit line of one request, as far as it is known before judging it.
fn line(scene: &Scene, head: &RequestHead, id: &RequestId) -> Line {
    let text = |bytes: &[u8]| Some(String::from_utf8_lossy(bytes).into_owned());
    Line {
        request: Some(id.clone()),
        entry: Some("http".to_owned()),
        host: Some(scene.host.name().map_or_else(|| scene.host.to_string(), str::to_owned)),
        port: Some(scene.port),
        method: text(&head.method),
        path: text(head.path()),
        ..scene.lease.line()
    }
}
