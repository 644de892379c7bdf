//! The vault's ends of the sockets to its workers, and which of them carries what.

use std::io::Write;
use std::os::unix::net::UnixStream;

use super::VaultError;
use super::remote::{Ask, Errand};
use super::wire;

/// Who talks to others for the vault; none in tests of what needs none.
#[derive(Default)]
pub(super) struct Workers {
    pub network: Option<UnixStream>,
    pub commands: Option<UnixStream>,
}

#[derive(Clone, Copy)]
pub(super) enum Which {
    Network,
    Commands,
}

impl Workers {
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

    /// Waits until proxyd asks or a worker answers.
    pub fn wait(&self, socket: &UnixStream) -> std::io::Result<(bool, Vec<Which>)> {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut fds = vec![PollFd::new(socket, PollFlags::IN)];
        let workers = [Which::Network, Which::Commands].into_iter().filter_map(|which| {
            let worker = self.of(which)?;
            fds.push(PollFd::new(worker, PollFlags::IN));
            Some(which)
        });
        let workers: Vec<Which> = workers.collect();
        loop {
            match poll(&mut fds, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let answered = workers.into_iter().zip(&ready[1..]).filter(|(_, ready)| **ready);
        Ok((ready[0], answered.map(|(which, _)| which).collect()))
    }

    /// Asks the worker whose errand it is.
    pub fn send(&mut self, number: u32, ask: &Ask) -> Result<(), VaultError> {
        let (which, frame) = match &ask.errand {
            Errand::Fetch(fetch) => (Which::Network, wire::encode(number, fetch, &ask.parts)),
            Errand::Exchange(exchange) => {
                (Which::Network, wire::encode(number, exchange, &ask.parts))
            }
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
