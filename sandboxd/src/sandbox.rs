//! A sandbox's life: made by its session's first call, used by the calls after it, ended when
//! idle, when told to, or when anything of it ends.
//!
//! [`make`] is its beginning, in order: policy, workspace, plan, cell, lease, trusted
//! certificates. [`watch`] is the rest: it waits for the first of the possible ends, kills what is
//! left, gives the lease back. The workspace is kept. A call holds an [`InUse`] while it runs, so
//! that a sandbox is never taken for idle under it.
//!
//! Half-made ones wait in a [`Pool`]; the making itself, with or without one, is in [`making`].

mod making;
mod template;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::id::{CallId, SandboxId, SessionId, WorkspaceId};
use ipc::sandbox::{Layer, SandboxInfo};
use policies::SandboxTable;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cell::Cell;
use crate::environments::Environments;
use crate::lease::{Event, Lease};
use crate::pool::{Next, Pool, Ready};
use crate::templates::{Held, Templates};
use crate::tools::bash;
use crate::trust::store::KeyStores;
use crate::workspace::{Workspace, Workspaces};
use crate::zygote::{Identities, Zygote};

/// How long the processes of a killed sandbox may take to be gone before that is logged.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Sessions remembered for the notice of a new shell. Beyond that some are not told.
const LOST_SHELLS_MAX: usize = 10_000;

/// What one session's calls share a sandbox by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub session: SessionId,
    pub environment: String,
    pub workspace: Option<WorkspaceId>,
}

/// What a sandbox is to be made of.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub owner: String,
    pub environment: String,
    pub session: Option<SessionId>,
    /// None: one that ends with the sandbox.
    pub workspace: Option<Workspace>,
}

/// A living sandbox.
#[derive(Debug)]
pub struct Sandbox {
    pub id: SandboxId,
    pub owner: String,
    pub environment: String,
    pub session: Option<SessionId>,
    pub cell: Cell,
    /// Every variable a command begins with.
    pub env: Vec<(String, String)>,
    pub table: SandboxTable,
    pub workspace: PathBuf,
    /// The tree that its system directories are shown from.
    root: PathBuf,
    _templates: Vec<Arc<Held>>,
    pub created_at: String,
    pub provision_us: u64,
    /// The persistent shell; whoever holds the lock runs a command in it.
    pub shell: Arc<tokio::sync::Mutex<bash::Session>>,
    /// Cancelled when nothing can run in it any more.
    pub gone: CancellationToken,
    /// Cancelled when its processes, its lease and what was its alone are gone.
    pub removed: CancellationToken,
    /// Cancelled to end it.
    closing: CancellationToken,
    lease: Lease,
    uses: Mutex<Uses>,
    used: Notify,
    /// Free before there is room for another, and when the cell is gone.
    _place: OwnedSemaphorePermit,
    _room: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct Uses {
    running: Vec<CallId>,
    idle_since: Instant,
    closed: bool,
}

/// A sandbox with a call in it. Dropping it lets the sandbox become idle.
#[derive(Debug)]
pub struct InUse {
    pub sandbox: Arc<Sandbox>,
    call: CallId,
}

/// Where the calls of one [`Key`] find their sandbox.
#[derive(Debug, Default)]
struct Slot {
    current: Option<Arc<Sandbox>>,
    /// When and why none could be made the last time.
    failed: Option<(Instant, Fault)>,
}

/// All sandboxes of this daemon, and what it takes to make one.
#[derive(Debug)]
pub struct Sandboxes {
    zygote: Zygote,
    pub environments: Environments,
    pub workspaces: Workspaces,
    key_stores: KeyStores,
    pub templates: Arc<Templates>,
    lease_socket: PathBuf,
    pool: Pool,
    living_max: usize,
    /// One permit for each sandbox that may live, so for each that has a right to a place.
    room: Arc<Semaphore>,
    slots: Mutex<HashMap<Key, Arc<tokio::sync::Mutex<Slot>>>>,
    living: Mutex<HashMap<SandboxId, Arc<Sandbox>>>,
    /// Whose shell ended with a sandbox while no call ran: told at its next command.
    lost_shells: Mutex<HashSet<Key>>,
    watchers: TaskTracker,
    /// Cancelled when the zygote does not answer.
    broken: CancellationToken,
}

/// What sandboxes have in sandboxd's state.
#[derive(Debug)]
pub struct Stores {
    pub workspaces: Workspaces,
    pub key_stores: KeyStores,
    pub templates: Arc<Templates>,
}

impl Sandboxes {
    pub fn new(
        zygote: Zygote,
        environments: Environments,
        stores: Stores,
        lease_socket: PathBuf,
        living_max: usize,
        ready: usize,
    ) -> Self {
        // Each cell has an id of its own, where it has any.
        let living_max = match zygote.identities() {
            Identities::Range { count, .. } => {
                living_max.min(usize::try_from(count).unwrap_or(living_max))
            }
            Identities::Own => living_max,
        };
        let Stores { workspaces, key_stores, templates } = stores;
        Self {
            pool: Pool::new(ready, living_max),
            zygote,
            environments,
            workspaces,
            key_stores,
            templates,
            lease_socket,
            living_max,
            room: Arc::new(Semaphore::new(living_max)),
            slots: Mutex::default(),
            living: Mutex::default(),
            lost_shells: Mutex::default(),
            watchers: TaskTracker::new(),
            broken: CancellationToken::new(),
        }
    }

