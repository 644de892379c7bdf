//! A credential as a policy names it: where its secret lies and where it may go, never its value.

use core::fmt;

use crate::host::Host;
use crate::pattern::HostPattern;

/// A named credential of one environment.
#[derive(Debug)]
pub struct Credential {
    pub name: String,
    pub secret: SecretRef,
    pub inject: Inject,
    /// The hosts it may go to, whatever a rule says: the second, independent check.
    pub hosts: Vec<HostPattern>,
    /// The variable under which the sandbox sees a placeholder.
    pub env: Option<String>,
    /// Whether it may go over plain HTTP.
    pub allow_plaintext: bool,
}

/// Where a secret's value lies: `local:github`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretRef {
    pub backend: Backend,
    pub path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The embedded vault of proxyd.
    Local,
}

/// How a credential is put into a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inject {
    /// `Authorization: Bearer VALUE`.
    Bearer,
    /// `Authorization: Basic base64(USER:VALUE)`.
    Basic { user: String },
    /// A header of its own; `{}` in the template stands for the value. The name is lower case.
    Header { name: String, template: String },
    /// Replaces the placeholder wherever it stands in the places listed.
    Placeholder { places: Vec<Place> },
}

/// Where a placeholder is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In any header's value.
    Header,
    /// Inside the base64 of `Authorization: Basic`.
    Basic,
    Path,
    Query,
}

impl Credential {
    /// Whether this credential's own list lets it go to the host.
    pub fn may_go_to(&self, host: &Host) -> bool {
        self.hosts.iter().any(|pattern| pattern.matches(host))
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.backend {
            Backend::Local => write!(f, "local:{}", self.path),
        }
    }
}
