//! `cleanhands policy`: reads policy files and shows what is wrong where.

use std::path::Path;
use std::process::ExitCode;

use policies::{Diagnostic, PolicySet, Severity};
use serde_json::json;

use crate::args::{Global, Policy};
use crate::failure::{CONFIGURATION, Failure};
use crate::term;

pub fn policy(global: &Global, what: Policy) -> Result<ExitCode, Failure> {
    match what {
        Policy::Check { dir } => check(global, &dir),
    }
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

fn check(global: &Global, dir: &Path) -> Result<ExitCode, Failure> {
    exists(dir)?;
    let loaded = PolicySet::load(dir);
    let (names, found): (Vec<&str>, &[Diagnostic]) = match &loaded {
        Ok(set) => (set.names().collect(), set.warnings()),
        Err(diagnostics) => (Vec::new(), diagnostics),
    };
    if global.json {
        let found: Vec<_> = found.iter().map(as_json).collect();
        let report = json!({ "ok": loaded.is_ok(), "environments": names, "diagnostics": found });
        term::json_line(&report)?;
    } else {
        for diagnostic in found {
            term::line(&term::printable(&diagnostic.to_string()))?;
        }
        if loaded.is_ok() {
            let names = match names.join(", ") {
                none if none.is_empty() => "no NAME.toml, so no environment".to_owned(),
                names => names,
            };
            term::line(&format!("{}: good: {names}", dir.display()))?;
        }
    }
    Ok(if loaded.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(CONFIGURATION) })
}

fn as_json(diagnostic: &Diagnostic) -> serde_json::Value {
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
