//! Events to messages, valid for every server of the Messages API, whatever part of a log it is.
//!
//! What holds: roles alternate and the first is the user's; every tool use is answered in the next
//! user message, results first and in the order of the uses; an assistant's blocks come back
//! unchanged, but without those that no server takes back (thinking that was cut off, a server's
//! tool without its result); no text is empty; no two tool uses share an id. A result that is not
//! in the log is stated as unknown.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::Cut;
use crate::log::{Body, Event, ToolUse};

const LEFT_OUT: &str = "[The earlier part of this session is not shown here. Look at the \
    workspace before you rely on what is not shown.]";
const SUMMED_UP: &str = "[The earlier part of this session is not shown here. This is the summary \
    of it that you wrote:]";
const WAS_CUT: &str = "[Your answer was cut off by its length limit. A tool call that was not \
    complete was not run. Go on in smaller steps.]";
const NO_RESULT: &str = "no result was recorded: outcome unknown";

/// The messages of a log from `cut` on; behind them the user says `last`.
pub fn messages<'a, E>(events: E, cut: &Cut, last: Option<&str>) -> Vec<Value>
where
    E: IntoIterator<Item = &'a Event, IntoIter: Clone>,
{
    let events = events.into_iter();
    let said: HashMap<&str, &[Value]> = events
        .clone()
        .filter_map(|event| match &event.body {
            Body::UserMessage { content } => Some((event.id.as_str(), content.as_slice())),
            _ => None,
        })
        .collect();
    let mut talk = Talk::default();
    talk.open(events.clone(), cut, &said);
    for event in events.skip_while(|event| event.seq < cut.from) {
        talk.take(event, &said);
    }
    if let Some(last) = last {
        talk.user(&[text(last)]);
    }
    talk.finish()
}

/// The conversation as it grows.
#[derive(Default)]
struct Talk {
    messages: Vec<(Role, Vec<Value>)>,
    /// Blocks of the answer that is being read.
    answer: Vec<Value>,
    /// Tool uses of that answer: event id and the id in the request.
    used: Vec<(String, String)>,
    /// Tool uses of the last complete answer that await their results.
    awaiting: Vec<(String, String)>,
    results: HashMap<String, (Vec<Value>, bool)>,
    /// Ids of tool uses, which a request must not have twice.
    ids: HashSet<String>,
    /// The last answer was cut off, which is said behind its results.
    was_cut: bool,
    /// The last answer is to go on where it stopped.
    paused: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    User,
    Assistant,
}

