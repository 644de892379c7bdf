//! How changed files take effect while proxyd runs.
//!
//! A changed policy file is seen by itself; SIGHUP and `POST /v1/reload` read policies and the
//! part of `proxyd.toml` about the way out. Whatever is wrong changes nothing, is logged, and
//! stands in the health answer until it is mended.

use std::net::IpAddr;
use std::sync::Mutex;

use ipc::in_force::InForce;

use crate::Daemon;
use crate::audit::{Line, Retention};
use crate::config::{Config, ConfigError};
use crate::policy::{LoadError, Policies};
use crate::upstream::trust::TrustError;

/// The configuration as it was last read, and what was wrong with the file afterwards.
pub struct Configured {
    config: Mutex<Config>,
    problem: Mutex<Option<String>>,
}

/// Why the files are not in force as they are.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    #[error("{0}")]
    Policies(#[from] LoadError),
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Trust(#[from] TrustError),
}

impl Configured {
    pub fn new(config: Config) -> Self {
        Self { config: Mutex::new(config), problem: Mutex::new(None) }
    }

    /// Addresses besides loopback at which holders of leases may listen.
    pub fn lease_addresses(&self) -> Vec<IpAddr> {
        self.config.lock().expect("no holder of this lock panics").lease_addresses.clone()
    }

    /// Which records of the audit are kept.
    pub fn retention(&self) -> Retention {
        self.config.lock().expect("no holder of this lock panics").retention
    }

    /// Which files, and which state of them.
    pub fn in_force(&self, policies: &Policies) -> InForce {
        let config = self.config.lock().expect("no holder of this lock panics");
        InForce {
            policies: Some(policies.dir().to_owned()),
            policies_sha256: Some(policies.current().digest().to_owned()),
            config: Some(config.path.clone()),
            config_sha256: config.sha256.clone(),
        }
    }

    fn again(&self, daemon: &Daemon) -> Result<(), ReloadError> {
        let mut config = self.config.lock().expect("no holder of this lock panics");
        let next = config.again()?;
        daemon.upstreams.reload(&next.way_out)?;
        let fixed = config.fixed_differences(&next);
        if !fixed.is_empty() {
            let keys = fixed.join(", ");
            tracing::warn!(keys, "changes of these keys take effect when proxyd starts again");
        } else {
            config.sha256 = next.sha256;
        }
        config.way_out = next.way_out;
        config.lease_addresses = next.lease_addresses;
        config.retention = next.retention;
        Ok(())
    }
}

/// What is wrong with the files as they are now, in words; none when they are in force.
pub fn problem(daemon: &Daemon) -> Option<String> {
    let config = &daemon.configured.problem;
    let config = config.lock().expect("no holder of this lock panics").clone();
    let both: Vec<_> = daemon.policies.problem().into_iter().chain(config).collect();
    (!both.is_empty()).then(|| both.join("\n"))
}

/// Reads policies and the way out again. Each takes effect where it is right by itself; the first
/// problem comes back.
pub async fn all(daemon: &Daemon) -> Result<u64, ReloadError> {
    let outcome = daemon.configured.again(daemon);
    if let Err(error) = &outcome {
        tracing::error!(%error, "changed proxyd.toml is not in force, the former table stays");
    } else {
        tracing::info!("way out read again");
    }
    let problem = outcome.as_ref().err().map(ToString::to_string);
    *daemon.configured.problem.lock().expect("no holder of this lock panics") = problem;
    let generation = policies(daemon).await?;
    outcome.map(|()| generation)
}

/// Puts changed policy files in force: new requests are judged by them at once, and flows that
/// they no longer allow are stopped.
pub async fn policies(daemon: &Daemon) -> Result<u64, ReloadError> {
    let generation = daemon.policies.reload().inspect_err(|error| {
        tracing::error!(%error, "changed policies are not loaded, the former stay in force");
    })?;
    daemon.leases.judge_again(&daemon.policies.current());
    daemon.questions.judge_again();
    tracing::info!(generation, "policies loaded");
    let reason = Some(format!("policies loaded as generation {generation}"));
    if let Err(error) = daemon.audit.note(&Line { reason, generation, ..Line::default() }).await {
        tracing::error!(%error, "cannot record a reload");
    }
    Ok(generation)
}
