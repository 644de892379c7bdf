//! Reads `oauth2 = { … }` and `github-app = { … }`: where access tokens are had for a secret.

use std::collections::BTreeMap;

use super::egress::split_url;
use super::inject::required;
use super::reader::{Reader, Section, Spanned};
use crate::credential::{Client, ClientAuth, Grant, GrantKind, is_secret_name};
use crate::egress::Scheme;

pub(crate) const OAUTH2: &[&str] = &[
    "grant",
    "token-url",
    "client-id",
    "client-secret",
    "client-auth",
    "scope",
    "resource",
    "audience",
    "issuer",
    "subject",
    "key-id",
];
pub(crate) const GITHUB_APP: &[&str] =
    &["app", "installation", "repositories", "permissions", "url"];

const GRANTS: &str = "refresh-token, client-credentials, jwt-bearer";
const GITHUB: &str = "https://api.github.com";

pub(super) fn read(reader: &mut Reader<'_>, table: &Section<'_>, kind: &str) -> Option<Grant> {
    let inner = table.section(reader, kind)?;
    match kind {
        "oauth2" => oauth2(reader, &inner),
        _ => github_app(reader, &inner),
    }
}

fn oauth2(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Grant> {
    section.check_keys(reader, OAUTH2);
    let example = "grant = \"client-credentials\"";
    let grant = required(reader, section, "grant", example);
    let example = "token-url = \"https://login.example.com/token\"";
    let url = required(reader, section, "token-url", example);
    let url = url.and_then(|url| address(reader, &url));
    let grant = grant?;
    let assertion = grant.value == "jwt-bearer";
    for key in ["issuer", "subject", "key-id"].into_iter().filter(|key| section.has(key)) {
        if !assertion {
            reader.error(&section.span_of(key), format!("\"{key}\" is for grant \"jwt-bearer\""));
        }
    }
    let client = client(reader, section, &grant.value);
    let mut parameters = BTreeMap::new();
    for key in ["scope", "resource"] {
        if let Some(text) = section.string(reader, key) {
            parameters.insert(key.to_owned(), text.value);
        }
    }
    let audience = section.string(reader, "audience").map(|text| text.value);
    let kind = match grant.value.as_str() {
        "refresh-token" => GrantKind::RefreshToken,
        "client-credentials" => GrantKind::ClientCredentials,
        "jwt-bearer" => GrantKind::JwtBearer {
            issuer: required(reader, section, "issuer", "issuer = \"name@project.example\"")?.value,
            subject: section.string(reader, "subject").map(|text| text.value),
            audience: audience.clone().or(url.clone())?,
            key_id: section.string(reader, "key-id").map(|text| text.value),
        },
        _ => {
            let hint = format!("grants: {GRANTS}");
            reader.error_hint(&grant.span, "unknown grant", hint);
            return None;
        }
    };
    if let Some(audience) = audience.filter(|_| !assertion) {
        parameters.insert("audience".to_owned(), audience);
    }
    Some(Grant { kind, url: url?, client, parameters })
}

/// The client that asks; assertions need none.
fn client(reader: &mut Reader<'_>, section: &Section<'_>, grant: &str) -> Option<Client> {
    let secret = section.string(reader, "client-secret").and_then(|text| {
        let own = grant == "client-credentials";
        if own {
            let message = "with \"client-credentials\" the credential's secret is the client's";
            reader.error(&text.span, message);
        }
        let name = text.value.strip_prefix("local:").filter(|name| is_secret_name(name));
        if name.is_none() && !own {
            let hint = "client-secret = \"local:NAME\"";
            reader.error_hint(&text.span, "a client's secret is named, as in \"local:NAME\"", hint);
        }
        name.map(str::to_owned)
    });
    let auth = match section.string(reader, "client-auth") {
        None if secret.is_some() || grant == "client-credentials" => ClientAuth::Basic,
        None => ClientAuth::None,
        Some(text) => match text.value.as_str() {
            "basic" => ClientAuth::Basic,
            "post" => ClientAuth::Post,
            "none" => ClientAuth::None,
            _ => {
                reader.error_hint(&text.span, "unknown \"client-auth\"", "basic, post or none");
                return None;
            }
        },
    };
    if secret.is_none() && grant == "refresh-token" && auth != ClientAuth::None {
        let message = "a client that shows a secret has one";
        let hint = "client-secret = \"local:NAME\"";
        reader.error_hint(&section.span_of("client-auth"), message, hint);
    }
    if grant == "client-credentials" && auth == ClientAuth::None {
        let message = "with \"client-credentials\" the client shows its secret";
        let hint = "client-auth = \"basic\" or \"post\"";
        reader.error_hint(&section.span_of("client-auth"), message, hint);
    }
    if grant == "jwt-bearer" && !section.has("client-id") {
        for key in ["client-secret", "client-auth"].into_iter().filter(|key| section.has(key)) {
            let message = format!("\"{key}\" without \"client-id\": there is no client");
            reader.error_hint(&section.span_of(key), message, "client-id = \"cleanhands\"");
        }
        return None;
    }
    let id = required(reader, section, "client-id", "client-id = \"cleanhands\"")?.value;
    Some(Client { id, secret, auth })
}

fn github_app(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Grant> {
    section.check_keys(reader, GITHUB_APP);
    let app = required(reader, section, "app", "app = \"12345\"");
    let installation = required(reader, section, "installation", "installation = \"67890\"");
    if let Some(text) = &installation
        && (text.value.is_empty() || !text.value.bytes().all(|b| b.is_ascii_digit()))
    {
        reader.error(&text.span, "an installation is a number, in quotes");
    }
    let base = match section.string(reader, "url") {
        None => GITHUB.to_owned(),
        Some(url) => address(reader, &url)?,
    };
    let names = section.strings(reader, "repositories").unwrap_or_default();
    let repositories = names.into_iter().map(|name| name.value).collect();
    let mut permissions = BTreeMap::new();
    if let Some(table) = section.section(reader, "permissions") {
        for (name, _, span) in table.entries() {
            match table.string(reader, name) {
                Some(level) if ["read", "write", "admin"].contains(&level.value.as_str()) => {
                    permissions.insert(name.to_owned(), level.value);
                }
                Some(_) => reader.error_hint(&span, "unknown level", "read, write or admin"),
                None => {}
            }
        }
    }
    let url = format!(
        "{}/app/installations/{}/access_tokens",
        base.trim_end_matches('/'),
        installation?.value
    );
    let kind = GrantKind::GithubApp { app: app?.value, repositories, permissions };
    Some(Grant { kind, url, client: None, parameters: BTreeMap::new() })
}

/// Whoever can read a request for tokens has the secret: nothing but TLS.
fn address(reader: &mut Reader<'_>, url: &Spanned<String>) -> Option<String> {
    match split_url(&url.value) {
        Ok((Scheme::Https, ..)) => return Some(url.value.clone()),
        Ok(_) => reader.error(&url.span, "secrets are shown over https only"),
        Err(why) => reader.error(&url.span, format!("not the address of a server: {why}")),
    }
    None
}
