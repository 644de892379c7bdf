//! A credential as a policy names it: where its secret lies and where it may go, never its value.

use core::fmt;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::aws::AwsEntry;
use crate::host::Host;
use crate::pattern::HostPattern;

/// A named credential of one environment.
#[derive(Debug)]
pub struct Credential {
    /// The environment that defines it; none for what proxyd itself shows to an upstream proxy.
    pub environment: Option<String>,
    pub name: String,
    pub secret: SecretRef,
    /// What is had for the secret before anything is put in; none: the secret itself.
    pub grant: Option<Grant>,
    pub inject: Inject,
    pub when: When,
    /// The hosts it may go to, whatever a rule says: the second, independent check.
    pub hosts: Vec<HostPattern>,
    /// The variables under which the sandbox sees placeholders.
    pub env: Vec<String>,
    /// What its placeholders look like, where the variables' names do not say it.
    pub shape: Option<String>,
    /// Whether it may go over plain HTTP.
    pub allow_plaintext: bool,
}

/// Where a secret's value lies: `local:github`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SecretRef {
    pub backend: Backend,
    pub path: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// The embedded vault of proxyd.
    Local,
    /// A file that others keep up to date; the path is absolute.
    File,
    /// A command of the operator's, by its name in proxyd's configuration.
    Exec,
    /// A field of a secret at the OpenBao or Vault server of proxyd's configuration.
    OpenBao,
    /// Fields of a secret that this server makes for one lease of proxyd's, and ends with it.
    OpenBaoLease,
    /// A secret at AWS Secrets Manager.
    AwsSecrets,
    /// The keys of a role of AWS's, by its name in proxyd's configuration.
    AwsRole,
}

/// Longest path of a secret that is no name.
pub(crate) const PATH_BYTES_MAX: usize = 1024;

impl SecretRef {
    /// Reads `backend:path`. The error says what is wrong and what to write instead.
    pub fn parse(text: &str) -> Result<Self, (String, String)> {
        let Some((backend, path)) = text.split_once(':') else {
            let hint = "secret = \"local:NAME\" names a secret; its value is set with \
                        `cleanhands secret set NAME`";
            return Err(("a secret is named as \"backend:path\"".to_owned(), hint.to_owned()));
        };
        let (backend, sound, message, hint) = match backend {
            "local" => (
                Backend::Local,
                is_secret_name(path),
                "a secret's name is made of letters, digits, \".\", \"_\", \"-\"",
                "secret = \"local:NAME\"",
            ),
            "file" => (
                Backend::File,
                is_file(path),
                "a file is named by its absolute path",
                "secret = \"file:/run/secrets/token\"",
            ),
            "exec" => (
                Backend::Exec,
                is_secret_name(path),
                "a command is named as in [commands.NAME] of proxyd.toml",
                "secret = \"exec:NAME\"",
            ),
            "openbao" | "vault" => (
                Backend::OpenBao,
                Entry::parse(path).is_some(),
                "a secret of the server is named by its mount, path and field",
                "secret = \"openbao:secret/agents/github#token\", with a version as \
                 \"openbao:secret/agents/github@3#token\"",
            ),
            "openbao-lease" | "vault-lease" => (
                Backend::OpenBaoLease,
                Made::parse(path).is_some(),
                "what the server makes is named by its path, parameters where it takes some, and \
                 fields",
                "secret = \"openbao-lease:database/creds/agents#password\", with parameters as \
                 \"openbao-lease:pki/issue/agents?common_name=a.example#private_key\"",
            ),
            "aws-secrets-manager" => (
                Backend::AwsSecrets,
                AwsEntry::parse(path).is_some(),
                "a secret at AWS is named by its name or ARN, and a field of its JSON",
                "secret = \"aws-secrets-manager:agents/github#token\", with a version as \
                 \"aws-secrets-manager:agents/github?stage=AWSPREVIOUS#token\"",
            ),
            "aws-role" => (
                Backend::AwsRole,
                is_secret_name(path),
                "a role is named as in [aws.roles.NAME] of proxyd.toml",
                "secret = \"aws-role:NAME\"",
            ),
            _ => {
                let message = "unknown backend of secrets".to_owned();
                return Err((message, format!("supported: {BACKENDS}")));
            }
        };
        match sound {
            true => Ok(Self { backend, path: path.to_owned() }),
            false => Err((message.to_owned(), hint.to_owned())),
        }
    }

    /// Whether somebody else has to be asked for the value.
    pub fn is_remote(&self) -> bool {
        !matches!(self.backend, Backend::Local | Backend::File)
    }
}

/// Where a value is at an OpenBao server: `secret/agents/github@3#token`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Mount and path, at least two segments.
    pub path: &'a str,
    /// The newest one where none is named.
    pub version: Option<u32>,
    pub field: &'a str,
}

impl<'a> Entry<'a> {
    pub fn parse(text: &'a str) -> Option<Self> {
        let (place, field) = text.split_once('#')?;
        let (path, version) = match place.split_once('@') {
            Some((path, version)) => {
                let digits = version.bytes().all(|b| b.is_ascii_digit());
                let version = version.parse().ok().filter(|version| *version > 0 && digits)?;
                (path, Some(version))
            }
            None => (place, None),
        };
        let segments = path.split('/').all(is_plain) && path.contains('/');
        let sound = segments && is_plain(field) && text.len() <= PATH_BYTES_MAX;
        sound.then_some(Self { path, version, field })
    }
}

/// Nothing that a server, or whatever stands before it, could read as another path.
fn is_plain(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"._~+=-".contains(&b);
    !text.is_empty() && text != "." && text != ".." && text.bytes().all(legal)
}

