//! `cleanhands lease`: the way in for what is no sandbox: containers, virtual machines, CI jobs.
//!
//! This program listens for the clients, on this host's loopback or on a Unix socket, and hands the
//! socket to proxyd with a lease. The lease lasts as long as this program, or as the command that
//! it was given. When proxyd restarts the same lease is opened again, with the same token and the
//! same socket, so clients only wait.

mod files;
mod hold;
mod print;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

use ipc::id::LeaseId;
use ipc::lease::{Descriptor, Holder, LeaseReply, LeaseRequest, Open, VERSION};
use ipc::peer::Principal;
use ipc::vault::LeaseInfo;
use serde_json::json;
use tokio::process::Child;

use crate::args::{Global, Lease, OpenLease};
use crate::failure::{Failure, NOT_RUN};
use crate::place;
use crate::stop::Stop;
use crate::term::{self, printable};
use files::Files;
use hold::Held;

pub async fn lease(global: &Global, what: Lease) -> Result<ExitCode, Failure> {
    match what {
        Lease::Open(options) => open(global, options).await,
        Lease::List => list(global).await,
        Lease::Close { lease } => close(global, &lease).await,
    }
}

/// Where clients find the proxy.
pub enum Entry {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

async fn open(global: &Global, options: OpenLease) -> Result<ExitCode, Failure> {
    // Watched from here on: whatever ends this program leaves no files behind.
    let mut stop = Stop::watch()?;
    let files = Files::make()?;
    let (entry, socket) = listen(&options, &files)?;
    let open = Open {
        version: VERSION,
        lease: LeaseId::random(),
        holder: Holder::Explicit,
        environment: options.environment.clone(),
        owner: Principal::own().owner(),
        sandbox: None,
        session: None,
        descriptors: vec![Descriptor::Proxy],
    };
    let place = place::layout(global).proxyd_lease();
    let mut held = Held::open(place, open, options.ttl, socket).await?;
    files.write(&held.ca_pem)?;
    let shown = print::Shown::new(&held, &entry, &files);
    files.write_environment(&shown.in_container())?;
    if options.argv.is_empty() {
        shown.print(global, &options)?;
        let outcome = tokio::select! {
            () = stop.asked() => Ok(ExitCode::SUCCESS),
            ended = held.kept(&files) => Err(ended),
        };
        held.close().await;
        return outcome;
    }
    let child = start(&options, &shown)?;
    let status = beside(child, &mut held, &files, &mut stop).await;
    held.close().await;
    Ok(status_of(status?))
}

/// Makes the socket that clients connect to.
fn listen(options: &OpenLease, files: &Files) -> Result<(Entry, OwnedFd), Failure> {
    if options.unix {
        let path = files.dir().join("proxy.sock");
        let fail = |e: std::io::Error| Failure::new(format!("cannot listen on {path:?}: {e}"));
        let listener = UnixListener::bind(&path).map_err(fail)?;
        // The kernel tells proxyd who connects; who may is whoever may write to the socket.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).map_err(fail)?;
        return Ok((Entry::Unix(path), listener.into()));
    }
    let at = options.tcp.unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0));
    let fail = |error: std::io::Error| Failure::new(format!("cannot listen on {at}: {error}"));
    let listener = TcpListener::bind(at).map_err(fail)?;
    let address = listener.local_addr().map_err(fail)?;
    Ok((Entry::Tcp(address), listener.into()))
}

/// Starts the command with the variables that lead it to the proxy.
fn start(options: &OpenLease, shown: &print::Shown) -> Result<Child, Failure> {
    let mut words = options.argv.iter();
    let program = words.next().ok_or_else(|| Failure::new("no command"))?;
    let mut command = tokio::process::Command::new(program);
    command.args(words).envs(shown.variables().iter().map(|(n, v)| (n, v))).kill_on_drop(true);
    command.spawn().map_err(|error| {
        Failure::new(format!("cannot run {}: {error}", Path::new(program).display()))
            .with_status(NOT_RUN)
    })
}

