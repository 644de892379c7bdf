//! Image registries (the distribution specification's API): what a request wants, which token that
//! takes, and what the server that gives tokens answered.
//!
//! A registry says at `/v2/` where its tokens are had: a realm, to which the password is shown with
//! the access that is wanted. All of that is between the vault's worker and those servers
//! ([`super::fetch`]); the sandbox sees neither a challenge nor a token. The password goes to a
//! realm only where the credential's own list names its host: a registry could name any.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use policies::{Credential, Grant, GrantKind, Host, Inject};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::VaultError;
use super::mint::Life;
use super::remote::{Ask, Errand, Meaning};
use super::render;
use super::secret::Secret;
use super::wire::{Exchange, Form};

/// Longest name of a repository (distribution specification, "Pulling manifests").
const NAME_BYTES_MAX: usize = 255;
/// Life of a token whose answer says none, as the token specification has it.
const LIFE_SECONDS: u64 = 60;
/// Longest token: with a longer one in its head no registry takes a request. All that are kept are
/// searched for in what tools put out.
const TOKEN_BYTES_MAX: usize = 16 * 1024;
/// How long a registry that takes the password itself is not asked again how to log in.
const BASIC_SECONDS: u64 = 300;
/// What the worker says instead of a status where the registry wants no token, but the password.
pub(super) const NO_TOKEN: u16 = 0;

/// What one request wants of a registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Access {
    pub port: u16,
    pub wanted: Wanted,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Wanted {
    /// `/v2/`: to be let in.
    Login,
    Catalog,
    Pull(String),
    Push(String),
    Delete(String),
}

impl Access {
    /// Of a request; none where its path is none of the registry's API, or could be read in two
    /// ways.
    pub fn of(port: u16, method: &[u8], path: &[u8]) -> Option<Self> {
        let path = std::str::from_utf8(path).ok()?;
        let wanted = match path.strip_prefix("/v2")? {
            "" | "/" => Wanted::Login,
            "/_catalog" => Wanted::Catalog,
            rest => {
                let (name, upload) = repository(rest.strip_prefix('/')?)?;
                let name = name.to_owned();
                match method {
                    b"GET" | b"HEAD" if !upload => Wanted::Pull(name),
                    b"DELETE" if !upload => Wanted::Delete(name),
                    _ => Wanted::Push(name),
                }
            }
        };
        Some(Self { port, wanted })
    }

    /// Whether a name that came from elsewhere is one.
    fn is_sound(&self) -> bool {
        match &self.wanted {
            Wanted::Login | Wanted::Catalog => true,
            Wanted::Pull(name) | Wanted::Push(name) | Wanted::Delete(name) => is_name(name),
        }
    }

    /// As servers that give tokens write it.
    fn scope(&self) -> Option<String> {
        match &self.wanted {
            Wanted::Login => None,
            Wanted::Catalog => Some("registry:catalog:*".to_owned()),
            Wanted::Pull(name) => Some(format!("repository:{name}:pull")),
            Wanted::Push(name) => Some(format!("repository:{name}:pull,push")),
            Wanted::Delete(name) => Some(format!("repository:{name}:delete")),
        }
    }

    /// Methods of which a policy has to allow one for that access.
    pub(super) fn methods(&self) -> &'static [&'static str] {
        match &self.wanted {
            Wanted::Login | Wanted::Catalog | Wanted::Pull(_) => &["GET", "HEAD"],
            Wanted::Push(_) => &["POST", "PUT", "PATCH"],
            Wanted::Delete(_) => &["DELETE"],
        }
    }
}

/// The repository that a path below `/v2/` is about, and whether it is one of an upload.
fn repository(path: &str) -> Option<(&str, bool)> {
    let at = |word: &str| path.find(word).map(|at| (&path[..at], &path[at + word.len()..]));
    let plain = |text: &str| {
        let legal = |b: u8| b.is_ascii_alphanumeric() || b"._:=+-".contains(&b);
        !text.is_empty() && text != "." && text != ".." && text.bytes().all(legal)
    };
    let (name, upload) = match at("/blobs/uploads") {
        // The rest is the registry's own, but it stays one segment.
        Some((name, rest)) => {
            let rest = rest.strip_prefix('/').unwrap_or(rest);
            (rest.is_empty() || plain(rest)).then_some((name, true))?
        }
        None => {
            let (front, last) = path.rsplit_once('/')?;
            let (name, kind) = front.rsplit_once('/')?;
            let known = matches!(kind, "manifests" | "blobs" | "referrers")
                || (kind == "tags" && last == "list");
            (known && plain(last)).then_some((name, false))?
        }
    };
    is_name(name).then_some((name, upload))
}

