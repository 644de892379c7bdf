//! Checks what spans tables: credentials against rules, rules against each other.

use std::collections::BTreeSet;

use super::credentials::{Credentials, Named};
use super::egress::{RawRule, RawServer};
use super::reach;
use super::reader::{Reader, Span, Spanned};
use crate::credential::Inject;
use crate::egress::Scheme;
use crate::pattern::HostPattern;
use crate::sandbox::SandboxTable;

pub(crate) fn check(
    reader: &mut Reader<'_>,
    rules: &[RawRule],
    servers: &[RawServer],
    credentials: &Credentials,
    sandbox: &SandboxTable,
) {
    let mut used = BTreeSet::new();
    for rule in rules {
        for name in &rule.credentials {
            used.insert(name.value.as_str());
            let Some(named) = credentials.require(reader, name) else { continue };
            for host in &rule.hosts {
                check_host(reader, name, named, &host.value, &host.span);
            }
            check_plaintext(reader, name, named, rule.rule.plaintext);
        }
        check_pair(reader, &rule.credentials, credentials);
    }
    for server in servers {
        for name in &server.credentials {
            used.insert(name.value.as_str());
            let Some(named) = credentials.require(reader, name) else { continue };
            let host = HostPattern::Exact(server.server.host.clone());
            check_host(reader, name, named, &host, &name.span);
            check_plaintext(reader, name, named, server.server.scheme == Scheme::Http);
        }
        check_pair(reader, &server.credentials, credentials);
    }
    check_keys_stay(reader, credentials);
    // A name that is not defined is a misspelt one; what it was meant for is not unused.
    let misspelt = used.iter().any(|name| credentials.get(name).is_none());
    for (name, named) in credentials.iter().filter(|(name, _)| !misspelt && !used.contains(name)) {
        let message = format!("credential \"{name}\" is used by no rule");
        let hint = format!("a rule uses it with credential = \"{name}\"");
        reader.warn(&named.span, message, hint);
    }
    for (name, named) in credentials.iter().filter(|(name, _)| used.contains(name)) {
        check_own_hosts(reader, name, named, rules, servers);
    }
    check_variables(reader, credentials, sandbox);
    for (at, rule) in rules.iter().enumerate() {
        reach::check(reader, rule, &rules[..at]);
    }
}

/// A rule's hosts lie within its credential's own list, else requests that the rule allows would
/// be refused one by one.
fn check_host(
    reader: &mut Reader<'_>,
    name: &Spanned<String>,
    named: &Named,
    host: &HostPattern,
    span: &Span,
) {
    let Some(credential) = &named.made else { return };
    // An empty list was reported where it stands, or comes from an empty group.
    if credential.hosts.is_empty() || credential.hosts.iter().any(|own| own.covers(host)) {
        return;
    }
    let message = format!("credential \"{}\" may not go to {host}", name.value);
    let apex = match host {
        HostPattern::Exact(host) => credential.hosts.iter().any(
            |own| matches!(own, HostPattern::Below(below) if host.name() == Some(below.as_str())),
        ),
        HostPattern::Below(_) => false,
    };
    let hint = match apex {
        true => format!("\"*.{host}\" covers what is below {host}, not {host} itself"),
        false => format!("list it in hosts of [credentials.{}], or split the rule", name.value),
    };
    reader.error_hint(span, message, hint);
}

/// What a credential's own list names beyond the rules that use it is never reached with it: the
/// list, or a rule, means another host.
fn check_own_hosts(
    reader: &mut Reader<'_>,
    name: &str,
    named: &Named,
    rules: &[RawRule],
    servers: &[RawServer],
) {
    let Some(credential) = &named.made else { return };
    // The server that gives a registry's tokens is asked by the vault alone.
    if matches!(credential.inject, Inject::Registry { .. }) {
        return;
    }
    let uses = |names: &[Spanned<String>]| names.iter().any(|own| own.value == name);
    let rules = || rules.iter().filter(|rule| uses(&rule.credentials));
    let mut hosts: Vec<HostPattern> =
        rules().flat_map(|rule| &rule.hosts).map(|host| host.value.clone()).collect();
    let servers = servers.iter().filter(|server| uses(&server.credentials));
    hosts.extend(servers.map(|server| HostPattern::Exact(server.server.host.clone())));
    // An empty list was reported where it stands, or comes from an empty group.
    if rules().any(|rule| rule.hosts.is_empty()) {
        return;
    }
    let reached = |own: &HostPattern| hosts.iter().any(|h| own.covers(h) || h.covers(own));
    let beyond: Vec<String> =
        credential.hosts.iter().filter(|own| !reached(own)).map(ToString::to_string).collect();
    if !beyond.is_empty() {
        let beyond = beyond.join(", ");
        let message = format!("credential \"{name}\" goes to {beyond} in no rule");
        let hint = format!("write a rule with credential = \"{name}\", or take it out of hosts");
        reader.warn(&named.span, message, hint);
    }
}

/// One place of a request, one connection: of each kind there is one credential.
fn check_pair(reader: &mut Reader<'_>, names: &[Spanned<String>], credentials: &Credentials) {
    let mut seen = [false; 2];
    for name in names {
        let Some(made) = credentials.made(&name.value) else { continue };
        if std::mem::replace(&mut seen[usize::from(made.is_certificate())], true) {
            let message = match made.is_certificate() {
                true => "a connection is opened with one certificate",
                false => "one credential is put into a request",
            };
            let hint = "a list holds at most two: one credential that is put into requests, and \
                        one with inject = { client-certificate = true }";
            reader.error_hint(&name.span, message, hint);
        }
    }
}

/// A certificate's key never leaves the vault; another credential must not hand it out.
fn check_keys_stay(reader: &mut Reader<'_>, credentials: &Credentials) {
    let made = || credentials.iter().filter_map(|(_, named)| Some((named, named.made.as_ref()?)));
    for (named, credential) in made().filter(|(_, credential)| !credential.is_certificate()) {
        let other =
            made().find(|(_, other)| other.is_certificate() && other.secret == credential.secret);
        if let Some((_, other)) = other {
            let message = format!(
                "credential \"{}\" would put the key of certificate \"{}\" into requests",
                credential.name, other.name
            );
            reader.error_hint(&named.span, message, "the secret of a certificate is for it alone");
        }
    }
}

/// Over plain HTTP anybody on the way can read the credential; both sides must want that.
fn check_plaintext(
    reader: &mut Reader<'_>,
    name: &Spanned<String>,
    named: &Named,
    plaintext: bool,
) {
    if plaintext && named.made.as_ref().is_some_and(|credential| !credential.allow_plaintext) {
        let message = format!("credential \"{}\" may not go over plain http", name.value);
        let hint = match named.made.as_ref().is_some_and(|made| made.is_certificate()) {
            true => "use https: there is no certificate without TLS",
            false => "use https, or set allow-plaintext = true at the credential",
        };
        reader.error_hint(&name.span, message, hint);
    }
}

fn check_variables(reader: &mut Reader<'_>, credentials: &Credentials, sandbox: &SandboxTable) {
    let mut seen = BTreeSet::new();
    for (_, named) in credentials.iter() {
        let Some(credential) = &named.made else { continue };
        let span = named.env_span.as_ref().unwrap_or(&named.span);
        for env in &credential.env {
            if !seen.insert(env) {
                reader.error(span, format!("two credentials have the variable {env}"));
            }
            if sandbox.env.contains_key(env) {
                reader.error(span, format!("{env} is set in [sandbox.env] too"));
            }
        }
    }
}
