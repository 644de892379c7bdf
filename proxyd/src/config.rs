//! proxyd's configuration: command line, then `proxyd.toml`, then the system's places.
//!
//! What the file says is the operator's alone; a file that others can write is refused. After
//! [`Config::load`] no field needs a further check. proxyd(8) describes every key.

mod aws;
mod backends;
mod idle;
mod retention;
mod way_out;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Parser;
use ipc::layout::Layout;
use serde::Deserialize;

use aws::FileAws;
pub use aws::{Assumed, Aws, AwsLogin, AwsRole, By, is_instance_role};
pub use backends::{Backends, Command, Format, Freshness, Method, OpenBao, Program};
use backends::{FileCommand, FileOpenBao};
pub use idle::Idle;
pub use way_out::{
    Exempt, Identity, Login, PasswordPlace, Protocols, ProxyRow, Resolve, Through, UpstreamRow,
    WayOut,
};
use way_out::{FileProxy, FileUpstream};

use crate::audit::Retention;

const DNS_PORT: u16 = 53;

/// The variable by which systemd says where a service's credentials lie (systemd.exec(5)). It names
/// a place and holds nothing secret.
pub const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// Where systemd has put this service's credentials.
pub fn credentials() -> Option<PathBuf> {
    std::env::var_os(CREDENTIALS).map(PathBuf::from)
}

/// The command line.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "proxyd",
    version,
    about = "The only way out of Cleanhands sandboxes, and the keeper of credentials"
)]
pub struct Arguments {
    /// Configuration file [default: /etc/cleanhands/proxyd.toml, if there is one]
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,
    /// Check configuration and policies, report every mistake, and end
    #[arg(long)]
    pub check: bool,
    /// Directory of the sockets
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Directory of the state; proxyd's lies in DIR/proxyd
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Directory of the policy files
    #[arg(long, value_name = "DIR")]
    pub policies_dir: Option<PathBuf>,
    /// What to log: error, warn, info, debug
    #[arg(long, value_name = "LEVEL")]
    pub log: Option<String>,
}

impl Arguments {
    /// Parses the arguments after the program's name.
    pub fn parse_from_rest(args: Vec<OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(std::iter::once(OsString::from("proxyd")).chain(args))
    }
}

/// `proxyd.toml` as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    runtime_dir: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    policies_dir: Option<PathBuf>,
    log: Option<String>,
    /// Other uids whose statements about owners count: those of sandboxd and harnessd.
    #[serde(default)]
    trusted_uids: Vec<u32>,
    /// The same by name.
    #[serde(default)]
    trusted_users: Vec<ipc::account::NamedUser>,
    key: Option<String>,
    /// The one that the vault may still be closed with.
    former_key: Option<String>,
    /// Where files that hold secrets may lie.
    #[serde(default)]
    secret_directories: Vec<PathBuf>,
    /// Commands whose output is a secret.
    #[serde(default)]
    commands: BTreeMap<String, FileCommand>,
    openbao: Option<FileOpenBao>,
    aws: Option<FileAws>,
    idle_timeout: Option<String>,
    tunnel_idle_timeout: Option<String>,
    audit_keep: Option<String>,
    audit_bytes: Option<String>,
    #[serde(default)]
    resolver: FileResolver,
    /// Addresses besides loopback at which a lease's holder may listen for its clients.
    #[serde(default)]
    lease_addresses: Vec<IpAddr>,
    trust_store: Option<PathBuf>,
    #[serde(default)]
    upstreams: BTreeMap<String, FileUpstream>,
    upstream_proxy: Option<FileProxy>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileResolver {
    /// Who is asked for names, instead of the host's own name servers.
    #[serde(default)]
    servers: Vec<String>,
}

/// The checked configuration.
#[derive(Debug)]
pub struct Config {
    pub layout: Layout,
    pub log: tracing::Level,
    pub trusted_uids: Vec<u32>,
    pub key: Option<String>,
    /// The key that the vault may still be closed with.
    pub former_key: Option<String>,
    /// Where files that hold secrets may lie.
    pub secret_directories: Vec<PathBuf>,
    /// Who else has secrets.
    pub backends: Backends,
    /// Name servers to ask; empty: those of the host.
    pub resolver: Vec<SocketAddr>,
    pub lease_addresses: Vec<IpAddr>,
    pub idle: Idle,
    pub retention: Retention,
    pub way_out: WayOut,
    /// Where the file lies, or would.
    pub path: PathBuf,
    /// Of its text as far as that is in force; none where there is no file.
    pub sha256: Option<String>,
    arguments: Arguments,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} can be written by others (mode {mode:03o}, uid {uid})")]
    Writable { path: PathBuf, mode: u32, uid: u32 },
    #[error("{path}: {reason}")]
    Parse { path: PathBuf, reason: String },
    #[error("{path}: {key}: {reason}")]
    Key { path: PathBuf, key: String, reason: String },
    #[error(
        "{path}: resolver.servers: {server:?} is no address, as in \"10.0.0.2\" or \"[::1]:53\""
    )]
    Resolver { path: PathBuf, server: String },
    #[error(transparent)]
    Layout(#[from] ipc::layout::NotUtf8),
    #[error("log level {0:?}: use error, warn, info or debug")]
    Level(String),
}

