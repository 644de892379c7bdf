//! Connections that no rule needs to see into: decided by name and port, and passed on unread.

use std::sync::Arc;
use std::time::Duration;

use ipc::id::RequestId;
use policies::{ConnectDecision, Permit};

use super::{Incoming, Target, deny, explain};
use crate::audit::Line;
use crate::lease::budgets::Meter;
use crate::lease::flow::{Entry, Flow, Given};
use crate::lease::share::Taken;
use crate::question::{self, Asking, Judged};
use crate::relay::exchange::Tally;
use crate::relay::tunnel::{self, TunnelError};
use crate::reply::Refusal;
use crate::request::{self, Outcome, Standing};
use crate::upstream::dial::RawStream;

/// Passes bytes both ways, once that may be.
pub async fn pass(target: &Target, mut incoming: Incoming, (permit, generation): (Permit, u64)) {
    // One that has to make room just now goes.
    let Some(_working) = target.seat.works() else { return };
    let id = RequestId::random();
    let mut line = target.line(&id, "tunnel");
    line.rule = Some(permit.rule().to_owned());
    line.generation = generation;
    let entered = enter(target, &mut incoming, &mut line, (permit, generation)).await;
    let Entered { permit, flow, meter, place } = match entered {
        Ok(entered) => entered,
        Err(refusal) => return refuse(target, incoming, line, refusal).await,
    };
    if let Err(error) = target.daemon.audit.allow(&line).await {
        tracing::error!(%error, "connection stopped: the audit cannot be written");
        return incoming.reset();
    }
    line.reason = None;
    let mut outcome = Outcome::new(Arc::clone(&target.daemon), Box::new(line));
    outcome.tally.meter = meter;
    let dialled = tokio::select! {
        biased;
        () = flow.stop.cancelled() => Err(policy_changed()),
        dialled = target.daemon.upstreams.tunnel(permit) => dialled.map_err(Refusal::from),
    };
    let upstream = match dialled {
        Ok(dialled) => dialled,
        Err(refusal) => {
            outcome.refused(&refusal);
            drop((outcome, place));
            return explain(target, incoming, Standing::failed(id, refusal)).await;
        }
    };
    outcome.line.address = Some(upstream.address.to_string());
    if let Some(address) = upstream.address.reached {
        flow.dialled(address.ip(), target.daemon.upstreams.is_own(address));
    }
    match carry(target, &mut incoming, upstream.stream, &outcome.tally, &flow).await {
        Ok(()) => outcome.done(),
        Err(refusal) => outcome.refused(&refusal),
    }
}

/// A connection that may go on.
struct Entered {
    permit: Permit,
    flow: Entry,
    meter: Option<Meter>,
    /// Among the lease's requests and tunnels under way.
    place: Taken,
}

async fn enter(
    target: &Target,
    incoming: &mut Incoming,
    line: &mut Line,
    given: (Permit, u64),
) -> Result<Entered, Refusal> {
    let lease = &target.lease;
    let place = lease.requests.take(1)?;
    let (permit, generation) = answered(target, incoming, line, given).await?;
    let meter = lease.budgets.enter(permit.budget(), 0, 0)?;
    let flow = Flow::Tunnel { host: target.host.clone(), port: target.port };
    let flow = lease.flows.enter(flow, Given::by(&permit, generation));
    if flow.stop.is_cancelled() {
        return Err(policy_changed());
    }
    Ok(Entered { permit, flow, meter, place })
}

/// The decision about a question stands in the audit under the question's request, whatever then
/// comes on the connection.
async fn refuse(target: &Target, incoming: Incoming, line: Line, refusal: Refusal) {
    if !line.held {
        return deny(target, incoming, refusal).await;
    }
    request::record_denied(&target.daemon, line, &refusal).await;
    explain(target, incoming, Standing::recorded(&target.daemon, refusal)).await;
}

fn policy_changed() -> Refusal {
    Refusal::denied(403, "policy_changed", "the policy no longer allows this connection")
}

