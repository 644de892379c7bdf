//! Why something may not leave, for programs, people and models.

use core::fmt;
use std::sync::Arc;

use crate::credential::Credential;
use crate::egress::{EgressRequest, METHODS_FORBIDDEN, Miss, Rule};
use crate::host::Host;
use crate::pattern::HostPattern;
use crate::policy::Policy;

/// The reason for a refused request or connection. Holds names from the policy and the request,
/// never a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    pub code: DenialCode,
    /// The rule that came nearest: `egress.allow[2]`.
    pub rule: Option<String>,
    pub reason: String,
    /// What would be allowed, or what the operator can change.
    pub hint: Option<String>,
}

/// The kinds of denial. Programs hang on these, never on the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenialCode {
    HostNotListed,
    PortNotListed,
    PlaintextNotAllowed,
    MethodNotListed,
    /// TRACE and CONNECT inside a connection, whatever the policy says.
    MethodForbidden,
    PathNotListed,
    /// Two servers could read the path differently.
    PathAmbiguous,
    RepositoryNotListed,
    PushNotAllowed,
    /// What an LFS server answers would hold credentials that nothing masks.
    LfsNotAllowed,
    /// The credential's own list does not hold the host.
    CredentialHost,
    /// The name leads to a private address that the rule does not name.
    AddressPrivate,
    /// The name leads to an address that no rule can allow: metadata services and the like.
    AddressForbidden,
}

impl DenialCode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::HostNotListed => "host_not_listed",
            Self::PortNotListed => "port_not_listed",
            Self::PlaintextNotAllowed => "plaintext_not_allowed",
            Self::MethodNotListed => "method_not_listed",
            Self::MethodForbidden => "method_forbidden",
            Self::PathNotListed => "path_not_listed",
            Self::PathAmbiguous => "path_ambiguous",
            Self::RepositoryNotListed => "repository_not_listed",
            Self::PushNotAllowed => "push_not_allowed",
            Self::LfsNotAllowed => "lfs_not_allowed",
            Self::CredentialHost => "credential_host",
            Self::AddressPrivate => "address_private",
            Self::AddressForbidden => "address_forbidden",
        }
    }
}

impl fmt::Display for DenialCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        match &self.hint {
            Some(hint) => write!(f, "\n{hint}"),
            None => Ok(()),
        }
    }
}

/// How many names a hint lists before it says how many more there are.
const NAMES_MAX: usize = 8;

/// The denial for methods that no rule can allow.
pub(crate) fn of_method(policy: &Policy, method: &str) -> Option<Denial> {
    let name = METHODS_FORBIDDEN.iter().find(|name| name.eq_ignore_ascii_case(method))?;
    Some(Denial {
        code: DenialCode::MethodForbidden,
        rule: None,
        reason: format!("{name} is never allowed, by policy \"{}\" or any other", policy.name),
        hint: None,
    })
}

/// The denial for a credential whose own list does not hold the host.
pub(crate) fn of_credential_host(rule: &Rule, credential: &Credential, host: &Host) -> Denial {
    Denial {
        code: DenialCode::CredentialHost,
        rule: Some(rule.name.clone()),
        reason: format!("credential \"{}\" may not go to {host}", credential.name),
        hint: Some(format!("its own list: {}", listed(&credential.hosts))),
    }
}

/// The denial for the request of LFS whose answer the sandbox must not read.
pub(crate) fn of_lfs(rule: &Rule, host: &Host) -> Denial {
    Denial {
        code: DenialCode::LfsNotAllowed,
        rule: Some(rule.name.clone()),
        reason: format!(
            "{} has a credential, and an LFS server at {host} would answer this request with \
             further ones, which the sandbox would see",
            rule.name
        ),
        hint: Some(
            "if that is meant, the operator adds lfs = true to the rule; what git itself keeps \
             needs no LFS"
                .to_owned(),
        ),
    }
}

