//! The fields of each event on the wire, without those that all events share.

use serde_json::{Map, Value, json};

use super::{budget, wire_blocks};
use crate::log::event::{
    Agent, Body, CallOutcome, ErrorKind, HandKind, Permission, RequestEnded, Retry, StopReason,
    ToolResult, ToolUse, Usage,
};
use crate::spending::Spending;

/// Name and fields of an event that the client sent; `None` for all others.
pub fn client_event(body: &Body) -> Option<(&'static str, Value)> {
    Some(match body {
        Body::UserMessage { content } => {
            ("user.message", json!({ "content": wire_blocks::all(content) }))
        }
        Body::UserInterrupt {} => ("user.interrupt", json!({})),
        Body::UserToolConfirmation { tool_use, allow, deny_message } => {
            let result = if *allow { "allow" } else { "deny" };
            let fields = json!({
                "tool_use_id": tool_use,
                "result": result,
                "deny_message": deny_message,
            });
            ("user.tool_confirmation", fields)
        }
        Body::UserCustomToolResult { tool_use, content, is_error } => {
            let fields = json!({
                "custom_tool_use_id": tool_use,
                "content": wire_blocks::all(content),
                "is_error": is_error,
            });
            ("user.custom_tool_result", fields)
        }
        _ => return None,
    })
}

/// Only what changed; metadata that became empty is left out, as the wire API does.
pub fn updated(
    agent: Option<&Agent>,
    title: &Option<Value>,
    metadata: &Option<Value>,
    budget_cents: Option<Option<u64>>,
) -> Value {
    let mut fields = Map::new();
    if let Some(agent) = agent {
        fields.insert("agent".to_owned(), agent.snapshot.clone());
    }
    if let Some(title) = title {
        fields.insert("title".to_owned(), title.clone());
    }
    let filled = |map: &&Value| map.as_object().is_some_and(|map| !map.is_empty());
    if let Some(metadata) = metadata.as_ref().filter(filled) {
        fields.insert("metadata".to_owned(), metadata.clone());
    }
    if let Some(cents) = budget_cents {
        fields.insert("budget".to_owned(), budget::wire(cents));
    }
    Value::Object(fields)
}

pub fn request_end(ended: &RequestEnded) -> Value {
    json!({
        "model_request_start_id": ended.request,
        "is_error": ended.failure.is_some(),
        "model_usage": {
            "input_tokens": ended.usage.input_tokens,
            "output_tokens": ended.usage.output_tokens,
            "cache_creation_input_tokens": ended.usage.cache_creation_input_tokens,
            "cache_read_input_tokens": ended.usage.cache_read_input_tokens,
        },
    })
}

pub fn tool_use(call: &ToolUse) -> (&'static str, Value) {
    // Clients expect a map; what a model wrote instead of one is shown inside one.
    let input = match &call.input {
        Value::Object(_) => call.input.clone(),
        other => json!({ "input": other }),
    };
    if call.hand == HandKind::Client {
        return ("agent.custom_tool_use", json!({ "name": call.name, "input": input }));
    }
    let mut fields = json!({ "name": call.name, "input": input });
    match call.permission {
        Permission::Allow => {
            fields["evaluated_permission"] = json!("allow");
            fields["evaluation"] = json!({ "type": "always_allow" });
        }
        Permission::Ask => {
            fields["evaluated_permission"] = json!("ask");
            fields["evaluation"] = json!({ "type": "always_ask" });
        }
        // No policy was consulted: the tool is unknown or disabled.
        Permission::Deny => fields["evaluated_permission"] = json!("deny"),
    }
    if let Some(target) = &call.mcp {
        fields["mcp_server_name"] = json!(target.server);
        fields["name"] = json!(target.tool);
        return ("agent.mcp_tool_use", fields);
    }
    ("agent.tool_use", fields)
}

pub fn tool_result(result: &ToolResult) -> (&'static str, Value) {
    let is_error = result.is_error || result.outcome != CallOutcome::Finished;
    let (kind, id) = match result.mcp {
        true => ("agent.mcp_tool_result", "mcp_tool_use_id"),
        false => ("agent.tool_result", "tool_use_id"),
    };
    let content = wire_blocks::all(&result.content);
    (kind, json!({ id: result.tool_use, "content": content, "is_error": is_error }))
}

pub fn session_error(error: ErrorKind, message: &str, retry: Retry) -> Value {
    let kind = match error {
        ErrorKind::Unknown => "unknown_error",
        ErrorKind::ModelOverloaded => "model_overloaded_error",
        ErrorKind::ModelRateLimited => "model_rate_limited_error",
        ErrorKind::ModelRequestFailed => "model_request_failed_error",
        ErrorKind::Billing => "billing_error",
        ErrorKind::McpConnectionFailed => "mcp_connection_failed_error",
        ErrorKind::McpAuthenticationFailed => "mcp_authentication_failed_error",
    };
    let retry = match retry {
        Retry::Retrying => "retrying",
        Retry::Exhausted => "exhausted",
        Retry::Terminal => "terminal",
    };
    json!({ "error": { "type": kind, "message": message, "retry_status": { "type": retry } } })
}

pub fn stop_reason(reason: &StopReason) -> Value {
    match reason {
        StopReason::EndTurn => json!({ "type": "end_turn" }),
        StopReason::RequiresAction { events } => {
            json!({ "type": "requires_action", "event_ids": events })
        }
        StopReason::RetriesExhausted => json!({ "type": "retries_exhausted" }),
        StopReason::Refusal => json!({ "type": "refusal" }),
        StopReason::BudgetReached => json!({ "type": "budget_reached" }),
    }
}

pub fn refusal(details: &Value) -> Value {
    json!({
        "type": "refusal",
        "category": details.get("category").and_then(Value::as_str),
        "explanation": details.get("explanation").and_then(Value::as_str),
    })
}

/// Tokens, costs and time of a whole session. Costs are null where something had no price.
pub fn session_usage(usage: &Usage, spending: &Spending, active_millis: i64) -> Value {
    json!({
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_input_tokens": usage.cache_read_input_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.cache_creation_input_tokens,
            "ephemeral_1h_input_tokens": 0,
        },
        "list_cost": spending.list_cost_cents().map(budget::money),
        "active_seconds": seconds(active_millis),
        "server_tool_use": { "web_search_requests": 0, "web_fetch_requests": 0 },
    })
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds of a session fit a double exactly")]
pub fn seconds(millis: i64) -> f64 {
    millis as f64 / 1000.0
}
