//! What a change of policy changes: two versions compared by what they would do.
//!
//! Patterns know whole labels and whole segments only, so all requests fall into a finite number of
//! classes that no rule of either version tells apart: a host is one that a rule names, or any
//! other below a starred one; a segment of a path is one that a pattern names, or any other. One
//! request of each class is decided by both versions.

use core::fmt;
use std::collections::BTreeSet;

use crate::credential::Credential;
use crate::egress::budget::Quotas;
use crate::egress::{
    ConnectDecision, Decision, EgressRequest, METHODS_FORBIDDEN, Permit, Rule, Scheme,
};
use crate::host::Host;
use crate::pattern::{HostPattern, Parts};
use crate::policy::Policy;

/// Most classes of paths for one host: patterns with many stars in many places have more.
const PATHS_MAX: usize = 4096;
/// Longest beginning of a path that is looked at.
const DEPTH_MAX: usize = 64;

/// What becomes of a class of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Denied,
    Allowed {
        /// The credentials' names, each with what tells its definition from another.
        carries: Vec<(String, String)>,
        /// The special ranges that the name may lead to.
        addresses: Vec<String>,
        /// The connection is passed on without a look.
        unread: bool,
        /// How many seconds an operator has to say yes, where one has to.
        asks: Option<u64>,
        /// How much a lease may do under the rule.
        quotas: Quotas,
    },
}

/// One class of requests that the two versions treat differently.
#[derive(Clone, Debug)]
pub struct Change {
    /// `https://*.a.example:8443/x/*`, or what git asks.
    pub place: String,
    /// Empty: the connection as such. `any other` stands for all methods that no rule names.
    pub methods: Vec<String>,
    pub before: Effect,
    pub after: Effect,
}

/// What both versions of an environment do differently; none stands for an environment that is not
/// there. The error says what has too many classes to be compared.
pub fn compare(before: Option<&Policy>, after: Option<&Policy>) -> Result<Vec<Change>, String> {
    let rules: Vec<&Rule> = [before, after]
        .into_iter()
        .flatten()
        .flat_map(|policy| &policy.rules)
        .map(|rule| &**rule)
        .collect();
    let mut changes = Vec::new();
    for (host, shown) in hosts(&rules) {
        let named: Vec<&Rule> = rules.iter().copied().filter(|rule| rule.names(&host)).collect();
        let ports: BTreeSet<u16> =
            named.iter().flat_map(|rule| rule.ports.iter().copied()).collect();
        let plaintext = named.iter().any(|rule| rule.plaintext);
        let requests = requests(&named).map_err(|why| format!("{shown}: {why}"))?;
        for port in ports {
            let pair = Pair { versions: [before, after], host: &host, port };
            let place = format!("{shown}:{port}");
            changes.extend(pair.connection(&place));
            for scheme in [Scheme::Https, Scheme::Http] {
                if scheme == Scheme::Https || plaintext {
                    changes.extend(pair.requests(&place, scheme, &requests));
                }
            }
        }
    }
    Ok(changes)
}

/// One host of each class, and how the class is written.
fn hosts(rules: &[&Rule]) -> Vec<(Host, String)> {
    let mut found: Vec<(Host, String)> = Vec::new();
    for pattern in rules.iter().flat_map(|rule| &rule.hosts) {
        let host = match pattern {
            HostPattern::Exact(host) => host.clone(),
            // A label that no rule names, as long as none ends in so many digits.
            HostPattern::Below(name) => Host::Name(format!("any-4093082899.{name}")),
        };
        if !found.iter().any(|(known, _)| *known == host) {
            found.push((host, pattern.to_string()));
        }
    }
    found
}

/// A class of requests to one host.
struct Asked {
    method: String,
    path: String,
    query: Option<&'static str>,
    /// How the path, or what git asks, is written.
    shown: String,
    /// How the method is written; none where `shown` says it.
    verb: Option<String>,
}

