//! What is under way on a lease, so that a changed policy can stop what it no longer allows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use policies::{ConnectDecision, Decision, EgressRequest, Host, Policy, Scheme};
use tokio_util::sync::CancellationToken;

/// One thing under way.
pub enum Flow {
    Tunnel {
        host: Host,
        port: u16,
    },
    Request {
        scheme: Scheme,
        host: Host,
        port: u16,
        method: String,
        path: String,
        query: Option<String>,
    },
}

impl Flow {
    fn is_allowed(&self, policy: &Policy) -> bool {
        match self {
            // A tunnel that should be read now has to be opened anew.
            Self::Tunnel { host, port } => {
                matches!(policy.at_connect(host, *port), ConnectDecision::Tunnel(_))
            }
            Self::Request { scheme, host, port, method, path, query } => {
                let request = EgressRequest {
                    scheme: *scheme,
                    host,
                    port: *port,
                    method,
                    path,
                    query: query.as_deref(),
                };
                matches!(policy.decide(&request), Decision::Allowed(_))
            }
        }
    }
}

/// The flows of one lease. Clones share them.
#[derive(Clone, Default)]
pub struct Flows(Arc<Mutex<Running>>);

#[derive(Default)]
struct Running {
    next: u64,
    flows: HashMap<u64, (Flow, CancellationToken)>,
}

/// A flow's place in the list; it leaves the list when this is dropped.
pub struct Entry {
    flows: Flows,
    number: u64,
    /// Cancelled when policy no longer allows the flow.
    pub stop: CancellationToken,
}

impl Flows {
    fn running(&self) -> MutexGuard<'_, Running> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub fn count(&self) -> u64 {
        self.running().flows.len() as u64
    }

    pub fn enter(&self, flow: Flow) -> Entry {
        let stop = CancellationToken::new();
        let mut running = self.running();
        let number = running.next;
        running.next += 1;
        running.flows.insert(number, (flow, stop.clone()));
        Entry { flows: self.clone(), number, stop }
    }

    /// Stops what the policy no longer allows.
    pub fn judge_again(&self, policy: &Policy) {
        for (flow, stop) in self.running().flows.values() {
            if !flow.is_allowed(policy) {
                stop.cancel();
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.flows.running().flows.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Arc<Policy> {
        let set = policies::PolicySet::parse(&[("dev.toml".into(), text.into())]).unwrap();
        Arc::clone(set.environment("dev").unwrap())
    }

    #[test]
    fn a_changed_policy_stops_only_what_it_no_longer_allows() {
        let flows = Flows::default();
        let tunnel =
            |name: &str| flows.enter(Flow::Tunnel { host: Host::parse(name).unwrap(), port: 443 });
        let (kept, removed) = (tunnel("a.test"), tunnel("b.test"));

        flows.judge_again(&policy("[[egress.allow]]\nhosts = [\"a.test\"]\n"));

        assert!(!kept.stop.is_cancelled());
        assert!(removed.stop.is_cancelled());
        assert_eq!(flows.count(), 2);
        drop(kept);
        assert_eq!(flows.count(), 1);
    }
}
