//! Reads `[credentials.NAME]`: which secret, put where, for which hosts.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::groups::Groups;
use super::reader::{Reader, Section, Span, Spanned};
use super::{inject, is_name, variables};
use crate::credential::{Backend, Credential, GrantKind, Inject, Made, SecretRef, When};
use crate::diagnostic::nearest;

pub(crate) const CREDENTIAL: &[&str] =
    &["secret", "inject", "when", "hosts", "env", "shape", "allow-plaintext"];

/// What the beginnings of placeholders can be, besides what follows from their variables.
pub const SHAPES: &[&str] = &[
    "ghp_",
    "gho_",
    "ghs_",
    "github_pat_",
    "glpat-",
    "npm_",
    "sk-ant-api03-",
    "sk-proj-",
    "sk_test_",
    "sk_live_",
    "xoxb-",
    "xoxp-",
    "AKIA",
    "jwt",
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

pub(crate) fn read(
    reader: &mut Reader<'_>,
    environment: &str,
    top: &Section<'_>,
    groups: &Groups,
) -> Credentials {
    let mut credentials = Credentials::default();
    let Some(section) = top.section(reader, "credentials") else { return credentials };
    for (name, item, span) in section.entries() {
        if !is_name(name) {
            reader.error(&span, "a credential's name is made of a-z, 0-9, \"-\", \"_\"");
        }
        let mut named = Named { span: span.clone(), env_span: None, made: None };
        if let Some(own) = section.enter(reader, name, item, span) {
            named.env_span = own.has("env").then(|| own.span_of("env"));
            let made = credential(reader, name, &own, groups);
            let environment = Some(environment.to_owned());
            named.made = made.map(|made| Arc::new(Credential { environment, ..made }));
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
    let inject = inject::read(reader, section);
    let hosts = groups.hosts(reader, section).into_iter().map(|host| host.value).collect();
    let (env, shape, when) = (env(reader, section), shape(reader, section), when(reader, section));
    let allow_plaintext = section.boolean(reader, "allow-plaintext").unwrap_or(false);
    let message = match &inject {
        Some((Inject::Placeholder { .. }, _)) => {
            "a placeholder that the sandbox never sees cannot be replaced"
        }
        Some((Inject::AwsSigV4 { .. }, _)) => {
            "what no client in the sandbox signs cannot be signed again"
        }
        _ if when == When::Placeholder => "the sandbox never sees a placeholder",
        _ => "",
    };
    if !message.is_empty() && !section.has("env") {
        let hint = "give it a name: env = \"TOKEN\"";
        reader.error_hint(&section.span_of("inject"), message, hint);
    }
    if matches!(&inject, Some((Inject::ClientCertificate, _))) {
        check_certificate(reader, section);
    }
    let (secret, (inject, grant)) = (secret?, inject?);
    let rotates = grant.as_ref().is_some_and(|grant| grant.kind == GrantKind::RefreshToken);
    if rotates && secret.backend != Backend::Local {
        // Its server may give another one, which has to be stored.
        let message = "a refresh token lies in the embedded vault only";
        reader.error_hint(&section.span_of("secret"), message, "secret = \"local:NAME\"");
    }
    if secret.backend == Backend::AwsRole && !matches!(inject, Inject::AwsSigV4 { .. }) {
        let message = "the keys of a role sign requests and stand in none";
        let hint = "inject = { aws-sigv4 = { ... } }";
        reader.error_hint(&section.span_of("secret"), message, hint);
    }
    let other = matches!(inject, Inject::Registry { .. } | Inject::ClientCertificate);
    if secret.backend == Backend::OpenBaoLease && (grant.is_some() || other) {
        let message = "what is made for one lease goes into its requests as it is";
        let hint = "inject it as bearer, basic, header, query, placeholder or aws-sigv4";
        reader.error_hint(&section.span_of("secret"), message, hint);
    }
    check_pair(reader, section, &secret, &inject);
    let name = name.to_owned();
    let environment = None;
    Some(Credential {
        environment,
        name,
        secret,
        grant,
        inject,
        when,
        hosts,
        env,
        shape,
        allow_plaintext,
    })
}

/// A user and a password of one value: what a server makes together, each a field of one lease. Of
/// another secret nobody could tell in a tool's output that its second half is one by itself.
fn check_pair(reader: &mut Reader<'_>, section: &Section<'_>, secret: &SecretRef, inject: &Inject) {
    if *inject != (Inject::Basic { user: None }) {
        return;
    }
    let pair = secret.backend == Backend::OpenBaoLease
        && Made::parse(&secret.path).is_some_and(|made| made.fields.len() == 2);
    if !pair {
        let message = "this secret is no user and password of one lease";
        let hint = "name the user, inject = { basic = \"USER\" }, or both fields, \
                    secret = \"openbao-lease:database/creds/agents#username:password\"";
        reader.error_hint(&section.span_of("inject"), message, hint);
    }
}

/// A certificate is shown before any request is there, and never to a sandbox.
fn check_certificate(reader: &mut Reader<'_>, section: &Section<'_>) {
    for key in ["env", "shape", "when"] {
        if section.has(key) {
            let message = format!(
                "nothing of a certificate stands in a request: \"{key}\" has no meaning for it"
            );
            reader.error_hint(&section.span_of(key), message, "leave it out");
        }
    }
    if section.has("allow-plaintext") {
        let message = "a certificate is shown over TLS only";
        reader.error_hint(&section.span_of("allow-plaintext"), message, "leave it out");
    }
}

fn env(reader: &mut Reader<'_>, section: &Section<'_>) -> Vec<String> {
    let names = match section.is_string("env") {
        true => section.string(reader, "env").into_iter().collect(),
        false => section.strings(reader, "env").unwrap_or_default(),
    };
    for name in &names {
        variables::check_placeholder(reader, name);
    }
    names.into_iter().map(|name| name.value).collect()
}

fn shape(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<String> {
    let shape = section.string(reader, "shape")?;
    if !SHAPES.contains(&shape.value.as_str()) {
        let hint = format!("shapes: {}", SHAPES.join(", "));
        reader.error_hint(&shape.span, "unknown shape of a placeholder", hint);
        return None;
    }
    Some(shape.value)
}

fn when(reader: &mut Reader<'_>, section: &Section<'_>) -> When {
    let Some(text) = section.string(reader, "when") else { return When::default() };
    match text.value.as_str() {
        "always" => When::Always,
        "absent" => When::Absent,
        "placeholder" => When::Placeholder,
        _ => {
            reader.error_hint(&text.span, "unknown \"when\"", "always, absent or placeholder");
            When::default()
        }
    }
}

fn secret(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<SecretRef> {
    if !section.has("secret") {
        section.lacks(reader, "secret", "secret = \"local:NAME\"");
        return None;
    }
    let text = section.string(reader, "secret")?;
    match SecretRef::parse(&text.value) {
        Ok(secret) => Some(secret),
        Err((message, hint)) => {
            reader.error_hint(&text.span, message, hint);
            None
        }
    }
}
