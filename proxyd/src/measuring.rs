//! What benchmarks call that stand outside of this crate; nothing else does.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::daemon::SelfExec;
use ipc::id::{LeaseId, RequestId};
use policies::{Credential, Host};

use crate::audit::{Audit, Line};
use crate::config::{Arguments, Config};
use crate::policy::Policies;
use crate::vault::{KeySource, Secret, Vault};

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

/// A vault with one secret, and a credential of it that serves any host below a name.
pub struct Rendering {
    vault: Vault,
    credential: Arc<Credential>,
    /// The vault's process.
    pub pid: u32,
}

impl Rendering {
    /// `arguments` are proxyd's own; this program starts itself again as the vault. Blocking, and
    /// before there is a second thread.
    pub fn start(arguments: Vec<OsString>) -> Result<Self, String> {
        // As proxyd itself does.
        crate::sys::wipe::freed_memory();
        let arguments = Arguments::parse_from_rest(arguments).map_err(text)?;
        let config = Config::load(&arguments).map_err(text)?;
        let (state, policies) = (config.state(), &config.layout.policies);
        ipc::daemon::private_directory(&state).map_err(text)?;
        let set = Policies::check(policies).map_err(text)?;
        let credential = set.environment("bench").and_then(|own| own.credentials.get("bench"));
        let credential = credential.ok_or("no credential bench")?.clone();
        let key = KeySource::choose(None, None, &state).map_err(text)?;
        let exec = SelfExec { prefix: Vec::new() };
        let arguments = (config.command_line(), false);
        let started = Vault::start(&exec, &state, (&key, None), (policies, &[]), arguments);
        let (vault, facts) = started.map_err(text)?;
        Ok(Self { vault, credential, pid: facts.pid })
    }

    /// Stores the secret, inside the runtime.
    pub async fn fill(&self, value: &str) -> Result<(), String> {
        self.vault.attach().map_err(text)?;
        self.vault.put("bench", Secret::new(value.into())).await.map(|_| ()).map_err(text)
    }

    /// Has it rendered for each of these hosts.
    pub async fn render(&self, hosts: &[String]) -> Result<Duration, String> {
        let hosts: Vec<Host> =
            hosts.iter().map(|host| Host::parse(host)).collect::<Result<_, _>>().map_err(text)?;
        let begun = Instant::now();
        for host in &hosts {
            self.vault.render(&self.credential, host).await.map_err(text)?;
        }
        Ok(begun.elapsed())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
