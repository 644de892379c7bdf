//! `[aws]` of `proxyd.toml`: by which keys the vault asks AWS for secrets, and what roles it takes.
//!
//! Where keys are had is the operator's word alone. What gives them without TLS, an instance's
//! metadata service or a container's agent, is at addresses that never leave this host.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use policies::{Host, Scheme, SecretRef, is_secret_name};
use serde::Deserialize;

use super::backends::{Freshness, STALE, freshness, kept, span};

/// An instance's metadata service.
const INSTANCE: &str = "http://169.254.169.254";
/// The metadata service, and the agents of ECS and EKS, by their fixed addresses.
const FIXED: [&str; 5] =
    ["169.254.169.254", "fd00:ec2::254", "169.254.170.2", "169.254.170.23", "fd00:ec2::23"];
/// What a session is called where the file does not say it.
const SESSION_NAME: &str = "cleanhands";
const DURATION: Duration = Duration::from_secs(3600);
const DURATION_MIN: Duration = Duration::from_secs(900);
const DURATION_MAX: Duration = Duration::from_secs(12 * 3600);
/// Bounds of AWS's own.
const SESSION_POLICY_BYTES_MAX: usize = 2048;
const SESSION_POLICIES_MAX: usize = 10;

/// `[aws]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct FileAws {
    region: String,
    secrets_url: Option<String>,
    sts_url: Option<String>,
    login: Option<FileLogin>,
    #[serde(default)]
    roles: BTreeMap<String, FileRole>,
    refresh: Option<String>,
    stale: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileLogin {
    method: Method,
    secret: Option<String>,
    url: Option<String>,
    role: Option<String>,
    session_name: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Method {
    Keys,
    WebIdentity,
    Container,
    Instance,
}

/// `[aws.roles.NAME]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileRole {
    role: String,
    session_name: Option<String>,
    external_id: Option<String>,
    session_policy: Option<String>,
    #[serde(default)]
    session_policy_arns: Vec<String>,
    duration: Option<String>,
    keys: Option<String>,
    web_identity: Option<String>,
}

/// What the vault asks AWS by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aws {
    pub region: String,
    /// `https://…`, without a slash at its end.
    pub secrets_url: String,
    pub sts_url: String,
    pub login: Option<AwsLogin>,
    pub roles: BTreeMap<String, AwsRole>,
    pub freshness: Freshness,
}

/// Where the vault's own keys come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AwsLogin {
    Keys(SecretRef),
    WebIdentity {
        token: SecretRef,
        role: Assumed,
    },
    /// An agent beside the container; it may want to be shown a token.
    Container {
        url: String,
        token: Option<SecretRef>,
    },
    /// The metadata service, by sessions (IMDSv2) only.
    Instance {
        url: String,
        role: Option<String>,
    },
}

/// A role whose keys sign what a policy names it for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsRole {
    pub assumed: Assumed,
    pub by: By,
}

/// On whose word a role is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum By {
    /// The vault's own keys.
    Login,
    Keys(SecretRef),
    WebIdentity(SecretRef),
}

/// What is asked of the token service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumed {
    pub arn: String,
    pub session_name: String,
    pub external_id: Option<String>,
    /// JSON; what it does not allow the session cannot do.
    pub policy: Option<String>,
    pub policy_arns: Vec<String>,
    pub duration: Duration,
}

type Checked<T> = Result<T, (String, String)>;

impl Aws {
    /// Where keys are had without TLS, if anywhere: nothing else is ever asked so.
    pub fn plain_url(&self) -> Option<&str> {
        match &self.login {
            Some(AwsLogin::Container { url, .. } | AwsLogin::Instance { url, .. }) => {
                url.starts_with("http://").then_some(url)
            }
            _ => None,
        }
    }

    /// Every secret that the vault shows for itself.
    pub fn shown(&self) -> impl Iterator<Item = &SecretRef> {
        let login = self.login.as_ref().and_then(|login| match login {
            AwsLogin::Keys(secret) | AwsLogin::WebIdentity { token: secret, .. } => Some(secret),
            AwsLogin::Container { token, .. } => token.as_ref(),
            AwsLogin::Instance { .. } => None,
        });
        let roles = self.roles.values().filter_map(|role| match &role.by {
            By::Login => None,
            By::Keys(secret) | By::WebIdentity(secret) => Some(secret),
        });
        login.into_iter().chain(roles)
    }
}

