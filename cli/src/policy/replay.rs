//! `cleanhands policy replay`: what policies would have made of what the audit has recorded.
//!
//! The audit keeps no query and no scheme: what git asks is told by its path and the reason of the
//! denial, port 80 is plain HTTP and every other port TLS. Records that a policy did not decide (a
//! missing secret, a full share) are left out, and so are counts of denials, which name no request.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::Path;
use std::process::ExitCode;

use ipc::http::Client;
use ipc::vault::{AuditKind, AuditRecord};
use policies::{ConnectDecision, Decision, EgressRequest, Host, Policy, PolicySet, Scheme};
use serde_json::json;

use super::load;
use crate::args::Global;
use crate::failure::{Failure, OTHERWISE};
use crate::term::{self, Style};
use crate::{audit, place};

/// Reasons that are a policy's own.
const JUDGED: &[&str] = &[
    "host_not_listed",
    "port_not_listed",
    "plaintext_not_allowed",
    "method_not_listed",
    "path_not_listed",
    "path_ambiguous",
    "repository_not_listed",
    "push_not_allowed",
    "lfs_not_allowed",
    "credential_host",
];

/// `file`: records as `cleanhands audit --json` prints them, `-` for standard input; none asks the
/// running proxyd.
pub async fn run(global: &Global, file: Option<&Path>, dir: &Path) -> Result<ExitCode, Failure> {
    let set = load(dir)?;
    let records = match file {
        None => audit::all(&Client::new(place::layout(global).proxyd())).await?,
        Some(path) => read(path)?,
    };
    let mut tally = Tally::default();
    records.iter().for_each(|record| tally.take(&set, record));
    tally.show(global)
}

fn read(path: &Path) -> Result<Vec<AuditRecord>, Failure> {
    let cannot = |why: String| {
        Failure::new(format!("cannot read the records of {}: {why}", path.display()))
            .with_hint("`cleanhands audit --json > FILE` writes them, one a line")
    };
    let input: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        let file = std::fs::File::open(path).map_err(|error| cannot(error.to_string()))?;
        Box::new(std::io::BufReader::new(file))
    };
    let mut records = Vec::new();
    for (number, line) in input.lines().enumerate() {
        let line = line.map_err(|error| cannot(error.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        let record = serde_json::from_str(&line);
        records.push(record.map_err(|error| cannot(format!("line {}: {error}", number + 1)))?);
    }
    Ok(records)
}

/// What is told apart of records that would be judged otherwise.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Otherwise {
    environment: String,
    what: String,
    before: String,
    after: String,
}

#[derive(Default)]
struct Tally {
    same: u64,
    left_out: u64,
    otherwise: BTreeMap<Otherwise, u64>,
}

impl Tally {
    fn take(&mut self, set: &PolicySet, record: &AuditRecord) {
        if !matches!(record.kind, AuditKind::Allowed | AuditKind::Denied) {
            return;
        }
        let Some((before, after)) = judged(set, record) else {
            self.left_out += 1;
            return;
        };
        if before == after {
            self.same += 1;
            return;
        }
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let method = record.method.as_deref().map_or("connection to", |method| method);
        let port = record.port.map(|port| format!(":{port}")).unwrap_or_default();
        let what = format!("{method} {}{port}{}", text(&record.host), text(&record.path));
        let environment = text(&record.environment);
        *self.otherwise.entry(Otherwise { environment, what, before, after }).or_default() += 1;
    }

