//! Identifiers: distinct types with one textual form each.
//!
//! An id is a prefix, an underscore, and 24 characters of lower-case base 32 drawn from the
//! kernel's random source (120 bits). Ids from other programs are accepted when they are 1 to 128
//! characters of `[A-Za-z0-9_-]`, so that one can be a file name, a path segment and a log field.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest id accepted, in bytes.
pub const ID_BYTES_MAX: usize = 128;

/// A text that is no id: empty, too long, or with a character outside `[A-Za-z0-9_-]`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not an id: {0:?}: an id has 1 to {ID_BYTES_MAX} characters of A-Z a-z 0-9 _ -")]
pub struct InvalidId(pub String);

fn check(text: &str) -> Result<(), InvalidId> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if text.is_empty() || text.len() > ID_BYTES_MAX || !text.bytes().all(legal) {
        return Err(InvalidId(text.chars().take(ID_BYTES_MAX).collect()));
    }
    Ok(())
}

/// Returns `len` random characters of lower-case base 32 (5 bits each).
pub fn random_text(len: usize) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut bytes = vec![0u8; len];
    getrandom::fill(&mut bytes).expect("the kernel's random source always answers after boot");
    bytes.iter().map(|b| char::from(ALPHABET[usize::from(b & 31)])).collect()
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Draws a new id.
            pub fn random() -> Self {
                Self(format!("{}_{}", $prefix, random_text(24)))
            }

            /// Accepts an id made elsewhere; see the module for what is legal.
            pub fn parse(text: &str) -> Result<Self, InvalidId> {
                check(text)?;
                Ok(Self(text.to_owned()))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                check(&text)?;
                Ok(Self(text))
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

ids! {
    /// One session: the append-only log of one task.
    SessionId = "sesn";
    /// One sandbox.
    SandboxId = "sbx";
    /// A principal's right to use proxyd.
    LeaseId = "lease";
    /// One tool call: the same in the log, the sandbox's receipt and the audit.
    CallId = "call";
    /// One exchange seen by proxyd, or one API request.
    RequestId = "req";
    /// What proxyd asks an operator about one request.
    QuestionId = "ask";
    /// A directory that a caller has shown it may use as a workspace.
    WorkspaceId = "ws";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_differ_and_parse_back() {
        let (a, b) = (CallId::random(), CallId::random());

        assert_ne!(a, b);
        assert_eq!(CallId::parse(a.as_str()), Ok(a));
    }

    #[test]
    fn refuses_text_that_could_leave_a_directory_or_a_log_field() {
        for bad in ["", "..", "a/b", "a b", "a\n", "é", &"x".repeat(129)] {
            assert!(CallId::parse(bad).is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn json_with_an_illegal_id_is_refused() {
        assert!(serde_json::from_str::<SandboxId>("\"../x\"").is_err());
    }
}
