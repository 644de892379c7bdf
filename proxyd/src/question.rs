//! Requests and connections that a rule holds until an operator has answered (`ask`).
//!
//! Whatever is held has been judged already, nothing of it has left, no credential was put into it,
//! and no more of its body is read than fits what is read ahead. It is judged again when files have
//! changed and when an answer has come, by the policy in force then. An answer counts for the rule
//! that asked, as long as that is what it was, and for one lease; the lease takes what was said for
//! longer with it when it ends. How it ended stands in the audit however it came.

pub mod calls;

use std::collections::BTreeMap;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ipc::id::QuestionId;
use ipc::peer::Principal;
use ipc::question::{Question, QuestionPage, Reply, Verdict};
use policies::{Permit, Policy};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::Daemon;
use crate::audit::{AuditError, Line};
use crate::lease::Lease;
use crate::lease::share::Taken;
use crate::overrides;
use crate::relay::body::BodyIn;
use crate::relay::h1::wire::End;
use crate::relay::responder::Responder;
use crate::reply::Refusal;
use crate::request::record_denied_at_once;

/// How long a look at the questions waits for a change.
const PATIENCE: Duration = Duration::from_secs(25);
/// How long a client may wait for the answer to a request after it has ended its direction of a
/// connection without TLS, which may mean that it has closed.
pub const HALF_CLOSED: Duration = Duration::from_secs(30);
/// When a client may try again for whose question there was no room.
const RETRY_SECONDS: u64 = 10;
/// How long a place rests, from when its question was asked, if nobody has answered that. Without
/// it a client that asks and leaves, over and over, would fill the disk with records.
const REST: Duration = Duration::from_secs(RETRY_SECONDS);
/// How much of a path and a query is shown, and of all that a request may be taken for.
const SHOWN_CHARS_MAX: usize = 2048;
/// How often to look whether a client is there.
const LOOK: Duration = Duration::from_secs(1);

const UNANSWERED_HINT: &str = "operators see such questions with `cleanhands question list \
     --follow`: let one know, then send it again";

/// What the policy in force says of something.
pub struct Judged {
    pub permit: Permit,
    pub policy: Arc<Policy>,
    pub generation: u64,
}

/// An answer, and what it was given for.
#[derive(Clone)]
pub struct Answer {
    verdict: Verdict,
    /// Of the rule that asked.
    pub mark: String,
    question: QuestionId,
    by: Principal,
    until: Option<Instant>,
}

impl Answer {
    /// For the record of the decision.
    pub fn words(&self) -> String {
        let verdict = said(self.verdict);
        format!("question {}: {verdict} by {}", self.question, self.by)
    }
}

fn said(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Allow => "allowed",
        Verdict::Deny => "denied",
    }
}

/// The answers that count for whatever a lease asks for next.
#[derive(Default)]
pub struct Answers(Mutex<Vec<Answer>>);

impl Answers {
    fn find(&self, mark: &str) -> Option<Answer> {
        let mut answers = self.answers();
        let now = Instant::now();
        answers.retain(|answer| answer.until.is_some_and(|until| until > now));
        answers.iter().find(|answer| answer.mark == mark).cloned()
    }

    /// The last word counts.
    fn put(&self, answer: Answer) {
        let mut answers = self.answers();
        answers.retain(|former| former.mark != answer.mark);
        answers.push(answer);
    }

    fn answers(&self) -> MutexGuard<'_, Vec<Answer>> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

/// All questions that are open.
pub struct Questions {
    table: Mutex<Table>,
    /// Counts changes of what is open.
    changed: watch::Sender<u64>,
    /// Counts changes of policies.
    judged: watch::Sender<u64>,
}

#[derive(Default)]
struct Table {
    next: u64,
    open: BTreeMap<u64, Open>,
    /// Places that nobody may have yet, and until when.
    resting: Vec<(Instant, Taken)>,
    closed: bool,
}

/// One of them.
struct Open {
    shown: Question,
    line: Line,
    lease: Arc<Lease>,
    mark: String,
    until: Instant,
    tell: oneshot::Sender<Answer>,
}

impl Open {
    fn view(&self) -> Question {
        let left = self.until.saturating_duration_since(Instant::now()).as_secs();
        Question { seconds_left: left, ..self.shown.clone() }
    }