/// What an OpenBao server makes: `pki/issue/agents?common_name=a.example#private_key`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made<'a> {
    /// Mount and path, at least two segments.
    pub path: &'a str,
    /// Sent along; read without any.
    pub parameters: Vec<(&'a str, &'a str)>,
    /// Those that make the value, which has colons between them.
    pub fields: Vec<&'a str>,
}

impl<'a> Made<'a> {
    pub fn parse(text: &'a str) -> Option<Self> {
        let (place, fields) = text.split_once('#')?;
        let (path, parameters) = match place.split_once('?') {
            None => (place, Vec::new()),
            Some((path, given)) => {
                let pair = |pair: &'a str| {
                    let (name, value) = pair.split_once('=')?;
                    let legal = |b: u8| b.is_ascii_graphic() && !b"#?\"\\".contains(&b);
                    let sound = is_plain(name) && !value.is_empty() && value.bytes().all(legal);
                    sound.then_some((name, value))
                };
                (path, given.split('&').map(pair).collect::<Option<_>>()?)
            }
        };
        let fields: Vec<&str> = fields.split(':').collect();
        let segments = path.split('/').all(is_plain) && path.contains('/');
        let sound = segments && fields.iter().all(|field| is_plain(field));
        (sound && text.len() <= PATH_BYTES_MAX).then_some(Self { path, parameters, fields })
    }
}

const BACKENDS: &str = "local, file, exec, openbao, openbao-lease, aws-secrets-manager, aws-role";

/// A secret's name in the embedded vault, or a command's.
pub fn is_secret_name(path: &str) -> bool {
    path.len() <= 128
        && path.starts_with(|c: char| c.is_ascii_alphanumeric())
        && path.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

fn is_file(path: &str) -> bool {
    let whole = path.starts_with('/') && path.len() <= PATH_BYTES_MAX;
    whole && !path.contains(char::is_control) && !path.split('/').any(|part| part == "..")
}

/// How a credential is put into a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inject {
    /// `Authorization: Bearer VALUE`.
    Bearer,
    /// `Authorization: Basic base64(USER:VALUE)`; without a user the value holds both,
    /// `USER:PASSWORD`.
    Basic { user: Option<String> },
    /// What an image registry takes: a token of the server that it names, had with the user and
    /// the value; `Basic` where it names none.
    Registry { user: String },
    /// A header of its own; `{}` in the template stands for the value. The name is lower case.
    Header { name: String, template: String },
    /// A parameter of the query.
    Query { name: String },
    /// Replaces the placeholder wherever it stands in the places listed.
    Placeholder { places: Vec<Place> },
    /// Signs requests again that were signed with placeholders; both lists bound the scope.
    AwsSigV4 { regions: Vec<String>, services: Vec<String> },
    /// Nothing is put in: the connection is opened with this certificate.
    ClientCertificate,
}

/// When a credential takes the place of what the sandbox sent in its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum When {
    /// In every request.
    #[default]
    Always,
    /// Where the sandbox sent no key of its own.
    Absent,
    /// Where the sandbox sent the placeholder.
    Placeholder,
}

/// Where a placeholder is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In any header's value.
    Header,
    /// Inside the base64 of `Authorization: Basic`.
    Basic,
    Path,
    Query,
    /// In a body of known form, held back until it is whole.
    Body,
}

/// What is asked of a server that gives access tokens for the secret. Part of a question to the
/// vault, which is why it can be written down; it names no value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    pub kind: GrantKind,
    /// Where the tokens are to be had: `https://…`.
    pub url: String,
    pub client: Option<Client>,
    /// Further parameters of the request: `scope`, `resource`, `audience`.
    pub parameters: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum GrantKind {
    /// RFC 6749, section 6: the secret is the refresh token.
    RefreshToken,
    /// RFC 6749, section 4.4: the secret is the client's.
    ClientCredentials,
    /// RFC 7523: the secret is the key that signs assertions.
    JwtBearer { issuer: String, subject: Option<String>, audience: String, key_id: Option<String> },
    /// The secret is the user's password; the URL is the registry's `/v2/`, the hosts are patterns
    /// of those that may be shown it. Made for a request, by the vault.
    Registry { user: String, hosts: Vec<String> },
    /// The secret is the app's key; the URL is that of the installation's tokens.
    GithubApp { app: String, repositories: Vec<String>, permissions: BTreeMap<String, String> },
}

/// Who asks for tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Client {
    pub id: String,
    /// Name of its secret in the vault, where that is not the credential's own.
    pub secret: Option<String>,
    pub auth: ClientAuth,
}

/// How a client shows its secret (RFC 6749, section 2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClientAuth {
    Basic,
    Post,
    None,
}

impl Credential {
    /// Whether it is shown when the connection is opened, rather than put into requests.
    pub fn is_certificate(&self) -> bool {
        self.inject == Inject::ClientCertificate
    }

    /// Whether another value may be had from others where an upstream refuses this one.
    pub fn is_replaceable(&self) -> bool {
        let registry = matches!(self.inject, Inject::Registry { .. });
        self.grant.is_some() || registry || self.secret.is_remote()
    }

    /// Whether this credential's own list lets it go to the host.
    pub fn may_go_to(&self, host: &Host) -> bool {
        self.hosts.iter().any(|pattern| pattern.matches(host))
    }
}

impl fmt::Display for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.backend {
            Backend::Local => write!(f, "local:{}", self.path),
            Backend::File => write!(f, "file:{}", self.path),
            Backend::Exec => write!(f, "exec:{}", self.path),
            Backend::OpenBao => write!(f, "openbao:{}", self.path),
            Backend::OpenBaoLease => write!(f, "openbao-lease:{}", self.path),
            Backend::AwsSecrets => write!(f, "aws-secrets-manager:{}", self.path),
            Backend::AwsRole => write!(f, "aws-role:{}", self.path),
        }
    }
}