/// One request of each class that some of the rules could tell from another.
fn requests(rules: &[&Rule]) -> Result<Vec<Asked>, String> {
    let mut methods: Vec<(String, String)> = Vec::new();
    for method in rules.iter().filter_map(|rule| rule.methods.as_ref()).flatten() {
        if !methods.iter().any(|(known, _)| known == method) {
            methods.push((method.clone(), method.clone()));
        }
    }
    let other = ["REPORT", "GET", "PROPFIND", "X-ANY-OTHER"].into_iter().find(|name| {
        !methods.iter().any(|(known, _)| known == name) && !METHODS_FORBIDDEN.contains(name)
    });
    let any = if methods.is_empty() { "any method" } else { "any other method" };
    methods.extend(other.map(|name| (name.to_owned(), any.to_owned())));
    let mut all = Vec::new();
    let patterns: Vec<Parts> =
        rules.iter().flat_map(|rule| &rule.paths).map(|p| p.parts()).collect();
    let mut paths = classes(&patterns)?;
    if rules.iter().any(|rule| !rule.paths.is_empty() || rule.git.is_some()) {
        // What two servers could read differently is no path to rules that list paths.
        paths.push(("//".to_owned(), " (ambiguous paths)".to_owned()));
    }
    paths.extend(batches(rules));
    for (path, shown) in &paths {
        for (method, verb) in &methods {
            let (method, verb) = (method.clone(), Some(verb.clone()));
            all.push(Asked { method, path: path.clone(), query: None, shown: shown.clone(), verb });
        }
    }
    let git = rules.iter().filter_map(|rule| rule.git.as_ref());
    let repositories: Vec<Parts> =
        git.flat_map(|git| &git.repositories).map(|pattern| pattern.parts()).collect();
    if repositories.is_empty() {
        return Ok(all);
    }
    for (path, shown) in
        classes(&repositories)?.into_iter().filter(|(path, _)| !path.ends_with('/'))
    {
        let name = shown.trim_start_matches('/');
        for (method, end, query, what) in [
            ("GET", "info/refs", Some("service=git-upload-pack"), "fetch from"),
            ("POST", "git-receive-pack", None, "push to"),
        ] {
            let (path, shown) = (format!("{path}.git/{end}"), format!(" git {what} {name}"));
            all.push(Asked { method: method.to_owned(), path, query, shown, verb: None });
        }
    }
    Ok(all)
}

/// The request of LFS that a rule with a credential refuses or not, wherever a rule could take it;
/// where no version allows it, the paths around it tell all.
fn batches(rules: &[&Rule]) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    if !rules.iter().any(|rule| rule.lfs) {
        return found;
    }
    for rule in rules.iter().filter(|rule| rule.git.is_none()) {
        let opens = rule.paths.iter().map(|pattern| pattern.parts()).filter(|parts| parts.open);
        let mut places: Vec<String> = opens
            .map(|parts| {
                let names = parts.segments.iter().map(|segment| segment.unwrap_or(OTHER));
                names.map(|name| format!("/{}", encoded(name))).collect()
            })
            .collect();
        if rule.paths.is_empty() {
            places.push(String::new());
        }
        for place in places {
            let shown = format!("{}/** (batches of LFS)", place.replace(OTHER, "*"));
            let path = format!("{place}/objects/batch");
            if !found.iter().any(|(known, _)| *known == path) {
                found.push((path, shown));
            }
        }
    }
    found
}

