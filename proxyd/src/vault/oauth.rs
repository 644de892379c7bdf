//! What is asked of a server that gives access tokens, and what its answer means.
//!
//! | grant | request |
//! |---|---|
//! | refresh token | RFC 6749, section 6 |
//! | client credentials | RFC 6749, section 4.4 |
//! | JWT bearer | RFC 7523, section 2.1; the assertion is signed here |
//! | GitHub App | a JWT of the app, and the installation's URL |
//!
//! Everything here is pure: the clock comes in, a worker does the talking.

use std::fmt::Write;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use policies::{ClientAuth, Grant, GrantKind};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};

use super::VaultError;
use super::mint::Life;
use super::registry;
use super::remote::{Ask, Errand, Meaning};
use super::secret::Secret;
use super::wire::Fetch;

/// How long an assertion is good, and how far its beginning lies back for clocks that are behind.
const ASSERTION_SECONDS: u64 = 540;
const ASSERTION_BACK_SECONDS: u64 = 60;
/// A server that says nothing means at least this; longer would keep a token that is long dead.
const LIFE_SECONDS: u64 = 3600;
/// By which a server says that it will not change its mind (RFC 6749, section 5.2; OpenID Connect
/// Core, section 3.1.2.6; GitHub's own).
const FOR_GOOD: &[&str] = &[
    "access_denied",
    "bad_refresh_token",
    "consent_required",
    "expired_token",
    "incorrect_client_credentials",
    "interaction_required",
    "invalid_client",
    "invalid_grant",
    "invalid_request",
    "invalid_scope",
    "invalid_token",
    "login_required",
    "unauthorized_client",
    "unsupported_grant_type",
];
/// Words of a token server that messages may quote.
const WORD_BYTES_MAX: usize = 40;

/// The question for a grant. `secret` is the credential's own, `client` that of its client.
pub(super) fn ask(
    grant: &Grant,
    secret: &Secret,
    client: Option<&Secret>,
    now: u64,
) -> Result<Ask, VaultError> {
    let nothing = Secret::new(Vec::new());
    let mut form = Form(Vec::new());
    match &grant.kind {
        GrantKind::Registry { user, hosts } => return registry::ask(grant, (user, hosts), secret),
        GrantKind::GithubApp { app, repositories, permissions } => {
            let assertion = assertion(secret, &json!({ "iss": app }), None, now)?;
            let mut wanted = json!({});
            if !repositories.is_empty() {
                wanted["repositories"] = json!(repositories);
            }
            if !permissions.is_empty() {
                wanted["permissions"] = json!(permissions);
            }
            let authorization = Secret::concat(&[b"Bearer ", assertion.expose_secret()]);
            let body = Secret::new(wanted.to_string().into_bytes());
            return Ok(post(grant, "application/json", authorization, body));
        }
        GrantKind::RefreshToken => {
            form.add("grant_type", b"refresh_token");
            form.add("refresh_token", secret.expose_secret());
        }
        GrantKind::ClientCredentials => form.add("grant_type", b"client_credentials"),
        GrantKind::JwtBearer { issuer, subject, audience, key_id } => {
            let mut claims = json!({ "iss": issuer, "aud": audience });
            if let Some(subject) = subject {
                claims["sub"] = json!(subject);
            }
            if let Some(scope) = grant.parameters.get("scope") {
                claims["scope"] = json!(scope);
            }
            let assertion = assertion(secret, &claims, key_id.as_deref(), now)?;
            form.add("grant_type", b"urn:ietf:params:oauth:grant-type:jwt-bearer");
            form.add("assertion", assertion.expose_secret());
        }
    }
    for (name, value) in &grant.parameters {
        form.add(name, value.as_bytes());
    }
    let mut authorization = nothing;
    if let Some(known) = &grant.client {
        let own = matches!(grant.kind, GrantKind::ClientCredentials).then_some(secret);
        match (known.auth, client.or(own)) {
            (ClientAuth::Basic, Some(secret)) => {
                // RFC 6749, section 2.3.1: both are encoded as in a form first.
                let mut pair = Form(Vec::new());
                pair.encode(known.id.as_bytes());
                pair.0.push(b':');
                pair.encode(secret.expose_secret());
                let pair = Secret::new(pair.0);
                let token = Secret::new(STANDARD.encode(pair.expose_secret()).into_bytes());
                authorization = Secret::concat(&[b"Basic ", token.expose_secret()]);
            }
            (ClientAuth::Post, Some(secret)) => {
                form.add("client_id", known.id.as_bytes());
                form.add("client_secret", secret.expose_secret());
            }
            (_, _) => form.add("client_id", known.id.as_bytes()),
        }
    }
    let body = Secret::new(form.0);
    Ok(post(grant, "application/x-www-form-urlencoded", authorization, body))
}