impl Talk {
    /// What stands in front when the context does not begin with the session.
    fn open<'a>(
        &mut self,
        mut events: impl Iterator<Item = &'a Event> + Clone,
        cut: &Cut,
        said: &HashMap<&str, &[Value]>,
    ) {
        if cut.from == 0 {
            return;
        }
        let summary = events.clone().find_map(|event| match &event.body {
            Body::Summary(summary) if cut.summary == Some(event.seq) => Some(summary),
            _ => None,
        });
        let mut content = match summary {
            Some(summary) => vec![text(SUMMED_UP), text(&summary.text)],
            None => vec![text(LEFT_OUT)],
        };
        let turn = cut.turn.map_or(0, |turn| turn.seq);
        let began = events.find(|event| event.seq == turn && turn < cut.from);
        if let Some(Body::Processed { events }) = began.map(|event| &event.body) {
            let words = events.iter().filter_map(|id| said.get(id.as_str()));
            content.extend(words.flat_map(|blocks| blocks.iter().cloned()));
        }
        self.user(&content);
    }

    fn take(&mut self, event: &Event, said: &HashMap<&str, &[Value]>) {
        match &event.body {
            Body::Processed { events } => {
                for content in events.iter().filter_map(|id| said.get(id.as_str())) {
                    self.user(content);
                }
            }
            Body::AgentMessage { content, .. } => self.answer.extend(content.iter().cloned()),
            Body::AgentThinking { blocks, .. } => self.answer.extend(blocks.iter().cloned()),
            Body::ToolUse(used) => self.tool_use(&event.id, used),
            Body::ModelRequestEnded(ended) if ended.failure.is_none() => {
                self.end_answer();
                self.was_cut = ended.is_cut();
                self.paused = ended.stop_reason.as_deref() == Some("pause_turn");
            }
            Body::ToolResult(result) => {
                self.result(&result.tool_use, &result.content, result.is_error);
            }
            Body::UserCustomToolResult { tool_use, content, is_error } => {
                self.result(tool_use, content, *is_error);
            }
            _ => {}
        }
    }

    fn user(&mut self, content: &[Value]) {
        self.answer_tool_uses();
        let content = content.iter().filter(|block| !is_empty_text(block)).cloned().collect();
        self.push(Role::User, content);
    }

    fn tool_use(&mut self, event: &str, used: &ToolUse) {
        let id = match self.ids.insert(used.model_id.clone()) {
            true => used.model_id.clone(),
            // Some servers count from one in every answer. Ours is unique.
            false => used.call.to_string(),
        };
        let mut input = used.input.clone();
        if !input.is_object() {
            // It was refused for that; sent back as it is, the request would be.
            input = json!({ "input": input });
        }
        self.answer.push(json!({
            "type": "tool_use",
            "id": id,
            "name": used.name,
            "input": input,
        }));
        self.used.push((event.to_owned(), id));
    }

    fn end_answer(&mut self) {
        self.answer_tool_uses();
        let mut answer = std::mem::take(&mut self.answer);
        answer.retain(|block| !is_empty_text(block));
        self.push(Role::Assistant, answer);
        self.awaiting = std::mem::take(&mut self.used);
    }

    fn result(&mut self, tool_use: &str, content: &[Value], is_error: bool) {
        // The first result counts: a later one came from somebody who did not know.
        self.results.entry(tool_use.to_owned()).or_insert((content.to_vec(), is_error));
    }

    fn answer_tool_uses(&mut self) {
        let mut blocks = Vec::new();
        for (event, id) in std::mem::take(&mut self.awaiting) {
            let (content, is_error) =
                self.results.remove(&event).unwrap_or_else(|| (vec![text(NO_RESULT)], true));
            blocks.push(tool_result(&id, content, is_error));
        }
        if std::mem::take(&mut self.was_cut) {
            blocks.push(text(WAS_CUT));
        }
        self.push(Role::User, blocks);
    }

    fn push(&mut self, role: Role, content: Vec<Value>) {
        if content.is_empty() {
            return;
        }
        if role == Role::User {
            self.paused = false;
        }
        match self.messages.last_mut() {
            Some((last, blocks)) if *last == role => blocks.extend(content),
            _ => self.messages.push((role, content)),
        }
    }

    fn finish(mut self) -> Vec<Value> {
        self.answer_tool_uses();
        let paused = self.paused;
        let mut whole = std::mem::take(&mut self.messages).into_iter().peekable();
        while let Some((role, mut content)) = whole.next() {
            if role == Role::Assistant {
                let goes_on = paused && whole.peek().is_none();
                make_acceptable(&mut content, goes_on);
            }
            self.push(role, content);
        }
        let message = |(role, content)| match role {
            Role::User => json!({ "role": "user", "content": content }),
            Role::Assistant => json!({ "role": "assistant", "content": content }),
        };
        self.messages.into_iter().map(message).collect()
    }
}

/// Takes out the blocks that a server would refuse to read back.
fn make_acceptable(content: &mut Vec<Value>, goes_on: bool) {
    let id = |block: &Value, key: &str| block[key].as_str().map(str::to_owned);
    let uses: HashSet<String> =
        content.iter().filter(|b| is_server_use(b)).filter_map(|b| id(b, "id")).collect();
    let answered: HashSet<String> = content
        .iter()
        .filter(|b| is_server_result(b))
        .filter_map(|b| id(b, "tool_use_id"))
        .collect();
    content.retain(|block| match block["type"].as_str() {
        // Its signature comes last: without one it was cut off.
        Some("thinking") => block["signature"].as_str().is_some_and(|s| !s.is_empty()),
        _ if is_server_use(block) => {
            goes_on || id(block, "id").is_some_and(|id| answered.contains(&id))
        }
        _ if is_server_result(block) => {
            id(block, "tool_use_id").is_some_and(|id| uses.contains(&id))
        }
        _ => true,
    });
    let thinks =
        |block: &Value| matches!(block["type"].as_str(), Some("thinking" | "redacted_thinking"));
    // A message must not end with a thought that led to nothing.
    while !goes_on && content.last().is_some_and(thinks) {
        content.pop();
    }
}

/// A tool that the provider runs: its result stands in the same message.
fn is_server_use(block: &Value) -> bool {
    matches!(block["type"].as_str(), Some("server_tool_use" | "mcp_tool_use"))
}

fn is_server_result(block: &Value) -> bool {
    let kind = block["type"].as_str().unwrap_or_default();
    kind != "tool_result" && kind.ends_with("_tool_result")
}

fn tool_result(id: &str, mut content: Vec<Value>, is_error: bool) -> Value {
    content.retain(|block| !is_empty_text(block));
    if content.is_empty() {
        content.push(text("(no output)"));
    }
    let mut block = json!({ "type": "tool_result", "tool_use_id": id, "content": content });
    if is_error {
        block["is_error"] = Value::Bool(true);
    }
    block
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

fn is_empty_text(block: &Value) -> bool {
    block["type"] == "text" && block["text"].as_str().is_none_or(|t| t.trim().is_empty())
}

#[cfg(test)]
#[path = "talk_tests.rs"]
mod tests;
