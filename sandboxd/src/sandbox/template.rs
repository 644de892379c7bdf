//! Has templates made for a plan: its image unpacked, its layer of packages built.
//!
//! An image is unpacked in a cell without a way out, which has the layout and an empty directory. A
//! layer is filled in a cell over the environment's own root, by the package tools that this root
//! has, with the egress, variables and limits of the environment `packages`; then it is sealed in a
//! third cell. Nothing that commands or images made is opened by sandboxd itself.

mod steps;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipc::fault::{Code, Fault};
use ipc::id::{CallId, SandboxId};
use policies::{Policy, SandboxTable};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::{Sandboxes, making};
use crate::cell::Cell;
use crate::plan::{self, Limits, Mount, PlanFacts, SandboxPlan};
use crate::pool::Shape;
use crate::templates::key::{self, Recipe};
use crate::templates::oci::{LAYOUT, Unpacked};
use crate::templates::seal::{Sealed, UPPER, WORK};
use crate::templates::{self, About, Building, Held, Inside};
use crate::zygote::in_time;

/// The environment under whose policy packages are installed.
pub const PACKAGES: &str = "packages";
/// Variables that say where things are in a sandbox, which no image knows better.
const NOT_OF_IMAGES: &[&str] = &["HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR"];
/// Where packages of npm are found by programs that name them.
const NODE_PATH: &str = "/usr/local/lib/node_modules";

/// Puts templates in the place of what the plan names; they are kept for as long as what is
/// returned is. `table` is the policy's own.
pub async fn prepare(
    all: &Arc<Sandboxes>,
    policy: &Policy,
    owner: &str,
    plan: &mut SandboxPlan,
) -> Result<Vec<Arc<Held>>, Fault> {
    let table = &policy.sandbox;
    let mut held = Vec::new();
    let mut root = None;
    if key::is_layout(&plan.root) {
        let named = format!("image {}", plan.root.display());
        let (digest, image) =
            image(all, &policy.name, plan).await.map_err(|fault| of(&named, fault))?;
        plan.root = image.path.join("root");
        plan.templates = Some(all.templates.folder().to_owned());
        merge(&mut plan.env, &image.about.env, table);
        held.push(image);
        root = Some(digest);
    }
    if !table.packages.is_empty() || !table.setup.is_empty() {
        let root = root.unwrap_or_else(|| key::identity(&plan.root));
        let layer = layer(all, policy, owner, plan, &root).await?;
        plan.layers = vec![layer.path.join(UPPER)];
        plan.templates = Some(all.templates.folder().to_owned());
        let known = plan.env.iter().any(|(name, _)| name == "NODE_PATH");
        if !table.packages.npm.is_empty() && !known {
            plan.env.push(("NODE_PATH".to_owned(), NODE_PATH.to_owned()));
        }
        held.push(layer);
    }
    Ok(held)
}

/// An image's variables stand over ours, and below those of the policy.
fn merge(env: &mut Vec<(String, String)>, image: &[(String, String)], table: &SandboxTable) {
    for (name, value) in image {
        let plain = !name.is_empty() && !name.contains('\0') && !value.contains('\0');
        if !plain || NOT_OF_IMAGES.contains(&&**name) || table.env.contains_key(name) {
            continue;
        }
        match env.iter_mut().find(|(known, _)| known == name) {
            Some(entry) => entry.1.clone_from(value),
            None => env.push((name.clone(), value.clone())),
        }
    }
}

/// The unpacked image of the plan's layout, and its digest.
async fn image(
    all: &Arc<Sandboxes>,
    environment: &str,
    plan: &SandboxPlan,
) -> Result<(String, Arc<Held>), Fault> {
    let layout = plan.root.clone();
    let stamp = key::stamp_of_layout(&layout);
    let digest = match all.templates.resolved(&layout, &stamp) {
        Some(digest) => digest,
        None => {
            let reading = image_plan(all, plan);
            let _place = Places::take(all).await?;
            let cell = bare(all, &reading, None).await?;
            let digest: String = inside(&cell, Inside::Resolve).await?;
            all.templates.remember(&layout, stamp, digest.clone());
            digest
        }
    };
    let (again, reading) = (Arc::clone(all), image_plan(all, plan));
    let of_digest = digest.clone();
    let make = |building: Arc<Building>| async move {
        unpack(&again, &reading, of_digest, &building).await
    };
    let held = all.templates.obtain(&key::of_image(&digest), environment, make).await?;
    Ok((digest, held))
}

