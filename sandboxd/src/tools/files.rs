//! The file tools' common door: one encoded request in, one encoded reply out.
//!
//! [`perform`] runs inside the cell, in a confined child of its first process: plain blocking code
//! with the rights of the sandbox's own commands. What sandboxd sends is well formed; what lies in
//! the workspace is not to be trusted, so nothing here panics on it, waits on it or reads it
//! without bound.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ipc::sandbox::Content;
use serde::{Deserialize, Serialize};

use super::reach::Reach;
use super::{edit, fetch, glob, grep, read, spill, write};

/// Longest reply of [`perform`]: a document of 20 MiB in base64 and its frame.
pub const REPLY_BYTES_MAX: usize = 28 * 1024 * 1024;

/// One file tool to perform.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// Where paths may lead, as the sandbox sees it; relative ones start at the first.
    pub roots: Vec<PathBuf>,
    /// A search that takes longer stops with what it has.
    pub search_ms_max: u64,
    pub action: Action,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    Read(read::Input),
    Write(write::Input),
    Edit(edit::Input),
    Glob(glob::Input),
    Grep(grep::Input),
    WebFetch(fetch::Input),
    /// Not a tool: keeps a piece of a command's long output.
    Spill(spill::Piece),
}

/// What a file tool found or did.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    pub content: Vec<Content>,
    pub is_error: bool,
}

/// What a tool gives back: content, or the reason there is none.
pub type Outcome = Result<Content, String>;

/// A text for the model.
pub fn text(text: impl Into<String>) -> Content {
    Content::Text { text: text.into() }
}

impl Request {
    /// The request as bytes: the length of its JSON, the JSON, then `attached` as it is.
    pub fn encode(&self, attached: &[u8]) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("paths come from UTF-8 texts");
        let mut bytes = Vec::with_capacity(4 + json.len() + attached.len());
        let length = u32::try_from(json.len()).expect("inputs are bounded by the control socket");
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&json);
        bytes.extend_from_slice(attached);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let (json, attached) = rest.split_at_checked(length)?;
        Some((serde_json::from_slice(json).ok()?, attached))
    }
}

impl Action {
    fn name(&self) -> &'static str {
        match self {
            Self::Read(_) => "read",
            Self::Write(_) => "write",
            Self::Edit(_) => "edit",
            Self::Glob(_) => "glob",
            Self::Grep(_) => "grep",
            Self::WebFetch(_) => "web_fetch",
            Self::Spill(_) => "spill",
        }
    }
}

/// Performs one encoded request; runs inside the cell, confined.
pub fn perform(request: &[u8]) -> Vec<u8> {
    let reply = match Request::decode(request) {
        Some((request, attached)) => run(&request, attached),
        None => Reply { content: vec![text("the request is not readable")], is_error: true },
    };
    serde_json::to_vec(&reply).expect("a reply has string keys only and always encodes")
}

/// Reads what [`perform`] gave.
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, serde_json::Error> {
    serde_json::from_slice(bytes)
}

fn run(request: &Request, attached: &[u8]) -> Reply {
    let reach = Reach(&request.roots);
    let deadline = Instant::now() + Duration::from_millis(request.search_ms_max);
    let outcome = match &request.action {
        Action::Read(input) => read::perform(reach, input),
        Action::Write(input) => write::perform(reach, input),
        Action::Edit(input) => edit::perform(reach, input),
        Action::Glob(input) => glob::perform(reach, input, deadline),
        Action::Grep(input) => grep::perform(reach, input, deadline),
        Action::WebFetch(input) => fetch::perform(input, deadline),
        Action::Spill(piece) => spill::perform(reach, piece, attached),
    };
    match outcome {
        Ok(content) => Reply { content: vec![never_empty(content)], is_error: false },
        Err(reason) => {
            let reason = format!("{}: {reason}", request.action.name());
            Reply { content: vec![text(reason)], is_error: true }
        }
    }
}

/// The model's API refuses an empty text.
fn never_empty(content: Content) -> Content {
    match content {
        Content::Text { text: t } if t.is_empty() => text(super::NO_OUTPUT),
        other => other,
    }
}
