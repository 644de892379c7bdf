//! AWS as far as a reader of its secrets needs it: GetSecretValue, signed as any of its requests
//! is; AssumeRole, by keys or by a web identity; keys from a container's agent or an instance.
//!
//! Keys are one value, `ID:SECRET:SESSION-TOKEN`, as `aws-sigv4` has them. What answers mean is in
//! [`super::aws_answer`].

use bytes::Bytes;
use policies::{AwsEntry, AwsVersion, Scheme, SecretRef};
use serde_json::json;

use super::{Ask, Errand, Remote, Shown, asked_wrongly};
use crate::config::{Assumed, Aws, AwsLogin, AwsRole, By};
use crate::head::{Fields, RequestHead};
use crate::inject::sigv4::{self, Key};
use crate::vault::VaultError;
use crate::vault::fetch::host_field;
use crate::vault::oauth::Form;
use crate::vault::secret::Secret;
use crate::vault::sigv4::{parse, signing_key};
use crate::vault::wire::{Fetch, Instance};

const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";
/// What a signature adds to a request.
const SIGNED: [&str; 3] = ["X-Amz-Date", "X-Amz-Security-Token", "Authorization"];

impl Remote {
    pub(super) fn aws(&self) -> Result<&Aws, VaultError> {
        self.0.aws.as_ref().ok_or_else(|| {
            VaultError::Unavailable("proxyd.toml has no [aws]: nobody is known to ask".into())
        })
    }

    fn aws_login(&self) -> Result<&AwsLogin, VaultError> {
        self.aws()?.login.as_ref().ok_or_else(|| {
            VaultError::Unavailable("[aws] of proxyd.toml has no login: there are no keys".into())
        })
    }

    fn aws_role(&self, secret: &SecretRef) -> Result<&AwsRole, VaultError> {
        let name = &secret.path;
        self.aws()?.roles.get(name).ok_or_else(|| {
            VaultError::Unavailable(format!("proxyd.toml has no [aws.roles.{name}]"))
        })
    }

    /// What signs requests that the vault makes for itself.
    pub(super) fn aws_keys(&self) -> Result<Shown<'_>, VaultError> {
        Ok(match self.aws_login()? {
            AwsLogin::Keys(secret) => Shown::Secret(secret),
            _ => Shown::AwsLogin,
        })
    }

    /// What is shown to take the role.
    pub(super) fn aws_role_input(&self, secret: &SecretRef) -> Result<Shown<'_>, VaultError> {
        match &self.aws_role(secret)?.by {
            By::Login => self.aws_keys(),
            By::Keys(secret) | By::WebIdentity(secret) => Ok(Shown::Secret(secret)),
        }
    }

    /// What is shown to have the vault's own keys.
    pub fn aws_login_input(&self) -> Result<Shown<'_>, VaultError> {
        Ok(match self.aws_login()? {
            AwsLogin::Keys(secret) | AwsLogin::WebIdentity { token: secret, .. } => {
                Shown::Secret(secret)
            }
            AwsLogin::Container { token, .. } => token.as_ref().into(),
            AwsLogin::Instance { .. } => Shown::Nothing,
        })
    }

    /// The question for the vault's own keys.
    pub fn ask_aws_login(&self, shown: &Secret) -> Result<Ask, VaultError> {
        let aws = self.aws()?;
        match self.aws_login()? {
            AwsLogin::WebIdentity { role, .. } => Ok(identified(aws, role, shown)),
            AwsLogin::Container { url, token } => container(url, token.is_some(), shown),
            AwsLogin::Instance { url, role } => {
                let errand = Instance { url: url.clone(), role: role.clone() };
                Ok(Ask { errand: Errand::Instance(errand), parts: Vec::new() })
            }
            AwsLogin::Keys(_) => Err(asked_wrongly()),
        }
    }

    /// The question for a role's keys.
    pub(super) fn ask_aws_role(
        &self,
        secret: &SecretRef,
        shown: &Secret,
        now: u64,
    ) -> Result<Ask, VaultError> {
        let (aws, role) = (self.aws()?, self.aws_role(secret)?);
        match role.by {
            By::WebIdentity(_) => Ok(identified(aws, &role.assumed, shown)),
            By::Login | By::Keys(_) => {
                let body = form("AssumeRole", &role.assumed).0;
                let headers = [("Content-Type", FORM)];
                signed(aws, (&aws.sts_url, "sts"), &headers, body, shown, now)
            }
        }
    }

    /// The question for a secret's value.
    pub(super) fn ask_aws_secret(
        &self,
        secret: &SecretRef,
        shown: &Secret,
        now: u64,
    ) -> Result<Ask, VaultError> {
        let aws = self.aws()?;
        let entry = AwsEntry::parse(&secret.path).ok_or_else(asked_wrongly)?;
        let mut body = json!({ "SecretId": entry.id });
        match entry.version {
            Some(AwsVersion::Stage(stage)) => body["VersionStage"] = json!(stage),
            Some(AwsVersion::Id(id)) => body["VersionId"] = json!(id),
            None => {}
        }
        let headers = [
            ("Content-Type", "application/x-amz-json-1.1"),
            ("X-Amz-Target", "secretsmanager.GetSecretValue"),
        ];
        let body = body.to_string().into_bytes();
        signed(aws, (&aws.secrets_url, "secretsmanager"), &headers, body, shown, now)
    }
}

