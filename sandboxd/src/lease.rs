//! sandboxd's side of a lease: the connection to proxyd that gives one sandbox its way out.
//!
//! The sandbox's listening sockets go to proxyd with the lease and are kept here too, so that
//! while proxyd is away connections wait in the sockets' backlog. A task watches the connection:
//! when it ends, the lease is opened again by its id, with growing pauses, for as long as the
//! sandbox lives; when proxyd revokes it, the sandbox is told and ends.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ipc::fault::Fault;
use ipc::fd::{Channel, MessageError};
use ipc::id::{CallId, SessionId};
use ipc::lease::{Descriptor, LeaseReply, LeaseRequest, Open, Opened};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long proxyd may take to answer one request to open.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take to say what it refused: it waits a second itself for what is undecided.
const REFUSALS_TIMEOUT: Duration = Duration::from_secs(3);
/// First and longest pause between two tries.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// proxyd has said no; asking again will not help.
    #[error("proxyd refuses: {0}")]
    Refused(Fault),
    #[error("proxyd does not answer on {socket}: {why}")]
    Unreachable { socket: PathBuf, why: String },
}

/// What the keeper of a lease must know.
#[derive(Debug)]
pub enum Event {
    /// proxyd came back; it may have another CA now.
    Reopened(Box<Opened>),
    Revoked {
        reason: String,
    },
}

/// A lease that is kept open. Dropping it ends the connection without a clean close.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    socket: PathBuf,
    open: Open,
    /// In the order of `open.descriptors`.
    sockets: Vec<OwnedFd>,
    state: Mutex<State>,
    ended: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    /// None while proxyd is away.
    channel: Option<Arc<Channel>>,
    running: BTreeSet<CallId>,
    /// Who waits for what was refused to a call.
    asking: HashMap<CallId, oneshot::Sender<Vec<String>>>,
    /// As it was assigned.
    session: Option<SessionId>,
}

impl Lease {
    /// Opens a lease, trying for as long as `patience`. `open.descriptors` is filled in here.
    pub async fn open(
        socket: &Path,
        mut open: Open,
        sockets: Vec<(Descriptor, OwnedFd)>,
        patience: Duration,
    ) -> Result<(Self, Opened, mpsc::UnboundedReceiver<Event>), LeaseError> {
        let (kinds, sockets) = sockets.into_iter().unzip();
        open.descriptors = kinds;
        let shared = Arc::new(Shared {
            socket: socket.to_owned(),
            open,
            sockets,
            state: Mutex::default(),
            ended: CancellationToken::new(),
        });
        let deadline = Instant::now() + patience;
        let mut pause = PAUSE_MIN;
        let (channel, opened) = loop {
            match shared.try_open().await {
                Err(LeaseError::Unreachable { .. }) if Instant::now() + pause < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                outcome => break outcome?,
            }
        };
        let channel = Arc::new(channel);
        shared.state().channel = Some(Arc::clone(&channel));
        let (events, received) = mpsc::unbounded_channel();
        tokio::spawn(keep(Arc::clone(&shared), channel, events));
        Ok((Self { shared }, opened, received))
    }

    /// Says for which session the lease is, where that was not known when it was opened. Once.
    pub async fn assign(&self, session: &SessionId) {
        self.shared.state().session = Some(session.clone());
        self.tell(&LeaseRequest::Assign { session: session.clone() }).await;
    }

    /// Tells proxyd that a call begins; returns when the message is on its way, so that no request
    /// of the call can overtake it by much.
    pub async fn call_started(&self, call: &CallId) {
        self.shared.state().running.insert(call.clone());
        self.tell(&LeaseRequest::CallStarted { call: call.clone() }).await;
    }

    pub async fn call_finished(&self, call: &CallId) {
        self.shared.state().running.remove(call);
        self.tell(&LeaseRequest::CallFinished { call: call.clone() }).await;
    }

