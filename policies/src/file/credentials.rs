//! Reads `[credentials.NAME]`: which secret, put where, for which hosts.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::groups::Groups;
use super::reader::{Reader, Section, Span, Spanned};
use super::{is_name, is_variable};
use crate::credential::{Backend, Credential, Inject, Place, SecretRef};
use crate::diagnostic::nearest;

pub(crate) const CREDENTIAL: &[&str] = &["secret", "inject", "hosts", "env", "allow-plaintext"];
pub(crate) const INJECT: &[&str] = &["bearer", "basic", "header", "placeholder"];
pub(crate) const BASIC: &[&str] = &["user"];
pub(crate) const HEADER: &[&str] = &["name", "template"];

/// Kinds and backends that the format reserves and this version does not have yet.
const INJECT_LATER: &[&str] = &["query", "aws-sigv4", "oauth2", "github-app", "client-certificate"];
const BACKENDS_LATER: &[&str] = &["vault", "openbao", "aws-secrets-manager", "file", "exec"];

const PLACES: &[&str] = &["header", "basic", "path", "query"];

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

/// Every credential that the file names, even those that are not whole, so that one mistake is
/// reported once.
#[derive(Debug, Default)]
pub(crate) struct Credentials {
    named: BTreeMap<String, Named>,
}

#[derive(Debug)]
pub(crate) struct Named {
    pub span: Span,
    pub env_span: Option<Span>,
    pub made: Option<Arc<Credential>>,
}

impl Credentials {
    pub fn get(&self, name: &str) -> Option<&Named> {
        self.named.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Named)> {
        self.named.iter().map(|(name, named)| (name.as_str(), named))
    }

    pub fn made(&self, name: &str) -> Option<&Arc<Credential>> {
        self.named.get(name).and_then(|named| named.made.as_ref())
    }

    /// Finds out whether a name is defined, and says so where it is not.
    pub fn require(&self, reader: &mut Reader<'_>, name: &Spanned<String>) -> Option<&Named> {
        let found = self.get(&name.value);
        if found.is_none() {
            let known: Vec<&str> = self.named.keys().map(String::as_str).collect();
            let hint = nearest(&name.value, &known).map_or_else(
                || format!("define it: [credentials.{}]", name.value),
                |near| format!("did you mean \"{near}\"?"),
            );
            let message = format!("credential \"{}\" is not defined", name.value);
            reader.error_hint(&name.span, message, hint);
        }
        found
    }

    pub fn into_made(self) -> BTreeMap<String, Arc<Credential>> {
        let made = |(name, named): (String, Named)| Some((name, named.made?));
        self.named.into_iter().filter_map(made).collect()
    }
}

pub(crate) fn read(reader: &mut Reader<'_>, top: &Section<'_>, groups: &Groups) -> Credentials {
    let mut credentials = Credentials::default();
    let Some(section) = top.section(reader, "credentials") else { return credentials };
    for (name, item, span) in section.entries() {
        if !is_name(name) {
            reader.error(&span, "a credential's name is made of a-z, 0-9, \"-\", \"_\"");
        }
        let mut named = Named { span: span.clone(), env_span: None, made: None };
        if let Some(own) = section.enter(reader, name, item, span) {
            named.env_span = own.has("env").then(|| own.span_of("env"));
            named.made = credential(reader, name, &own, groups).map(Arc::new);
        }
        credentials.named.insert(name.to_owned(), named);
    }
    credentials
}

fn credential(
    reader: &mut Reader<'_>,
    name: &str,
    section: &Section<'_>,
    groups: &Groups,
) -> Option<Credential> {
    section.check_keys(reader, CREDENTIAL);
    let secret = secret(reader, section);
    let inject = inject(reader, section);
    let hosts = groups.hosts(reader, section).into_iter().map(|host| host.value).collect();
    let env = section.string(reader, "env").and_then(|env| {
        let good = is_variable(&env.value);
        if !good {
            reader.error(&env.span, "a variable's name is made of letters, digits and \"_\"");
        }
        good.then_some(env.value)
    });
    let allow_plaintext = section.boolean(reader, "allow-plaintext").unwrap_or(false);
    if matches!(inject, Some(Inject::Placeholder { .. })) && !section.has("env") {
        let message = "a placeholder that the sandbox never sees cannot be replaced";
        reader.error_hint(&section.span_of("inject"), message, "give it a name: env = \"TOKEN\"");
    }
    let (secret, inject) = (secret?, inject?);
    Some(Credential { name: name.to_owned(), secret, inject, hosts, env, allow_plaintext })
}

