//! One environment, as one policy file describes it, with everything checked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::address::AddressRange;
use crate::credential::Credential;
use crate::egress::{Rule, Scheme};
use crate::host::Host;
use crate::pattern::HostPattern;
use crate::sandbox::SandboxTable;

/// One environment. Its egress rules are read through [`Policy::decide`] and its siblings only.
#[derive(Debug)]
pub struct Policy {
    /// The file's name without `.toml`.
    pub name: String,
    pub description: String,
    pub access: Access,
    pub sandbox: SandboxTable,
    pub mcp: BTreeMap<String, McpServer>,
    pub credentials: BTreeMap<String, Arc<Credential>>,
    pub(crate) rules: Vec<Arc<Rule>>,
}

/// Who may open the environment; both absent means everyone who can reach the socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// User names, or `uid:1000`.
    pub users: Option<Vec<String>>,
    /// Group names, or `gid:1000`.
    pub groups: Option<Vec<String>>,
}

/// An MCP server that sessions of the environment may use, called by harnessd through proxyd.
#[derive(Clone, Debug)]
pub struct McpServer {
    pub url: String,
    pub scheme: Scheme,
    pub host: Host,
    pub port: u16,
    /// The path of `url`, at least `/`.
    pub path: String,
    pub credential: Option<Arc<Credential>>,
    /// What connections to it are opened with.
    pub certificate: Option<Arc<Credential>>,
    /// The private ranges it may lie in.
    pub addresses: Vec<AddressRange>,
}

impl Access {
    /// Whether there is no restriction at all.
    pub fn is_open(&self) -> bool {
        self.users.is_none() && self.groups.is_none()
    }

    /// Whether a principal may open the environment; being listed in either list is enough. The
    /// caller looks up the names; a principal without a name is known by its numbers alone.
    pub fn admits(&self, uid: u32, user: Option<&str>, gids: &[u32], groups: &[&str]) -> bool {
        let listed = |list: &Option<Vec<String>>, name: &str| {
            list.as_ref().is_some_and(|entries| entries.iter().any(|entry| entry == name))
        };
        self.is_open()
            || listed(&self.users, &format!("uid:{uid}"))
            || user.is_some_and(|name| listed(&self.users, name))
            || gids.iter().any(|gid| listed(&self.groups, &format!("gid:{gid}")))
            || groups.iter().any(|name| listed(&self.groups, name))
    }
}

impl Policy {
    /// Whether some rule could match this host: only such names are resolved, so that lookups of
    /// made-up names cannot carry anything out.
    pub fn resolvable(&self, host: &Host) -> bool {
        self.rules.iter().any(|rule| rule.names(host))
    }

    /// Every port that a rule names, for hosts where listeners are made port by port.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.rules.iter().flat_map(|rule| rule.ports.iter().copied()).collect()
    }

    /// The credential of that name.
    pub fn credential(&self, name: &str) -> Option<&Arc<Credential>> {
        self.credentials.get(name)
    }

    /// Every credential whose own list lets it go to this host.
    pub fn credentials_for_host<'a>(
        &'a self,
        host: &'a Host,
    ) -> impl Iterator<Item = &'a Arc<Credential>> {
        self.credentials.values().filter(move |credential| credential.may_go_to(host))
    }

    /// The first rule that covers every host of a pattern, by name: an environment made through
    /// the API may list only hosts for which there is one.
    pub fn covering_rule(&self, pattern: &HostPattern) -> Option<&str> {
        let rule = self.rules.iter().find(|rule| rule.hosts.iter().any(|h| h.covers(pattern)))?;
        Some(&rule.name)
    }

    /// Every host that some rule names: an environment made through the API that lists all of them
    /// narrows nothing.
    pub fn hosts(&self) -> impl Iterator<Item = &HostPattern> {
        self.rules.iter().flat_map(|rule| rule.hosts.iter())
    }

    /// The rules by name with a one-line summary each, in order.
    pub fn rules(&self) -> impl Iterator<Item = (&str, String)> {
        self.rules.iter().map(|rule| (rule.name.as_str(), rule.to_string()))
    }

    /// What harnessd may reach on behalf of a session of this environment: its MCP servers, each
    /// at its own path, and nothing that the sandbox may reach.
    #[must_use]
    pub fn for_mcp(&self) -> Policy {
        Policy {
            name: self.name.clone(),
            description: self.description.clone(),
            access: self.access.clone(),
            sandbox: self.sandbox.clone(),
            mcp: self.mcp.clone(),
            credentials: self.credentials.clone(),
            rules: self.mcp.iter().map(|(name, mcp)| Arc::new(Rule::for_mcp(name, mcp))).collect(),
        }
    }
}
