//! `proxyd.sock`: secrets in, names and audit out (see `ipc::vault` for the calls).
//!
//! Who may connect is the socket's mode; beyond that, only root, this daemon's own user, the uids
//! of the other daemons and members of the group that the socket is open to may do more than read
//! the CA and the health.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use ipc::fault::{Code, Fault};
use ipc::peer::Principal;
use ipc::vault::{
    AuditPage, ChainReport, Head, Health, SECRET_BYTES_MAX, SECRET_BYTES_MIN, ScrubReply,
    ScrubRequest, SecretInfo,
};
use serde_json::{Value, json};
use tokio::net::UnixListener;

use crate::Daemon;
use crate::audit::{AuditError, Filter, Line};
use crate::metrics;
use crate::reload;
use crate::rotation::{self, RotationError};
use crate::sys::accounts::account;
use crate::vault::{Secret, VaultError};

/// How long running calls may still take when the daemon ends.
pub const DRAIN: Duration = Duration::from_secs(3);
/// Longest body of a call other than a secret: texts to be searched, mostly.
const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;

/// All calls. `operators` is a group whose members may make all of them.
pub fn router(daemon: Arc<Daemon>, operators: Option<u32>) -> Router {
    let trusted = Router::new()
        .route("/v1/secrets/{name}", put(put_secret).delete(remove_secret))
        .route("/v1/secrets", get(list_secrets))
        .route("/v1/vault/rotate", post(rotate_key))
        .route("/v1/vault/wrapping-key", post(replace_wrapping_key))
        .route("/v1/authorities", get(list_authorities))
        .route("/v1/authorities/rotate", post(rotate_authority))
        .route("/v1/audit", get(audit_page))
        .route("/v1/audit/verify", get(audit_verify))
        .route("/v1/heads", post(keep_head))
        .route("/v1/scrub", post(scrub_texts))
        .route("/v1/leases", get(list_leases))
        .route("/v1/metrics", get(metrics))
        .route("/v1/reload", post(read_again))
        .route_layer(middleware::from_fn_with_state(
            (Arc::clone(&daemon), operators),
            only_trusted,
        ));
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/ca.pem", get(ca))
        .merge(trusted)
        .fallback(|| async { Fault::new(Code::NotFound, "no such call") })
        .with_state(daemon)
}

/// The group that the socket is open to, if it is to one and not to everybody.
pub fn operators(socket: &UnixListener) -> Option<u32> {
    let address = socket.local_addr().ok()?;
    group_of(&std::fs::metadata(address.as_pathname()?).ok()?)
}

fn group_of(socket: &std::fs::Metadata) -> Option<u32> {
    (socket.mode() & 0o022 == 0o020).then(|| socket.gid())
}

/// The kernel has let the peer in already, by its groups of then; a group that somebody was given
/// for one program alone is no account's, hence the first look.
fn is_member(peer: Principal, group: u32) -> bool {
    peer.gid == group || account(peer.uid).gids.contains(&group)
}

async fn only_trusted(
    State((daemon, operators)): State<(Arc<Daemon>, Option<u32>)>,
    Extension(peer): Extension<Principal>,
    request: Request,
    next: Next,
) -> Response {
    if daemon.trusts(peer) || operators.is_some_and(|group| is_member(peer, group)) {
        return next.run(request).await;
    }
    Fault::new(Code::Denied, format!("{peer} may not use this call of proxyd"))
        .with_hint(
            "it is for root, proxyd's own user, members of the socket's group \
             (cleanhands-operators), and trusted-users of proxyd.toml",
        )
        .into_response()
}

async fn health(State(daemon): State<Arc<Daemon>>) -> Json<Health> {
    Json(Health {
        daemon: "proxyd".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        generation: daemon.policies.current().number,
        ca_sha256: daemon.vault.authorities()[0].sha256.clone(),
        key_source: daemon.facts.key_source.clone(),
        vault_pid: daemon.facts.pid,
        policies: Some(daemon.policies.dir().to_owned()),
        problem: reload::problem(&daemon),
        in_force: daemon.configured.in_force(&daemon.policies),
    })
}

async fn ca(State(daemon): State<Arc<Daemon>>) -> Response {
    let kind = [(http::header::CONTENT_TYPE, "application/x-pem-file")];
    (kind, daemon.vault.ca_pem()).into_response()
}

