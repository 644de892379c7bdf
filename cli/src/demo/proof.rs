//! What is checked when the session has ended, and the table that closes the demo.
//!
//! Every number comes from the daemons' own records: the session log, the audit, receipts.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ipc::http::Client;
use ipc::session::LogEvent;
use ipc::vault::{AuditKind, AuditRecord, ChainReport};
use serde_json::{Value, json};

use crate::audit;
use crate::demo::fingerprint::Fingerprints;
use crate::demo::play::{Play, nowhere};
use crate::demo::search::Searched;
use crate::demo::{seal, story};
use crate::failure::Failure;
use crate::secret;
use crate::wire::Event;

/// proxyd keeps a rendered credential for five seconds; twice that is too long.
const WIPED_WITHIN: Duration = Duration::from_secs(10);

/// What the closing table is made of.
struct Facts {
    log: Vec<LogEvent>,
    session_chain: ChainReport,
    audit: Vec<AuditRecord>,
    audit_chain: ChainReport,
    searched: Searched,
}

/// Checks everything and prints the table. Gives the same as JSON.
pub async fn prove(mut play: Play<'_>) -> Result<Value, Failure> {
    play.voice.breath().await;
    play.voice.heading("What is true at the end")?;
    play.voice.line("")?;
    the_work_is_done(&mut play).await?;
    nothing_ran_twice(&mut play).await?;
    nothing_leaked(&mut play).await?;
    let facts = gather(&mut play).await?;
    the_records_are_whole(&mut play, &facts)?;
    the_search_finds(&mut play)?;
    play.voice.claim(facts.searched.found.is_empty(), &nowhere(&facts.searched))?;
    table(&play, &facts)
}

/// Where the session's workspace lies on this host.
fn workspace(play: &Play<'_>) -> PathBuf {
    play.sandboxes.last().map(|sandbox| PathBuf::from(&sandbox.workspace)).unwrap_or_default()
}

async fn the_work_is_done(play: &mut Play<'_>) -> Result<(), Failure> {
    play.living().await?;
    let all = play.asked == story::turns().len();
    play.voice.claim(all, "the session ran to its end: every expectation of the model was met")?;
    let report = std::fs::read_to_string(workspace(play).join(story::REPORT)).unwrap_or_default();
    let written = report.contains(story::TOTAL) && report.contains("once each");
    play.voice.claim(written, "report.md is in the workspace, which outlived its first sandbox")?;
    let tally = play.stage.billing.tally().await?;
    let admitted = format!(
        "{} requests reached the API with the right token, {} without",
        tally.admitted, tally.refused
    );
    play.voice.claim(tally.admitted > 0 && tally.refused == 0, &admitted)
}

async fn nothing_ran_twice(play: &mut Play<'_>) -> Result<(), Failure> {
    let tally = play.stage.billing.tally().await?;
    let once = |what: &str| tally.runs.get(what) == Some(&1);
    let counter = std::fs::read_to_string(workspace(play).join(story::COUNTER)).unwrap_or_default();
    let expected = format!(
        "{close} asked for\n{close} answered\n{reconcile} asked for\n",
        close = story::CLOSE_MONTH,
        reconcile = story::RECONCILE,
    );
    let twice = once(story::CLOSE_MONTH) && once(story::RECONCILE) && counter == expected;
    play.voice.claim(twice, "no tool ran twice: counter.txt and the API's own count agree")?;
    let history = play.harness.events(&play.session).await?;
    let uses: Vec<&str> = history
        .iter()
        .filter(|received| matches!(received.event, Event::ToolUse { .. }))
        .filter_map(|received| received.id.as_deref())
        .collect();
    let results: Vec<&str> = history
        .iter()
        .filter_map(|received| match &received.event {
            Event::ToolResult { tool_use, .. } => Some(tool_use.as_str()),
            _ => None,
        })
        .collect();
    let paired = uses.len() == results.len()
        && results.iter().collect::<BTreeSet<_>>().len() == results.len()
        && uses.iter().all(|id| results.contains(id));
    let text = format!("{} tool calls in the history, each with exactly one result", uses.len());
    play.voice.claim(paired, &text)
}

