//! The tools a model may call, with the names, inputs and texts of `agent_toolset_20260401`.
//!
//! `bash` runs in a shell that lives as long as its session's sandbox ([`bash`], [`shell`]). The
//! file tools ([`read`], [`write`], [`edit`], [`glob`], [`grep`]) and `web_fetch` ([`fetch`]) are
//! performed inside the cell by [`files::perform`]. An input that is not as documented is an error
//! result for the model.

pub mod bash;
pub mod edit;
pub mod fetch;
pub mod files;
pub mod glob;
pub mod grep;
pub mod reach;
pub mod read;
pub mod shell;
pub mod spill;
pub mod write;

#[cfg(test)]
mod tests;

use serde_json::Value;

use files::Action;

/// Stands for an empty text, which the model's API refuses.
pub const NO_OUTPUT: &str = "(no output)";
/// What a search that found nothing says.
pub const NO_MATCHES: &str = "no matches";

/// A tool with its checked input.
#[derive(Debug)]
pub enum Tool {
    Bash(bash::Input),
    File(Action),
}

/// Looks a tool up and checks its input; the error is a text for the model.
pub fn parse(name: &str, input: &Value) -> Result<Tool, String> {
    fn of<T: serde::de::DeserializeOwned>(name: &str, input: &Value) -> Result<T, String> {
        T::deserialize(input).map_err(|e| format!("{name}: the input is not as documented: {e}"))
    }
    let tool = match name {
        "bash" => Tool::Bash(of::<bash::Raw>(name, input)?.try_into()?),
        "read" => Tool::File(Action::Read(of(name, input)?)),
        "write" => Tool::File(Action::Write(of(name, input)?)),
        "edit" => Tool::File(Action::Edit(of(name, input)?)),
        "glob" => Tool::File(Action::Glob(of(name, input)?)),
        "grep" => Tool::File(Action::Grep(of(name, input)?)),
        "web_fetch" => Tool::File(Action::WebFetch(of(name, input)?)),
        _ => return Err(format!("{name}: there is no such tool")),
    };
    Ok(tool)
}
