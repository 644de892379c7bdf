//! The only error that crosses a socket: a code for programs, a text safe for the caller, a hint.
//!
//! A fault never holds a secret: whoever makes one writes its text from names only.

use serde::{Deserialize, Serialize};

/// What went wrong, as the caller may know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Fault {
    pub code: Code,
    /// What failed, which thing, why.
    pub text: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// The kinds of fault. The caller's reaction hangs on these, never on the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The message or its fields are not as documented. 400.
    Invalid,
    /// The peer may not do this. 403.
    Denied,
    /// No such thing, for this peer. 404.
    NotFound,
    /// It clashes with what is there: an id in use, an old fencing number. 409.
    Conflict,
    /// A stated limit is exceeded. 413.
    TooLarge,
    /// Something it needs is absent: a secret, a kernel feature, a policy. 422.
    Missing,
    /// A stated number of things is in use. 429.
    Busy,
    /// Our own failure. 500.
    Internal,
    /// Another daemon or the disk does not answer. 503.
    Unavailable,
}

impl Code {
    /// The HTTP status that carries this code.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Denied => 403,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::Missing => 422,
            Self::Busy => 429,
            Self::Internal => 500,
            Self::Unavailable => 503,
        }
    }
}

impl Fault {
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), hint: None }
    }

    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The fault and its hint as a person reads them: two lines at most.
    pub fn lines(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}\n{hint}", self.text),
            None => self.text.clone(),
        }
    }
}