    fn is_like(&self, lease: &Arc<Lease>, mark: &str) -> bool {
        Arc::ptr_eq(&self.lease, lease) && self.mark == mark
    }
}

/// Why an answer did not count.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    #[error("no question {0} is open: it was answered, its time is over, or nobody waits any more")]
    Missing(QuestionId),
    #[error("{0}")]
    Audit(#[from] AuditError),
}

impl Default for Questions {
    fn default() -> Self {
        let (changed, judged) = (watch::Sender::new(1), watch::Sender::new(1));
        Self { table: Mutex::default(), changed, judged }
    }
}

impl Questions {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no holder of this lock panics")
    }

    fn has_changed(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    /// Has everything that is held judged again.
    pub fn judge_again(&self) {
        self.judged.send_modify(|count| *count += 1);
    }

    /// Ends all questions for good.
    pub fn close(&self) {
        let mut table = self.table();
        table.closed = true;
        table.open.clear();
        drop(table);
        self.has_changed();
    }

    /// What is open; with `after`, as soon as that is not what was shown then.
    pub async fn page(&self, after: Option<u64>) -> QuestionPage {
        let mut changed = self.changed.subscribe();
        if let Some(after) = after.filter(|_| !self.table().closed) {
            // The sender is ours, so waiting ends for no other reason.
            let _ = timeout(PATIENCE, changed.wait_for(|count| *count != after)).await;
        }
        let last = *self.changed.borrow();
        QuestionPage { questions: self.table().open.values().map(Open::view).collect(), last }
    }

    /// Gives an answer; says how many others that were held it served. It is on record before
    /// anything goes on for it.
    pub async fn answer(
        &self,
        daemon: &Daemon,
        question: QuestionId,
        reply: Reply,
        by: Principal,
    ) -> Result<u64, AnswerError> {
        let span = reply.for_seconds.map(Duration::from_secs);
        let claimed = {
            let mut table = self.table();
            let mut all = table.open.iter();
            let found = all.find(|(_, open)| open.shown.question == question);
            let number = found.map(|(number, _)| *number);
            number.and_then(|number| table.open.remove(&number))
        };
        let Some(Open { lease, mark, line, tell, .. }) = claimed else {
            return Err(AnswerError::Missing(question));
        };
        self.has_changed();
        let once = || "once".to_owned();
        let long = reply.for_seconds.map_or_else(once, |seconds| format!("for {seconds} s"));
        let verdict = said(reply.answer);
        let reason = Some(format!("question {question}: {verdict} {long} by {by}"));
        daemon.audit.note(&Line { reason, ..line }).await?;
        let until = span.map(|span| Instant::now() + span);
        let answer = Answer { verdict: reply.answer, mark, question, by, until };
        let alike = if until.is_some() { self.stand(&lease, &answer) } else { Vec::new() };
        let others = alike.len() as u64;
        for tell in std::iter::once(tell).chain(alike) {
            // Whoever has gone meanwhile is on record as that.
            let _ = tell.send(answer.clone());
        }
        Ok(others)
    }

    /// Puts an answer in force for what comes, and finds those who wait for it. In one step:
    /// whoever comes meanwhile finds it, or is found.
    fn stand(&self, lease: &Arc<Lease>, answer: &Answer) -> Vec<oneshot::Sender<Answer>> {
        let mut table = self.table();
        lease.answers.put(answer.clone());
        let is_like = |_: &u64, open: &mut Open| open.is_like(lease, &answer.mark);
        let alike = table.open.extract_if(.., is_like).map(|(_, open)| open.tell).collect();
        drop(table);
        self.has_changed();
        alike
    }
}

/// What is to be asked about.
pub struct Asking<'a> {
    pub daemon: &'a Arc<Daemon>,
    pub lease: &'a Arc<Lease>,
    pub query: Option<&'a str>,
    /// What else it may be taken for.
    pub taken: &'a [overrides::Taken],
}

