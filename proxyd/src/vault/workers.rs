//! The vault's ends of the sockets to its workers, and which of them carries what.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::VaultError;
use super::remote::{Ask, Errand};
use super::wire;

/// Who talks to others for the vault; none in tests of what needs none.
#[derive(Default)]
pub(super) struct Workers {
    pub network: Option<UnixStream>,
    pub commands: Option<UnixStream>,
    /// Nothing is asked any more.
    ending: bool,
}

#[derive(Clone, Copy)]
pub(super) enum Which {
    Network,
    Commands,
}

impl Workers {
    pub fn new(network: Option<UnixStream>, commands: Option<UnixStream>) -> Self {
        Self { network, commands, ending: false }
    }

    /// Asks nothing from now on. Commands end; what is asked over the network is still heard.
    pub fn end(&mut self) {
        self.commands = None;
        self.ending = true;
    }

    fn of(&self, which: Which) -> Option<&UnixStream> {
        match which {
            Which::Network => self.network.as_ref(),
            Which::Commands => self.commands.as_ref(),
        }
    }

    pub fn of_mut(&mut self, which: Which) -> Option<&mut UnixStream> {
        match which {
            Which::Network => self.network.as_mut(),
            Which::Commands => self.commands.as_mut(),
        }
    }

    /// Waits until proxyd asks or a worker answers, so long at most.
    pub fn wait(
        &self,
        socket: &UnixStream,
        patience: Option<Duration>,
    ) -> std::io::Result<(bool, Vec<Which>)> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = vec![PollFd::new(socket, PollFlags::IN)];
        let workers = [Which::Network, Which::Commands].into_iter().filter_map(|which| {
            let worker = self.of(which)?;
            fds.push(PollFd::new(worker, PollFlags::IN));
            Some(which)
        });
        let workers: Vec<Which> = workers.collect();
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        loop {
            match poll(&mut fds, patience.as_ref()) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let answered = workers.into_iter().zip(&ready[1..]).filter(|(_, ready)| **ready);
        Ok((ready[0], answered.map(|(which, _)| which).collect()))
    }

    /// Whether the network's worker answers, or ends, within that time.
    pub fn answers_within(&self, patience: Duration) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Some(network) = &self.network else { return false };
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(network, PollFlags::IN)], left.as_ref()) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Asks the worker whose errand it is.
    pub fn send(&mut self, number: u32, ask: &Ask) -> Result<(), VaultError> {
        if self.ending {
            return Err(VaultError::Gone);
        }
        let (which, frame) = match &ask.errand {
            Errand::Fetch(fetch) => (Which::Network, wire::encode(number, fetch, &ask.parts)),
            Errand::Exchange(exchange) => {
                (Which::Network, wire::encode(number, exchange, &ask.parts))
            }
            Errand::Instance(asked) => (Which::Network, wire::encode(number, asked, &ask.parts)),
            Errand::Run(run) => (Which::Commands, wire::encode(number, run, &ask.parts)),
        };
        let worker = self.of_mut(which).ok_or_else(|| {
            VaultError::Unavailable("the vault has no worker that could ask for it".into())
        })?;
        worker.write_all(&frame).map_err(|error| {
            VaultError::Failed(format!("the vault's worker cannot be asked: {error}"))
        })
    }
}
