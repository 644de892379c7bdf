//! What the model is told about each tool: sandboxd's, and the client's own.
//!
//! The schemas are those of `agent_toolset_20260401`, sent as ordinary custom tools, so that any
//! server of the Messages API can take them.

use serde_json::{Value, json};

use crate::log::Tool;

/// The definition of one tool, in the order of keys that never changes.
pub fn definition(tool: &Tool) -> Value {
    match tool {
        Tool::Sandbox { name, .. } => {
            let (description, input_schema) = sandbox_tool(name);
            json!({ "name": name, "description": description, "input_schema": input_schema })
        }
        Tool::Custom { name, description, input_schema }
        | Tool::Mcp { name, description, input_schema, .. } => {
            json!({ "name": name, "description": description, "input_schema": input_schema })
        }
    }
}

fn sandbox_tool(name: &str) -> (&'static str, Value) {
    match name {
        "bash" => (BASH, bash()),
        "read" => (READ, read()),
        "write" => (WRITE, write()),
        "edit" => (EDIT, edit()),
        "glob" => (GLOB, glob()),
        "grep" => (GREP, grep()),
        "web_fetch" => (WEB_FETCH, web_fetch()),
        // Not made by the API; a log of a later version may hold one.
        _ => ("A tool of the sandbox.", json!({ "type": "object" })),
    }
}

const BASH: &str = "Runs a command in a bash shell inside the sandbox. The shell is kept between \
    calls: directory, variables and functions persist. Standard input is empty; standard output \
    and standard error come back merged. The working directory is /workspace. After a timeout or \
    `exit`, call with restart: true.";
const READ: &str = "Reads a text file, an image (png, jpg, gif, webp) or a PDF from the sandbox.";
const WRITE: &str = "Writes a file in the sandbox, creating parent directories; overwrites.";
const EDIT: &str = "Replaces a text in a file in the sandbox. old_string must occur exactly once, \
    unless replace_all is true.";
const GLOB: &str = "Finds files in the sandbox by a pattern such as **/*.rs, newest first.";
const GREP: &str = "Searches files in the sandbox for a regular expression; answers with lines of \
    the form path:line:text.";
const WEB_FETCH: &str = "Fetches one page of the web by its address and gives its text (HTML is \
    made readable), or the image or PDF that it is. Only hosts that the environment allows are \
    reached.";

fn bash() -> Value {
    json!({
        "type": "object",
        "properties": {
            "command": { "type": "string", "description": "The command to run." },
            "restart": { "type": "boolean", "description": "Starts a new shell." },
            "timeout_ms": {
                "type": "integer",
                "description": "Milliseconds after which the command is killed."
            }
        }
    })
}

fn read() -> Value {
    json!({
        "type": "object",
        "properties": {
            "file_path": { "type": "string" },
            "view_range": {
                "type": "array",
                "items": { "type": "integer" },
                "description": "First and last line, from 1; a last line of -1 means the end."
            }
        },
        "required": ["file_path"]
    })
}

fn write() -> Value {
    json!({
        "type": "object",
        "properties": {
            "file_path": { "type": "string" },
            "content": { "type": "string" }
        },
        "required": ["file_path", "content"]
    })
}

fn edit() -> Value {
    json!({
        "type": "object",
        "properties": {
            "file_path": { "type": "string" },
            "old_string": { "type": "string" },
            "new_string": { "type": "string" },
            "replace_all": { "type": "boolean" }
        },
        "required": ["file_path", "old_string", "new_string"]
    })
}

fn glob() -> Value {
    json!({
        "type": "object",
        "properties": {
            "pattern": { "type": "string" },
            "path": { "type": "string", "description": "Where to begin; else /workspace." }
        },
        "required": ["pattern"]
    })
}

fn web_fetch() -> Value {
    json!({
        "type": "object",
        "properties": {
            "url": { "type": "string", "description": "An http or https address." }
        },
        "required": ["url"]
    })
}

fn grep() -> Value {
    json!({
        "type": "object",
        "properties": {
            "pattern": { "type": "string", "description": "A regular expression." },
            "path": { "type": "string", "description": "Where to search; else /workspace." }
        },
        "required": ["pattern"]
    })
}
