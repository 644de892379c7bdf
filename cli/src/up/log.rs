//! What `up` writes: lines to standard error, by a thread of its own.
//!
//! A pipe that nobody reads, or a terminal that was stopped, blocks whoever writes to it. The
//! supervisor must not: it would neither start a daemon again nor hear Ctrl-C. What finds no room
//! is counted, and the count stands in its place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Lines that wait to be written: seconds of a busy log, megabytes at most.
const LINES_MAX: usize = 4096;
/// How long the last lines may take to be written at the end.
const LAST_WITHIN: Duration = Duration::from_secs(1);

/// Takes lines and never waits. Cheap to clone.
#[derive(Clone)]
pub struct Log {
    queue: SyncSender<Entry>,
    lost: Arc<AtomicU64>,
}

enum Entry {
    Line(String),
    /// Somebody waits until all that was said before is written.
    Mark(SyncSender<()>),
}

impl Log {
    /// Starts the thread. It starts no process, so nothing that must end with this program ends
    /// with it.
    pub fn start() -> std::io::Result<Self> {
        let (queue, entries) = sync_channel(LINES_MAX);
        std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || write_all(&entries, write))?;
        Ok(Self { queue, lost: Arc::default() })
    }

    pub fn line(&self, text: impl Into<String>) {
        let lost = self.lost.load(Ordering::Relaxed);
        let notice = format!("up       | {lost} lines are missing here: nobody read those before");
        if lost > 0 && self.queue.try_send(Entry::Line(notice)).is_ok() {
            self.lost.store(0, Ordering::Relaxed);
        }
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Entry::Line(text.into())) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Says something last, and waits a moment until all is written, and no longer.
    pub fn finish(self, last: Option<String>) {
        let until = Instant::now() + LAST_WITHIN;
        let (tell, told) = sync_channel(1);
        for mut entry in last.map(Entry::Line).into_iter().chain([Entry::Mark(tell)]) {
            while let Err(TrySendError::Full(same)) = self.queue.try_send(entry) {
                if Instant::now() >= until {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
                entry = same;
            }
        }
        let _ = told.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

fn write_all(entries: &Receiver<Entry>, mut write: impl FnMut(&str)) {
    for entry in entries {
        match entry {
            Entry::Line(line) => write(&line),
            // Whoever waited for it may have left.
            Entry::Mark(tell) => drop(tell.try_send(())),
        }
    }
}

/// Not by way of the standard library's lock, in which another writer would be caught.
fn write(line: &str) {
    let text = format!("{line}\n");
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(rustix::stdio::stderr(), rest) {
            Ok(written) => rest = &rest[written..],
            Err(rustix::io::Errno::INTR) => {}
            // Nobody reads it any more, which is no reason to end.
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_without_room_are_counted_where_they_would_have_stood() {
        let (queue, entries) = sync_channel(2);
        let log = Log { queue, lost: Arc::default() };
        for text in ["one", "two", "three", "four"] {
            log.line(text);
        }
        let mut written = Vec::new();
        let mut take = || {
            if let Ok(Entry::Line(line)) = entries.try_recv() {
                written.push(line);
            }
        };
        take();
        take();
        log.line("five");
        take();
        take();

        assert_eq!([&written[0], &written[1], &written[3]], ["one", "two", "five"]);
        assert!(written[2].contains("2 lines are missing here"), "{written:?}");
    }
}
