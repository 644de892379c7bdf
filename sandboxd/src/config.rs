//! `sandboxd.toml` and the flags: where things lie and who is trusted, checked once.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Parser;
use ipc::layout::Layout;
use serde::Deserialize;

/// First uid that sandboxes get when this daemon may give out uids: beyond all that systemd lists
/// as taken (its document "Users, Groups, UIDs and GIDs"), below the sign bit.
const UID_FIRST: u32 = 1_879_048_192;
/// How many: more sandboxes than one host will run at once.
const UID_COUNT: u32 = 65_536;
/// Sandboxes that may live at once: each takes half a megabyte while idle and a dozen descriptors.
const SANDBOXES_MAX: usize = 1_000;
/// Half-made sandboxes that are kept for each environment in use: for a session and a few commands
/// that begin at once. Each takes what an idle sandbox takes.
const CELLS_READY: usize = 3;
/// Unpacked images and layers of packages: a few large images and what is installed over them.
const TEMPLATES_BYTES: u64 = 20 << 30;
/// More would only be memory.
const CELLS_READY_MAX: usize = 64;

#[derive(Parser, Debug)]
#[command(name = "sandboxd", version, about = "Disposable sandboxes for commands a model wrote")]
struct Flags {
    /// Configuration file [default: /etc/cleanhands/sandboxd.toml, if it is there]
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,
    /// Check the configuration and the policies, report all errors, and exit
    #[arg(long)]
    check: bool,
    /// Directory of the sockets
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Directory of the state; sandboxd uses `sandboxd` below it
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Directory of the policy files
    #[arg(long, value_name = "DIR")]
    policies_dir: Option<PathBuf>,
    /// Directory of the configuration: no workspace may be there [default: that of --config]
    #[arg(long, value_name = "DIR")]
    config_dir: Option<PathBuf>,
    /// What to log: error, warn, info, debug
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Raw {
    runtime_dir: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    policies_dir: Option<PathBuf>,
    log: Option<String>,
    trusted_uids: BTreeSet<u32>,
    /// The same by name.
    trusted_users: Vec<ipc::account::NamedUser>,
    uid_range: Option<UidRange>,
    sandboxes_max: Option<usize>,
    cells_ready: Option<usize>,
    templates_bytes: Option<u64>,
}

/// The uids, and gids alike, that sandboxes get where sandboxd may give out any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UidRange {
    pub first: u32,
    pub count: u32,
}

/// What was configured, with nothing left to check.
#[derive(Debug)]
pub struct Config {
    pub check: bool,
    pub layout: Layout,
    /// The file and the digest of its text as it was read.
    pub path: PathBuf,
    pub sha256: Option<String>,
    pub log: tracing::level_filters::LevelFilter,
    /// Besides root and this daemon's own: who may speak for any owner. harnessd's uid.
    pub trusted_uids: BTreeSet<u32>,
    pub uid_range: UidRange,
    pub sandboxes_max: usize,
    /// Half-made sandboxes kept for each environment in use; 0: none.
    pub cells_ready: usize,
    /// All templates together; beyond that the longest unused go.
    pub templates_bytes: u64,
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Wrong arguments, or a text that was asked for; clap knows how to show either.
    #[error("{0}")]
    Usage(clap::Error),
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} can be written by others (mode {mode:03o}): whoever writes it rules sandboxd")]
    Writable { path: PathBuf, mode: u32 },
    #[error("{path}: {source}")]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
    #[error(transparent)]
    Layout(#[from] ipc::layout::NotUtf8),
    #[error("{what}: {why}")]
    Value { what: &'static str, why: String },
}

impl Config {
    /// Reads flags and file; a flag wins over the file.
    pub fn load(args: Vec<OsString>) -> Result<Self, ConfigError> {
        let program = OsString::from("sandboxd");
        let flags = Flags::try_parse_from(std::iter::once(program).chain(args))
            .map_err(ConfigError::Usage)?;
        let raw = match &flags.config {
            Some(path) => Some(read(path)?.ok_or_else(|| ConfigError::Read {
                path: path.clone(),
                source: std::io::Error::from(rustix::io::Errno::NOENT),
            })?),
            None => read(&Layout::system().config.join("sandboxd.toml"))?,
        };
        let (raw, sha256) = raw.unzip();
        check(flags, raw.unwrap_or_default(), sha256)
    }

    /// The directories that no sandbox may be given.
    pub fn apart(&self) -> Vec<PathBuf> {
        let Layout { runtime, state, policies, config } = self.layout.clone();
        vec![runtime, state, policies, config]
    }

    /// Where sandboxd's own state lies.
    pub fn state(&self) -> PathBuf {
        self.layout.state.join("sandboxd")
    }
}

/// The file and the digest of its text; none where there is none.
fn read(path: &Path) -> Result<Option<(Raw, String)>, ConfigError> {
    let fail = |source| ConfigError::Read { path: path.to_owned(), source };
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(e)),
    };
    if meta.mode() & 0o022 != 0 {
        return Err(ConfigError::Writable { path: path.to_owned(), mode: meta.mode() & 0o777 });
    }
    let text = std::fs::read_to_string(path).map_err(fail)?;
    let parsed = toml::from_str(&text);
    let raw =
        parsed.map_err(|e| ConfigError::Parse { path: path.to_owned(), source: Box::new(e) })?;
    Ok(Some((raw, ipc::in_force::sha256(&text))))
}

