//! Reads `[[egress.allow]]` and `[mcp.NAME]`: what may leave.

use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::budget;
use super::credentials::Credentials;
use super::groups::Groups;
use super::is_name;
use super::reader::{Reader, Section, Span, Spanned};
use super::units;
use crate::address::{AddressClass, AddressRange, always_forbidden, classify, sensitive};
use crate::credential::Credential;
use crate::egress::budget::{Budget, Quotas};
use crate::egress::{GitRule, METHODS_FORBIDDEN, Rule, Scheme};
use crate::host::Host;
use crate::path::CanonicalPath;
use crate::pattern::{HostPattern, PathPattern, RepositoryPattern};
use crate::policy::McpServer;

pub(crate) const EGRESS: &[&str] = &["allow"];
pub(crate) const ALLOW: &[&str] = &[
    "hosts",
    "methods",
    "paths",
    "ports",
    "addresses",
    "git",
    "lfs",
    "credential",
    "plaintext",
    "rate",
    "bytes",
    "ask",
];
pub(crate) const GIT: &[&str] = &["repositories", "push"];
pub(crate) const ASK: &[&str] = &["within"];
pub(crate) const MCP: &[&str] = &["url", "credential", "addresses"];

const HTTPS: u16 = 443;
const HTTP: u16 = 80;
const DNS: u16 = 53;
/// Less than a tool call has, as shipped: whoever sent the request reads why it was denied.
const ASK_WITHIN: Duration = Duration::from_secs(90);
const ASK_WITHIN_MAX: Duration = Duration::from_secs(24 * 3600);

/// A rule as it stands in the file: its hosts with positions, its credentials by name.
pub(crate) struct RawRule {
    pub span: Span,
    pub hosts: Vec<Spanned<HostPattern>>,
    pub credentials: Vec<Spanned<String>>,
    pub quotas: Quotas,
    /// Everything else; what stands above is filled in by [`RawRule::link`].
    pub rule: Rule,
}

/// An MCP server as it stands in the file.
pub(crate) struct RawServer {
    pub name: String,
    pub credentials: Vec<Spanned<String>>,
    pub server: McpServer,
}

/// The one that is put into requests, and the one that connections are opened with.
type Linked = (Option<Arc<Credential>>, Option<Arc<Credential>>);

fn linked(names: &[Spanned<String>], credentials: &Credentials) -> Linked {
    let made = || names.iter().filter_map(|name| credentials.made(&name.value));
    let first = |certificate| made().find(|made| made.is_certificate() == certificate).cloned();
    (first(false), first(true))
}

/// One name, or a list of them.
fn credentials(reader: &mut Reader<'_>, section: &Section<'_>) -> Vec<Spanned<String>> {
    if !section.has("credential") || section.is_string("credential") {
        return section.string(reader, "credential").into_iter().collect();
    }
    section.strings(reader, "credential").unwrap_or_default()
}

impl RawRule {
    pub fn link(self, credentials: &Credentials) -> Rule {
        let (credential, certificate) = linked(&self.credentials, credentials);
        let hosts = self.hosts.into_iter().map(|host| host.value).collect();
        let rule = Rule { hosts, credential, certificate, ..self.rule };
        if self.quotas.is_empty() {
            return rule;
        }
        let addresses: Vec<String> = rule.addresses.iter().map(ToString::to_string).collect();
        let plain = if rule.plaintext { "; plaintext" } else { "" };
        let key = format!("{rule}; addresses {}{plain}", addresses.join(", "));
        let budget = Budget { rule: rule.name.clone(), key, quotas: self.quotas };
        Rule { budget: Some(Arc::new(budget)), ..rule }
    }
}

impl RawServer {
    pub fn link(self, credentials: &Credentials) -> (String, McpServer) {
        let (credential, certificate) = linked(&self.credentials, credentials);
        (self.name, McpServer { credential, certificate, ..self.server })
    }
}

pub(crate) fn read(reader: &mut Reader<'_>, top: &Section<'_>, groups: &Groups) -> Vec<RawRule> {
    let Some(egress) = top.section(reader, "egress") else { return Vec::new() };
    egress.check_keys(reader, EGRESS);
    egress.sections(reader, "allow").iter().map(|section| rule(reader, section, groups)).collect()
}