    /// The session's sandbox, living or newly made; in the latter case with the time that took.
    pub async fn for_call(
        self: &Arc<Self>,
        key: &Key,
        wanted: Wanted,
        call: &CallId,
    ) -> Result<(InUse, Option<u64>), Fault> {
        let asked = Instant::now();
        let slot = Arc::clone(lock(&self.slots).entry(key.clone()).or_default());
        let mut slot = slot.lock().await;
        if let Some(in_use) = slot.current.as_ref().and_then(|sandbox| sandbox.enter(call)) {
            return Ok((in_use, None));
        }
        match &slot.failed {
            // It failed while this call waited: the next try would only add to the wait.
            Some((when, fault)) if *when > asked => return Err(fault.clone()),
            _ => {}
        }
        match self.make(wanted, call).await {
            Ok(in_use) => {
                if lock(&self.lost_shells).remove(key) {
                    *in_use.sandbox.shell.lock().await = bash::Session::Fresh { lost: true };
                }
                *slot = Slot { current: Some(Arc::clone(&in_use.sandbox)), failed: None };
                let provision_us = in_use.sandbox.provision_us;
                Ok((in_use, Some(provision_us)))
            }
            Err(fault) => {
                slot.failed = Some((Instant::now(), fault.clone()));
                Err(fault)
            }
        }
    }

    /// Makes a sandbox with a call in it, and watches over it until it ends.
    pub async fn make(self: &Arc<Self>, wanted: Wanted, call: &CallId) -> Result<InUse, Fault> {
        let temporary = wanted.workspace.is_none();
        let (sandbox, events) = making::make(self, wanted).await?;
        self.fill_pool();
        let sandbox = Arc::new(sandbox);
        let in_use = sandbox.enter(call);
        lock(&self.living).insert(sandbox.id.clone(), Arc::clone(&sandbox));
        let (all, removed) = (Arc::clone(self), sandbox.removed.clone());
        self.watchers.spawn(async move {
            watch(&sandbox, &all.key_stores, events).await;
            all.forget(&sandbox);
            if temporary {
                let (workspaces, id) = (all.workspaces.clone(), sandbox.id.clone());
                let removed = tokio::task::spawn_blocking(move || workspaces.end_of(&id));
                if let Ok(Err(error)) = removed.await {
                    tracing::warn!(sandbox = %sandbox.id, %error, "cannot remove a workspace");
                }
            }
            // Whoever hears of the end finds room for another, unless a call still holds this one.
            drop(sandbox);
            removed.cancel();
        });
        in_use.ok_or_else(|| Fault::new(Code::Internal, "a new sandbox takes no call"))
    }

    /// How many may live at once.
    pub fn living_max(&self) -> usize {
        self.living_max
    }

    /// How many half-made sandboxes wait for a session.
    pub fn ready(&self) -> usize {
        self.pool.len()
    }

    /// Fills the pool in the background, unless that is being done.
    fn fill_pool(self: &Arc<Self>) {
        if !self.pool.begin_filling() {
            return;
        }
        let all = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                match all.pool.next() {
                    Next::Nothing => break,
                    Next::Wait(pause) => tokio::time::sleep(pause).await,
                    Next::Make(shape) => {
                        let Some(place) = all.pool.free_place() else {
                            all.pool.end_filling();
                            break;
                        };
                        let made = making::ready(&all, &shape, place).await;
                        if let Err(fault) = &made {
                            tracing::warn!(%fault, "cannot keep a sandbox ready");
                        }
                        if let Some(late) = all.pool.put(&shape, made.ok()) {
                            drop(late.discard().await);
                        }
                    }
                }
            }
        });
    }

    /// Lets go of what has been ready for long and was not used.
    pub fn tidy_pool(&self) {
        self.discard(self.pool.expired());
    }

    /// Ends what nobody will use, in the background.
    fn discard(&self, unused: Vec<Ready>) {
        for unused in unused {
            self.watchers.spawn(unused.discard());
        }
    }

    /// Returns when no sandbox can be made any more: the daemon has to end.
    pub async fn cannot_be_made(&self) {
        tokio::select! {
            () = self.zygote.ended() => {}
            () = self.broken.cancelled() => {}
        }
    }

    pub fn living(&self) -> Vec<Arc<Sandbox>> {
        lock(&self.living).values().cloned().collect()
    }

    pub fn find(&self, id: &SandboxId) -> Option<Arc<Sandbox>> {
        lock(&self.living).get(id).cloned()
    }

    /// Ends every sandbox and waits until they are gone, up to `patience`.
    pub async fn end_all(&self, patience: Duration) {
        for sandbox in self.living() {
            sandbox.close();
        }
        self.discard(self.pool.close());
        self.watchers.close();
        let _ = tokio::time::timeout(patience, self.watchers.wait()).await;
    }

    /// Drops an ended sandbox, and the slot it was in unless a call is about to use that.
    fn forget(&self, ended: &Sandbox) {
        lock(&self.living).remove(&ended.id);
        lock(&self.slots).retain(|key, shared| match shared.try_lock() {
            Ok(mut slot) => {
                let taken = slot.current.take_if(|sandbox| sandbox.id == ended.id);
                if taken.is_some() && ended.lost_shell_unseen() {
                    let mut lost = lock(&self.lost_shells);
                    if lost.len() >= LOST_SHELLS_MAX {
                        lost.clear();
                    }
                    lost.insert(key.clone());
                }
                slot.current.is_some() || Arc::strong_count(shared) > 1
            }
            Err(_) => true,
        });
    }
}