fn post(grant: &Grant, content_type: &str, authorization: Secret, body: Secret) -> Ask {
    let mut secret_headers = Vec::new();
    let mut parts = Vec::new();
    if !authorization.expose_secret().is_empty() {
        secret_headers.push("Authorization".to_owned());
        parts.push(authorization);
    }
    parts.push(body);
    let headers = [("Accept", "application/json"), ("Content-Type", content_type)];
    let errand = Errand::Fetch(Fetch {
        method: "POST".to_owned(),
        url: grant.url.clone(),
        headers: headers.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        secret_headers,
    });
    Ask { errand, parts }
}

/// `application/x-www-form-urlencoded`.
pub(super) struct Form(pub Vec<u8>);

impl Form {
    pub fn add(&mut self, name: &str, value: &[u8]) {
        if !self.0.is_empty() {
            self.0.push(b'&');
        }
        self.encode(name.as_bytes());
        self.0.push(b'=');
        self.encode(value);
    }

    fn encode(&mut self, text: &[u8]) {
        for byte in text {
            match byte.is_ascii_alphanumeric() || b"-._*".contains(byte) {
                true => self.0.push(*byte),
                false => {
                    self.0.push(b'%');
                    self.0.extend_from_slice(hex::encode_upper([*byte]).as_bytes());
                }
            }
        }
    }
}

/// A signed JWT (RFC 7519). The key says how: RSA signs with RS256, P-256 with ES256.
fn assertion(
    secret: &Secret,
    claims: &Value,
    key_id: Option<&str>,
    now: u64,
) -> Result<Secret, VaultError> {
    let key = SigningKey::read(secret)?;
    let mut head = json!({ "alg": key.algorithm(), "typ": "JWT" });
    if let Some(key_id) = key_id {
        head["kid"] = json!(key_id);
    }
    let mut id = [0; 16];
    super::seal::fill(&mut id)?;
    let mut claims = claims.clone();
    claims["iat"] = json!(now.saturating_sub(ASSERTION_BACK_SECONDS));
    claims["exp"] = json!(now + ASSERTION_SECONDS);
    claims["jti"] = json!(hex::encode(id));
    let mut text = URL_SAFE_NO_PAD.encode(head.to_string());
    text.push('.');
    text.push_str(&URL_SAFE_NO_PAD.encode(claims.to_string()));
    let signature = key.sign(text.as_bytes())?;
    text.push('.');
    text.push_str(&URL_SAFE_NO_PAD.encode(signature));
    Ok(Secret::new(text.into_bytes()))
}

enum SigningKey {
    Rsa(Box<RsaKeyPair>),
    P256(Box<EcdsaKeyPair>),
}

impl SigningKey {
    /// From PEM, or from a service account's JSON that holds PEM as `private_key`.
    fn read(secret: &Secret) -> Result<Self, VaultError> {
        let bad = || {
            VaultError::Refused("the secret's value is no RSA or P-256 private key in PEM".into())
        };
        let text = secret.expose_secret();
        let account = match text.trim_ascii().first() {
            Some(b'{') => serde_json::from_slice::<Value>(text).ok(),
            _ => None,
        };
        let pem = account.as_ref().and_then(|account| account["private_key"].as_str());
        let der = PrivateKeyDer::from_pem_slice(pem.map_or(text, str::as_bytes));
        let der = der.map_err(|_| bad())?;
        let bytes = der.secret_der();
        let rsa = match &der {
            PrivateKeyDer::Pkcs1(_) => RsaKeyPair::from_der(bytes).ok(),
            _ => RsaKeyPair::from_pkcs8(bytes).ok(),
        };
        if let Some(rsa) = rsa {
            return Ok(Self::Rsa(Box::new(rsa)));
        }
        let kind = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let p256 = match &der {
            PrivateKeyDer::Sec1(_) => EcdsaKeyPair::from_private_key_der(kind, bytes),
            _ => EcdsaKeyPair::from_pkcs8(kind, bytes),
        };
        p256.map(|key| Self::P256(Box::new(key))).map_err(|_| bad())
    }