fn is_name(name: &str) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
    let part = |part: &str| {
        part.bytes().all(legal)
            && part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.ends_with(|c: char| c.is_ascii_alphanumeric())
    };
    name.len() <= NAME_BYTES_MAX && name.split('/').all(part)
}

/// What is asked for to have that access.
pub(super) fn grant(
    credential: &Credential,
    host: &Host,
    access: &Access,
) -> Result<Grant, VaultError> {
    let Inject::Registry { user } = &credential.inject else {
        return Err(VaultError::Refused("it is not for a registry".into()));
    };
    if !access.is_sound() {
        return Err(VaultError::Invalid("that is no repository's name".into()));
    }
    let hosts = credential.hosts.iter().map(ToString::to_string).collect();
    let kind = GrantKind::Registry { user: user.clone(), hosts };
    let url = format!("https://{}/v2/", host.authority(access.port));
    let scope = access.scope().map(|scope| ("scope".to_owned(), scope));
    Ok(Grant { kind, url, client: None, parameters: scope.into_iter().collect() })
}

/// The question for it.
pub(super) fn ask(
    grant: &Grant,
    (user, hosts): (&str, &[String]),
    secret: &Secret,
) -> Result<Ask, VaultError> {
    let form = Form::Basic { user: Some(user.to_owned()) };
    let exchange = Exchange {
        url: grant.url.clone(),
        hosts: hosts.to_vec(),
        account: user.to_owned(),
        scope: grant.parameters.get("scope").cloned(),
    };
    Ok(Ask { errand: Errand::Exchange(exchange), parts: vec![render::render(secret, &form)?] })
}

/// What the answer means: the whole value of `Authorization`. No reason quotes an answer.
pub(super) fn read(status: u16, body: &[u8]) -> Meaning {
    let had = |value: Secret, seconds: u64| {
        let life = Life::Until(super::mint::seconds(seconds));
        Meaning::Had { value, rotated: None, life }
    };
    let reason = || format!("the server that gives the registry's tokens answers {status}");
    match status {
        NO_TOKEN => had(Secret::concat(&[body]), BASIC_SECONDS),
        200..300 => {
            let answer: Value = serde_json::from_slice(body).unwrap_or_default();
            let text = |name: &str| answer[name].as_str().filter(|text| !text.is_empty());
            let Some(token) = text("token").or_else(|| text("access_token")) else {
                return Meaning::Later("the answer of the registry's login holds no token".into());
            };
            let legal = token.bytes().all(|b| b.is_ascii_graphic());
            let bytes = ipc::vault::SECRET_BYTES_MIN..=TOKEN_BYTES_MAX;
            if !legal || !bytes.contains(&token.len()) {
                return Meaning::Later("the registry's tokens are none that a header holds".into());
            }
            let seconds = answer["expires_in"].as_u64().unwrap_or(LIFE_SECONDS);
            had(Secret::concat(&[b"Bearer ", token.as_bytes()]), seconds)
        }
        401 => Meaning::Refused(reason()),
        _ => Meaning::Later(reason()),
    }
}

/// Whether the answer says that the password is good, and gives no right to that.
pub(super) fn denies(status: u16) -> bool {
    matches!(status, 300..500 if ![401, 408, 425, 429].contains(&status))
}

