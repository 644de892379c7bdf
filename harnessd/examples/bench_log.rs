//! Measures the session log against SQLite itself, in one run: `bench_log DIRECTORY`.
//!
//! One row a line: what, ours, the other, the ratio. Called by `bench/harness.py`.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on should say so")]

use std::path::Path;
use std::time::{Duration, Instant};

use harnessd::context::{self, Profile};
use harnessd::fold;
use harnessd::log::objects::NewObject;
use harnessd::log::{Agent, Body, Created, Guard, Log, NewEvent, RequestEnded, StopReason, Usage};
use ipc::id::SessionId;
use rusqlite::{Connection, params};
use serde_json::{Value, json};

const SINGLE: usize = 1_000;
const WRITERS: usize = 64;
const ROUNDS: usize = 200;
const LONG: u64 = 1_000_000;
const SHORT: u64 = 1_000;

fn main() {
    let dir = std::env::args().nth(1).expect("bench_log DIRECTORY");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = Path::new(&dir);
        one_by_one(dir).await;
        many_at_once(dir).await;
        long_and_short(dir).await;
    });
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// A table of the same shape, without hashes, indexes or checks.
fn raw(path: &Path) -> Connection {
    let connection = Connection::open(path).unwrap();
    connection.pragma_update(None, "journal_mode", "wal").unwrap();
    connection.pragma_update(None, "synchronous", "full").unwrap();
    let sql = "CREATE TABLE events (session TEXT, seq INTEGER, id TEXT, time TEXT, kind TEXT,
               body TEXT, previous TEXT, hash TEXT)";
    connection.execute(sql, []).unwrap();
    connection
}

fn raw_row(connection: &Connection, seq: usize, body: &str) {
    let sql = "INSERT INTO events VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
    let hash = "0".repeat(64);
    let values = params!["sesn_x", seq, "sevt_0123456789", "t", "user_message", body, hash, hash];
    connection.prepare_cached(sql).unwrap().execute(values).unwrap();
}

fn said() -> NewEvent {
    Body::UserMessage { content: vec![json!({ "type": "text", "text": "x".repeat(200) })] }.into()
}

async fn session(log: &Log) -> SessionId {
    let agent = Agent {
        model: "m".into(),
        system: None,
        tools: vec![],
        mcp: vec![],
        snapshot: Value::Null,
    };
    let created = Body::SessionCreated(Created {
        owner: "uid:1".into(),
        policy: "dev".into(),
        workspace: None,
        agent,
        budget_cents: None,
    });
    let id = SessionId::random();
    let object = NewObject {
        kind: "session",
        id: id.to_string(),
        owner: "uid:1".into(),
        unique_name: None,
        body: json!({}),
    };
    log.create_session(&id, object, vec![created.into()]).await.unwrap();
    id
}

/// One append, acknowledged when it is on disk, in turn with one transaction of SQLite.
async fn one_by_one(dir: &Path) {
    let log = Log::open(&fresh(dir, "one")).unwrap();
    let id = session(&log).await;
    let other = raw(&dir.join("one-raw.db"));
    let body = "x".repeat(230);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for number in 0..SINGLE {
        let begun = Instant::now();
        log.append(&id, Guard::default(), vec![said()]).await.unwrap();
        ours.push(begun.elapsed());
        let begun = Instant::now();
        raw_row(&other, number, &body);
        theirs.push(begun.elapsed());
    }
    let (ours, theirs) = (micros(median(ours)), micros(median(theirs)));
    let ratio = ours / theirs;
    println!("append    one, on disk: p50 {ours:.0} us, raw SQLite {theirs:.0} us, x{ratio:.2}");
}