/// The denial for a request that no rule matches, told by the rule that came nearest.
pub(crate) fn of_miss(
    policy: &Policy,
    rule: Option<&Arc<Rule>>,
    miss: Miss,
    request: &EgressRequest<'_>,
) -> Denial {
    let (Some(rule), true) = (rule, miss != Miss::Host) else {
        return of_host(policy, request.host);
    };
    let (name, host) = (&rule.name, request.host);
    let (code, reason, hint) = match miss {
        Miss::Host | Miss::Port => (
            DenialCode::PortNotListed,
            format!("{name} allows {host}, but not port {}", request.port),
            format!("it allows port {}{}", listed(&rule.ports), port_80(rule, request.port)),
        ),
        Miss::Plaintext => (
            DenialCode::PlaintextNotAllowed,
            format!("{name} allows {host}, but not over plain http"),
            "use https".to_owned(),
        ),
        Miss::Method => (
            DenialCode::MethodNotListed,
            format!("{name} allows {host}, but not method {}", word(request.method)),
            format!("it allows {}", rule.methods.as_ref().map_or_else(String::new, listed)),
        ),
        Miss::Path => (
            DenialCode::PathNotListed,
            format!("{name} allows {host}, but not this path"),
            format!("it allows {}", listed(&rule.paths)),
        ),
        Miss::Ambiguous(why) => (
            DenialCode::PathAmbiguous,
            format!("{name} allows {host} at listed paths only, and this path {}", why.0),
            "send the path without dot segments, doubled slashes and escaped separators".to_owned(),
        ),
        Miss::NotGit => (
            DenialCode::PathNotListed,
            format!("{name} allows {host} for git over https only, and this is not a git request"),
            format!("it allows git {}; LFS is not among it", repositories(rule)),
        ),
        Miss::Repository => (
            DenialCode::RepositoryNotListed,
            format!("{name} allows git at {host}, but not this repository"),
            format!("it allows {}", repositories(rule)),
        ),
        Miss::Push => (
            DenialCode::PushNotAllowed,
            format!("{name} lets this repository be fetched, not pushed to"),
            "git = { push = true } would allow it".to_owned(),
        ),
    };
    Denial { code, rule: Some(name.clone()), reason, hint: Some(hint) }
}

fn of_host(policy: &Policy, host: &Host) -> Denial {
    Denial {
        code: DenialCode::HostNotListed,
        rule: None,
        reason: format!("policy \"{}\" does not list {host}", policy.name),
        hint: Some(host_hint(policy, host)),
    }
}

/// Points to what is listed: the sibling that was meant (github.com for api.github.com), or all.
fn host_hint(policy: &Policy, host: &Host) -> String {
    let mut patterns: Vec<&HostPattern> = Vec::new();
    for pattern in policy.rules.iter().flat_map(|rule| &rule.hosts) {
        if !patterns.contains(&pattern) {
            patterns.push(pattern);
        }
    }
    if patterns.is_empty() {
        return "it lists no host at all".to_owned();
    }
    if let Host::Ip(_) = host
        && !patterns.iter().any(|p| matches!(p, HostPattern::Exact(Host::Ip(_))))
    {
        return format!("connect by name, not by address; it lists {}", listed(&patterns));
    }
    let apex = |p: &&&HostPattern| matches!(p, HostPattern::Below(b) if host.name() == Some(b));
    if let Some(pattern) = patterns.iter().find(apex) {
        return format!("\"{pattern}\" covers what is below {host}, not {host} itself");
    }
    let siblings: Vec<_> = patterns.iter().filter(|p| are_siblings(p, host)).collect();
    if siblings.is_empty() {
        format!("it lists {}", listed(&patterns))
    } else {
        format!("it lists {}", listed(&siblings))
    }
}

/// Whether two names share their last two labels.
fn are_siblings(pattern: &HostPattern, host: &Host) -> bool {
    let stem = |name: &str| {
        let mut labels = name.rsplit('.');
        Some((labels.next()?.to_owned(), labels.next()?.to_owned()))
    };
    let own = match pattern {
        HostPattern::Exact(host) => host.name(),
        HostPattern::Below(name) => Some(name.as_str()),
    };
    own.and_then(stem).is_some_and(|own| host.name().and_then(stem) == Some(own))
}

fn port_80(rule: &Rule, port: u16) -> &'static str {
    if port == 80 && !rule.plaintext { "; plain http needs plaintext = true" } else { "" }
}

fn repositories(rule: &Rule) -> String {
    rule.git.as_ref().map_or_else(String::new, |git| listed(&git.repositories))
}

/// `a, b, c`, and how many more.
fn listed<I>(items: I) -> String
where
    I: IntoIterator<Item: fmt::Display>,
{
    let names: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    let shown = names.iter().take(NAMES_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMES_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// A word of the request that is safe to show: it comes from the sandbox.
fn word(text: &str) -> String {
    text.chars().take(32).map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect()
}
