//! Asks the model once and appends what came of it.
//!
//! The answer is appended whole, in one append with the end of its request, or not at all. While
//! it is made, its pieces go to live listeners under the ids that its events will have.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use ipc::id::CallId;
use serde_json::Value;

use super::*;
use crate::context::Prompt;
use crate::engine::{Part, Preview};
use crate::log::{HandKind, Permission, ToolUse};
use crate::model::{Answer, BlockKind, Delta, Price, Sink};

impl Run {
    pub(super) async fn call_model(&mut self, wait_ms: u64) -> Result<(), WakeError> {
        if !self.can_count_costs() {
            return self.stop_uncounted().await;
        }
        if self.must_list_mcp() {
            return self.list_mcp().await;
        }
        if wait_ms > 0 && !self.wait(Duration::from_millis(wait_ms)).await? {
            return Ok(());
        }
        let profile = self.profile();
        if let Some(upto) = profile.summary_due(&self.state) {
            return self.summarise(profile, upto).await;
        }
        let from = profile.cut(&self.state).from;
        let request = self.begin_request(profile, from, false).await?;
        self.answer(profile, request).await
    }

    /// Appends what takes client events in, and the beginning of the request that follows from it
    /// in the same write: the first token waits for one sync less.
    pub(super) async fn append_and_ask(
        &mut self,
        mut batch: Vec<NewEvent>,
    ) -> Result<(), WakeError> {
        let mut ahead = self.state.clone();
        for event in &batch {
            let (seq, id) = (ahead.seq + 1, event.id.clone());
            ahead.take(&Event { seq, id, time: String::new(), body: event.body.clone() });
        }
        let profile = self.profile();
        // MCP servers are asked between the two.
        let asks = self.agent.mcp.is_empty()
            && next_step(&ahead) == Step::CallModel { wait_ms: 0 }
            && self.can_count_costs();
        if !asks || ahead.is_rescheduling() || profile.summary_due(&ahead).is_some() {
            return Ok(self.append(batch).await?);
        }
        let started = self.started(profile, profile.cut(&ahead).from, false);
        let request = started.id.clone();
        batch.push(started);
        // Decided for a log that ends here: if it has grown, the next step decides anew.
        let last = Some(self.state.seq);
        let guard = Guard { fence: Some(self.fence), last, ..Guard::default() };
        match self.parts.log.append(&self.session, guard, batch).await {
            Ok(_) => {}
            Err(LogError::Moved(_)) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        self.catch_up().await?;
        self.answer(profile, request).await
    }

    /// Asks for the answer of a request that has begun, and appends what came of it.
    async fn answer(&mut self, profile: Profile, request: String) -> Result<(), WakeError> {
        let prompt = self.prompt(profile.cut(&self.state)).await?;
        let listening = Listening::new(&self.parts, &self.session, self.state.seq);
        let outcome = self.ask(prompt, &|delta| listening.take(delta)).await?;
        match outcome {
            Ok(answer) => {
                let price = self.parts.models.price(&self.agent.model);
                let batch = listening.events(answer, &request, &self.agent, price);
                Ok(self.append(batch).await?)
            }
            Err(failure) => {
                listening.dropped();
                let mut ended = RequestEnded::new(request);
                ended.failure = Some(failure);
                ended.duration_ms = listening.elapsed_ms();
                self.request_failed(ended).await
            }
        }
    }

    /// Whether a budget can be kept: what has no price cannot be counted.
    fn can_count_costs(&self) -> bool {
        let priced = self.parts.models.price(&self.agent.model).is_some();
        priced || self.state.spending.budget_cents().is_none()
    }

    /// Ends a turn whose model had a price when the session got its budget, and has none now.
    async fn stop_uncounted(&mut self) -> Result<(), WakeError> {
        let message = format!(
            "the session has a budget, and the model {:?} has no price any more: add \
             price-usd-per-million to its table in harnessd.toml, or remove the budget",
            self.agent.model
        );
        let (error, retry) = (ErrorKind::Billing, Retry::Exhausted);
        let error = Body::Error { error, message, retry, mcp_server: None };
        self.idle(vec![error.into()], StopReason::BudgetReached, None).await
    }

    /// The context profile in force: the session's own, else that of its model.
    pub(super) fn profile(&self) -> Profile {
        let chosen = self.state.profile.as_deref().and_then(|name| name.parse().ok());
        chosen.unwrap_or_else(|| self.parts.models.profile(&self.agent.model))
    }

    fn started(&self, profile: Profile, from: u64, summary: bool) -> NewEvent {
        NewEvent::new(Body::ModelRequestStarted {
            model: self.agent.model.clone(),
            profile: profile.to_string(),
            from,
            summary,
        })
    }

    /// Appends that the model is about to be asked; gives the id of that event.
    pub(super) async fn begin_request(
        &mut self,
        profile: Profile,
        from: u64,
        summary: bool,
    ) -> Result<String, WakeError> {
        let started = self.started(profile, from, summary);
        let request = started.id.clone();
        let mut batch = Vec::new();
        if self.state.is_rescheduling() {
            batch.push(Body::StatusRunning {}.into());
        }
        batch.push(started);
        self.append(batch).await?;
        Ok(request)
    }

    pub(super) async fn ask(
        &self,
        prompt: Prompt,
        sink: Sink<'_>,
    ) -> Result<Result<Answer, Failure>, WakeError> {
        let name = &self.agent.model;
        let Some(model) = self.parts.models.find(name) else {
            let known = self.parts.models.names().join(", ");
            let message =
                format!("model {name:?} is not in harnessd's configuration, which has: {known}");
            return Ok(Err(Failure::new(ErrorKind::ModelRequestFailed, message, false)));
        };
        tokio::select! {
            biased;
            answer = model.ask(prompt, sink) => Ok(answer),
            outcome = self.interrupted() => {
                outcome?;
                let message = "interrupted by the client";
                Ok(Err(Failure::new(ErrorKind::ModelRequestFailed, message, false)))
            }
            () = self.parts.stop.cancelled() => Err(WakeError::Stopped),
        }
    }

    /// Appends the failure, and what follows from it.
    async fn request_failed(&mut self, ended: RequestEnded) -> Result<(), WakeError> {
        self.catch_up().await?;
        let interrupted = self.state.is_interrupted();
        let wait = step::wait_after(&self.state, &ended);
        let failure = ended.failure.clone();
        let mut batch: Vec<NewEvent> = vec![Body::ModelRequestEnded(ended).into()];
        // One that is made again at once with less is no news to anybody.
        let quiet = |failure: &Failure| interrupted || (failure.overflow && wait.is_some());
        if let Some(failure) = failure.filter(|failure| !quiet(failure)) {
            tracing::warn!(
                session = %self.session,
                retry_in_ms = wait,
                error = ?failure.error,
                "model request failed"
            );
            let retry = if wait.is_some() { Retry::Retrying } else { Retry::Exhausted };
            let Failure { error, message, .. } = failure;
            batch.push(Body::Error { error, message, retry, mcp_server: None }.into());
            if wait.is_some() {
                batch.push(Body::StatusRescheduled {}.into());
            }
        }
        Ok(self.append(batch).await?)
    }

    /// Waits, and up to a quarter longer, so that many sessions do not come back as one; unless
    /// the client interrupts: then false.
    pub(super) async fn wait(&self, time: Duration) -> Result<bool, WakeError> {
        let time = time + time.mul_f64(f64::from(self.spread()) / 1024.0);
        tokio::select! {
            biased;
            () = tokio::time::sleep(time) => Ok(true),
            outcome = self.interrupted() => {
                outcome?;
                Ok(false)
            }
            () = self.parts.stop.cancelled() => Err(WakeError::Stopped),
        }
    }

    /// Another number for each session and try (FNV-1a), and always the same for the same.
    fn spread(&self) -> u8 {
        let seq = self.state.seq.to_le_bytes();
        let bytes = self.session.as_str().bytes().chain(seq);
        let sum = bytes
            .fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        sum.to_le_bytes()[3]
    }
}

/// An answer as it comes: previews for listeners, ids for the events to be.
pub(super) struct Listening {
    parts: Arc<Parts>,
    session: SessionId,
    /// The last event when the request began.
    after: u64,
    begun: Instant,
    heard: Mutex<Heard>,
}

#[derive(Default)]
struct Heard {
    first_token_ms: Option<u64>,
    /// Event ids by the number of their first block.
    ids: HashMap<usize, String>,
    /// For each text block: the block its event begins with.
    heads: HashMap<usize, usize>,
    /// The kind of the latest block, and the block its event begins with.
    latest: Option<(BlockKind, usize)>,
}

impl Listening {
    fn new(parts: &Arc<Parts>, session: &SessionId, after: u64) -> Self {
        Self {
            parts: Arc::clone(parts),
            session: session.clone(),
            after,
            begun: Instant::now(),
            heard: Mutex::default(),
        }
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn heard(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn take(&self, delta: Delta) {
        let ms = self.elapsed_ms();
        let mut heard = self.heard();
        heard.first_token_ms.get_or_insert(ms);
        let (event, part) = match delta {
            Delta::Started { block, kind } => {
                // Neighbouring blocks of one kind become one event; each tool use is its own.
                let joined = heard.latest.filter(|(k, _)| *k == kind && kind != BlockKind::Tool);
                let head = joined.map_or(block, |(_, head)| head);
                heard.latest = Some((kind, head));
                heard.heads.insert(block, head);
                if head != block {
                    return;
                }
                let id = crate::log::event::new_event_id();
                heard.ids.insert(block, id.clone());
                match kind {
                    BlockKind::Text => (id, Part::MessageStarted),
                    BlockKind::Other => (id, Part::ThinkingStarted),
                    BlockKind::Tool => return,
                }
            }
            Delta::Text { block, text } => {
                let Some(head) = heard.heads.get(&block).copied() else { return };
                let Some(id) = heard.ids.get(&head).cloned() else { return };
                (id, Part::Text { index: block - head, text })
            }
        };
        drop(heard);
        self.publish(event, part);
    }

    /// No answer will come: closes the previews.
    fn dropped(&self) {
        let ids: Vec<String> = self.heard().ids.values().cloned().collect();
        for id in ids {
            self.publish(id, Part::Dropped);
        }
    }

    fn publish(&self, event: String, part: Part) {
        self.parts.previews.publish(&self.session, Preview { event, part, after: self.after });
    }

    /// The events of a whole answer, the end of the request last.
    fn events(
        &self,
        answer: Answer,
        request: &str,
        agent: &Agent,
        price: Option<Price>,
    ) -> Vec<NewEvent> {
        let mut heard = self.heard();
        let mut batch: Vec<NewEvent> = Vec::new();
        for (number, block) in answer.blocks.into_iter().enumerate() {
            let id = heard.ids.remove(&number);
            let kind = block["type"].as_str().unwrap_or_default();
            let joined = match (kind, batch.last_mut().map(|e| &mut e.body)) {
                ("text", Some(Body::AgentMessage { content, .. })) => Some(content),
                ("tool_use", _) | ("text", _) => None,
                (_, Some(Body::AgentThinking { blocks, .. })) => Some(blocks),
                _ => None,
            };
            if let Some(blocks) = joined {
                blocks.push(block);
                continue;
            }
            let request = request.to_owned();
            let body = match kind {
                "text" => Body::AgentMessage { request, content: vec![block] },
                "tool_use" => Body::ToolUse(tool_use(block, request, agent)),
                _ => Body::AgentThinking { request, blocks: vec![block] },
            };
            let mut event = NewEvent::new(body);
            event.id = id.unwrap_or(event.id);
            batch.push(event);
        }
        let ended = RequestEnded {
            request: request.to_owned(),
            failure: None,
            model: answer.model,
            message: answer.message,
            stop_reason: answer.stop_reason,
            stop_details: answer.stop_details,
            cut: answer.cut,
            usage: answer.usage,
            cost_nano_usd: price.map(|price| price.of(&answer.usage)),
            first_token_ms: heard.first_token_ms,
            duration_ms: self.elapsed_ms(),
        };
        batch.push(Body::ModelRequestEnded(ended).into());
        batch
    }
}

fn tool_use(block: Value, request: String, agent: &Agent) -> ToolUse {
    let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
    let name = text("name");
    let mcp = agent.tools.iter().find_map(|tool| match tool {
        Tool::Mcp { name: known, target, .. } if *known == name => Some(target.clone()),
        _ => None,
    });
    let (hand, permission, reason) = match agent.tools.iter().find(|t| t.name() == name) {
        _ if !block["input"].is_object() => {
            let reason = "the input of a tool must be a JSON object".to_owned();
            (HandKind::Sandbox, Permission::Deny, Some(reason))
        }
        Some(Tool::Sandbox { permission, .. }) => {
            let reason = (*permission == Permission::Deny)
                .then(|| format!("the tool {name} is not allowed in this session"));
            (HandKind::Sandbox, *permission, reason)
        }
        Some(Tool::Custom { .. }) => (HandKind::Client, Permission::Allow, None),
        Some(Tool::Mcp { permission, .. }) => (HandKind::Mcp, *permission, None),
        None => {
            let known: Vec<_> = agent.tools.iter().map(Tool::name).collect();
            let reason = format!("there is no tool {name:?}; there are: {}", known.join(", "));
            (HandKind::Sandbox, Permission::Deny, Some(reason))
        }
    };
    ToolUse {
        request,
        call: CallId::random(),
        model_id: text("id"),
        name,
        input: block["input"].clone(),
        hand,
        permission,
        reason,
        mcp,
    }
}
