//! Reads `inject = { … }` of a credential: the place, and how a token is had for the secret.

use super::grants;
use super::reader::{Reader, Section, Spanned};
use crate::credential::{Grant, Inject, Place};

pub(crate) const INJECT: &[&str] = &[
    "bearer",
    "basic",
    "registry",
    "header",
    "query",
    "placeholder",
    "aws-sigv4",
    "client-certificate",
    "oauth2",
    "github-app",
];
pub(crate) const BASIC: &[&str] = &["user"];
pub(crate) const HEADER: &[&str] = &["name", "template"];
pub(crate) const SIGV4: &[&str] = &["regions", "services"];

const PLACES: &[(&str, Place)] = &[
    ("header", Place::Header),
    ("basic", Place::Basic),
    ("path", Place::Path),
    ("query", Place::Query),
    ("body", Place::Body),
];

/// Headers that frame or route a message; a credential there would change where it goes or ends.
const HEADERS_RESERVED: &[&str] = &[
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Ways to have a token for the secret; they stand beside a place or alone.
const TOKENS: &[&str] = &["oauth2", "github-app"];

/// What `inject` says: the place, and the grant where the secret is not itself put there.
pub(crate) fn read(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
) -> Option<(Inject, Option<Grant>)> {
    let example = "inject = { bearer = true }";
    if !section.has("inject") {
        section.lacks(reader, "inject", example);
        return None;
    }
    let table = section.section(reader, "inject")?;
    let keys: Vec<&str> = table.entries().map(|(key, ..)| key).collect();
    table.check_keys(reader, INJECT);
    let (grants, places): (Vec<&str>, Vec<&str>) =
        keys.iter().partition(|key| TOKENS.contains(key));
    let message = match (grants.len(), places.len()) {
        (0, 1) | (1, 0 | 1) => None,
        (0, 0) => Some(format!("\"inject\" holds exactly one of {}", INJECT.join(", "))),
        (0 | 1, _) => {
            let places: Vec<_> = INJECT.iter().copied().filter(|k| !TOKENS.contains(k)).collect();
            Some(format!("\"inject\" holds exactly one of {}", places.join(", ")))
        }
        _ => Some("a credential has one way to its tokens".to_owned()),
    };
    if let Some(message) = message {
        reader.error_hint(&table.span, message, example);
        return None;
    }
    let grant = grants.first().map(|kind| grants::read(reader, &table, kind));
    let inject = match places.first() {
        None => Some(Inject::Bearer),
        Some(place) => place_of(reader, &table, place),
    };
    let message = match inject {
        _ if grant.is_none() => "",
        Some(Inject::Registry { .. }) => {
            "a registry has tokens of its own: \"registry\" stands alone"
        }
        Some(Inject::AwsSigV4 { .. }) => "a token signs no request: \"aws-sigv4\" stands alone",
        Some(Inject::ClientCertificate) => {
            "a token is no certificate: \"client-certificate\" stands alone"
        }
        _ => "",
    };
    if !message.is_empty() {
        reader.error(&table.span, message);
    }
    match grant {
        Some(None) => None,
        Some(grant) => Some((inject?, grant)),
        None => Some((inject?, None)),
    }
}

fn place_of(reader: &mut Reader<'_>, table: &Section<'_>, kind: &str) -> Option<Inject> {
    match kind {
        "bearer" => on(reader, table, kind, Inject::Bearer),
        "client-certificate" => on(reader, table, kind, Inject::ClientCertificate),
        "basic" if table.is_boolean(kind) => on(reader, table, kind, Inject::Basic { user: None }),
        "basic" => Some(Inject::Basic { user: Some(user(reader, table, kind)?) }),
        "registry" => Some(Inject::Registry { user: user(reader, table, kind)? }),
        "header" => header(reader, table),
        "query" => query(reader, table),
        "placeholder" => placeholder(reader, table),
        "aws-sigv4" => sigv4(reader, table),
        _ => None,
    }
}

fn on(reader: &mut Reader<'_>, table: &Section<'_>, kind: &str, inject: Inject) -> Option<Inject> {
    let on = table.boolean(reader, kind)?;
    if !on {
        reader.error(&table.span_of(kind), format!("\"{kind}\" is true or absent"));
    }
    on.then_some(inject)
}

/// The user of a kind that shows a password.
fn user(reader: &mut Reader<'_>, table: &Section<'_>, kind: &str) -> Option<String> {
    let user = if table.is_string(kind) {
        table.string(reader, kind)?
    } else {
        let inner = table.section(reader, kind)?;
        inner.check_keys(reader, BASIC);
        required(reader, &inner, "user", &format!("{kind} = {{ user = \"x-access-token\" }}"))?
    };
    // RFC 7617 section 2: the first colon ends the user.
    if user.value.contains(|c: char| c == ':' || c.is_control()) {
        reader.error(&user.span, "a user holds no colon and no control character");
        return None;
    }
    Some(user.value)
}

fn header(reader: &mut Reader<'_>, table: &Section<'_>) -> Option<Inject> {
    let (name, template) = if table.is_string("header") {
        (table.string(reader, "header")?, None)
    } else {
        let inner = table.section(reader, "header")?;
        inner.check_keys(reader, HEADER);
        let template = inner.string(reader, "template");
        (required(reader, &inner, "name", "header = { name = \"x-api-key\" }")?, template)
    };
    // RFC 9110 section 5.6.2, token.
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.value.is_empty() || !name.value.bytes().all(token) {
        reader.error(&name.span, "not the name of a header");
        return None;
    }
    let lower = name.value.to_ascii_lowercase();
    if HEADERS_RESERVED.contains(&lower.as_str()) {
        reader.error(&name.span, format!("header \"{lower}\" frames the message"));
        return None;
    }
    let Some(template) = template else {
        return Some(Inject::Header { name: lower, template: "{}".to_owned() });
    };
    let visible = template.value.bytes().all(|b| b == b' ' || b.is_ascii_graphic());
    let trimmed = template.value.trim() == template.value;
    if template.value.matches("{}").count() != 1 || !visible || !trimmed {
        let message = "a template is visible ASCII with one \"{}\", where the value goes";
        reader.error_hint(&template.span, message, "template = \"Token {}\"");
        return None;
    }
    Some(Inject::Header { name: lower, template: template.value })
}

fn query(reader: &mut Reader<'_>, table: &Section<'_>) -> Option<Inject> {
    let name = table.string(reader, "query")?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    if name.value.is_empty() || !name.value.bytes().all(plain) {
        let message = "a parameter's name is made of letters, digits, \"-\", \".\", \"_\", \"~\"";
        reader.error_hint(&name.span, message, "query = \"api_key\"");
        return None;
    }
    Some(Inject::Query { name: name.value })
}

fn placeholder(reader: &mut Reader<'_>, table: &Section<'_>) -> Option<Inject> {
    let texts = table.strings(reader, "placeholder")?;
    let hint = || {
        let names: Vec<&str> = PLACES.iter().map(|(name, _)| *name).collect();
        format!("places: {}", names.join(", "))
    };
    let mut places = Vec::new();
    for text in &texts {
        match PLACES.iter().find(|(name, _)| *name == text.value) {
            None => reader.error_hint(&text.span, "unknown place of a placeholder", hint()),
            Some((_, place)) if places.contains(place) => {
                reader.error(&text.span, "listed twice");
            }
            Some((_, place)) => places.push(*place),
        }
    }
    if texts.is_empty() {
        reader.error_hint(&table.span_of("placeholder"), "no place to replace it in", hint());
    }
    (!places.is_empty()).then_some(Inject::Placeholder { places })
}

fn sigv4(reader: &mut Reader<'_>, table: &Section<'_>) -> Option<Inject> {
    let inner = table.section(reader, "aws-sigv4")?;
    inner.check_keys(reader, SIGV4);
    let mut list = |key: &str, example: &str| {
        if !inner.has(key) {
            inner.lacks(reader, key, example);
        }
        let texts = inner.strings(reader, key)?;
        for text in &texts {
            let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
            if text.value.is_empty() || !text.value.bytes().all(plain) {
                reader.error_hint(&text.span, "not as it stands in a signature's scope", example);
            }
        }
        if texts.is_empty() {
            reader.error_hint(&inner.span_of(key), "an empty list signs nothing", example);
        }
        Some(texts.into_iter().map(|text| text.value).collect::<Vec<_>>())
    };
    let regions = list("regions", "regions = [\"eu-central-1\"]");
    let services = list("services", "services = [\"s3\"]");
    Some(Inject::AwsSigV4 { regions: regions?, services: services? })
}

pub(crate) fn required(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    key: &str,
    example: &str,
) -> Option<Spanned<String>> {
    if !section.has(key) {
        section.lacks(reader, key, example);
    }
    section.string(reader, key)
}
