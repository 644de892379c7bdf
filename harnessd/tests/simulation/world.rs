//! The world around simulated harnessds: a model, sandboxes, a proxyd, processes that die.
//!
//! Everything waits on the runtime's paused clock and decides by the world's one chance.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, pending};
use harnessd::context::Prompt;
use harnessd::hands::{Ended, Hand, HandError, Proxyd};
use harnessd::log::{Body, CallOutcome, ErrorKind, Failure, Log, Seam, Usage};
use harnessd::model::{Answer, Delta, Model, Sink};
use ipc::fault::{Code, Fault};
use ipc::id::{CallId, SessionId};
use ipc::sandbox::Execute;
use ipc::vault::{Head, ScrubReply, ScrubRequest};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::chance::Chance;
use super::valid;

/// Answers of the model before it only ends turns.
const LIVELY_ANSWERS: u64 = 25;

pub struct World {
    pub chance: Chance,
    /// Nothing goes wrong any more.
    pub calm: AtomicBool,
    pub answers: AtomicU64,
    pub complaints: Mutex<Vec<String>>,
    pub sandboxes: Mutex<Sandboxes>,
}

#[derive(Default)]
pub struct Sandboxes {
    /// Number of the journal.
    journal: u32,
    pub calls: HashMap<CallId, Call>,
    fences: HashMap<SessionId, u64>,
}

#[derive(Clone, Copy)]
pub struct Call {
    pub runs: u32,
    /// When it is over; none: it was lost.
    ends: Option<Instant>,
    cancelled: bool,
    /// The journal that knows it.
    journal: u32,
}

impl World {
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            chance: Chance::new(seed),
            calm: AtomicBool::new(false),
            answers: AtomicU64::new(0),
            complaints: Mutex::default(),
            sandboxes: Mutex::default(),
        })
    }

    pub fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    pub fn complain(&self, what: String) {
        self.complaints.lock().unwrap().push(what);
    }

    fn goes_wrong(&self, percent: u64) -> bool {
        !self.is_calm() && self.chance.now_and_then(percent)
    }

    /// sandboxd dies: what runs is lost; sometimes its disk is, too.
    pub fn sandboxd_dies(&self) {
        let loses_all = self.chance.now_and_then(30);
        let mut sandboxes = self.sandboxes.lock().unwrap();
        let now = Instant::now();
        for call in sandboxes.calls.values_mut() {
            call.ends = call.ends.filter(|ends| *ends <= now);
        }
        sandboxes.journal += u32::from(loses_all);
    }
}

/// The life of one process, and its clock.
pub struct Life {
    pub world: Arc<World>,
    /// Writes it will live to see.
    pub writes: AtomicI64,
    pub dies_after: bool,
    pub dead: CancellationToken,
    began: Instant,
    /// Seconds that its clock is off.
    off: AtomicI64,
}

impl Life {
    pub fn new(world: &Arc<World>) -> Arc<Self> {
        let writes = if world.is_calm() { i64::MAX } else { 1 + world.chance.below(40) as i64 };
        Arc::new(Self {
            world: Arc::clone(world),
            writes: AtomicI64::new(writes),
            dies_after: world.chance.now_and_then(50),
            dead: CancellationToken::new(),
            began: Instant::now(),
            off: AtomicI64::new(0),
        })
    }

    /// Waits a little now and then, so that others come first; then dies, if it is time.
    fn pass(&self, dies_here: bool) -> BoxFuture<'static, ()> {
        let pause = self.world.goes_wrong(30).then(|| self.world.chance.millis(20));
        let dead = self.dead.clone();
        if dies_here {
            dead.cancel();
        }
        async move {
            if dead.is_cancelled() {
                pending::<()>().await;
            }
            if let Some(pause) = pause {
                tokio::time::sleep(pause).await;
            }
        }
        .boxed()
    }
}

impl Seam for Life {
    fn before_write(&self) -> BoxFuture<'static, ()> {
        let left = self.writes.fetch_sub(1, Ordering::Relaxed);
        self.pass(left == 0 && !self.dies_after)
    }

    fn after_write(&self) -> BoxFuture<'static, ()> {
        self.pass(self.writes.load(Ordering::Relaxed) < 0 && self.dies_after)
    }

    fn now(&self) -> String {
        if self.world.goes_wrong(5) {
            let jump = self.world.chance.below(100_000) as i64 - 50_000;
            self.off.fetch_add(jump, Ordering::Relaxed);
        }
        let millis = self.began.elapsed().as_millis() as i64;
        let at = 1_800_000_000_000 + millis + self.off.load(Ordering::Relaxed) * 1000;
        let time = jiff::Timestamp::from_millisecond(at).unwrap();
        time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
    }
}

