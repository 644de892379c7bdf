//! How a registry's token is had: its challenge at `/v2/`, then the realm that it names.
//!
//! The password is shown to the realm alone, and to none that the operator has not named with the
//! credential: a registry that is hostile, or was taken over, could name any server.

use bytes::Bytes;
use policies::{HostPattern, Scheme};

use super::super::registry::NO_TOKEN;
use super::super::secret::Secret;
use super::super::wire::{Exchange, Fetch};
use super::ask;
use crate::upstream::outbound::Outbound;

/// What a registry says of its logins (RFC 9110, section 11.6.1).
#[derive(Debug, Default, PartialEq, Eq)]
struct Challenge {
    scheme: String,
    parameters: Vec<(String, String)>,
}

impl Challenge {
    fn parameter(&self, name: &str) -> Option<&str> {
        let found = self.parameters.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// Status and body of the realm's answer; or [`NO_TOKEN`] and the password as it is to be shown.
pub(super) async fn run(
    outbound: &Outbound,
    asked: &Exchange,
    password: Secret,
) -> Result<(u16, Secret), String> {
    let (head, _) = ask(outbound, &get(asked.url.clone(), false), vec![nothing()]).await?;
    let challenges: Vec<Challenge> = head.headers.all("www-authenticate").flat_map(parse).collect();
    let of = |scheme: &str| challenges.iter().find(|own| own.scheme == scheme);
    let challenge = match (head.status, of("bearer"), of("basic")) {
        (401, Some(bearer), _) => bearer,
        (401, None, Some(_)) | (200..300, ..) => return Ok((NO_TOKEN, password)),
        (401, ..) => return Err("the registry asks for a login of a kind unknown here".to_owned()),
        (status, ..) => return Err(format!("the registry answers {status} at /v2/")),
    };
    let realm = realm(challenge, &asked.hosts)?;
    let url = |scope: Option<&str>| {
        let mut url = realm.to_owned();
        let parameters = [
            ("service", challenge.parameter("service")),
            ("account", Some(&*asked.account)),
            ("scope", scope),
        ];
        for (name, value) in parameters.into_iter().filter_map(|(n, v)| Some((n, v?))) {
            url.push(if url.contains('?') { '&' } else { '?' });
            url.push_str(name);
            url.push('=');
            encode(value, &mut url);
        }
        url
    };
    let password = password.into_bytes();
    let shown = || vec![copy(&password), nothing()];
    let scope = asked.scope.as_deref();
    let (head, body) = ask(outbound, &get(url(scope), true), shown()).await?;
    if head.status == 401 && scope.is_some() {
        // Some say that of a repository too: without one it is about the password, and whatever
        // else than a refusal of that tells nothing of it.
        let (head, _) = ask(outbound, &get(url(None), true), shown()).await?;
        return Ok(match head.status {
            200..300 => (403, nothing()),
            other => (other, nothing()),
        });
    }
    Ok((head.status, body))
}

fn nothing() -> Secret {
    Secret::new(Vec::new())
}

fn copy(bytes: &Bytes) -> Secret {
    Secret::concat(&[bytes])
}

fn get(url: String, with_password: bool) -> Fetch {
    Fetch {
        method: "GET".to_owned(),
        url,
        headers: vec![("Accept".to_owned(), "application/json".to_owned())],
        secret_headers: with_password.then(|| "Authorization".to_owned()).into_iter().collect(),
    }
}

/// Where the challenge sends the password, if it may go there.
fn realm<'a>(challenge: &'a Challenge, hosts: &[String]) -> Result<&'a str, String> {
    let realm = challenge.parameter("realm").ok_or("the registry's challenge has no realm")?;
    let (address, query) = realm.split_once('?').unwrap_or((realm, ""));
    let unsound = |why: &str| format!("the registry names no sound realm: {why}");
    let (scheme, host, ..) = policies::split_url(address).map_err(|why| unsound(&why))?;
    if scheme != Scheme::Https {
        return Err(unsound("passwords are shown over https only"));
    }
    if !query.bytes().chain(address.bytes()).all(|b| b.is_ascii_graphic() && b != b'#') {
        return Err(unsound("it holds what no address does"));
    }
    let named = hosts.iter().filter_map(|host| HostPattern::parse(host).ok());
    match named.into_iter().any(|pattern| pattern.matches(&host)) {
        true => Ok(realm),
        false => Err(format!(
            "the registry sends the password to {host}, which hosts of the credential does not list"
        )),
    }
}

