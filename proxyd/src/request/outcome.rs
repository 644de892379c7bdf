//! How an allowed exchange ended: the second of its records.

use std::sync::Arc;

use crate::Daemon;
use crate::audit::Line;
use crate::relay::exchange::Tally;
use crate::reply::Refusal;

/// The second record of an allowed exchange: made when this is dropped, however that comes.
pub struct Outcome {
    daemon: Arc<Daemon>,
    pub line: Box<Line>,
    pub tally: Tally,
    ended: bool,
}

impl Outcome {
    /// `line` is that of the decision.
    pub fn new(daemon: Arc<Daemon>, line: Box<Line>) -> Self {
        Self { daemon, line, tally: Tally::default(), ended: false }
    }

    pub fn done(&mut self) {
        self.ended = true;
    }

    pub fn refused(&mut self, refusal: &Refusal) {
        self.ended = true;
        self.line.reason = Some(format!("{}: {}", refusal.code, refusal.reason));
        self.daemon.leases.note(&self.line, refusal);
        if self.tally.status().is_none() {
            self.line.status = Some(refusal.status);
        }
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        let line = &mut *self.line;
        line.status = self.tally.status().or(line.status);
        if !self.ended {
            line.reason = Some("broken off: the lease or proxyd ended".to_owned());
        }
        line.bytes_up = Some(self.tally.up());
        line.bytes_down = Some(self.tally.down());
        line.duration_ms = Some(self.tally.elapsed_ms());
        line.scrubbed = Some(self.tally.scrubbed());
        // The audit says it to operators; a log line as well for every request costs as much as
        // carrying it.
        tracing::debug!(
            lease = line.lease.as_ref().map(|lease| lease.as_str()),
            host = line.host,
            rule = line.rule,
            status = line.status,
            ms = line.duration_ms,
            "request ended"
        );
        if let Err(error) = self.daemon.audit.outcome(line) {
            tracing::error!(%error, "cannot record an outcome");
        }
    }
}
