//! One tool call from request to receipt. The file to read first.
//!
//! [`Service::execute`] lets a caller join the call of that id or begins it as a task of its own,
//! so that a caller who leaves takes nothing with it. [`Service::carry_out`] is the call itself,
//! from the journal's word to the journaled receipt. What a command did badly is a result; a
//! [`Fault`] is for what the caller did badly and for a journal that cannot be written.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::id::{CallId, SandboxId};
use ipc::peer::Principal;
use ipc::sandbox::{CallReport, Execute, Outcome, Receipt};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cell::Peak;
use crate::exhausted::Counted;
use crate::journal::{Admitted, Fenced, Journal, JournalError, Record, Start};
use crate::owner::Owners;
use crate::plan::{UPLOADS, WORKSPACE};
use crate::receipt::{self, FOREIGN, LOST, millis, now};
use crate::sandbox::{InUse, Key, Sandboxes, Wanted};
use crate::tools::files::{self, Action};
use crate::tools::{self, Tool, bash};
use crate::workspace;

/// How often a call looks for another sandbox when the one it waited for ended.
const SEAT_TRIES_MAX: u32 = 3;
/// A search stops by itself this much before its call would be timed out.
const SEARCH_MARGIN: Duration = Duration::from_secs(2);

/// First and longest pause between two tries to store a receipt.
const STORE_PAUSE_MIN: Duration = Duration::from_millis(250);
const STORE_PAUSE_MAX: Duration = Duration::from_secs(10);
/// What to do about a journal that cannot be written.
const ROOM: &str = "make room on the file system of sandboxd's state directory, which the \
    workspaces lie on too, then try again";

/// What serves calls.
#[derive(Debug)]
pub struct Service {
    pub journal: Journal,
    pub sandboxes: Arc<Sandboxes>,
    pub owners: Owners,
    calls: Mutex<HashMap<CallId, Arc<Call>>>,
}

/// A call that runs, or whose receipt could not be stored.
#[derive(Debug)]
struct Call {
    request: Execute,
    digest: String,
    started_at: String,
    begun: Instant,
    sandbox: std::sync::OnceLock<SandboxId>,
    cancel: CancellationToken,
    ended: watch::Sender<Option<Result<Receipt, Fault>>>,
}

/// A call's place in its sandbox.
struct Seat {
    in_use: InUse,
    provision_us: Option<u64>,
    /// For `bash`: the shell, which runs one command at a time.
    shell: Option<OwnedMutexGuard<bash::Session>>,
}

impl Service {
    pub fn new(journal: Journal, sandboxes: Arc<Sandboxes>, owners: Owners) -> Self {
        Self { journal, sandboxes, owners, calls: Mutex::default() }
    }

    /// Runs a call, joins it while it runs, or gives its receipt.
    pub async fn execute(
        self: &Arc<Self>,
        peer: &Principal,
        request: Execute,
    ) -> Result<Receipt, Fault> {
        if !self.owners.speaks_for(peer, &request.owner) {
            let text = format!("{peer} may not execute for {}", request.owner);
            return Err(Fault::new(Code::Denied, text)
                .with_hint("only harnessd's user speaks for others: see trusted-uids"));
        }
        let mut ended = self.join_or_begin(request)?.ended.subscribe();
        let outcome = ended.wait_for(Option::is_some).await.map(|outcome| outcome.clone());
        outcome.ok().flatten().unwrap_or_else(|| {
            Err(Fault::new(Code::Internal, "the call broke off without an outcome"))
        })
    }