fn encode(text: &str, out: &mut String) {
    use std::fmt::Write;
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || b"-._~:/,".contains(&byte) {
            true => out.push(char::from(byte)),
            // A string takes whatever is written to it.
            false => _ = write!(out, "%{byte:02X}"),
        }
    }
}

/// The challenges of one field, in order. What cannot be read ends the list.
fn parse(field: &Bytes) -> Vec<Challenge> {
    let text = String::from_utf8_lossy(field);
    let mut rest = text.as_ref();
    let mut found: Vec<Challenge> = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let Some((word, after)) = token(rest) else { return found };
        let spaced = after.trim_start_matches([' ', '\t']);
        match (spaced.strip_prefix('='), found.last_mut()) {
            (Some(value), Some(challenge)) => {
                let Some((value, after)) = value_of(value.trim_start_matches([' ', '\t'])) else {
                    return found;
                };
                // The first of a name counts.
                if challenge.parameter(&word).is_none() {
                    challenge.parameters.push((word, value));
                }
                rest = after;
            }
            (Some(_), None) => return found,
            (None, _) => {
                found.push(Challenge { scheme: word, parameters: Vec::new() });
                rest = after;
            }
        }
    }
}

/// RFC 9110, section 5.6.2; in lower case, since neither schemes nor names tell cases apart.
fn token(text: &str) -> Option<(String, &str)> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    let end = text.bytes().position(|b| !legal(b)).unwrap_or(text.len());
    (end > 0).then(|| (text[..end].to_ascii_lowercase(), &text[end..]))
}

/// A quoted string or a token.
fn value_of(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ', '\t']).unwrap_or(text.len());
        return (end > 0).then(|| (text[..end].to_owned(), &text[end..]));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<String> {
        let shown = |challenge: Challenge| {
            let pairs = challenge.parameters.iter().map(|(name, value)| format!(" {name}={value}"));
            challenge.scheme.clone() + &pairs.collect::<String>()
        };
        parse(&Bytes::copy_from_slice(text.as_bytes())).into_iter().map(shown).collect()
    }

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        for (text, expected) in [
            (
                r#"Bearer realm="https://auth.example/token",service="reg",scope="a:b:c,d""#,
                vec!["bearer realm=https://auth.example/token service=reg scope=a:b:c,d"],
            ),
            (r#"BASIC realm="x""#, vec!["basic realm=x"]),
            (
                r#"Basic realm="a, b", Bearer realm = "c""#,
                vec!["basic realm=a, b", "bearer realm=c"],
            ),
            (r#"Bearer realm="a\"b",realm="second""#, vec![r#"bearer realm=a"b"#]),
            ("Bearer realm=plain, service=x", vec!["bearer realm=plain service=x"]),
            ("Negotiate, Basic", vec!["negotiate", "basic"]),
            (r#"Bearer realm="open"#, vec!["bearer"]),
            (r#"realm="x""#, vec![]),
            ("", vec![]),
            (",,,", vec![]),
            ("Bearer =", vec![]),
        ] {
            assert_eq!(parsed(text), expected, "{text}");
        }
    }

    #[test]
    fn the_password_goes_to_no_realm_that_is_not_named() {
        let hosts = ["auth.example".to_owned(), "*.tokens.example".to_owned()];
        for (address, good) in [
            ("https://auth.example/token", true),
            ("https://auth.example/token?x=y", true),
            ("https://AUTH.example:8443/token", true),
            ("https://a.tokens.example/", true),
            ("https://tokens.example/", false),
            ("http://auth.example/token", false),
            ("https://evil.example/token", false),
            ("https://auth.example.evil.example/token", false),
            ("https://auth.example@evil.example/token", false),
            ("https://evil.example?auth.example/", false),
            ("https://evil.example/#auth.example", false),
            ("https://auth.example\\@evil.example/", false),
            ("https://auth.example/a b", false),
            ("auth.example/token", false),
            ("", false),
        ] {
            let parameters = vec![("realm".to_owned(), address.to_owned())];
            let challenge = Challenge { scheme: "bearer".to_owned(), parameters };
            assert_eq!(realm(&challenge, &hosts).is_ok(), good, "{address}");
        }
        assert!(realm(&Challenge::default(), &hosts).is_err());
    }
}
