//! The provider `scripted`: replays a file, for tests and the demo. No network, no key.
//!
//! Stateless like a real model: which turn it is, it sees from the request, as the number of the
//! assistant's messages in it. Answers stream piece by piece, so that what shows them can be seen
//! to work.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Answer, BlockKind, Delta, Model, Sink};
use crate::context::Prompt;
use crate::log::{Failure, Usage};
use crate::sys;

/// A script is read whole; it is a handful of turns.
const SCRIPT_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Why a script cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    #[error("cannot read script {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("script {path}: {source}")]
    Malformed { path: PathBuf, source: serde_json::Error },
}

/// What the model says, turn by turn.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    turns: Vec<Turn>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    #[serde(default)]
    text: String,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    tools: Vec<ToolCall>,
    /// The latest tool results must contain this; else the script says so and stops.
    #[serde(default)]
    expect: Option<String>,
    /// Between two pieces of text.
    #[serde(default = "fifteen")]
    chunk_ms: u64,
    /// Before the first piece.
    #[serde(default = "fifty")]
    first_token_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolCall {
    name: String,
    input: Value,
}

fn fifteen() -> u64 {
    15
}

fn fifty() -> u64 {
    50
}

impl Script {
    pub fn load(path: &Path) -> Result<Self, ScriptError> {
        let read = |source| ScriptError::Read { path: path.to_owned(), source };
        let file = sys::file::open_regular(path).map_err(read)?;
        let text = sys::file::read_bounded(&file, SCRIPT_BYTES_MAX).map_err(read)?;
        serde_json::from_slice(&text)
            .map_err(|source| ScriptError::Malformed { path: path.to_owned(), source })
    }
}

/// A model that says what its script says.
pub struct Scripted {
    script: Arc<Script>,
}

impl Scripted {
    pub fn new(script: Arc<Script>) -> Self {
        Self { script }
    }

    async fn play(&self, prompt: Prompt, sink: Sink<'_>) -> Answer {
        let number = prompt.messages.iter().filter(|m| m["role"] == "assistant").count();
        let mut answer = Answer {
            message: Some(format!("msg_script_{number}")),
            model: Some("scripted".to_owned()),
            stop_reason: Some("end_turn".to_owned()),
            ..Answer::default()
        };
        let Some(turn) = self.script.turns.get(number) else {
            stream(&mut answer, "The script has ended.", 0, sink).await;
            return answer;
        };
        tokio::time::sleep(Duration::from_millis(turn.first_token_ms)).await;
        if let Some(missing) = turn.expect.as_deref().filter(|e| !results_contain(&prompt, e)) {
            let text = format!(
                "Turn {number} of the script expected the tool results to contain \
                                {missing:?}, and they do not. Stopping here."
            );
            stream(&mut answer, &text, turn.chunk_ms, sink).await;
            return answer;
        }
        if let Some(thinking) = &turn.thinking {
            sink(Delta::Started { block: answer.blocks.len(), kind: BlockKind::Other });
            answer.blocks.push(json!({
                "type": "thinking",
                "thinking": thinking,
                "signature": format!("script-{number}"),
            }));
        }
        if !turn.text.is_empty() {
            stream(&mut answer, &turn.text, turn.chunk_ms, sink).await;
        }
        for (place, tool) in turn.tools.iter().enumerate() {
            sink(Delta::Started { block: answer.blocks.len(), kind: BlockKind::Tool });
            answer.blocks.push(json!({
                "type": "tool_use",
                "id": format!("toolu_script_{number}_{place}"),
                "name": tool.name,
                "input": tool.input,
            }));
            answer.stop_reason = Some("tool_use".to_owned());
        }
        // Four bytes for one token, as a rule of thumb; a script has no tokens of its own.
        let tokens = |bytes: usize| (bytes / 4 + 1) as u64;
        let asked: usize = prompt.messages.iter().map(|m| m.to_string().len()).sum();
        let said: usize = answer.blocks.iter().map(|b| b.to_string().len()).sum();
        answer.usage =
            Usage { input_tokens: tokens(asked), output_tokens: tokens(said), ..Usage::default() };
        answer
    }
}

impl Model for Scripted {
    fn ask<'a>(&'a self, prompt: Prompt, sink: Sink<'a>) -> BoxFuture<'a, Result<Answer, Failure>> {
        self.play(prompt, sink).map(Ok).boxed()
    }
}

async fn stream(answer: &mut Answer, text: &str, chunk_ms: u64, sink: Sink<'_>) {
    let block = answer.blocks.len();
    sink(Delta::Started { block, kind: BlockKind::Text });
    for (place, piece) in text.split_inclusive(' ').enumerate() {
        if place > 0 && chunk_ms > 0 {
            tokio::time::sleep(Duration::from_millis(chunk_ms)).await;
        }
        sink(Delta::Text { block, text: piece.to_owned() });
    }
    answer.blocks.push(json!({ "type": "text", "text": text }));
}

/// Whether the results in the last message contain `text`.
fn results_contain(prompt: &Prompt, text: &str) -> bool {
    let Some(blocks) = prompt.messages.last().and_then(|m| m["content"].as_array()) else {
        return false;
    };
    let results = blocks.iter().filter(|b| b["type"] == "tool_result");
    let mut parts = results.filter_map(|b| b["content"].as_array()).flatten();
    parts.any(|part| part["text"].as_str().is_some_and(|t| t.contains(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_that_is_no_file_or_has_no_end_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, long) = (dir.path().join("pipe"), dir.path().join("long"));
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        std::fs::File::create(&long).unwrap().set_len(SCRIPT_BYTES_MAX + 1).unwrap();
        for (path, why) in [
            (Path::new("/dev/zero"), "not a regular file"),
            (&pipe, "not a regular file"),
            (dir.path(), "not a regular file"),
            (&long, "longer than"),
        ] {
            let error = Script::load(path).unwrap_err().to_string();

            assert!(error.contains(why), "{}: {error}", path.display());
        }
    }

    #[test]
    fn the_script_in_the_manual_is_one_and_has_every_key() {
        let manual = include_str!("../../../systemd/man/harnessd.8.md");
        let example = manual.split("```json\n").nth(1).unwrap().split("```").next().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("script.json");
        std::fs::write(&path, example).unwrap();

        let script = Script::load(&path).unwrap();

        assert!(script.turns.len() > 1);
        // The error for a key that is none lists all that are.
        let keys = |text| serde_json::from_str::<Script>(text).unwrap_err().to_string();
        let listed = keys(r#"{"none": 1}"#)
            + &keys(r#"{"turns": [{"none": 1}]}"#)
            + &keys(r#"{"turns": [{"tools": [{"none": 1}]}]}"#);
        let words = listed.split('`').skip(1).step_by(2).filter(|word| *word != "none");
        for word in words {
            assert!(manual.contains(&format!("**{word}**")), "{word} is not in harnessd(8)");
        }
    }
}
