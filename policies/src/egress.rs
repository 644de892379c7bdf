//! The decision: may this request leave, under which rule, with which credential.
//!
//! Pure: no I/O, no clock, no secrets. Rules are tried in the order of the file and the first that
//! matches decides; nothing that is not listed leaves. A [`Permit`] cannot be made elsewhere and
//! cannot be copied: whoever sends a request consumes the permit that this module gave for it.

pub mod budget;
mod lfs;

use core::fmt;
use core::net::IpAddr;
use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::address::{AddressClass, AddressRange, classify};
use crate::credential::Credential;
use crate::denial::{self, Denial, DenialCode};
use crate::host::{Host, fold};
use crate::path::{Ambiguity, CanonicalPath};
use crate::pattern::{GitService, HostPattern, PathPattern, RepositoryPattern, git_request};
use crate::policy::{McpServer, Policy};
use budget::Budget;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    Http,
    Https,
}

/// One request as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct EgressRequest<'a> {
    pub scheme: Scheme,
    /// The verified host: from the lease's DNS answer or CONNECT's authority, never from the Host
    /// header.
    pub host: &'a Host,
    pub port: u16,
    pub method: &'a str,
    /// The raw path, without its query.
    pub path: &'a str,
    pub query: Option<&'a str>,
}

/// What to do with a connection, when all that is known is where it goes.
#[must_use]
#[derive(Debug)]
pub enum ConnectDecision {
    Deny(Denial),
    /// Pass the bytes on unread.
    Tunnel(Permit),
    /// Read the requests: some rule for this host and port needs to see them.
    Inspect,
}

#[must_use]
#[derive(Debug)]
pub enum Decision {
    Allowed(Permit),
    Denied(Denial),
}

/// Proof that a policy allowed one request or one tunnel.
#[must_use]
#[derive(Debug)]
pub struct Permit {
    policy: String,
    rule: Arc<Rule>,
    host: Host,
    port: u16,
}

/// One `[[egress.allow]]` table.
#[derive(Debug)]
pub(crate) struct Rule {
    /// `egress.allow[2]`, counted from 0.
    pub name: String,
    pub hosts: Vec<HostPattern>,
    pub ports: BTreeSet<u16>,
    pub plaintext: bool,
    /// Absent: all but those that no rule can allow.
    pub methods: Option<BTreeSet<String>>,
    /// Empty: all.
    pub paths: Vec<PathPattern>,
    pub git: Option<GitRule>,
    /// Whether the sandbox may see the credentials that an LFS server gives for objects.
    pub lfs: bool,
    pub addresses: Vec<AddressRange>,
    /// What is put into the request.
    pub credential: Option<Arc<Credential>>,
    /// What the connection is opened with.
    pub certificate: Option<Arc<Credential>>,
    /// How much each lease may do under it.
    pub budget: Option<Arc<Budget>>,
    /// How long an operator has to say yes, where one has to.
    pub ask: Option<Duration>,
}

#[derive(Debug)]
pub(crate) struct GitRule {
    pub repositories: Vec<RepositoryPattern>,
    pub push: bool,
}

/// Why a rule does not match a request, ordered by how near it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Miss {
    Host,
    Port,
    Plaintext,
    Method,
    NotGit,
    Path,
    Ambiguous(AmbiguityRank),
    Repository,
    Push,
}

/// An ambiguity that takes part in the order of misses; all rank alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AmbiguityRank(pub Ambiguity);

impl PartialEq for AmbiguityRank {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for AmbiguityRank {}

impl PartialOrd for AmbiguityRank {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for AmbiguityRank {
    fn cmp(&self, _: &Self) -> core::cmp::Ordering {
        core::cmp::Ordering::Equal
    }
}

/// Answers with what the caller sent (TRACE shows injected headers) or opens a tunnel inside one.
pub(crate) const METHODS_FORBIDDEN: [&str; 3] = ["TRACE", "TRACK", "CONNECT"];

impl Policy {
    /// Decides by host and port alone, before a byte was read.
    pub fn at_connect(&self, host: &Host, port: u16) -> ConnectDecision {
        let mut candidates =
            self.rules.iter().filter(|rule| rule.names(host) && rule.ports.contains(&port));
        let Some(first) = candidates.next() else {
            let miss = if self.resolvable(host) { Miss::Port } else { Miss::Host };
            let rule = self.rules.iter().find(|rule| rule.names(host));
            let probe = EgressRequest {
                scheme: Scheme::Https,
                host,
                port,
                method: "",
                path: "",
                query: None,
            };
            return ConnectDecision::Deny(denial::of_miss(self, rule, miss, &probe));
        };
        if first.inspects() || candidates.any(|rule| rule.inspects()) {
            return ConnectDecision::Inspect;
        }
        ConnectDecision::Tunnel(self.permit(first, host, port))
    }