async fn unpack(
    all: &Arc<Sandboxes>,
    reading: &SandboxPlan,
    digest: String,
    building: &Building,
) -> Result<About, Fault> {
    let begun = Instant::now();
    building.say(format!("unpacking image {digest}"));
    let root = building.directory("root")?;
    let _place = Places::take(all).await?;
    let cell = bare(all, reading, Some(&root)).await?;
    let unpacked: Unpacked = inside(&cell, Inside::Unpack { digest }).await?;
    let Unpacked { layers, entries, bytes, skipped, env } = unpacked;
    let seconds = begun.elapsed().as_secs_f32();
    building.say(format!(
        "image unpacked: {layers} layers, {entries} entries, {bytes} bytes, {skipped} devices left \
         out, {seconds:.1} s"
    ));
    Ok(About { bytes, env })
}

/// A cell that sees a layout, and nothing of what the environment shows.
fn image_plan(all: &Sandboxes, plan: &SandboxPlan) -> SandboxPlan {
    let layout =
        Mount { source: plan.root.clone(), target: LAYOUT.into(), read_only: true, identity: None };
    SandboxPlan { mounts: vec![layout], ..own_plan(all, plan, Path::new("/")) }
}

/// A cell for our own code.
fn own_plan(all: &Sandboxes, plan: &SandboxPlan, root: &Path) -> SandboxPlan {
    SandboxPlan {
        root: root.to_owned(),
        hostname: "template".to_owned(),
        mounts: Vec::new(),
        key_store: None,
        // Where the directory that is filled is found.
        workspaces: Some(all.templates.folder().to_owned()),
        files: Vec::new(),
        env: Vec::new(),
        layers: Vec::new(),
        build: None,
        limits: Limits {
            memory_bytes: 1 << 30,
            processes: 16,
            file_bytes: 64 << 30,
            open_files: 4096,
            tmp_bytes: 1 << 20,
            cpu_seconds: None,
            required: plan.limits.required,
        },
        ports: Vec::new(),
        ..plan.clone()
    }
}

/// The layer of packages that this environment has over `root`.
async fn layer(
    all: &Arc<Sandboxes>,
    policy: &Policy,
    owner: &str,
    plan: &SandboxPlan,
    root: &str,
) -> Result<Arc<Held>, Fault> {
    let tools = all.environments.policy(PACKAGES).map_err(|fault| {
        Fault::new(
            fault.code,
            format!(
                "packages and setup commands run under the policy {PACKAGES:?}: {}",
                fault.text
            ),
        )
        .with_hint("copy the shipped packages.toml, and list your registries in groups.toml")
    })?;
    let nested = &tools.sandbox;
    if !nested.packages.is_empty()
        || !nested.setup.is_empty()
        || nested.root != policies::Root::Host
    {
        let text = format!("the policy {PACKAGES:?} has packages, setup or a root of its own");
        return Err(Fault::new(Code::Missing, text)
            .with_hint("these are the environments'; it says what their tools may reach and use"));
    }
    let key = Recipe { root, table: &policy.sandbox, tools: nested }.key();
    let shape = Shape {
        owner: owner.to_owned(),
        plan: build_plan(all, policy, &tools, plan)?,
        policy: Arc::clone(&tools),
        templates: Vec::new(),
    };
    let (again, table, name) = (Arc::clone(all), policy.sandbox.clone(), policy.name.clone());
    let make =
        |building: Arc<Building>| async move { build(&again, shape, &table, &building).await };
    let made = all.templates.obtain(&key, &policy.name, make).await;
    made.map_err(|fault| of(&format!("environment {name:?}"), fault))
}

fn of(what: &str, fault: Fault) -> Fault {
    Fault { text: format!("{what}: {}", fault.text), ..fault }
}

/// The environment's root, with the tools' variables, mounts and limits.
fn build_plan(
    all: &Sandboxes,
    policy: &Policy,
    tools: &Policy,
    plan: &SandboxPlan,
) -> Result<SandboxPlan, Fault> {
    let facts =
        PlanFacts { hostname: "template".to_owned(), ports: tools.ports().into_iter().collect() };
    let planned = plan::plan(&tools.sandbox, &facts)
        .map_err(|e| Fault::new(Code::Missing, format!("environment {PACKAGES:?}: {e}")))?;
    let mut env = plan.env.clone();
    env.retain(|(name, _)| !policy.sandbox.env.contains_key(name));
    for (name, value) in &tools.sandbox.env {
        env.retain(|(known, _)| known != name);
        env.push((name.clone(), value.clone()));
    }
    let mut built = SandboxPlan {
        root: plan.root.clone(),
        templates: plan.templates.clone(),
        apart: plan.apart.clone(),
        workspaces: Some(all.workspaces.folder().to_owned()),
        key_store: Some(all.key_stores.path(&plan.root).map_err(making::key_store_fault)?),
        env,
        ..planned
    };
    making::judge_of(&built, PACKAGES)?;
    if !policy.sandbox.packages.apt.is_empty() && built.root != Path::new("/") {
        // Which packages it has, and where its own come from.
        let image = Mount {
            source: built.root.clone(),
            target: LAYOUT.into(),
            read_only: true,
            identity: Some(identity(&built.root)?),
        };
        built.mounts.push(image);
    }
    Ok(built)
}

