//! Secrets that somebody else keeps: how each backend is asked, and what its answer means.
//!
//! Pure: the clock comes in, a worker does the talking. No reason quotes an answer.

mod aws;
mod aws_answer;
mod command;
pub(super) mod lease;
mod openbao;

use policies::{AwsEntry, Backend, Entry, SecretRef};

use super::VaultError;
use super::mint::Life;
use super::secret::Secret;
use super::wire::{Exchange, Fetch, Instance, Run};
use crate::config::{AwsLogin, Backends, OpenBao};

/// One question to a worker; the parts are what its message says.
pub(super) struct Ask {
    pub errand: Errand,
    pub parts: Vec<Secret>,
}

pub(super) enum Errand {
    Fetch(Fetch),
    Exchange(Exchange),
    Instance(Instance),
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
    /// What it was asked with counts no more there.
    Unknown(String),
    /// It may be had later.
    Later(String),
}

/// What a question is asked with.
pub(super) enum Shown<'a> {
    Nothing,
    Secret(&'a SecretRef),
    /// The vault's own token of the server's.
    Login,
    /// The vault's own keys at AWS.
    AwsLogin,
}

impl<'a> From<Option<&'a SecretRef>> for Shown<'a> {
    fn from(secret: Option<&'a SecretRef>) -> Self {
        secret.map_or(Shown::Nothing, Shown::Secret)
    }
}

/// What the operator's configuration says of backends.
#[derive(Default)]
pub(super) struct Remote(pub Backends);

impl Remote {
    /// What is shown to have the secret.
    pub fn input(&self, secret: &SecretRef) -> Result<Shown<'_>, VaultError> {
        match secret.backend {
            Backend::Exec => Ok(self.command(secret)?.input.as_ref().into()),
            Backend::OpenBao | Backend::OpenBaoLease => Ok(Shown::Login),
            Backend::AwsSecrets => self.aws_keys(),
            Backend::AwsRole => self.aws_role_input(secret),
            Backend::Local | Backend::File => Err(asked_wrongly()),
        }
    }

    /// The question for the value of a secret.
    pub fn ask(&self, secret: &SecretRef, shown: &Secret, now: u64) -> Result<Ask, VaultError> {
        match secret.backend {
            Backend::Exec => {
                let run = Run { command: secret.path.clone() };
                let shown = Secret::concat(&[shown.expose_secret()]);
                Ok(Ask { errand: Errand::Run(run), parts: vec![shown] })
            }
            Backend::OpenBao => Ok(openbao::read(self.server()?, &entry(secret)?, shown)),
            Backend::AwsSecrets => self.ask_aws_secret(secret, shown, now),
            Backend::AwsRole => self.ask_aws_role(secret, shown, now),
            Backend::OpenBaoLease | Backend::Local | Backend::File => Err(asked_wrongly()),
        }
    }

    /// What is shown to be given a token of the server's.
    pub fn login_input(&self) -> Result<Shown<'_>, VaultError> {
        Ok(self.server()?.secret.as_ref().into())
    }

    /// The question for a token of the server's, or for more of the life of one that is kept.
    pub fn login(&self, shown: &Secret, kept: Option<&Secret>) -> Result<Ask, VaultError> {
        match kept {
            Some(token) => Ok(openbao::renew(self.server()?, token)),
            None => openbao::login(self.server()?, shown),
        }
    }

    /// What the answer to it means, and whether the token can be renewed.
    pub fn read_login(
        &self,
        shown: &Secret,
        renewal: bool,
        status: u16,
        body: &[u8],
    ) -> (Meaning, bool) {
        match self.server() {
            Ok(server) => openbao::logged_in(server, shown, renewal, status, body),
            Err(error) => (Meaning::Later(error.to_string()), false),
        }
    }

    fn server(&self) -> Result<&OpenBao, VaultError> {
        self.0.openbao.as_ref().ok_or_else(|| {
            VaultError::Unavailable("proxyd.toml has no [openbao]: no server is known".into())
        })
    }

    /// What the answer to it means.
    pub fn read(&self, secret: &SecretRef, status: u16, body: &[u8], now: u64) -> Meaning {
        match secret.backend {
            Backend::Exec => match self.command(secret) {
                Ok(known) => command::read(known, body, now),
                Err(error) => Meaning::Later(error.to_string()),
            },
            Backend::OpenBao => match (self.server(), entry(secret)) {
                (Ok(server), Ok(entry)) => openbao::value(server, &entry, status, body),
                (Err(error), _) | (_, Err(error)) => Meaning::Later(error.to_string()),
            },
            Backend::AwsSecrets => match (self.aws(), AwsEntry::parse(&secret.path)) {
                (Ok(aws), Some(entry)) => aws_answer::secret(&entry, aws.freshness, status, body),
                (Err(error), _) => Meaning::Later(error.to_string()),
                (_, None) => Meaning::Later(asked_wrongly().to_string()),
            },
            Backend::AwsRole => aws_answer::assumed(status, body, now),
            Backend::OpenBaoLease | Backend::Local | Backend::File => {
                Meaning::Later(asked_wrongly().to_string())
            }
        }
    }

    /// What the answer to the question for the vault's own keys at AWS means.
    pub fn read_aws_login(&self, status: u16, body: &[u8], now: u64) -> Meaning {
        let login = self.0.aws.as_ref().and_then(|aws| aws.login.as_ref());
        match login {
            Some(AwsLogin::WebIdentity { .. }) => aws_answer::assumed(status, body, now),
            _ => aws_answer::host_keys(status, body, now),
        }
    }

    fn command(&self, secret: &SecretRef) -> Result<&crate::config::Command, VaultError> {
        self.0.commands.get(&secret.path).ok_or_else(|| {
            let name = &secret.path;
            VaultError::Unavailable(format!("proxyd.toml has no [commands.{name}]"))
        })
    }
}

fn entry(secret: &SecretRef) -> Result<Entry<'_>, VaultError> {
    Entry::parse(&secret.path).ok_or_else(asked_wrongly)
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
