//! `proxyd.toml`, the part about where secrets are had besides the embedded vault and files.
//!
//! Nothing of it can be said in a policy: a policy names a command, never what it runs. No value
//! stands here either, only names of secrets.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use policies::{Backend, SecretRef, is_secret_name};
use serde::{Deserialize, Serialize};

use super::aws::{Aws, FileAws};

/// How long a command may run, where the file does not say it.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Requests wait for it.
const COMMAND_TIMEOUT_MAX: Duration = Duration::from_secs(15);
/// How long a value serves before it is asked for again.
const REFRESH: Duration = Duration::from_secs(300);
/// How long a server's value serves beyond that while the server cannot be asked.
pub(super) const STALE: Duration = Duration::from_secs(300);
const REFRESH_MIN: Duration = Duration::from_secs(1);
/// What was revoked elsewhere must not serve for ever.
const SPAN_MAX: Duration = Duration::from_secs(24 * 3600);

/// `[commands.NAME]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct FileCommand {
    command: Vec<String>,
    format: Option<Format>,
    timeout: Option<String>,
    refresh: Option<String>,
    stale: Option<String>,
    input: Option<String>,
    user: Option<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    #[serde(default)]
    read: Vec<PathBuf>,
    #[serde(default)]
    write: Vec<PathBuf>,
}

/// `[openbao]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct FileOpenBao {
    url: String,
    namespace: Option<String>,
    #[serde(default)]
    mounts: Vec<String>,
    login: FileLogin,
    refresh: Option<String>,
    stale: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileLogin {
    method: Method,
    mount: Option<String>,
    role: Option<String>,
    secret: Option<String>,
}

/// Everything of the file that the vault asks others by, checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backends {
    pub commands: BTreeMap<String, Command>,
    pub openbao: Option<OpenBao>,
    pub aws: Option<Aws>,
}

/// An OpenBao or Vault server, and how the vault is known to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenBao {
    /// `https://…`, without a slash at its end.
    pub url: String,
    pub namespace: Option<String>,
    /// Mounts of more than one segment.
    pub mounts: Vec<String>,
    pub method: Method,
    /// Where the method is mounted.
    pub mount: String,
    /// The role's id (AppRole), the role, or the certificate's name.
    pub role: String,
    /// What is shown: the secret id, the JWT, the token.
    pub secret: Option<SecretRef>,
    pub freshness: Freshness,
}

/// How the vault logs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    Approle,
    Jwt,
    Token,
    /// By the client certificate of the server's row in `upstreams`.
    Cert,
}

impl FileOpenBao {
    fn check(self) -> Result<OpenBao, (&'static str, String)> {
        let url = self.url.trim_end_matches('/').to_owned();
        match policies::split_url(&url) {
            Ok((policies::Scheme::Https, _, _, path)) if path == "/" => {}
            Ok(_) => return Err(("url", "https://HOST or https://HOST:PORT".to_owned())),
            Err(why) => return Err(("url", why.to_string())),
        }
        let plain = |text: &String| {
            let legal = |b: u8| b.is_ascii_alphanumeric() || b"._~-/".contains(&b);
            let odd = |part: &str| part.is_empty() || part == "." || part == "..";
            text.bytes().all(legal) && !text.split('/').any(odd)
        };
        if !self.mounts.iter().all(plain) {
            return Err(("mounts", "a mount is named as in a path, \"kv/team\"".to_owned()));
        }
        let visible = |text: &String| text.bytes().all(|b| b.is_ascii_graphic());
        if !self.namespace.iter().all(visible) {
            return Err(("namespace", "visible characters only".to_owned()));
        }
        let FileLogin { method, mount, role, secret } = self.login;
        let (default, wants_role, wants_secret) = match method {
            Method::Approle => ("approle", true, true),
            Method::Jwt => ("jwt", true, true),
            Method::Token => ("token", false, true),
            Method::Cert => ("cert", true, false),
        };
        let mount = mount.unwrap_or_else(|| default.to_owned());
        if !plain(&mount) {
            return Err(("login.mount", "a mount is named as in a path".to_owned()));
        }
        if role.is_some() != wants_role {
            let reason = if wants_role { "the method needs one" } else { "the method has none" };
            return Err(("login.role", reason.to_owned()));
        }
        if secret.is_some() != wants_secret {
            let reason = match wants_secret {
                true => "the method needs one: \"local:NAME\" or \"file:PATH\"",
                false => "the method has none",
            };
            return Err(("login.secret", reason.to_owned()));
        }
        Ok(OpenBao {
            url,
            namespace: self.namespace,
            mounts: self.mounts,
            method,
            mount,
            role: role.unwrap_or_default(),
            secret: secret.map(|s| kept(&s)).transpose().map_err(|why| ("login.secret", why))?,
            freshness: freshness(self.refresh, self.stale, STALE)?,
        })
    }
}

/// How long a value serves: `refresh`, and beyond it while whoever keeps it cannot be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freshness {
    pub refresh: Duration,
    pub stale: Duration,
}

/// A command whose output is a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    pub program: Program,
    pub format: Format,
    pub timeout: Duration,
    pub freshness: Freshness,
    /// What it reads from its standard input.
    pub input: Option<SecretRef>,
}

/// What is run, and what it may touch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    pub argv: Vec<String>,
    /// All of its environment.
    pub environment: BTreeMap<String, String>,
    pub read: Vec<PathBuf>,
    pub write: Vec<PathBuf>,
    /// Whose process it is, where proxyd is root's.
    pub user: Option<Account>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
}

