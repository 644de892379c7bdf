//! The wire API as a test drives it: plain JSON over harnessd's socket.

use std::path::Path;

use serde_json::{Value, json};

use crate::wait;

/// A client of one harnessd.
pub struct Api(ipc::http::Client);

impl Api {
    pub fn new(socket: &Path) -> Self {
        Self(ipc::http::Client::new(socket))
    }

    pub async fn post(&self, path: &str, body: Value) -> Value {
        let answer: Result<Value, _> = self.0.post(path, &body).await;
        answer.unwrap_or_else(|fault| panic!("POST {path}: {fault:?}"))
    }

    pub async fn get(&self, path: &str) -> Value {
        let answer: Result<Value, _> = self.0.get(path).await;
        answer.unwrap_or_else(|fault| panic!("GET {path}: {fault:?}"))
    }

    /// Makes environment, agent and session; gives the session's id.
    pub async fn session(&self, policy: &str) -> String {
        let environment = json!({
            "name": format!("{policy}-{}", ipc::id::random_text(8)),
            "config": { "type": "cloud", "networking": { "type": "unrestricted" } },
            "metadata": { "policy": policy },
        });
        let environment = self.post("/v1/environments", environment).await;
        let agent = json!({
            "name": "tester",
            "model": "scripted",
            "tools": [{ "type": "agent_toolset_20260401" }],
        });
        let agent = self.post("/v1/agents", agent).await;
        let session = json!({ "agent": agent["id"], "environment_id": environment["id"] });
        let session = self.post("/v1/sessions", session).await;
        session["id"].as_str().unwrap().to_owned()
    }

    pub async fn say(&self, session: &str, text: &str) {
        let event =
            json!({ "type": "user.message", "content": [{ "type": "text", "text": text }] });
        self.post(&format!("/v1/sessions/{session}/events"), json!({ "events": [event] })).await;
    }

    /// Every event so far. Survives a harnessd that is away for a moment.
    pub async fn events(&self, session: &str) -> Option<Vec<Value>> {
        let path = format!("/v1/sessions/{session}/events?limit=1000");
        let page: Value = self.0.get(&path).await.ok()?;
        Some(page["data"].as_array()?.clone())
    }

    /// Waits until the session is idle after its last user message; gives all events.
    pub async fn until_idle(&self, session: &str) -> Vec<Value> {
        wait::until_async("the session to be idle", || async {
            let events = self.events(session).await?;
            let last = |kind: &str| events.iter().rposition(|e| e["type"] == kind);
            let idle = last("session.status_idle")?;
            (idle > last("user.message")?).then_some(events)
        })
        .await
    }

    /// The log itself, as stored.
    pub async fn log(&self, session: &str) -> Vec<ipc::session::LogEvent> {
        let path = format!("/cleanhands/v1/sessions/{session}/log?after=0&limit=1000");
        let page = self.get(&path).await;
        serde_json::from_value(page["events"].clone()).unwrap()
    }

    /// What is wrong with the session's chain; empty when it is whole.
    pub async fn problems(&self, session: &str) -> Vec<String> {
        let report = self.get(&format!("/cleanhands/v1/sessions/{session}/verify")).await;
        serde_json::from_value(report["problems"].clone()).unwrap()
    }
}

/// The text of every tool result, in order.
pub fn tool_results(events: &[Value]) -> Vec<String> {
    events
        .iter()
        .filter(|e| e["type"] == "agent.tool_result")
        .map(|e| {
            let blocks = e["content"].as_array().cloned().unwrap_or_default();
            blocks.iter().filter_map(|b| b["text"].as_str()).collect::<Vec<_>>().join("\n")
        })
        .collect()
}
