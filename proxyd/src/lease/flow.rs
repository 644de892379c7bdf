//! What is under way on a lease, so that a changed policy can stop what it no longer allows.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use foldhash::HashMap;
use policies::egress::budget::Budget;
use policies::{
    ConnectDecision, Decision, Denial, DenialCode, EgressRequest, Host, Permit, Policy, Scheme,
};
use tokio_util::sync::CancellationToken;

use crate::overrides::Taken;

/// One thing under way.
pub enum Flow {
    Tunnel { host: Host, port: u16 },
    Request(Request),
}

/// What a request is judged by.
pub struct Request {
    pub scheme: Scheme,
    pub host: Host,
    pub port: u16,
    pub method: String,
    pub path: String,
    pub query: Option<String>,
    /// What else it may be taken for: it has to be allowed all of that.
    pub taken: Vec<Taken>,
}

impl Request {
    /// What the policy says about it.
    pub fn judge(&self, policy: &Policy) -> Result<Permit, Denial> {
        let permit = self.judge_as(policy, &self.method, &self.path, self.query.as_deref())?;
        for taken in &self.taken {
            self.judge_taken(policy, taken, &permit)?;
        }
        Ok(permit)
    }

    /// The credential of one rule must not do what only another rule allows, with its own; nor
    /// what another rule asks about, or counts.
    fn judge_taken(&self, policy: &Policy, taken: &Taken, own: &Permit) -> Result<(), Denial> {
        let Taken { by, method, path, query } = taken;
        let permit = self.judge_as(policy, method, path, query.as_deref()).map_err(|denial| {
            let reason = format!("{by} asks for {method} {path}: {}", denial.reason);
            Denial { reason, ..denial }
        })?;
        let (rule, own_rule) = (permit.rule(), own.rule());
        let why = if permit.asks().is_some() && rule != own_rule {
            format!("about which {rule} asks an operator, and {own_rule} does not")
        } else if permit.carries() != own.carries() {
            format!("which {rule} allows with another credential than {own_rule}")
        } else if permit.budget().is_some_and(|budget| !own.is_counted_by(budget)) {
            format!("which {rule} counts, and {own_rule} does not count for it")
        } else {
            return Ok(());
        };
        Err(Denial {
            code: DenialCode::MethodNotListed,
            rule: Some(rule.to_owned()),
            reason: format!("{by} asks for {method} {path}, {why}"),
            hint: Some("ask for it by the request line alone".to_owned()),
        })
    }

    fn judge_as(
        &self,
        policy: &Policy,
        method: &str,
        path: &str,
        query: Option<&str>,
    ) -> Result<Permit, Denial> {
        let (scheme, host, port) = (self.scheme, &self.host, self.port);
        let request = EgressRequest { scheme, host, port, method, path, query };
        match policy.decide(&request) {
            Decision::Allowed(permit) => Ok(permit),
            Decision::Denied(denial) => Err(denial),
        }
    }
}

/// Under what a flow was allowed.
pub struct Given {
    /// The generation of the policy that allowed it.
    pub generation: u64,
    /// The credentials that the rule gave it.
    pub credential: Option<String>,
    pub budget: Option<Arc<Budget>>,
    /// The rule about which an operator was asked, and said yes.
    pub answered: Option<String>,
}

impl Given {
    pub fn by(permit: &Permit, generation: u64) -> Self {
        let budget = permit.budget().cloned();
        let answered = permit.asks().map(|_| permit.mark());
        Self { generation, credential: permit.carries(), budget, answered }
    }
}

/// A flow with all that its permission hangs on.
struct Running {
    flow: Flow,
    credential: Option<String>,
    budget: Option<Arc<Budget>>,
    answered: Option<String>,
    /// Where it was dialled to, and whether that address is one of this host's own.
    address: Option<(IpAddr, bool)>,
    stop: CancellationToken,
}

