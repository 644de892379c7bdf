//! proxyd's configuration: command line, then `proxyd.toml`, then the system's places.
//!
//! What the file says is the operator's alone; a file that others can write is refused. After
//! [`Config::load`] no field needs a further check.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Parser;
use ipc::layout::Layout;
use policies::Host;
use serde::Deserialize;

const DNS_PORT: u16 = 53;

/// The command line.
#[derive(Debug, Parser)]
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
    key: Option<String>,
    #[serde(default)]
    resolver: FileResolver,
    #[serde(default)]
    upstreams: BTreeMap<String, FileUpstream>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileResolver {
    /// Who is asked for names, instead of the host's own name servers.
    #[serde(default)]
    servers: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileUpstream {
    dial: Option<String>,
    ca: Option<PathBuf>,
}

/// What the upstream table says about one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamRow {
    /// Dial this instead of resolving the name. The rule's `addresses` still count.
    pub dial: Option<SocketAddr>,
    /// Trust this CA, and only this, for the name.
    pub ca: Option<PathBuf>,
}

/// The checked configuration.
#[derive(Debug)]
pub struct Config {
    pub layout: Layout,
    pub log: tracing::Level,
    pub trusted_uids: Vec<u32>,
    pub key: Option<String>,
    /// Name servers to ask; empty: those of the host.
    pub resolver: Vec<SocketAddr>,
    pub upstreams: HashMap<Host, UpstreamRow>,
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
    #[error("{path}: upstreams.{name:?}: {reason}")]
    Upstream { path: PathBuf, name: String, reason: String },
    #[error(
        "{path}: resolver.servers: {server:?} is no address, as in \"10.0.0.2\" or \"[::1]:53\""
    )]
    Resolver { path: PathBuf, server: String },
    #[error("log level {0:?}: use error, warn, info or debug")]
    Level(String),
}

impl Config {
    /// Puts command line, file and defaults together.
    pub fn load(arguments: &Arguments) -> Result<Self, ConfigError> {
        let system = Layout::system();
        let named = arguments.config.clone();
        let path = named.clone().unwrap_or_else(|| system.config.join("proxyd.toml"));
        let file = read(&path, named.is_some())?;
        let pick = |flag: &Option<PathBuf>, key: Option<PathBuf>, default: PathBuf| {
            flag.clone().or(key).unwrap_or(default)
        };
        let layout = Layout {
            runtime: pick(&arguments.runtime_dir, file.runtime_dir, system.runtime),
            state: pick(&arguments.state_dir, file.state_dir, system.state),
            policies: pick(&arguments.policies_dir, file.policies_dir, system.policies),
            config: system.config,
        };
        let level = arguments.log.clone().or(file.log).unwrap_or_else(|| "info".to_owned());
        Ok(Self {
            layout,
            log: level.parse().map_err(|_| ConfigError::Level(level))?,
            trusted_uids: file.trusted_uids,
            key: file.key,
            resolver: resolver(&path, file.resolver.servers)?,
            upstreams: upstreams(&path, file.upstreams)?,
        })
    }

    /// proxyd's own state directory.
    pub fn state(&self) -> PathBuf {
        self.layout.state.join("proxyd")
    }
}

/// Reads the file; the default one may be absent.
fn read(path: &Path, must_exist: bool) -> Result<File, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !must_exist => {
            return Ok(File::default());
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
    toml::from_str(&text).map_err(|error| ConfigError::Parse {
        path: path.to_owned(),
        reason: error.to_string().trim_end().to_owned(),
    })
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

fn upstreams(
    path: &Path,
    rows: BTreeMap<String, FileUpstream>,
) -> Result<HashMap<Host, UpstreamRow>, ConfigError> {
    let mut table = HashMap::new();
    for (name, row) in rows {
        let failed = |reason: String| ConfigError::Upstream {
            path: path.to_owned(),
            name: name.clone(),
            reason,
        };
        let host = Host::parse(&name).map_err(|error| failed(error.to_string()))?;
        let dial = match row.dial {
            Some(text) => Some(text.parse().map_err(|_| {
                failed(format!("dial = {text:?} is no address and port, as in \"127.0.0.1:443\""))
            })?),
            None => None,
        };
        if row.ca.as_ref().is_some_and(|ca| !ca.is_absolute()) {
            return Err(failed("ca must be an absolute path".to_owned()));
        }
        table.insert(host, UpstreamRow { dial, ca: row.ca });
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("proxyd.toml");
        std::fs::write(&path, text).unwrap();
        let arguments = Arguments::parse_from_rest(vec!["--config".into(), path.into()]);
        Config::load(&arguments.unwrap())
    }

    #[test]
    fn every_key_has_its_effect() {
        let config = load(
            "runtime-dir = \"/r\"\nstate-dir = \"/s\"\npolicies-dir = \"/p\"\nlog = \"debug\"\n\
             trusted-uids = [7]\nkey = \"file:/k\"\n\
             [resolver]\nservers = [\"10.0.0.2\", \"[::1]:5353\"]\n\
             [upstreams.\"Billing.Example\"]\ndial = \"127.0.0.1:8443\"\nca = \"/ca.pem\"\n",
        )
        .unwrap();

        assert_eq!(config.layout.runtime, Path::new("/r"));
        assert_eq!(config.state(), Path::new("/s/proxyd"));
        assert_eq!(config.layout.policies, Path::new("/p"));
        assert_eq!(config.log, tracing::Level::DEBUG);
        assert_eq!(config.trusted_uids, [7]);
        assert_eq!(config.key.as_deref(), Some("file:/k"));
        let servers = ["10.0.0.2:53", "[::1]:5353"].map(|text| text.parse().unwrap());
        assert_eq!(config.resolver, servers);
        let row = &config.upstreams[&Host::parse("billing.example").unwrap()];
        assert_eq!(row.dial, Some("127.0.0.1:8443".parse().unwrap()));
        assert_eq!(row.ca.as_deref(), Some(Path::new("/ca.pem")));
    }

    #[test]
    fn mistakes_name_the_key() {
        let table = [
            ("unknown-key = 1\n", "unknown-key"),
            ("[upstreams.\"a.test\"]\ndial = \"a:1\"\n", "dial"),
            ("[upstreams.\"a.test\"]\nca = \"ca.pem\"\n", "absolute"),
            ("[resolver]\nservers = [\"dns.test\"]\n", "dns.test"),
            ("log = \"loud\"\n", "loud"),
        ];
        for (text, word) in table {
            let error = load(text).unwrap_err().to_string();

            assert!(error.contains(word), "{text:?} gave {error}");
        }
    }

    #[test]
    fn a_file_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("proxyd.toml");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();

        let outcome = read(&path, true);

        assert!(matches!(outcome, Err(ConfigError::Writable { .. })));
    }
}
