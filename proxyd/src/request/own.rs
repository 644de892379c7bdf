//! Requests that proxyd answers itself, with placeholders, in the place of servers that would hand
//! out real tokens: token endpoints that clients ask on their own.
//!
//! The client goes on as it is used to, and what it then sends gets the credential as any other
//! request. Nothing of such a request leaves, so no real token can come back.

use std::sync::Arc;

use bytes::Bytes;
use ipc::id::RequestId;
use policies::{Credential, GrantKind, Host, Inject, Policy};
use serde_json::{Value, json};

use super::{Asked, BODY_WAIT, BODY_WAIT_BYTES_MAX, Outcome, Scene, judged_by, refuse};
use crate::audit::Line;
use crate::entry::authority;
use crate::head::{Fields, RequestHead, ResponseHead};
use crate::inject::InjectError;
use crate::relay::body::BodyOut;
use crate::relay::h1::framing::Framing;
use crate::reply::Refusal;
use crate::vault::registry::Access;

/// How long clients keep a placeholder before they ask again. It serves as long as the lease.
const LIFE_SECONDS: u64 = 3600;

/// A request that is answered here.
pub struct Own {
    credential: Arc<Credential>,
    kind: Kind,
    rule: String,
    generation: u64,
}

enum Kind {
    /// The server that gives a registry's tokens.
    Registry,
    /// The token endpoint of the credential's grant.
    Grant,
}

/// An answer, whole.
struct Answer {
    status: u16,
    kind: &'static str,
    body: String,
}

/// Whether the request is one of those. Where a rule has to let it through and none does, it is
/// not: it is refused like any other.
pub fn find(scene: &Scene, head: &RequestHead) -> Option<Own> {
    let (policy, generation) = scene.lease.policy(&scene.daemon.policies.current())?;
    let (credential, kind) = candidate(&policy, &scene.host, head)?;
    // Under another name it is refused.
    authority::settle(&head.authority, &scene.host, scene.port)?;
    let permit = judged_by(scene, head).ok()?.judge(&policy).ok()?;
    let given = permit.credential().map(|credential| &credential.name);
    if matches!(kind, Kind::Registry) && given != Some(&credential.name) {
        return None;
    }
    Some(Own { credential, kind, rule: permit.rule().to_owned(), generation })
}

/// By host and path alone. Most policies have no credential that could be meant.
fn candidate(policy: &Policy, host: &Host, head: &RequestHead) -> Option<(Arc<Credential>, Kind)> {
    policy.credentials.values().find_map(|credential| {
        let kind = match (&credential.inject, &credential.grant) {
            (Inject::Registry { .. }, _) if credential.may_go_to(host) && asks_for_token(head) => {
                Kind::Registry
            }
            (_, Some(grant)) if is_endpoint(&grant.url, host, head.path()) => Kind::Grant,
            _ => return None,
        };
        Some((Arc::clone(credential), kind))
    })
}

/// As clients ask for tokens of a registry: by a path that is none of its API, for a service or a
/// scope in the query, or by a form.
fn asks_for_token(head: &RequestHead) -> bool {
    let named = |query: &[u8]| {
        query
            .split(|byte| *byte == b'&')
            .any(|piece| piece.starts_with(b"service=") || piece.starts_with(b"scope="))
    };
    Access::of(0, &head.method, head.path()).is_none()
        && (&head.method[..] == b"POST" || head.query().is_some_and(named))
}

/// Whether a server could take the path for that of the endpoint: it must not get through in
/// another spelling.
fn is_endpoint(url: &str, host: &Host, path: &[u8]) -> bool {
    let Ok((_, own, _, own_path)) = policies::split_url(url) else { return false };
    own == *host && folded(own_path.as_bytes()) == folded(path)
}

/// A path without what servers may not tell apart: escapes, letter case, doubled and final
/// slashes, dots alone, parameters.
fn folded(path: &[u8]) -> Vec<Vec<u8>> {
    let mut decoded = path.to_vec();
    // An escape of an escape is one more.
    for _ in 0..2 {
        decoded = crate::inject::percent_decoded(&decoded).into_owned();
    }
    let mut out: Vec<Vec<u8>> = Vec::new();
    for segment in decoded.split(|byte| matches!(byte, b'/' | b'\\')) {
        let plain = segment.split(|byte| *byte == b';').next().unwrap_or_default();
        match plain {
            b"" | b"." => {}
            b".." => _ = out.pop(),
            plain => out.push(plain.to_ascii_lowercase()),
        }
    }
    out
}