    fn join_or_begin(self: &Arc<Self>, request: Execute) -> Result<Arc<Call>, Fault> {
        let digest = digest(&request);
        let mut calls = self.calls();
        if let Some(call) = calls.get(&request.call) {
            if call.digest != digest {
                return Err(conflict(&request.call));
            }
            return Ok(Arc::clone(call));
        }
        let call = Arc::new(Call {
            digest,
            started_at: now(),
            begun: Instant::now(),
            sandbox: std::sync::OnceLock::new(),
            cancel: CancellationToken::new(),
            ended: watch::Sender::new(None),
            request,
        });
        calls.insert(call.request.call.clone(), Arc::clone(&call));
        let (service, begun) = (Arc::clone(self), Arc::clone(&call));
        tokio::spawn(async move {
            let task = {
                let (service, begun) = (Arc::clone(&service), Arc::clone(&begun));
                tokio::spawn(async move { service.carry_out(&begun).await })
            };
            // A panic of ours must not leave callers waiting; the journal knows how far it came.
            let broken = |_| (Err(Fault::new(Code::Internal, "the call broke off: a bug")), true);
            let (outcome, stored) = task.await.unwrap_or_else(broken);
            log_end(&begun, &outcome);
            // Told before it is forgotten: whoever asks in between must find one of the two.
            begun.ended.send_replace(Some(outcome.clone()));
            if let (false, Ok(receipt)) = (stored, outcome) {
                service.store_late(&receipt).await;
            }
            service.calls().remove(&begun.request.call);
        });
        Ok(call)
    }

    /// The call itself. The second value says that the journal, or nobody, needs to know it now;
    /// else it stays in memory.
    async fn carry_out(self: &Arc<Self>, call: &Call) -> (Result<Receipt, Fault>, bool) {
        let request = &call.request;

        // The journal is asked first, and the holder's fencing number with it.
        let known =
            self.journal.admit(&request.call, &request.session, &request.owner, request.fence);
        match known.await {
            Ok(Admitted::Known(record)) => return (self.recorded(call, *record), true),
            Ok(Admitted::Spent) => return (Err(spent(call)), true),
            Ok(Admitted::New(fenced)) => match check_fence(call, &fenced) {
                Ok(()) => {}
                Err(fault) => return (Err(fault), true),
            },
            Err(error) => return (self.not_journaled(call, &error).await, true),
        }
        if request.journal.as_deref().is_some_and(|asked| asked != self.journal.identity()) {
            return (Ok(self.receipt(call, Outcome::OutcomeUnknown, FOREIGN)), true);
        }

        // What cannot begin is refused: it may be tried again under the same id.
        let tool = match tools::parse(&request.tool, &request.input) {
            Ok(tool) => tool,
            Err(text) => return (Ok(self.receipt(call, Outcome::Refused, &text)), true),
        };
        let seat = tokio::select! {
            () = call.cancel.cancelled() => {
                let text = format!("{}: cancelled before it began", request.tool);
                return (Ok(self.receipt(call, Outcome::Cancelled, &text)), true);
            }
            seat = self.take_seat(call, &tool) => match seat {
                Ok(seat) => seat,
                Err(fault) => {
                    let text = format!("{}: no sandbox: {}", request.tool, fault.lines());
                    return (Ok(self.receipt(call, Outcome::Refused, &text)), true);
                }
            },
        };

        // From here on nobody may run it again.
        let start = Start {
            call: request.call.clone(),
            session: request.session.clone(),
            owner: request.owner.clone(),
            digest: call.digest.clone(),
            tool: request.tool.clone(),
            started_at: call.started_at.clone(),
            fence: request.fence,
        };
        match self.journal.start(start).await {
            Ok(fenced) => match check_fence(call, &fenced) {
                Ok(()) => {}
                Err(fault) => return (Err(fault), true),
            },
            Err(error) => return (self.not_journaled(call, &error).await, true),
        }
        let receipt = self.run(call, seat, tool).await;
        match self.journal.finish(&receipt).await {
            Ok(()) => (Ok(receipt), true),
            Err(error) => {
                tracing::error!(call = %request.call, %error, "a receipt is in memory only");
                (Ok(receipt), false)
            }
        }
    }

    /// The journal could not be written, a full disk for one. Where it can still be read and does
    /// not know the call, nothing of it was done and it may be tried again.
    async fn not_journaled(&self, call: &Call, error: &JournalError) -> Result<Receipt, Fault> {
        match self.journal.lookup(&call.request.call).await {
            Ok(None) => {
                let text = format!("{}: nothing was run: {error}\n{ROOM}", call.request.tool);
                Ok(self.receipt(call, Outcome::Refused, &text))
            }
            Ok(Some(record)) => self.recorded(call, record),
            Err(_) => Err(journal_fault(error)),
        }
    }