/// Holds something until it may go: with the answer that lets it, or because nobody needs to be
/// asked any more. `judge` says what the policy in force makes of it, `gone` resolves when nobody
/// waits for it any more.
pub async fn settle(
    asking: Asking<'_>,
    line: &mut Line,
    judge: impl Fn() -> Result<Judged, Refusal>,
    gone: impl Future<Output = ()>,
) -> Result<(Judged, Option<Answer>), Refusal> {
    let mut gone = pin!(gone);
    let mut answer: Option<Answer> = None;
    loop {
        let judged = judge()?;
        line.generation = judged.generation;
        line.rule = Some(judged.permit.rule().to_owned());
        let Some(within) = judged.permit.asks() else { return Ok((judged, None)) };
        let mark = judged.permit.mark();
        if answer.as_ref().is_some_and(|answer| answer.mark == mark) {
            return Ok((judged, answer));
        }
        let still = || judge().is_ok_and(|j| j.permit.asks().is_some() && j.permit.mark() == mark);
        let asked = Asked { mark: &mark, within, credential: judged.permit.carries() };
        answer = hold(&asking, line, asked, still, gone.as_mut()).await?;
        if answer.as_ref().is_some_and(|answer| answer.verdict == Verdict::Deny) {
            return Err(denied(line, answer.as_ref()));
        }
    }
}

/// What a rule asks.
struct Asked<'a> {
    mark: &'a str,
    within: Duration,
    credential: Option<String>,
}

fn denied(line: &Line, answer: Option<&Answer>) -> Refusal {
    let rule = line.rule.clone();
    let question = answer.map(|answer| format!(" ({})", answer.question)).unwrap_or_default();
    let named = rule.as_deref().unwrap_or_default();
    let reason = format!("{named} asks an operator, who said no{question}");
    Refusal { rule, ..Refusal::denied(403, "question_denied", reason) }
}

/// Asks, and waits: for an answer, or for a change of policies that has it judged anew (none).
async fn hold(
    asking: &Asking<'_>,
    line: &mut Line,
    asked: Asked<'_>,
    still: impl Fn() -> bool,
    mut gone: Pin<&mut impl Future<Output = ()>>,
) -> Result<Option<Answer>, Refusal> {
    let questions = &asking.daemon.questions;
    let mut judged = questions.judged.subscribe();
    let within = asked.within;
    let (mut held, open) = match Held::new(asking, line, asked)? {
        Ok(new) => new,
        Err(standing) => return Ok(Some(standing)),
    };
    line.held = true;
    held.record().await?;
    if let Some(standing) = held.open(open)? {
        return Ok(Some(standing));
    }
    // What was changed before that was not seen by `still`.
    judged.mark_changed();
    loop {
        tokio::select! {
            biased;
            answer = &mut held.answer => return held.told(answer.ok()),
            () = gone.as_mut() => {
                held.give_up();
                let reason = "the client left before an operator had answered";
                return Err(Refusal::failed(499, "client_gone", reason));
            }
            _ = judged.changed() => if !still() {
                held.withdraw();
                return Ok(None);
            },
            () = sleep_until(held.until) => {
                if held.give_up() {
                    return Err(unanswered(line, within));
                }
                // Somebody answers just now.
                let answer = (&mut held.answer).await;
                return held.told(answer.ok());
            }
        }
    }
}

fn unanswered(line: &Line, within: Duration) -> Refusal {
    let (rule, seconds) = (line.rule.clone(), within.as_secs());
    let named = rule.as_deref().unwrap_or_default();
    let reason = format!("{named} asks an operator, who did not answer within {seconds} s");
    let refusal = Refusal::denied(403, "question_unanswered", reason);
    Refusal { rule, ..refusal }.with_hint(UNANSWERED_HINT)
}

/// A question's place among the open ones. It leaves them when this is dropped; where that happens
/// before it has come to an end, that is what stands in the audit.
struct Held {
    daemon: Arc<Daemon>,
    number: u64,
    question: QuestionId,
    line: Line,
    asked: Instant,
    until: Instant,
    answer: oneshot::Receiver<Answer>,
    ended: bool,
    share: Option<Taken>,
}