    /// Decides one request; the first matching rule wins.
    pub fn decide(&self, request: &EgressRequest<'_>) -> Decision {
        if let Some(denial) = denial::of_method(self, request.method) {
            return Decision::Denied(denial);
        }
        let path = CanonicalPath::parse(request.path);
        let mut nearest: Option<(Miss, &Arc<Rule>)> = None;
        for rule in &self.rules {
            match rule.check(request, &path) {
                Ok(()) => return self.allow(rule, request),
                Err(miss) if nearest.is_none_or(|(best, _)| miss > best) => {
                    nearest = Some((miss, rule));
                }
                Err(_) => {}
            }
        }
        let (miss, rule) = nearest.map_or((Miss::Host, None), |(miss, rule)| (miss, Some(rule)));
        Decision::Denied(denial::of_miss(self, rule, miss, request))
    }

    /// The last word after a rule matched: the credential's own record must agree. Checking the
    /// file finds such clashes too; this holds even if that check is wrong.
    fn allow(&self, rule: &Arc<Rule>, request: &EgressRequest<'_>) -> Decision {
        for credential in rule.credentials() {
            if !credential.may_go_to(request.host) {
                return Decision::Denied(denial::of_credential_host(
                    rule,
                    credential,
                    request.host,
                ));
            }
            if request.scheme == Scheme::Http && !credential.allow_plaintext {
                let miss = Miss::Plaintext;
                return Decision::Denied(denial::of_miss(self, Some(rule), miss, request));
            }
        }
        if rule.credentials().next().is_some() && !rule.lfs && lfs::is_batch(request.path) {
            return Decision::Denied(denial::of_lfs(rule, request.host));
        }
        Decision::Allowed(self.permit(rule, request.host, request.port))
    }

    fn permit(&self, rule: &Arc<Rule>, host: &Host, port: u16) -> Permit {
        Permit { policy: self.name.clone(), rule: Arc::clone(rule), host: host.clone(), port }
    }
}

impl Rule {
    pub(crate) fn names(&self, host: &Host) -> bool {
        self.hosts.iter().any(|pattern| pattern.matches(host))
    }

    /// Whether the rule needs to see requests, rather than a host and a port.
    pub(crate) fn inspects(&self) -> bool {
        self.methods.is_some()
            || !self.paths.is_empty()
            || self.git.is_some()
            || self.credentials().next().is_some()
    }

    fn credentials(&self) -> impl Iterator<Item = &Arc<Credential>> {
        self.credential.iter().chain(&self.certificate)
    }

    /// Whether one request matches, and if not, why.
    pub(crate) fn check(
        &self,
        request: &EgressRequest<'_>,
        path: &Result<CanonicalPath, Ambiguity>,
    ) -> Result<(), Miss> {
        if !self.names(request.host) {
            return Err(Miss::Host);
        }
        if !self.ports.contains(&request.port) {
            return Err(Miss::Port);
        }
        if request.scheme == Scheme::Http && !self.plaintext {
            return Err(Miss::Plaintext);
        }
        if self.methods.as_ref().is_some_and(|methods| !methods.contains(request.method)) {
            return Err(Miss::Method);
        }
        if self.paths.is_empty() && self.git.is_none() {
            return Ok(());
        }
        let path = path.as_ref().map_err(|why| Miss::Ambiguous(AmbiguityRank(*why)))?;
        if let Some(git) = &self.git {
            return git.check(request, path);
        }
        if self.paths.iter().any(|pattern| pattern.matches(path)) {
            Ok(())
        } else {
            Err(Miss::Path)
        }
    }

    /// What harnessd may send to an MCP server: the transport's three methods at its one path.
    pub(crate) fn for_mcp(name: &str, mcp: &McpServer) -> Self {
        let paths = CanonicalPath::parse(&mcp.path).iter().map(PathPattern::exact).collect();
        Self {
            name: format!("mcp.{name}"),
            hosts: vec![HostPattern::Exact(mcp.host.clone())],
            ports: BTreeSet::from([mcp.port]),
            plaintext: mcp.scheme == Scheme::Http,
            methods: Some(["GET", "POST", "DELETE"].map(str::to_owned).into()),
            paths,
            git: None,
            lfs: false,
            addresses: mcp.addresses.clone(),
            credential: mcp.credential.clone(),
            certificate: mcp.certificate.clone(),
            budget: None,
            ask: None,
        }
    }
}

impl GitRule {
    fn check(&self, request: &EgressRequest<'_>, path: &CanonicalPath) -> Result<(), Miss> {
        match git_request(&self.repositories, request.method, path, request.query) {
            None => Err(Miss::NotGit),
            Some((_, false)) => Err(Miss::Repository),
            Some((GitService::Receive, true)) if !self.push => Err(Miss::Push),
            Some((_, true)) => Ok(()),
        }
    }
}

impl Permit {
    /// The rule that allowed it: `egress.allow[2]`.
    pub fn rule(&self) -> &str {
        &self.rule.name
    }