/// Waits for the command. A signal that asks this program to end is passed on; the terminal's own
/// reach the command without us.
async fn beside(
    mut child: Child,
    held: &mut Held,
    files: &Files,
    stop: &mut Stop,
) -> Result<ExitStatus, Failure> {
    let pid = child.id().and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?));
    let mut lost = false;
    loop {
        tokio::select! {
            status = child.wait() => {
                return status.map_err(|error| Failure::new(format!("cannot wait: {error}")));
            }
            () = stop.asked() => {
                if let Some(pid) = pid {
                    // A command that has just ended is found above.
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                }
            }
            ended = held.kept(files), if !lost => {
                // The command goes on, without a way out.
                term::aside(&format!("cleanhands: {}", printable(&ended.text)));
                lost = true;
            }
        }
    }
}

fn status_of(status: ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;
    let number = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    ExitCode::from(u8::try_from(number & 0xff).unwrap_or(NOT_RUN))
}

async fn list(global: &Global) -> Result<ExitCode, Failure> {
    let mut leases: Vec<LeaseInfo> = Vec::new();
    loop {
        let after = leases.last().map(|lease| lease.lease.clone());
        match ask(global, &LeaseRequest::List { after }).await? {
            LeaseReply::Leases { leases: more } if more.is_empty() => break,
            LeaseReply::Leases { leases: more } => leases.extend(more),
            _ => return Err(out_of_turn()),
        }
    }
    if global.json {
        leases.iter().try_for_each(term::json_line)?;
        return Ok(ExitCode::SUCCESS);
    }
    if leases.is_empty() {
        term::line("no leases; `cleanhands lease open ENVIRONMENT` opens one")?;
        return Ok(ExitCode::SUCCESS);
    }
    let heads = ["LEASE", "ENVIRONMENT", "HOLDER", "OWNER", "FLOWS", "LEFT", "LISTENS"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(leases.into_iter().map(|lease| {
        let holder = match lease.holder {
            Holder::Sandbox => "sandbox",
            Holder::Harness => "harnessd",
            Holder::Explicit => "others",
        };
        let left = lease.seconds_left.map_or_else(|| "-".to_owned(), |left| format!("{left} s"));
        let listens = match lease.listens.join(", ") {
            none if none.is_empty() => "-".to_owned(),
            places => places,
        };
        let flows = lease.flows.to_string();
        let (id, holder) = (lease.lease.to_string(), holder.to_owned());
        vec![id, lease.environment, holder, lease.owner, flows, left, listens]
    }));
    term::write_out(term::columns(&rows).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

async fn close(global: &Global, lease: &str) -> Result<ExitCode, Failure> {
    let id = LeaseId::parse(lease)
        .map_err(|_| Failure::new(format!("{} is no lease's id", printable(lease))))?;
    match ask(global, &LeaseRequest::End { lease: id }).await? {
        LeaseReply::Ended { lease } if global.json => term::json_line(&json!({ "closed": lease }))?,
        LeaseReply::Ended { lease } => term::line(&format!("closed {lease}"))?,
        _ => return Err(out_of_turn()),
    }
    Ok(ExitCode::SUCCESS)
}

/// One question on a connection of its own.
async fn ask(global: &Global, request: &LeaseRequest) -> Result<LeaseReply, Failure> {
    let socket = place::layout(global).proxyd_lease();
    let fail = |why: String| Failure::new(format!("{}: {why}", socket.display()));
    let channel = place::connect(&socket, "proxyd")?;
    channel.send(request, &[]).await.map_err(|error| fail(error.to_string()))?;
    match channel.receive::<LeaseReply>().await.map_err(|error| fail(error.to_string()))?.0 {
        LeaseReply::Refused { fault } => Err(fault.into()),
        reply => Ok(reply),
    }
}

fn out_of_turn() -> Failure {
    Failure::new("proxyd: an answer out of turn")
}