    /// Stores a receipt that could not be stored when it was given out. Until then it is in memory
    /// and the call is found there; if this process ends first, its outcome counts as unknown.
    async fn store_late(&self, receipt: &Receipt) {
        let mut pause = STORE_PAUSE_MIN;
        loop {
            tokio::time::sleep(pause).await;
            match self.journal.finish(receipt).await {
                Ok(()) | Err(JournalError::Ended) => return,
                Err(_) => pause = (pause * 2).min(STORE_PAUSE_MAX),
            }
        }
    }

    /// Finds or makes the session's sandbox and, for `bash`, waits for its shell.
    async fn take_seat(&self, call: &Call, tool: &Tool) -> Result<Seat, Fault> {
        let request = &call.request;
        for _ in 0..SEAT_TRIES_MAX {
            let workspace = match &request.workspace {
                None => self.sandboxes.workspaces.of_session(&request.session)?,
                Some(id) => self.registered(id, &request.owner).await?,
            };
            let key = Key {
                session: request.session.clone(),
                environment: request.environment.clone(),
                workspace: request.workspace.clone(),
            };
            let wanted = Wanted {
                owner: request.owner.clone(),
                environment: request.environment.clone(),
                session: Some(request.session.clone()),
                workspace: Some(workspace),
            };
            let (in_use, provision_us) =
                self.sandboxes.for_call(&key, wanted, &request.call).await?;
            if matches!(tool, Tool::File(_)) {
                return Ok(Seat { in_use, provision_us, shell: None });
            }
            let shell = Arc::clone(&in_use.sandbox.shell);
            tokio::select! {
                () = in_use.sandbox.gone.cancelled() => {}
                shell = shell.lock_owned() => {
                    return Ok(Seat { in_use, provision_us, shell: Some(shell) });
                }
            }
        }
        Err(Fault::new(Code::Unavailable, "the session's sandboxes end as soon as they are made"))
    }

    async fn registered(
        &self,
        id: &ipc::id::WorkspaceId,
        owner: &str,
    ) -> Result<workspace::Workspace, Fault> {
        let known = self.journal.workspace(id).await.map_err(|e| journal_fault(&e))?;
        match known {
            Some(known) if known.owner == owner => self.sandboxes.workspaces.verify(&known),
            _ => Err(Fault::new(Code::NotFound, format!("no workspace {id} of {owner}"))),
        }
    }

    /// Runs the tool in its seat and says what came of it.
    async fn run(&self, call: &Call, seat: Seat, tool: Tool) -> Receipt {
        let sandbox = &seat.in_use.sandbox;
        // Set once: a call has one seat.
        let _ = call.sandbox.set(sandbox.id.clone());
        sandbox.lease().call_started(&call.request.call).await;
        let timeout = sandbox.table.tool_timeout;
        let counted = Counted::now(&sandbox.cell);
        let mut peak = Peak::default();
        let mut receipt = self.receipt(call, Outcome::Finished, tools::NO_OUTPUT);
        match (tool, seat.shell) {
            (Tool::Bash(input), Some(mut shell)) => {
                let place = bash::Place {
                    cell: &sandbox.cell,
                    env: &sandbox.env,
                    call: call.request.call.as_str(),
                    timeout_max: timeout,
                    cancel: &call.cancel,
                };
                let ran = tokio::select! {
                    // The command's own end is seen first, so that one that ended counts as such.
                    biased;
                    ran = bash::run(&mut shell, &place, input) => Some(ran),
                    () = sandbox.gone.cancelled() => None,
                };
                match ran {
                    Some(mut ran) => {
                        peak = std::mem::take(&mut ran.peak);
                        receipt::fill_from_command(&mut receipt, ran);
                    }
                    None => receipt::lose(&mut receipt),
                }
            }
            (Tool::File(action), _) => {
                tokio::select! {
                    biased;
                    () = perform(&mut receipt, &seat.in_use, action, timeout) => {}
                    () = call.cancel.cancelled() => {
                        let text = format!("{}: cancelled", call.request.tool);
                        receipt::state(&mut receipt, Outcome::Cancelled, &text);
                    }
                    () = sandbox.gone.cancelled() => receipt::lose(&mut receipt),
                }
            }
            (Tool::Bash(_), None) => receipt::lose(&mut receipt),
        }
        if receipt.outcome == Outcome::OutcomeUnknown {
            sandbox.close();
        }
        counted.tell(&mut receipt, &sandbox.cell, &peak, &sandbox.table);
        // What it waits for from here on is not its own.
        receipt.duration_ms = millis(call.begun.elapsed());
        let ended = receipt.exit_code.is_some()
            || receipt.outcome == Outcome::TimedOut
            || receipt.tool == "web_fetch";
        if receipt.is_error && ended {
            let lines = sandbox.lease().refusals(&call.request.call).await;
            receipt::add_refusals(&mut receipt, &lines);
        }
        receipt.sandbox = Some(sandbox.id.clone());
        receipt.provision_us = seat.provision_us;
        receipt.layers = sandbox.layers();
        sandbox.lease().call_finished(&call.request.call).await;
        receipt
    }