impl Running {
    /// Whether the policy would still let it be as it is: with this credential, to this address,
    /// its bytes counted as they are, and with a yes where the rule asks for one.
    fn is_allowed(&self, policy: &Policy) -> bool {
        let permit = match &self.flow {
            // A tunnel that should be read now has to be opened anew.
            Flow::Tunnel { host, port } => match policy.at_connect(host, *port) {
                ConnectDecision::Tunnel(permit) => permit,
                ConnectDecision::Deny(_) | ConnectDecision::Inspect => return false,
            },
            Flow::Request(request) => match request.judge(policy) {
                Ok(permit) => permit,
                Err(_) => return false,
            },
        };
        let bytes = |budget: Option<&Arc<Budget>>| {
            budget.and_then(|budget| budget.of_bytes()).map(|(key, own)| (key.to_owned(), own))
        };
        permit.carries() == self.credential
            && (permit.asks().is_none() || self.answered == Some(permit.mark()))
            && bytes(permit.budget()) == bytes(self.budget.as_ref())
            && self.address.is_none_or(|(ip, own)| permit.address_allowed(ip, own).is_ok())
    }
}

/// The flows of one lease. Clones share them.
#[derive(Clone, Default)]
pub struct Flows(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    next: u64,
    flows: HashMap<u64, Running>,
    /// The policy that all flows were last judged by, and its generation.
    judged: Option<(u64, Arc<Policy>)>,
}

impl Table {
    /// Stops a flow that came in, or found its address, under a policy that was replaced
    /// meanwhile.
    fn catch_up(&self, running: &Running, generation: u64) {
        if let Some((judged, policy)) = &self.judged
            && *judged > generation
            && !running.is_allowed(policy)
        {
            running.stop.cancel();
        }
    }
}

/// A flow's place in the list; it leaves the list when this is dropped.
pub struct Entry {
    flows: Flows,
    number: u64,
    generation: u64,
    /// Cancelled when policy no longer allows the flow.
    pub stop: CancellationToken,
}

impl Entry {
    /// Notes where the flow leads; from now on its permission hangs on that too.
    pub fn dialled(&self, address: IpAddr, own: bool) {
        let mut table = self.flows.table();
        if let Some(running) = table.flows.get_mut(&self.number) {
            running.address = Some((address, own));
        }
        if let Some(running) = table.flows.get(&self.number) {
            table.catch_up(running, self.generation);
        }
    }
}

impl Flows {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub fn count(&self) -> u64 {
        self.table().flows.len() as u64
    }

    /// Takes a flow in. One that was allowed by a policy that is no longer in force is judged by
    /// the newer one at once: between its decision and now it was in no list.
    pub fn enter(&self, flow: Flow, given: Given) -> Entry {
        let stop = CancellationToken::new();
        let Given { generation, credential, budget, answered } = given;
        let (address, stops) = (None, stop.clone());
        let running = Running { flow, credential, budget, answered, address, stop: stops };
        let mut table = self.table();
        table.catch_up(&running, generation);
        let number = table.next;
        table.next += 1;
        table.flows.insert(number, running);
        Entry { flows: self.clone(), number, generation, stop }
    }

