//! The signals that ask this program to stop: SIGINT, SIGTERM, and SIGHUP when the terminal goes.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::Failure;

/// From its making on, these signals no longer end the process but are waited for.
pub struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Stop {
    pub fn watch() -> Result<Self, Failure> {
        let watched = |kind| {
            signal(kind).map_err(|error| Failure::new(format!("cannot watch for signals: {error}")))
        };
        Ok(Self {
            interrupt: watched(SignalKind::interrupt())?,
            terminate: watched(SignalKind::terminate())?,
            hangup: watched(SignalKind::hangup())?,
        })
    }

    /// Waits until one of them arrives. Cancel-safe.
    pub async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
