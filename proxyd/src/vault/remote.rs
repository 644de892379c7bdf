//! Secrets that somebody else keeps: how each backend is asked, and what its answer means.
//!
//! Pure: the clock comes in, a worker does the talking. No reason quotes an answer.

mod command;

use policies::{Backend, SecretRef};

use super::VaultError;
use super::mint::Life;
use super::secret::Secret;
use super::wire::{Fetch, Run};
use crate::config::Backends;

/// One question to a worker; the parts are what its message says.
pub(super) struct Ask {
    pub errand: Errand,
    pub parts: Vec<Secret>,
}

pub(super) enum Errand {
    Fetch(Fetch),
    Run(Run),
}

/// What an answer means.
pub(super) enum Meaning {
    Had {
        value: Secret,
        /// What is to be shown next time instead of what was shown.
        rotated: Option<Secret>,
        life: Life,
    },
    /// Whoever keeps it will not change its mind.
    Refused(String),
    /// It may be had later.
    Later(String),
}

/// What the operator's configuration says of backends.
#[derive(Default)]
pub(super) struct Remote(pub Backends);

impl Remote {
    /// What is shown to have the secret: another one, or nothing.
    pub fn input(&self, secret: &SecretRef) -> Result<Option<&SecretRef>, VaultError> {
        match secret.backend {
            Backend::Exec => Ok(self.command(secret)?.input.as_ref()),
            Backend::Local | Backend::File => Err(asked_wrongly()),
        }
    }

    /// The question for the value of a secret.
    pub fn ask(&self, secret: &SecretRef, shown: &Secret, _now: u64) -> Result<Ask, VaultError> {
        match secret.backend {
            Backend::Exec => {
                let run = Run { command: secret.path.clone() };
                let shown = Secret::concat(&[shown.expose_secret()]);
                Ok(Ask { errand: Errand::Run(run), parts: vec![shown] })
            }
            Backend::Local | Backend::File => Err(asked_wrongly()),
        }
    }

    /// What the answer to it means.
    pub fn read(&self, secret: &SecretRef, _status: u16, body: &[u8], now: u64) -> Meaning {
        match secret.backend {
            Backend::Exec => match self.command(secret) {
                Ok(known) => command::read(known, body, now),
                Err(error) => Meaning::Later(error.to_string()),
            },
            Backend::Local | Backend::File => Meaning::Later(asked_wrongly().to_string()),
        }
    }

    fn command(&self, secret: &SecretRef) -> Result<&crate::config::Command, VaultError> {
        self.0.commands.get(&secret.path).ok_or_else(|| {
            let name = &secret.path;
            VaultError::Unavailable(format!("proxyd.toml has no [commands.{name}]"))
        })
    }
}

fn asked_wrongly() -> VaultError {
    VaultError::Failed("nobody else keeps secrets of that kind".into())
}

/// A value that the vault takes.
fn checked(value: &[u8]) -> Result<Secret, String> {
    use ipc::vault::{SECRET_BYTES_MAX, SECRET_BYTES_MIN};
    match value.len() {
        0..SECRET_BYTES_MIN => Err(format!("the value has less than {SECRET_BYTES_MIN} bytes")),
        SECRET_BYTES_MIN..=SECRET_BYTES_MAX => Ok(Secret::concat(&[value])),
        _ => Err(format!("the value has more than {SECRET_BYTES_MAX} bytes")),
    }
}