    fn algorithm(&self) -> &'static str {
        match self {
            Self::Rsa(_) => "RS256",
            Self::P256(_) => "ES256",
        }
    }

    fn sign(&self, text: &[u8]) -> Result<Vec<u8>, VaultError> {
        let failed = |_| VaultError::Failed("cannot sign an assertion".into());
        let random = SystemRandom::new();
        match self {
            Self::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, text, &mut signature).map_err(failed)?;
                Ok(signature)
            }
            Self::P256(key) => Ok(key.sign(&random, text).map_err(failed)?.as_ref().to_vec()),
        }
    }
}

/// What an answer means. No reason quotes anything but plain words of the protocol.
pub(super) fn read(status: u16, body: &[u8], now: u64) -> Meaning {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    if (200..300).contains(&status) {
        return token(&answer, now);
    }
    let word = answer["error"].as_str().filter(|word| {
        word.len() <= WORD_BYTES_MAX && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    });
    let mut reason = format!("the token server answers {status}");
    if let Some(word) = word {
        let _ = write!(reason, " {word}");
    }
    // Proxies and firewalls in front of that server refuse too, and so does one under load: only
    // its own word, or the status that can be about nothing else, says that the secret is no good.
    let for_good = status == 401 || word.is_some_and(|word| FOR_GOOD.contains(&word));
    match status {
        400 | 401 | 403 if for_good => Meaning::Refused(reason),
        _ => Meaning::Later(reason),
    }
}

