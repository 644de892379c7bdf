//! Which limit of its sandbox a call that failed had reached: told by what the kernel counts and
//! shows, never by what a command writes.
//!
//! | limit | with a control group | without |
//! |---|---|---|
//! | memory | `memory.events` counts who was ended | not told: the kernel counts no such failure |
//! | processes | `pids.events` counts refusals | as many as may be were seen at once |
//! | disk | a file system without room was seen | the same |
//! | one file's size | `SIGXFSZ` ended the command | the same |
//! | time | sandboxd's own clock | the same |
//!
//! A command that succeeded has coped by itself: then nothing is told.

use ipc::sandbox::{Content, Limit, Outcome, Receipt};
use policies::SandboxTable;

use crate::cell::{Cell, Peak};
use crate::receipt::state;
use crate::tools::files;

/// What the kernel had counted before the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    oom_kills: u64,
    processes_refused: Option<u64>,
}

/// What was found after it.
#[derive(Debug, Default)]
struct Found {
    out_of_memory: bool,
    processes: bool,
    /// The places without room.
    full: Vec<String>,
}

impl Counted {
    pub fn now(cell: &Cell) -> Self {
        Self { oom_kills: cell.oom_kills(), processes_refused: cell.processes_refused() }
    }

    /// Has a receipt say which limits its call had reached.
    pub fn tell(self, receipt: &mut Receipt, cell: &Cell, peak: &Peak, table: &SandboxTable) {
        let after = Self::now(cell);
        let processes = match (self.processes_refused, after.processes_refused) {
            (Some(before), Some(after)) => after > before,
            // As many as there may be, or more: the first process and the guards count too.
            _ => peak.tasks >= u64::from(table.processes),
        };
        let found = Found {
            out_of_memory: after.oom_kills > self.oom_kills,
            processes,
            full: peak.full.iter().cloned().collect(),
        };
        write(receipt, &found, table);
    }
}

fn write(receipt: &mut Receipt, found: &Found, table: &SandboxTable) {
    let unknown = receipt.outcome == Outcome::OutcomeUnknown;
    if unknown && found.out_of_memory {
        let limit = size(table.memory_bytes);
        let text = format!(
            "sandbox ended before the command finished: memory limit {limit}; the workspace is kept"
        );
        state(receipt, Outcome::OutOfMemory, &text);
        receipt.limits_reached.push(Limit::Memory);
        return;
    }
    let failed = matches!(receipt.outcome, Outcome::Finished | Outcome::TimedOut);
    if !failed || !receipt.is_error {
        return;
    }
    let mut notices = Vec::new();
    let mut told = |limit, text: String| {
        receipt.limits_reached.push(limit);
        notices.push(format!("{}: {text}\n", receipt.tool));
    };
    if found.out_of_memory {
        let limit = size(table.memory_bytes);
        told(Limit::Memory, format!("a process was ended for want of memory: limit {limit}"));
    }
    if found.processes {
        let limit = table.processes;
        let text = format!(
            "the sandbox had as many processes and threads as it may, {limit}: no other began"
        );
        told(Limit::Processes, text);
    }
    for place in &found.full {
        told(Limit::Disk, format!("there was no room left in {place}"));
    }
    if ended_by_file_size(receipt.exit_code, receipt.signal) {
        let limit = size(table.disk_bytes);
        told(Limit::FileSize, format!("a file would have been longer than one may be: {limit}"));
    }
    receipt.limits_reached.dedup();
    if found.out_of_memory {
        receipt.outcome = Outcome::OutOfMemory;
    } else if receipt.outcome == Outcome::TimedOut {
        receipt.limits_reached.push(Limit::Time);
    }
    if notices.is_empty() {
        return;
    }
    match receipt.content.first_mut() {
        Some(Content::Text { text }) => text.insert_str(0, &notices.concat()),
        _ => receipt.content.insert(0, files::text(notices.concat().trim_end())),
    }
}

/// By the signal, or by the status that a shell has for a command which it ended.
fn ended_by_file_size(code: Option<i32>, signal: Option<i32>) -> bool {
    let xfsz = rustix::process::Signal::XFSZ.as_raw();
    signal == Some(xfsz) || code == Some(128 + xfsz)
}

/// `512 MiB`, `2 GiB`.
fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{} GiB", b >> 30),
        b => format!("{} MiB", b >> 20),
    }
}

#[cfg(test)]
mod tests {
    use ipc::id::{CallId, SessionId};

    use super::*;
    use crate::receipt::blank;

    fn table() -> SandboxTable {
        SandboxTable { memory_bytes: 512 << 20, processes: 64, ..SandboxTable::default() }
    }

    fn receipt(outcome: Outcome, is_error: bool) -> Receipt {
        let mut receipt = blank(&CallId::random(), &SessionId::random(), "bash", "", "");
        state(&mut receipt, outcome, "said");
        receipt.is_error = is_error;
        receipt
    }

    #[test]
    fn want_of_memory_is_told_unless_the_command_coped() {
        let unknown = "sandbox ended before the command finished: memory limit 512 MiB; the \
                       workspace is kept";
        let killed = "bash: a process was ended for want of memory: limit 512 MiB\nsaid";
        let cases = [
            (Outcome::OutcomeUnknown, true, Outcome::OutOfMemory, unknown),
            (Outcome::Finished, true, Outcome::OutOfMemory, killed),
            (Outcome::TimedOut, true, Outcome::OutOfMemory, killed),
            (Outcome::Finished, false, Outcome::Finished, "said"),
            (Outcome::Cancelled, true, Outcome::Cancelled, "said"),
            (Outcome::Refused, true, Outcome::Refused, "said"),
        ];
        for (outcome, is_error, expected, text) in cases {
            let mut receipt = receipt(outcome, is_error);
            let found = Found { out_of_memory: true, ..Found::default() };

            write(&mut receipt, &found, &table());

            let limits = std::mem::take(&mut receipt.limits_reached);
            let told = (receipt.outcome, receipt.content);
            assert_eq!(told, (expected, vec![files::text(text)]), "{outcome:?}");
            assert_eq!(limits.is_empty(), text == "said", "{outcome:?}");
        }
        assert_eq!((size(2 << 30), size(1536 << 20)), ("2 GiB".into(), "1536 MiB".into()));
    }

    #[test]
    fn every_limit_that_was_reached_is_named_once_and_before_the_output() {
        let mut receipt = receipt(Outcome::TimedOut, true);
        let full = vec!["/dev/shm".to_owned(), "/tmp".to_owned()];

        write(&mut receipt, &Found { processes: true, full, ..Found::default() }, &table());

        assert_eq!(receipt.limits_reached, [Limit::Processes, Limit::Disk, Limit::Time]);
        let Content::Text { text } = &receipt.content[0] else { panic!("{receipt:?}") };
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].contains("as many processes and threads as it may, 64"), "{text}");
        assert!(lines[1].ends_with("/dev/shm") && lines[2].ends_with("/tmp"), "{text}");
        assert_eq!(lines[3], "said");
    }

    #[test]
    fn a_command_that_failed_by_itself_has_reached_no_limit() {
        let mut receipt = receipt(Outcome::Finished, true);
        receipt.exit_code = Some(1);

        write(&mut receipt, &Found::default(), &table());

        assert_eq!(receipt.limits_reached, []);
        assert_eq!(receipt.content, [files::text("said")]);
    }
}