async fn nothing_leaked(play: &mut Play<'_>) -> Result<(), Failure> {
    let history = play.harness.events(&play.session).await?;
    let seen: Vec<&str> = history
        .iter()
        .filter_map(|received| match &received.event {
            Event::ToolResult { text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    let start = format!("{}=", story::TOKEN_VARIABLE);
    let values: BTreeSet<&str> = seen
        .iter()
        .flat_map(|text| text.lines())
        .filter_map(|line| line.strip_prefix(start.as_str()))
        .collect();
    let shown = values.iter().copied().collect::<Vec<_>>().join(", ");
    let text = format!("environment, files and /proc gave the agent a placeholder: {shown}");
    play.voice.claim(values.len() == 1, &text)?;
    let masked = seen.iter().any(|text| {
        text.lines().any(|line| {
            line.to_ascii_lowercase().starts_with("authorization:") && line.ends_with("********")
        })
    });
    play.voice.claim(masked, "the API's echo of the injected token came back masked")?;
    let told = seen.iter().any(|text| text.contains("outcome unknown"));
    play.voice.claim(told, "the call that died with its sandbox was told as outcome unknown")
}

async fn gather(play: &mut Play<'_>) -> Result<Facts, Failure> {
    let proxyd = Client::new(play.stage.layout().proxyd());
    let stored = secret::names(&proxyd).await?;
    let used = stored.iter().any(|s| s.name == seal::SECRET && s.last_used_at.is_some());
    play.voice
        .claim(used, "the vault lists the token by name and used it; it has no way to show it")?;
    let (mut searched, allowed) = play.search().await?;
    wiped(play, &mut searched, allowed).await?;
    Ok(Facts {
        log: play.harness.log(&play.session).await?,
        session_chain: play.harness.verify(&play.session).await?,
        audit: audit::all(&proxyd).await?,
        audit_chain: proxyd.get("/v1/audit/verify").await?,
        searched,
    })
}

/// A search that finds nothing proves nothing unless it finds what is there: a marker of the same
/// shape is put in a file, in hex, and must be found there and nowhere else.
fn the_search_finds(play: &mut Play<'_>) -> Result<(), Failure> {
    let marker = seal::draw()?;
    let path = play.stage.dir().join("marker.txt");
    let written = std::fs::write(&path, hex::encode(&marker));
    let mut searched = Searched::default();
    searched.files_below(&Fingerprints::of(&marker), play.stage.dir());
    // If it cannot be removed now, it goes with the directory.
    let _ = std::fs::remove_file(&path);
    let found = written.is_ok() && searched.found == [path.display().to_string()];
    play.voice
        .claim(found, "a marker of the token's shape, put in a file, is found: the search works")
}

/// proxyd keeps a rendered credential for a few seconds after its last use, then wipes it. Whoever
/// can look into its memory (root) sees that it is gone afterwards.
async fn wiped(
    play: &mut Play<'_>,
    searched: &mut Searched,
    mut allowed: Searched,
) -> Result<(), Failure> {
    if allowed.memories == 0 {
        return Ok(());
    }
    let deadline = Instant::now() + WIPED_WITHIN;
    while !allowed.found.is_empty() && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(200)).await;
        (*searched, allowed) = play.search().await?;
    }
    let text = if allowed.found.is_empty() {
        "root looked into proxyd's memory: after the last request it was wiped".to_owned()
    } else {
        format!("proxyd still has it in {}", allowed.found.join(" and "))
    };
    play.voice.claim(allowed.found.is_empty(), &text)
}

fn the_records_are_whole(play: &mut Play<'_>, facts: &Facts) -> Result<(), Failure> {
    let denied = of_kind(facts, AuditKind::Denied);
    let evil =
        denied.iter().any(|r| r.host.as_deref() == Some(story::EVIL_HOST) && r.reason.is_some());
    play.voice
        .claim(evil, "the request to evil.example was denied, with a reason, in the audit")?;
    let allowed = of_kind(facts, AuditKind::Allowed);
    let only = allowed.iter().all(|record| {
        record.host.as_deref() == Some(story::BILLING_HOST)
            && record.credential.as_deref() == Some(seal::SECRET)
    });
    let text = "every request that left went to the billing API, under one rule's credential";
    play.voice.claim(only && !allowed.is_empty(), text)?;
    let (after, sandboxes) = play.first_token.unwrap_or_default();
    let text =
        format!("the model's first words came after {} ms, before any sandbox", after.as_millis());
    play.voice.claim(play.first_token.is_some() && sandboxes == 0, &text)?;
    let whole = |chain: &ChainReport| chain.problems.is_empty() && chain.records > 0;
    let chains = whole(&facts.session_chain) && whole(&facts.audit_chain);
    let problems =
        [&facts.session_chain.problems[..], &facts.audit_chain.problems[..]].concat().join("; ");
    let text = if chains {
        "the hash chains of the session log and of the audit are whole".to_owned()
    } else {
        format!("a hash chain is not whole: {problems}")
    };
    play.voice.claim(chains, &text)
}

fn of_kind(facts: &Facts, kind: AuditKind) -> Vec<&AuditRecord> {
    facts.audit.iter().filter(|record| record.kind == kind).collect()
}

fn names<'a>(values: impl Iterator<Item = Option<&'a str>>) -> String {
    let names: BTreeSet<&str> = values.flatten().collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

fn table(play: &Play<'_>, facts: &Facts) -> Result<Value, Failure> {
    let allowed = of_kind(facts, AuditKind::Allowed);
    let denied = of_kind(facts, AuditKind::Denied);
    let rules = names(allowed.iter().map(|record| record.rule.as_deref()));
    let credentials = names(allowed.iter().map(|record| record.credential.as_deref()));
    let refused = denied.iter().map(|record| record.host.as_deref());
    let because = denied.iter().find_map(|record| record.reason.as_deref()).unwrap_or("no reason");
    let first =
        facts.log.iter().find_map(|event| event.body.get("first_token_ms").and_then(Value::as_u64));
    let made: Vec<String> = play
        .sandboxes
        .iter()
        .map(|sandbox| format!("{:.1} ms", sandbox.provision_us as f64 / 1000.0))
        .collect();
    let rows = [
        (
            "session log",
            format!(
                "{} events, hash chain verified\nhead {}",
                facts.session_chain.records, facts.session_chain.head
            ),
        ),
        (
            "requests",
            format!(
                "{} allowed by {rules} with credential \"{credentials}\"\n{} denied: {}: {because}",
                allowed.len(),
                denied.len(),
                names(refused),
            ),
        ),
        (
            "first token",
            format!(
                "{} ms after the request to the model; no sandbox waited for",
                first.unwrap_or(0)
            ),
        ),
        ("sandboxes", format!("made in {}, when a call needed one", made.join(" and "))),
        ("the token", summary(&facts.searched)),
    ];
    play.voice.heading("In short")?;
    play.voice.line("")?;
    play.voice.table(&rows)?;
    Ok(json!({
        "session": play.session,
        "events": facts.session_chain.records,
        "head": facts.session_chain.head,
        "allowed": allowed.len(),
        "denied": denied.len(),
        "rules": rules,
        "credentials": credentials,
        "first_token_ms": first,
        "provision_us": play.sandboxes.iter().map(|s| s.provision_us).collect::<Vec<_>>(),
        "files_searched": facts.searched.files,
        "found": facts.searched.found,
    }))
}

/// The line the whole demo is about.
fn summary(searched: &Searched) -> String {
    let closed = if searched.closed == 0 {
        String::new()
    } else {
        format!(
            "\n({} environments and memories of undumpable processes are closed to this user)",
            searched.closed
        )
    };
    let found = if searched.found.is_empty() {
        "found in the vault only (sealed)".to_owned()
    } else {
        format!("FOUND in {}", searched.found.join(", "))
    };
    format!(
        "searched {} files, logs, databases, environments and the sandbox's memory for the \
         token:\n{found}{closed}",
        searched.files
    )
}