    /// What proxyd refused to a running call; nothing where proxyd is away or slow, because the
    /// call's result must not wait for it.
    pub async fn refusals(&self, call: &CallId) -> Vec<String> {
        let (tell, told) = oneshot::channel();
        {
            let mut state = self.shared.state();
            // Whoever takes the channel away lets go of all who ask by then.
            if state.channel.is_none() {
                return Vec::new();
            }
            state.asking.insert(call.clone(), tell);
        }
        self.tell(&LeaseRequest::Refusals { call: call.clone() }).await;
        let lines = tokio::time::timeout(REFUSALS_TIMEOUT, told).await;
        self.shared.state().asking.remove(call);
        lines.ok().and_then(Result::ok).unwrap_or_default()
    }

    /// Gives the lease back: proxyd forgets it at once.
    pub async fn close(&self) {
        let channel = self.shared.disconnect();
        self.shared.ended.cancel();
        if let Some(channel) = channel {
            send(&channel, &LeaseRequest::Close).await;
        }
    }

    /// While proxyd is away there is nobody to tell; what runs is told when it returns.
    async fn tell(&self, message: &LeaseRequest) {
        let channel = self.shared.state().channel.clone();
        if let Some(channel) = channel {
            send(&channel, message).await;
        }
    }
}

/// A failure is seen by the task that watches the connection.
async fn send(channel: &Channel, message: &LeaseRequest) {
    let _ = tokio::time::timeout(REPLY_TIMEOUT, channel.send(message, &[])).await;
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.ended.cancel();
        self.shared.disconnect();
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on there is nobody to ask, and nobody waits for an answer.
    fn disconnect(&self) -> Option<Arc<Channel>> {
        let mut state = self.state();
        state.asking.clear();
        state.channel.take()
    }

    async fn try_open(&self) -> Result<(Channel, Opened), LeaseError> {
        let unreachable =
            |why: String| LeaseError::Unreachable { socket: self.socket.clone(), why };
        let socket = self.socket.clone();
        // connect(2) waits while the backlog is full; that must not hold up other tasks.
        let connected = match ipc::fd::connect_at_once(&socket) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let connecting = tokio::task::spawn_blocking(move || ipc::fd::connect(&socket));
                connecting.await.map_err(|e| unreachable(e.to_string()))?
            }
            other => other,
        };
        let channel = connected.and_then(Channel::new).map_err(|e| unreachable(e.to_string()))?;
        let sockets: Vec<_> = self.sockets.iter().map(AsFd::as_fd).collect();
        let exchange = async {
            let mut open = self.open.clone();
            open.session = self.state().session.clone().or(open.session);
            channel.send(&LeaseRequest::Open(open), &sockets).await?;
            channel.receive::<LeaseReply>().await
        };
        match tokio::time::timeout(REPLY_TIMEOUT, exchange).await {
            Ok(Ok((LeaseReply::Opened(opened), _))) => Ok((channel, opened)),
            Ok(Ok((LeaseReply::Refused { fault }, _))) => Err(LeaseError::Refused(fault)),
            Ok(Ok((LeaseReply::Revoked { reason }, _))) => Err(unreachable(reason)),
            Ok(Ok(_)) => Err(unreachable("an answer to something else".to_owned())),
            Ok(Err(error)) => Err(unreachable(error.to_string())),
            Err(_) => Err(unreachable(format!("no answer within {} s", REPLY_TIMEOUT.as_secs()))),
        }
    }
}

/// Watches a lease's connection and opens it again whenever it ends.
async fn keep(shared: Arc<Shared>, first: Arc<Channel>, events: mpsc::UnboundedSender<Event>) {
    let mut channel = first;
    loop {
        let received = tokio::select! {
            // A lease that we gave back ends its connection too: that is no loss.
            biased;
            () = shared.ended.cancelled() => return,
            received = channel.receive::<LeaseReply>() => received,
        };
        match received {
            Ok((LeaseReply::Revoked { reason }, _)) => {
                shared.disconnect();
                let _ = events.send(Event::Revoked { reason });
                return;
            }
            Ok((LeaseReply::Refusals { call, lines }, _)) => {
                if let Some(tell) = shared.state().asking.remove(&call) {
                    // Whoever asked waits no longer.
                    let _ = tell.send(lines);
                }
                continue;
            }
            // Nothing else is said on an open lease; a newer proxyd may know better.
            Ok(_) | Err(MessageError::Malformed(_)) => continue,
            Err(_) => {}
        }
        shared.disconnect();
        tracing::info!(lease = %shared.open.lease, "proxyd is away: opening the lease again");
        let Some((again, opened)) = reopen(&shared).await else { return };
        channel = Arc::new(again);
        let running = {
            let mut state = shared.state();
            state.channel = Some(Arc::clone(&channel));
            state.running.clone()
        };
        for call in running {
            let _ = channel.send(&LeaseRequest::CallStarted { call }, &[]).await;
        }
        tracing::info!(lease = %shared.open.lease, "lease open again");
        let _ = events.send(Event::Reopened(Box::new(opened)));
    }
}