impl Held {
    /// Makes a place, unless there is an answer already.
    fn new(
        asking: &Asking<'_>,
        line: &Line,
        Asked { mark, within, credential }: Asked<'_>,
    ) -> Result<Result<(Self, Open), Answer>, Refusal> {
        let Asking { daemon, lease, .. } = asking;
        let questions = &daemon.questions;
        let mut table = questions.table();
        if let Some(answer) = lease.answers.find(mark) {
            return Ok(Err(answer));
        }
        if table.closed {
            return Err(withdrawn());
        }
        let asked = Instant::now();
        table.resting.retain(|(until, _)| *until > asked);
        let share = lease.questions.take(1).map_err(|error| {
            let refusal = Refusal::failed(503, "questions_busy", error.to_string());
            Refusal { retry_seconds: Some(RETRY_SECONDS), ..refusal }
                .with_hint("send it again when others have been answered")
        })?;
        let (tell, answer) = oneshot::channel();
        let until = asked + within;
        let question = QuestionId::random();
        let shown = Question { credential, ..shown(asking, line, question.clone()) };
        let line = Line { held: true, ..line.clone() };
        let (number, mark) = (table.next, mark.to_owned());
        table.next += 1;
        let open = Open { shown, line: line.clone(), lease: Arc::clone(lease), mark, until, tell };
        drop(table);
        let (daemon, ended, share) = (Arc::clone(daemon), false, Some(share));
        let held = Self { daemon, number, question, line, asked, until, answer, ended, share };
        Ok(Ok((held, open)))
    }

    /// Lets operators see it, once it is on record; unless there is an answer by now.
    fn open(&mut self, open: Open) -> Result<Option<Answer>, Refusal> {
        let questions = &self.daemon.questions;
        let mut table = questions.table();
        let standing = open.lease.answers.find(&open.mark);
        if standing.is_some() || table.closed {
            self.ended = true;
            return standing.map(Some).ok_or_else(withdrawn);
        }
        table.open.insert(self.number, open);
        drop(table);
        questions.has_changed();
        Ok(None)
    }

    /// Nothing is held of which the audit says nothing.
    async fn record(&mut self) -> Result<(), Refusal> {
        let seconds = self.until.saturating_duration_since(Instant::now()).as_secs_f64().round();
        let reason = format!("question {}: held for {seconds} s at most", self.question);
        let line = Line { reason: Some(reason), ..self.line.clone() };
        let recorded = self.daemon.audit.note(&line).await;
        recorded.map(drop).map_err(|error| {
            tracing::error!(%error, "request stopped: the audit cannot be written");
            self.withdraw();
            error.into()
        })
    }

    /// Takes it out of the open ones; false: somebody answers it just now. Whoever calls this says
    /// what it has come to.
    fn withdraw(&mut self) -> bool {
        self.ended = true;
        let taken = self.daemon.questions.table().open.remove(&self.number).is_some();
        if taken {
            self.daemon.questions.has_changed();
        }
        taken
    }

    /// The same where nobody has answered: its place rests.
    fn give_up(&mut self) -> bool {
        if let Some(share) = self.share.take() {
            self.daemon.questions.table().resting.push((self.asked + REST, share));
        }
        self.withdraw()
    }

    /// An answer has come, or nobody can give one any more.
    fn told(&mut self, answer: Option<Answer>) -> Result<Option<Answer>, Refusal> {
        self.ended = true;
        answer.map(Some).ok_or_else(withdrawn)
    }
}

fn withdrawn() -> Refusal {
    let reason = "proxyd ends, or cannot record the answer: nobody can answer the question";
    Refusal::failed(503, "question_withdrawn", reason)
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        self.give_up();
        let reason = "the connection or its lease ended before an operator had answered";
        let refusal = Refusal::failed(499, "client_gone", reason);
        record_denied_at_once(&self.daemon, self.line.clone(), &refusal);
    }
}

