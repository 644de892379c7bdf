//! What the loop asks of proxyd beside the way out: a search for secrets, a place for chain heads.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use ipc::fault::Fault;
use ipc::http::Client;
use ipc::vault::{Head, ScrubReply, ScrubRequest};
use serde_json::Value;

/// proxyd, as the loop sees it.
pub trait Proxyd: Send + Sync {
    /// Masks secret values in texts.
    fn scrub(&self, request: ScrubRequest) -> BoxFuture<'_, Result<ScrubReply, Fault>>;

    /// Keeps the head of a session's chain where harnessd cannot reach it.
    fn head(&self, head: Head) -> BoxFuture<'_, Result<(), Fault>>;
}

impl Proxyd for Client {
    fn scrub(&self, request: ScrubRequest) -> BoxFuture<'_, Result<ScrubReply, Fault>> {
        async move { self.post("/v1/scrub", &request).await }.boxed()
    }

    fn head(&self, head: Head) -> BoxFuture<'_, Result<(), Fault>> {
        async move { self.post::<_, Value>("/v1/heads", &head).await.map(drop) }.boxed()
    }
}