impl FileAws {
    pub(super) fn check(self) -> Checked<Aws> {
        let named = |key: &str| {
            let key = key.to_owned();
            move |reason: String| (key, reason)
        };
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let region = self.region;
        if region.is_empty() || region.len() > 64 || !region.bytes().all(plain) {
            return Err(("region".into(), "as in a signature: \"eu-central-1\"".into()));
        }
        let suffix = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
        let server = |key: &str, text: Option<String>, service: &str| match text {
            None => Ok(format!("https://{service}.{region}.{suffix}")),
            Some(text) => service_url(&text).map_err(named(key)),
        };
        let secrets_url = server("secrets-url", self.secrets_url, "secretsmanager")?;
        let sts_url = server("sts-url", self.sts_url, "sts")?;
        let login = self.login.map(FileLogin::check).transpose();
        let login = login.map_err(|(key, reason)| (format!("login.{key}"), reason))?;
        let mut roles = BTreeMap::new();
        for (name, role) in self.roles {
            if !is_secret_name(&name) {
                let reason = "a role's name here is made of letters, digits, \".\", \"_\", \"-\"";
                return Err((format!("roles.{name}"), reason.to_owned()));
            }
            let role = role.check(login.is_some());
            let role = role.map_err(|(key, reason)| (format!("roles.{name}.{key}"), reason))?;
            roles.insert(name, role);
        }
        let freshness = freshness(self.refresh, self.stale, STALE)
            .map_err(|(key, reason)| (key.to_owned(), reason))?;
        Ok(Aws { region, secrets_url, sts_url, login, roles, freshness })
    }
}

impl FileLogin {
    fn check(self) -> Checked<AwsLogin> {
        let wrong = |key: &str, reason: &str| Err((key.to_owned(), reason.to_owned()));
        let has = [
            ("secret", self.secret.is_some()),
            ("url", self.url.is_some()),
            ("role", self.role.is_some()),
            ("session-name", self.session_name.is_some()),
        ];
        let (needed, possible): (&[&str], &[&str]) = match self.method {
            Method::Keys => (&["secret"], &["secret"]),
            Method::WebIdentity => (&["secret", "role"], &["secret", "role", "session-name"]),
            Method::Container => (&["url"], &["url", "secret"]),
            Method::Instance => (&[], &["url", "role"]),
        };
        for (key, is) in has {
            if !is && needed.contains(&key) {
                return wrong(key, "the method needs one");
            }
            if is && !possible.contains(&key) {
                return wrong(key, "the method has none");
            }
        }
        let place = |secret: Option<String>| {
            let place = secret.map(|text| kept(&text)).transpose();
            place.map_err(|reason| ("secret".to_owned(), reason))
        };
        let secret = place(self.secret)?;
        Ok(match (self.method, secret) {
            (Method::Keys, Some(secret)) => AwsLogin::Keys(secret),
            (Method::WebIdentity, Some(token)) => {
                let arn = self.role.unwrap_or_default();
                let role = Assumed::plain(arn, self.session_name)?;
                AwsLogin::WebIdentity { token, role }
            }
            (Method::Container, token) => {
                let url = self.url.unwrap_or_default();
                let url = key_url(&url, false).map_err(|reason| ("url".to_owned(), reason))?;
                AwsLogin::Container { url, token }
            }
            (Method::Instance, _) => {
                let url = self.url.unwrap_or_else(|| INSTANCE.to_owned());
                let url = key_url(&url, true).map_err(|reason| ("url".to_owned(), reason))?;
                if !self.role.iter().all(|role| is_instance_role(role)) {
                    return wrong("role", "the name of the instance's role, no ARN");
                }
                AwsLogin::Instance { url, role: self.role }
            }
            (Method::Keys | Method::WebIdentity, None) => {
                return wrong("secret", "the method needs one");
            }
        })
    }
}