    /// What the journal holds of a call that is asked for again.
    fn recorded(&self, call: &Call, record: Record) -> Result<Receipt, Fault> {
        if record.owner != call.request.owner || record.digest != call.digest {
            return Err(conflict(&call.request.call));
        }
        // Started, not finished and not running here: its receipt could not be stored.
        Ok(record.receipt.unwrap_or_else(|| self.receipt(call, Outcome::OutcomeUnknown, LOST)))
    }

    /// Says at once how a call stands.
    pub async fn report(&self, peer: &Principal, id: &CallId) -> Result<CallReport, Fault> {
        let unknown = || CallReport::Unknown { journal: self.journal.identity().to_owned() };
        let running = self.calls().get(id).cloned();
        if let Some(call) = running {
            if !self.owners.speaks_for(peer, &call.request.owner) {
                return Ok(unknown());
            }
            let ended = call.ended.borrow().clone();
            return Ok(match ended {
                Some(Ok(receipt)) => CallReport::Ended { receipt: Box::new(receipt) },
                Some(Err(_)) => unknown(),
                None => CallReport::Running {
                    sandbox: call.sandbox.get().cloned(),
                    started_at: call.started_at.clone(),
                },
            });
        }
        let record = self.journal.lookup(id).await.map_err(|e| journal_fault(&e))?;
        Ok(match record {
            Some(Record { owner, receipt: Some(receipt), .. })
                if self.owners.speaks_for(peer, &owner) =>
            {
                CallReport::Ended { receipt: Box::new(receipt) }
            }
            _ => unknown(),
        })
    }

    /// Ends a running call; one that has ended stays as it is.
    pub async fn cancel(&self, peer: &Principal, id: &CallId) -> Result<(), Fault> {
        let running = self.calls().get(id).cloned();
        if let Some(call) = running.filter(|call| self.owners.speaks_for(peer, &call.request.owner))
        {
            call.cancel.cancel();
            return Ok(());
        }
        match self.report(peer, id).await? {
            CallReport::Ended { .. } => Ok(()),
            _ => Err(Fault::new(Code::NotFound, format!("no call {id}"))),
        }
    }

    /// Waits until no call runs, up to `patience`.
    pub async fn quiet(&self, patience: Duration) {
        let running: Vec<_> = self.calls().values().cloned().collect();
        let all = async {
            for call in running {
                let _ = call.ended.subscribe().wait_for(Option::is_some).await;
            }
        };
        let _ = tokio::time::timeout(patience, all).await;
    }

    fn calls(&self) -> std::sync::MutexGuard<'_, HashMap<CallId, Arc<Call>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A receipt of this call with nothing in it but a text.
    fn receipt(&self, call: &Call, outcome: Outcome, text: &str) -> Receipt {
        let Execute { call: id, session, tool, .. } = &call.request;
        let mut receipt =
            receipt::blank(id, session, tool, &call.started_at, self.journal.identity());
        receipt.duration_ms = millis(call.begun.elapsed());
        receipt::state(&mut receipt, outcome, text);
        receipt
    }
}