/// Checks each prompt and says whatever chance wants.
pub struct SimModel(pub Arc<World>);

impl Model for SimModel {
    fn ask<'a>(&'a self, prompt: Prompt, sink: Sink<'a>) -> BoxFuture<'a, Result<Answer, Failure>> {
        async move {
            let world = &self.0;
            let paused = prompt.messages.last().is_some_and(|m| m["role"] == "assistant");
            let server = |m: &Value| m["content"].to_string().contains("server_tool_use");
            let may_go_on = paused && prompt.messages.last().is_some_and(server);
            for problem in valid::problems(&prompt, may_go_on) {
                world.complain(format!("request: {problem}"));
            }
            tokio::time::sleep(world.chance.millis(300)).await;
            if let Some(failure) = self.failure(prompt.messages.len()) {
                return Err(failure);
            }
            let answer = self.answer(&prompt);
            for (block, _) in answer.blocks.iter().enumerate() {
                sink(Delta::Started { block, kind: harnessd::model::BlockKind::Text });
            }
            Ok(answer)
        }
        .boxed()
    }
}

impl SimModel {
    fn failure(&self, messages: usize) -> Option<Failure> {
        let world = &self.0;
        if !world.goes_wrong(15) {
            return None;
        }
        let fresh = |retryable| Failure::new(ErrorKind::ModelOverloaded, "chance", retryable);
        Some(match world.chance.below(8) {
            0 => fresh(false),
            1 => Failure { retry_after_ms: Some(1500), ..fresh(true) },
            2 if messages > 2 => Failure { overflow: true, ..fresh(false) },
            _ => fresh(true),
        })
    }

    fn answer(&self, prompt: &Prompt) -> Answer {
        let world = &self.0;
        let number = world.answers.fetch_add(1, Ordering::Relaxed);
        let text = |text: &str| json!({ "type": "text", "text": text });
        let asked: usize = prompt.messages.iter().map(|m| m.to_string().len()).sum();
        let usage = Usage { input_tokens: asked as u64, output_tokens: 9, ..Usage::default() };
        let mut answer = Answer { usage, ..Answer::default() };
        let mut reason = "end_turn";
        if number > LIVELY_ANSWERS || world.is_calm() {
            answer.blocks.push(text("enough"));
            answer.stop_reason = Some(reason.to_owned());
            return answer;
        }
        if world.chance.now_and_then(30) {
            let signature = if world.chance.now_and_then(80) { "s" } else { "" };
            let thinking = json!({ "type": "thinking", "thinking": "", "signature": signature });
            answer.blocks.push(thinking);
        }
        if world.chance.now_and_then(60) {
            answer.blocks.push(text(world.chance.one_of(&["well", "so", " ", ""])));
        }
        match world.chance.below(20) {
            0 => {
                reason = "pause_turn";
                answer
                    .blocks
                    .push(json!({ "type": "server_tool_use", "id": format!("srv_{number}"),
                    "name": "web_search", "input": {} }));
            }
            1 => reason = "refusal",
            2 => reason = "model_context_window_exceeded",
            3 => (answer.cut, reason) = (true, "max_tokens"),
            4..=13 => {
                reason = "tool_use";
                self.uses(number, &mut answer);
                answer.cut = world.chance.now_and_then(5);
            }
            _ => {}
        }
        // A turn that was paused goes on with the result.
        let last = prompt.messages.last().filter(|m| m["role"] == "assistant");
        let searched = last.and_then(|m| m["content"].as_array()).and_then(|b| b.last());
        if let Some(id) = searched.filter(|b| b["type"] == "server_tool_use").map(|b| &b["id"]) {
            let result = json!({ "type": "web_search_tool_result", "tool_use_id": id,
                "content": [] });
            answer.blocks.insert(0, result);
        }
        answer.stop_reason = Some(reason.to_owned());
        answer
    }

    /// Up to four calls, some of tools that ask, are the client's, or do not exist; the ids repeat.
    fn uses(&self, number: u64, answer: &mut Answer) {
        let chance = &self.0.chance;
        for place in 0..=chance.below(4) {
            let name = chance.one_of(&["bash", "bash", "read", "write", "yours", "unknown"]);
            let mut input = json!({ "command": format!("{number}.{place}") });
            if chance.now_and_then(3) {
                input = json!("no object");
            }
            answer.blocks.push(json!({ "type": "tool_use", "id": format!("toolu_{place}"),
                "name": name, "input": input }));
        }
    }
}

