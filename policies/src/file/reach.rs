//! Rules that never decide: all that they match is decided by rules before them.
//!
//! What a rule matches is taken apart into the smallest kinds that rules can tell apart (one host
//! pattern, port, scheme, method, and path pattern or git service), and each kind is looked for
//! among the rules before. Nothing is found where two patterns cover a third one only together.

use std::collections::BTreeSet;

use super::egress::RawRule;
use super::reader::Reader;
use crate::egress::Rule;
use crate::pattern::{GitService, PathPattern, RepositoryPattern};

/// Requests to one place that no rule treats differently, but by their hosts and ports.
struct Kind<'a> {
    method: Option<&'a str>,
    target: Target<'a>,
}

enum Target<'a> {
    Any,
    Path(&'a PathPattern),
    Git(&'a RepositoryPattern, GitService),
}

/// Reports a rule that never decides; if it would restrict or inject, the file means something else
/// than it says.
pub(super) fn check(reader: &mut Reader<'_>, rule: &RawRule, earlier: &[RawRule]) {
    let deciding: Vec<&RawRule> = match deciding(rule, earlier) {
        Some(found) if !found.is_empty() => found.into_iter().map(|at| &earlier[at]).collect(),
        _ => return,
    };
    let names: Vec<&str> = deciding.iter().map(|other| other.rule.name.as_str()).collect();
    let takes = if names.len() == 1 { "takes" } else { "take" };
    let names = names.join(" and ");
    let message = format!("{} never decides: {names} {takes} its requests", rule.rule.name);
    let hint = "the first rule that matches wins: put the narrower one first, or take one out";
    if deciding.iter().any(|other| means_less(other, rule)) {
        reader.error_hint(&rule.span, message, hint);
    } else {
        reader.warn(&rule.span, message, hint);
    }
}

/// Whether the other rule lets something through that this one, were it first, would not, or would
/// ask about, or leaves out what this one puts in.
fn means_less(other: &RawRule, rule: &RawRule) -> bool {
    let pushes = |rule: &Rule| rule.git.as_ref().is_some_and(|git| git.push);
    let injects = |own: &str| other.credentials.iter().any(|name| name.value == own);
    // Credentials are not linked yet, so they are asked for by name.
    (rule.rule.inspects() && !other.rule.inspects())
        || (rule.rule.ask.is_some() && other.rule.ask.is_none())
        || rule.credentials.iter().any(|name| !injects(&name.value))
        || (rule.rule.git.is_some() && pushes(&other.rule) && !pushes(&rule.rule))
        || (!rule.quotas.is_empty() && rule.quotas != other.quotas)
}

/// The places of the rules that decide whatever this one matches; none if one kind is left to it.
fn deciding(rule: &RawRule, earlier: &[RawRule]) -> Option<BTreeSet<usize>> {
    let kinds = kinds(&rule.rule);
    let mut found = BTreeSet::new();
    for host in &rule.hosts {
        let covers = |other: &RawRule| other.hosts.iter().any(|own| own.value.covers(&host.value));
        let near: Vec<usize> = (0..earlier.len()).filter(|at| covers(&earlier[*at])).collect();
        if near.is_empty() {
            return None;
        }
        for port in &rule.rule.ports {
            for plaintext in [false, true] {
                if plaintext && !rule.rule.plaintext {
                    continue;
                }
                for kind in &kinds {
                    let takes = |at: &&usize| takes(&earlier[**at].rule, *port, plaintext, kind);
                    found.insert(*near.iter().find(takes)?);
                }
            }
        }
    }
    Some(found)
}

fn kinds(rule: &Rule) -> Vec<Kind<'_>> {
    if let Some(git) = &rule.git {
        let services: &[GitService] = match git.push {
            true => &[GitService::Upload, GitService::Receive],
            false => &[GitService::Upload],
        };
        let asked = services.iter().flat_map(|service| ["GET", "POST"].map(|m| (*service, m)));
        let kind = |own, (service, method)| Kind {
            method: Some(method),
            target: Target::Git(own, service),
        };
        let asked: Vec<_> = asked.collect();
        let own = git.repositories.iter();
        return own.flat_map(|own| asked.iter().map(move |asked| kind(own, *asked))).collect();
    }
    let methods: Vec<Option<&str>> = match &rule.methods {
        None => vec![None],
        Some(methods) => methods.iter().map(|method| Some(method.as_str())).collect(),
    };
    let of = |target: fn(&PathPattern) -> Target<'_>, path| {
        methods.iter().map(move |method| Kind { method: *method, target: target(path) })
    };
    match rule.paths.is_empty() {
        true => methods.iter().map(|m| Kind { method: *m, target: Target::Any }).collect(),
        false => rule.paths.iter().flat_map(|path| of(|path| Target::Path(path), path)).collect(),
    }
}

/// Whether an earlier rule whose hosts cover the kind's takes it.
fn takes(rule: &Rule, port: u16, plaintext: bool, kind: &Kind<'_>) -> bool {
    if !rule.ports.contains(&port) || (plaintext && !rule.plaintext) {
        return false;
    }
    let method = match (&rule.methods, kind.method) {
        (None, _) => true,
        (Some(own), Some(method)) => own.contains(method),
        (Some(_), None) => false,
    };
    method && takes_target(rule, &kind.target)
}

fn takes_target(rule: &Rule, target: &Target<'_>) -> bool {
    if let Some(git) = &rule.git {
        return match target {
            Target::Git(repository, service) => {
                (git.push || *service == GitService::Upload)
                    && git.repositories.iter().any(|own| own.covers(repository))
            }
            Target::Any | Target::Path(_) => false,
        };
    }
    rule.paths.is_empty()
        || match target {
            // Paths that servers read differently match no pattern.
            Target::Any => false,
            Target::Path(path) => rule.paths.iter().any(|own| own.covers(path)),
            Target::Git(repository, _) => rule.paths.iter().any(|own| own.is_above(repository)),
        }
}
