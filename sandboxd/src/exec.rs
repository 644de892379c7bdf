//! `sandboxd-exec.sock`: one command in a fresh sandbox with the client's own descriptors, and the
//! directories that clients show to be theirs.
//!
//! There is no agent here and no journal: who runs the command waits for it. The connection is the
//! command's life; when it ends, the sandbox does.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::fd::{Channel, ChannelListener};
use ipc::id::CallId;
use ipc::peer::Principal;
use ipc::sandbox::{ExecReply, ExecRequest};
use rustix::fs::FileType;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::cell::{CellCommand, CellError, ExitOf, Running};
use crate::execute::Service;
use crate::plan::WORKSPACE;
use crate::sandbox::{InUse, Sandbox, Wanted};
use crate::workspace::{Workspace, Workspaces};

/// Registrations at once, and clients that are yet to be refused, beside one command for each
/// sandbox that may live; more wait in the backlog.
const CONNECTIONS_BESIDE: usize = 256;
/// A client says what it wants within this time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A command as the client asked for it.
struct Asked {
    environment: String,
    argv: Vec<String>,
    env: Vec<(String, String)>,
    workspace: Option<Workspace>,
    stdio: Vec<OwnedFd>,
}

/// Serves clients until `shutdown`.
pub async fn serve(listener: ChannelListener, service: Arc<Service>, shutdown: CancellationToken) {
    let permits = Arc::new(Semaphore::new(service.sandboxes.living_max() + CONNECTIONS_BESIDE));
    loop {
        let permit = tokio::select! {
            () = shutdown.cancelled() => return,
            permit = Arc::clone(&permits).acquire_owned() => permit,
        };
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let channel = match accepted {
            Ok(channel) => channel,
            Err(error) => {
                // Out of descriptors or memory: the next try may find some.
                tracing::warn!(%error, "cannot accept on the exec socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let service = Arc::clone(&service);
        tokio::spawn(async move {
            if let Err(fault) = serve_client(&channel, &service).await {
                tracing::info!(%fault, "exec refused");
                // A client that has gone need not hear why.
                let _ = channel.send(&ExecReply::Refused { fault }, &[]).await;
            }
            drop(permit);
        });
    }
}

async fn serve_client(channel: &Channel, service: &Arc<Service>) -> Result<(), Fault> {
    let invalid = |why: String| Fault::new(Code::Invalid, why);
    let peer = channel.peer().map_err(|e| invalid(e.to_string()))?;
    let received = tokio::time::timeout(REQUEST_TIMEOUT, channel.receive::<ExecRequest>()).await;
    let (request, fds) = received
        .map_err(|_| invalid("no request came".into()))?
        .map_err(|e| invalid(e.to_string()))?;
    match request {
        ExecRequest::Workspace { path } => {
            let [directory] = &fds[..] else {
                return Err(invalid("a workspace comes with one descriptor".into()));
            };
            let workspaces = &service.sandboxes.workspaces;
            let registered = workspaces.register(&peer, directory, &path)?;
            let kept = service.journal.keep_workspace(registered).await;
            let workspace = kept.map_err(|e| Fault::new(Code::Unavailable, e.to_string()))?;
            let _ = channel.send(&ExecReply::Workspace { workspace }, &[]).await;
            Ok(())
        }
        ExecRequest::Exec { environment, argv, env, path } => {
            let (stdio, workspace) = split(&service.sandboxes.workspaces, &peer, fds, path)?;
            if argv.is_empty() {
                return Err(invalid("there is no command".into()));
            }
            let asked = Asked { environment, argv, env, workspace, stdio };
            execute(channel, service, &peer, asked).await
        }
        ExecRequest::Signal { .. } => {
            Err(invalid("nothing runs yet that could be signalled".into()))
        }
    }
}

/// Tells the standard descriptors from the workspace's.
fn split(
    workspaces: &Workspaces,
    peer: &Principal,
    mut fds: Vec<OwnedFd>,
    path: Option<String>,
) -> Result<(Vec<OwnedFd>, Option<Workspace>), Fault> {
    let expected = 3 + usize::from(path.is_some());
    if fds.len() != expected {
        let text = format!("exec comes with {expected} descriptors here, not with {}", fds.len());
        return Err(Fault::new(Code::Invalid, text));
    }
    let workspace = match path {
        Some(path) => {
            let registered = workspaces.register(peer, &fds[3], &path)?;
            fds.truncate(3);
            Some(workspaces.verify(&registered)?)
        }
        None => None,
    };
    for fd in &fds {
        let stat = rustix::fs::fstat(fd).map_err(|e| Fault::new(Code::Invalid, e.to_string()))?;
        // A directory would be a way out of the sandbox's root (openat(2) from it).
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let text = "a directory cannot be a standard descriptor of a sandbox";
            return Err(Fault::new(Code::Invalid, text));
        }
    }
    Ok((fds, workspace))
}

async fn execute(
    channel: &Channel,
    service: &Arc<Service>,
    peer: &Principal,
    asked: Asked,
) -> Result<(), Fault> {
    let wanted = Wanted {
        owner: peer.owner(),
        environment: asked.environment.clone(),
        session: None,
        workspace: asked.workspace.clone(),
    };
    // Held while the command runs, so that its sandbox is never taken for idle; its requests carry
    // the id in the audit.
    let call = CallId::random();
    let in_use = make(channel, service, wanted, &call).await?;
    let sandbox = &in_use.sandbox;
    sandbox.lease().call_started(&call).await;
    let outcome = run(channel, sandbox, asked).await;
    if let Ok(Some(exit)) = &outcome
        && exit.code != Some(0)
    {
        let lines = sandbox.lease().refusals(&call).await;
        if !lines.is_empty() {
            let _ = channel.send(&ExecReply::Noted { lines }, &[]).await;
        }
    }
    sandbox.close();
    let exit = outcome?;
    let Some(exit) = exit else { return Ok(()) };
    let exited = ExecReply::Exited { exit_code: exit.code, signal: exit.signal };
    let _ = channel.send(&exited, &[]).await;
    Ok(())
}

/// Makes the sandbox, and meanwhile tells the client what is being made for it first.
async fn make(
    channel: &Channel,
    service: &Arc<Service>,
    wanted: Wanted,
    call: &CallId,
) -> Result<InUse, Fault> {
    let environment = wanted.environment.clone();
    let mut lines = service.sandboxes.templates.lines();
    let mut making = std::pin::pin!(service.sandboxes.make(wanted, call));
    loop {
        tokio::select! {
            biased;
            made = &mut making => return made,
            line = lines.recv() => if let Ok((about, line)) = line
                && about == environment
            {
                // A client that has gone is noticed by whoever sends the next thing that matters.
                let _ = channel.send(&ExecReply::Noted { lines: vec![line] }, &[]).await;
            },
            // A signal, or the end: nobody waits for this sandbox any more. What is shared and was
            // begun for it is completed for the next.
            _ = channel.receive::<ExecRequest>() => {
                return Err(Fault::new(Code::Unavailable, "interrupted before the command began"));
            }
        }
    }
}

/// Runs the command to its end; None when the client left first.
async fn run(channel: &Channel, sandbox: &Sandbox, asked: Asked) -> Result<Option<ExitOf>, Fault> {
    let mut env = sandbox.env.clone();
    env.retain(|(name, _)| !asked.env.iter().any(|(asked, _)| asked == name));
    env.extend(asked.env);
    let program = asked.argv[0].clone();
    let command = CellCommand { argv: asked.argv, env, cwd: WORKSPACE.to_owned() };
    let fds: Vec<_> = asked.stdio.iter().map(AsFd::as_fd).collect();
    let running =
        sandbox.cell.spawn(&command, &fds).await.map_err(|error| not_started(&program, &error))?;
    // The command has its own now; holding these would keep a pipe's reader waiting.
    drop(asked.stdio);
    let started = ExecReply::Started {
        sandbox: sandbox.id.clone(),
        provision_us: sandbox.provision_us,
        layers: sandbox.layers(),
    };
    if channel.send(&started, &[]).await.is_err() {
        return Ok(None);
    }
    follow(channel, sandbox, &running).await
}

async fn follow(
    channel: &Channel,
    sandbox: &Sandbox,
    running: &Running,
) -> Result<Option<ExitOf>, Fault> {
    let lost = || Fault::new(Code::Unavailable, CellError::Lost.to_string());
    loop {
        tokio::select! {
            biased;
            exit = running.wait() => return exit.map(Some).map_err(|_| lost()),
            () = sandbox.gone.cancelled() => return Err(lost()),
            request = channel.receive::<ExecRequest>() => match request {
                Ok((ExecRequest::Signal { signal }, _)) => {
                    // It may have ended this moment, which the next turn sees.
                    let _ = running.signal_group(signal).await;
                }
                Ok(_) => return Err(Fault::new(Code::Invalid, "a command runs already")),
                Err(_) => return Ok(None),
            },
        }
    }
}

/// `NotFound` where a shell would exit with 127, `Denied` where it would with 126.
fn not_started(program: &str, error: &CellError) -> Fault {
    let code = match error.not_runnable() {
        Some(127) => Code::NotFound,
        Some(_) => Code::Denied,
        None => Code::Unavailable,
    };
    Fault::new(code, format!("{program}: {error}"))
}