fn secret(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<SecretRef> {
    if !section.has("secret") {
        section.lacks(reader, "secret", "secret = \"local:NAME\"");
        return None;
    }
    let text = section.string(reader, "secret")?;
    let Some((backend, path)) = text.value.split_once(':') else {
        let hint = "secret = \"local:NAME\" names a secret; its value is set with \
                    `cleanhands secret set NAME`";
        reader.error_hint(&text.span, "a secret is named as \"backend:path\"", hint);
        return None;
    };
    if backend != "local" {
        let known = BACKENDS_LATER.contains(&backend);
        let message = match known {
            true => format!("backend \"{backend}\" is not supported by this version"),
            false => "unknown backend of secrets".to_owned(),
        };
        reader.error_hint(&text.span, message, "supported: local");
        return None;
    }
    let good = path.len() <= 128
        && path.starts_with(|c: char| c.is_ascii_alphanumeric())
        && path.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    if !good {
        let message = "a secret's name is made of letters, digits, \".\", \"_\", \"-\"";
        reader.error(&text.span, message);
        return None;
    }
    Some(SecretRef { backend: Backend::Local, path: path.to_owned() })
}

fn inject(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Inject> {
    let example = "inject = { bearer = true }";
    if !section.has("inject") {
        section.lacks(reader, "inject", example);
        return None;
    }
    let table = section.section(reader, "inject")?;
    let keys: Vec<&str> = table.entries().map(|(key, ..)| key).collect();
    if let Some(later) = keys.iter().find(|key| INJECT_LATER.contains(key)) {
        let message = format!("injection \"{later}\" is not supported by this version");
        let hint = format!("supported: {}", INJECT.join(", "));
        reader.error_hint(&table.span_of(later), message, hint);
        return None;
    }
    table.check_keys(reader, INJECT);
    if keys.len() != 1 {
        let message = format!("\"inject\" holds exactly one of {}", INJECT.join(", "));
        reader.error_hint(&table.span, message, example);
        return None;
    }
    match keys[0] {
        "bearer" => bearer(reader, &table),
        "basic" => basic(reader, &table),
        "header" => header(reader, &table),
        "placeholder" => placeholder(reader, &table),
        _ => None,
    }
}

fn bearer(reader: &mut Reader<'_>, table: &Section<'_>) -> Option<Inject> {
    let on = table.boolean(reader, "bearer")?;
    if !on {
        reader.error(&table.span_of("bearer"), "\"bearer\" is true or absent");
    }
    on.then_some(Inject::Bearer)
}

fn basic(reader: &mut Reader<'_>, table: &Section<'_>) -> Option<Inject> {
    let user = if table.is_string("basic") {
        table.string(reader, "basic")?
    } else {
        let inner = table.section(reader, "basic")?;
        inner.check_keys(reader, BASIC);
        required(reader, &inner, "user", "basic = { user = \"x-access-token\" }")?
    };
    // RFC 7617 section 2: the first colon ends the user.
    if user.value.contains(|c: char| c == ':' || c.is_control()) {
        reader.error(&user.span, "a user holds no colon and no control character");
        return None;
    }
    Some(Inject::Basic { user: user.value })
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

fn placeholder(reader: &mut Reader<'_>, table: &Section<'_>) -> Option<Inject> {
    let texts = table.strings(reader, "placeholder")?;
    let mut places = Vec::new();
    for text in &texts {
        let place = match text.value.as_str() {
            "header" => Place::Header,
            "basic" => Place::Basic,
            "path" => Place::Path,
            "query" => Place::Query,
            other => {
                let message = match other {
                    "body" => "replacing in a body is not supported by this version".to_owned(),
                    _ => "unknown place of a placeholder".to_owned(),
                };
                reader.error_hint(&text.span, message, format!("places: {}", PLACES.join(", ")));
                continue;
            }
        };
        if places.contains(&place) {
            reader.error(&text.span, "listed twice");
        } else {
            places.push(place);
        }
    }
    if texts.is_empty() {
        let hint = format!("places: {}", PLACES.join(", "));
        reader.error_hint(&table.span_of("placeholder"), "no place to replace it in", hint);
    }
    (!places.is_empty()).then_some(Inject::Placeholder { places })
}

fn required(
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