fn rule(reader: &mut Reader<'_>, section: &Section<'_>, groups: &Groups) -> RawRule {
    section.check_keys(reader, ALLOW);
    let plaintext = section.boolean(reader, "plaintext").unwrap_or(false);
    let hosts = groups.hosts(reader, section);
    for host in &hosts {
        check_literal(reader, host);
    }
    let git = section.section(reader, "git").and_then(|git| read_git(reader, &git));
    for key in ["methods", "paths"] {
        if section.has("git") && section.has(key) {
            let message = format!("\"git\" says already which {key} are meant");
            reader.error(&section.span_of(key), message);
        }
    }
    let lfs = section.boolean(reader, "lfs").unwrap_or(false);
    if lfs && section.has("git") {
        let hint = "write a rule of its own for it, with paths = [\"/owner/name.git/info/lfs/**\"]";
        reader.error_hint(&section.span_of("lfs"), "\"git\" allows no LFS", hint);
    }
    RawRule {
        span: section.span.clone(),
        hosts,
        credentials: credentials(reader, section),
        quotas: budget::read(reader, section),
        rule: Rule {
            name: section.name.clone(),
            hosts: Vec::new(),
            ports: ports(reader, section, plaintext),
            plaintext,
            methods: methods(reader, section),
            paths: paths(reader, section),
            git,
            lfs,
            addresses: addresses(reader, section),
            credential: None,
            certificate: None,
            budget: None,
            ask: ask(reader, section),
        },
    }
}

