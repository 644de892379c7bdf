//! What rules make of credentials: where one goes.

use std::collections::BTreeSet;

use crate::host::Host;
use crate::policy::Policy;

impl Policy {
    /// Whether some rule gives the credential to requests of one of these methods to that host.
    pub fn gives(&self, credential: &str, host: &Host, methods: &[&str]) -> bool {
        self.rules.iter().any(|rule| {
            let given = rule.credential.as_ref().is_some_and(|own| own.name == credential);
            let listed = |own: &BTreeSet<String>| methods.iter().any(|m| own.contains(*m));
            given && rule.names(host) && rule.methods.as_ref().is_none_or(listed)
        })
    }
}
