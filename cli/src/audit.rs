//! `cleanhands audit`: what left, what was denied, by which rule, with which credential's name.

use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum as _;
use ipc::fault::Code;
use ipc::http::Client;
use ipc::vault::{AuditKind, AuditPage, AuditRecord, ChainReport};

use crate::api::segment;
use crate::args::{Audit, Global};
use crate::chain;
use crate::failure::Failure;
use crate::place;
use crate::term::{self, Style, printable};

/// Records asked for at once.
const PAGE: u64 = 500;
/// How often `--follow` asks for new records.
const FOLLOW_EVERY: Duration = Duration::from_millis(500);

pub async fn audit(global: &Global, options: Audit) -> Result<ExitCode, Failure> {
    let proxyd = Client::new(place::layout(global).proxyd());
    if options.verify {
        let report: ChainReport = proxyd.get("/v1/audit/verify").await?;
        return chain::print(global.json, "audit", &report);
    }
    let style = Style::of_stdout();
    let filter = filter(&options);
    let from_now = options.follow && options.since.is_none();
    let mut after = if from_now { newest(&proxyd, &filter).await? } else { 0 };
    let (mut reached, mut away) = (from_now, false);
    loop {
        let page = match page(&proxyd, &filter, after, PAGE).await {
            // Whoever follows outlasts a restart of proxyd, once it was there.
            Err(failure) if failure.code == Code::Unavailable && reached && options.follow => {
                if !std::mem::replace(&mut away, true) {
                    term::aside(&format!("cleanhands: {}; waiting for it", failure.text));
                }
                if interrupted_within(FOLLOW_EVERY).await {
                    return Ok(ExitCode::SUCCESS);
                }
                continue;
            }
            page => page?,
        };
        (reached, away) = (true, false);
        for record in &page.records {
            if global.json { term::json_line(record)? } else { term::line(&line(style, record))? }
        }
        // A page may be empty before the end.
        let end = page.last <= after;
        after = after.max(page.last);
        if !end {
            continue;
        }
        if !options.follow || interrupted_within(FOLLOW_EVERY).await {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

async fn interrupted_within(span: Duration) -> bool {
    tokio::time::timeout(span, tokio::signal::ctrl_c()).await.is_ok()
}

/// The part of the query that says which records are wanted; proxyd checks it.
fn filter(options: &Audit) -> String {
    let kind = options.kind.and_then(|kind| kind.to_possible_value());
    let kind = kind.map(|kind| kind.get_name().to_owned());
    let filters = [
        ("kind", &kind),
        ("session", &options.session),
        ("lease", &options.lease),
        ("call", &options.call),
        ("host", &options.host),
        ("rule", &options.rule),
        ("credential", &options.credential),
        ("environment", &options.environment),
        ("since", &options.since),
        ("until", &options.until),
    ];
    let set = filters.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
    set.map(|(name, value)| format!("&{name}={}", segment(value))).collect()
}

async fn page(proxyd: &Client, filter: &str, after: u64, limit: u64) -> Result<AuditPage, Failure> {
    Ok(proxyd.get(&format!("/v1/audit?after={after}&limit={limit}{filter}")).await?)
}

/// The number of the newest record; the filter is checked with it.
async fn newest(proxyd: &Client, filter: &str) -> Result<u64, Failure> {
    Ok(page(proxyd, filter, u64::MAX, 1).await?.newest)
}

/// Every record of the audit.
pub async fn all(proxyd: &Client) -> Result<Vec<AuditRecord>, Failure> {
    let mut records = Vec::new();
    let mut after = 0;
    loop {
        let page = page(proxyd, "", after, PAGE).await?;
        records.extend(page.records);
        if page.last <= after {
            return Ok(records);
        }
        after = page.last;
    }
}

/// One record as one line. Host, path and method are what a sandbox sent: made printable.
pub fn line(style: Style, record: &AuditRecord) -> String {
    let kind = match record.kind {
        AuditKind::Allowed => style.good("allowed"),
        AuditKind::Denied => style.bad("denied "),
        AuditKind::Outcome => style.dim("outcome"),
        AuditKind::Note => style.dim("note   "),
    };
    let mut parts = vec![style.dim(&record.time), kind];
    parts.extend(record.method.as_deref().map(|method| printable(method).into_owned()));
    if let Some(host) = &record.host {
        let port = record.port.map(|port| format!(":{port}")).unwrap_or_default();
        let path = record.path.as_deref().unwrap_or_default();
        parts.push(printable(&format!("{host}{port}{path}")).into_owned());
    }
    parts.extend(record.status.map(|status| status.to_string()));
    let mut named = |name: &str, value: Option<String>| {
        parts.extend(value.map(|value| format!("{} {}", style.dim(name), printable(&value))));
    };
    named("rule", record.rule.clone());
    named("credential", record.credential.clone());
    named("scrubbed", record.scrubbed.filter(|n| *n > 0).map(|n| n.to_string()));
    named("environment", record.environment.clone());
    let calls: Vec<&str> = record.calls.iter().map(|call| call.as_str()).collect();
    let calls = Some(calls.join(", ")).filter(|calls| !calls.is_empty());
    // All calls of a sandbox share its network: whose request it was is known of one alone.
    named(if record.calls.len() > 1 { "one of the calls" } else { "call" }, calls);
    if record.kind == AuditKind::Note {
        // A note is its text alone.
        parts.extend(record.reason.as_deref().map(|text| printable(text).into_owned()));
    } else {
        named("because", record.reason.clone());
    }
    parts.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(json: serde_json::Value) -> AuditRecord {
        let mut whole = json!({"seq": 1, "time": "t", "kind": "allowed", "calls": [],
            "generation": 1, "hash": "h"});
        for (key, value) in json.as_object().unwrap() {
            whole[key] = value.clone();
        }
        serde_json::from_value(whole).unwrap()
    }

    #[test]
    fn a_line_says_who_asked_for_what_and_why_not() {
        let denied = record(json!({"kind": "denied", "method": "POST", "host": "evil.example",
            "port": 443, "path": "/c", "reason": "not listed"}));

        let text = line(Style::plain(), &denied);

        assert_eq!(text, "t  denied   POST  evil.example:443/c  because not listed");
    }

    #[test]
    fn a_request_while_several_calls_ran_is_put_down_to_none_of_them() {
        let of = |calls| line(Style::plain(), &record(json!({ "host": "a", "calls": calls })));

        assert_eq!(of(json!(["c_1"])), "t  allowed  a  call c_1");
        assert_eq!(of(json!(["c_1", "c_2"])), "t  allowed  a  one of the calls c_1, c_2");
    }

    #[test]
    fn filters_are_passed_on_whatever_characters_they_have() {
        let options = Audit {
            kind: Some(crate::args::Kind::Denied),
            rule: Some("egress.allow[2]".into()),
            host: Some("a&b".into()),
            ..Audit::default()
        };

        assert_eq!(filter(&options), "&kind=denied&host=a%26b&rule=egress.allow%5B2%5D");
    }

    #[test]
    fn a_note_is_its_text() {
        let note = record(json!({"kind": "note", "reason": "secret a removed by uid:1"}));

        assert_eq!(line(Style::plain(), &note), "t  note     secret a removed by uid:1");
    }

    #[test]
    fn a_planted_path_cannot_write_over_the_line() {
        let planted = record(json!({"host": "a", "path": "/\u{1b}[1A\r"}));

        assert!(!line(Style::plain(), &planted).contains(['\u{1b}', '\r']));
    }
}
