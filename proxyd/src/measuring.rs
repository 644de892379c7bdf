//! What benchmarks call that stand outside of this crate; nothing else does.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::id::{LeaseId, RequestId};

use crate::audit::{Audit, Line};

/// How long it takes until so many pairs of decision and outcome, recorded by that many tasks at
/// once, are on disk.
pub async fn audit(dir: &Path, tasks: usize, pairs: usize) -> Result<Duration, String> {
    let audit = Audit::open(dir).map_err(|error| error.to_string())?;
    let line = Arc::new(Line {
        request: Some(RequestId::random()),
        lease: Some(LeaseId::random()),
        environment: Some("bench".into()),
        generation: 1,
        entry: Some("http".into()),
        host: Some("bench.example".into()),
        port: Some(443),
        address: Some("127.0.0.1:443".into()),
        method: Some("GET".into()),
        path: Some("/x".into()),
        rule: Some("egress.allow[0]".into()),
        credential: Some("bench".into()),
        status: Some(200),
        ..Line::default()
    });
    let begun = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..tasks {
        let (audit, line) = (audit.clone(), Arc::clone(&line));
        running.spawn(async move {
            for _ in 0..pairs / tasks {
                audit.allow(&line).await?;
                audit.outcome(&line)?;
                // A request would wait for its upstream here.
                tokio::task::yield_now().await;
            }
            Ok(())
        });
    }
    for outcome in running.join_all().await {
        outcome.map_err(|error: crate::audit::AuditError| error.to_string())?;
    }
    // It resolves when the last record is on disk.
    audit.close().await;
    Ok(begun.elapsed())
}
