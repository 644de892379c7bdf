//! The power goes at any write: what was acknowledged is there, and what is there is whole.
//!
//! A process appends while a recorder (`powercut/recorder.c`, preloaded) notes every write and
//! every sync. For many moments the test then puts together what a disk may hold: all that was
//! synced, and of the rest any part, torn at sectors.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use harnessd::log::objects::NewObject;
use harnessd::log::{Agent, Body, Created, Guard, Log};
use ipc::id::SessionId;
use serde_json::{Value, json};

use crate::simulation::chance::Chance;

/// Set in the process that the test starts from itself: its state directory.
const CHILD: &str = "HARNESSD_POWERCUT_CHILD";
const SESSIONS: usize = 3;
const APPENDS: usize = 160;
/// Moments at which the power goes.
const CUTS: u64 = 80;
const SECTOR: usize = 512;

const DATABASE: u8 = 0;
const ACKNOWLEDGED: u8 = 2;

struct Record {
    kind: Kind,
    file: u8,
    offset: usize,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Write,
    Truncate,
    Sync,
}

fn id(number: usize) -> SessionId {
    SessionId::parse(&format!("sesn_{number}")).unwrap()
}

/// Appends to some sessions at once and notes what was acknowledged.
async fn append_until_done(dir: &Path) {
    let log = Log::open(dir).unwrap();
    let mut tasks = Vec::new();
    for number in 0..SESSIONS {
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
        let object = NewObject {
            kind: "session",
            id: id(number).to_string(),
            owner: "uid:1".into(),
            unique_name: None,
            body: json!({}),
        };
        log.create_session(&id(number), object, vec![created.into()]).await.unwrap();
        let log = log.clone();
        let path = dir.join("acknowledged");
        tasks.push(tokio::spawn(async move {
            let options = std::fs::File::options().create(true).append(true).clone();
            let mut acknowledged = options.open(path).unwrap();
            for turn in 0..APPENDS {
                // Long enough that the log is taken over into the database now and then.
                let text = "x".repeat(100 + 1_000 * turn);
                let content = vec![json!({ "type": "text", "text": text })];
                let said = vec![Body::UserMessage { content }.into()];
                let done = log.append(&id(number), Guard::default(), said).await.unwrap();
                let line = format!("{number} {}\n", done[0].seq);
                acknowledged.write_all(line.as_bytes()).unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    // Without tidying up: a power cut gives no notice.
    std::process::exit(0);
}

fn recorded(dir: &Path) -> Vec<Record> {
    let library = dir.join("recorder.so");
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/powercut/recorder.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .status()
        .unwrap();
    assert!(built.success(), "cc cannot build the recorder");
    let state = dir.join("state");
    std::fs::create_dir(&state).unwrap();
    let ended = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "powercut::after_a_power_cut_at_any_write_all_that_was_acknowledged_is_there",
        ])
        .env(CHILD, &state)
        .env("RECORD", dir.join("record"))
        .env("LD_PRELOAD", &library)
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(ended.success());
    parse(&std::fs::read(dir.join("record")).unwrap())
}

fn parse(mut bytes: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    let number =
        |bytes: &[u8]| usize::try_from(u64::from_le_bytes(bytes.try_into().unwrap())).unwrap();
    while !bytes.is_empty() {
        let kind = match bytes[0] {
            1 => Kind::Write,
            2 => Kind::Truncate,
            3 => Kind::Sync,
            other => panic!("record of kind {other}"),
        };
        let (offset, length) = (number(&bytes[2..10]), number(&bytes[10..18]));
        let data = bytes[18..18 + length].to_vec();
        records.push(Record { kind, file: bytes[1], offset, bytes: data });
        bytes = &bytes[18 + length..];
    }
    records
}

/// Draws one of the first `limit` numbers.
fn below(chance: &Chance, limit: usize) -> usize {
    usize::try_from(chance.below(limit as u64)).unwrap()
}

/// What a disk may hold of one file when the power goes after these records.
fn surviving(records: &[Record], file: u8, syncs_count: bool, chance: &Chance) -> Vec<u8> {
    let of_file = |record: &&Record| record.file == file;
    let mine: Vec<&Record> = records.iter().filter(of_file).collect();
    let synced = mine.iter().rposition(|record| record.kind == Kind::Sync && syncs_count);
    let mut content = Vec::new();
    for (place, record) in mine.iter().enumerate() {
        let certain = synced.is_some_and(|synced| place < synced);
        // The rest reached the disk in part, in any order, each write up to some sector.
        let kept = match chance.below(4) {
            _ if certain => record.bytes.len(),
            0 => 0,
            1 => (below(chance, record.bytes.len() / SECTOR + 1)) * SECTOR,
            _ => record.bytes.len(),
        };
        match record.kind {
            Kind::Write if kept > 0 => {
                let end = record.offset + kept;
                if content.len() < end {
                    content.resize(end, 0);
                }
                content[record.offset..end].copy_from_slice(&record.bytes[..kept]);
            }
            Kind::Truncate if certain || chance.below(2) == 0 => content.resize(record.offset, 0),
            _ => {}
        }
    }
    content
}

/// The last event of each session that was acknowledged.
fn acknowledged(records: &[Record]) -> [u64; SESSIONS] {
    let mut last = [0; SESSIONS];
    for record in records.iter().filter(|r| r.file == ACKNOWLEDGED && r.kind == Kind::Write) {
        let line = String::from_utf8(record.bytes.clone()).unwrap();
        let (session, seq) = line.trim().split_once(' ').unwrap();
        last[session.parse::<usize>().unwrap()] = seq.parse().unwrap();
    }
    last
}

/// Cuts the power at one moment; says what is wrong afterwards.
async fn cut(records: &[Record], at: usize, syncs_count: bool, chance: &Chance) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let records = &records[..at];
    for (file, name) in [(DATABASE, "sessions.db"), (1, "sessions.db-wal")] {
        let content = surviving(records, file, syncs_count, chance);
        std::fs::write(dir.path().join(name), content).unwrap();
    }
    let log = match Log::open(dir.path()) {
        Ok(log) => log,
        Err(error) => return vec![format!("cannot be opened: {error}")],
    };
    let mut problems = Vec::new();
    for (number, last) in acknowledged(records).into_iter().enumerate() {
        if last == 0 {
            continue;
        }
        match log.verify(&id(number)).await {
            Err(error) => problems.push(error.to_string()),
            Ok(report) => {
                problems.extend(report.problems);
                if report.records < last {
                    let there = report.records;
                    problems.push(format!("event {last} was acknowledged, {there} are there"));
                }
            }
        }
    }
    let raw = rusqlite::Connection::open(dir.path().join("sessions.db")).unwrap();
    let check = raw.query_row("PRAGMA integrity_check", [], |row| row.get::<_, String>(0));
    match check {
        Ok(text) if text == "ok" => {}
        other => problems.push(format!("{other:?}")),
    }
    problems
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_power_cut_at_any_write_all_that_was_acknowledged_is_there() {
    if let Some(dir) = std::env::var_os(CHILD) {
        return append_until_done(Path::new(&dir)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let records = recorded(dir.path());
    let begins = records.iter().position(|record| record.file == ACKNOWLEDGED).unwrap();
    let checkpoints = records.iter().filter(|r| r.file == DATABASE && r.kind == Kind::Sync).count();
    assert!(checkpoints > 1, "the log was never taken over into the database");

    for seed in 0..CUTS {
        let chance = Chance::new(seed);
        let at = begins + below(&chance, records.len() - begins) + 1;
        let problems = cut(&records, at, true, &chance).await;
        assert_eq!(problems, Vec::<String>::new(), "power cut {seed}, after record {at}");
    }
    // The same disk without its syncs: else this test could not fail.
    let mut lost = 0;
    for seed in 0..20 {
        let chance = Chance::new(seed);
        let problems = cut(&records, records.len(), false, &chance).await;
        lost += usize::from(!problems.is_empty());
    }
    assert!(lost > 0, "nothing is lost without a single sync");
}