    fn show(&self, global: &Global) -> Result<ExitCode, Failure> {
        let style = Style::of_stdout();
        for (one, count) in &self.otherwise {
            let Otherwise { environment, what, before, after } = one;
            if global.json {
                term::json_line(&json!({
                    "environment": environment, "what": what, "before": before, "after": after,
                    "count": count,
                }))?;
                continue;
            }
            let mark = match (before.starts_with("denied"), after.starts_with("denied")) {
                (true, false) => style.bad("+"),
                (false, true) => style.good("-"),
                _ => style.warn("~"),
            };
            let text = format!("{environment}: {what}: {before} -> {after}");
            term::line(&format!("{mark} {count:>6}  {}", term::printable(&text)))?;
        }
        let (same, left_out) = (self.same, self.left_out);
        let otherwise: u64 = self.otherwise.values().sum();
        if global.json {
            term::json_line(
                &json!({ "same": same, "otherwise": otherwise, "left_out": left_out }),
            )?;
        } else {
            term::line(&format!(
                "{same} as before, {otherwise} otherwise; {left_out} left out, which no policy \
                 decided or which do not say enough"
            ))?;
        }
        Ok(if otherwise == 0 { ExitCode::SUCCESS } else { ExitCode::from(OTHERWISE) })
    }
}

/// What was decided and what would be; none where that cannot be told.
fn judged(set: &PolicySet, record: &AuditRecord) -> Option<(String, String)> {
    let code = record.reason.as_deref().map(|reason| reason.split(':').next().unwrap_or_default());
    let before = match (record.kind, code) {
        (AuditKind::Allowed, _) => allowed(record.credential.as_deref()),
        (_, Some(code)) if JUDGED.contains(&code) && record.repeated.is_none() => "denied".into(),
        _ => return None,
    };
    let host = Host::parse(record.host.as_deref()?).ok()?;
    let port = record.port.filter(|port| *port != 0);
    let Some(policy) = set.environment(record.environment.as_deref()?) else {
        return Some((before, "denied: the environment is gone".to_owned()));
    };
    let mcp = record.rule.as_deref().is_some_and(|rule| rule.starts_with("mcp."));
    let mcp = mcp.then(|| policy.for_mcp());
    let policy = mcp.as_ref().unwrap_or(policy);
    let after = match (record.entry.as_deref()?, &record.method) {
        ("dns", _) => match policy.resolvable(&host) {
            // A lookup that is answered is no record; the connection that follows is.
            true => return None,
            false => "denied".to_owned(),
        },
        (_, Some(method)) => request(policy, record, &host, port?, method, code)?,
        _ => connection(policy, &host, port?, &before)?,
    };
    // A credential that a request did not ask for is in the policy and not in the record.
    let asked = after.starts_with("allowed") && before == "allowed";
    Some((before.clone(), if asked { before } else { after }))
}

fn allowed(credential: Option<&str>) -> String {
    credential.map_or("allowed".to_owned(), |name| format!("allowed, credential {name}"))
}

fn connection(policy: &Policy, host: &Host, port: u16, before: &str) -> Option<String> {
    match policy.at_connect(host, port) {
        ConnectDecision::Deny(_) => Some("denied".to_owned()),
        ConnectDecision::Tunnel(_) => Some("allowed".to_owned()),
        ConnectDecision::Inspect if before == "denied" => {
            Some("let in, and its requests judged".to_owned())
        }
        // What its requests are was never seen.
        ConnectDecision::Inspect => None,
    }
}

fn request(
    policy: &Policy,
    record: &AuditRecord,
    host: &Host,
    port: u16,
    method: &str,
    code: Option<&str>,
) -> Option<String> {
    let path = record.path.as_deref()?;
    if path.ends_with('…') {
        return None;
    }
    let git = match code {
        Some("push_not_allowed") => "service=git-receive-pack",
        _ => "service=git-upload-pack",
    };
    let query = path.ends_with("/info/refs").then_some(git);
    let scheme = if port == 80 { Scheme::Http } else { Scheme::Https };
    let asked = EgressRequest { scheme, host, port, method, path, query };
    if let ConnectDecision::Tunnel(permit) = policy.at_connect(host, port) {
        return Some(allowed(permit.carries().as_deref()));
    }
    Some(match policy.decide(&asked) {
        Decision::Allowed(permit) => allowed(permit.carries().as_deref()),
        Decision::Denied(_) => "denied".to_owned(),
    })
}