/// One process's way to the sandboxes.
pub struct SimHand {
    pub life: Arc<Life>,
    pub log: Log,
}

impl Hand for SimHand {
    fn journal(&self) -> BoxFuture<'_, Result<String, Fault>> {
        async {
            tokio::time::sleep(self.life.world.chance.millis(3)).await;
            if self.life.world.goes_wrong(3) {
                return Err(Fault::new(Code::Unavailable, "sandboxd is away"));
            }
            Ok(format!("journal-{}", self.life.world.sandboxes.lock().unwrap().journal))
        }
        .boxed()
    }

    fn execute(
        &self,
        call: Execute,
        cancel: CancellationToken,
    ) -> BoxFuture<'_, Result<Ended, HandError>> {
        async move {
            tokio::time::sleep(self.life.world.chance.millis(5)).await;
            if self.life.dead.is_cancelled() {
                pending::<()>().await;
            }
            self.check_started(&call).await;
            if let Some(outcome) = self.begin(&call, cancel.is_cancelled()) {
                return outcome;
            }
            loop {
                let known = self.life.world.sandboxes.lock().unwrap().calls[&call.call];
                let Some(ends) = known.ends else {
                    return Ok(Ended::failed(CallOutcome::OutcomeUnknown, "lost"));
                };
                if known.cancelled {
                    return Ok(Ended::failed(CallOutcome::Cancelled, "cancelled"));
                }
                if ends <= Instant::now() {
                    return Ok(Ended {
                        is_error: false,
                        ..Ended::failed(CallOutcome::Finished, "done")
                    });
                }
                // Looks again from time to time: the sandbox may be lost meanwhile.
                let look = (Instant::now() + Duration::from_millis(40)).min(ends);
                tokio::select! {
                    biased;
                    () = cancel.cancelled(), if !known.cancelled => {
                        let mut sandboxes = self.life.world.sandboxes.lock().unwrap();
                        if let Some(known) = sandboxes.calls.get_mut(&call.call) {
                            known.cancelled = true;
                        }
                    }
                    () = tokio::time::sleep_until(look) => {}
                }
            }
        }
        .boxed()
    }

    fn forget<'a>(&'a self, _: &'a SessionId) -> BoxFuture<'a, Result<(), Fault>> {
        async { Ok(()) }.boxed()
    }
}

impl SimHand {
    /// Nothing is sent that the log does not know to be started.
    async fn check_started(&self, call: &Execute) {
        let kinds = &["tool_started"];
        let events = self.log.of_kinds(&call.session, kinds, 0, u64::MAX).await.unwrap();
        let started = |b: &Body| matches!(b, Body::ToolStarted { call: c, .. } if *c == call.call);
        if !events.iter().any(|event| started(&event.body)) {
            self.life.world.complain(format!("{} was sent before it was started", call.call));
        }
    }

    /// As sandboxd does it: joins, or says that nothing is known, or begins.
    fn begin(&self, call: &Execute, cancelled: bool) -> Option<Result<Ended, HandError>> {
        let world = &self.life.world;
        let length = world.chance.millis(400);
        let mut sandboxes = world.sandboxes.lock().unwrap();
        let fence = sandboxes.fences.entry(call.session.clone()).or_default();
        if call.fence < *fence {
            let fault = Fault::new(Code::Conflict, "a higher fencing number was here");
            return Some(Err(HandError::Conflict(fault)));
        }
        *fence = call.fence;
        let journal = sandboxes.journal;
        let known = sandboxes.calls.get(&call.call).copied();
        if known.is_some_and(|known| known.journal == journal) {
            return None;
        }
        if call.journal.as_deref() != Some(&format!("journal-{journal}")) {
            let text = "another journal may know";
            return Some(Ok(Ended::failed(CallOutcome::OutcomeUnknown, text)));
        }
        if cancelled {
            return Some(Ok(Ended::failed(CallOutcome::Cancelled, "never began")));
        }
        let runs = known.map_or(0, |known| known.runs) + 1;
        let ends = Some(Instant::now() + length);
        sandboxes.calls.insert(call.call.clone(), Call { runs, ends, cancelled: false, journal });
        None
    }
}

/// Finds no secret and keeps no head.
pub struct SimProxyd;

impl Proxyd for SimProxyd {
    fn scrub(&self, request: ScrubRequest) -> BoxFuture<'_, Result<ScrubReply, Fault>> {
        async { Ok(ScrubReply { texts: request.texts, found: 0 }) }.boxed()
    }

    fn head(&self, _: Head) -> BoxFuture<'_, Result<(), Fault>> {
        async { Ok(()) }.boxed()
    }
}