/// Answers it; what was asked for stands in the audit first, as if it had left.
pub async fn serve(
    scene: &Scene,
    asked: &mut Asked<'_>,
    own: Own,
    mut line: Box<Line>,
    id: &RequestId,
) {
    line.rule = Some(own.rule.clone());
    line.generation = own.generation;
    line.credential = Some(own.credential.name.clone());
    let answer = match answer(scene, &own).await {
        Ok(answer) => answer,
        Err(error) => {
            let refusal = Refusal::from(error);
            super::record_denied(&scene.daemon, *line, &refusal).await;
            return refuse(scene, asked, &refusal, id).await;
        }
    };
    if let Err(error) = scene.daemon.audit.allow(&line).await {
        tracing::error!(%error, "request stopped: the audit cannot be written");
        let refusal = Refusal::from(error);
        return refuse(scene, asked, &refusal, id).await;
    }
    let mut outcome = Outcome::new(Arc::clone(&scene.daemon), line);
    outcome.line.status = Some(answer.status);
    outcome.line.reason = Some("answered by proxyd with a placeholder".to_owned());
    if send(asked, answer).await.is_ok() {
        outcome.done();
    }
}

async fn send(asked: &mut Asked<'_>, answer: Answer) -> Result<(), crate::relay::body::WriteError> {
    if !asked.body.is_done() {
        // What a client sends with it (its own password, a placeholder) is nobody's to read.
        let reading = asked.body.linger(BODY_WAIT_BYTES_MAX);
        if tokio::time::timeout(BODY_WAIT, reading).await.is_err() {
            asked.responder.close();
        }
    }
    let mut headers = Fields::new();
    headers.append("content-type", Bytes::from_static(answer.kind.as_bytes()));
    headers.append("content-length", answer.body.len().to_string().into());
    headers.append("cache-control", Bytes::from_static(b"no-store"));
    let head = ResponseHead { status: answer.status, reason: Bytes::new(), headers };
    let body = Bytes::from(answer.body);
    let mut out = asked.responder.start(head, Framing::Length(body.len() as u64)).await?;
    if !matches!(out, BodyOut::None) {
        out.data(body).await?;
    }
    out.finish(None).await
}

async fn answer(scene: &Scene, own: &Own) -> Result<Answer, InjectError> {
    let made = scene.daemon.vault.placeholders(&scene.lease.id, &own.credential).await;
    let made = made.map_err(|error| InjectError::of_vault(error, &own.credential))?;
    let token = made.into_iter().next().map(|(_, placeholder)| placeholder).unwrap_or_default();
    let (status, body) = match own.kind {
        Kind::Registry => (200, registry_token(&token)),
        Kind::Grant => grant_token(&own.credential, &token),
    };
    Ok(Answer { status, kind: "application/json", body: body.to_string() })
}

/// As the distribution project's token specification has it.
fn registry_token(token: &str) -> Value {
    let now = jiff::Timestamp::now().to_string();
    json!({ "token": token, "access_token": token, "expires_in": LIFE_SECONDS, "issued_at": now })
}

fn grant_token(credential: &Credential, token: &str) -> (u16, Value) {
    let grant = credential.grant.as_ref();
    if let Some(GrantKind::GithubApp { .. }) = grant.map(|grant| &grant.kind) {
        let end = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(LIFE_SECONDS as i64);
        let end = end.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let body = json!({ "token": token, "expires_at": end, "permissions": {},
            "repository_selection": "selected" });
        return (201, body);
    }
    let mut body =
        json!({ "access_token": token, "token_type": "Bearer", "expires_in": LIFE_SECONDS });
    if let Some(scope) = grant.and_then(|grant| grant.parameters.get("scope")) {
        body["scope"] = json!(scope);
    }
    (200, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host::parse("login.example").unwrap()
    }

    #[test]
    fn an_endpoint_is_known_in_every_spelling_that_a_server_may_take_for_it() {
        let url = "https://login.example/oauth/token";
        for (path, is) in [
            ("/oauth/token", true),
            ("/oauth/token/", true),
            ("//oauth//token", true),
            ("/OAuth/Token", true),
            ("/oauth/%74oken", true),
            ("/oauth/%2574oken", true),
            ("/oauth%2ftoken", true),
            ("/x/../oauth/token", true),
            ("/oauth/./token;v=1", true),
            ("/oauth\\token", true),
            ("/oauth/tokens", false),
            ("/oauth", false),
            ("/api/oauth/token", false),
            ("/", false),
        ] {
            assert_eq!(is_endpoint(url, &host(), path.as_bytes()), is, "{path}");
        }
        let other = Host::parse("api.example").unwrap();
        assert!(!is_endpoint(url, &other, b"/oauth/token"));
    }
}
