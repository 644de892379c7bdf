//! Reads `groups.toml`: names for lists of hosts, kept by the operator.

use std::collections::BTreeMap;

use super::is_name;
use super::reader::{Reader, Section, Span, Spanned, document};
use crate::diagnostic::nearest;
use crate::pattern::HostPattern;

pub(crate) const GROUPS: &[&str] = &["groups"];

/// Endings below which strangers register names: a star over one of these lets anybody in. A short
/// list of the usual slips, not the whole public suffix list.
const SHARED_SUFFIXES: &[&str] = &[
    "ac.uk",
    "amazonaws.com",
    "appspot.com",
    "azurewebsites.net",
    "cloudfront.net",
    "co.in",
    "co.jp",
    "co.kr",
    "co.nz",
    "co.uk",
    "co.za",
    "com.au",
    "com.br",
    "com.cn",
    "com.tr",
    "github.io",
    "githubusercontent.com",
    "gitlab.io",
    "gov.uk",
    "herokuapp.com",
    "net.au",
    "netlify.app",
    "ngrok.io",
    "org.au",
    "org.uk",
    "pages.dev",
    "r2.dev",
    "s3.amazonaws.com",
    "vercel.app",
    "web.app",
    "workers.dev",
];

/// Host groups by name.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    groups: BTreeMap<String, Vec<HostPattern>>,
}

pub(crate) fn read(reader: &mut Reader<'_>) -> Groups {
    let mut groups = Groups::default();
    let Some(document) = document(reader) else { return groups };
    let top = Section::top(document.as_table());
    top.check_keys(reader, GROUPS);
    let Some(section) = top.section(reader, "groups") else { return groups };
    for (name, _, span) in section.entries() {
        if !is_name(name) {
            reader.error(&span, "a group's name is made of a-z, 0-9, \"-\", \"_\"");
        }
        let mut hosts = Vec::new();
        for text in section.strings(reader, name).unwrap_or_default() {
            if text.value.starts_with('@') {
                reader.error(&text.span, "a group holds hosts, not groups");
            } else if let Some(pattern) = host(reader, &text) {
                hosts.push(pattern);
            }
        }
        groups.groups.insert(name.to_owned(), hosts);
    }
    groups
}

impl Groups {
    /// Reads the `hosts` of a section, groups replaced by what they hold.
    pub fn hosts(
        &self,
        reader: &mut Reader<'_>,
        section: &Section<'_>,
    ) -> Vec<Spanned<HostPattern>> {
        if !section.has("hosts") {
            section.lacks(reader, "hosts", "hosts = [\"api.example.com\"]");
            return Vec::new();
        }
        let Some(texts) = section.strings(reader, "hosts") else { return Vec::new() };
        if texts.is_empty() {
            reader.error(&section.span_of("hosts"), "an empty list of hosts allows nothing");
        }
        let mut hosts = Vec::new();
        for text in texts {
            if let Some(group) = text.value.strip_prefix('@') {
                let members = self.members(reader, group, &text.span);
                let spanned =
                    |p: &HostPattern| Spanned { value: p.clone(), span: text.span.clone() };
                hosts.extend(members.iter().map(spanned));
            } else if let Some(value) = host(reader, &text) {
                hosts.push(Spanned { value, span: text.span });
            }
        }
        hosts
    }

    fn members(&self, reader: &mut Reader<'_>, group: &str, span: &Span) -> &[HostPattern] {
        if let Some(members) = self.groups.get(group) {
            return members;
        }
        let known: Vec<&str> = self.groups.keys().map(String::as_str).collect();
        let hint = match nearest(group, &known) {
            Some(near) => format!("did you mean \"@{near}\"?"),
            None if known.is_empty() => "groups.toml, beside the policies, lists none".to_owned(),
            None => format!("groups.toml has @{}", known.join(", @")),
        };
        reader.error_hint(span, format!("unknown group \"@{group}\""), hint);
        &[]
    }
}

/// Reads one host pattern and finds what is legal but cannot be meant.
fn host(reader: &mut Reader<'_>, text: &Spanned<String>) -> Option<HostPattern> {
    let Spanned { value, span } = text;
    if value.contains("://") || value.contains('/') {
        let hint = "a host stands alone; ports and paths have keys of their own";
        reader.error_hint(span, format!("not a host: \"{value}\""), hint);
        return None;
    }
    let pattern = match HostPattern::parse(value) {
        Ok(pattern) => pattern,
        Err(why) => {
            let port = value.rsplit_once(':').is_some_and(|(_, p)| p.parse::<u16>().is_ok());
            let message = format!("not a host: \"{value}\": {why}");
            match port {
                true => reader.error_hint(span, message, "ports have a key of their own: ports"),
                false => reader.error(span, message),
            }
            return None;
        }
    };
    let name = match &pattern {
        HostPattern::Exact(host) => host.name(),
        HostPattern::Below(name) => Some(name.as_str()),
    };
    if name.is_some_and(|name| name == "localhost" || name.ends_with(".localhost")) {
        let hint = "localhost inside a sandbox is the sandbox's own and never reaches proxyd; \
                    give the service a name and an address";
        reader.error_hint(span, "\"localhost\" cannot be allowed", hint);
        return None;
    }
    if let HostPattern::Below(suffix) = &pattern
        && (!suffix.contains('.') || SHARED_SUFFIXES.contains(&suffix.as_str()))
    {
        let message = format!("\"*.{suffix}\" lets anybody in who registers a name below it");
        reader.error_hint(span, message, "name the domain: \"*.example.com\"");
        return None;
    }
    Some(pattern)
}