/// One path of each class that the patterns tell apart, and how the class is written.
fn classes(patterns: &[Parts<'_>]) -> Result<Vec<(String, String)>, String> {
    if patterns.is_empty() {
        return Ok(vec![(format!("/{OTHER}"), "/**".to_owned())]);
    }
    let mut classes = Classes::default();
    classes.walk(patterns, &[])?;
    Ok(classes.found)
}

#[derive(Default)]
struct Classes {
    found: Vec<(String, String)>,
    /// A path that no pattern takes is among them.
    none: bool,
}

impl Classes {
    /// Every continuation of a beginning that `alive` patterns still take.
    fn walk(&mut self, alive: &[Parts<'_>], begun: &[&str]) -> Result<(), String> {
        let depth = begun.len();
        let mut next: Vec<&str> = Vec::new();
        for literal in alive.iter().filter_map(|parts| *parts.segments.get(depth)?) {
            if !next.contains(&literal) {
                next.push(literal);
            }
        }
        let still = |segment: &str| -> Vec<Parts<'_>> {
            alive.iter().filter(|parts| parts.takes(depth, segment)).cloned().collect()
        };
        let ended = |taken: &[Parts<'_>]| taken.iter().all(|p| p.segments.len() <= depth);
        // Any other, and the empty one behind a last slash where that is something else.
        let any = still(OTHER);
        let same = next.contains(&"") || (ended(&any) && still("").len() == any.len());
        let slash = (!same).then_some("");
        for segment in next.into_iter().chain([OTHER]).chain(slash) {
            let (taken, path) = (still(segment), [begun, &[segment]].concat());
            let below = segment == OTHER && !taken.is_empty() && ended(&taken);
            self.add(&path, taken.is_empty(), below)?;
            let deeper = taken.iter().any(|p| p.open || p.segments.len() > depth + 1);
            if !segment.is_empty() && deeper && !ended(&taken) {
                self.walk(&taken, &path)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, path: &[&str], none: bool, below: bool) -> Result<(), String> {
        if none && std::mem::replace(&mut self.none, true) {
            return Ok(());
        }
        if self.found.len() >= PATHS_MAX || path.len() > DEPTH_MAX {
            return Err("its paths have too many stars to be compared".to_owned());
        }
        let raw: String = path.iter().map(|segment| format!("/{}", encoded(segment))).collect();
        let shown = match (none, below) {
            (true, _) => " (any other)".to_owned(),
            (false, true) => raw.replace(OTHER, "*") + "*",
            (false, false) => raw.replace(OTHER, "*"),
        };
        self.found.push((raw, shown));
        Ok(())
    }
}

/// A segment that no pattern names.
const OTHER: &str = "any-4093082899";

fn encoded(segment: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()+,;=:@".contains(byte);
    let text = |byte: u8| match plain(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    segment.bytes().map(text).collect()
}

/// Both versions, and a port of a host.
struct Pair<'a> {
    versions: [Option<&'a Policy>; 2],
    host: &'a Host,
    port: u16,
}

impl Pair<'_> {
    fn at_connect(&self, policy: Option<&Policy>) -> Option<ConnectDecision> {
        policy.map(|policy| policy.at_connect(self.host, self.port))
    }

    /// A change of what is passed on unread: for connections, not for requests.
    fn connection(&self, place: &str) -> Option<Change> {
        let effect = |policy| match self.at_connect(policy) {
            Some(ConnectDecision::Tunnel(permit)) => Some(of_permit(&permit, true)),
            Some(ConnectDecision::Inspect) => None,
            Some(ConnectDecision::Deny(_)) | None => Some(Effect::Denied),
        };
        let [before, after] = self.versions.map(effect);
        let unread = |effect: &Option<Effect>| matches!(effect, Some(Effect::Allowed { .. }));
        // Where requests are read in both, or nothing goes in either, requests tell it all.
        if before == after || !(unread(&before) || unread(&after)) {
            return None;
        }
        let (carries, addresses, quotas) = (Vec::new(), Vec::new(), Quotas::default());
        let read = Effect::Allowed { carries, addresses, unread: false, quotas, asks: None };
        Some(Change {
            place: place.to_owned(),
            methods: Vec::new(),
            before: before.unwrap_or_else(|| read.clone()),
            after: after.unwrap_or(read),
        })
    }

    fn requests(&self, place: &str, scheme: Scheme, requests: &[Asked]) -> Vec<Change> {
        let inspects = |policy| matches!(self.at_connect(policy), Some(ConnectDecision::Inspect));
        let mut changes: Vec<Change> = Vec::new();
        if !self.versions.into_iter().any(inspects) {
            return changes;
        }
        let name = if scheme == Scheme::Https { "https" } else { "http" };
        for asked in requests {
            let [before, after] = self.versions.map(|policy| self.request(policy, scheme, asked));
            if before == after {
                continue;
            }
            let place = format!("{name}://{place}{}", asked.shown);
            let known = changes.iter_mut().find(|change| {
                change.place == place && change.before == before && change.after == after
            });
            match (known, &asked.verb) {
                (Some(change), Some(verb)) => change.methods.push(verb.clone()),
                (Some(_), None) => {}
                (None, verb) => {
                    let methods = vec![verb.clone().unwrap_or_else(|| "git".to_owned())];
                    changes.push(Change { place, methods, before, after });
                }
            }
        }
        // `/a/**` is `/a` too.
        let known: Vec<String> = changes.iter().map(Change::to_string).collect();
        changes.retain(|change| {
            let below = Change { place: format!("{}/**", change.place), ..change.clone() };
            !known.contains(&below.to_string())
        });
        changes
    }

    fn request(&self, policy: Option<&Policy>, scheme: Scheme, asked: &Asked) -> Effect {
        let Some(policy) = policy else { return Effect::Denied };
        if let ConnectDecision::Tunnel(permit) = policy.at_connect(self.host, self.port) {
            return of_permit(&permit, false);
        }
        let (host, port) = (self.host, self.port);
        let (method, path, query) = (asked.method.as_str(), asked.path.as_str(), asked.query);
        match policy.decide(&EgressRequest { scheme, host, port, method, path, query }) {
            Decision::Allowed(permit) => of_permit(&permit, false),
            Decision::Denied(_) => Effect::Denied,
        }
    }
}

fn of_permit(permit: &Permit, unread: bool) -> Effect {
    // What a name stands for may have changed with it.
    let print = |credential: &Credential| {
        let own = (&credential.secret, &credential.grant, &credential.inject, credential.when);
        (credential.name.clone(), format!("{own:?}"))
    };
    let carried = [permit.credential(), permit.certificate()];
    let carries = carried.into_iter().flatten().map(|credential| print(credential)).collect();
    let addresses = permit.addresses().iter().map(ToString::to_string).collect();
    let asks = permit.asks().map(|within| within.as_secs());
    let quotas = permit.budget().map(|budget| budget.quotas).unwrap_or_default();
    Effect::Allowed { carries, addresses, unread, quotas, asks }
}

impl Effect {
    pub fn is_allowed(&self) -> bool {
        *self != Self::Denied
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Allowed { carries, addresses, unread, quotas, asks } = self else {
            return f.write_str("denied");
        };
        f.write_str(if *unread { "passed on unread" } else { "allowed" })?;
        for (name, _) in carries {
            write!(f, ", credential \"{name}\"")?;
        }
        if !addresses.is_empty() {
            write!(f, ", may lead to {}", addresses.join(", "))?;
        }
        if !quotas.is_empty() {
            write!(f, ", {quotas}")?;
        }
        if let Some(seconds) = asks {
            write!(f, ", once an operator has said yes within {seconds} s")?;
        }
        Ok(())
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.methods.as_slice() {
            [] => write!(f, "connections to {}", self.place)?,
            [git] if git == "git" => f.write_str(&self.place)?,
            methods => write!(f, "{} {}", methods.join(", "), self.place)?,
        }
        write!(f, ": {} -> {}", self.before, self.after)?;
        // Another definition under the same name is all that is left to tell them apart.
        match self.before.to_string() == self.after.to_string() {
            true => f.write_str(" (the credential is defined otherwise)"),
            false => Ok(()),
        }
    }
}
