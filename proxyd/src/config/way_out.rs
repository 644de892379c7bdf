//! `proxyd.toml`, the part about the way out: whom proxyd trusts, where it dials, through what.
//!
//! All of it is the operator's word, so it may name private addresses and private CAs. It never
//! changes which name is verified. No value of a secret stands in it: `password` says where one
//! lies. The whole part can be read again while proxyd runs (see `upstream::Upstreams::reload`).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use policies::{AddressRange, Host, HostPattern};
use serde::Deserialize;

/// How long it may take to reach an upstream, over all its addresses.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer would outlive the patience of every client.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(120);
/// More cannot be meant; it bounds what is kept for one host.
const CONNECTIONS_MAX: usize = 4096;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct FileUpstream {
    dial: Option<OneOrMany>,
    ca: Option<PathBuf>,
    client_certificate: Option<PathBuf>,
    client_key: Option<PathBuf>,
    proxy: Option<toml::Value>,
    connect_timeout: Option<String>,
    protocols: Option<Vec<String>>,
    connections_max: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct FileProxy {
    url: String,
    resolve: Option<String>,
    user: Option<String>,
    password: Option<String>,
    ca: Option<PathBuf>,
    /// Only in `[upstream-proxy]`.
    no_proxy: Option<Vec<String>>,
}

/// Everything about the way out, checked; files are read by `upstream`.
#[derive(Clone, Debug, Default)]
pub struct WayOut {
    /// The trust store, where it is not one of the usual places.
    pub trust_store: Option<PathBuf>,
    pub rows: Vec<(HostPattern, UpstreamRow)>,
    pub proxy: Option<ProxyRow>,
    pub no_proxy: Vec<Exempt>,
}

/// What the upstream table says about one name, or about all names below one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamRow {
    /// Dial these instead of resolving the name. The rule's `addresses` still count.
    pub dial: Vec<Dial>,
    /// Trust this CA, and only this, for the name.
    pub ca: Option<PathBuf>,
    pub identity: Option<Identity>,
    pub proxy: Through,
    pub connect_timeout: Duration,
    pub protocols: Protocols,
    /// Connections at once; more requests wait.
    pub connections_max: Option<usize>,
}

impl Default for UpstreamRow {
    fn default() -> Self {
        Self {
            dial: Vec::new(),
            ca: None,
            identity: None,
            proxy: Through::AsAll,
            connect_timeout: CONNECT_TIMEOUT,
            protocols: Protocols::Either,
            connections_max: None,
        }
    }
}

/// One entry of `dial`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dial {
    Socket(SocketAddr),
    /// At the port that was asked for.
    Ip(IpAddr),
}

impl Dial {
    /// The address to dial for what was asked for at `port`.
    pub fn at(self, port: u16) -> SocketAddr {
        match self {
            Self::Socket(address) => address,
            Self::Ip(ip) => SocketAddr::new(ip, port),
        }
    }
}

/// The certificate by which an upstream knows proxyd, and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// Through which proxy a name is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Through {
    /// `[upstream-proxy]`, if there is one and it does not exempt the name.
    AsAll,
    Direct,
    Proxy(ProxyRow),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocols {
    Either,
    Http1,
    Http2,
}

/// A proxy between this host and upstreams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyRow {
    /// Whether proxyd speaks TLS to it.
    pub tls: bool,
    pub host: Host,
    pub port: u16,
    pub resolve: Resolve,
    pub login: Option<Login>,
    /// Whom to trust for the proxy's own certificate.
    pub ca: Option<PathBuf>,
}

impl ProxyRow {
    fn password_file(&self) -> Option<PathBuf> {
        match &self.login.as_ref()?.password {
            PasswordPlace::File(path) => Some(path.clone()),
            PasswordPlace::Vault(_) => None,
        }
    }
}

/// Who turns names into addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolve {
    /// proxyd does: addresses are checked, and the proxy is asked for an address.
    Here,
    /// The proxy does: it is asked for the name, and nobody here can check where that leads.
    Proxy,
}

/// Basic authentication towards the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    pub user: String,
    pub password: PasswordPlace,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PasswordPlace {
    /// A secret of the vault, by name.
    Vault(String),
    File(PathBuf),
}

/// What is reached without the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exempt {
    Host(HostPattern),
    Range(AddressRange),
}