/// Sessions that append at once, against as many rows in one transaction.
async fn many_at_once(dir: &Path) {
    let log = Log::open(&fresh(dir, "many")).unwrap();
    let mut sessions = Vec::new();
    for _ in 0..WRITERS {
        sessions.push(session(&log).await);
    }
    let begun = Instant::now();
    let tasks: Vec<_> = sessions
        .into_iter()
        .map(|id| {
            let log = log.clone();
            tokio::spawn(async move {
                for _ in 0..ROUNDS {
                    log.append(&id, Guard::default(), vec![said()]).await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let rows = (WRITERS * ROUNDS) as f64;
    let ours = rows / begun.elapsed().as_secs_f64();
    let mut other = raw(&dir.join("many-raw.db"));
    let body = "x".repeat(230);
    let begun = Instant::now();
    for round in 0..ROUNDS {
        let transaction = other.transaction().unwrap();
        for number in 0..WRITERS {
            raw_row(&transaction, round * WRITERS + number, &body);
        }
        transaction.commit().unwrap();
    }
    let theirs = rows / begun.elapsed().as_secs_f64();
    let ratio = ours / theirs;
    println!(
        "append    {WRITERS} sessions at once: {ours:.0} rows/s, raw SQLite with {WRITERS} rows a \
         transaction {theirs:.0} rows/s, x{ratio:.2}"
    );
}

/// What a turn leaves, ten events.
fn turn(number: u64) -> Vec<NewEvent> {
    let message = said();
    let started = NewEvent::new(Body::ModelRequestStarted {
        model: "m".into(),
        profile: "last-n/1:20".into(),
        from: 0,
        summary: false,
    });
    let request = started.id.clone();
    let text = format!("answer {number}");
    let content = vec![json!({ "type": "text", "text": text })];
    let processed = Body::Processed { events: vec![message.id.clone()] };
    let ended = RequestEnded {
        usage: Usage { input_tokens: 10, ..Usage::default() },
        ..RequestEnded::new(request.clone())
    };
    let usage = Body::Usage { usage: Usage::default() };
    let idle = Body::StatusIdle { stop_reason: StopReason::EndTurn, stop_details: None };
    let mut events = vec![message, Body::StatusRunning {}.into(), processed.into(), started];
    for _ in 0..3 {
        let (request, content) = (request.clone(), content.clone());
        events.push(Body::AgentMessage { request, content }.into());
    }
    events.extend([Body::ModelRequestEnded(ended).into(), usage.into(), idle.into()]);
    events
}

/// Everything between taking a session up and having its next request.
async fn wake(log: &Log, id: &SessionId) -> Duration {
    let begun = Instant::now();
    let ownership = log.acquire(id).await.unwrap().unwrap();
    let state = fold::load(log, id).await.unwrap();
    let first = log.event(id, 1).await.unwrap().unwrap();
    let agent = context::agent_of(&first).unwrap();
    let cut = Profile::LastN { steps: 20 }.cut(&state);
    let events = log.since(id, cut.read_from.saturating_sub(1)).await.unwrap();
    let prompt = context::prompt(agent, &events, &cut);
    assert!(prompt.messages.len() < 200);
    let time = begun.elapsed();
    drop(ownership);
    time
}

async fn long_and_short(dir: &Path) {
    let log = Log::open(&fresh(dir, "wake")).unwrap();
    let mut ids = Vec::new();
    for length in [SHORT, LONG] {
        let id = session(&log).await;
        let mut turns = (0..length / 10).map(turn);
        loop {
            let batch: Vec<NewEvent> = turns.by_ref().take(50).flatten().collect();
            if batch.is_empty() {
                break;
            }
            let guard =
                Guard { last: Some(log.chain(&id).await.unwrap().events), ..Guard::default() };
            log.append(&id, guard, batch).await.unwrap();
            // As a running session does: a snapshot now and then.
            fold::load(&log, &id).await.unwrap();
        }
        ids.push(id);
    }
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..50 {
        for (id, times) in ids.iter().zip(&mut times) {
            times.push(wake(&log, id).await);
        }
    }
    let [short, long] = times.map(|times| micros(median(times)));
    let ratio = long / short;
    println!(
        "wake      last-n on {LONG} events: p50 {long:.0} us, on {SHORT} events {short:.0} us, \
         x{ratio:.2}"
    );
    let begun = Instant::now();
    let report = log.verify(&ids[1]).await.unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    println!("verify    {LONG} events: {:.1} s", begun.elapsed().as_secs_f64());
}

fn fresh(dir: &Path, name: &str) -> std::path::PathBuf {
    let dir = dir.join(name);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}
