//! `proxyd-lease.sock`: one connection is one lease (see `ipc::lease` for the messages).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ipc::fault::{Code, Fault};
use ipc::fd::{Channel, ChannelListener, MessageError};
use ipc::id::LeaseId;
use ipc::lease::{
    Descriptor, Holder, LISTED_MAX, LeaseReply, LeaseRequest, Open, Opened, Terms, VERSION,
};
use ipc::peer::Principal;
use ipc::vault::LeaseInfo;
use policies::Policy;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::places::Place;
use super::tokens::{self, Hash};
use super::{CALLS_MAX, EnterError, Lease};
use crate::entry::{ACCEPT_PAUSE, explicit, transparent};
use crate::sys::accounts;
use crate::{Daemon, dns};

/// How long a new connection may take to say what it wants.
const OPEN: Duration = Duration::from_secs(10);
/// Longest time that can be set for a lease.
const TTL_SECONDS_MAX: u64 = 366 * 24 * 3600;
/// How long a holder that comes back is given for its former connection to be noticed as gone.
const TAKEOVER: Duration = Duration::from_secs(2);

/// Accepts holders until `stop`.
pub async fn serve(daemon: Arc<Daemon>, listener: ChannelListener, stop: CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(channel) => {
                let Ok(peer) = channel.peer() else { continue };
                let room = daemon.leases.shares.stranger(peer.uid);
                // All that hold a place say what they want, or are closed.
                let Ok(place) = room.place(&stop, false).await else { continue };
                let holding = hold(Arc::clone(&daemon), channel, peer, place, stop.clone());
                daemon.tasks.spawn(holding);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a lease");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One connection from its first message to its end.
async fn hold(
    daemon: Arc<Daemon>,
    channel: Channel,
    peer: Principal,
    place: Place,
    stop: CancellationToken,
) {
    let first = tokio::time::timeout(OPEN, channel.receive::<LeaseRequest>());
    let Some(first) = place.seat().end.run_until_cancelled(first).await else { return };
    let Some(opening) = place.seat().works() else { return };
    let (open, terms, descriptors) = match first {
        Ok(Ok((LeaseRequest::Open(open), descriptors))) => (open, Terms::default(), descriptors),
        Ok(Ok((LeaseRequest::OpenFor { open, terms }, descriptors))) => (open, terms, descriptors),
        Ok(Ok((LeaseRequest::List { after }, _))) => {
            let leases = visible(&daemon, peer, after.as_ref());
            let _ = channel.send(&LeaseReply::Leases { leases }, &[]).await;
            return;
        }
        Ok(Ok((LeaseRequest::End { lease }, _))) => {
            return end(&daemon, peer, &channel, lease).await;
        }
        Ok(Ok(_)) => {
            let fault = Fault::new(Code::Invalid, "the first message on a lease must open it");
            return refuse(&channel, fault).await;
        }
        Ok(Err(MessageError::Malformed(error))) => {
            let text = format!("lease message is not as documented: {error}");
            return refuse(&channel, Fault::new(Code::Invalid, text)).await;
        }
        _ => return,
    };
    let lease = match enter(&daemon, peer, open, &terms, descriptors).await {
        Ok((lease, opened)) => {
            if channel.send(&LeaseReply::Opened(opened), &[]).await.is_err() {
                return daemon.leases.leave(&lease, false);
            }
            lease
        }
        Err(fault) => return refuse(&channel, fault).await,
    };
    drop((opening, place));
    tracing::info!(
        lease = %lease.id, environment = lease.environment, owner = lease.owner, "lease opened"
    );
    let closed = listen(&Arc::new(channel), &lease, &stop).await;
    daemon.leases.leave(&lease, closed);
    tracing::info!(lease = %lease.id, closed, "lease ended");
}

async fn refuse(channel: &Channel, fault: Fault) {
    tracing::warn!(code = ?fault.code, reason = fault.text, "lease refused");
    // The peer may be gone already.
    let _ = channel.send(&LeaseReply::Refused { fault }, &[]).await;
}

/// Follows what the holder says; whether it closed the lease properly.
async fn listen(channel: &Arc<Channel>, lease: &Arc<Lease>, stop: &CancellationToken) -> bool {
    // Questions that wait for their answers: no more than calls that there could be.
    let mut asked = JoinSet::new();
    loop {
        let message = tokio::select! {
            // Whoever asks more, or reads no answers, is heard again when one is out.
            message = channel.receive::<LeaseRequest>(), if asked.len() < CALLS_MAX => message,
            Some(_) = asked.join_next(), if !asked.is_empty() => continue,
            () = stop.cancelled() => return false,
            () = lease.expiry(), if !lease.end.is_cancelled() => {
                lease.finish("its time is over");
                continue;
            }
            () = lease.end.cancelled() => {
                let ended = lease.ended.get().copied();
                let reason = ended.unwrap_or("the policy of this environment is gone").to_owned();
                let _ = channel.send(&LeaseReply::Revoked { reason }, &[]).await;
                return ended.is_some();
            }
        };
        match message {
            Ok((LeaseRequest::Assign { session }, _)) => {
                if !lease.assign(session) {
                    tracing::warn!(lease = %lease.id, "a lease is assigned to one session, once");
                    return false;
                }
            }
            Ok((LeaseRequest::CallStarted { call }, _)) => lease.call_started(call),
            Ok((LeaseRequest::CallFinished { call }, _)) => lease.call_finished(&call),
            Ok((LeaseRequest::Refusals { call }, _)) => {
                // It may wait, and what else the holder says must not.
                let (channel, lease) = (Arc::clone(channel), Arc::clone(lease));
                asked.spawn(async move {
                    let lines = lease.notes.of(&call).await;
                    // A holder that is gone has no more questions.
                    let _ = channel.send(&LeaseReply::Refusals { call, lines }, &[]).await;
                });
            }
            Ok((LeaseRequest::Close, _)) => return true,
            Ok((
                LeaseRequest::Open(_)
                | LeaseRequest::OpenFor { .. }
                | LeaseRequest::List { .. }
                | LeaseRequest::End { .. },
                _,
            ))
            | Err(MessageError::Malformed(_)) => {
                tracing::warn!(lease = %lease.id, "holder sent what no lease takes");
                return false;
            }
            Err(_) => return false,
        }
    }
}

async fn enter(
    daemon: &Arc<Daemon>,
    peer: Principal,
    open: Open,
    terms: &Terms,
    descriptors: Vec<OwnedFd>,
) -> Result<(Arc<Lease>, Opened), Fault> {
    check_shape(&open, &descriptors)?;
    let former = check_terms(&open, terms)?;
    authorise(daemon, peer, &open)?;
    let generation = daemon.policies.current();
    let policy = generation.environment(&open.environment).ok_or_else(|| {
        let file = daemon.policies.dir().join(format!("{}.toml", open.environment));
        Fault::new(Code::Missing, format!("no policy file {}", file.display()))
            .with_hint("an environment is a file of that name in the policies directory")
    })?;
    admit(policy, &open.owner)?;
    let env = placeholders(daemon, policy, &open).await?;
    let token = match (open.holder, former) {
        (Holder::Sandbox, _) | (_, Some(_)) => None,
        (Holder::Harness | Holder::Explicit, None) => Some(tokens::fresh()),
    };
    let hash = former.or_else(|| token.as_deref().map(Hash::of));
    let kinds = open.descriptors.clone();
    let lease = enter_patiently(daemon, &open, terms, hash).await?;
    for (kind, descriptor) in kinds.into_iter().zip(descriptors) {
        if let Err(error) = attach(daemon, &lease, kind, descriptor) {
            daemon.leases.leave(&lease, false);
            let text = format!("cannot use the {kind:?} socket of {}: {error}", lease.id);
            return Err(Fault::new(Code::Invalid, text));
        }
    }
    let opened = Opened {
        lease: lease.id.clone(),
        token,
        ca_pem: daemon.vault.pem_of(lease.names.authority()),
        env,
        generation: generation.number,
    };
    Ok((lease, opened))
}

fn check_shape(open: &Open, descriptors: &[OwnedFd]) -> Result<(), Fault> {
    let invalid = |text: String| Err(Fault::new(Code::Invalid, text));
    if open.version != VERSION {
        return invalid(format!("lease version {}: this proxyd speaks {VERSION}", open.version));
    }
    if open.descriptors.len() != descriptors.len() {
        let (said, came) = (open.descriptors.len(), descriptors.len());
        return invalid(format!("lease announces {said} descriptors and carries {came}"));
    }
    if open.environment == policies::HARNESS && open.holder != Holder::Harness {
        let text = format!("environment {} is harnessd's own", policies::HARNESS);
        return Err(Fault::new(Code::Denied, text)
            .with_hint("name another environment: a policy file of that name makes one"));
    }
    match open.holder {
        Holder::Sandbox if !open.descriptors.contains(&Descriptor::Tcp) => {
            invalid("a sandbox's lease needs a listening socket".to_owned())
        }
        Holder::Harness if !descriptors.is_empty() => {
            invalid("harnessd's lease carries no sockets".to_owned())
        }
        holder => {
            let proxy = open.descriptors.contains(&Descriptor::Proxy);
            let other = open.descriptors.iter().any(|kind| *kind != Descriptor::Proxy);
            if proxy && holder != Holder::Explicit || other && holder != Holder::Sandbox {
                return invalid("these sockets are not of this kind of lease".to_owned());
            }
            Ok(())
        }
    }
}

/// Terms are for leases of others; what a holder that comes back says of its token.
fn check_terms(open: &Open, terms: &Terms) -> Result<Option<Hash>, Fault> {
    let stated = terms.ttl_seconds.is_some() || terms.token_sha256.is_some();
    if stated && open.holder != Holder::Explicit {
        return Err(Fault::new(Code::Invalid, "only a lease for others has terms"));
    }
    if terms.ttl_seconds.is_some_and(|ttl| !(1..=TTL_SECONDS_MAX).contains(&ttl)) {
        let days = TTL_SECONDS_MAX / (24 * 3600);
        return Err(Fault::new(Code::Invalid, format!("a lease lasts 1 second to {days} days"))
            .with_hint("without a time it lasts as long as its holder"));
    }
    let hash = terms.token_sha256.as_deref().map(|hex| {
        Hash::parse(hex).ok_or_else(|| Fault::new(Code::Invalid, "token_sha256 is not one in hex"))
    });
    hash.transpose()
}

fn may_see(daemon: &Daemon, peer: Principal, owner: &str) -> bool {
    daemon.trusts(peer) || owner == peer.owner()
}

/// The leases that a peer may see, after one of them.
fn visible(daemon: &Daemon, peer: Principal, after: Option<&LeaseId>) -> Vec<LeaseInfo> {
    let all = daemon.leases.views().into_iter();
    let own = all.filter(|view| may_see(daemon, peer, &view.owner));
    own.filter(|view| after.is_none_or(|after| view.lease > *after)).take(LISTED_MAX).collect()
}

/// Ends a lease at the word of somebody who may see it.
async fn end(daemon: &Daemon, peer: Principal, channel: &Channel, id: LeaseId) {
    let found = daemon.leases.by_id(&id).filter(|lease| may_see(daemon, peer, &lease.owner));
    let Some(lease) = found else {
        let fault = Fault::new(Code::NotFound, format!("no open lease {id} of yours"));
        return refuse(channel, fault).await;
    };
    tracing::info!(lease = %id, by = %peer, "lease closed by hand");
    lease.finish("it was closed by hand");
    let _ = channel.send(&LeaseReply::Ended { lease: id }, &[]).await;
}

/// Who may say on whose behalf a lease is: the daemons, and everyone for himself.
fn authorise(daemon: &Daemon, peer: Principal, open: &Open) -> Result<(), Fault> {
    let own = open.holder == Holder::Explicit && open.owner == peer.owner();
    if daemon.trusts(peer) || own {
        return Ok(());
    }
    let text = format!("{peer} may not open a lease of {:?} for {}", open.holder, open.owner);
    Err(Fault::new(Code::Denied, text)
        .with_hint("list the uid under trusted-uids in proxyd.toml if it is one of the daemons"))
}

/// Whether the policy lets this owner in.
fn admit(policy: &Policy, owner: &str) -> Result<(), Fault> {
    if policy.access.is_open() {
        return Ok(());
    }
    let uid = owner.strip_prefix("uid:").and_then(|digits| digits.parse::<u32>().ok());
    let admitted = uid.is_some_and(|uid| {
        let account = accounts::account(uid);
        let groups: Vec<_> = account.groups.iter().map(String::as_str).collect();
        policy.access.admits(uid, account.user.as_deref(), &account.gids, &groups)
    });
    if admitted {
        return Ok(());
    }
    let text = format!("environment {} does not admit {owner}", policy.name);
    Err(Fault::new(Code::Denied, text).with_hint("its policy file says who: [access]"))
}

/// The variables of the sandbox: names from the policy, placeholders as values.
async fn placeholders(
    daemon: &Daemon,
    policy: &Policy,
    open: &Open,
) -> Result<Vec<(String, String)>, Fault> {
    let mut env = Vec::new();
    for credential in policy.credentials.values() {
        let made = daemon.vault.placeholders(&open.lease, credential).await.map_err(|error| {
            let text = format!("cannot make a placeholder of {}: {error}", credential.name);
            Fault::new(Code::Unavailable, text)
        })?;
        env.extend(made.into_iter().filter_map(|(name, value)| Some((name?, value))));
    }
    Ok(env)
}

/// A holder that comes back may be faster than the news that its former connection ended.
async fn enter_patiently(
    daemon: &Daemon,
    open: &Open,
    terms: &Terms,
    token: Option<Hash>,
) -> Result<Arc<Lease>, Fault> {
    let deadline = tokio::time::Instant::now() + TAKEOVER;
    loop {
        let choose = |trusted| daemon.vault.authority_for(trusted);
        let end = daemon.ending.child_token();
        match daemon.leases.enter(open.clone(), terms, token, end, choose) {
            Ok(lease) => return Ok(lease),
            Err(EnterError::Open(_)) if tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => {
                let code = match &error {
                    EnterError::Open(_) | EnterError::Token => Code::Conflict,
                    EnterError::Full(_) => Code::Busy,
                    EnterError::Names {
                        source: super::names::OpenError::Foreign { .. }, ..
                    } => Code::Denied,
                    EnterError::Names { .. } => Code::Unavailable,
                };
                return Err(Fault::new(code, error.to_string()));
            }
        }
    }
}

/// Starts serving a socket that came with the lease; proxyd's own descriptor of it is closed when
/// the lease ends.
fn attach(
    daemon: &Arc<Daemon>,
    lease: &Arc<Lease>,
    kind: Descriptor,
    socket: OwnedFd,
) -> std::io::Result<()> {
    let (daemon, lease) = (Arc::clone(daemon), Arc::clone(lease));
    let tasks = daemon.tasks.clone();
    let end = lease.end.clone();
    match kind {
        Descriptor::Tcp => {
            let shard = daemon.shards.for_listener().clone();
            let listener = {
                let _inside = shard.enter();
                transparent::listener(socket)?
            };
            let serving = transparent::serve(daemon, lease, listener);
            tasks.spawn_on(end.run_until_cancelled_owned(serving), &shard);
        }
        Descriptor::Proxy => {
            let allowed = daemon.configured.lease_addresses();
            let shard = daemon.shards.for_listener().clone();
            let listener = {
                let _inside = shard.enter();
                explicit::Listener::take(socket, &allowed)?
            };
            lease.listens_at(listener.place());
            let serving = explicit::serve_lease(daemon, lease, listener);
            tasks.spawn_on(end.run_until_cancelled_owned(serving), &shard);
        }
        Descriptor::DnsUdp => {
            tasks.spawn(end.run_until_cancelled_owned(async move {
                if let Err(error) = dns::serve::udp(daemon, Arc::clone(&lease), socket).await {
                    tracing::warn!(lease = %lease.id, %error, "lookups ended");
                }
            }));
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
