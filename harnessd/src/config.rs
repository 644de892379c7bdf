//! `harnessd.toml` and the command line, as values that need no further checks.
//!
//! Every key is optional and in kebab-case; an unknown one is an error. The file must not be
//! writable by others, and holds no secret.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Uri;
use ipc::layout::Layout;
use serde::Deserialize;

use crate::context::Profile;
use crate::model::Price;
use crate::sys;

/// Tokens an answer may have where the configuration does not say.
const MAX_TOKENS: u32 = 8192;

/// A stream that is silent for so long has stalled. Servers send pings far more often; a local
/// model that reads a long prompt may not.
const STALL: Duration = Duration::from_secs(300);

/// The file is a handful of lines.
const CONFIG_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Levels of the log, the most silent first.
const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

/// Why harnessd cannot be configured so.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "{path} can be written by others (mode {mode:03o})\nmake it writable by its owner only"
    )]
    Writable { path: PathBuf, mode: u32 },
    #[error(transparent)]
    Layout(#[from] ipc::layout::NotUtf8),
    #[error("{path}: {why}")]
    Malformed { path: PathBuf, why: String },
    #[error("log level {level:?} is unknown: there are {}", LEVELS.join(", "))]
    Level { level: String },
    #[error("{path}: model {name:?}: {why}")]
    Model { path: PathBuf, name: String, why: String },
}

/// What harnessd needs to know to start.
#[derive(Debug)]
pub struct Config {
    pub layout: Layout,
    /// The file and the digest of its text as it was read.
    pub path: PathBuf,
    pub sha256: Option<String>,
    /// Level of the log on standard error: `error`, `warn`, `info`, `debug`, `trace`.
    pub log: String,
    /// Policy of API environments that name none.
    pub default_environment: String,
    /// By the names agents use; `*` stands for all others.
    pub models: BTreeMap<String, ModelConfig>,
    /// Hashed keys of the loopback port.
    pub keys_file: Option<PathBuf>,
    /// A listening TCP socket on a loopback address, passed by the starter.
    pub loopback: Option<RawFd>,
}

/// One row of the table of models.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub provider: Provider,
    /// The provider's name of the model; none: the name the agent uses.
    pub model: Option<String>,
    pub max_tokens: u32,
    /// How long its stream may be silent.
    pub stall: Duration,
    /// What it is shown of a session that says nothing else.
    pub context: Profile,
    /// What its tokens cost; without one a session with a budget cannot use it.
    pub price: Option<Price>,
}