/// What finds a rendered value in answers, besides the whole: what stands behind the scheme, and
/// the password in it.
pub(super) fn parts(value: &Secret) -> Vec<Secret> {
    let text = value.expose_secret();
    let Some(at) = text.iter().position(|byte| *byte == b' ') else { return Vec::new() };
    let (scheme, token) = (&text[..at], &text[at + 1..]);
    let mut parts = vec![Secret::concat(&[token])];
    if scheme == b"Basic"
        && let Ok(pair) = STANDARD.decode(token)
    {
        let pair = Secret::new(pair);
        let pair = pair.expose_secret();
        let password = pair.iter().position(|byte| *byte == b':').map(|at| &pair[at + 1..]);
        parts.extend(password.map(|password| Secret::concat(&[password])));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(method: &str, path: &str) -> Option<Option<String>> {
        Some(Access::of(443, method.as_bytes(), path.as_bytes())?.scope())
    }

    #[test]
    fn each_request_takes_the_least_access_that_it_needs() {
        for (method, path, wanted) in [
            ("GET", "/v2/", ""),
            ("GET", "/v2", ""),
            ("GET", "/v2/_catalog", "registry:catalog:*"),
            ("GET", "/v2/a/manifests/latest", "repository:a:pull"),
            ("HEAD", "/v2/team/app/blobs/sha256:00", "repository:team/app:pull"),
            ("GET", "/v2/a/b/c/tags/list", "repository:a/b/c:pull"),
            ("GET", "/v2/a/referrers/sha256:00", "repository:a:pull"),
            ("POST", "/v2/a/blobs/uploads/", "repository:a:pull,push"),
            ("PATCH", "/v2/a/blobs/uploads/7d-1_x=", "repository:a:pull,push"),
            ("GET", "/v2/a/blobs/uploads/7d-1", "repository:a:pull,push"),
            ("DELETE", "/v2/a/blobs/uploads/7d-1", "repository:a:pull,push"),
            ("PUT", "/v2/a/manifests/v1", "repository:a:pull,push"),
            ("DELETE", "/v2/a/manifests/sha256:00", "repository:a:delete"),
            ("GET", "/v2/manifests/manifests/manifests", "repository:manifests:pull"),
        ] {
            let expected = (!wanted.is_empty()).then(|| wanted.to_owned());
            assert_eq!(scope(method, path), Some(expected), "{method} {path}");
        }
    }

    #[test]
    fn what_is_none_of_the_api_or_reads_two_ways_takes_no_token() {
        for path in [
            "/",
            "/v1/a/manifests/b",
            "/v2/auth",
            "/v2/token",
            "/token",
            "/v2x/a/manifests/b",
            "/v2/a/manifests/",
            "/v2//manifests/b",
            "/v2/a//b/manifests/c",
            "/v2/../a/manifests/b",
            "/v2/a/../b/manifests/c",
            "/v2/a%2fb/manifests/c",
            "/v2/A/manifests/c",
            "/v2/a:pull/manifests/c",
            "/v2/a,b/manifests/c",
            "/v2/a b/manifests/c",
            "/v2/a/manifests/..",
            "/v2/a/blobs/uploads/../../b",
            "/v2/a/tags/other",
        ] {
            assert_eq!(scope("GET", path), None, "{path}");
        }
    }

    #[test]
    fn answers_mean_a_token_a_wrong_password_or_no_access() {
        let shown = |status, body: &str| match read(status, body.as_bytes()) {
            _ if denies(status) => "denied".to_owned(),
            Meaning::Had { value, life, .. } => {
                format!("{} {life:?}", String::from_utf8_lossy(value.expose_secret()))
            }
            Meaning::Refused(_) => "refused".to_owned(),
            Meaning::Unknown(_) => "unknown".to_owned(),
            Meaning::Later(_) => "later".to_owned(),
        };
        let long = format!(r#"{{"token":"{}"}}"#, "x".repeat(TOKEN_BYTES_MAX + 1));
        for (status, body, expected) in [
            (200, r#"{"token":"TOKEN-CANARY"}"#, "Bearer TOKEN-CANARY Until(60s)"),
            (
                200,
                r#"{"access_token":"TOKEN-CANARY","expires_in":9}"#,
                "Bearer TOKEN-CANARY Until(9s)",
            ),
            (NO_TOKEN, "Basic YTpiYmJiYmJiYg==", "Basic YTpiYmJiYmJiYg== Until(300s)"),
            (200, r#"{"token":"two\r\nlines-of-it"}"#, "later"),
            (200, r#"{"token":"short"}"#, "later"),
            (200, &long, "later"),
            (200, "<html>", "later"),
            (401, "", "refused"),
            (403, "", "denied"),
            (404, "", "denied"),
            (429, "", "later"),
            (503, "", "later"),
        ] {
            assert_eq!(shown(status, body), expected, "{status} {body}");
        }
    }

    #[test]
    fn an_echo_of_the_token_or_of_the_password_alone_is_found() {
        let texts = |value: &str| -> Vec<String> {
            let parts = parts(&Secret::new(value.as_bytes().to_vec()));
            parts.iter().map(|p| String::from_utf8(p.expose_secret().to_vec()).unwrap()).collect()
        };

        assert_eq!(texts("Bearer TOKEN-CANARY"), ["TOKEN-CANARY"]);
        assert_eq!(texts("Basic Ym90OmE6Yg=="), ["Ym90OmE6Yg==", "a:b"]);
    }
}