/// Waits for a sandbox's end and completes it.
async fn watch(
    sandbox: &Sandbox,
    key_stores: &KeyStores,
    mut events: mpsc::UnboundedReceiver<Event>,
) {
    let why = loop {
        let idle = sandbox.idle_deadline();
        tokio::select! {
            () = sandbox.cell.ended() => break "its first process ended",
            () = sandbox.closing.cancelled() => break "told to",
            () = sandbox.used.notified() => {}
            () = sleep_until(idle) => if sandbox.close_if_idle() { break "idle" },
            event = events.recv() => match event {
                Some(Event::Revoked { reason }) => {
                    tracing::warn!(sandbox = %sandbox.id, reason, "proxyd ended the lease");
                    break "lease revoked";
                }
                Some(Event::Reopened(opened)) => {
                    // A CA that was replaced meanwhile would be trusted by nobody inside.
                    let (cell, ca_pem) = (&sandbox.cell, &opened.ca_pem);
                    if making::trust(cell, key_stores, &sandbox.root, None, ca_pem).await.is_err() {
                        break "its certificates cannot be replaced";
                    }
                }
                None => break "lease lost",
            },
        }
    };
    lock(&sandbox.uses).closed = true;
    sandbox.gone.cancel();
    sandbox.cell.kill();
    sandbox.lease.close().await;
    if tokio::time::timeout(END_TIMEOUT, sandbox.cell.ended()).await.is_err() {
        tracing::error!(sandbox = %sandbox.id, "the processes of a killed sandbox do not end");
    }
    tracing::info!(sandbox = %sandbox.id, why, "sandbox ended");
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

impl Sandbox {
    /// Takes the sandbox for a call, unless it is ending.
    fn enter(self: &Arc<Self>, call: &CallId) -> Option<InUse> {
        let mut uses = lock(&self.uses);
        if uses.closed || self.gone.is_cancelled() {
            return None;
        }
        uses.running.push(call.clone());
        Some(InUse { sandbox: Arc::clone(self), call: call.clone() })
    }

    /// Ends the sandbox and everything in it; returns at once. See [`Sandbox::gone`].
    pub fn close(&self) {
        lock(&self.uses).closed = true;
        self.closing.cancel();
    }

    /// The lease, to say which calls run.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    pub fn layers(&self) -> Vec<Layer> {
        self.cell.layers().to_vec()
    }

    pub fn describe(&self) -> SandboxInfo {
        SandboxInfo {
            sandbox: self.id.clone(),
            session: self.session.clone(),
            environment: self.environment.clone(),
            owner: self.owner.clone(),
            pid: self.cell.pid(),
            uid: self.cell.uid(),
            created_at: self.created_at.clone(),
            provision_us: self.provision_us,
            workspace: self.workspace.display().to_string(),
            running: lock(&self.uses).running.clone(),
        }
    }

    /// Whether its shell ended with it while no call could tell.
    fn lost_shell_unseen(&self) -> bool {
        let quiet = lock(&self.uses).running.is_empty();
        quiet && self.shell.try_lock().is_ok_and(|shell| matches!(*shell, bash::Session::Living(_)))
    }

    /// When it will have been idle for too long; never, while a call runs.
    fn idle_deadline(&self) -> Option<Instant> {
        let uses = lock(&self.uses);
        uses.running.is_empty().then(|| uses.idle_since + self.table.idle_timeout)
    }

    fn close_if_idle(&self) -> bool {
        let mut uses = lock(&self.uses);
        let idle = uses.running.is_empty() && uses.idle_since.elapsed() >= self.table.idle_timeout;
        uses.closed |= idle;
        idle
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut uses = lock(&self.sandbox.uses);
        if let Some(at) = uses.running.iter().position(|call| *call == self.call) {
            uses.running.swap_remove(at);
        }
        uses.idle_since = Instant::now();
        drop(uses);
        self.sandbox.used.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