fn token(answer: &Value, now: u64) -> Meaning {
    let text = |name: &str| answer[name].as_str().filter(|text| !text.is_empty());
    // GitHub calls it `token`.
    let Some(token) = text("access_token").or_else(|| text("token")) else {
        return Meaning::Later("the token server's answer holds no access token".into());
    };
    if text("token_type").is_some_and(|kind| !kind.eq_ignore_ascii_case("bearer")) {
        return Meaning::Later("the token server gives no Bearer tokens".into());
    }
    if token.len() < ipc::vault::SECRET_BYTES_MIN {
        return Meaning::Later("the token server's tokens are too short to be searched for".into());
    }
    // Some servers write the number as a text.
    let number = |value: &Value| {
        value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()))
    };
    let end = text("expires_at").and_then(|text| text.parse::<jiff::Timestamp>().ok());
    let left = end.and_then(|end| u64::try_from(end.as_second()).ok()?.checked_sub(now));
    let seconds = number(&answer["expires_in"]).or(left).unwrap_or(LIFE_SECONDS);
    Meaning::Had {
        value: Secret::new(token.as_bytes().to_vec()),
        rotated: text("refresh_token").map(|text| Secret::new(text.as_bytes().to_vec())),
        life: Life::Until(super::mint::seconds(seconds)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use policies::Client;

    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text.as_bytes().to_vec())
    }

    fn text(secret: &Secret) -> String {
        String::from_utf8(secret.expose_secret().to_vec()).unwrap()
    }

    fn grant(kind: GrantKind, auth: Option<ClientAuth>) -> Grant {
        let client = auth.map(|auth| Client { id: "the client".into(), secret: None, auth });
        let parameters = BTreeMap::from([("scope".to_owned(), "a b".to_owned())]);
        Grant { kind, url: "https://login.example/token".into(), client, parameters }
    }

    #[test]
    fn a_clients_secret_is_shown_in_the_way_it_is_told() {
        for (auth, authorization, body) in [
            (ClientAuth::Basic, "Basic dGhlJTIwY2xpZW50OnMlM0FjcmV0JTNB", "scope=a%20b"),
            (ClientAuth::Post, "", "scope=a%20b&client_id=the%20client&client_secret=s%3Acret%3A"),
            (ClientAuth::None, "", "scope=a%20b&client_id=the%20client"),
        ] {
            let grant = grant(GrantKind::RefreshToken, Some(auth));

            let ask = ask(&grant, &secret("old/token"), Some(&secret("s:cret:")), 0).unwrap();

            let shown = if ask.parts.len() == 2 { text(&ask.parts[0]) } else { String::new() };
            assert_eq!(shown, authorization);
            let expected = format!("grant_type=refresh_token&refresh_token=old%2Ftoken&{body}");
            assert_eq!(text(ask.parts.last().unwrap()), expected);
        }
        let grant = grant(GrantKind::ClientCredentials, Some(ClientAuth::Post));
        let ask = ask(&grant, &secret("s:cret:"), None, 0).unwrap();
        assert!(
            text(ask.parts.last().unwrap()).ends_with("client_secret=s%3Acret%3A"),
            "{}",
            text(ask.parts.last().unwrap())
        );
    }

    #[test]
    fn assertions_are_signed_by_the_stored_key() {
        use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED, KeyPair, UnparsedPublicKey};
        let pair = rcgen::KeyPair::generate().unwrap();
        let account = json!({ "private_key": pair.serialize_pem() }).to_string();
        for stored in [pair.serialize_pem(), account] {
            let kind = GrantKind::JwtBearer {
                issuer: "robot@example".into(),
                subject: None,
                audience: "https://login.example/token".into(),
                key_id: Some("k1".into()),
            };

            let ask = ask(&grant(kind, None), &secret(&stored), None, 1_000_000).unwrap();

            let body = text(ask.parts.last().unwrap());
            let token = body.split('&').find_map(|p| p.strip_prefix("assertion=")).unwrap();
            let parts: Vec<&str> = token.split('.').collect();
            let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).unwrap();
            let claims: Value = serde_json::from_slice(&decode(parts[1])).unwrap();
            let head: Value = serde_json::from_slice(&decode(parts[0])).unwrap();
            assert_eq!((&head["alg"], &head["kid"]), (&json!("ES256"), &json!("k1")));
            assert_eq!((&claims["iat"], &claims["exp"]), (&json!(999_940), &json!(1_000_540)));
            let SigningKey::P256(key) = SigningKey::read(&secret(&stored)).unwrap() else {
                panic!("not the key that was stored");
            };
            let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key.public_key());
            let signed = format!("{}.{}", parts[0], parts[1]);
            assert!(public.verify(signed.as_bytes(), &decode(parts[2])).is_ok());
        }
    }

    #[test]
    fn answers_are_told_apart_and_nothing_of_them_is_quoted_but_plain_words() {
        let read = |status, body: &str| match read(status, body.as_bytes(), 1_000) {
            Meaning::Had { value, rotated, life: Life::Until(life) } => {
                format!("{} {} {}", text(&value), rotated.is_some(), life.as_secs())
            }
            Meaning::Had { .. } => "another life".to_owned(),
            Meaning::Refused(why) => format!("refused: {why}"),
            Meaning::Unknown(why) => format!("unknown: {why}"),
            Meaning::Later(why) => format!("later: {why}"),
        };
        for (status, body, meaning) in [
            (200, r#"{"access_token":"SECRET-1","expires_in":5}"#, "SECRET-1 false 5"),
            (
                201,
                r#"{"token":"SECRET-1","expires_at":"1970-01-01T00:20:00Z"}"#,
                "SECRET-1 false 200",
            ),
            (
                200,
                r#"{"access_token":"SECRET-1","token_type":"bearer","refresh_token":"x",
                   "expires_in":"60"}"#,
                "SECRET-1 true 60",
            ),
            (
                200,
                r#"{"access_token":"SECRET-1","token_type":"DPoP"}"#,
                "later: the token server gives no Bearer tokens",
            ),
            (200, "<html>SECRET-1", "later: the token server's answer holds no access token"),
            (
                400,
                r#"{"error":"invalid_grant"}"#,
                "refused: the token server answers 400 invalid_grant",
            ),
            (400, r#"{"error":"SECRET-1"}"#, "later: the token server answers 400"),
            (400, "<html>", "later: the token server answers 400"),
            (400, r#"{"error":"Invalid_Grant"}"#, "later: the token server answers 400"),
            (403, "<html>SECRET-1", "later: the token server answers 403"),
            (
                403,
                r#"{"message":"API rate limit exceeded"}"#,
                "later: the token server answers 403",
            ),
            (
                403,
                r#"{"error":"access_denied"}"#,
                "refused: the token server answers 403 access_denied",
            ),
            (302, "", "later: the token server answers 302"),
            (404, "", "later: the token server answers 404"),
            (408, "", "later: the token server answers 408"),
            (
                503,
                r#"{"error":"invalid_grant"}"#,
                "later: the token server answers 503 invalid_grant",
            ),
            (
                429,
                r#"{"error":"invalid_grant"}"#,
                "later: the token server answers 429 invalid_grant",
            ),
            (401, "", "refused: the token server answers 401"),
            (429, "", "later: the token server answers 429"),
            (400, r#"{"error":"slow_down"}"#, "later: the token server answers 400 slow_down"),
            (503, "SECRET-1", "later: the token server answers 503"),
        ] {
            assert_eq!(read(status, body), meaning, "{body}");
        }
    }
}