async fn put_secret(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Principal>,
    Path(name): Path<String>,
    request: Request,
) -> Result<Json<SecretInfo>, Fault> {
    let value = secret(request).await?;
    let stored = daemon.vault.put(&name, value).await.map_err(vault_fault)?;
    note(&daemon, format!("secret {name} version {} set by {peer}", stored.version)).await?;
    Ok(Json(stored))
}

/// Reads a secret's value. The collected copy is wiped with the [`Secret`]; what hyper read it
/// into is freed unwiped and belongs to this process alone.
async fn secret(request: Request) -> Result<Secret, Fault> {
    let body = body(request, SECRET_BYTES_MAX).await?;
    if body.len() < SECRET_BYTES_MIN {
        let text = format!("a secret has at least {SECRET_BYTES_MIN} bytes");
        return Err(Fault::new(Code::Invalid, text)
            .with_hint("shorter ones could not be told from ordinary text in answers"));
    }
    Ok(Secret::new(Vec::from(body)))
}

async fn body(request: Request, bytes_max: usize) -> Result<Bytes, Fault> {
    let limited = Limited::new(request.into_body(), bytes_max);
    match limited.collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            let text = format!("the body is longer than {bytes_max} bytes");
            Err(Fault::new(Code::TooLarge, text))
        }
        Err(_) => Err(Fault::new(Code::Invalid, "the body broke off")),
    }
}

async fn parsed<T: serde::de::DeserializeOwned>(request: Request) -> Result<T, Fault> {
    let body = body(request, BODY_BYTES_MAX).await?;
    serde_json::from_slice(&body).map_err(|error| {
        Fault::new(Code::Invalid, format!("the body is not as documented: {error}"))
    })
}

async fn list_secrets(State(daemon): State<Arc<Daemon>>) -> Result<Json<Value>, Fault> {
    let secrets = daemon.vault.list().await.map_err(vault_fault)?;
    Ok(Json(json!({ "secrets": secrets })))
}

async fn remove_secret(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Principal>,
    Path(name): Path<String>,
) -> Result<Json<Value>, Fault> {
    daemon.vault.remove(&name).await.map_err(vault_fault)?;
    note(&daemon, format!("secret {name} removed by {peer}")).await?;
    Ok(Json(json!({ "name": name })))
}

async fn rotate_key(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Principal>,
) -> Result<Json<Value>, Fault> {
    let rows = daemon.vault.rotate().await.map_err(vault_fault)?;
    note(&daemon, format!("the vault's data key replaced by {peer}: {rows} rows")).await?;
    Ok(Json(json!({ "rows": rows })))
}

async fn replace_wrapping_key(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Principal>,
) -> Result<Json<Value>, Fault> {
    daemon.vault.rewrap().await.map_err(vault_fault)?;
    note(&daemon, format!("the vault's key replaced by {peer}")).await?;
    Ok(Json(json!({})))
}

async fn list_authorities(State(daemon): State<Arc<Daemon>>) -> Json<Value> {
    Json(json!({ "authorities": rotation::list(&daemon) }))
}

async fn rotate_authority(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Principal>,
) -> Result<Json<Value>, Fault> {
    // In a task of its own: whoever asks may go away in the middle.
    let rotating = tokio::spawn({
        let daemon = Arc::clone(&daemon);
        async move { rotation::rotate(&daemon, peer).await }
    });
    let ended = rotating.await.map_err(|error| Fault::new(Code::Internal, error.to_string()))?;
    ended.map_err(|error| match error {
        RotationError::Vault(error) => vault_fault(error),
        RotationError::Audit(error) => audit_fault(error),
    })?;
    Ok(list_authorities(State(daemon)).await)
}

