//! What is refused and how that is recorded: one request, or all of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ipc::id::RequestId;

use crate::Daemon;
use crate::audit::{AuditError, Line};
use crate::reply::Refusal;

/// Records a refusal. Nothing leaves either way, so a record that fails stops nothing further.
pub async fn record_denied(daemon: &Daemon, mut line: Line, refusal: &Refusal) {
    explain(&mut line, refusal);
    daemon.leases.note(&line, refusal);
    let recorded = daemon.audit.deny(&line).await;
    log(&line, refusal, recorded);
}

/// The same for whoever cannot wait.
pub fn record_denied_at_once(daemon: &Daemon, mut line: Line, refusal: &Refusal) {
    explain(&mut line, refusal);
    daemon.leases.note(&line, refusal);
    log(&line, refusal, daemon.audit.deny_at_once(&line));
}

fn explain(line: &mut Line, refusal: &Refusal) {
    line.rule = refusal.rule.clone().or(line.rule.take());
    line.reason = Some(format!("{}: {}", refusal.code, refusal.reason));
    line.status = Some(refusal.status);
}

fn log(line: &Line, refusal: &Refusal, recorded: Result<bool, AuditError>) {
    match recorded {
        // Denials that are only counted must not fill the log either.
        Ok(false) => {}
        Ok(true) => tracing::info!(
            lease = line.lease.as_ref().map(|lease| lease.as_str()),
            host = line.host,
            rule = line.rule,
            code = refusal.code,
            "request denied"
        ),
        Err(error) => tracing::error!(%error, "cannot record a denial"),
    }
}

/// The refusal of a whole connection, which every request on it gets. Each of them has a record of
/// its own; the connection has one where none came, made when this is dropped.
pub struct Standing {
    pub refusal: Refusal,
    record: Record,
}

enum Record {
    /// There is one already: what this was allowed for has failed.
    Made(RequestId),
    OfEach {
        daemon: Arc<Daemon>,
        connection: Box<Line>,
        /// The connection needs none: a request came, and has its record, or it has one already.
        asked: AtomicBool,
    },
}

impl Standing {
    /// `line` is the connection's. The calls on the lease learn of the refusal at once.
    pub fn denied(daemon: &Arc<Daemon>, mut line: Line, refusal: Refusal) -> Arc<Self> {
        explain(&mut line, &refusal);
        daemon.leases.note(&line, &refusal);
        let daemon = Arc::clone(daemon);
        let (connection, asked) = (Box::new(line), AtomicBool::new(false));
        Arc::new(Self { refusal, record: Record::OfEach { daemon, connection, asked } })
    }

    /// Of a connection whose own record is made.
    pub fn recorded(daemon: &Arc<Daemon>, refusal: Refusal) -> Arc<Self> {
        let (daemon, connection) = (Arc::clone(daemon), Box::default());
        let asked = AtomicBool::new(true);
        Arc::new(Self { refusal, record: Record::OfEach { daemon, connection, asked } })
    }

    /// Of a connection that was allowed and has failed: its decision and its outcome stand in the
    /// audit under `id`.
    pub fn failed(id: RequestId, refusal: Refusal) -> Arc<Self> {
        Arc::new(Self { refusal, record: Record::Made(id) })
    }

    /// Records one request, and gives the id to tell its client.
    pub async fn record(&self, line: Line, id: RequestId) -> RequestId {
        match &self.record {
            Record::Made(id) => id.clone(),
            Record::OfEach { daemon, .. } => {
                record_denied(daemon, line, &self.refusal).await;
                self.has_record();
                id
            }
        }
    }

    /// A request of the connection has a record.
    pub fn has_record(&self) {
        if let Record::OfEach { asked, .. } = &self.record {
            asked.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        if let Record::OfEach { daemon, connection, asked } = &mut self.record
            && !*asked.get_mut()
        {
            log(connection, &self.refusal, daemon.audit.deny_at_once(connection));
        }
    }
}
