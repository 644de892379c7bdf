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
        if self.status == CLOSED {
            return ExitCode::from(CLOSED);
        }
        let mut out = std::io::stderr().lock();
        // Nobody reads standard error: the exit status still tells.
        let _ = if json {
            let fault = Fault { code: self.code, text: self.text.clone(), hint: self.hint.clone() };
            writeln!(out, "{}", serde_json::json!({ "error": fault }))
        } else {
            let text = crate::term::printable(&self.text);
            match &self.hint {
                Some(hint) => writeln!(out, "cleanhands: {text}\n{}", crate::term::printable(hint)),
                None => writeln!(out, "cleanhands: {text}"),
            }
        };
        ExitCode::from(self.status)
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self { status: RUNTIME, code: fault.code, text: fault.text, hint: fault.hint }
    }
}