impl Config {
    /// Puts command line, file and defaults together.
    pub fn load(arguments: &Arguments) -> Result<Self, ConfigError> {
        let system = Layout::system();
        let named = arguments.config.clone();
        let path = named.clone().unwrap_or_else(|| system.config.join("proxyd.toml"));
        let (file, sha256) = read(&path, named.is_some())?;
        let pick = |flag: &Option<PathBuf>, key: Option<PathBuf>, default: PathBuf| {
            flag.clone().or(key).unwrap_or(default)
        };
        let layout = Layout {
            runtime: pick(&arguments.runtime_dir, file.runtime_dir, system.runtime),
            state: pick(&arguments.state_dir, file.state_dir, system.state),
            policies: pick(&arguments.policies_dir, file.policies_dir, system.policies),
            config: system.config,
        };
        layout.check()?;
        let level = arguments.log.clone().or(file.log).unwrap_or_else(|| "info".to_owned());
        Ok(Self {
            layout,
            log: level.parse().map_err(|_| ConfigError::Level(level))?,
            trusted_uids: (file.trusted_uids.into_iter())
                .chain(file.trusted_users.iter().map(|user| user.uid))
                .collect(),
            key: file.key,
            former_key: file.former_key,
            secret_directories: absolute(&path, file.secret_directories)?,
            backends: Backends::check(file.commands, file.openbao, file.aws)
                .map_err(|(key, reason)| ConfigError::Key { path: path.clone(), key, reason })?,
            resolver: resolver(&path, file.resolver.servers)?,
            lease_addresses: file.lease_addresses,
            idle: Idle::check(file.idle_timeout.as_deref(), file.tunnel_idle_timeout.as_deref())
                .map_err(|(key, reason)| ConfigError::Key { path: path.clone(), key, reason })?,
            retention: retention::check(file.audit_keep.as_deref(), file.audit_bytes.as_deref())
                .map_err(|(key, reason)| ConfigError::Key { path: path.clone(), key, reason })?,
            way_out: WayOut::check(file.trust_store, file.upstreams, file.upstream_proxy)
                .map_err(|(key, reason)| ConfigError::Key { path: path.clone(), key, reason })?,
            path: std::path::absolute(&path).unwrap_or(path),
            sha256,
            arguments: arguments.clone(),
        })
    }

    /// The command line that leads to the same configuration.
    pub fn command_line(&self) -> Vec<OsString> {
        let given = &self.arguments;
        let flags = [
            ("--config", &given.config),
            ("--runtime-dir", &given.runtime_dir),
            ("--state-dir", &given.state_dir),
            ("--policies-dir", &given.policies_dir),
        ];
        let set = flags.iter().filter_map(|(flag, path)| Some((*flag, path.as_ref()?)));
        set.flat_map(|(flag, path)| [OsString::from(flag), path.clone().into_os_string()]).collect()
    }

    /// Reads the same file again.
    pub fn again(&self) -> Result<Self, ConfigError> {
        Self::load(&self.arguments)
    }

    /// The keys that differ and that only a new start puts in force.
    pub fn fixed_differences(&self, next: &Self) -> Vec<&'static str> {
        let differs = [
            ("runtime-dir", self.layout.runtime != next.layout.runtime),
            ("state-dir", self.layout.state != next.layout.state),
            ("policies-dir", self.layout.policies != next.layout.policies),
            ("log", self.log != next.log),
            ("trusted-uids", self.trusted_uids != next.trusted_uids),
            ("key", self.key != next.key),
            ("former-key", self.former_key != next.former_key),
            ("secret-directories", self.secret_directories != next.secret_directories),
            ("commands", self.backends.commands != next.backends.commands),
            ("openbao", self.backends.openbao != next.backends.openbao),
            ("aws", self.backends.aws != next.backends.aws),
            ("resolver", self.resolver != next.resolver),
            ("idle-timeout", self.idle.exchange != next.idle.exchange),
            ("tunnel-idle-timeout", self.idle.tunnel != next.idle.tunnel),
        ];
        differs.iter().filter(|(_, differs)| *differs).map(|(key, _)| *key).collect()
    }

    /// proxyd's own state directory.
    pub fn state(&self) -> PathBuf {
        self.layout.state.join("proxyd")
    }
}

/// Reads the file, and gives the digest of its text too; the default one may be absent.
fn read(path: &Path, must_exist: bool) -> Result<(File, Option<String>), ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !must_exist => {
            return Ok((File::default(), None));
        }
        Err(error) => return Err(failed(error)),
    };
    let meta = std::fs::metadata(path).map_err(failed)?;
    let own = [0, rustix::process::geteuid().as_raw()].contains(&meta.uid());
    // Whoever writes this file decides whom credentials are sent to.
    if !own || meta.mode() & 0o022 != 0 {
        return Err(ConfigError::Writable {
            path: path.to_owned(),
            mode: meta.mode() & 0o777,
            uid: meta.uid(),
        });
    }
    let file = toml::from_str(&text).map_err(|error| ConfigError::Parse {
        path: path.to_owned(),
        reason: error.to_string().trim_end().to_owned(),
    })?;
    Ok((file, Some(ipc::in_force::sha256(&text))))
}

/// Directories by their whole paths.
fn absolute(path: &Path, directories: Vec<PathBuf>) -> Result<Vec<PathBuf>, ConfigError> {
    match directories.iter().find(|directory| !directory.is_absolute()) {
        None => Ok(directories),
        Some(directory) => Err(ConfigError::Key {
            path: path.to_owned(),
            key: "secret-directories".to_owned(),
            reason: format!("{} is no absolute path", directory.display()),
        }),
    }
}

/// Addresses with or without a port.
fn resolver(path: &Path, servers: Vec<String>) -> Result<Vec<SocketAddr>, ConfigError> {
    let parse = |server: String| {
        let whole = server.parse().ok();
        let bare = || server.parse().ok().map(|ip| SocketAddr::new(ip, DNS_PORT));
        whole
            .or_else(bare)
            .filter(|address| address.port() != 0)
            .ok_or_else(|| ConfigError::Resolver { path: path.to_owned(), server })
    };
    servers.into_iter().map(parse).collect()
}

#[cfg(test)]
mod tests;
