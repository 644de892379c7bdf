//! A sandboxd and a proxyd that only pretend.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Path as Part, State};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use ipc::fault::{Code, Fault};
use ipc::id::CallId;
use ipc::sandbox::{CallReport, Content, Execute, Health, Outcome, Receipt};
use ipc::vault::{Head, ScrubReply, ScrubRequest};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What a secret looks like in these tests.
pub const SECRET: &str = "SECRET-CANARY-7f3a";

/// Serves on a runtime of its own: when that is dropped, so are the connections, which is what a
/// killed daemon looks like.
fn serve(path: &Path, router: Router) -> CancellationToken {
    let _ = std::fs::remove_file(path);
    let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let stop = CancellationToken::new();
    let ended = stop.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            tokio::spawn(ipc::http::serve(listener, router, ended.clone(), Duration::ZERO));
            ended.cancelled().await;
        });
    });
    stop
}

/// Counts what it is asked to run; commands that begin with `hold` run until they are released.
pub struct Sandboxd {
    path: PathBuf,
    stop: Mutex<CancellationToken>,
    state: Arc<SandboxdState>,
}

pub struct SandboxdState {
    journal: Mutex<String>,
    calls: Mutex<HashMap<CallId, watch::Receiver<Option<Receipt>>>>,
    /// How often each command was run.
    runs: Mutex<HashMap<String, u32>>,
    /// Every request, whether it ran something or joined.
    asked: Mutex<Vec<Execute>>,
    cancelled: watch::Sender<HashSet<CallId>>,
    released: watch::Sender<bool>,
    forgotten: Mutex<Vec<String>>,
    /// Where calls go on while the service restarts.
    runtime: tokio::runtime::Handle,
}

impl Sandboxd {
    pub fn start(path: &Path) -> Self {
        let state = Arc::new(SandboxdState {
            journal: Mutex::new("journal-1".into()),
            calls: Mutex::default(),
            runs: Mutex::default(),
            asked: Mutex::default(),
            cancelled: watch::Sender::default(),
            released: watch::Sender::default(),
            forgotten: Mutex::default(),
            runtime: tokio::runtime::Handle::current(),
        });
        let stop = Mutex::new(serve(path, sandboxd_router(Arc::clone(&state))));
        Self { path: path.to_owned(), stop, state }
    }

    /// Breaks every connection and serves anew; calls go on.
    pub fn restart(&self) {
        let mut stop = self.stop.lock().unwrap();
        stop.cancel();
        *stop = serve(&self.path, sandboxd_router(Arc::clone(&self.state)));
    }

    /// Loses the journal and all calls, as after a crash with a lost disk.
    pub fn forget_all(&self) {
        *self.state.journal.lock().unwrap() = "journal-2".into();
        self.state.calls.lock().unwrap().clear();
        self.restart();
    }

    pub fn release(&self) {
        self.state.released.send_replace(true);
    }

    pub fn runs(&self) -> HashMap<String, u32> {
        self.state.runs.lock().unwrap().clone()
    }

    pub fn asked(&self) -> Vec<Execute> {
        self.state.asked.lock().unwrap().clone()
    }

    pub fn forgotten(&self) -> Vec<String> {
        self.state.forgotten.lock().unwrap().clone()
    }
}

type Shared = State<Arc<SandboxdState>>;

fn sandboxd_router(state: Arc<SandboxdState>) -> Router {
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/execute", post(execute))
        .route("/v1/calls/{call}", get(report))
        .route("/v1/calls/{call}/cancel", post(cancel))
        .route("/v1/sessions/{session}", delete(forget))
        .with_state(state)
}

async fn health(State(state): Shared) -> Json<Health> {
    Json(Health {
        daemon: "sandboxd".into(),
        version: "0".into(),
        pid: 1,
        journal: state.journal.lock().unwrap().clone(),
        mode: "user".into(),
        layers: Vec::new(),
        notes: Vec::new(),
        in_force: ipc::in_force::InForce::default(),
        ready: 0,
    })
}

async fn execute(State(state): Shared, Json(call): Json<Execute>) -> Result<Json<Receipt>, Fault> {
    state.asked.lock().unwrap().push(call.clone());
    let journal = state.journal.lock().unwrap().clone();
    let known = state.calls.lock().unwrap().get(&call.call).cloned();
    let mut ended = match known {
        Some(ended) => ended,
        None if call.journal.as_ref() != Some(&journal) => {
            let text = "this call may have run before the journal was lost";
            return Ok(Json(receipt(&call, &journal, Outcome::OutcomeUnknown, text)));
        }
        None => begin(&state, call, journal),
    };
    let receipt = ended.wait_for(Option::is_some).await;
    match receipt.ok().and_then(|r| r.clone()) {
        Some(receipt) => Ok(Json(receipt)),
        None => Err(Fault::new(Code::Internal, "the call's task is gone")),
    }
}

