//! The calls about questions: what is held for an answer, and the answers.
//!
//! They are for operators alone. The other daemons, whose words count elsewhere, read what models
//! and commands write: none of them says yes in an operator's place.

use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use ipc::fault::{Code, Fault};
use ipc::id::QuestionId;
use ipc::peer::Principal;
use ipc::question::{ANSWER_SECONDS_MAX, Answered, QuestionPage, Reply};
use serde::Deserialize;

use super::AnswerError;
use crate::Daemon;
use crate::sys::accounts::account;

/// Longest body: an answer has two short fields.
const BODY_BYTES_MAX: usize = 4096;

/// `operators` is the group whose members are.
pub fn router(daemon: Arc<Daemon>, operators: Option<u32>) -> Router {
    Router::new()
        .route("/v1/questions", get(page))
        .route("/v1/questions/{question}", post(answer))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .route_layer(middleware::from_fn_with_state(operators, only_operators))
        .with_state(daemon)
}

async fn only_operators(
    State(operators): State<Option<u32>>,
    Extension(peer): Extension<Principal>,
    request: Request,
    next: Next,
) -> Response {
    if may_answer(peer, Principal::own(), operators) {
        return next.run(request).await;
    }
    Fault::new(Code::Denied, format!("{peer} may not answer questions"))
        .with_hint(
            "it is for root, proxyd's own user and members of the socket's group \
             (cleanhands-operators)",
        )
        .into_response()
}

/// A group that somebody was given for one program alone is no account's, hence the first look.
fn may_answer(peer: Principal, own: Principal, operators: Option<u32>) -> bool {
    let is_member = |group| peer.gid == group || account(peer.uid).gids.contains(&group);
    peer.uid == 0 || peer.uid == own.uid || operators.is_some_and(is_member)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct After {
    after: Option<u64>,
}

async fn page(
    State(daemon): State<Arc<Daemon>>,
    query: Result<Query<After>, QueryRejection>,
) -> Result<Json<QuestionPage>, Fault> {
    let Query(query) = query.map_err(|error| Fault::new(Code::Invalid, error.body_text()))?;
    Ok(Json(daemon.questions.page(query.after).await))
}

async fn answer(
    State(daemon): State<Arc<Daemon>>,
    Extension(peer): Extension<Principal>,
    Path(question): Path<String>,
    reply: Result<Json<Reply>, JsonRejection>,
) -> Result<Json<Answered>, Fault> {
    let invalid = |error: String| Fault::new(Code::Invalid, error);
    let question = QuestionId::parse(&question).map_err(|error| invalid(error.to_string()))?;
    let Json(reply) = reply.map_err(unread)?;
    if reply.for_seconds.is_some_and(|seconds| !(1..=ANSWER_SECONDS_MAX).contains(&seconds)) {
        return Err(invalid(format!("for_seconds is 1 to {ANSWER_SECONDS_MAX}")));
    }
    // In a task of its own: what was taken from the open ones is answered, whoever goes away.
    let answering = tokio::spawn({
        let (daemon, question) = (Arc::clone(&daemon), question.clone());
        async move { daemon.questions.answer(&daemon, question, reply, peer).await }
    });
    let ended = answering.await.map_err(|error| Fault::new(Code::Internal, error.to_string()))?;
    let others = ended.map_err(|error| match error {
        AnswerError::Missing(_) => Fault::new(Code::NotFound, error.to_string()),
        AnswerError::Audit(_) => Fault::new(Code::Unavailable, error.to_string()),
    })?;
    Ok(Json(Answered { question, answer: reply.answer, others }))
}

fn unread(rejection: JsonRejection) -> Fault {
    if rejection.status() == http::StatusCode::PAYLOAD_TOO_LARGE {
        let text = format!("the body is longer than {BODY_BYTES_MAX} bytes");
        return Fault::new(Code::TooLarge, text);
    }
    Fault::new(Code::Invalid, rejection.body_text())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_proxyds_own_user_and_operators_answer_and_nobody_else() {
        let own = Principal::own();
        let proxyd = Principal { uid: 4_000_001, gid: 4_000_001, ..own };
        let other = Principal { uid: 4_000_002, gid: 4_000_002, ..own };

        assert!(may_answer(Principal { uid: 0, ..other }, proxyd, None));
        assert!(may_answer(proxyd, proxyd, None));
        assert!(may_answer(other, proxyd, Some(other.gid)));
        assert!(!may_answer(other, proxyd, Some(proxyd.gid)));
        assert!(!may_answer(other, proxyd, None));
    }
}
