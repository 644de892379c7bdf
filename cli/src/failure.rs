//! Why a subcommand did not do what it was asked: a text, a hint, an exit status.
//!
//! Written once, where the command ends: to standard error as two lines, or as a JSON object.

use std::io::Write;
use std::process::ExitCode;

use ipc::fault::{Code, Fault};

/// It failed at run time.
pub const RUNTIME: u8 = 1;
/// Wrong arguments.
pub const USAGE: u8 = 2;
/// What was asked about is denied, or differs.
pub const OTHERWISE: u8 = 3;
/// This host lacks what sandboxes need.
pub const HOST: u8 = 77;
/// A configuration or policy file is wrong.
pub const CONFIGURATION: u8 = 78;
/// `exec` could not run its command at all.
pub const NOT_RUN: u8 = 125;
/// Interrupted by the person at the terminal.
pub const INTERRUPTED: u8 = 130;

/// Nobody reads standard output any more: 128 and SIGPIPE's number.
pub const CLOSED: u8 = 141;

/// The end of a subcommand that failed.
#[derive(Debug)]
pub struct Failure {
    pub status: u8,
    pub code: Code,
    pub text: String,
    pub hint: Option<String>,
}

impl Failure {
    pub fn new(text: impl Into<String>) -> Self {
        Self { status: RUNTIME, code: Code::Internal, text: text.into(), hint: None }
    }

    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    #[must_use]
    pub fn with_status(mut self, status: u8) -> Self {
        self.status = status;
        self
    }

    /// Writes the failure to standard error and gives the exit status.
    pub fn report(&self, json: bool) -> ExitCode {
        if self.status != CLOSED {
            // Nobody reads standard error: the exit status still tells.
            let _ = writeln!(std::io::stderr().lock(), "{}", self.shown(json));
        }
        ExitCode::from(self.status)
    }

    /// The failure as it is written: a line and its hint, or an object.
    pub fn shown(&self, json: bool) -> String {
        if json {
            let fault = Fault { code: self.code, text: self.text.clone(), hint: self.hint.clone() };
            return serde_json::json!({ "error": fault }).to_string();
        }
        let text = crate::term::printable(&self.text);
        match &self.hint {
            Some(hint) => format!("cleanhands: {text}\n{}", crate::term::printable(hint)),
            None => format!("cleanhands: {text}"),
        }
    }

    /// Wrong arguments, as they are told to programs: what is wrong, then how it is right.
    pub fn usage(error: &clap::Error) -> Self {
        use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
        let shown = error.render().to_string();
        let (text, hint) = if error.kind() == DisplayHelpOnMissingArgumentOrSubcommand {
            ("a subcommand is missing", shown.as_str())
        } else {
            let shown = shown.strip_prefix("error: ").unwrap_or(&shown);
            shown.split_once("\n\n").unwrap_or((shown, ""))
        };
        let hint = Some(hint.trim().to_owned()).filter(|hint| !hint.is_empty());
        Self { status: USAGE, code: Code::Invalid, hint, ..Self::new(text.trim()) }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self { status: RUNTIME, code: fault.code, text: fault.text, hint: fault.hint }
    }
}
