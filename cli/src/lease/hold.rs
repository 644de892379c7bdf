//! A lease that is kept open: over restarts of proxyd, until it is given back, expires or is closed
//! by somebody else.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ipc::fd::Channel;
use ipc::lease::{LeaseReply, LeaseRequest, Open, Opened};
use sha2::{Digest, Sha256};

use super::files::Files;
use crate::failure::Failure;
use crate::{place, term};

/// How long proxyd may take to answer.
const REPLY: Duration = Duration::from_secs(30);
/// Waits between two tries to open the lease again.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// An open lease.
pub struct Held {
    socket: PathBuf,
    open: Open,
    until: Option<Instant>,
    listener: OwnedFd,
    channel: Channel,
    pub token: String,
    pub ca_pem: String,
    /// Placeholders of the environment's credentials.
    pub env: Vec<(String, String)>,
}

enum Refused {
    /// proxyd said no.
    Said(Failure),
    /// Nobody answered.
    Away(Failure),
}

impl Held {
    pub async fn open(
        socket: PathBuf,
        open: Open,
        ttl: Option<Duration>,
        listener: OwnedFd,
    ) -> Result<Self, Failure> {
        // What is too long for a clock here is too long for proxyd, which says so.
        let until = ttl.and_then(|ttl| Instant::now().checked_add(ttl));
        let asked = try_open(&socket, &open, ttl, None, &listener).await;
        let (channel, opened) = asked.map_err(|refused| match refused {
            Refused::Said(failure) | Refused::Away(failure) => failure,
        })?;
        let token = opened.token.ok_or_else(|| Failure::new("proxyd: a lease without a token"))?;
        let (ca_pem, env) = (opened.ca_pem, opened.env);
        Ok(Self { socket, open, until, listener, channel, token, ca_pem, env })
    }

    pub fn lease(&self) -> &str {
        self.open.lease.as_str()
    }

    pub fn environment(&self) -> &str {
        &self.open.environment
    }

    pub fn seconds_left(&self) -> Option<u64> {
        self.until.map(|until| until.saturating_duration_since(Instant::now()).as_secs())
    }

    /// Keeps the lease open; comes back with the reason when it is over. Cancel-safe: what was
    /// opened again stays.
    pub async fn kept(&mut self, files: &Files) -> Failure {
        loop {
            match self.channel.receive::<LeaseReply>().await {
                Ok((LeaseReply::Revoked { reason }, _)) => {
                    return Failure::new(format!("lease {} ended: {reason}", self.lease()));
                }
                // Nothing else is said on an open lease; a newer proxyd may know better.
                Ok(_) => continue,
                Err(_) => {}
            }
            if let Err(failure) = self.reopen(files).await {
                return failure;
            }
        }
    }

    async fn reopen(&mut self, files: &Files) -> Result<(), Failure> {
        term::aside("cleanhands: proxyd is away; the lease is opened again when it is back");
        let mut pause = PAUSE_MIN;
        let mut said = None;
        loop {
            let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.as_secs() == 0) {
                return Err(Failure::new(format!(
                    "lease {} ended: its time is over",
                    self.lease()
                )));
            }
            let former = Some(self.token.as_str());
            match try_open(&self.socket, &self.open, left, former, &self.listener).await {
                Ok((channel, opened)) => {
                    self.channel = channel;
                    if opened.ca_pem != self.ca_pem {
                        self.ca_pem = opened.ca_pem;
                        files.write(&self.ca_pem)?;
                    }
                    term::aside("cleanhands: the lease is open again");
                    return Ok(());
                }
                // A policy that is being edited, for one, may be right again in a moment.
                Err(Refused::Said(failure)) => {
                    let text = Some(failure.text);
                    if let Some(new) = text.as_ref().filter(|_| text != said) {
                        term::aside(&format!("cleanhands: {}", term::printable(new)));
                    }
                    said = text;
                    pause = PAUSE_MAX;
                }
                Err(Refused::Away(_)) => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Gives the lease back: proxyd forgets it at once.
    pub async fn close(self) {
        // A proxyd that is gone has forgotten it already.
        if self.channel.send(&LeaseRequest::Close, &[]).await.is_ok() {
            let _ = tokio::time::timeout(REPLY, self.channel.receive::<LeaseReply>()).await;
        }
    }
}

async fn try_open(
    socket: &std::path::Path,
    open: &Open,
    ttl: Option<Duration>,
    former: Option<&str>,
    listener: &OwnedFd,
) -> Result<(Channel, Opened), Refused> {
    let away = |why: String| {
        let failure = Failure::new(format!("{}: {why}", socket.display()));
        Refused::Away(failure.with_hint("`cleanhands doctor` tells how proxyd is"))
    };
    let channel = place::connect(socket, "proxyd").map_err(Refused::Away)?;
    let terms = ipc::lease::Terms {
        ttl_seconds: ttl.map(|ttl| ttl.as_secs().max(1)),
        token_sha256: former.map(|token| hex::encode(Sha256::digest(token.as_bytes()))),
    };
    let request = LeaseRequest::OpenFor { open: open.clone(), terms };
    let talk = async {
        channel.send(&request, &[listener.as_fd()]).await?;
        channel.receive::<LeaseReply>().await
    };
    match tokio::time::timeout(REPLY, talk).await {
        Ok(Ok((LeaseReply::Opened(opened), _))) => Ok((channel, opened)),
        Ok(Ok((LeaseReply::Refused { fault }, _))) => Err(Refused::Said(fault.into())),
        Ok(Ok(_)) => Err(away("an answer out of turn".to_owned())),
        Ok(Err(error)) => Err(away(error.to_string())),
        Err(_) => Err(away(format!("no answer in {} s", REPLY.as_secs()))),
    }
}
