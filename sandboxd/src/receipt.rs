//! What is written into receipts: the texts of lost calls, and the fields of each kind of end.

use std::time::Duration;

use ipc::id::{CallId, SessionId};
use ipc::sandbox::{Content, Outcome, Receipt};

use crate::journal::Start;
use crate::tools::{self, bash, files};

/// What the model is told when a sandbox is lost under a command.
pub const LOST: &str =
    "outcome unknown: the sandbox ended before the command finished; the workspace is kept";
/// The same, when it was this daemon that ended.
pub const RECOVERED: &str =
    "outcome unknown: sandboxd ended before the command finished; the workspace is kept";
/// The same, when the call was sent to a journal that is no more.
pub const FOREIGN: &str = "outcome unknown: the journal that this call was sent to is lost, \
    so nobody can say whether it ran";

/// A receipt that says nothing yet of how the call ended.
pub fn blank(
    call: &CallId,
    session: &SessionId,
    tool: &str,
    started_at: &str,
    journal: &str,
) -> Receipt {
    Receipt {
        call: call.clone(),
        session: session.clone(),
        sandbox: None,
        tool: tool.to_owned(),
        outcome: Outcome::Finished,
        content: vec![files::text(tools::NO_OUTPUT)],
        is_error: false,
        exit_code: None,
        signal: None,
        output_bytes: 0,
        spill: None,
        usage: None,
        limits_reached: Vec::new(),
        started_at: started_at.to_owned(),
        duration_ms: 0,
        provision_us: None,
        layers: Vec::new(),
        journal: journal.to_owned(),
    }
}

/// The receipt of a call that an earlier process started and did not finish.
pub fn unknown_outcome(start: &Start, journal: &str) -> Receipt {
    let Start { call, session, tool, started_at, .. } = start;
    let mut receipt = blank(call, session, tool, started_at, journal);
    state(&mut receipt, Outcome::OutcomeUnknown, RECOVERED);
    receipt
}

/// The call gave no result of its own: its outcome, and why, for the model.
pub fn state(receipt: &mut Receipt, outcome: Outcome, text: &str) {
    receipt.outcome = outcome;
    receipt.content = vec![files::text(text)];
    receipt.is_error = true;
}

/// The sandbox ended first.
pub fn lose(receipt: &mut Receipt) {
    state(receipt, Outcome::OutcomeUnknown, LOST);
}

/// A command failed, and requests were refused, failed or were given up while it ran. Not every
/// client says so. A line says where it may be about another call.
pub fn add_refusals(receipt: &mut Receipt, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    let list: String = lines.iter().map(|line| format!("\n- {line}")).collect();
    let notice = format!("{}: while it ran, requests ended so:{list}", receipt.tool);
    receipt.content.push(files::text(notice));
}

/// Everything that a command in the shell gave.
pub fn fill_from_command(receipt: &mut Receipt, ran: bash::Ran) {
    receipt.outcome = ran.outcome;
    receipt.content = vec![files::text(ran.text)];
    receipt.is_error = ran.is_error;
    receipt.exit_code = ran.exit.and_then(|exit| exit.code);
    receipt.signal = ran.exit.and_then(|exit| exit.signal);
    receipt.usage = ran.usage;
    receipt.output_bytes = ran.output_bytes;
    receipt.spill = ran.spill;
}

/// Size of what a tool gave, as it is handed on.
pub fn content_bytes(content: &Content) -> u64 {
    let bytes = match content {
        Content::Text { text } => text,
        Content::Image { data, .. } | Content::Document { data, .. } => data,
    };
    bytes.len() as u64
}

/// RFC 3339, milliseconds.
pub fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// Whole milliseconds.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_with_milliseconds() {
        let now = now();

        assert_eq!(now.len(), "2026-01-01T00:00:00.000Z".len(), "{now}");
        assert!(now.parse::<jiff::Timestamp>().is_ok());
    }
}
