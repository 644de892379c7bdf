//! What every request to a model must keep, whatever became of its session.

use std::collections::HashSet;

use harnessd::context::Prompt;
use serde_json::Value;

/// What is wrong with a prompt; nothing, it is to be hoped.
pub fn problems(prompt: &Prompt, may_end_with_the_model: bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut ids = HashSet::new();
    for (place, message) in prompt.messages.iter().enumerate() {
        let role = if place % 2 == 0 { "user" } else { "assistant" };
        if message["role"] != role {
            found.push(format!("message {place} is not the {role}'s"));
        }
        let content = blocks(message);
        if content.is_empty() {
            found.push(format!("message {place} is empty"));
        }
        for block in content {
            if block["type"] == "text" && block["text"].as_str().is_none_or(|t| t.trim().is_empty())
            {
                found.push(format!("message {place} has an empty text"));
            }
        }
        let used = texts(content, "tool_use", "id");
        for id in &used {
            if !ids.insert(id.clone()) {
                found.push(format!("message {place} uses id {id} again"));
            }
        }
        let next = prompt.messages.get(place + 1).map(blocks).unwrap_or_default();
        let first = &next[..next.len().min(used.len())];
        if texts(first, "tool_result", "tool_use_id") != used {
            found.push(format!("message {place}: {used:?} are not answered next and first"));
        }
        if role == "user" {
            let before = place.checked_sub(1).map(|p| blocks(&prompt.messages[p]));
            let asked = before.map(|b| texts(b, "tool_use", "id")).unwrap_or_default();
            if texts(content, "tool_result", "tool_use_id") != asked {
                found.push(format!("message {place} has results that nothing asked for"));
            }
        }
        let goes_on = may_end_with_the_model && place + 1 == prompt.messages.len();
        if role == "assistant" && !goes_on {
            found.extend(pairs_of_the_server(place, content));
        }
    }
    if !may_end_with_the_model && prompt.messages.len().is_multiple_of(2) {
        found.push("the user does not have the last word".to_owned());
    }
    found
}

fn pairs_of_the_server(place: usize, content: &[Value]) -> Vec<String> {
    let mut found = Vec::new();
    let used = texts(content, "server_tool_use", "id");
    if texts(content, "web_search_tool_result", "tool_use_id") != used {
        found.push(format!("message {place}: a server's tool without its result, or the reverse"));
    }
    if content.last().is_some_and(|block| block["type"] == "thinking") {
        found.push(format!("message {place} ends with thinking"));
    }
    let unsigned = |b: &&Value| b["type"] == "thinking" && b["signature"] == "";
    if content.iter().any(|block| unsigned(&block)) {
        found.push(format!("message {place} has thinking that was cut off"));
    }
    found
}

fn blocks(message: &Value) -> &[Value] {
    message["content"].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn texts(content: &[Value], kind: &str, key: &str) -> Vec<String> {
    let of_kind = content.iter().filter(|block| block["type"] == kind);
    of_kind.map(|block| block[key].as_str().unwrap_or_default().to_owned()).collect()
}