/// How a command's output is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// The value, and one line end that is cut off.
    #[default]
    Text,
    /// `{"value": "…", "expires_in": 300}`.
    Json,
    /// What the AWS tools call `credential_process`.
    AwsProcess,
}

impl Backends {
    /// From what the file says. The error is the key and the reason.
    pub(super) fn check(
        commands: BTreeMap<String, FileCommand>,
        openbao: Option<FileOpenBao>,
        aws: Option<FileAws>,
    ) -> Result<Self, (String, String)> {
        let mut checked = BTreeMap::new();
        for (name, command) in commands {
            let key = format!("commands.{name}");
            if !is_secret_name(&name) {
                let reason = "a command's name is made of letters, digits, \".\", \"_\", \"-\"";
                return Err((key, reason.to_owned()));
            }
            let command =
                command.check().map_err(|(word, reason)| (format!("{key}.{word}"), reason))?;
            checked.insert(name, command);
        }
        let openbao = openbao.map(FileOpenBao::check).transpose();
        let openbao = openbao.map_err(|(word, reason)| (format!("openbao.{word}"), reason))?;
        let aws = aws.map(FileAws::check).transpose();
        let aws = aws.map_err(|(word, reason)| (format!("aws.{word}"), reason))?;
        Ok(Self { commands: checked, openbao, aws })
    }

    /// Whether a secret of the embedded vault is for the vault's own questions.
    pub fn uses(&self, name: &str) -> bool {
        self.shown().any(|secret| secret.backend == Backend::Local && secret.path == name)
    }

    /// The secrets that are for the vault's own questions.
    pub fn shown(&self) -> impl Iterator<Item = &SecretRef> {
        let inputs = self.commands.values().filter_map(|command| command.input.as_ref());
        let login = self.openbao.iter().filter_map(|server| server.secret.as_ref());
        inputs.chain(login).chain(self.aws.iter().flat_map(Aws::shown))
    }
}

impl FileCommand {
    fn check(self) -> Result<Command, (&'static str, String)> {
        let program = self.command.first().filter(|program| program.starts_with('/'));
        let plain = |text: &String| !text.contains('\0');
        if program.is_none() || !self.command.iter().all(plain) {
            let reason = "a program by its absolute path, and its arguments: [\"/usr/bin/op\", \
                          \"read\", \"…\"]";
            return Err(("command", reason.to_owned()));
        }
        let bad = |name: &String| name.is_empty() || name.contains(['=', '\0']);
        if self.environment.iter().any(|(name, value)| bad(name) || !plain(value)) {
            return Err(("environment", "no variable has such a name or value".to_owned()));
        }
        for (key, paths) in [("read", &self.read), ("write", &self.write)] {
            if let Some(path) = paths.iter().find(|path| !path.is_absolute()) {
                return Err((key, format!("{} is no absolute path", path.display())));
            }
        }
        let timeout = match self.timeout {
            None => COMMAND_TIMEOUT,
            Some(text) => span(&text, Duration::from_secs(1), COMMAND_TIMEOUT_MAX)
                .map_err(|reason| ("timeout", reason))?,
        };
        Ok(Command {
            program: Program {
                argv: self.command,
                environment: self.environment,
                read: self.read,
                write: self.write,
                user: self.user.map(|name| account(&name)).transpose()?,
            },
            format: self.format.unwrap_or_default(),
            timeout,
            freshness: freshness(self.refresh, self.stale, Duration::ZERO)?,
            input: self.input.map(|text| kept(&text)).transpose().map_err(|why| ("input", why))?,
        })
    }
}

fn account(name: &str) -> Result<Account, (&'static str, String)> {
    if !rustix::process::geteuid().is_root() {
        let reason = "only a proxyd of root's can start a command as somebody else";
        return Err(("user", reason.to_owned()));
    }
    let found = crate::sys::accounts::named(name).map_err(|reason| ("user", reason))?;
    Ok(Account { uid: found.0, gid: found.1 })
}

/// A secret that the vault has without asking others.
pub(super) fn kept(text: &str) -> Result<SecretRef, String> {
    match SecretRef::parse(text) {
        Ok(secret) if !secret.is_remote() => Ok(secret),
        // What is no name may be a value: it is not repeated.
        _ => Err("the place of a secret: \"local:NAME\" or \"file:PATH\"".to_owned()),
    }
}

pub(super) fn freshness(
    refresh: Option<String>,
    stale: Option<String>,
    stale_default: Duration,
) -> Result<Freshness, (&'static str, String)> {
    let read = |key, text: Option<String>, least, default| match text {
        None => Ok(default),
        Some(text) => span(&text, least, SPAN_MAX).map_err(|reason| (key, reason)),
    };
    Ok(Freshness {
        refresh: read("refresh", refresh, REFRESH_MIN, REFRESH)?,
        stale: read("stale", stale, Duration::ZERO, stale_default)?,
    })
}

pub(super) fn span(text: &str, least: Duration, most: Duration) -> Result<Duration, String> {
    let time = policies::time_span(text)?;
    match (least..=most).contains(&time) {
        true => Ok(time),
        false => {
            Err(format!("{text}: {} s at least, {} s at most", least.as_secs_f32(), most.as_secs()))
        }
    }
}
