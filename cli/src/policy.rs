//! `cleanhands policy`: reads policy files and shows what is wrong where, what they would make of a
//! request, and what a change of them changes.

mod diff;
mod explain;
mod replay;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ipc::layout::Layout;
use policies::{Diagnostic, HARNESS, PolicySet, Severity};
use serde_json::{Value, json};

use crate::args::{Global, Policy};
use crate::failure::{CONFIGURATION, Failure, HOST, USAGE};
use crate::place;
use crate::term;

pub async fn policy(global: &Global, what: Policy) -> Result<ExitCode, Failure> {
    match what {
        Policy::Check { dir, here } => check(global, &dir, here),
        Policy::Explain(options) => explain::run(global, &options),
        Policy::Diff { before, after } => diff::run(global, &before, &after),
        Policy::Replay { file, policies } => replay::run(global, file.as_deref(), &policies).await,
    }
}

/// One environment of a set.
fn environment<'a>(set: &'a PolicySet, name: &str) -> Result<&'a policies::Policy, Failure> {
    set.environment(name).map(|policy| &**policy).ok_or_else(|| {
        let names: Vec<&str> = set.names().collect();
        Failure::new(format!("there is no environment {name:?}"))
            .with_hint(format!("the directory has {}", names.join(", ")))
            .with_status(USAGE)
    })
}

/// The policies of a directory, or all that is wrong with them as one failure.
pub fn load(dir: &Path) -> Result<PolicySet, Failure> {
    exists(dir)?;
    PolicySet::load(dir).map_err(|diagnostics| {
        let all: Vec<String> = diagnostics.iter().map(ToString::to_string).collect();
        Failure::new(format!("policy files in {} are not right\n{}", dir.display(), all.join("\n")))
            .with_status(CONFIGURATION)
    })
}

fn exists(dir: &Path) -> Result<(), Failure> {
    if dir.is_dir() {
        return Ok(());
    }
    Err(Failure::new(format!("policies: no directory {}", dir.display()))
        .with_hint("make it, with one NAME.toml for each environment, or name another directory")
        .with_status(CONFIGURATION))
}

/// One finding, wherever it comes from.
struct Found {
    shown: String,
    json: Value,
}

fn check(global: &Global, dir: &Path, here: bool) -> Result<ExitCode, Failure> {
    exists(dir)?;
    let loaded = PolicySet::load(dir);
    let (set, found): (Option<&PolicySet>, &[Diagnostic]) = match &loaded {
        Ok(set) => (Some(set), set.warnings()),
        Err(diagnostics) => (None, diagnostics),
    };
    let names: Vec<&str> = set.map(|set| set.names().collect()).unwrap_or_default();
    let own = Layout { policies: absolute(dir), ..place::layout(global) };
    let (everywhere, lacking) = set.map(|set| obstacles(set, dir, &own)).unwrap_or_default();
    let right = set.is_some() && everywhere.is_empty();
    if global.json {
        let found = found.iter().map(as_json).chain(everywhere.into_iter().map(|f| f.json));
        let lacking: Vec<_> = lacking.iter().map(|found| &found.json).collect();
        let report = json!({
            "ok": right,
            "environments": names,
            "diagnostics": found.collect::<Vec<_>>(),
            "here": lacking,
        });
        term::json_line(&report)?;
    } else {
        let found = found.iter().map(ToString::to_string);
        let others = everywhere.iter().chain(&lacking).map(|found| found.shown.clone());
        for shown in found.chain(others) {
            term::line(&term::printable(&shown))?;
        }
        if right {
            let names = match names.join(", ") {
                none if none.is_empty() => "no NAME.toml, so no environment".to_owned(),
                names => names,
            };
            term::line(&format!("{}: good: {names}", dir.display()))?;
        }
    }
    Ok(match (right, here && !lacking.is_empty()) {
        (false, _) => ExitCode::from(CONFIGURATION),
        (true, true) => ExitCode::from(HOST),
        (true, false) => ExitCode::SUCCESS,
    })
}

fn absolute(dir: &Path) -> PathBuf {
    std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned())
}

/// What keeps sandboxes from being made: on every host, and on this one.
fn obstacles(set: &PolicySet, dir: &Path, own: &Layout) -> (Vec<Found>, Vec<Found>) {
    let own = [&own.runtime, &own.state, &own.policies, &own.config].map(Clone::clone).to_vec();
    let (mut everywhere, mut here) = (Vec::new(), Vec::new());
    // No sandbox is made in harnessd's own environment.
    for policy in set.names().filter(|name| *name != HARNESS).filter_map(|n| set.environment(n)) {
        let file = dir.join(format!("{}.toml", policy.name)).display().to_string();
        for found in sandboxd::preview::obstacles(policy, own.clone()) {
            let (text, hint) = (found.text, found.hint);
            let kind = if found.everywhere { "no sandbox" } else { "on this host" };
            let shown = format!("{file}: {kind}: {text}\n{hint}");
            let severity = if found.everywhere { "error" } else { "warning" };
            let json = json!({
                "file": file, "environment": policy.name, "line": 0, "column": 0,
                "severity": severity, "message": text, "hint": hint,
            });
            let list = if found.everywhere { &mut everywhere } else { &mut here };
            list.push(Found { shown, json });
        }
    }
    (everywhere, here)
}

fn as_json(diagnostic: &Diagnostic) -> Value {
    json!({
        "file": diagnostic.file,
        "line": diagnostic.line,
        "column": diagnostic.column,
        "severity": match diagnostic.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        },
        "message": diagnostic.message,
        "hint": diagnostic.hint,
    })
}