/// Performs a file tool inside the sandbox.
async fn perform(receipt: &mut Receipt, seat: &InUse, action: Action, timeout: Duration) {
    let table = &seat.sandbox.table;
    let mut roots = vec![WORKSPACE.into(), "/tmp".into(), UPLOADS.into()];
    roots.extend(table.mounts.iter().map(|mount| mount.target.clone().into()));
    let margin = SEARCH_MARGIN.min(timeout / 2);
    let request = files::Request { roots, search_ms_max: millis(timeout - margin), action };
    let payload = request.encode(&[]);
    let call = tokio::time::timeout(timeout, seat.sandbox.cell.counted_file_call(&payload));
    let tool = receipt.tool.clone();
    match call.await {
        Ok(Ok((reply, usage))) => match files::decode_reply(&reply) {
            Ok(reply) => {
                receipt.usage = Some(usage);
                receipt.output_bytes = reply.content.iter().map(receipt::content_bytes).sum();
                receipt.content = reply.content;
                receipt.is_error = reply.is_error;
            }
            Err(_) => {
                receipt::state(receipt, Outcome::Finished, &format!("{tool}: it gave no answer"))
            }
        },
        Ok(Err(crate::cell::CellError::Lost | crate::cell::CellError::Zygote)) => {
            receipt::lose(receipt)
        }
        Ok(Err(error)) => receipt::state(receipt, Outcome::Finished, &format!("{tool}: {error}")),
        Err(_) => {
            let text = format!("{tool}: timed out after {}s", timeout.as_secs_f64());
            receipt::state(receipt, Outcome::TimedOut, &text);
        }
    }
}

fn check_fence(call: &Call, fenced: &Fenced) -> Result<(), Fault> {
    let session = &call.request.session;
    let text = match fenced {
        Fenced::Current => return Ok(()),
        Fenced::Stale { highest } => format!(
            "session {session} has a later holder: fence {} is below {highest}",
            call.request.fence
        ),
        Fenced::Foreign => format!("session {session} belongs to another owner"),
        Fenced::Deleted => format!("session {session} was deleted"),
    };
    Err(Fault::new(Code::Conflict, text))
}

fn spent(call: &Call) -> Fault {
    let text = format!("call {} was one of a session that was deleted", call.request.call);
    Fault::new(Code::Conflict, text)
}

fn conflict(call: &CallId) -> Fault {
    Fault::new(Code::Conflict, format!("call {call} is in use for something else"))
}

fn journal_fault(error: &JournalError) -> Fault {
    Fault::new(Code::Unavailable, error.to_string()).with_hint(ROOM)
}

fn log_end(call: &Call, outcome: &Result<Receipt, Fault>) {
    let (id, tool) = (&call.request.call, &call.request.tool);
    match outcome {
        Ok(receipt) => tracing::info!(
            call = %id,
            session = %receipt.session,
            tool,
            outcome = ?receipt.outcome,
            duration_ms = receipt.duration_ms,
            "call ended"
        ),
        Err(fault) => tracing::warn!(call = %id, tool, %fault, "call not carried out"),
    }
}

/// Stands for everything that was asked, whatever the order of keys it was written in.
fn digest(request: &Execute) -> String {
    let asked = serde_json::json!([
        request.session,
        request.owner,
        request.environment,
        request.workspace,
        request.tool,
        sorted(&request.input)
    ]);
    hex::encode(Sha256::digest(asked.to_string()))
}

fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().map(|(k, v)| (k.clone(), sorted(v))).collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(entries.into_iter().collect())
        }
        Value::Array(values) => Value::Array(values.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(input: &str) -> Execute {
        Execute {
            call: CallId::parse("c").unwrap(),
            session: ipc::id::SessionId::parse("s").unwrap(),
            owner: "uid:1".into(),
            fence: 1,
            journal: None,
            environment: "dev".into(),
            workspace: None,
            tool: "bash".into(),
            input: serde_json::from_str(input).unwrap(),
        }
    }

    #[test]
    fn a_digest_depends_on_what_is_asked_and_not_on_the_order_of_keys() {
        let one = request(r#"{"a": {"x": 1, "y": [1, 2]}, "b": 2}"#);
        let same = request(r#"{"b": 2, "a": {"y": [1, 2], "x": 1}}"#);
        let other = request(r#"{"b": 2, "a": {"y": [2, 1], "x": 1}}"#);
        let later = Execute { fence: 2, ..one.clone() };
        let elsewhere = Execute { environment: "prod".into(), ..one.clone() };

        assert_eq!(digest(&one), digest(&same));
        assert_eq!(digest(&one), digest(&later), "a new holder asks for the same call");
        assert_ne!(digest(&one), digest(&other));
        assert_ne!(digest(&one), digest(&elsewhere));
    }
}
