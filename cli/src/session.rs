//! `cleanhands session`: what sessions there are, what happened in one, whether its log is whole;
//! [`files`] carries them, [`profiles`] says what a model is shown.

mod files;
mod profiles;

use std::process::ExitCode;

use ipc::http::Client;
use serde_json::Value;

use crate::api::Harness;
use crate::args::{Global, Session};
use crate::chain;
use crate::failure::Failure;
use crate::place;
use crate::show::Show;
use crate::term::{self, Style};
use crate::wire::{Event, text_at};

pub async fn session(global: &Global, what: Session) -> Result<ExitCode, Failure> {
    let harness = Harness::new(Client::new(place::layout(global).harnessd()));
    match what {
        Session::List { all } => list(global, &harness, all).await,
        Session::Show { session } => show(global, &harness, &session).await,
        Session::Events { session } => events(global, &harness, &session).await,
        Session::Verify { session } => {
            let report = harness.verify(&session).await?;
            chain::print(global.json, &format!("session {session}"), &report)
        }
        Session::Export { session, file } => files::export(&harness, &session, file).await,
        Session::Import { file } => files::import(global, &harness, &file).await,
        Session::Backup { file } => files::backup(global, &harness, &file).await,
        Session::Profile { session, profile } => {
            profiles::choose(global, &harness, &session, &profile).await
        }
        Session::Replay { session, profiles } => {
            profiles::replay(global, &harness, &session, &profiles).await
        }
    }
}

async fn list(global: &Global, harness: &Harness, all: bool) -> Result<ExitCode, Failure> {
    let sessions = harness.sessions(all).await?;
    if global.json {
        for session in &sessions {
            term::json_line(session)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if sessions.is_empty() {
        term::line("no sessions; `cleanhands run` makes one")?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![["SESSION", "STATUS", "CREATED", "TITLE"].map(str::to_owned).to_vec()];
    rows.extend(sessions.iter().map(|session| {
        ["id", "status", "created_at", "title"].map(|key| text_at(session, &[key])).to_vec()
    }));
    term::write_out(term::columns(&rows).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

async fn show(global: &Global, harness: &Harness, id: &str) -> Result<ExitCode, Failure> {
    let session = harness.session(id).await?;
    if global.json {
        term::json_line(&session)?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = facts(&session)
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| vec![name.to_owned(), value])
        .collect();
    term::write_out(term::columns(&rows).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn facts(session: &Value) -> Vec<(&'static str, String)> {
    let tokens = |key: &str| {
        let count = session.get("usage").and_then(|usage| usage.get(key)).and_then(Value::as_u64);
        count.map(|n| n.to_string()).unwrap_or_default()
    };
    vec![
        ("session", text_at(session, &["id"])),
        ("title", text_at(session, &["title"])),
        ("status", text_at(session, &["status"])),
        ("agent", text_at(session, &["agent", "name"])),
        ("model", text_at(session, &["agent", "model", "id"])),
        ("environment", text_at(session, &["environment_id"])),
        ("workspace", text_at(session, &["metadata", ipc::session::METADATA_WORKSPACE])),
        ("created", text_at(session, &["created_at"])),
        ("updated", text_at(session, &["updated_at"])),
        ("input tokens", tokens("input_tokens")),
        ("output tokens", tokens("output_tokens")),
    ]
}

async fn events(global: &Global, harness: &Harness, id: &str) -> Result<ExitCode, Failure> {
    let events = harness.events(id).await?;
    let mut show = Show::new(Style::of_stdout());
    for received in &events {
        if global.json {
            term::json_line(&received.json)?;
            continue;
        }
        show.event(received)?;
        if let Event::Idle { reason } = &received.event {
            term::line(&format!("\n  — {} —", term::printable(reason)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
