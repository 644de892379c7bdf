//! How a sandbox comes to be, in order: policy, workspace, plan, cell, lease, trusted certificates,
//! and last the workspace, for which alone one of the pool has to wait.
//!
//! What was made before a step that fails ends by being dropped.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::id::{LeaseId, SandboxId};
use ipc::lease::{Descriptor, Holder, Open, VERSION};
use policies::Policy;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Sandbox, Sandboxes, Uses, Wanted, template};
use crate::cell::{Cell, CellError, Entering};
use crate::lease::{Event, Lease, LeaseError};
use crate::plan::{self, PlanFacts, SandboxPlan};
use crate::pool::{Ready, Shape};
use crate::source::{self, Extent, Refusal};
use crate::templates::Held;
use crate::tools::bash;
use crate::trust::store::KeyStores;
use crate::workspace::Workspace;
use crate::zygote::in_time;

/// How long making a sandbox waits for proxyd: a restart of it takes less.
const LEASE_PATIENCE: Duration = Duration::from_secs(10);

/// Makes a sandbox, out of a half-made one if there is one.
pub async fn make(
    all: &Arc<Sandboxes>,
    wanted: Wanted,
) -> Result<(Sandbox, mpsc::UnboundedReceiver<Event>), Fault> {
    let begun = Instant::now();
    let policy = all.environments.policy(&wanted.environment)?;
    let owner = wanted.owner.clone();
    let (plan, templates) = planned(all, &policy, &owner).await?;
    let shape = Shape { owner, plan, policy, templates };
    let room = room(all)?;
    let (ready, stale) = all.pool.take(&shape);
    all.discard(stale);
    let pooled = ready.is_some();
    let (ready, workspace) = match ready {
        Some(ready) => {
            let own = own(all, &wanted, &ready.id)?;
            let entering = enter(all, &ready.cell, &own).await?;
            in_time(entering.done()).await.map_err(|error| cell_fault(all, error))?;
            (ready, own.workspace)
        }
        None => {
            let id = SandboxId::random();
            let own = own(all, &wanted, &id)?;
            let place = all.pool.place().await;
            (cold(all, &shape, id, Some(&own), place).await?, own.workspace)
        }
    };
    if let Some(session) = &wanted.session {
        ready.lease.assign(session).await;
    }
    let provision_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    let environment = &wanted.environment;
    tracing::info!(sandbox = %ready.id, environment, pooled, provision_us, "sandbox made");
    Ok(sandbox(ready, shape, wanted, workspace, provision_us, room))
}

/// Room for one more.
pub fn room(all: &Sandboxes) -> Result<OwnedSemaphorePermit, Fault> {
    Arc::clone(&all.room).try_acquire_owned().map_err(|_| {
        Fault::new(Code::Busy, "as many sandboxes live as may at once")
            .with_hint("see sandboxes-max and uid-range in sandboxd.toml, or end some")
    })
}

fn sandbox(
    ready: Ready,
    shape: Shape,
    wanted: Wanted,
    workspace: Workspace,
    provision_us: u64,
    room: OwnedSemaphorePermit,
) -> (Sandbox, mpsc::UnboundedReceiver<Event>) {
    let Ready { id, cell, lease, opened, events, place, .. } = ready;
    let sandbox = Sandbox {
        id,
        owner: wanted.owner,
        environment: wanted.environment,
        session: wanted.session,
        cell,
        env: variables(shape.plan.env, crate::trust::variables(), opened.env),
        table: shape.policy.sandbox.clone(),
        workspace: workspace.path,
        root: shape.plan.root,
        _templates: shape.templates,
        created_at: crate::receipt::now(),
        provision_us,
        shell: Arc::new(tokio::sync::Mutex::new(bash::Session::Fresh { lost: false })),
        gone: CancellationToken::new(),
        removed: CancellationToken::new(),
        closing: CancellationToken::new(),
        lease,
        uses: Mutex::new(Uses { running: Vec::new(), idle_since: Instant::now(), closed: false }),
        used: Notify::new(),
        _place: place,
        _room: room,
    };
    (sandbox, events)
}