impl Exempt {
    pub fn covers(&self, host: &Host) -> bool {
        match self {
            Self::Host(pattern) => pattern.matches(host),
            Self::Range(range) => host.ip().is_some_and(|ip| range.contains(ip)),
        }
    }
}

impl WayOut {
    /// Checks what the file says; an error is the key and the reason.
    pub(super) fn check(
        trust_store: Option<PathBuf>,
        rows: BTreeMap<String, FileUpstream>,
        proxy: Option<FileProxy>,
    ) -> Result<Self, (String, String)> {
        if let Some(path) = &trust_store {
            absolute("trust-store", path).map_err(|why| ("trust-store".to_owned(), why))?;
        }
        let mut checked = Vec::new();
        for (name, row) in rows {
            let failed = |why: String| (format!("upstreams.{name:?}"), why);
            let pattern = HostPattern::parse(&name).map_err(failed)?;
            checked.push((pattern, row.check().map_err(failed)?));
        }
        let failed = |why: String| ("upstream-proxy".to_owned(), why);
        let (proxy, no_proxy) = match proxy {
            Some(file) => {
                let exempt = file.no_proxy.iter().flatten().map(|text| exempt(text));
                let exempt = exempt.collect::<Result<_, _>>().map_err(failed)?;
                (Some(file.check().map_err(failed)?), exempt)
            }
            None => (None, Vec::new()),
        };
        Ok(Self { trust_store, rows: checked, proxy, no_proxy })
    }

    /// Every file that is named, for those who must be able to read it.
    pub fn files(&self) -> Vec<PathBuf> {
        let of_proxies =
            self.proxies().flat_map(|proxy| proxy.ca.iter().cloned().chain(proxy.password_file()));
        let of_rows = self.rows.iter().flat_map(|(_, row)| {
            let identity = row.identity.iter().flat_map(|i| [i.certificate.clone(), i.key.clone()]);
            row.ca.iter().cloned().chain(identity)
        });
        self.trust_store.iter().cloned().chain(of_rows).chain(of_proxies).collect()
    }

    /// Those of these files that hold secrets.
    pub fn secret_files(&self) -> Vec<PathBuf> {
        let keys = self.rows.iter().filter_map(|(_, row)| Some(row.identity.as_ref()?.key.clone()));
        keys.chain(self.proxies().filter_map(ProxyRow::password_file)).collect()
    }

    fn proxies(&self) -> impl Iterator<Item = &ProxyRow> {
        let rows = self.rows.iter().filter_map(|(_, row)| match &row.proxy {
            Through::Proxy(proxy) => Some(proxy),
            Through::AsAll | Through::Direct => None,
        });
        self.proxy.iter().chain(rows)
    }
}

impl FileUpstream {
    fn check(self) -> Result<UpstreamRow, String> {
        let texts = match self.dial {
            None => Vec::new(),
            Some(OneOrMany::One(text)) => vec![text],
            Some(OneOrMany::Many(texts)) => texts,
        };
        let dial = texts.iter().map(|text| dial(text)).collect::<Result<_, _>>()?;
        for (key, path) in [
            ("ca", &self.ca),
            ("client-certificate", &self.client_certificate),
            ("client-key", &self.client_key),
        ] {
            path.as_ref().map_or(Ok(()), |path| absolute(key, path))?;
        }
        let identity = match (self.client_certificate, self.client_key) {
            (Some(certificate), Some(key)) => Some(Identity { certificate, key }),
            (None, None) => None,
            _ => return Err("client-certificate and client-key belong together".to_owned()),
        };
        let connect_timeout = match self.connect_timeout {
            Some(text) => connect_timeout(&text)?,
            None => CONNECT_TIMEOUT,
        };
        if self.connections_max.is_some_and(|max| !(1..=CONNECTIONS_MAX).contains(&max)) {
            return Err(format!("connections-max is 1 to {CONNECTIONS_MAX}"));
        }
        Ok(UpstreamRow {
            dial,
            ca: self.ca,
            identity,
            proxy: through(self.proxy)?,
            connect_timeout,
            protocols: protocols(self.protocols.as_deref())?,
            connections_max: self.connections_max,
        })
    }
}

fn dial(text: &str) -> Result<Dial, String> {
    let socket = text.parse().map(Dial::Socket);
    socket.or_else(|_| text.parse().map(Dial::Ip)).map_err(|_| {
        format!("dial = {text:?} is no address, as in \"127.0.0.1:443\" or \"10.2.0.7\"")
    })
}