impl ModelConfig {
    /// A model with everything else as it is by default.
    pub fn new(provider: Provider) -> Self {
        Self {
            provider,
            model: None,
            max_tokens: MAX_TOKENS,
            stall: STALL,
            context: Profile::WholeLog,
            price: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Provider {
    /// A server of the Messages API; the address ends with `/v1/messages`.
    Messages { endpoint: Uri, temperature: Option<f64> },
    /// A server of OpenAI's chat completions; the address ends with `/chat/completions`.
    Chat { endpoint: Uri, temperature: Option<f64> },
    /// A file that says what the model says.
    Scripted { script: PathBuf },
}

/// What the command line may say; each goes before the file.
#[derive(Debug, Default)]
pub struct Overrides {
    pub config: Option<PathBuf>,
    pub runtime_dir: Option<PathBuf>,
    pub state_dir: Option<PathBuf>,
    pub policies_dir: Option<PathBuf>,
    pub log: Option<String>,
    pub loopback_fd: Option<RawFd>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RawConfig {
    runtime_dir: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    policies_dir: Option<PathBuf>,
    log: Option<String>,
    default_environment: Option<String>,
    keys_file: Option<PathBuf>,
    #[serde(default)]
    models: BTreeMap<String, RawModel>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RawModel {
    provider: String,
    url: Option<String>,
    model: Option<String>,
    max_tokens: Option<u32>,
    temperature: Option<f64>,
    script: Option<PathBuf>,
    stall_seconds: Option<u64>,
    context: Option<String>,
    price_usd_per_million: Option<RawPrice>,
}

/// In US dollars for a million tokens.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RawPrice {
    input: f64,
    output: f64,
    cache_write: Option<f64>,
    cache_read: Option<f64>,
}

impl Config {
    /// Reads the file and puts the command line over it. Without a file named, the one of the
    /// system is read if it is there.
    pub fn load(overrides: Overrides) -> Result<Self, ConfigError> {
        let system = Layout::system();
        let path = overrides.config.clone().unwrap_or_else(|| system.config.join("harnessd.toml"));
        let (raw, sha256) = match read(&path) {
            Err(ConfigError::Read { source, .. })
                if overrides.config.is_none() && source.kind() == std::io::ErrorKind::NotFound =>
            {
                (RawConfig::default(), None)
            }
            Err(error) => return Err(error),
            Ok(text) => {
                let parsed = toml::from_str(&text).map_err(|source| ConfigError::Malformed {
                    path: path.clone(),
                    why: malformed(&text, &source),
                })?;
                (parsed, Some(ipc::in_force::sha256(&text)))
            }
        };
        let mut models = BTreeMap::new();
        for (name, model) in raw.models {
            let model = model.check().map_err(|why| ConfigError::Model {
                path: path.clone(),
                name: name.clone(),
                why,
            })?;
            models.insert(name, model);
        }
        let first = |a: Option<PathBuf>, b: Option<PathBuf>, c: PathBuf| a.or(b).unwrap_or(c);
        let layout = Layout {
            runtime: first(overrides.runtime_dir, raw.runtime_dir, system.runtime),
            state: first(overrides.state_dir, raw.state_dir, system.state),
            policies: first(overrides.policies_dir, raw.policies_dir, system.policies),
            config: system.config,
        };
        layout.check()?;
        let log = overrides.log.or(raw.log).unwrap_or_else(|| "info".to_owned());
        if !LEVELS.contains(&log.as_str()) {
            return Err(ConfigError::Level { level: log });
        }
        Ok(Self {
            layout,
            path: std::path::absolute(&path).unwrap_or(path),
            sha256,
            log,
            default_environment: raw.default_environment.unwrap_or_else(|| "dev".to_owned()),
            models: if models.is_empty() { default_models() } else { models },
            keys_file: raw.keys_file,
            loopback: overrides.loopback_fd,
        })
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    use std::os::unix::fs::PermissionsExt;
    let fail = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = sys::file::open_regular(path).map_err(fail)?;
    let mode = file.metadata().map_err(fail)?.permissions().mode();
    if mode & 0o022 != 0 {
        return Err(ConfigError::Writable { path: path.to_owned(), mode: mode & 0o777 });
    }
    let bytes = sys::file::read_bounded(&file, CONFIG_BYTES_MAX).map_err(fail)?;
    String::from_utf8(bytes).map_err(|_| fail(std::io::ErrorKind::InvalidData.into()))
}

/// What is wrong with the file. Where its text is part of that and may hold a password (in an
/// address, which has no place for one here), only the place is said.
fn malformed(text: &str, error: &toml::de::Error) -> String {
    let shown = error.to_string();
    if !shown.contains('@') {
        return shown;
    }
    let at = error.span().map_or(0, |span| span.start);
    let line = text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1;
    format!("line {line} is not as it must be; it is not shown, as it may hold a password")
}

/// Without a table every model is asked for at the API's own address.
fn default_models() -> BTreeMap<String, ModelConfig> {
    let endpoint = Uri::from_static("https://api.anthropic.com/v1/messages");
    let provider = Provider::Messages { endpoint, temperature: None };
    BTreeMap::from([("*".to_owned(), ModelConfig::new(provider))])
}

impl RawModel {
    fn check(self) -> Result<ModelConfig, String> {
        let max_tokens = self.max_tokens.unwrap_or(MAX_TOKENS);
        if max_tokens == 0 {
            return Err("max-tokens must be at least 1".to_owned());
        }
        let temperature = self.temperature;
        let provider = match (self.provider.as_str(), self.url, self.script) {
            ("messages", Some(url), None) => {
                Provider::Messages { endpoint: endpoint(&url, "/messages")?, temperature }
            }
            ("chat-completions", Some(url), None) => {
                Provider::Chat { endpoint: endpoint(&url, "/chat/completions")?, temperature }
            }
            (name @ ("messages" | "chat-completions"), None, _) => {
                return Err(format!("provider {name:?} needs a url"));
            }
            ("messages" | "chat-completions", _, Some(_)) => {
                return Err("only \"scripted\" has a script".to_owned());
            }
            ("scripted", None, Some(script)) => Provider::Scripted { script },
            ("scripted", _, None) => return Err("provider \"scripted\" needs a script".to_owned()),
            ("scripted", Some(_), _) => return Err("\"scripted\" has no url".to_owned()),
            (other, ..) => {
                let known = "messages, chat-completions, scripted";
                return Err(format!("unknown provider {other:?}: there are {known}"));
            }
        };
        let stall = match self.stall_seconds {
            Some(0) => return Err("stall-seconds must be at least 1".to_owned()),
            Some(seconds) => Duration::from_secs(seconds.min(24 * 3600)),
            None => STALL,
        };
        let context = match self.context {
            Some(name) => name.parse().map_err(|e: crate::context::ProfileError| e.to_string())?,
            None => Profile::WholeLog,
        };
        let price = self.price_usd_per_million.map(RawPrice::check).transpose()?;
        Ok(ModelConfig { provider, model: self.model, max_tokens, stall, context, price })
    }
}

impl RawPrice {
    fn check(self) -> Result<Price, String> {
        let Self { input, output, cache_write, cache_read } = self;
        // As the usual providers price what is kept for five minutes.
        let cache = [cache_write.unwrap_or(input * 1.25), cache_read.unwrap_or(input * 0.1)];
        for price in [input, output, cache[0], cache[1]] {
            if !(0.0..=1_000_000.0).contains(&price) {
                return Err(format!("price-usd-per-million: {price} is not a price"));
            }
        }
        Ok(Price::of_million(input, output, cache[0], cache[1]))
    }
}

fn endpoint(url: &str, call: &str) -> Result<Uri, String> {
    let url = url.trim_end_matches('/');
    let base = url.strip_suffix(call).unwrap_or(url);
    let text = match base.ends_with("/v1") {
        true => format!("{base}{call}"),
        // Some servers have their own way before the last part: it is then given in full.
        false if base != url => url.to_owned(),
        false => format!("{base}/v1{call}"),
    };
    // A password has no place in it; where there may be one, nothing of the address is shown.
    let shown = match url.contains('@') {
        true => "url with user or password".to_owned(),
        false => format!("url {url:?}"),
    };
    let uri: Uri = text.parse().map_err(|e| format!("{shown}: {e}"))?;
    let named = uri.authority().is_some_and(|a| !a.as_str().contains('@'));
    match uri.scheme_str() {
        Some("https" | "http") if named && uri.query().is_none() => Ok(uri),
        _ => Err(format!("{shown} must be https://HOST[:PORT][/PATH], without user or query")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("harnessd.toml");
        std::fs::write(&path, text).unwrap();
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, permissions).unwrap();
        let overrides = Overrides { config: Some(path), ..Overrides::default() };
        Config::load(overrides).map_err(|e| e.to_string())
    }

    #[test]
    fn endpoints_take_every_usual_form_of_address() {
        for url in ["https://h", "https://h/", "https://h/v1", "https://h/v1/messages"] {
            let uri = endpoint(url, "/messages").unwrap();
            assert_eq!(uri.to_string(), "https://h/v1/messages", "{url}");
        }
        let chat = |url| endpoint(url, "/chat/completions").unwrap().to_string();
        assert_eq!(chat("http://h:1/a"), "http://h:1/a/v1/chat/completions");
        assert_eq!(chat("https://h/x/v1/"), "https://h/x/v1/chat/completions");
        assert_eq!(chat("https://h/x/chat/completions"), "https://h/x/chat/completions");
        for bad in ["h", "ftp://h", "https://", "https://u:p@h", "https://h/?x=1"] {
            assert!(endpoint(bad, "/messages").is_err(), "{bad} was accepted");
        }
    }

    #[test]
    fn a_password_in_an_address_is_in_no_error_wherever_the_file_is_wrong() {
        let url = "url = \"https://user:SECRETPW@x/\"";
        for text in [
            format!("[models.a]\nprovider = \"messages\"\n{url}\n"),
            format!("[models.a]\nprovider = \"chat-completions\"\n{url}\n"),
            "[models.a]\nprovider = \"messages\"\nurl = \"ht tp://u:SECRETPW@x\"\n".to_owned(),
            "[models.a]\nprovider = \"messages\"\nurl = \"u:SECRETPW@x\"\n".to_owned(),
            format!("[models.a]\n{url}\n"),
            format!("[models.a] {url}\n"),
            format!("[models.a]\nprovider = \"messages\"\n{url} x\n"),
            format!("[models.a]\nprovider = \"messages\"\nmax-tokens = {}\n", &url[6..]),
            format!("models = {}\n", &url[6..]),
        ] {
            let error = load(&text).unwrap_err();

            assert!(!error.contains("SECRETPW"), "{text}: {error}");
        }
        let error = load(&format!("log = \"info\"\n[models.a] {url}\n")).unwrap_err();
        assert!(error.contains("line 2"), "{error}");
    }

    const MESSAGES: &str = "[models.a]\nprovider = \"messages\"\nurl = \"https://h\"\n";

    #[test]
    fn a_table_of_models_is_read_and_its_mistakes_are_named() {
        let good = load(
            "default-environment = \"demo\"\n[models.\"*\"]\nprovider = \"scripted\"\n\
             script = \"/s.json\"\n",
        )
        .unwrap();
        assert_eq!(good.default_environment, "demo");
        assert!(matches!(good.models["*"].provider, Provider::Scripted { .. }));

        let priced = format!(
            "{MESSAGES}context = \"last-n:7\"\nstall-seconds = 9\n\
             price-usd-per-million = {{ input = 3.0, output = 15.0 }}\n"
        );
        let model = &load(&priced).unwrap().models["a"];
        assert_eq!(model.context, Profile::LastN { steps: 7 });
        assert_eq!(model.stall, Duration::from_secs(9));
        assert_eq!(model.price, Some(Price::of_million(3.0, 15.0, 3.75, 0.3)));

        let cases: &[(&str, &str)] = &[
            ("modles = 1\n", "unknown field `modles`"),
            ("log = \"loud\"\n", "log level \"loud\" is unknown"),
            ("[models.a]\nprovider = \"x\"\n", "unknown provider \"x\""),
            ("[models.a]\nprovider = \"messages\"\n", "needs a url"),
            ("[models.a]\nprovider = \"scripted\"\n", "needs a script"),
            ("[models.a]\nprovider = \"chat-completions\"\n", "needs a url"),
            (&format!("{MESSAGES}context = \"some\"\n"), "no context profile \"some\""),
            (&format!("{MESSAGES}stall-seconds = 0\n"), "stall-seconds must be"),
            (
                &format!("{MESSAGES}price-usd-per-million = {{ input = -1.0, output = 1.0 }}\n"),
                "is not a price",
            ),
        ];
        for (text, expected) in cases {
            let error = load(text).unwrap_err();
            assert!(error.contains(*expected), "{text}: {error}");
        }
    }
}