/// What operators are shown of it.
fn shown(asking: &Asking<'_>, line: &Line, question: QuestionId) -> Question {
    let cut = |text: &str| cut(text, SHOWN_CHARS_MAX);
    let lease = asking.lease;
    Question {
        question,
        request: line.request.clone().unwrap_or_else(crate::ids::request),
        asked_at: format!("{:.3}", jiff::Timestamp::now()),
        seconds_left: 0,
        environment: lease.environment.clone(),
        lease: lease.id.clone(),
        owner: lease.owner.clone(),
        session: line.session.clone(),
        sandbox: line.sandbox.clone(),
        calls: line.calls.clone(),
        rule: line.rule.clone().unwrap_or_default(),
        credential: None,
        host: line.host.clone().unwrap_or_default(),
        port: line.port.unwrap_or_default(),
        method: line.method.as_deref().map(cut),
        path: line.path.as_deref().map(cut),
        query: asking.query.map(cut),
        taken: named(asking.taken),
    }
}

/// What a request may be taken for, in words: something of each.
fn named(taken: &[overrides::Taken]) -> Vec<String> {
    let chars_max = SHOWN_CHARS_MAX / taken.len().max(1);
    let words = |taken: &overrides::Taken| {
        let overrides::Taken { by, method, path, .. } = taken;
        cut(&format!("{by} asks for {method} {path}"), chars_max)
    };
    taken.iter().map(words).collect()
}

/// The beginning of a text, which shows that there is more.
fn cut(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// Resolves when nobody waits for the answer to a request any more, as far as that can be told
/// without reading on: a client of HTTP/1.1 may have left behind a body that nobody has read.
pub async fn gone(body: &mut BodyIn<'_>, responder: &mut Responder<'_>) {
    let left = async {
        if let End::Half = body.leaves().await {
            let _ = timeout(HALF_CLOSED, body.hangs_up()).await;
        }
    };
    tokio::select! {
        () = left => {}
        () = responder.gone() => {}
    }
}

/// The same where nothing of a connection is read: `look` says how its client has ended, if it has.
pub async fn left(mut look: impl FnMut() -> Option<End>) {
    let mut half: Option<Instant> = None;
    loop {
        match look() {
            Some(End::Closed) => return,
            Some(End::Half) if half.get_or_insert_with(Instant::now).elapsed() >= HALF_CLOSED => {
                return;
            }
            Some(End::Half) | None => sleep(LOOK).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(mark: &str, verdict: Verdict, span: Duration) -> Answer {
        let (question, by) = (QuestionId::random(), Principal::own());
        let until = Some(Instant::now() + span);
        Answer { verdict, mark: mark.to_owned(), question, by, until }
    }

    #[test]
    fn what_a_request_may_be_taken_for_is_shown_within_one_bound_and_something_of_each() {
        let taken = |length: usize| overrides::Taken {
            by: "X-HTTP-Method and X-Original-URL".to_owned(),
            method: "DELETE".to_owned(),
            path: format!("/{}", "ä".repeat(length)),
            query: None,
        };

        let shown = named(&(0..24).map(|_| taken(100_000)).collect::<Vec<_>>());

        assert_eq!(shown.len(), 24);
        let begin = "X-HTTP-Method and X-Original-URL asks for DELETE /ä";
        assert!(shown.iter().all(|text| text.starts_with(begin) && text.ends_with('…')));
        let chars: usize = shown.iter().map(|text| text.chars().count()).sum();
        assert!(chars <= SHOWN_CHARS_MAX + 24, "{chars}");
        let whole = "X-HTTP-Method and X-Original-URL asks for DELETE /ä";
        assert_eq!(named(&[taken(1)]), [whole]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_answer_about_a_rule_counts_until_its_time_is_over() {
        let standing = Answers::default();
        let minute = Duration::from_secs(60);
        standing.put(answer("one", Verdict::Allow, minute));
        standing.put(answer("one", Verdict::Deny, minute * 2));
        standing.put(answer("two", Verdict::Allow, minute));

        let verdict = |mark| standing.find(mark).map(|answer| answer.verdict);
        assert_eq!(verdict("one"), Some(Verdict::Deny));
        assert_eq!(verdict("two"), Some(Verdict::Allow));
        assert_eq!(verdict("three"), None);
        sleep(minute).await;
        assert_eq!((verdict("one"), verdict("two")), (Some(Verdict::Deny), None));
        sleep(minute).await;
        assert_eq!(verdict("one"), None);
    }
}