/// What is said of a role, whoever takes it.
fn form(action: &str, role: &Assumed) -> Form {
    let mut form = Form(Vec::new());
    form.add("Action", action.as_bytes());
    form.add("Version", b"2011-06-15");
    form.add("RoleArn", role.arn.as_bytes());
    form.add("RoleSessionName", role.session_name.as_bytes());
    form.add("DurationSeconds", role.duration.as_secs().to_string().as_bytes());
    if let Some(id) = &role.external_id {
        form.add("ExternalId", id.as_bytes());
    }
    if let Some(policy) = &role.policy {
        form.add("Policy", policy.as_bytes());
    }
    for (number, arn) in (1..).zip(&role.policy_arns) {
        form.add(&format!("PolicyArns.member.{number}.arn"), arn.as_bytes());
    }
    form
}

/// A role by a token that somebody else signed: nothing of ours signs the request.
fn identified(aws: &Aws, role: &Assumed, token: &Secret) -> Ask {
    let mut form = form("AssumeRoleWithWebIdentity", role);
    form.add("WebIdentityToken", token.expose_secret());
    let fetch = Fetch {
        method: "POST".to_owned(),
        url: format!("{}/", aws.sts_url),
        headers: vec![("Content-Type".to_owned(), FORM.to_owned())],
        secret_headers: Vec::new(),
    };
    Ask { errand: Errand::Fetch(fetch), parts: vec![Secret::new(form.0)] }
}

fn container(url: &str, shows: bool, token: &Secret) -> Result<Ask, VaultError> {
    if !token.expose_secret().iter().all(|b| b.is_ascii_graphic() || *b == b' ') {
        let text = "what is shown to the container's agent cannot stand in a header";
        return Err(VaultError::Refused(text.to_owned()));
    }
    let mut parts = Vec::new();
    let mut secret_headers = Vec::new();
    if shows {
        parts.push(Secret::concat(&[token.expose_secret()]));
        secret_headers.push("Authorization".to_owned());
    }
    parts.push(Secret::new(Vec::new()));
    let fetch = Fetch {
        method: "GET".to_owned(),
        url: url.to_owned(),
        headers: vec![("Accept".to_owned(), "application/json".to_owned())],
        secret_headers,
    };
    Ok(Ask { errand: Errand::Fetch(fetch), parts })
}

/// A request to one of AWS's services, signed by the keys.
fn signed(
    aws: &Aws,
    (url, service): (&str, &str),
    headers: &[(&str, &str)],
    body: Vec<u8>,
    keys: &Secret,
    now: u64,
) -> Result<Ask, VaultError> {
    let key = parse(keys)?;
    let at = i64::try_from(now).ok().and_then(|now| jiff::Timestamp::from_second(now).ok());
    let at = at.ok_or_else(|| VaultError::Failed("the clock of this host is wrong".into()))?;
    let (_, host, port, target) = policies::split_url(url).map_err(VaultError::Failed)?;
    let authority = host_field(&host, port);
    let mut head = RequestHead {
        method: Bytes::from_static(b"POST"),
        target: target.into(),
        scheme: Scheme::Https,
        authority: authority.clone(),
        headers: Fields::new(),
    };
    head.headers.append("Host", authority.into());
    for (name, value) in headers {
        head.headers.append(name, Bytes::copy_from_slice(value.as_bytes()));
    }
    let signing = signing_key(key.secret, &sigv4::stamp(at)[..8], &aws.region, service);
    let signing = Key { signing: signing.expose_secret(), id: key.id, session: key.session };
    sigv4::sign_own(&mut head, (&aws.region, service), &signing, &body, at);
    let (mut secret_headers, mut parts) = (Vec::new(), Vec::new());
    for name in SIGNED {
        if let Some(value) = head.headers.first(name) {
            secret_headers.push(name.to_owned());
            parts.push(Secret::concat(&[value]));
        }
    }
    parts.push(Secret::new(body));
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let fetch = Fetch {
        method: "POST".to_owned(),
        url: format!("{url}/"),
        headers: headers.collect(),
        secret_headers,
    };
    Ok(Ask { errand: Errand::Fetch(fetch), parts })
}

#[cfg(test)]
#[path = "aws_tests.rs"]
mod tests;