async fn audit_page(
    State(daemon): State<Arc<Daemon>>,
    query: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Json<AuditPage>, Fault> {
    let wrong = |reason| Fault::new(Code::Invalid, reason);
    let Query(pairs) = query.map_err(|_| wrong("the query is not NAME=VALUE&...".to_owned()))?;
    let filter = Filter::parse(&pairs, jiff::Timestamp::now()).map_err(wrong)?;
    daemon.audit.page(filter).await.map(Json).map_err(audit_fault)
}

async fn audit_verify(State(daemon): State<Arc<Daemon>>) -> Result<Json<ChainReport>, Fault> {
    daemon.audit.verify().await.map(Json).map_err(audit_fault)
}

async fn keep_head(
    State(daemon): State<Arc<Daemon>>,
    request: Request,
) -> Result<Json<Value>, Fault> {
    let head: Head = parsed(request).await?;
    let is_hash = head.head.len() == 64 && head.head.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_hash {
        return Err(Fault::new(Code::Invalid, "head is not a SHA-256 in hex"));
    }
    let line = Line {
        session: Some(head.session),
        reason: Some(format!("session head after {} events: {}", head.events, head.head)),
        generation: daemon.policies.current().number,
        ..Line::default()
    };
    daemon.audit.note(&line).await.map_err(audit_fault)?;
    Ok(Json(json!({})))
}

async fn scrub_texts(
    State(daemon): State<Arc<Daemon>>,
    request: Request,
) -> Result<Json<ScrubReply>, Fault> {
    let ScrubRequest { environment, texts } = parsed(request).await?;
    if daemon.policies.current().environment(&environment).is_none() {
        return Err(Fault::new(Code::Missing, format!("no environment {environment:?}")));
    }
    let (texts, found) = daemon.vault.mask(&environment, texts).await.map_err(vault_fault)?;
    Ok(Json(ScrubReply { texts, found }))
}

async fn list_leases(State(daemon): State<Arc<Daemon>>) -> Json<Value> {
    Json(json!({ "leases": daemon.leases.views() }))
}

async fn metrics(State(daemon): State<Arc<Daemon>>) -> Result<Response, Fault> {
    let text = metrics::text(&daemon).await.map_err(vault_fault)?;
    let kind = [(http::header::CONTENT_TYPE, metrics::CONTENT_TYPE)];
    Ok((kind, text).into_response())
}

async fn read_again(State(daemon): State<Arc<Daemon>>) -> Result<Json<Value>, Fault> {
    let generation = reload::all(&daemon).await.map_err(|error| {
        Fault::new(Code::Invalid, error.to_string())
            .with_hint("what is wrong changes nothing: the former state of it stays in force")
    })?;
    Ok(Json(json!({ "generation": generation })))
}

/// A change of secrets is recorded; when that fails the caller must know.
async fn note(daemon: &Daemon, reason: String) -> Result<(), Fault> {
    let generation = daemon.policies.current().number;
    let line = Line { reason: Some(reason), generation, ..Line::default() };
    daemon.audit.note(&line).await.map(|_| ()).map_err(audit_fault)
}

fn vault_fault(error: VaultError) -> Fault {
    let code = match &error {
        VaultError::Gone | VaultError::Failed(_) | VaultError::Unavailable(_) => Code::Unavailable,
        VaultError::Missing(_) => Code::NotFound,
        VaultError::Refused(_) | VaultError::NeedsLogin(_) => Code::Denied,
        VaultError::Invalid(_) => Code::Invalid,
        VaultError::Key(_) => Code::Internal,
    };
    Fault::new(code, error.to_string())
}

fn audit_fault(error: AuditError) -> Fault {
    Fault::new(Code::Unavailable, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn members_of_the_sockets_group_are_operators_where_it_is_open_to_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("proxyd.sock");
        let socket = UnixListener::bind(&path).unwrap();
        let own = Principal::own();
        let open_to = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            operators(&socket)
        };

        let of_its_group = std::fs::metadata(&path).unwrap().gid();
        assert_eq!(open_to(0o660), Some(of_its_group));
        assert_eq!((open_to(0o600), open_to(0o666)), (None, None));

        assert!(is_member(Principal { uid: u32::MAX - 1, ..own }, own.gid));
        // Whoever is in no account database is in no group but the one that it shows.
        let beyond = Principal { gid: u32::MAX - 1, ..own };
        assert!(account(own.uid).gids.into_iter().all(|group| is_member(beyond, group)));
        assert!(account(0).gids.contains(&0) && is_member(Principal { uid: 0, ..beyond }, 0));
        assert!(!is_member(Principal { uid: u32::MAX - 1, ..own }, own.gid.wrapping_add(1)));
    }
}
