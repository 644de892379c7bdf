//! The API of OpenBao and Vault, as far as a reader of its key-value store (version 2) needs it:
//! log in, renew the token, read one version of one secret.

use policies::Entry;
use serde_json::{Value, json};

use super::{Ask, Errand, Meaning, checked};
use crate::config::{Method, OpenBao};
use crate::vault::VaultError;
use crate::vault::mint::Life;
use crate::vault::secret::Secret;
use crate::vault::wire::Fetch;

/// A token without an end is looked at again after this time.
const ENDLESS_SECONDS: u64 = 3600;

/// The question that gives a token of the vault's own.
pub(super) fn login(server: &OpenBao, shown: &Secret) -> Result<Ask, VaultError> {
    let mount = &server.mount;
    if server.method == Method::Token {
        return Ok(ask(server, "GET", "auth/token/lookup-self", Some(shown), None));
    }
    let text = std::str::from_utf8(shown.expose_secret()).map_err(|_| {
        VaultError::Refused("what is shown to the OpenBao server is no text".into())
    })?;
    let body = match server.method {
        Method::Approle => json!({ "role_id": server.role, "secret_id": text }),
        Method::Jwt => json!({ "role": server.role, "jwt": text }),
        Method::Cert | Method::Token => json!({ "name": server.role }),
    };
    Ok(ask(server, "POST", &format!("auth/{mount}/login"), None, Some(&body)))
}

/// The question that lets a token live on.
pub(super) fn renew(server: &OpenBao, token: &Secret) -> Ask {
    ask(server, "POST", "auth/token/renew-self", Some(token), Some(&json!({})))
}

/// The question for a value.
pub(super) fn read(server: &OpenBao, entry: &Entry<'_>, token: &Secret) -> Ask {
    let within = |mount: &&String| {
        entry.path.strip_prefix(mount.as_str()).is_some_and(|rest| rest.starts_with('/'))
    };
    let longest = server.mounts.iter().filter(within).max_by_key(|mount| mount.len());
    let first = entry.path.find('/').unwrap_or(entry.path.len());
    let (mount, path) = entry.path.split_at(longest.map_or(first, String::len));
    let version = entry.version.map(|version| format!("?version={version}")).unwrap_or_default();
    ask(server, "GET", &format!("{mount}/data{path}{version}"), Some(token), None)
}

pub(super) fn ask(
    server: &OpenBao,
    method: &str,
    path: &str,
    token: Option<&Secret>,
    body: Option<&Value>,
) -> Ask {
    // Whoever makes a server behind it act for it by a link does not send this field.
    let mut headers = vec![("X-Vault-Request".to_owned(), "true".to_owned())];
    headers.extend(server.namespace.iter().map(|n| ("X-Vault-Namespace".to_owned(), n.clone())));
    if body.is_some() {
        headers.push(("Content-Type".to_owned(), "application/json".to_owned()));
    }
    let mut parts: Vec<Secret> =
        token.iter().map(|token| Secret::concat(&[token.expose_secret()])).collect();
    let secret_headers = token.iter().map(|_| "X-Vault-Token".to_owned()).collect();
    parts.push(Secret::new(body.map(Value::to_string).unwrap_or_default().into_bytes()));
    let url = format!("{}/v1/{path}", server.url);
    let fetch = Fetch { method: method.to_owned(), url, headers, secret_headers };
    Ask { errand: Errand::Fetch(fetch), parts }
}

