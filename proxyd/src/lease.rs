//! The live leases: who may use proxyd, under which policy, with which names and flows.
//!
//! A lease lives as long as its connection ([`serve`]). When that ends, its listeners and flows
//! end at once; its name bindings stay for a grace time unless the holder closed it properly.

pub mod budgets;
pub mod flow;
pub mod names;
pub mod notes;
pub mod places;
pub mod serve;
pub mod share;
pub mod tokens;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use ipc::id::{CallId, LeaseId, SandboxId, SessionId};
use ipc::lease::{GRACE_SECONDS, Holder, Open, Terms};
use ipc::vault::LeaseInfo as LeaseView;
use policies::Policy;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::audit::Line;
use crate::policy::Generation;
use crate::question::Answers;
use crate::tls::authority::AuthorityId;
use crate::upstream::Behalf;
use crate::vault::Vault;
use budgets::Budgets;
use flow::Flows;
use names::Names;
use notes::Notes;
use places::Room;
use share::{Share, Shares, Taken};
use tokens::{Hash, Tokens};

/// Calls that one lease may have running at once, as its holder says.
const CALLS_MAX: usize = 64;

/// In what time all that ran under a lease has noticed its end.
const SETTLED: Duration = Duration::from_secs(1);

/// One principal's right to use proxyd.
pub struct Lease {
    pub id: LeaseId,
    pub holder: Holder,
    pub environment: String,
    pub owner: String,
    /// On whose behalf connections to upstreams are: it shares those of the same owner and
    /// environment.
    pub behalf: Arc<Behalf>,
    pub sandbox: Option<SandboxId>,
    /// Known from the beginning, or assigned once.
    session: OnceLock<SessionId>,
    pub names: Names,
    pub flows: Flows,
    pub budgets: Budgets,
    pub notes: Notes,
    /// Room for its clients' connections.
    pub room: Arc<Room>,
    /// Its share of requests under way.
    pub requests: Share,
    /// What it takes of the descriptors for leases.
    _sockets: Taken,
    /// Its share of connections that are told that there is no room.
    pub refusals: Share,
    /// Its share of memory for bodies that are held back.
    pub held: Share,
    /// Its share of what waits for an operator's answer, and the answers that last.
    pub questions: Share,
    pub answers: Answers,
    /// Cancelled when the lease ends: everything under it ends then.
    pub end: CancellationToken,
    /// When it ends by itself.
    expires: Option<Instant>,
    /// Why it was ended from outside.
    ended: OnceLock<&'static str>,
    /// Where its clients find the proxy.
    listens: Mutex<Vec<String>>,
    calls: Mutex<Vec<CallId>>,
    /// The policy of the generation last asked for.
    policy: Mutex<Option<(u64, Arc<Policy>)>>,
}

impl Lease {
    fn new(
        open: Open,
        terms: &Terms,
        (names, budgets): (Names, Budgets),
        (shares, sockets): (&Shares, Taken),
        end: CancellationToken,
    ) -> Self {
        let harness = open.holder == Holder::Harness && open.session.is_none();
        let ttl = terms.ttl_seconds.map(Duration::from_secs);
        let tenant = tenant(&open).into();
        let behalf = Behalf { tenant, windows: shares.windows(), lasting: shares.lasting() };
        Self {
            expires: ttl.and_then(|ttl| Instant::now().checked_add(ttl)),
            ended: OnceLock::new(),
            listens: Mutex::default(),
            id: open.lease,
            holder: open.holder,
            behalf: Arc::new(behalf),
            environment: open.environment,
            owner: open.owner,
            sandbox: open.sandbox,
            session: open.session.map_or_else(OnceLock::new, OnceLock::from),
            names,
            flows: Flows::default(),
            budgets,
            notes: Notes::default(),
            room: shares.connections(harness),
            requests: shares.requests(harness),
            _sockets: sockets,
            refusals: shares.refusals(),
            held: shares.held(),
            questions: shares.questions(),
            answers: Answers::default(),
            end,
            calls: Mutex::new(Vec::new()),
            policy: Mutex::new(None),
        }
    }

