//! Whether each daemon goes by the files as they are, and all by the same ones.
//!
//! A daemon says which files it has read and their digests; here the same files are read again.
//! Where the caller may not read them, the daemons are still compared with each other.

use std::io::ErrorKind;
use std::path::Path;

use ipc::in_force::{InForce, sha256};
use policies::PolicySet;

use super::{Finding, Grade};
use crate::daemons::Daemon;

const WHAT: &str = "in force";
/// Digits of a digest that are shown: enough to tell two states of files apart.
const SHOWN: usize = 12;

/// What is found about the files of the daemons that answered.
pub fn compare(daemons: &[(Daemon, InForce)]) -> Vec<Finding> {
    // Without it the daemon is older than its answer's field.
    let told: Vec<_> = daemons.iter().filter(|(_, files)| files.policies.is_some()).collect();
    let mut findings: Vec<Finding> =
        told.iter().map(|(daemon, files)| one(*daemon, files)).collect();
    if let Some(((first, a), (other, b))) = told.iter().find_map(|(daemon, files)| {
        let (first, kept) = told.first()?;
        (kept.policies_sha256 != files.policies_sha256)
            .then_some(((*first, kept), (*daemon, files)))
    }) {
        let text = format!(
            "{} goes by other policies ({}) than {} ({})",
            other.name(),
            place(b.policies.as_deref()),
            first.name(),
            place(a.policies.as_deref()),
        );
        let hint = "give all daemons one policies-dir; if it is one, mend what does not parse";
        findings.push(Finding::new(WHAT, Grade::Bad, text).hint(hint));
    }
    findings
}

fn one(daemon: Daemon, files: &InForce) -> Finding {
    let policies = short(files.policies_sha256.as_deref());
    let config = short(files.config_sha256.as_deref());
    let name = daemon.name();
    let text = format!("{name}: policies {policies}, configuration {config}");
    let now = files.policies.as_deref().map(PolicySet::load);
    if let Some(Ok(now)) = now
        && files.policies_sha256.as_deref() != Some(now.digest())
    {
        let is = short(Some(now.digest()));
        let text = format!("{text}; the policies in {} are {is}", place(files.policies.as_deref()));
        let hint = format!("look again in a moment; if it stays, restart {name}");
        return Finding::new(WHAT, Grade::Bad, text).hint(hint);
    }
    match files.config.as_deref().map(std::fs::read) {
        Some(Ok(now)) if files.config_sha256 != Some(sha256(&now)) => {
            let is = short(Some(&sha256(&now)));
            let text = format!("{text}; {} is {is}", place(files.config.as_deref()));
            let hint = match daemon {
                Daemon::Proxyd => "a SIGHUP puts most keys in force, a restart of proxyd all",
                _ => "it is read at the start: restart the daemon",
            };
            Finding::new(WHAT, Grade::Bad, text).hint(hint)
        }
        Some(Err(error))
            if error.kind() == ErrorKind::NotFound && files.config_sha256.is_some() =>
        {
            let text = format!("{text}; {} is gone", place(files.config.as_deref()));
            let hint = "the next start goes by the defaults: put the file back, or restart";
            Finding::new(WHAT, Grade::Bad, text).hint(hint)
        }
        _ => Finding::new(WHAT, Grade::Good, text),
    }
}

fn short(digest: Option<&str>) -> String {
    let shown = digest.map(|digest| digest.chars().take(SHOWN).collect());
    shown.unwrap_or_else(|| "none".to_owned())
}

fn place(path: Option<&Path>) -> String {
    path.map(|path| path.display().to_string()).unwrap_or_default()
}
