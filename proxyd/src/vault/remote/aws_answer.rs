//! What AWS's answers mean: a secret's value, a session's keys, a refusal for good or for now.
//!
//! Of a refusal nothing is quoted but a word that stands in one of the lists here.

use std::borrow::Cow;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use policies::AwsEntry;
use serde::Deserialize;
use serde_json::Value;

use super::{Meaning, checked};
use crate::config::Freshness;
use crate::vault::mint::{Life, seconds};
use crate::vault::secret::Secret;
use crate::vault::sigv4::parse;

/// Whoever keeps it will not change its mind.
const FOR_GOOD: &[&str] = &[
    "AccessDenied",
    "AccessDeniedException",
    "DecryptionFailure",
    "IDPRejectedClaim",
    "InvalidIdentityToken",
    "InvalidParameterException",
    "InvalidRequestException",
    "MalformedPolicyDocument",
    "PackedPolicyTooLarge",
    "RegionDisabledException",
    "ResourceNotFoundException",
    "ValidationError",
    "ValidationException",
];
/// The keys that it was asked with count no more.
const UNKNOWN: &[&str] = &[
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
];

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer<'a> {
    #[serde(borrow)]
    secret_string: Option<Cow<'a, str>>,
    #[serde(borrow)]
    secret_binary: Option<Cow<'a, str>>,
}

/// What the answer to GetSecretValue means.
pub(super) fn secret(entry: &AwsEntry<'_>, fresh: Freshness, status: u16, body: &[u8]) -> Meaning {
    if status != 200 {
        let word = serde_json::from_slice::<Value>(body).unwrap_or_default();
        let word = word["__type"].as_str().unwrap_or_default();
        // Some name the namespace in front.
        return refused("AWS Secrets Manager", status, word.rsplit('#').next().unwrap_or_default());
    }
    let Ok(answer) = serde_json::from_slice::<Answer<'_>>(body) else {
        return Meaning::Later("AWS Secrets Manager's answer cannot be read".to_owned());
    };
    let whole = match (answer.secret_string, answer.secret_binary) {
        (Some(text), _) => Secret::new(text.into_owned().into_bytes()),
        (None, Some(coded)) => match STANDARD.decode(coded.as_bytes()) {
            Ok(bytes) => Secret::new(bytes),
            Err(_) => {
                return Meaning::Later("AWS Secrets Manager's answer cannot be read".to_owned());
            }
        },
        // Not what such a server says, whoever does.
        (None, None) => return Meaning::Later("the secret has no value".to_owned()),
    };
    let value = match entry.field {
        None => checked(whole.expose_secret()),
        Some(name) => field(whole.expose_secret(), name),
    };
    match value {
        Ok(value) => {
            let life = Life::Fresh(fresh.refresh, fresh.stale);
            Meaning::Had { value, rotated: None, life }
        }
        Err(reason) => Meaning::Refused(reason),
    }
}

fn field(whole: &[u8], name: &str) -> Result<Secret, String> {
    let fields: Option<std::collections::HashMap<Cow<'_, str>, Value>> =
        serde_json::from_slice(whole).ok();
    let text = fields.as_ref().and_then(|fields| fields.get(name)).and_then(Value::as_str);
    match text {
        Some(text) => checked(text.as_bytes()),
        None => Err(format!("the secret is no JSON with a field {name:?} that is a text")),
    }
}

/// What a container's agent and an instance's metadata service say of keys.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Keys<'a> {
    #[serde(borrow)]
    code: Option<Cow<'a, str>>,
    #[serde(borrow)]
    access_key_id: Cow<'a, str>,
    #[serde(borrow)]
    secret_access_key: Cow<'a, str>,
    #[serde(borrow)]
    token: Cow<'a, str>,
    expiration: jiff::Timestamp,
}

/// What the answer of whoever gives this host its keys means.
pub(super) fn host_keys(status: u16, body: &[u8], now: u64) -> Meaning {
    match status {
        200 => {}
        400 | 401 | 403 | 404 => {
            return Meaning::Refused(format!("whoever gives this host keys answers {status}"));
        }
        _ => return Meaning::Later(format!("whoever gives this host keys answers {status}")),
    }
    let keys = serde_json::from_slice::<Keys<'_>>(body).ok();
    let keys = keys.filter(|keys| keys.code.as_ref().is_none_or(|code| code == "Success"));
    let Some(keys) = keys else {
        return Meaning::Later("whoever gives this host keys has none".to_owned());
    };
    let parts = [&*keys.access_key_id, &*keys.secret_access_key, &*keys.token];
    session(parts, keys.expiration, now)
}

/// What the token service's answer means.
pub(super) fn assumed(status: u16, body: &[u8], now: u64) -> Meaning {
    let text = std::str::from_utf8(body).unwrap_or_default();
    if status != 200 {
        let word = element(text, "Error").and_then(|error| element(error, "Code"));
        return refused("AWS STS", status, word.unwrap_or_default());
    }
    let keys = element(text, "Credentials");
    let part = |name| keys.and_then(|keys| element(keys, name)).map(str::trim);
    let end = part("Expiration").and_then(|end| end.parse::<jiff::Timestamp>().ok());
    match (part("AccessKeyId"), part("SecretAccessKey"), part("SessionToken"), end) {
        (Some(id), Some(secret), Some(token), Some(end)) => session([id, secret, token], end, now),
        _ => Meaning::Later("AWS STS's answer holds no keys".to_owned()),
    }
}

fn session(parts: [&str; 3], end: jiff::Timestamp, now: u64) -> Meaning {
    // Separates them in the value.
    let sound = parts.iter().all(|part| !part.is_empty() && !part.contains(':'));
    let [id, secret, token] = parts.map(str::as_bytes);
    let value = checked(Secret::concat(&[id, b":", secret, b":", token]).expose_secret());
    let value = value.ok().filter(|value| sound && parse(value).is_ok());
    let Some(value) = value else {
        return Meaning::Later("the keys of the answer are none".to_owned());
    };
    let left = u64::try_from(end.as_second()).unwrap_or_default().saturating_sub(now);
    match seconds(left) {
        Duration::ZERO => Meaning::Later("the keys have expired already".to_owned()),
        left => Meaning::Had { value, rotated: None, life: Life::Session(left) },
    }
}

/// The text of the first element of that name that holds none of the same name.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(inner, _)| inner)
}

fn refused(who: &str, status: u16, word: &str) -> Meaning {
    let known = |list: &[&str]| list.contains(&word);
    let reason = match known(FOR_GOOD) || known(UNKNOWN) {
        true => format!("{who} answers {status} {word}"),
        false => format!("{who} answers {status}"),
    };
    match status {
        400..=499 if known(FOR_GOOD) => Meaning::Refused(reason),
        400..=499 if known(UNKNOWN) => Meaning::Unknown(reason),
        _ => Meaning::Later(reason),
    }
}

#[cfg(test)]
#[path = "aws_answer_tests.rs"]
mod tests;