    /// What rules this lease now; nothing when its environment is gone. harnessd on behalf of a
    /// session may reach that environment's MCP servers and nothing its sandboxes may reach.
    pub fn policy(&self, generation: &Generation) -> Option<(Arc<Policy>, u64)> {
        let mut kept = self.policy.lock().expect("no holder of this lock panics");
        if let Some((number, policy)) = &*kept
            && *number == generation.number
        {
            return Some((Arc::clone(policy), *number));
        }
        let whole = generation.environment(&self.environment)?;
        let policy = match (self.holder, self.session.get()) {
            (Holder::Harness, Some(_)) => Arc::new(whole.for_mcp()),
            _ => Arc::clone(whole),
        };
        *kept = Some((generation.number, Arc::clone(&policy)));
        Some((policy, generation.number))
    }

    /// An audit line with everything that is the lease's.
    pub fn line(&self) -> Line {
        Line {
            lease: Some(self.id.clone()),
            session: self.session.get().cloned(),
            sandbox: self.sandbox.clone(),
            calls: self.calls().clone(),
            environment: Some(self.environment.clone()),
            ..Line::default()
        }
    }

    /// Ends everything under the lease, for a reason that its holder is told.
    fn finish(&self, reason: &'static str) {
        // Whatever came first is the reason.
        let _ = self.ended.set(reason);
        self.end.cancel();
    }

    /// Waits until the lease ends by itself; for ever where it does not.
    async fn expiry(&self) {
        match self.expires {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }

    /// The uid on whose behalf it is.
    pub fn owner_uid(&self) -> Option<u32> {
        self.owner.strip_prefix("uid:")?.parse().ok()
    }

    /// Notes where clients find the proxy.
    fn listens_at(&self, place: String) {
        self.listens.lock().expect("no holder of this lock panics").push(place);
    }

    /// Whose a sandbox's lease is that was opened before its session was known; false: it is one's
    /// already.
    fn assign(&self, session: SessionId) -> bool {
        self.holder == Holder::Sandbox && self.session.set(session).is_ok()
    }

    fn calls(&self) -> MutexGuard<'_, Vec<CallId>> {
        self.calls.lock().expect("no holder of this lock panics")
    }

    fn call_started(&self, call: CallId) {
        let mut calls = self.calls();
        if calls.len() < CALLS_MAX && !calls.contains(&call) {
            calls.push(call);
        }
    }

    fn call_finished(&self, call: &CallId) {
        self.calls().retain(|running| running != call);
        self.notes.forget(call);
    }

    fn view(&self) -> LeaseView {
        LeaseView {
            lease: self.id.clone(),
            holder: self.holder,
            environment: self.environment.clone(),
            owner: self.owner.clone(),
            sandbox: self.sandbox.clone(),
            session: self.session.get().cloned(),
            flows: self.flows.count(),
            connected: true,
            listens: self.listens.lock().expect("no holder of this lock panics").clone(),
            seconds_left: self
                .expires
                .map(|at| at.saturating_duration_since(Instant::now()).as_secs()),
        }
    }
}

/// Whose connections to upstreams and names a lease may have.
fn tenant(open: &Open) -> String {
    format!("{} {}", open.owner, open.environment)
}

/// Why a lease cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    #[error("lease {0} is open already")]
    Open(LeaseId),
    #[error(
        "no descriptors are left for one more lease of {0}: close some, or raise LimitNOFILE= of \
         proxyd"
    )]
    Full(String),
    #[error("another lease has this token")]
    Token,
    #[error("lease {lease}: {source}")]
    Names { lease: LeaseId, source: names::OpenError },
}

/// All leases.
pub struct Leases {
    dir: PathBuf,
    pub shares: Shares,
    table: Mutex<Table>,
    /// Told when a lease is forgotten.
    forgotten: Notify,
    /// Leases that do not come back, until somebody takes note of it.
    ended: Mutex<Vec<LeaseId>>,
}