/// Holds a connection where its rule asks for that. What comes out is what holds now.
async fn answered(
    target: &Target,
    incoming: &mut Incoming,
    line: &mut Line,
    (permit, generation): (Permit, u64),
) -> Result<(Permit, u64), Refusal> {
    if permit.asks().is_none() {
        return Ok((permit, generation));
    }
    let Target { daemon, lease, host, port, .. } = target;
    // Nobody is asked about what has no room anyway.
    lease.budgets.fits(permit.budget(), 0, 0)?;
    let judge = || {
        let current = daemon.policies.current();
        let (policy, generation) = lease.policy(&current).ok_or_else(request::environment_gone)?;
        match policy.at_connect(host, *port) {
            ConnectDecision::Tunnel(permit) => Ok(Judged { permit, policy, generation }),
            ConnectDecision::Deny(denial) => Err(denial.into()),
            ConnectDecision::Inspect => {
                let reason = "rules read the requests of such a connection now: open it again";
                Err(Refusal::denied(403, "policy_changed", reason))
            }
        }
    };
    let asking = Asking { daemon, lease, query: None, taken: &[] };
    let gone = question::left(|| incoming.end());
    let (judged, answer) = Box::pin(question::settle(asking, line, judge, gone)).await?;
    line.reason = answer.map(|answer| answer.words());
    Ok((judged.permit, judged.generation))
}

/// Passes bytes until both directions have ended, or something ends them.
async fn carry(
    target: &Target,
    incoming: &mut Incoming,
    mut upstream: RawStream,
    tally: &Tally,
    flow: &Entry,
) -> Result<(), Refusal> {
    let idle = target.daemon.idle.tunnel;
    // Half a stream must not look like a whole one, to either side, whatever ends it.
    incoming.reset_on_close(true);
    upstream.reset_on_close(true);
    let passed = tokio::select! {
        biased;
        () = flow.stop.cancelled() => return Err(policy_changed()),
        passed = copy(incoming, &mut upstream, tally, idle) => passed,
    };
    passed.map_err(|error| match error {
        TunnelError::Idle(_) => Refusal::failed(504, "tunnel_silent", error.to_string()),
        TunnelError::Spent(spent) => spent.into(),
        TunnelError::Io(_) => Refusal::failed(502, "tunnel_broke", error.to_string()),
    })?;
    incoming.reset_on_close(false);
    upstream.reset_on_close(false);
    Ok(())
}

async fn copy(
    client: &mut Incoming,
    upstream: &mut RawStream,
    tally: &Tally,
    idle: Duration,
) -> Result<(), TunnelError> {
    match (client, upstream) {
        (Incoming::Tcp(client), RawStream::Tcp(upstream)) => {
            tunnel::run(client, upstream, tally, idle).await
        }
        (Incoming::Tcp(client), RawStream::Layered(upstream)) => {
            tunnel::run(client, upstream, tally, idle).await
        }
        (Incoming::Tunnel(client), RawStream::Tcp(upstream)) => {
            tunnel::run(client, upstream, tally, idle).await
        }
        (Incoming::Tunnel(client), RawStream::Layered(upstream)) => {
            tunnel::run(client, upstream, tally, idle).await
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::time::Instant as Wall;

    use tokio::time::timeout;

    use super::*;
    use crate::question::HALF_CLOSED;
    use crate::sys::interfaces;

    /// Both ends of a connection on loopback, and the near one once more.
    fn connected() -> (std::net::TcpStream, Incoming, std::net::TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let socket = accepted.try_clone().unwrap();
        accepted.set_nonblocking(true).unwrap();
        (client, Incoming::Tcp(tokio::net::TcpStream::from_std(accepted).unwrap()), socket)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_has_closed_is_seen_to_leave_though_nobody_reads_what_it_sent() {
        let (mut client, mut incoming, socket) = connected();
        client.write_all(b"unread").unwrap();
        let mut leaves = std::pin::pin!(question::left(|| incoming.end()));
        assert!(timeout(10 * HALF_CLOSED, leaves.as_mut()).await.is_err());

        drop(client);
        let deadline = Wall::now() + Duration::from_secs(60);
        while !interfaces::has_ended(&socket) {
            assert!(Wall::now() < deadline, "the kernel does not tell");
            std::thread::yield_now();
        }

        // It may only have said all that it has to say.
        assert!(timeout(HALF_CLOSED / 2, leaves.as_mut()).await.is_err());
        assert!(timeout(HALF_CLOSED, leaves).await.is_ok());
    }
}
