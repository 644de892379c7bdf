//! Changes that are made at the same moment: what was answered with success is there.

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::daemon::Daemon;

const CLIENTS: usize = 40;

/// Each client adds a key of its own to the metadata.
async fn all_at_once(daemon: &Daemon, path: &str) -> Value {
    let add = |client: usize| {
        let key = format!("key-{}", client % 16);
        async move {
            let body = json!({ "metadata": { key: format!("{client}") } });
            daemon.post(path, body).await.ok();
        }
    };
    join_all((0..CLIENTS).map(add)).await;
    daemon.get(path).await.ok()["metadata"].clone()
}

fn keys(metadata: &Value) -> usize {
    let keys = metadata.as_object().unwrap().keys();
    keys.filter(|key| key.starts_with("key-")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_change_of_a_session_is_lost_and_its_log_says_the_same() {
    let daemon = Daemon::start(json!([])).await;
    let session = daemon.session(json!([])).await;

    let metadata = all_at_once(&daemon, &format!("/v1/sessions/{session}")).await;

    assert_eq!(keys(&metadata), 16, "{metadata}");
    let events = daemon.events(&session).await;
    let last = events.iter().rfind(|event| event["type"] == "session.updated").unwrap();
    assert_eq!(last["metadata"], metadata, "{last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_change_of_an_environment_is_lost() {
    let daemon = Daemon::start(json!([])).await;
    let made = daemon.post("/v1/environments", json!({ "name": "e" })).await.ok();

    let path = format!("/v1/environments/{}", made["id"].as_str().unwrap());
    let metadata = all_at_once(&daemon, &path).await;

    assert_eq!(keys(&metadata), 16, "{metadata}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_change_of_an_agent_is_lost() {
    let daemon = Daemon::start(json!([])).await;
    let made = daemon.post("/v1/agents", json!({ "name": "a", "model": "m" })).await.ok();

    let path = format!("/v1/agents/{}", made["id"].as_str().unwrap());
    let metadata = all_at_once(&daemon, &path).await;

    assert_eq!(keys(&metadata), 16, "{metadata}");
    let agent = daemon.get(&path).await.ok();
    assert_eq!(agent["version"], 1 + CLIENTS, "{agent}");
}