fn absolute(key: &str, path: &std::path::Path) -> Result<(), String> {
    if path.is_absolute() { Ok(()) } else { Err(format!("{key} must be an absolute path")) }
}

fn connect_timeout(text: &str) -> Result<Duration, String> {
    let span = policies::time_span(text).map_err(|why| format!("connect-timeout: {why}"))?;
    if span.is_zero() || span > CONNECT_TIMEOUT_MAX {
        let most = CONNECT_TIMEOUT_MAX.as_secs();
        return Err(format!("connect-timeout = {text:?} is not \"1s\" to \"{most}s\""));
    }
    Ok(span)
}

fn protocols(list: Option<&[String]>) -> Result<Protocols, String> {
    let Some(list) = list else { return Ok(Protocols::Either) };
    let words: Vec<&str> = list.iter().map(String::as_str).collect();
    match words[..] {
        ["http/1.1"] => Ok(Protocols::Http1),
        ["h2"] => Ok(Protocols::Http2),
        ["http/1.1", "h2"] | ["h2", "http/1.1"] => Ok(Protocols::Either),
        _ => Err("protocols lists \"http/1.1\", \"h2\", or both".to_owned()),
    }
}

fn through(value: Option<toml::Value>) -> Result<Through, String> {
    match value {
        None => Ok(Through::AsAll),
        Some(toml::Value::String(word)) if word == "none" => Ok(Through::Direct),
        Some(table @ toml::Value::Table(_)) => {
            let file: FileProxy = table
                .try_into()
                .map_err(|error: toml::de::Error| format!("proxy: {}", error.message()))?;
            if file.no_proxy.is_some() {
                return Err("proxy: no-proxy stands in [upstream-proxy] only".to_owned());
            }
            file.check().map(Through::Proxy)
        }
        Some(_) => Err("proxy is \"none\" or a table { url = \"http://host:port\" }".to_owned()),
    }
}

impl FileProxy {
    fn check(&self) -> Result<ProxyRow, String> {
        let (tls, host, port) = proxy_url(&self.url)?;
        let resolve = match self.resolve.as_deref() {
            None | Some("here") => Resolve::Here,
            Some("proxy") => Resolve::Proxy,
            Some(_) => return Err("resolve is \"here\" or \"proxy\"".to_owned()),
        };
        if let Some(path) = &self.ca {
            absolute("ca", path)?;
            if !tls {
                return Err("ca is of use with an https:// proxy only".to_owned());
            }
        }
        let login = match (&self.user, &self.password) {
            (Some(user), Some(place)) => {
                if user.is_empty() || user.contains(':') || user.chars().any(char::is_control) {
                    return Err("user is a name without colons and control characters".to_owned());
                }
                Some(Login { user: user.clone(), password: password(place)? })
            }
            (None, None) => None,
            _ => return Err("user and password belong together".to_owned()),
        };
        Ok(ProxyRow { tls, host, port, resolve, login, ca: self.ca.clone() })
    }
}

/// What stands in a wrong entry is not repeated: it may be the password itself.
fn password(place: &str) -> Result<PasswordPlace, String> {
    match place.split_once(':') {
        Some(("local", name)) if policies::is_secret_name(name) => {
            Ok(PasswordPlace::Vault(name.to_owned()))
        }
        Some(("file", path)) if path.starts_with('/') => Ok(PasswordPlace::File(path.into())),
        _ => Err("password says where it lies: \"local:NAME\" for a secret of the vault, or \
                  \"file:/absolute/path\""
            .to_owned()),
    }
}

fn proxy_url(text: &str) -> Result<(bool, Host, u16), String> {
    let shape = || "url is http://host:port or https://host:port".to_owned();
    let (tls, rest) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
        (Some(rest), _) => (false, rest),
        (_, Some(rest)) => (true, rest),
        _ => return Err(shape()),
    };
    if rest.contains('@') {
        return Err("url holds no user and password: they have keys of their own".to_owned());
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    match crate::entry::authority::parse(rest) {
        Some((host, Some(port))) => Ok((tls, host, port)),
        _ => Err(shape()),
    }
}

fn exempt(text: &str) -> Result<Exempt, String> {
    if text.contains('/') {
        return AddressRange::parse(text)
            .map(Exempt::Range)
            .map_err(|why| format!("no-proxy: {text:?}: {why}"));
    }
    HostPattern::parse(text).map(Exempt::Host).map_err(|why| format!("no-proxy: {text:?}: {why}"))
}
