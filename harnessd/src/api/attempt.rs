//! Changes made from what was read. When another change came between, this one is made again.

use std::sync::Arc;

use tokio::sync::Mutex;

use super::error::ApiError;
use crate::log::LogError;

/// Far more than those that change one thing at the same moment need: losers queue.
const TRIES_MAX: usize = 64;

/// Why an attempt came to nothing.
pub enum Failed {
    /// What it was made from is stored no more.
    Overtaken(ApiError),
    Refused(ApiError),
}

impl From<ApiError> for Failed {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

impl From<LogError> for Failed {
    fn from(error: LogError) -> Self {
        match error {
            LogError::Overtaken { .. } | LogError::Moved(_) => Self::Overtaken(error.into()),
            _ => Self::Refused(error.into()),
        }
    }
}

/// Attempts a change until nobody comes between. Whoever lost once waits for its `turn`, so that
/// only newcomers can come between again.
pub async fn until_done<T, F>(turn: &Arc<Mutex<()>>, attempt: impl Fn() -> F) -> Result<T, ApiError>
where
    F: Future<Output = Result<T, Failed>>,
{
    let mut outcome = attempt().await;
    if matches!(outcome, Err(Failed::Overtaken(_))) {
        let _turn = turn.lock().await;
        for _ in 0..TRIES_MAX {
            outcome = attempt().await;
            if !matches!(outcome, Err(Failed::Overtaken(_))) {
                break;
            }
        }
    }
    outcome.map_err(|failed| match failed {
        Failed::Overtaken(error) | Failed::Refused(error) => error,
    })
}