fn begin(
    state: &Arc<SandboxdState>,
    call: Execute,
    journal: String,
) -> watch::Receiver<Option<Receipt>> {
    let (sender, receiver) = watch::channel(None);
    state.calls.lock().unwrap().insert(call.call.clone(), receiver.clone());
    let command = call.input["command"].as_str().unwrap_or_default().to_owned();
    *state.runs.lock().unwrap().entry(command.clone()).or_default() += 1;
    let mut released = state.released.subscribe();
    let mut cancelled = state.cancelled.subscribe();
    state.runtime.spawn(async move {
        let mut outcome = Outcome::Finished;
        if command.starts_with("hold") {
            tokio::select! {
                _ = released.wait_for(|yes| *yes) => {}
                _ = cancelled.wait_for(|ids| ids.contains(&call.call)) => {
                    outcome = Outcome::Cancelled;
                }
            }
        }
        let text = match command.as_str() {
            "leak" => format!("token={SECRET}."),
            _ => format!("ran {command}"),
        };
        sender.send_replace(Some(receipt(&call, &journal, outcome, &text)));
    });
    receiver
}

fn receipt(call: &Execute, journal: &str, outcome: Outcome, text: &str) -> Receipt {
    Receipt {
        call: call.call.clone(),
        session: call.session.clone(),
        sandbox: None,
        tool: call.tool.clone(),
        outcome,
        content: vec![Content::Text { text: text.to_owned() }],
        is_error: outcome != Outcome::Finished,
        exit_code: Some(0),
        signal: None,
        output_bytes: text.len() as u64,
        spill: None,
        usage: None,
        limits_reached: Vec::new(),
        started_at: "2026-01-01T00:00:00.000Z".into(),
        duration_ms: 1,
        provision_us: Some(2000),
        layers: Vec::new(),
        journal: journal.to_owned(),
    }
}

async fn report(State(state): Shared, Part(call): Part<String>) -> Json<CallReport> {
    let known = state.calls.lock().unwrap().get(&CallId::parse(&call).unwrap()).cloned();
    let journal = state.journal.lock().unwrap().clone();
    Json(match known.map(|ended| ended.borrow().clone()) {
        None => CallReport::Unknown { journal },
        Some(None) => CallReport::Running { sandbox: None, started_at: String::new() },
        Some(Some(receipt)) => CallReport::Ended { receipt: Box::new(receipt) },
    })
}

async fn cancel(State(state): Shared, Part(call): Part<String>) -> Json<Value> {
    let call = CallId::parse(&call).unwrap();
    state.cancelled.send_modify(|ids| {
        ids.insert(call);
    });
    Json(json!({}))
}

async fn forget(State(state): Shared, Part(session): Part<String>) -> Json<Value> {
    state.forgotten.lock().unwrap().push(session);
    Json(json!({}))
}

/// Masks [`SECRET`], keeps chain heads; can be told to refuse.
pub struct Proxyd {
    state: Arc<ProxydState>,
    _stop: CancellationToken,
}

#[derive(Default)]
struct ProxydState {
    heads: Mutex<Vec<Head>>,
    refuses: Mutex<bool>,
}

impl Proxyd {
    pub fn start(path: &Path) -> Self {
        let state = Arc::<ProxydState>::default();
        let router = Router::new()
            .route("/v1/scrub", post(scrub))
            .route("/v1/heads", post(head))
            .with_state(Arc::clone(&state));
        Self { state, _stop: serve(path, router) }
    }

    pub fn heads(&self) -> Vec<Head> {
        self.state.heads.lock().unwrap().clone()
    }

    /// From now on no text is searched.
    pub fn refuse(&self) {
        *self.state.refuses.lock().unwrap() = true;
    }
}

async fn scrub(
    State(state): State<Arc<ProxydState>>,
    Json(request): Json<ScrubRequest>,
) -> Result<Json<ScrubReply>, Fault> {
    if *state.refuses.lock().unwrap() {
        return Err(Fault::new(Code::Missing, "no environment of that name"));
    }
    let found = request.texts.iter().map(|t| t.matches(SECRET).count() as u64).sum();
    let mask = "*".repeat(SECRET.len());
    let texts = request.texts.iter().map(|t| t.replace(SECRET, &mask)).collect();
    Ok(Json(ScrubReply { texts, found }))
}

async fn head(State(state): State<Arc<ProxydState>>, Json(head): Json<Head>) -> Json<Value> {
    state.heads.lock().unwrap().push(head);
    Json(json!({}))
}