#[derive(Default)]
struct Table {
    live: HashMap<LeaseId, Option<Arc<Lease>>>,
    tokens: Tokens,
    /// Leases that ended without a close, and until when their names are kept.
    graced: HashMap<LeaseId, Graced>,
}

/// A lease that may come back.
struct Graced {
    until: Instant,
    /// What its clients trust.
    authority: Option<AuthorityId>,
    /// What it has used; nothing where proxyd has started since.
    budgets: Budgets,
}

impl Leases {
    /// `dir` holds one file of name bindings a lease. Those of leases that are not opened again
    /// within the grace time are removed.
    pub fn open(dir: &Path) -> std::io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let until = Instant::now() + Duration::from_secs(GRACE_SECONDS);
        let mut table = Table::default();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            if let Some(id) = entry.file_name().to_str().and_then(|n| LeaseId::parse(n).ok()) {
                let authority = Names::trusted(&entry.path());
                let budgets = Budgets::default();
                table.graced.insert(id, Graced { until, authority, budgets });
            }
        }
        let (dir, shares, forgotten) = (dir.to_owned(), Shares::here(), Notify::new());
        Ok(Self { dir, shares, table: Mutex::new(table), forgotten, ended: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no holder of this lock panics")
    }

    /// Takes a lease in, with the token that stands for it and the authority that it is served by.
    fn enter(
        &self,
        open: Open,
        terms: &Terms,
        token: Option<Hash>,
        end: CancellationToken,
        choose: impl FnOnce(Option<AuthorityId>) -> AuthorityId,
    ) -> Result<Arc<Lease>, EnterError> {
        let id = open.lease.clone();
        if token.is_some_and(|token| self.table().tokens.find(&token).is_some_and(|of| *of != id)) {
            return Err(EnterError::Token);
        }
        let sockets = self.shares.lease(&open.owner, open.descriptors.len());
        let sockets = sockets.map_err(|_| EnterError::Full(open.owner.clone()))?;
        let graced = self.reserve(&id)?;
        let names = Names::open(&self.dir.join(id.as_str()), &tenant(&open));
        match names.and_then(|names| names.settle(choose).map(|()| names)) {
            Ok(names) => {
                let shares = (&self.shares, sockets);
                let kept = (names, graced.map(|graced| graced.budgets).unwrap_or_default());
                let lease = Arc::new(Lease::new(open, terms, kept, shares, end));
                let mut table = self.table();
                table.live.insert(id.clone(), Some(Arc::clone(&lease)));
                if let Some(token) = token {
                    table.tokens.insert(token, id);
                }
                Ok(lease)
            }
            Err(source) => {
                let mut table = self.table();
                table.live.remove(&id);
                table.graced.extend(graced.map(|graced| (id.clone(), graced)));
                Err(EnterError::Names { lease: id, source })
            }
        }
    }

    /// Holds the id while its bindings are read, so that nobody removes them meanwhile.
    fn reserve(&self, id: &LeaseId) -> Result<Option<Graced>, EnterError> {
        let mut table = self.table();
        if table.live.contains_key(id) {
            return Err(EnterError::Open(id.clone()));
        }
        table.live.insert(id.clone(), None);
        Ok(table.graced.remove(id))
    }

    /// Ends a lease: flows stop, its token is void. Bindings go now after a close, after the
    /// grace time otherwise.
    fn leave(&self, lease: &Lease, closed: bool) {
        lease.end.cancel();
        let mut table = self.table();
        table.live.remove(&lease.id);
        table.tokens.remove(&lease.id);
        if closed {
            lease.names.remove();
            self.ended().push(lease.id.clone());
        } else {
            let until = Instant::now() + Duration::from_secs(GRACE_SECONDS);
            let authority = Some(lease.names.authority());
            let budgets = lease.budgets.clone();
            table.graced.insert(lease.id.clone(), Graced { until, authority, budgets });
        }
        self.forgotten.notify_one();
    }

    fn ended(&self) -> MutexGuard<'_, Vec<LeaseId>> {
        self.ended.lock().expect("no holder of this lock panics")
    }

    /// Tells the vault of leases that do not come back, for as long as the daemon runs; each when
    /// all that ran under it has had time to end, so that nothing is made for it afterwards.
    pub async fn tell(self: Arc<Self>, vault: Vault) {
        let mut ending = Vec::new();
        loop {
            tokio::time::sleep(SETTLED).await;
            let ended: Vec<LeaseId> = std::mem::replace(&mut ending, self.ended().split_off(0));
            for lease in ended {
                let again = self.table().live.contains_key(&lease);
                // A vault that has gone has revoked all that it held.
                if !again && vault.forget(&lease).await.is_err() {
                    break;
                }
            }
        }
    }

    /// Waits until a lease is forgotten.
    pub async fn forgotten(&self) {
        self.forgotten.notified().await;
    }

    /// Has whoever waits for that look once more.
    pub fn look_again(&self) {
        self.forgotten.notify_one();
    }

    /// The authorities that clients of leases trust, and of how many leases; nothing while a lease
    /// is being taken in, which may have any.
    pub fn authorities(&self) -> Option<BTreeMap<AuthorityId, u64>> {
        let table = self.table();
        let mut trusted = BTreeMap::new();
        for lease in table.live.values() {
            *trusted.entry(lease.as_ref()?.names.authority()).or_default() += 1;
        }
        for id in table.graced.values().filter_map(|graced| graced.authority) {
            *trusted.entry(id).or_default() += 1;
        }
        Some(trusted)
    }

    /// Forgets the bindings of leases whose grace time is over, for as long as the daemon runs.
    pub async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            let mut table = self.table();
            let now = Instant::now();
            let dir = &self.dir;
            table.graced.retain(|id, graced| {
                if graced.until > now {
                    return true;
                }
                // Whatever cannot be removed now is seen again at the next start.
                let _ = std::fs::remove_file(dir.join(id.as_str()));
                self.ended().push(id.clone());
                self.forgotten.notify_one();
                false
            });
        }
    }

    /// The lease that a token stands for. Of one that has ended but is still held, none: whoever
    /// comes then is told so, where a flow under it would only be cut.
    pub fn by_token(&self, token: &str) -> Option<Arc<Lease>> {
        let table = self.table();
        let id = table.tokens.find(&Hash::of(token))?;
        table.live.get(id)?.clone().filter(|lease| !lease.end.is_cancelled())
    }

    /// Keeps a refusal for the calls that run on the lease it was recorded for.
    pub fn note(&self, record: &Line, refusal: &crate::reply::Refusal) {
        if let Some(lease) = record.lease.as_ref().and_then(|id| self.by_id(id)) {
            lease.notes.add(record, refusal.end(), refusal.hint.as_deref());
        }
    }

    pub fn views(&self) -> Vec<LeaseView> {
        let live = self.live();
        let open = live.iter().filter(|lease| !lease.end.is_cancelled());
        let mut views: Vec<_> = open.map(|lease| lease.view()).collect();
        views.sort_by(|a, b| a.lease.cmp(&b.lease));
        views
    }

    /// The live lease of that id.
    fn by_id(&self, id: &LeaseId) -> Option<Arc<Lease>> {
        self.table().live.get(id)?.clone()
    }

    fn live(&self) -> Vec<Arc<Lease>> {
        self.table().live.values().flatten().cloned().collect()
    }

    /// Stops every flow that the new policies no longer allow, and every lease whose environment
    /// is gone.
    pub fn judge_again(&self, generation: &Generation) {
        for lease in self.live() {
            match lease.policy(generation) {
                Some((policy, number)) => lease.flows.judge_again(&policy, number),
                None => lease.end.cancel(),
            }
        }
    }
}
