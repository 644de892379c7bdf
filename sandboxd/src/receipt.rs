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

/// While the call ran, the kernel ended a process of its sandbox for want of memory. A command that
/// succeeded nevertheless (a build that tried again with less) has coped by itself.
pub fn out_of_memory(receipt: &mut Receipt, limit_bytes: u64) {
    let limit = size(limit_bytes);
    match receipt.outcome {
        Outcome::OutcomeUnknown => {
            let text = format!(
                "sandbox ended before the command finished: memory limit {limit}; the workspace \
                 is kept"
            );
            state(receipt, Outcome::OutOfMemory, &text);
        }
        Outcome::Finished | Outcome::TimedOut if receipt.is_error => {
            let tool = &receipt.tool;
            let notice = format!("{tool}: a process was ended for want of memory: limit {limit}");
            receipt.outcome = Outcome::OutOfMemory;
            match receipt.content.first_mut() {
                Some(Content::Text { text }) => *text = format!("{notice}\n{text}"),
                _ => receipt.content.insert(0, files::text(notice)),
            }
        }
        _ => {}
    }
}

/// A command failed, and requests of its were refused, failed or were given up while it ran. Not
/// every client says so.
pub fn add_refusals(receipt: &mut Receipt, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    let list: String = lines.iter().map(|line| format!("\n- {line}")).collect();
    let notice = format!("{}: while it ran, its requests ended so:{list}", receipt.tool);
    receipt.content.push(files::text(notice));
}

/// `512 MiB`, `2 GiB`.
fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{} GiB", b >> 30),
        b => format!("{} MiB", b >> 20),
    }
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
    fn want_of_memory_is_told_unless_the_command_coped() {
        let unknown = "sandbox ended before the command finished: memory limit 512 MiB; the \
                       workspace is kept";
        let killed = "bash: a process was ended for want of memory: limit 512 MiB\nsaid";
        let table = [
            (Outcome::OutcomeUnknown, true, Outcome::OutOfMemory, unknown),
            (Outcome::Finished, true, Outcome::OutOfMemory, killed),
            (Outcome::TimedOut, true, Outcome::OutOfMemory, killed),
            (Outcome::Finished, false, Outcome::Finished, "said"),
            (Outcome::Cancelled, true, Outcome::Cancelled, "said"),
            (Outcome::Refused, true, Outcome::Refused, "said"),
        ];
        for (outcome, is_error, expected, text) in table {
            let call = CallId::random();
            let mut receipt = blank(&call, &SessionId::random(), "bash", "", "");
            state(&mut receipt, outcome, "said");
            receipt.is_error = is_error;

            out_of_memory(&mut receipt, 512 << 20);

            let told = (receipt.outcome, receipt.content);
            assert_eq!(told, (expected, vec![files::text(text)]), "{outcome:?}");
        }
        assert_eq!((size(2 << 30), size(1536 << 20)), ("2 GiB".into(), "1536 MiB".into()));
    }

    #[test]
    fn times_are_rfc_3339_with_milliseconds() {
        let now = now();

        assert_eq!(now.len(), "2026-01-01T00:00:00.000Z".len(), "{now}");
        assert!(now.parse::<jiff::Timestamp>().is_ok());
    }
}