/// What the answer to a login or a renewal means, and whether the token can be renewed.
pub(super) fn logged_in(
    server: &OpenBao,
    shown: &Secret,
    renewal: bool,
    status: u16,
    body: &[u8],
) -> (Meaning, bool) {
    let what = if renewal { "renewal" } else { "login" };
    if let Some(refusal) = refused(what, status) {
        return (refusal, false);
    }
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let looked_up = server.method == Method::Token && !renewal;
    let (token, ttl, renewable) = match looked_up {
        true => (None, &answer["data"]["ttl"], &answer["data"]["renewable"]),
        false => {
            let auth = &answer["auth"];
            (auth["client_token"].as_str(), &auth["lease_duration"], &auth["renewable"])
        }
    };
    let value = match token {
        Some(token) => Secret::concat(&[token.as_bytes()]),
        None if looked_up => Secret::concat(&[shown.expose_secret()]),
        None => {
            return (
                Meaning::Later(format!("the server's answer to a {what} has no token")),
                false,
            );
        }
    };
    let Some(seconds) = ttl.as_u64() else {
        return (Meaning::Later(format!("the server's answer to a {what} says no end")), false);
    };
    let (seconds, renewable) = match seconds {
        0 => (ENDLESS_SECONDS, false),
        seconds => (seconds, renewable.as_bool() == Some(true)),
    };
    let life = Life::Until(crate::vault::mint::seconds(seconds));
    (Meaning::Had { value, rotated: None, life }, renewable)
}

/// What the answer to a read means.
pub(super) fn value(server: &OpenBao, entry: &Entry<'_>, status: u16, body: &[u8]) -> Meaning {
    if let Some(refusal) = refused("read", status) {
        return refusal;
    }
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let fields = &answer["data"]["data"];
    if !fields.is_object() {
        // Not what such a server says, whoever does.
        return Meaning::Later("the OpenBao server's answer to a read holds no fields".to_owned());
    }
    let Some(text) = fields[entry.field].as_str() else {
        let field = entry.field;
        return Meaning::Refused(format!("the secret has no field {field:?} that is a text"));
    };
    match checked(text.as_bytes()) {
        Ok(value) => {
            let fresh = server.freshness;
            let life = Life::Fresh(fresh.refresh, fresh.stale);
            Meaning::Had { value, rotated: None, life }
        }
        Err(reason) => Meaning::Refused(reason),
    }
}

