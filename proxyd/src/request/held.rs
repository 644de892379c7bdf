//! Requests whose rule asks an operator: here they wait for the answer.

use super::{Asked, Scene, environment_gone, weight};
use crate::audit::Line;
use crate::lease::flow;
use crate::question::{self, Asking, Judged};
use crate::reply::Refusal;

/// Holds a request where its rule asks for that. What comes out is what holds now, which may be
/// another rule. Nearly none asks.
pub async fn answered(
    scene: &Scene,
    asked: &mut Asked<'_>,
    line: &mut Line,
    request: &flow::Request,
    judged: Judged,
) -> Result<Judged, Refusal> {
    if judged.permit.asks().is_none() {
        return Ok(judged);
    }
    // Nobody is asked about what has no room anyway.
    let (head, announced) = weight(asked);
    scene.lease.budgets.fits(judged.permit.budget(), head, announced)?;
    let judge = || {
        let current = scene.daemon.policies.current();
        let (policy, generation) = scene.lease.policy(&current).ok_or_else(environment_gone)?;
        Ok(Judged { permit: request.judge(&policy)?, policy, generation })
    };
    let asking = Asking {
        daemon: &scene.daemon,
        lease: &scene.lease,
        query: request.query.as_deref(),
        taken: &request.taken,
    };
    let gone = question::gone(&mut asked.body, &mut asked.responder);
    // In a box: a task is as large as the largest state that it can be in.
    let (judged, answer) = Box::pin(question::settle(asking, line, judge, gone)).await?;
    line.reason = answer.map(|answer| answer.words());
    Ok(judged)
}
