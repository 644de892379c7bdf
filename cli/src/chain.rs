//! Shows whether a hash chain is whole; a broken one is a failure of the command.

use std::process::ExitCode;

use ipc::vault::ChainReport;

use crate::failure::Failure;
use crate::term;

/// Prints the report of the chain called `what`.
pub fn print(json: bool, what: &str, report: &ChainReport) -> Result<ExitCode, Failure> {
    if json {
        term::json_line(report)?;
    } else if report.problems.is_empty() {
        term::line(&format!("{what}: {} records, chain whole", report.records))?;
        if let Some(removed) = &report.removed {
            let (from, time) = (removed.last + 1, &removed.time);
            let text = format!("verified from record {from} on: older ones removed by retention");
            term::line(&format!("{text}, last at {time}"))?;
        }
        term::line(&format!("head {}", report.head))?;
    }
    if report.problems.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let problems = report.problems.join("\n  ");
    Err(Failure::new(format!(
        "{what}: the chain of {} records is not whole:\n  {problems}",
        report.records
    ))
    .with_hint("somebody or something changed stored records; keep a copy before anything else"))
}
