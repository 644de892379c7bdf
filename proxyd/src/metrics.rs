//! What proxyd has done and how it is, as text for Prometheus and whatever reads its format
//! (version 0.0.4). Counts begin with the process. No label is a word that a sandbox chose: hosts
//! and paths are the audit's.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::Daemon;
use crate::audit::{Counts, DURATIONS_MS};
use crate::reload;
use crate::vault::VaultError;

/// The type of the answer.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Everything that is counted, now.
pub async fn text(daemon: &Daemon) -> Result<String, VaultError> {
    let mut out = Text::default();
    let version = env!("CARGO_PKG_VERSION").to_owned();
    out.gauge("info", "Which version serves.", &[(&[("version", version)], 1)]);
    let current = daemon.policies.current().number;
    out.gauge("policy_generation", "Number of the policies in force.", &[(&[], current)]);
    let problem = u64::from(reload::problem(daemon).is_some());
    out.gauge(
        "files_wrong",
        "1 while former files are in force: the present ones are wrong.",
        &[(&[], problem)],
    );
    exchanges(&mut out, &daemon.audit.counts());
    let state = daemon.audit.standing();
    out.counter("audit_records_total", "Number of the last record.", &[(&[], state.last)]);
    out.gauge(
        "audit_unsynced_records",
        "Records that wait for the disk.",
        &[(&[], state.last - state.synced)],
    );
    out.gauge(
        "audit_failed",
        "1 while the disk refuses and nothing leaves.",
        &[(&[], u64::from(state.failed))],
    );
    let mut leases: BTreeMap<String, u64> = BTreeMap::new();
    for lease in daemon.leases.views() {
        *leases.entry(lease.environment).or_default() += 1;
    }
    out.labelled("gauge", "leases", "Open leases.", "environment", &leases);
    let (kept, evicted) = daemon.leaves.numbers();
    out.gauge("leaf_certificates", "Hosts with a kept certificate.", &[(&[], kept)]);
    out.counter("leaf_evictions_total", "Hosts that made room for others.", &[(&[], evicted)]);
    let mut secrets: BTreeMap<String, u64> =
        [("ready", 0), ("needs_login", 0)].map(|(k, n)| (k.to_owned(), n)).into();
    let listed = daemon.vault.list().await?.into_iter();
    // Of what others keep only what they refuse.
    for secret in listed.filter(|secret| secret.version > 0 || secret.state == "needs_login") {
        *secrets.entry(secret.state).or_default() += 1;
    }
    out.labelled("gauge", "secrets", "Secrets of the embedded vault.", "state", &secrets);
    Ok(out.0)
}

fn exchanges(out: &mut Text, counts: &Counts) {
    let Counts { allowed, injected, bytes_up, bytes_down, masked, milliseconds, .. } = *counts;
    out.counter("allowed_total", "Requests and tunnels that were let out.", &[(&[], allowed)]);
    out.counter("injected_total", "Of those, with a credential.", &[(&[], injected)]);
    out.labelled("counter", "denied_total", "What was refused.", "reason", &counts.denied);
    out.counter(
        "stopped_total",
        "What did not leave because the audit could not be written.",
        &[(&[], counts.stopped)],
    );
    out.labelled(
        "counter",
        "ended_total",
        "What was let out and has ended.",
        "status",
        &counts.ended,
    );
    out.labelled(
        "counter",
        "failed_total",
        "Of those, without a proper end.",
        "reason",
        &counts.failed,
    );
    let ended = counts.ended.values().sum();
    out.gauge(
        "under_way",
        "Requests and tunnels under way.",
        &[(&[], allowed.saturating_sub(ended))],
    );
    let bytes = [("down".to_owned(), bytes_down), ("up".to_owned(), bytes_up)].into();
    out.labelled("counter", "bytes_total", "Bytes of bodies and tunnels.", "direction", &bytes);
    out.counter("masked_total", "Values of credentials masked in answers.", &[(&[], masked)]);
    let name = "duration_seconds";
    out.head("histogram", name, "From the request's head to the last byte of its answer.");
    let mut below = 0;
    for (end, count) in DURATIONS_MS.iter().zip(&counts.durations) {
        below += count;
        out.line(&format!("{name}_bucket"), &[("le", seconds(*end))], &below.to_string());
    }
    out.line(&format!("{name}_bucket"), &[("le", "+Inf".to_owned())], &ended.to_string());
    out.line(&format!("{name}_sum"), &[], &seconds(milliseconds));
    out.line(&format!("{name}_count"), &[], &ended.to_string());
}

fn seconds(milliseconds: u64) -> String {
    format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000)
}

type Labels<'a> = &'a [(&'a str, String)];

#[derive(Default)]
struct Text(String);

impl Text {
    fn head(&mut self, kind: &str, name: &str, help: &str) {
        // Writing to a text cannot fail.
        let _ = writeln!(self.0, "# HELP cleanhands_proxyd_{name} {help}");
        let _ = writeln!(self.0, "# TYPE cleanhands_proxyd_{name} {kind}");
    }

    fn line(&mut self, name: &str, labels: Labels<'_>, value: &str) {
        let labels: Vec<_> =
            labels.iter().map(|(key, text)| format!("{key}=\"{}\"", escaped(text))).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "cleanhands_proxyd_{name}{labels} {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, values: &[(Labels<'_>, u64)]) {
        self.head("gauge", name, help);
        values.iter().for_each(|(labels, value)| self.line(name, labels, &value.to_string()));
    }

    fn counter(&mut self, name: &str, help: &str, values: &[(Labels<'_>, u64)]) {
        self.head("counter", name, help);
        values.iter().for_each(|(labels, value)| self.line(name, labels, &value.to_string()));
    }

    fn labelled(
        &mut self,
        kind: &str,
        name: &str,
        help: &str,
        label: &str,
        values: &BTreeMap<String, u64>,
    ) {
        self.head(kind, name, help);
        for (text, value) in values {
            self.line(name, &[(label, text.clone())], &value.to_string());
        }
    }
}

/// A label's text as the format has it.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_upwards_and_ends_with_all() {
        let mut counts = Counts { milliseconds: 2500, ..Counts::default() };
        counts.durations[0] = 2;
        counts.durations[11] = 1;
        counts.ended.insert("2xx".to_owned(), 3);
        let mut out = Text::default();

        exchanges(&mut out, &counts);

        for line in [
            "duration_seconds_bucket{le=\"0.001\"} 2",
            "duration_seconds_bucket{le=\"300.000\"} 2",
            "duration_seconds_bucket{le=\"+Inf\"} 3",
            "duration_seconds_sum 2.500",
            "duration_seconds_count 3",
        ] {
            assert!(out.0.contains(&format!("\ncleanhands_proxyd_{line}\n")), "{line}: {}", out.0);
        }
    }

    #[test]
    fn no_label_ends_its_line() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