    /// Stops what the policy no longer allows.
    pub fn judge_again(&self, policy: &Arc<Policy>, generation: u64) {
        let mut table = self.table();
        table.judged = Some((generation, Arc::clone(policy)));
        for running in table.flows.values() {
            if !running.is_allowed(policy) {
                running.stop.cancel();
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.flows.table().flows.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Arc<Policy> {
        let set = policies::PolicySet::parse(&[("dev.toml".into(), text.into())]).unwrap();
        Arc::clone(set.environment("dev").unwrap())
    }

    const ALLOWS_A: &str = "[[egress.allow]]\nhosts = [\"a.test\"]\n";
    const INJECTS: &str = r#"
        [[egress.allow]]
        hosts = ["a.test"]
        addresses = ["10.0.0.0/8"]
        credential = "one"
        [credentials.one]
        secret = "local:one"
        inject = { bearer = true }
        hosts = ["a.test"]
        [credentials.two]
        secret = "local:two"
        inject = { bearer = true }
        hosts = ["a.test"]
    "#;

    fn given(credential: Option<&str>) -> Given {
        Given {
            generation: 1,
            credential: credential.map(str::to_owned),
            budget: None,
            answered: None,
        }
    }

    fn tunnel(name: &str) -> Flow {
        Flow::Tunnel { host: Host::parse(name).unwrap(), port: 443 }
    }

    fn request() -> Flow {
        Flow::Request(Request {
            scheme: Scheme::Https,
            host: Host::parse("a.test").unwrap(),
            port: 443,
            method: "GET".to_owned(),
            path: "/".to_owned(),
            query: None,
            taken: Vec::new(),
        })
    }

    #[test]
    fn a_request_is_judged_as_everything_that_it_may_be_taken_for() {
        let policy = policy(
            r#"
            [[egress.allow]]
            hosts = ["a.test"]
            methods = ["POST"]
            paths = ["/a/**"]
            [[egress.allow]]
            hosts = ["a.test"]
            methods = ["PUT"]
            credential = "one"
            [credentials.one]
            secret = "local:one"
            inject = { bearer = true }
            hosts = ["a.test"]
        "#,
        );
        let judge = |taken: &[(&str, &str)]| {
            let Flow::Request(mut request) = request() else { unreachable!() };
            request.method = "POST".to_owned();
            request.path = "/a/b".to_owned();
            let taken = taken.iter().map(|(method, path)| Taken {
                by: "X-By".to_owned(),
                method: (*method).to_owned(),
                path: (*path).to_owned(),
                query: None,
            });
            request.taken = taken.collect();
            request.judge(&policy).map(|permit| permit.rule().to_owned())
        };

        assert_eq!(judge(&[("POST", "/a/c")]).unwrap(), "egress.allow[0]");
        let refused = judge(&[("POST", "/a/c"), ("DELETE", "/a/b")]).unwrap_err();
        assert_eq!(refused.code, DenialCode::MethodNotListed);
        assert!(refused.reason.starts_with("X-By asks for DELETE /a/b: "), "{}", refused.reason);
        assert_eq!(judge(&[("POST", "/b")]).unwrap_err().code, DenialCode::PathNotListed);
        assert_eq!(judge(&[("CONNECT", "/a")]).unwrap_err().code, DenialCode::MethodForbidden);
        // Allowed as well, but with another credential than the one that would go along.
        let refused = judge(&[("PUT", "/a/b")]).unwrap_err();
        assert!(refused.reason.contains("another credential"), "{}", refused.reason);
    }

    #[test]
    fn a_changed_policy_stops_only_what_it_no_longer_allows() {
        let flows = Flows::default();
        let kept = flows.enter(tunnel("a.test"), given(None));
        let removed = flows.enter(tunnel("b.test"), given(None));

        flows.judge_again(&policy(ALLOWS_A), 2);

        assert!(!kept.stop.is_cancelled());
        assert!(removed.stop.is_cancelled());
        assert_eq!(flows.count(), 2);
        drop(kept);
        assert_eq!(flows.count(), 1);
    }

    #[test]
    fn a_flow_loses_its_permission_with_its_credential_or_its_address() {
        let flows = Flows::default();
        let [kept, moved] = [(); 2].map(|()| flows.enter(request(), given(Some("one"))));
        let plain = flows.enter(request(), given(None));
        let other = flows.enter(request(), given(Some("two")));
        kept.dialled([10, 0, 0, 1].into(), false);
        moved.dialled([192, 168, 0, 1].into(), false);

        flows.judge_again(&policy(INJECTS), 2);

        assert!(!kept.stop.is_cancelled());
        for stopped in [&moved, &plain, &other] {
            assert!(stopped.stop.is_cancelled());
        }
    }

    #[test]
    fn a_flow_allowed_just_before_a_change_is_judged_by_the_changed_policy_when_it_enters() {
        let flows = Flows::default();
        flows.judge_again(&policy(ALLOWS_A), 2);

        let late = flows.enter(tunnel("b.test"), given(None));
        let kept = flows.enter(tunnel("a.test"), given(None));
        let late_address = flows.enter(tunnel("a.test"), given(None));
        late_address.dialled([10, 0, 0, 1].into(), false);

        assert!(late.stop.is_cancelled() && late_address.stop.is_cancelled());
        assert!(!kept.stop.is_cancelled());
    }
}