impl FileRole {
    fn check(self, has_login: bool) -> Checked<AwsRole> {
        let at = |key: &str| {
            let key = key.to_owned();
            move |reason: String| (key, reason)
        };
        let by = match (self.keys, self.web_identity) {
            (Some(_), Some(_)) => {
                let reason = "a role is taken by keys or by a web identity, not by both";
                return Err(("web-identity".to_owned(), reason.to_owned()));
            }
            (Some(keys), None) => By::Keys(kept(&keys).map_err(at("keys"))?),
            (None, Some(token)) => By::WebIdentity(kept(&token).map_err(at("web-identity"))?),
            (None, None) if has_login => By::Login,
            (None, None) => {
                let reason = "there is no [aws] login: keys = \"local:NAME\" says who takes it";
                return Err(("keys".to_owned(), reason.to_owned()));
            }
        };
        let mut assumed = Assumed::plain(self.role, self.session_name)?;
        if let Some(id) = self.external_id {
            let legal = |b: u8| b.is_ascii_alphanumeric() || b"_+=,.@:/-".contains(&b);
            if !(2..=1224).contains(&id.len()) || !id.bytes().all(legal) {
                return Err(("external-id".to_owned(), "not as AWS takes one".to_owned()));
            }
            if matches!(by, By::WebIdentity(_)) {
                let reason = "a web identity goes without one";
                return Err(("external-id".to_owned(), reason.to_owned()));
            }
            assumed.external_id = Some(id);
        }
        if let Some(text) = self.session_policy {
            let json = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text);
            if json.is_err() || text.len() > SESSION_POLICY_BYTES_MAX {
                let reason = "the JSON of a policy, 2048 bytes at most";
                return Err(("session-policy".to_owned(), reason.to_owned()));
            }
            assumed.policy = Some(text);
        }
        let sound = self.session_policy_arns.iter().all(|arn| is_arn(arn));
        if !sound || self.session_policy_arns.len() > SESSION_POLICIES_MAX {
            let reason = "ARNs of policies, ten at most";
            return Err(("session-policy-arns".to_owned(), reason.to_owned()));
        }
        assumed.policy_arns = self.session_policy_arns;
        if let Some(text) = self.duration {
            assumed.duration = span(&text, DURATION_MIN, DURATION_MAX).map_err(at("duration"))?;
        }
        Ok(AwsRole { assumed, by })
    }
}

impl Assumed {
    fn plain(arn: String, session_name: Option<String>) -> Checked<Self> {
        if !is_arn(&arn) {
            let reason = "a role's ARN: \"arn:aws:iam::123456789012:role/agents\"";
            return Err(("role".to_owned(), reason.to_owned()));
        }
        let session_name = session_name.unwrap_or_else(|| SESSION_NAME.to_owned());
        let legal = |b: u8| b.is_ascii_alphanumeric() || b"_+=,.@-".contains(&b);
        if !(2..=64).contains(&session_name.len()) || !session_name.bytes().all(legal) {
            let reason = "2 to 64 letters, digits and _ + = , . @ -";
            return Err(("session-name".to_owned(), reason.to_owned()));
        }
        let (external_id, policy, policy_arns) = (None, None, Vec::new());
        Ok(Self { arn, session_name, external_id, policy, policy_arns, duration: DURATION })
    }
}

fn is_arn(text: &str) -> bool {
    let visible = text.bytes().all(|b| b.is_ascii_graphic());
    text.starts_with("arn:") && (20..=2048).contains(&text.len()) && visible
}

/// Whether it can be the name of a role in an address of the metadata service.
pub fn is_instance_role(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"_+=,.@-".contains(&b);
    (1..=64).contains(&text.len()) && text.bytes().all(legal) && text != "." && text != ".."
}

fn service_url(text: &str) -> Result<String, String> {
    let url = text.trim_end_matches('/').to_owned();
    match policies::split_url(&url)? {
        (Scheme::Https, _, _, path) if path == "/" => Ok(url),
        _ => Err("https://HOST or https://HOST:PORT".to_owned()),
    }
}

/// Where keys are had: with TLS anywhere, without only where nobody else can answer.
fn key_url(text: &str, service: bool) -> Result<String, String> {
    let url = if service { text.trim_end_matches('/') } else { text };
    let (scheme, host, _, path) = policies::split_url(url)?;
    if service && (scheme != Scheme::Http || path != "/") {
        return Err("http://ADDRESS of the metadata service".to_owned());
    }
    let near = |ip: IpAddr| ip.is_loopback() || FIXED.iter().any(|fixed| fixed.parse() == Ok(ip));
    match (scheme, host) {
        (Scheme::Https, _) => Ok(url.to_owned()),
        (Scheme::Http, Host::Ip(ip)) if near(ip) => Ok(url.to_owned()),
        (Scheme::Http, _) => Err(format!(
            "without TLS keys are had from this host's own addresses and {} only",
            FIXED.join(", ")
        )),
    }
}

#[cfg(test)]
#[path = "aws_tests.rs"]
mod tests;