pub(super) fn refused(what: &str, status: u16) -> Option<Meaning> {
    let reason = format!("the OpenBao server answers a {what} with {status}");
    Some(match status {
        200..=299 => return None,
        301..=308 => {
            Meaning::Later(format!("{reason}: name the active node in [openbao] of proxyd.toml"))
        }
        503 => Meaning::Later(format!("{reason}: it is sealed or stands by")),
        404 => Meaning::Refused(format!("{reason}: there is no such secret or version")),
        400 | 401 | 403 => Meaning::Refused(reason),
        _ => Meaning::Later(reason),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Freshness;

    fn server(method: Method) -> OpenBao {
        let [refresh, stale] = [60, 5].map(Duration::from_secs);
        OpenBao {
            url: "https://bao.example:8200".to_owned(),
            namespace: Some("team".to_owned()),
            mounts: vec!["kv/team".to_owned()],
            method,
            mount: "here".to_owned(),
            role: "agents".to_owned(),
            secret: None,
            freshness: Freshness { refresh, stale },
        }
    }

    fn shown(ask: &Ask) -> String {
        let Errand::Fetch(fetch) = &ask.errand else { panic!("no request") };
        let parts = ask.parts.iter().map(|part| String::from_utf8_lossy(part.expose_secret()));
        format!("{} {} {}", fetch.method, fetch.url, parts.collect::<Vec<_>>().join("|"))
    }

    #[test]
    fn each_login_and_read_is_asked_as_the_api_says() {
        let secret = Secret::new(b"SHOWN-CANARY".to_vec());
        let base = "https://bao.example:8200/v1";
        for (method, expected) in [
            (
                Method::Approle,
                r#"POST B/auth/here/login {"role_id":"agents","secret_id":"SHOWN-CANARY"}"#,
            ),
            (Method::Jwt, r#"POST B/auth/here/login {"role":"agents","jwt":"SHOWN-CANARY"}"#),
            (Method::Cert, r#"POST B/auth/here/login {"name":"agents"}"#),
            (Method::Token, "GET B/auth/token/lookup-self SHOWN-CANARY|"),
        ] {
            let ask = login(&server(method), &secret).unwrap();
            assert_eq!(shown(&ask), expected.replace('B', base));
        }
        let server = server(Method::Token);
        for (entry, expected) in [
            ("secret/a/b#f", "secret/data/a/b"),
            ("secret/a/b@3#f", "secret/data/a/b?version=3"),
            ("kv/team/a#f", "kv/team/data/a"),
            ("kv/teams/a#f", "kv/data/teams/a"),
        ] {
            let ask = read(&server, &Entry::parse(entry).unwrap(), &secret);
            assert_eq!(shown(&ask), format!("GET {base}/{expected} SHOWN-CANARY|"));
        }
        assert_eq!(
            shown(&renew(&server, &secret)),
            format!("POST {base}/auth/token/renew-self SHOWN-CANARY|{{}}")
        );
    }

    #[test]
    fn answers_are_told_apart_and_never_quoted() {
        let text = |meaning: Meaning| match meaning {
            Meaning::Had { value, life, .. } => {
                format!("{} {life:?}", String::from_utf8_lossy(value.expose_secret()))
            }
            Meaning::Refused(why) => format!("refused: {why}"),
            Meaning::Unknown(why) => format!("unknown: {why}"),
            Meaning::Later(why) => format!("later: {why}"),
        };
        let entry = Entry::parse("kv/a#token").unwrap();
        let server = server(Method::Approle);
        for (status, body, expected) in [
            (200, r#"{"data":{"data":{"token":"BAO-CANARY"}}}"#, "BAO-CANARY Fresh(60s, 5s)"),
            (
                200,
                r#"{"data":{"data":{"other":"BAO-CANARY"}}}"#,
                "refused: the secret has no field",
            ),
            (200, r#"{"data":{"data":{"token":7}}}"#, "refused: the secret has no field"),
            (200, "<html>BAO-CANARY", "later: the OpenBao server's answer to a read holds no"),
            (200, r#"{"data":{"data":null}}"#, "later: the OpenBao server's answer to a read"),
            (200, r#"{"data":{"data":{"tok"#, "later: the OpenBao server's answer to a read"),
            (400, "", "refused: the OpenBao server answers a read with 400"),
            (401, "", "refused: the OpenBao server answers a read with 401"),
            (408, "", "later: the OpenBao server answers a read with 408"),
            (429, "", "later: the OpenBao server answers a read with 429"),
            (472, "", "later: the OpenBao server answers a read with 472"),
            (
                404,
                r#"{"data":{"data":null}}"#,
                "refused: the OpenBao server answers a read with 404",
            ),
            (403, "BAO-CANARY", "refused: the OpenBao server answers a read with 403"),
            (
                503,
                r#"{"errors":["BAO-CANARY"]}"#,
                "later: the OpenBao server answers a read with 503",
            ),
            (307, "", "later: the OpenBao server answers a read with 307"),
            (500, "BAO-CANARY", "later: the OpenBao server answers a read with 500"),
        ] {
            let meaning = text(value(&server, &entry, status, body.as_bytes()));
            assert!(meaning.starts_with(expected), "{meaning}");
        }
        let nothing = Secret::new(Vec::new());
        for (body, expected, renewable) in [
            (
                r#"{"auth":{"client_token":"hvs","lease_duration":20,"renewable":true}}"#,
                "hvs Until(20s)",
                true,
            ),
            (
                r#"{"auth":{"client_token":"hvs","lease_duration":0,"renewable":true}}"#,
                "hvs Until(3600s)",
                false,
            ),
            (r#"{"auth":null}"#, "later: the server's answer to a login has no token", false),
        ] {
            let (meaning, can) = logged_in(&server, &nothing, false, 200, body.as_bytes());
            assert_eq!((text(meaning).as_str(), can), (expected, renewable));
        }
    }
}