/// Runs the tools, then completes what they have left.
async fn build(
    all: &Arc<Sandboxes>,
    mut shape: Shape,
    table: &SandboxTable,
    building: &Building,
) -> Result<About, Fault> {
    let begun = Instant::now();
    let steps = steps::of(table);
    for name in [UPPER, WORK] {
        building.directory(name)?;
    }
    let layer = Mount {
        source: building.path.clone(),
        target: PathBuf::from("/.build"),
        read_only: false,
        identity: Some(identity(&building.path)?),
    };
    shape.plan.build = Some(layer);
    let Places { room: _room, place } = Places::take(all).await?;
    let id = SandboxId::random();
    let workspace = all.workspaces.of_sandbox(&id)?;
    let ran = async {
        let ready = making::cold(all, &shape, id.clone(), Some(&workspace.into()), place).await?;
        let call = CallId::random();
        ready.lease.call_started(&call).await;
        let mut outcome = Ok(());
        for step in &steps {
            outcome = steps::run(&ready, step, &shape, building, &call).await;
            if outcome.is_err() {
                break;
            }
        }
        let place = ready.discard().await;
        outcome.map(|()| place)
    }
    .await;
    let (workspaces, own) = (all.workspaces.clone(), id);
    let removed = tokio::task::spawn_blocking(move || workspaces.end_of(&own)).await;
    if let Ok(Err(error)) = removed {
        tracing::warn!(%error, "cannot remove the workspace of a build");
    }
    let _place = ran?;
    let sealing = own_plan(all, &shape.plan, &shape.plan.root);
    let cell = bare(all, &sealing, Some(&building.path)).await?;
    let Sealed { entries, bytes } = inside(&cell, Inside::Seal).await?;
    let seconds = begun.elapsed().as_secs_f32();
    building.say(format!("layer made: {entries} entries, {bytes} bytes, {seconds:.1} s"));
    Ok(About { bytes, env: Vec::new() })
}

/// Room for the cells of one build, one after another.
struct Places {
    room: OwnedSemaphorePermit,
    place: OwnedSemaphorePermit,
}

impl Places {
    async fn take(all: &Sandboxes) -> Result<Self, Fault> {
        let room = making::room(all)?;
        Ok(Self { room, place: all.pool.place().await })
    }
}

/// A cell without a lease: nothing in it has anybody to talk to.
async fn bare(
    all: &Sandboxes,
    plan: &SandboxPlan,
    workspace: Option<&Path>,
) -> Result<Cell, Fault> {
    let fault = |error| making::cell_fault(all, error);
    let mount = match workspace {
        Some(path) => Some(plan::workspace(path, identity(path)?)),
        None => None,
    };
    let mut cell = all.zygote.begin(plan).await.map_err(fault)?;
    let entering = all.zygote.enter(&cell, mount.as_ref(), None).await;
    in_time(cell.take_egress()).await.map_err(fault)?;
    in_time(cell.make_ready()).await.map_err(fault)?;
    in_time(entering.map_err(fault)?.done()).await.map_err(fault)?;
    Ok(cell)
}

/// Has our own code run in a cell.
async fn inside<T: serde::de::DeserializeOwned>(cell: &Cell, what: Inside) -> Result<T, Fault> {
    let answer = cell.file_call(&what.encode()).await;
    let answer = answer.map_err(|e| Fault::new(Code::Unavailable, e.to_string()))?;
    templates::decode(&answer).map_err(|text| Fault::new(Code::Missing, text))
}

fn identity(path: &Path) -> Result<(u64, u64), Fault> {
    let meta = std::fs::symlink_metadata(path).map_err(|e| {
        Fault::new(Code::Unavailable, format!("{} cannot be used: {e}", path.display()))
    })?;
    Ok((meta.dev(), meta.ino()))
}