fn check(flags: Flags, raw: Raw, sha256: Option<String>) -> Result<Config, ConfigError> {
    let system = Layout::system();
    let pick = |flag: Option<PathBuf>, file: Option<PathBuf>, default: PathBuf| {
        std::path::absolute(flag.or(file).unwrap_or(default))
            .map_err(|e| ConfigError::Value { what: "a directory", why: e.to_string() })
    };
    let layout = Layout {
        runtime: pick(flags.runtime_dir, raw.runtime_dir, system.runtime)?,
        state: pick(flags.state_dir, raw.state_dir, system.state)?,
        policies: pick(flags.policies_dir, raw.policies_dir, system.policies)?,
        config: pick(
            flags.config_dir,
            flags.config.as_deref().and_then(Path::parent).map(Path::to_owned),
            system.config,
        )?,
    };
    layout.check()?;
    let log = flags.log.or(raw.log).unwrap_or_else(|| "info".into());
    let log = log.parse().map_err(|_| ConfigError::Value {
        what: "log",
        why: format!("{log:?} is none of error, warn, info, debug, trace, off"),
    })?;
    let uid_range = raw.uid_range.unwrap_or(UidRange { first: UID_FIRST, count: UID_COUNT });
    // Below are people and services; 65534 and 65535 stand for nobody and for no id at all.
    let legal = uid_range.first > 65_535
        && uid_range.count > 0
        && uid_range.first.checked_add(uid_range.count).is_some_and(|end| end < u32::MAX);
    if !legal {
        let why = format!("{} and {} more is not a free range", uid_range.first, uid_range.count);
        return Err(ConfigError::Value { what: "uid-range", why });
    }
    let sandboxes_max = raw.sandboxes_max.unwrap_or(SANDBOXES_MAX);
    if sandboxes_max == 0 || sandboxes_max > UID_COUNT as usize {
        let why = format!("{sandboxes_max} is not between 1 and {UID_COUNT}");
        return Err(ConfigError::Value { what: "sandboxes-max", why });
    }
    let cells_ready = raw.cells_ready.unwrap_or(CELLS_READY);
    if cells_ready > CELLS_READY_MAX {
        let why = format!("{cells_ready} is more than {CELLS_READY_MAX}");
        return Err(ConfigError::Value { what: "cells-ready", why });
    }
    let path = flags.config.unwrap_or_else(|| Layout::system().config.join("sandboxd.toml"));
    Ok(Config {
        check: flags.check,
        layout,
        path: std::path::absolute(&path).unwrap_or(path),
        sha256,
        log,
        trusted_uids: (raw.trusted_uids.into_iter())
            .chain(raw.trusted_users.iter().map(|user| user.uid))
            .collect(),
        uid_range,
        sandboxes_max,
        cells_ready,
        templates_bytes: raw.templates_bytes.unwrap_or(TEMPLATES_BYTES),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, flags: &[&str]) -> Result<Config, ConfigError> {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sandboxd.toml");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let mut args: Vec<OsString> = vec!["--config".into(), path.into()];
        args.extend(flags.iter().map(OsString::from));
        Config::load(args)
    }

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let text = "state-dir = \"/file\"\nruntime-dir = \"/file\"\n\
            trusted-uids = [7]\ntrusted-users = [\"root\"]\n";
        let config = load(text, &["--state-dir", "/flag"]).unwrap();

        assert_eq!(config.state(), Path::new("/flag/sandboxd"));
        assert_eq!(config.layout.runtime, Path::new("/file"));
        assert_eq!(config.layout.policies, Layout::system().policies);
        assert_eq!(config.trusted_uids, BTreeSet::from([0, 7]));
    }

    #[test]
    fn what_is_not_as_documented_is_refused() {
        for text in [
            "no-such-key = 1",
            "trusted-uids = [-1]",
            "trusted-users = [\"no-such-user-here\"]",
            "log = \"loud\"",
            "sandboxes-max = 0",
            "uid-range = { first = 0, count = 10 }",
            "uid-range = { first = 100000, count = 0 }",
            "uid-range = { first = 4294967290, count = 10 }",
        ] {
            assert!(load(text, &[]).is_err(), "{text}");
        }
        assert!(matches!(load("", &["stray"]), Err(ConfigError::Usage(_))));
        assert!(load("uid-range = { first = 100000, count = 10 }", &[]).is_ok());
    }

    #[test]
    fn a_file_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sandboxd.toml");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();

        let outcome = Config::load(vec!["--config".into(), path.into()]);

        assert!(matches!(outcome, Err(ConfigError::Writable { .. })));
    }
}