/// Makes a half-made sandbox, for the pool.
pub async fn ready(
    all: &Sandboxes,
    shape: &Shape,
    place: OwnedSemaphorePermit,
) -> Result<Ready, Fault> {
    cold(all, shape, SandboxId::random(), None, place).await
}

/// Makes one from nothing; where its workspace is known, with that. The lease is opened while the
/// cell builds its root.
pub async fn cold(
    all: &Sandboxes,
    shape: &Shape,
    id: SandboxId,
    own: Option<&Own>,
    place: OwnedSemaphorePermit,
) -> Result<Ready, Fault> {
    let fault = |error| cell_fault(all, error);
    let mut cell = all.zygote.begin(&shape.plan).await.map_err(fault)?;
    let entering = match own {
        Some(own) => Some(enter(all, &cell, own).await),
        None => None,
    };
    // What kept a cell from being made is a better reason than that it is gone.
    in_time(cell.take_egress()).await.map_err(fault)?;
    let open = open(shape, &id);
    let sockets = duplicates(&cell)?;
    let leasing = Lease::open(&all.lease_socket, open, sockets, LEASE_PATIENCE);
    let (leased, made) = tokio::join!(leasing, in_time(cell.make_ready()));
    made.map_err(fault)?;
    let (lease, opened, events) = leased.map_err(lease_fault)?;
    let bundle = cell.take_bundle();
    trust(&cell, &all.key_stores, &shape.plan.root, bundle, &opened.ca_pem).await?;
    if let Some(entering) = entering {
        in_time(entering?.done()).await.map_err(fault)?;
    }
    Ok(Ready { id, cell, lease, opened, events, made: Instant::now(), place })
}

fn open(shape: &Shape, id: &SandboxId) -> Open {
    Open {
        version: VERSION,
        lease: LeaseId::random(),
        holder: Holder::Sandbox,
        environment: shape.policy.name.clone(),
        owner: shape.owner.clone(),
        sandbox: Some(id.clone()),
        session: None,
        descriptors: Vec::new(),
    }
}

/// What a cell shows of the host that is not its environment's.
pub struct Own {
    workspace: Workspace,
    /// What its session was given to read.
    uploads: Option<Workspace>,
}

impl From<Workspace> for Own {
    fn from(workspace: Workspace) -> Self {
        Self { workspace, uploads: None }
    }
}

fn own(all: &Sandboxes, wanted: &Wanted, id: &SandboxId) -> Result<Own, Fault> {
    let workspace = match &wanted.workspace {
        Some(workspace) => workspace.clone(),
        None => all.workspaces.of_sandbox(id)?,
    };
    let session = wanted.session.as_ref();
    let uploads = session.map(|session| all.workspaces.uploads(session)).transpose()?;
    Ok(Own { workspace, uploads })
}

async fn enter(all: &Sandboxes, cell: &Cell, own: &Own) -> Result<Entering, Fault> {
    let workspace = plan::workspace(&own.workspace.path, own.workspace.identity);
    let uploads = own.uploads.as_ref().map(|it| plan::uploads(&it.path, it.identity));
    let entering = all.zygote.enter(cell, Some(&workspace), uploads.as_ref());
    in_time(entering).await.map_err(|error| cell_fault(all, error))
}

pub fn cell_fault(all: &Sandboxes, error: CellError) -> Fault {
    if matches!(error, CellError::Zygote) {
        all.broken.cancel();
    }
    Fault::new(Code::Unavailable, error.to_string())
        .with_hint("`cleanhands doctor` shows what this host offers")
}