/// How long an operator has to answer, where the rule asks.
fn ask(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Duration> {
    if !section.is_table("ask") {
        return section.boolean(reader, "ask").filter(|asks| *asks).map(|_| ASK_WITHIN);
    }
    let ask = section.section(reader, "ask")?;
    ask.check_keys(reader, ASK);
    let Some(within) = ask.string(reader, "within") else { return Some(ASK_WITHIN) };
    let span = units::time(&within.value);
    match span {
        Ok(span) if !span.is_zero() && span <= ASK_WITHIN_MAX => return Some(span),
        Ok(_) => reader.error(&within.span, "an operator has \"1s\" to \"24h\" to answer"),
        Err(why) => reader.error(&within.span, why),
    }
    None
}

/// An address among the hosts names itself; one that is never dialled is a mistake.
fn check_literal(reader: &mut Reader<'_>, host: &Spanned<HostPattern>) {
    let HostPattern::Exact(Host::Ip(ip)) = &host.value else { return };
    match classify(*ip) {
        AddressClass::Forbidden(what) => {
            reader.error(&host.span, format!("{ip} is never dialled: {what}"));
        }
        AddressClass::Sensitive(what) => {
            reader.warn(&host.span, format!("this opens {ip}, {what}"), OPENS);
        }
        AddressClass::Public | AddressClass::Private(_) => {}
    }
}

const OPENS: &str = "a metadata service gives the host's own cloud credentials to whoever asks";

fn ports(reader: &mut Reader<'_>, section: &Section<'_>, plaintext: bool) -> BTreeSet<u16> {
    let Some(listed) = section.integers(reader, "ports") else {
        return if plaintext { [HTTP, HTTPS].into() } else { [HTTPS].into() };
    };
    if listed.is_empty() {
        reader.error(&section.span_of("ports"), "an empty list of ports allows nothing");
    }
    let mut ports = BTreeSet::new();
    for port in listed {
        match u16::try_from(port.value) {
            Err(_) | Ok(0) => reader.error(&port.span, "a port is 1 to 65535"),
            Ok(DNS) => reader.error_hint(
                &port.span,
                "port 53 is the sandbox's own DNS and cannot be allowed",
                "names that a rule lists are resolved without a rule for DNS",
            ),
            Ok(HTTP) if !plaintext => reader.error_hint(
                &port.span,
                "port 80 carries plain http",
                "say so with plaintext = true, or use https",
            ),
            Ok(number) => {
                ports.insert(number);
            }
        }
    }
    ports
}

fn methods(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<BTreeSet<String>> {
    let listed = section.strings(reader, "methods")?;
    if listed.is_empty() {
        let message = "an empty list of methods allows nothing";
        reader.error_hint(&section.span_of("methods"), message, "leave it out to allow all");
    }
    let mut methods = BTreeSet::new();
    for method in listed {
        let upper = method.value.to_ascii_uppercase();
        if METHODS_FORBIDDEN.contains(&upper.as_str()) {
            reader.error(&method.span, format!("{upper} cannot be allowed"));
        } else if upper != method.value {
            let message = format!("\"{}\" is no method", method.value);
            reader.error_hint(&method.span, message, format!("did you mean \"{upper}\"?"));
        } else if upper.is_empty() || !upper.bytes().all(|b| b.is_ascii_uppercase() || b == b'-') {
            reader.error(&method.span, "a method is a word such as \"GET\"");
        } else {
            methods.insert(upper);
        }
    }
    Some(methods)
}

fn paths(reader: &mut Reader<'_>, section: &Section<'_>) -> Vec<PathPattern> {
    let Some(listed) = section.strings(reader, "paths") else { return Vec::new() };
    if listed.is_empty() {
        let message = "an empty list of paths allows nothing";
        reader.error_hint(&section.span_of("paths"), message, "leave it out to allow all");
    }
    let mut paths = Vec::new();
    for path in listed {
        match PathPattern::parse(&path.value) {
            Ok(pattern) => paths.push(pattern),
            Err(why) => {
                let hint = "\"/repos/acme/*\" is one segment, \"/repos/acme/**\" all below";
                reader.error_hint(&path.span, format!("not a path pattern: {why}"), hint);
            }
        }
    }
    paths
}

fn read_git(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<GitRule> {
    section.check_keys(reader, GIT);
    let push = section.boolean(reader, "push").unwrap_or(false);
    let listed = section.strings(reader, "repositories");
    if listed.as_ref().is_none_or(Vec::is_empty) {
        let hint = "git = { repositories = [\"owner/name\"], push = false }";
        reader.error_hint(&section.span, "\"git\" lists the repositories it allows", hint);
    }
    let mut repositories = Vec::new();
    for text in listed? {
        match RepositoryPattern::parse(&text.value) {
            Ok(pattern) => repositories.push(pattern),
            Err(why) => reader.error(&text.span, format!("not a repository: {why}")),
        }
    }
    Some(GitRule { repositories, push })
}

fn addresses(reader: &mut Reader<'_>, section: &Section<'_>) -> Vec<AddressRange> {
    let mut ranges = Vec::new();
    for text in section.strings(reader, "addresses").unwrap_or_default() {
        match AddressRange::parse(&text.value) {
            Err(why) => {
                let hint = "addresses = [\"10.2.0.0/16\"]";
                reader.error_hint(&text.span, format!("not a range of addresses: {why}"), hint);
            }
            Ok(range) if range.prefix() == 0 => {
                let hint = "public addresses need no entry; name the private range that is meant";
                reader.error_hint(&text.span, "this names every address", hint);
            }
            Ok(range) => {
                check_range(reader, &text.span, &range);
                ranges.push(range);
            }
        }
    }
    ranges
}

fn check_range(reader: &mut Reader<'_>, span: &Span, range: &AddressRange) {
    if let Some(what) = always_forbidden(range) {
        return reader.error(span, format!("{range} is never dialled: {what}"));
    }
    match sensitive(range) {
        Some(what) if range.is_single() => {
            reader.warn(span, format!("this opens {range}, {what}"), OPENS);
        }
        Some(what) => {
            let hint = "name the one address that is meant";
            reader.error_hint(span, format!("{range} is {what}: no range opens it"), hint);
        }
        None => {}
    }
}

pub(crate) fn read_mcp(reader: &mut Reader<'_>, top: &Section<'_>) -> Vec<RawServer> {
    let Some(mcp) = top.section(reader, "mcp") else { return Vec::new() };
    let mut servers = Vec::new();
    for (name, item, span) in mcp.entries() {
        if !is_name(name) {
            reader.error(&span, "a server's name is made of a-z, 0-9, \"-\", \"_\"");
        }
        if let Some(section) = mcp.enter(reader, name, item, span)
            && let Some(server) = server(reader, name, &section)
        {
            servers.push(server);
        }
    }
    servers
}

fn server(reader: &mut Reader<'_>, name: &str, section: &Section<'_>) -> Option<RawServer> {
    section.check_keys(reader, MCP);
    let credentials = credentials(reader, section);
    let addresses = addresses(reader, section);
    if !section.has("url") {
        section.lacks(reader, "url", "url = \"https://mcp.example.com/mcp\"");
    }
    let url = section.string(reader, "url")?;
    match split_url(&url.value) {
        Err(why) => {
            let hint = "url = \"https://mcp.example.com/mcp\"";
            reader.error_hint(&url.span, format!("not the address of a server: {why}"), hint);
            None
        }
        Ok((scheme, host, port, path)) => {
            let pattern = HostPattern::Exact(host.clone());
            check_literal(reader, &Spanned { value: pattern, span: url.span });
            let server = McpServer {
                url: url.value.clone(),
                scheme,
                host,
                port,
                path,
                credential: None,
                certificate: None,
                addresses,
            };
            Some(RawServer { name: name.to_owned(), credentials, server })
        }
    }
}

/// The parts of a server's address: scheme, host, port, path. The error is a reason.
pub fn split_url(url: &str) -> Result<(Scheme, Host, u16, String), String> {
    let (scheme, rest, default) = match url.split_once("://") {
        Some(("https", rest)) => (Scheme::Https, rest, HTTPS),
        Some(("http", rest)) => (Scheme::Http, rest, HTTP),
        _ => return Err("it begins with https:// or http://".to_owned()),
    };
    if rest.contains(['@', '?', '#']) {
        return Err("it holds a user, a query or a fragment".to_owned());
    }
    let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    // A colon behind the bracket, or the only one, is followed by the port.
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => {
            let port = port.parse().ok().filter(|port| *port != 0);
            (host, port.ok_or("its port is not 1 to 65535")?)
        }
        _ => (authority, default),
    };
    let host = Host::parse(host).map_err(|error| error.to_string())?;
    CanonicalPath::parse(path).map_err(|why| format!("its path {why}"))?;
    Ok((scheme, host, port, path.to_owned()))
}
