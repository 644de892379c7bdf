//! What a session is on the wire: its document, and what its log says about status and use.
//!
//! The document holds what the client named and the agent as it was resolved then; status, tokens
//! and times are read from the log, which is the only truth about them.

use ipc::id::{SessionId, WorkspaceId};
use ipc::session::METADATA_WORKSPACE;
use serde_json::{Value, json};

use super::ApiState;
use super::agent::Agent;
use super::error::ApiError;
use super::wire_bodies::{seconds, session_usage};
use super::{budget, history, mcp, resources, tools};
use crate::log::event::{self, Status};
use crate::log::objects::Object;
use crate::log::{Chain, now};

/// Reads a session's id from a path. What is no id names no session.
pub fn id(text: &str) -> Result<SessionId, ApiError> {
    SessionId::parse(text).map_err(|_| ApiError::not_found("session", text))
}

/// The workspace that a session's metadata names.
pub fn workspace(
    metadata: &std::collections::BTreeMap<String, String>,
) -> Result<Option<WorkspaceId>, ApiError> {
    let Some(text) = metadata.get(METADATA_WORKSPACE) else { return Ok(None) };
    let path = format!("metadata.{METADATA_WORKSPACE}");
    WorkspaceId::parse(text).map(Some).map_err(|error| ApiError::field(&path, error))
}

/// The agent as it runs in a session, and as the session's answers show it.
pub fn effective(agent: &Agent, id: &str, version: u64) -> event::Agent {
    let mut snapshot = json!({ "id": id, "type": "agent", "version": version });
    if let (Some(out), Value::Object(mut document)) = (snapshot.as_object_mut(), agent.document()) {
        document.shift_remove("metadata");
        out.extend(document);
    }
    event::Agent {
        model: agent.model.id.clone(),
        system: agent.system.clone(),
        tools: agent.tools.iter().flat_map(offered).collect(),
        mcp: mcp::effective(&agent.mcp_servers, &agent.tools),
        snapshot,
    }
}

/// The tools that one materialised entry gives to the model.
fn offered(tool: &Value) -> Vec<event::Tool> {
    if tool["type"] == mcp::TOOLSET {
        return Vec::new();
    }
    if tool["type"] == "custom" {
        let text = |key: &str| tool[key].as_str().unwrap_or_default().to_owned();
        return vec![event::Tool::Custom {
            name: text("name"),
            description: text("description"),
            input_schema: tool["input_schema"].clone(),
        }];
    }
    let configs = tool["configs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let enabled = configs.iter().filter(|config| config["enabled"] == true);
    let tool = |config: &Value| {
        let name = config["name"].as_str().filter(|name| tools::OFFERED.contains(name))?;
        let permission = match config["permission_policy"]["type"].as_str() {
            Some("always_allow") => event::Permission::Allow,
            // Anything else waits for a person: what cannot be read grants nothing.
            _ => event::Permission::Ask,
        };
        Some(event::Tool::Sandbox { name: name.to_owned(), permission })
    };
    enabled.filter_map(tool).collect()
}

/// The status that a client sees: a session whose events wait for the loop runs already.
pub fn status(chain: &Chain) -> Status {
    match chain.status {
        Status::Idle if chain.unsettled => Status::Running,
        status => status,
    }
}

/// The session object of an answer.
pub async fn wire(state: &ApiState, object: &Object) -> Result<Value, ApiError> {
    let log = state.engine.log();
    let session = id(&object.id)?;
    let chain = log.chain(&session).await?;
    let now = now();
    let fold = history::fold_after(log, &session, chain.events).await?;
    let (tokens, spending) = (fold.tokens(), fold.spending());
    let active_millis = fold.active_millis(&now);
    let status = status(&chain);
    let updated = std::cmp::max(&object.updated_at, &chain.updated_at);
    let end = if status == Status::Terminated { &chain.updated_at } else { &now };
    let body = &object.body;
    Ok(json!({
        "id": object.id,
        "type": "session",
        "status": status.as_str(),
        "title": body["title"],
        "metadata": body["metadata"],
        "agent": body["agent"],
        "environment_id": body["environment_id"],
        "resources": resources::resources_of(object),
        "vault_ids": [],
        "budget": budget::wire(spending.budget_cents()),
        "deployment_id": null,
        "outcome_evaluations": [],
        "stats": {
            "active_seconds": seconds(active_millis),
            "duration_seconds": seconds(millis_between(&object.created_at, end)),
        },
        "usage": session_usage(&tokens, &spending, active_millis),
        "created_at": object.created_at,
        "updated_at": updated,
        "archived_at": object.archived_at,
    }))
}

fn millis_between(from: &str, to: &str) -> i64 {
    let parse = |text: &str| text.parse::<jiff::Timestamp>().ok();
    match (parse(from), parse(to)) {
        (Some(from), Some(to)) => (to.as_millisecond() - from.as_millisecond()).max(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_enabled_tools_reach_the_model_and_ask_stays_ask() {
        let agent = Agent::create(&json!({
            "name": "n", "model": "m",
            "tools": [
                { "type": "agent_toolset_20260401", "default_config": { "enabled": false },
                  "configs": [
                    { "name": "bash", "enabled": true,
                      "permission_policy": { "type": "always_ask" } },
                    { "name": "read", "enabled": true } ] },
                { "type": "custom", "name": "ask", "description": "d",
                  "input_schema": { "type": "object" } },
            ],
        }))
        .unwrap();

        let effective = effective(&agent, "agent_1", 3);

        let names: Vec<&str> = effective.tools.iter().map(event::Tool::name).collect();
        assert_eq!(names, ["bash", "read", "ask"]);
        let ask = event::Permission::Ask;
        let bash = event::Tool::Sandbox { name: "bash".into(), permission: ask };
        assert_eq!(effective.tools[0], bash);
        assert_eq!(effective.snapshot["version"], 3);
        assert!(effective.snapshot.get("metadata").is_none());
    }
}
