//! What rules make of credentials: where one goes, and what proxyd answers for it.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::client_file::{AWS_PAIR, ClientFile, Cloud, METADATA_PORT};
use crate::credential::Credential;
use crate::host::Host;
use crate::pattern::HostPattern;
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

    /// The hosts, by name and with their ports, that rules give the credential to.
    pub fn places_of(&self, credential: &Credential) -> Vec<(Host, u16)> {
        let exact = credential.hosts.iter().filter_map(|pattern| match pattern {
            HostPattern::Exact(host) => Some(host),
            HostPattern::Below(_) => None,
        });
        let mut places = Vec::new();
        for host in exact {
            let mut ports = BTreeSet::new();
            for rule in &self.rules {
                let given = rule.credential.as_ref().is_some_and(|own| own.name == credential.name);
                if given && rule.names(host) {
                    ports.extend(&rule.ports);
                }
            }
            places.extend(ports.into_iter().map(|port| (host.clone(), port)));
        }
        places
    }

    /// The credentials whose placeholders proxyd gives out there as a metadata server does. Such a
    /// server is never reached then.
    pub fn metadata_at(&self, host: &Host, port: u16) -> Option<Vec<(&Arc<Credential>, Cloud)>> {
        if port != METADATA_PORT {
            return None;
        }
        let text = host.to_string();
        let clouds = self.credentials.values().flat_map(|credential| {
            credential.metadata.iter().map(move |cloud| (credential, *cloud))
        });
        let there: Vec<_> = clouds.filter(|(_, cloud)| cloud.hosts().contains(&&*text)).collect();
        (!there.is_empty()).then_some(there)
    }
}

impl Credential {
    /// The variables that its placeholders are shaped for, and whether the sandbox has each: AWS's
    /// clients take a pair of keys from wherever they are told one.
    pub fn variables(&self) -> impl Iterator<Item = (&str, bool)> {
        let pair = self.metadata.contains(&Cloud::Aws) || self.files.contains(&ClientFile::Aws);
        let hidden = AWS_PAIR
            .into_iter()
            .filter(move |name| pair && !self.env.iter().any(|own| own == name));
        self.env.iter().map(|name| (name.as_str(), true)).chain(hidden.map(|name| (name, false)))
    }
}