/// Tries until it succeeds or the lease ends. A refusal is tried again too: whatever made proxyd
/// refuse, a policy being edited for one, may pass, and until then the sandbox reaches nothing.
async fn reopen(shared: &Shared) -> Option<(Channel, Opened)> {
    let mut pause = PAUSE_MIN;
    loop {
        tokio::select! {
            biased;
            () = shared.ended.cancelled() => return None,
            outcome = shared.try_open() => match outcome {
                Ok(open) => return Some(open),
                Err(error @ LeaseError::Refused(_)) => {
                    tracing::warn!(lease = %shared.open.lease, %error, "lease not opened again");
                    pause = PAUSE_MAX;
                }
                Err(LeaseError::Unreachable { .. }) => {}
            },
        }
        tokio::select! {
            () = shared.ended.cancelled() => return None,
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(PAUSE_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use ipc::id::LeaseId;
    use ipc::lease::{Holder, VERSION};

    use super::*;

    /// A lease, over a connection or while proxyd is away.
    fn lease(channel: Option<Arc<Channel>>) -> Lease {
        let open = Open {
            version: VERSION,
            lease: LeaseId::random(),
            holder: Holder::Sandbox,
            environment: "dev".into(),
            owner: "uid:1".into(),
            sandbox: None,
            session: None,
            descriptors: Vec::new(),
        };
        let state = Mutex::new(State { channel, ..State::default() });
        let (socket, ended) = ("/nonexistent/lease.sock".into(), CancellationToken::new());
        Lease { shared: Arc::new(Shared { socket, open, sockets: Vec::new(), state, ended }) }
    }

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[tokio::test]
    async fn a_call_that_ends_while_proxyd_is_away_waits_for_no_answer() {
        let lease = lease(None);
        let call = CallId::random();

        let asked = poll(pin!(lease.refusals(&call)));

        assert_eq!(asked, Poll::Ready(Vec::new()));
    }

    #[tokio::test]
    async fn a_call_that_asks_when_proxyd_goes_or_ends_the_lease_waits_no_longer() {
        for revoked in [false, true] {
            let (ours, theirs) = ipc::fd::pair().unwrap();
            let channel = Arc::new(Channel::new(ours).unwrap());
            let proxyd = Channel::new(theirs).unwrap();
            let lease = lease(Some(Arc::clone(&channel)));
            let (events, mut received) = mpsc::unbounded_channel();
            let keeping = tokio::spawn(keep(Arc::clone(&lease.shared), channel, events));
            let call = CallId::random();
            let mut asking = pin!(lease.refusals(&call));

            let asked = tokio::select! {
                lines = asking.as_mut() => panic!("answered by nobody: {lines:?}"),
                asked = proxyd.receive::<LeaseRequest>() => asked.unwrap().0,
            };
            assert!(matches!(asked, LeaseRequest::Refusals { .. }), "{asked:?}");
            if revoked {
                let reply = LeaseReply::Revoked { reason: "a test".into() };
                proxyd.send(&reply, &[]).await.unwrap();
                assert!(matches!(received.recv().await, Some(Event::Revoked { .. })));
            } else {
                drop(proxyd);
                while lease.shared.state().channel.is_some() {
                    tokio::task::yield_now().await;
                }
            }

            assert_eq!(poll(asking.as_mut()), Poll::Ready(Vec::new()), "revoked: {revoked}");
            keeping.abort();
        }
    }
}