    /// What to inject, if anything.
    pub fn credential(&self) -> Option<&Arc<Credential>> {
        self.rule.credential.as_ref()
    }

    /// The certificate to open the connection with, if any.
    pub fn certificate(&self) -> Option<&Arc<Credential>> {
        self.rule.certificate.as_ref()
    }

    /// The names of all that goes along, in words for a record.
    pub fn carries(&self) -> Option<String> {
        let names: Vec<&str> = self.rule.credentials().map(|own| own.name.as_str()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// How much the lease may do under the rule.
    pub fn budget(&self) -> Option<&Arc<Budget>> {
        self.rule.budget.as_ref()
    }

    /// Whether what goes under the rule is counted by that budget.
    pub fn is_counted_by(&self, budget: &Budget) -> bool {
        self.budget().is_some_and(|own| own.key == budget.key)
    }

    /// How long whatever it is for waits for an operator's answer, where the rule asks for one:
    /// without it nothing may go.
    pub fn asks(&self) -> Option<Duration> {
        self.rule.ask
    }

    /// What the rule is, wherever it stands: an answer counts for the rule that asked, as long as
    /// it allows what it did then.
    pub fn mark(&self) -> String {
        let Rule { hosts, ports, plaintext, methods, paths, git, lfs, .. } = &*self.rule;
        let Rule { addresses, credential, certificate, .. } = &*self.rule;
        let matched = (hosts, ports, plaintext, methods, paths, git, lfs);
        format!("{matched:?} {:?}", (addresses, credential, certificate))
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The private ranges that the rule names.
    pub fn addresses(&self) -> &[AddressRange] {
        &self.rule.addresses
    }

    /// Judges an address before the dial. `host_owned` says that the address belongs to an
    /// interface of this host: a public name must not lead back to the host's own services.
    pub fn address_allowed(&self, ip: IpAddr, host_owned: bool) -> Result<(), Denial> {
        let ip = fold(ip);
        // A rule whose host is an address has named that address.
        let is_host = self.host.ip() == Some(ip);
        let any = |test: fn(&AddressRange, IpAddr) -> bool| {
            self.rule.addresses.iter().any(|range| test(range, ip))
        };
        let (what, code, named) = match classify(ip) {
            AddressClass::Public if !host_owned => return Ok(()),
            AddressClass::Public => {
                let what = "an address of this host";
                (what, DenialCode::AddressPrivate, any(AddressRange::contains))
            }
            AddressClass::Private(what) => {
                (what, DenialCode::AddressPrivate, any(AddressRange::contains))
            }
            AddressClass::Sensitive(what) => {
                (what, DenialCode::AddressForbidden, any(AddressRange::is_exactly))
            }
            AddressClass::Forbidden(what) => {
                return Err(Denial {
                    code: DenialCode::AddressForbidden,
                    rule: Some(self.rule.name.clone()),
                    reason: format!("{} leads to {ip}, {what}: never dialled", self.host),
                    hint: None,
                });
            }
        };
        if is_host || named {
            return Ok(());
        }
        let (name, policy) = (&self.rule.name, &self.policy);
        Err(Denial {
            code,
            rule: Some(name.clone()),
            reason: format!("{} leads to {ip} ({what}), which {name} does not name", self.host),
            hint: Some(format!(
                "if this is meant, the operator adds addresses = [\"{ip}\"] to {name} in \
                 {policy}.toml"
            )),
        })
    }
}

impl fmt::Display for Rule {
    /// One line for people: what the rule allows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |items: &[&dyn fmt::Display]| {
            items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        let hosts: Vec<&dyn fmt::Display> = self.hosts.iter().map(|h| h as _).collect();
        let ports: Vec<&dyn fmt::Display> = self.ports.iter().map(|p| p as _).collect();
        write!(f, "{} port {}", join(&hosts), join(&ports))?;
        if let Some(methods) = &self.methods {
            let methods: Vec<&dyn fmt::Display> = methods.iter().map(|m| m as _).collect();
            write!(f, "; {}", join(&methods))?;
        }
        if !self.paths.is_empty() {
            let paths: Vec<&dyn fmt::Display> = self.paths.iter().map(|p| p as _).collect();
            write!(f, "; {}", join(&paths))?;
        }
        if let Some(git) = &self.git {
            let names: Vec<&dyn fmt::Display> = git.repositories.iter().map(|r| r as _).collect();
            let push = if git.push { "fetch and push" } else { "fetch" };
            write!(f, "; git {push} {}", join(&names))?;
        }
        for credential in self.credentials() {
            write!(f, "; credential {}", credential.name)?;
        }
        if let Some(within) = self.ask {
            write!(f, "; asks an operator ({} s)", within.as_secs())?;
        }
        if let Some(budget) = &self.budget {
            write!(f, "; {}", budget.quotas)?;
        }
        if self.lfs {
            f.write_str("; lfs")?;
        }
        Ok(())
    }
}
