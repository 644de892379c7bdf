//! A mistake in a policy file: where, what, and what to do about it.
//!
//! Written for the operator who has just made it: the line itself, a caret, the nearest right key.

use core::fmt;
use core::ops::Range;

/// One finding. `Display` gives `file:line:column: message`, the line with a caret, the hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    pub severity: Severity,
    /// File name, or the whole path where a directory was read.
    pub file: String,
    /// From 1; 0 where the finding is about the file as a whole.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// How many characters the caret underlines.
    pub width: usize,
    pub message: String,
    /// The line of the file, control characters replaced.
    pub snippet: String,
    pub hint: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Legal, but most likely not meant.
    Warning,
    /// The file is refused.
    Error,
}

impl Diagnostic {
    /// A finding about a stretch of a file's text.
    pub(crate) fn at(file: &str, text: &str, span: Range<usize>, message: String) -> Self {
        let start = floor_char(text, span.start);
        let line_start = text[..start].rfind('\n').map_or(0, |at| at + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |at| start + at);
        let end = floor_char(text, span.end).clamp(start, line_end);
        Self {
            severity: Severity::Error,
            file: file.to_owned(),
            line: text[..start].matches('\n').count() + 1,
            column: text[line_start..start].chars().count() + 1,
            width: text[start..end].chars().count().max(1),
            message,
            snippet: masked(&printable(text[line_start..line_end].trim_end_matches('\r'))),
            hint: None,
        }
    }

    /// A finding about a file as a whole.
    pub(crate) fn whole(file: &str, message: String) -> Self {
        Self {
            severity: Severity::Error,
            file: file.to_owned(),
            line: 0,
            column: 0,
            width: 0,
            message,
            snippet: String::new(),
            hint: None,
        }
    }

    #[must_use]
    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.severity == Severity::Warning { "warning: " } else { "" };
        if self.line == 0 {
            write!(f, "{}: {kind}{}", self.file, self.message)?;
        } else {
            write!(f, "{}:{}:{}: {kind}{}", self.file, self.line, self.column, self.message)?;
            let gutter = self.line.to_string();
            // Tabs are kept, so that the caret stands below what it means.
            let indent: String = self
                .snippet
                .chars()
                .take(self.column - 1)
                .map(|c| if c == '\t' { '\t' } else { ' ' })
                .collect();
            write!(f, "\n {gutter} | {}", self.snippet)?;
            write!(f, "\n {:w$} | {indent}{}", "", "^".repeat(self.width), w = gutter.len())?;
        }
        match &self.hint {
            Some(hint) => write!(f, "\n{hint}"),
            None => Ok(()),
        }
    }
}

/// The nearest word to what was written, if it is near enough to be a slip.
pub(crate) fn nearest<'a>(written: &str, words: &[&'a str]) -> Option<&'a str> {
    let folded = written.to_ascii_lowercase().replace('_', "-");
    let (distance, word) =
        words.iter().map(|word| (edit_distance(&folded, word), *word)).min_by_key(|(d, _)| *d)?;
    let slip = distance <= 2 && distance < word.len().min(folded.len());
    let stem = folded.len() >= 3 && (word.starts_with(&folded) || folded.starts_with(word));
    (slip || stem).then_some(word)
}

/// Insertions, removals, replacements that turn one word into the other (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    // Long words are never slips of a key; the bound keeps hostile input cheap.
    if a.len() > 64 {
        return usize::MAX;
    }
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

fn floor_char(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// A line that is safe on a terminal: a policy file must not move the cursor.
fn printable(line: &str) -> String {
    line.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
}

/// Keys behind which somebody may have put a secret's value by mistake.
const TELLING: &[&str] = &["secret", "token", "password", "passwd", "key", "value", "auth"];

/// The line with whatever stands behind a telling key replaced: diagnostics go to logs.
fn masked(line: &str) -> String {
    let telling = |at: &usize| {
        let key = line[..*at].trim_end().rsplit([' ', ',', '{', '\t']).next().unwrap_or_default();
        let key = key.to_ascii_lowercase();
        TELLING.iter().any(|word| key.contains(word))
    };
    match line.match_indices('=').map(|(at, _)| at).find(telling) {
        None => line.to_owned(),
        Some(at) => {
            let hidden = |c: char| if c.is_whitespace() || "\"'{}".contains(c) { c } else { '*' };
            let (front, back) = line.split_at(at + 1);
            front.chars().chain(back.chars().map(hidden)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_position_line_caret_and_hint() {
        let text = "[sandbox]\nmemroy = \"2GiB\"\n";

        let shown = Diagnostic::at("dev.toml", text, 10..16, "unknown key \"memroy\"".into())
            .with_hint("did you mean \"memory\"?")
            .to_string();

        assert_eq!(
            shown,
            "dev.toml:2:1: unknown key \"memroy\"\n 2 | memroy = \"2GiB\"\n   | ^^^^^^\n\
             did you mean \"memory\"?"
        );
    }

    #[test]
    fn survives_spans_outside_the_text_and_inside_characters() {
        for span in [0..0, 1..1, 2..99, 99..120] {
            let found = Diagnostic::at("x.toml", "é\u{1b}[1m", span, "m".into());
            assert!(found.width >= 1);
            assert!(!found.to_string().contains('\u{1b}'));
        }
    }

    #[test]
    fn never_shows_what_stands_behind_a_telling_key() {
        for text in [
            "secret = \"SECRET-CANARY\"",
            "token = SECRET-CANARY",
            "x = { api_key = 'SECRET-CANARY', y = \"SECRET-CANARY\" }",
            "  \"Password\"\t= \"SECRET-CANARY",
        ] {
            let found = Diagnostic::at("x.toml", text, 0..1, "m".into());

            assert!(!found.to_string().contains("CANARY"), "{text}");
            assert_eq!(found.snippet.chars().count(), text.chars().count());
        }
        assert_eq!(masked("memory = \"2GiB\""), "memory = \"2GiB\"");
    }

    #[test]
    fn finds_the_nearest_word_but_not_a_far_one() {
        let words = ["hosts", "methods", "paths", "tool-timeout"];
        for (written, expected) in [
            ("host", Some("hosts")),
            ("mehtods", Some("methods")),
            ("tool_timeout", Some("tool-timeout")),
            ("Hosts", Some("hosts")),
            ("colour", None),
            ("x", None),
        ] {
            assert_eq!(nearest(written, &words), expected, "{written}");
        }
    }
}