/// What a sandbox of this policy will be, with what of it is shared, which is made if need be.
async fn planned(
    all: &Arc<Sandboxes>,
    policy: &Policy,
    owner: &str,
) -> Result<(SandboxPlan, Vec<Arc<Held>>), Fault> {
    let facts =
        PlanFacts { hostname: policy.name.clone(), ports: policy.ports().into_iter().collect() };
    let mut plan = plan::plan(&policy.sandbox, &facts)
        .map_err(|e| Fault::new(Code::Missing, format!("environment {:?}: {e}", policy.name)))?;
    plan.workspaces = Some(all.workspaces.folder().to_owned());
    plan.apart = all.workspaces.apart().clone();
    judge_of(&plan, &policy.name)?;
    let templates = template::prepare(all, policy, owner, &mut plan).await?;
    plan.key_store = Some(all.key_stores.path(&plan.root).map_err(key_store_fault)?);
    Ok((plan, templates))
}

/// The same of an environment's plan, in words for its caller.
pub fn judge_of(plan: &SandboxPlan, environment: &str) -> Result<(), Fault> {
    judge(plan).map_err(|e| {
        let text = format!("environment {environment:?}: cannot show {e}");
        Fault::new(Code::Denied, text).with_hint("change `mounts` or `root` in the policy file")
    })
}

/// Whether the policy may name these directories. What counts is the same question when they are
/// mounted; asked here it has a better answer than a step that failed.
fn judge(plan: &SandboxPlan) -> Result<(), Refusal> {
    let root = (&plan.root, Extent::Programs);
    let ours = plan.templates.as_ref().is_some_and(|folder| plan.root.starts_with(folder));
    let root = Some(root).filter(|_| plan.root != Path::new("/") && !ours);
    let mounts = plan.mounts.iter().map(|mount| (&mount.source, Extent::Whole));
    for (path, extent) in root.into_iter().chain(mounts) {
        match source::open(path, &plan.apart, extent) {
            Err(judged @ Refusal::Judged { .. }) => return Err(judged),
            // What is not there, or cannot be opened, is told by whoever cannot mount it.
            Ok(_) | Err(Refusal::Io(_)) => {}
        }
    }
    Ok(())
}

/// The cell's egress sockets once more: one set goes to proxyd, the other waits here.
fn duplicates(cell: &Cell) -> Result<Vec<(Descriptor, OwnedFd)>, Fault> {
    let duplicate = |(kind, fd): &(Descriptor, OwnedFd)| Ok((*kind, fd.try_clone()?));
    cell.egress().iter().map(duplicate).collect::<std::io::Result<_>>().map_err(|e| {
        Fault::new(Code::Busy, format!("cannot duplicate the sockets of a sandbox: {e}"))
    })
}

fn lease_fault(error: LeaseError) -> Fault {
    match error {
        LeaseError::Refused(fault) => fault,
        unreachable @ LeaseError::Unreachable { .. } => {
            Fault::new(Code::Unavailable, unreachable.to_string())
                .with_hint("a sandbox is made only while proxyd runs: is it running?")
        }
    }
}

pub fn key_store_fault(error: std::io::Error) -> Fault {
    Fault::new(
        Code::Unavailable,
        format!("cannot make the store of certificates for Java: {error}"),
    )
    .with_hint("has the file system of sandboxd's state room?")
}

/// Has a sandbox trust proxyd's certificates, and in Java those of its root's `bundle` too.
pub async fn trust(
    cell: &Cell,
    key_stores: &KeyStores,
    root: &Path,
    bundle: Option<OwnedFd>,
    ca_pem: &str,
) -> Result<(), Fault> {
    let added = key_stores.fill(root, bundle.as_ref(), ca_pem).map_err(key_store_fault)?;
    cell.trust(ca_pem, &added).await.map_err(|e| {
        Fault::new(Code::Unavailable, format!("cannot have a sandbox trust proxyd: {e}"))
    })
}

/// Later ones win: the lease's placeholders over our own over the plan's.
fn variables(
    plan: Vec<(String, String)>,
    ours: Vec<(String, String)>,
    lease: Vec<(String, String)>,
) -> Vec<(String, String)> {
    let mut merged: Vec<(String, String)> = Vec::new();
    for (name, value) in plan.into_iter().chain(ours).chain(lease) {
        match merged.iter_mut().find(|(known, _)| *known == name) {
            Some(entry) => entry.1 = value,
            None => merged.push((name, value)),
        }
    }
    merged
}
